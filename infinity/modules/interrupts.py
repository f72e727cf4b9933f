"""Ctrl-C waits while bookkeeping is half done.

Python raises KeyboardInterrupt between any two bytecodes: between moving pages and noting that they
moved, or between updating a unit and noting that it is up to date. Within `uninterrupted` the
signal is noted and handed to its handler at the end. Only the main thread runs Python's signal
handlers, so elsewhere it does nothing.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class _Uninterrupted:
    """Reentrant; there is one for the process, as there is one main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            # An interrupt up to here leaves everything as it was; from the swap on there is none.
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
    """A context within which SIGINT waits. May be nested."""
    return _UNINTERRUPTED
