"""Finds the module that produced a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class _Found(Exception):
    """Ends the search at the first module that produced a value that is not finite."""

    def __init__(self, name: str) -> None:
        self.name = name


def first_nonfinite_module(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Returns the name of the first module, in order of completion, whose output is not all finite.

    Runs `forward` once more under no_grad, with a hook on every module. A module completes before
    its parents, so the name is that of the smallest one. Returns None if every output is finite,
    for example if the loss itself overflowed. The random state does not change.
    """

    def hook(name: str) -> Callable[..., None]:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if not all(torch.isfinite(tensor).all() for tensor in _floating(output)):
                raise _Found(name)

        return check

    handles = [
        module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name
    ]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            forward()
    except _Found as found:
        return found.name
    finally:
        for handle in handles:
            handle.remove()
    return None


def _floating(value: Any) -> Iterator[torch.Tensor]:
    """Yields every floating-point tensor in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _floating(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _floating(inner)
