"""When a pass begins in a loop that does not call the model itself.

A call of the model is a pass, and begins one. Where parts are called (two encoders in a ModuleDict,
`model.encode` and a head) the order of uses repeats all the same: from the first part of a step to
the end of its backward. So a pass begins where the hooked module that began the last one is
entered again:
in training with a backward or a step in between, for one part may run several times in a forward;
without gradients at once.

A call of the model that follows parts (an embedding that is called beforehand) belongs to the pass
that they have begun. Pure: no torch, no clock. Kinds are "train" and "eval".
"""

from __future__ import annotations

from dataclasses import dataclass

# Where the first hooked module of a pass never comes again, passes begin all the same.
_MOST_BACKWARDS = 16


@dataclass(eq=False, slots=True)
class _Pass:
    """The last one of its kind. `first` is None where a call of the model began it."""

    first: str | None
    has_model: bool
    num_backwards: int = 0
    is_used: bool = True  # Since the last backward or step.


class Beginnings:
    """What was entered so far, as far as it decides where the next pass begins."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}

    def ask_model(self, kind: str) -> bool:
        """The model is called. Returns whether that begins a pass; else the last goes on."""
        here = self._passes.get(kind)
        if here is None or here.has_model or not here.is_used:
            self._passes[kind] = _Pass(None, has_model=True)
            return True
        here.has_model = True
        return False

    def ask_hooked(self, kind: str, name: str) -> bool:
        """A hooked module is entered, and the model is not running: as `ask_model`."""
        here = self._passes.get(kind)
        if here is None or self._is_over(here, kind, name):
            self._passes[kind] = _Pass(name, has_model=False)
            return True
        here.is_used = True
        return False

    def _is_over(self, here: _Pass, kind: str, name: str) -> bool:
        comes_again = here.first in (None, name) or here.num_backwards >= _MOST_BACKWARDS
        return comes_again and (kind == "eval" or not here.is_used)

    def end_backward(self) -> None:
        """A backward is over, or a step was made."""
        for each in self._passes.values():
            each.num_backwards += each.is_used
            each.is_used = False
