"""State of models of transformers beside the arguments and outputs of their blocks.

Caches of keys and values, and gradient checkpointing, are switched off: a repeated forward would
fill the caches again, and the schedule does the work of the checkpoints.

Note [Captured tensors]
  A model that is asked for `router_logits` (or `attentions`) activates a collector: a dict of lists
  in a context variable. Forward hooks inside the blocks append tensors to these lists, and the loss
  reads the lists after the last block (the auxiliary loss of a mixture of experts). These tensors
  are further outputs of the block. Every fiber runs in a context of its own, and so has a collector
  of its own.

Source: transformers 5.23, `utils/output_capturing.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError

# Arguments of transformers' layers that their forward fills.
_CACHES = (
    "past_key_values", "past_key_value", "layer_past", "cache_params", "past_buckets_states",
    "mems", "cache",
)  # fmt: skip
# An attribute of a model whose modules have the hooks.
HOOKS_INSTALLED = "_output_capturing_hooks_installed"


def _active_collector() -> Any:
    """Returns the context variable of transformers, or None without transformers."""
    if "transformers.utils.output_capturing" not in sys.modules:
        return None
    from infinity.private.transformers import active_collector

    return active_collector


class CapturedTensors:
    """The tensors that the forward of one block appends to the collector of its fiber."""

    def __init__(self) -> None:
        variable = _active_collector()
        collector = None if variable is None else variable.get()
        self._lists: dict[str, list[Any]] = {
            key: values for key, values in (collector or {}).items() if isinstance(values, list)
        }
        self._starts = {key: len(values) for key, values in self._lists.items()}

    def keys(self) -> tuple[str, ...]:
        """Returns the names of the lists."""
        return tuple(self._lists)

    def tensors(self) -> list[torch.Tensor]:
        """Returns what was appended since the start and needs a gradient, in a fixed order."""
        return [self._lists[key][index] for key, index in self._places()]

    def replace(self, tensors: list[torch.Tensor]) -> None:
        """Puts tensors in the place of those that `tensors` returned."""
        for (key, index), tensor in zip(list(self._places()), tensors, strict=True):
            self._lists[key][index] = tensor

    def _places(self) -> Iterator[tuple[str, int]]:
        for key, values in self._lists.items():
            for index in range(self._starts[key], len(values)):
                tensor = values[index]
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    yield key, index


@contextmanager
def captured_again(keys: tuple[str, ...]) -> Iterator[list[torch.Tensor]]:
    """Collects, in a repeated forward, the tensors that the first forward captured under `keys`.

    The list is filled at the end of the block.
    """
    found: list[torch.Tensor] = []
    variable = _active_collector() if keys else None
    if variable is None:
        yield found
        return
    token = variable.set({key: [] for key in keys})
    try:
        captured = CapturedTensors()
        yield found
        found += captured.tensors()
    finally:
        variable.reset(token)


@contextmanager
def without_caches_and_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switches off caches of keys and values, which repeated forwards would fill again, and
    gradient checkpointing, whose work the schedule does: it would repeat each block once more."""
    key, switched = "gradient_checkpointing", list[tuple[Any, str]]()
    switched += ((config, "use_cache") for config in _configs_of(model) if config.use_cache)
    switched += ((m, key) for m in model.modules() if m.__dict__.get(key) is True)
    for owner, key in switched:
        setattr(owner, key, False)
    try:
        yield
    finally:
        for owner, key in switched:
            setattr(owner, key, True)


def _configs_of(model: nn.Module) -> list[Any]:
    """Returns the configurations of transformers models in `model` that have a cache setting."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = [c for c in configs if isinstance(getattr(c, "use_cache", None), bool)]
    return list({id(config): config for config in found}.values())


def refuse_caches(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises UnsupportedError if the block with this name is called with a cache, which a repeated
    forward would fill again."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    for key, value in (*enumerate(args), *kwargs.items()):
        is_cache = cache is not None and isinstance(value, cache)
        if value is not None and (is_cache or key in _CACHES):
            raise UnsupportedError(
                f"{name} is called with {key if isinstance(key, str) else type(value).__name__}, "
                "which its repeated forward would change again; set use_cache=False for training"
            )
