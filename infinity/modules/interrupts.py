"""Delays Ctrl-C while bookkeeping is incomplete.

Python raises KeyboardInterrupt between any two bytecodes: for example between a move of pages and
the record of the move, or between an update of a unit and the record of the update. Inside
`uninterrupted` the signal is recorded and passed to its handler at the end. Only the main thread
runs Python's signal handlers, so `uninterrupted` has no effect in other threads.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class _Uninterrupted:
    """Reentrant. The process has one, as it has one main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            # An interrupt before this point changes nothing; after the swap none is raised.
            self._received = None
            self._handler = signal.getsignal(signal.SIGINT)
            if callable(self._handler):
                signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth or not callable(self._handler):
            return
        signal.signal(signal.SIGINT, self._handler)
        received, self._received = self._received, None
        if received is not None:
            self._handler(*received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame


_UNINTERRUPTED = _Uninterrupted()


def uninterrupted() -> _Uninterrupted:
    """Returns a context that delays SIGINT. Contexts may be nested."""
    return _UNINTERRUPTED
