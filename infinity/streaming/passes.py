"""The running passes of the model: a forward, a backward, or many small ones alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.observe import Track
from infinity.observe.tracer import Tracer
from infinity.private.torch import current_graph_task_id
from infinity.streaming.pass_starts import Beginnings

OUTSIDE_BACKWARD = -1


# Returns an id of the backward that is running in this thread, or OUTSIDE_BACKWARD. Every node of
# every backward asks, so it is the function of C++ itself.
current_backward: Callable[[], int] = current_graph_task_id


class Passes:
    """The running pass. Written by the engine, read by its parts.

    `is_in_forward`: the model's own code may change weights. `is_layer_major`: `forward_backward`
    takes several micro-batches through one block after the other. It marks the beginning and the
    end of the pass; the many small backward passes in it do not count. `is_graded`: a forward with
    gradients has begun since the last backward.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.is_in_forward = False
        self.is_layer_major = False
        self.is_graded = False
        self.beginnings = Beginnings()

    def begin_forward(self, kind: str) -> None:
        """`kind` is "train" or "eval"."""
        self.is_in_forward = True
        self.is_graded = self.is_graded or kind == "train"
        self._tracer.begin("forward", Track.PHASES, f"forward ({kind})")

    def end_forward(self) -> None:
        """Ends a forward, in the trace too unless a backward repeats it."""
        self.is_in_forward = False
        if current_backward() == OUTSIDE_BACKWARD:  # Not one that a backward repeats.
            self._tracer.end("forward")

    def break_off(self) -> None:
        """An exception may have ended the forward."""
        self.is_in_forward = False

    def begin_backward(self) -> None:
        """Begins a backward."""
        self.is_graded = False
        self._tracer.begin("backward", Track.PHASES, "backward")

    def end_backward(self) -> None:
        """Ends a backward."""
        self.beginnings.end_backward()
        self._tracer.end("backward")

    @contextmanager
    def layer_major(self) -> Iterator[None]:
        """Marks the passes of the block as layer-major."""
        self.is_layer_major = True
        try:
            yield
        finally:
            self.is_layer_major = False
