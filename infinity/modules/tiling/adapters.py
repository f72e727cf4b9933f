"""Adapters on packed experts that run as tiles: PEFT's `target_parameters`.

PEFT wraps the module of experts and, while it runs, puts `weight + scaling * lhs @ rhs` of all
experts in the place of the parameter. Of tiles there is no such parameter, and the sum would be the
whole that tiles avoid. So each tile gets the sum of its own experts, while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from infinity.modules.tiling.layers import Tiled


class Fold(Protocol):
    """Makes a tile's parameter as it runs: `weight` has the rows `rows` of the whole."""

    def __call__(self, weight: torch.Tensor, rows: slice) -> torch.Tensor: ...


_INSTEAD_OF = "_activate_lora"  # PEFT's own way to put the sum in the parameter's place.


class _Active(threading.local):
    """Folds by tiled module and attribute. Micro-batches inside one block are in several threads
    (`accumulate`), each with adapters of its own forward."""

    def __init__(self) -> None:
        self.folds: dict[int, dict[str, Fold]] = {}


_active = _Active()


def folds_of(module: nn.Module) -> Mapping[str, Fold]:
    """What adapters make of the module's parameters in the forward that is running."""
    return _active.folds.get(id(module), {})


def adapt_tiles(model: nn.Module) -> list[nn.Module]:
    """Makes PEFT's wrappers of tiled modules fold their adapters into the tiles; returns them."""
    wrappers = [each for each in model.modules() if _wraps_tiles(each)]
    for wrapper in wrappers:
        wrapper.__dict__[_INSTEAD_OF] = partial(_folded, wrapper)
    return wrappers


def leave_tiles(wrappers: list[nn.Module]) -> None:
    """Undoes `adapt_tiles`."""
    for wrapper in wrappers:
        wrapper.__dict__.pop(_INSTEAD_OF, None)


def _wraps_tiles(module: Any) -> bool:
    is_wrapper = hasattr(type(module), _INSTEAD_OF) and hasattr(module, "parameter_name")
    return is_wrapper and isinstance(module.get_base_layer(), Tiled)


@contextmanager
def _folded(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    if not adapters:
        yield
        return
    key, attribute = id(wrapper.get_base_layer()), wrapper.parameter_name
    _active.folds.setdefault(key, {})[attribute] = _fold_of(wrapper, adapters)
    try:
        yield
    finally:
        del _active.folds[key][attribute]
        if not _active.folds[key]:
            del _active.folds[key]


def _fold_of(wrapper: Any, adapters: list[str]) -> Fold:
    """The operations that PEFT runs for all experts, for some of them."""
    if len(adapters) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):
        lhs, rhs, scaling = wrapper.get_delta_factors(adapters[0])

        def fold(weight: torch.Tensor, rows: slice) -> torch.Tensor:
            with torch.autocast(device_type=weight.device.type, enabled=False):
                return torch.baddbmm(weight, lhs[rows], rhs[rows], alpha=scaling)

        return fold
    delta = wrapper.get_delta_weight(adapters[0])
    for name in adapters[1:]:
        delta = delta + wrapper.get_delta_weight(name)
    return lambda weight, rows: weight + delta[rows]
