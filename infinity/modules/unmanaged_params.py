"""Detects parameters that were added to a model after `infinity.offload` and that nobody trains.

An adapter or a head that is added later has parameters in plain memory. An optimizer of torch may
train them. Without such an optimizer they would silently keep their values.
"""

from __future__ import annotations

import weakref

from torch import nn

from infinity.errors import ConfigError
from infinity.modules.handle import Handle


class UnmanagedParams:
    """The parameters of a model that the engine does not own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._seen: dict[str, tuple[int, int]] = {}  # By name: identity and version.

    def refuse_untrained(self) -> None:
        """Raises ConfigError if a parameter had a gradient at this step and at the last one, and
        has not changed between them."""
        model = self._model()
        found: dict[str, tuple[int, int]] = {}
        for name, parameter in [] if model is None else model.named_parameters():
            if isinstance(parameter, Handle) or not parameter.requires_grad:
                continue
            if parameter.grad is not None:
                found[name] = id(parameter), parameter._version
        untrained = [name for name, state in found.items() if self._seen.get(name) == state]
        self._seen = found
        if untrained:
            raise ConfigError(
                f"{untrained[0]!r} and {len(untrained) - 1} others were added to the model after "
                "infinity.offload; they receive gradients, but no optimizer changes them. Add "
                "adapters and heads before infinity.offload, freeze them, or train them with an "
                "optimizer of torch.optim"
            )
