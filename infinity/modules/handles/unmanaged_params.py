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

from infinity.errors import ConfigError, listed
from infinity.modules.handles.handle import Handle


class UnmanagedParams:
    """The parameters of a model that the engine does not own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._seen: dict[str, tuple[int, int]] = {}  # By name: identity and version.
        # A fused optimizer changes no version, so the steps of optimizers are observed, too.
        self._observed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: set[int] = set()  # Identities; since the last `refuse_untrained`.

    def refuse_untrained(self, *, num_ranks: int = 1) -> None:
        """Raises ConfigError, before this step changes anything, if a parameter has a gradient and
        is in no optimizer of torch, or if no optimizer has changed it since the last step although
        it had a gradient then, too. Over ranks every gradient is refused, because it would not be
        averaged."""
        model = self._model()
        if model is None or not _has_unmanaged_gradient(model):
            self._seen = {}
            return
        found: dict[str, tuple[int, int]] = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, Handle) or not parameter.requires_grad:
                continue
            if parameter.grad is not None:
                found[name] = id(parameter), parameter._version
        if found and num_ranks > 1:
            raise ConfigError(
                f"{listed([*found])} came into the model after infinity.offload; each rank would "
                "train them by its own gradients, and the ranks would diverge. Add adapters and "
                "heads before infinity.offload, or freeze them"
            )
        untrained = self._untrained(found)
        if untrained:
            raise ConfigError(
                f"{listed(untrained)} came into the model after infinity.offload; they receive "
                "gradients, but no optimizer changes them. Add adapters and heads before "
                "infinity.offload, freeze them, or train them with an optimizer of torch.optim "
                "that exists before the step of infinity's optimizer"
            )
        self._seen = found
        self._stepped.clear()

    def _untrained(self, found: dict[str, tuple[int, int]]) -> list[str]:
        """Returns the names of parameters that no optimizer has, or that none has changed since the
        last step."""
        fresh = {n for n, state in found.items() if self._seen.get(n, (0, 0))[0] != state[0]}
        same = {n for n, state in found.items() if self._seen.get(n) == state}
        idle = {name for name in same if found[name][0] not in self._stepped}
        if not (fresh or idle):
            return []
        observed = {number for optimizer in self._observed for number in _numbers_in(optimizer)}
        new: set[int] = set()
        for optimizer in _optimizers():
            if optimizer not in self._observed:
                self._observed.add(optimizer)
                optimizer.register_step_post_hook(self._note_step)
                new.update(_numbers_in(optimizer))
        return [
            name
            for name, (number, _) in found.items()
            if (name in fresh and number not in new | observed)
            or (name in idle and number not in new)
        ]

    def _note_step(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        self._stepped.update(_numbers_in(optimizer))


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


def _optimizers() -> list[torch.optim.Optimizer]:
    """Returns all optimizers of torch.

    Looks through every object of the process, because nothing lists optimizers. Takes a fraction of
    a second; called when a parameter has its first gradient.
    """
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]


def _numbers_in(optimizer: torch.optim.Optimizer) -> Iterable[int]:
    """Yields the identities of the parameters of an optimizer. A group may have pairs of a name and
    a parameter."""
    for group in getattr(optimizer, "param_groups", ()):
        for item in group["params"]:
            yield id(item[1] if isinstance(item, tuple) else item)
