"""The running passes of the model: a forward, a backward, or many small ones alternately.

Note [Where a pass begins]
  A call of the model begins a pass. A loop may call parts instead (two encoders in a ModuleDict,
  `model.encode` and a head). The order of uses repeats then, too, from the first part of a step to
  the end of its backward. So a pass begins when the hooked module that began the last pass is
  entered again. In training, a backward or a step must lie in between, because one part may run
  several times in a forward. A call of the model after calls of parts (an embedding that is called
  before it) belongs to the pass that the parts have begun. Kinds are "train" and "eval".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.observe import Track
from infinity.observe.tracer import Tracer
from infinity.private.torch import current_graph_task_id

OUTSIDE_BACKWARD = -1

# After so many backwards any hooked module begins a pass, if the first one is never entered again.
_MOST_BACKWARDS = 16

# Returns an id of the backward that is running in this thread, or OUTSIDE_BACKWARD. Every node of
# every backward asks, so it is the function of C++ itself.
current_backward: Callable[[], int] = current_graph_task_id


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leaves `torch.inference_mode`: what is made in it and kept could not be written later.
    `torch.inference_mode(False)` alone would turn gradients on."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(eq=False, slots=True)
class _Pass:
    """The last pass of its kind. `first` is None if a call of the model began it."""

    first: str | None
    has_model: bool
    num_backwards: int = 0
    is_used: bool = True  # Since the last backward or step.


class Beginnings:
    """Records entered modules; decides where the next pass begins (Note [Where a pass begins])."""

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


class Passes:
    """The running pass. Written by the engine, read by its parts.

    `is_in_forward`: the model's own code may change weights. `is_layer_major`: `forward_backward`
    takes several micro-batches through one block after the other. It marks the beginning and the
    end of the pass; the many small backward passes in it do not count. `is_graded`: a forward with
    gradients has begun since the last backward.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.is_in_forward = False
        self.is_layer_major = False
        self.is_graded = False
        self.beginnings = Beginnings()

    def begin_forward(self, kind: str) -> None:
        """`kind` is "train" or "eval"."""
        self.is_in_forward = True
        self.is_graded = self.is_graded or kind == "train"
        self.tracer.begin("forward", Track.PHASES, f"forward ({kind})")

    def end_forward(self) -> None:
        """Ends a forward, in the trace too unless a backward repeats it."""
        self.is_in_forward = False
        if current_backward() == OUTSIDE_BACKWARD:  # Not one that a backward repeats.
            self.tracer.end("forward")

    def break_off(self) -> None:
        """An exception may have ended the forward."""
        self.is_in_forward = False

    def begin_backward(self) -> None:
        """Begins a backward."""
        self.is_graded = False
        self.tracer.begin("backward", Track.PHASES, "backward")

    def end_backward(self) -> None:
        """Ends a backward."""
        self.beginnings.end_backward()
        self.tracer.end("backward")

    @contextmanager
    def layer_major(self) -> Iterator[None]:
        """Marks the passes of the block as layer-major."""
        self.is_layer_major = True
        try:
            yield
        finally:
            self.is_layer_major = False
