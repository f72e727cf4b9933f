"""The threads that use one model: one of them runs a pass or a step at a time, the others wait.

A pass ends by a hook of the model, or by an exception that no hook sees (Ctrl-C). A thread that
waits therefore looks at the stack of the thread that it waits for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import CodeType, FrameType

from infinity.private.torch import engine_run_backward, module_call_impl

_CALL: CodeType = module_call_impl.__code__
_BACKWARD: CodeType = engine_run_backward.__code__
_LOOKS_S = 0.005  # The interval at which a thread looks whether the other one has ended.


def _stack_of(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _runs(thread: int, code: CodeType) -> bool:
    return any(frame.f_code is code for frame in _stack_of(thread))


def is_in_module(thread: int) -> bool:
    """Whether a thread runs a module."""
    return _runs(thread, _CALL)


def thread_of_backward() -> int:
    """Returns the identity of this thread, which runs a node of a backward. 0: a thread of a
    device, for a backward that another thread has called."""
    return get_ident() if _runs(get_ident(), _BACKWARD) else 0


def is_backward_elsewhere(threads: Collection[int]) -> bool:
    """Whether one of these threads, and not this one, runs a backward. 0: any thread."""
    candidates = sys._current_frames() if 0 in threads else threads
    return any(thread != get_ident() and _runs(thread, _BACKWARD) for thread in candidates)


class Turns:
    """The thread whose pass runs. `lock` is the engine's."""

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self._thread = 0  # 0: none.
        self._call = 0  # Identity of the frame that has the turn.

    @property
    def is_taken(self) -> bool:
        """Whether a thread has the turn."""
        return any(id(frame) == self._call for frame in _stack_of(self._thread))

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread has the turn."""
        return self._thread != get_ident() and self.is_taken

    @contextmanager
    def alone(self, backwards: Mapping[int, int]) -> Iterator[None]:
        """Holds the lock for the time of a `with` block, once no other thread has the turn or runs
        one of the `backwards`, by their threads. The caller does not hold the lock."""
        with self._ended:
            while self.is_elsewhere or is_backward_elsewhere(backwards.values()):
                self._ended.wait(_LOOKS_S)
            yield

    def take(self, code: CodeType = _CALL) -> None:
        """Takes the turn until the innermost frame of this code ends, unless a frame around it has
        the turn. Under the lock."""
        if not self.is_taken:
            self._thread, self._call = get_ident(), _frame_of(code)

    def end(self, code: CodeType = _CALL) -> None:
        """Ends the turn, if the innermost frame of this code has it."""
        with self._ended:
            if self._thread == get_ident() and self._call == _frame_of(code):
                self._thread = self._call = 0
                self._ended.notify_all()


def _frame_of(code: CodeType) -> int:
    return next((id(frame) for frame in _stack_of(get_ident()) if frame.f_code is code), 0)
