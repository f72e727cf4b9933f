"""Finds where a pass begins in a loop that does not call the model itself.

A call of the model begins a pass. A loop may call parts instead (two encoders in a ModuleDict,
`model.encode` and a head); the order of uses repeats then, too, from the first part of a step to
the end of its backward. So a pass begins when the hooked module that began the last pass is entered
again. In training, a backward or a step must lie in between, because one part may run several times
in a forward.

A call of the model after calls of parts (an embedding that is called beforehand) belongs to the
pass that the parts have begun. Pure: no torch, no clock. Kinds are "train" and "eval".
"""

from __future__ import annotations

from dataclasses import dataclass

# After so many backwards any hooked module begins a pass, if the first one is never entered again.
_MOST_BACKWARDS = 16


@dataclass(eq=False, slots=True)
class _Pass:
    """The last pass of its kind. `first` is None if a call of the model began it."""

    first: str | None
    has_model: bool
    num_backwards: int = 0
    is_used: bool = True  # Since the last backward or step.


class Beginnings:
    """Records entered modules, and decides where the next pass begins."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}

    def ask_model(self, kind: str) -> bool:
        """Records a call of the model. Returns whether it begins a pass, or continues the last
        one."""
        here = self._passes.get(kind)
        if here is None or here.has_model or not here.is_used:
            self._passes[kind] = _Pass(None, has_model=True)
            return True
        here.has_model = True
        return False

    def ask_hooked(self, kind: str, name: str) -> bool:
        """Records that a hooked module is entered outside a call of the model; see `ask_model`."""
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
        """Records the end of a backward, or a step."""
        for last in self._passes.values():
            last.num_backwards += last.is_used
            last.is_used = False
