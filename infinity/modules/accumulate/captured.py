"""Tensors that transformers records inside a block, such as the logits of a router.

A model of transformers that is asked for `router_logits` (or `attentions`) activates a collector: a
dict of lists in a context variable. Forward hooks inside the blocks append tensors to these lists,
and the loss reads the lists after the last block (the auxiliary loss of a mixture of experts).
These tensors are further outputs of the block. Every fiber runs in a context of its own, and so has
a collector of its own.

Source: transformers 5.23, `utils/output_capturing.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
