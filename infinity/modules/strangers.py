"""Parameters that came to a model after it was offloaded: the engine does not train them.

An adapter or a head that is added later has parameters of its own, in plain memory. Somebody else
may train them, with an optimizer of torch; if nobody does, they would stay as they are in silence.
"""

from __future__ import annotations

import weakref

from torch import nn

from infinity.errors import ConfigError
from infinity.modules.handle import Handle


class Strangers:
    """Finds parameters that get gradients and that nobody changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._seen: dict[str, tuple[int, int]] = {}  # By name: identity and version.

    def refuse_untrained(self) -> None:
        """At a step: raises ConfigError where one had a gradient at the last step, too, and is as
        it was then."""
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
                f"{untrained[0]!r} and {len(untrained) - 1} others came to the model after "
                "infinity.offload, get gradients, and no optimizer changes them; add adapters and "
                "heads before infinity.offload, freeze them, or train them with an optimizer of "
                "torch.optim"
            )
