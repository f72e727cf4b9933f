"""Detects parameters that were added to a model after `infinity.offload` and are not trained.

An adapter or a head that is added later has parameters in plain memory. An optimizer of torch may
train them. Without such an optimizer they would silently keep their values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.handle import Handle


class UnmanagedParams:
    """The parameters of a model that the engine does not own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._seen: dict[str, tuple[int, int]] = {}  # By name: identity and version.

    def refuse_untrained(self, *, num_ranks: int = 1) -> None:
        """Raises ConfigError, before this step changes anything, if a parameter has a gradient and
        is in no optimizer of torch, or if it has not changed since the last step although it had a
        gradient then, too. Over ranks every gradient is refused, because it would not be
        averaged."""
        model = self._model()
        if model is None or not _has_unmanaged_gradient(model):
            self._seen = {}
            return
        found: dict[str, tuple[int, int]] = {}
        fresh: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, Handle) or not parameter.requires_grad:
                continue
            if parameter.grad is not None:
                found[name] = id(parameter), parameter._version
                if self._seen.get(name, (0, 0))[0] != id(parameter):
                    fresh[id(parameter)] = name
        if found and num_ranks > 1:
            raise ConfigError(
                f"{next(iter(found))!r} and {len(found) - 1} others were added to the model after "
                "infinity.offload; each rank would train them by its own gradients, and the ranks "
                "would part. Add adapters and heads before infinity.offload, or freeze them"
            )
        untrained = [name for name, state in found.items() if self._seen.get(name) == state]
        if fresh:
            trained = _in_optimizers()
            untrained += [name for number, name in fresh.items() if number not in trained]
        if untrained:
            raise ConfigError(
                f"{untrained[0]!r} and {len(untrained) - 1} others were added to the model after "
                "infinity.offload; they receive gradients, but no optimizer changes them. Add "
                "adapters and heads before infinity.offload, freeze them, or train them with an "
                "optimizer of torch.optim that exists before the step of infinity's optimizer"
            )
        self._seen = found


def _has_unmanaged_gradient(model: nn.Module) -> bool:
    """Whether a parameter that is no handle has a gradient. Every step asks, so the walk makes no
    call for a module or a parameter."""
    waiting: list[nn.Module | None] = [model]
    seen = {id(model)}
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        for parameter in module._parameters.values():
            if parameter is None or isinstance(parameter, Handle):
                continue
            if parameter.requires_grad and parameter.grad is not None:
                return True
        for child in module._modules.values():
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return False


def _in_optimizers() -> set[int]:
    """Returns the identities of all parameters in optimizers of torch.

    Looks through every object of the process, because nothing lists optimizers. Takes a fraction of
    a second; called when a parameter has its first gradient.
    """
    return {
        id(parameter)
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)
        for group in getattr(found, "param_groups", ())
        for parameter in _parameters(group["params"])
    }


def _parameters(items: Iterable[object]) -> Iterable[object]:
    """Yields the parameters of a group, which may be pairs of a name and a parameter."""
    for item in items:
        yield item[1] if isinstance(item, tuple) else item
