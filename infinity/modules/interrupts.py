"""Delays Ctrl-C while bookkeeping is incomplete.

Python raises KeyboardInterrupt between any two bytecodes: for example between a move of pages and
the record of the move, or between an update of a unit and the record of the update. Inside
`uninterrupted` the signal is recorded and passed to its handler at the end. Only the main thread
runs Python's signal handlers, so `uninterrupted` has no effect in other threads.

A unit enters several of these blocks in a pass, and one for each gradient. They therefore call
the C functions behind `signal`, whose wrappers turn every handler into an enum and back.
"""

from __future__ import annotations

import importlib
import os
import threading
from signal import SIGINT
from threading import get_ident
from types import FrameType
from typing import Any

_signal: Any = importlib.import_module("_signal")  # CPython: what `signal` wraps.
_main_thread = threading.main_thread().ident


def _find_main_thread() -> None:
    global _main_thread
    _main_thread = threading.main_thread().ident


os.register_at_fork(after_in_child=_find_main_thread)  # The thread that forks is the main one.


class _Uninterrupted:
    """Reentrant. The process has one, as it has one main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if get_ident() != _main_thread:
            return
        if self._depth == 0:
            # An interrupt before this point changes nothing; after the swap none is raised.
            self._received = None
            self._handler = _signal.getsignal(SIGINT)
            if callable(self._handler):
                _signal.signal(SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if get_ident() != _main_thread:
            return
        self._depth -= 1
        if self._depth or not callable(self._handler):
            return
        _signal.signal(SIGINT, self._handler)
        received, self._received = self._received, None
        if received is not None:
            self._handler(*received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame


UNINTERRUPTED = _Uninterrupted()  # For code that runs for every gradient.


def uninterrupted() -> _Uninterrupted:
    """Returns a context that delays SIGINT. Contexts may be nested."""
    return UNINTERRUPTED
