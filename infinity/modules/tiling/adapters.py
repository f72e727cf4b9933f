"""Adapters on packed experts that run as tiles: PEFT's `target_parameters`.

PEFT wraps the module of experts. While the module runs, PEFT replaces the parameter by `weight +
scaling * lhs @ rhs` over all experts. Experts in tiles have no such parameter, and the sum would
need the memory that tiles avoid. Each tile therefore gets the sum of its own experts while it runs.
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
    """Maps a tile's parameter to the adapted parameter, for the rows [start, stop) of all
    experts."""

    def __call__(self, weight: torch.Tensor, rows: slice) -> torch.Tensor: ...


_INSTEAD_OF = "_activate_lora"  # PEFT's method that replaces the parameter by the sum.


class _Active(threading.local):
    """Active folds by tiled module and attribute. Micro-batches in one block run in several
    threads, each with the adapters of its own forward."""

    def __init__(self) -> None:
        self.folds: dict[int, dict[str, Fold]] = {}


_active = _Active()


def folds_of(module: nn.Module) -> Mapping[str, Fold]:
    """Returns the folds of the module's parameters that are active in the running forward."""
    return _active.folds.get(id(module), {})


def adapt_tiles(model: nn.Module) -> list[nn.Module]:
    """Makes PEFT's wrappers of tiled modules fold their adapters into the tiles; returns the
    wrappers."""
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
    """Returns PEFT's operations for all experts, as a function of a range of experts."""
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
