"""Delays Ctrl-C, and signals with handlers that may raise, while bookkeeping is incomplete.

Python calls handlers between any two bytecodes: for example between a move of pages and the record
of the move, or between an update of a unit and the record of the update. That of a DataLoader
raises at the end of a worker (SIGCHLD), that of a time limit at an alarm. Inside
`with UNINTERRUPTED` the signal is recorded and passed to its handler at the end. Only the main
thread runs Python's signal handlers, so the block has no effect in other threads.

A unit enters several of these blocks in a pass, and one for each gradient. They therefore call
the C functions behind `signal`, whose wrappers turn every handler into an enum and back.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
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
        self._delayed: tuple[int, ...] = tuple(
            map(int, (SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGUSR2, SIGCHLD))
        )
        self._handlers: list[tuple[int, Any]] = []  # That are replaced.
        self._received: list[tuple[Any, int, FrameType | None]] = []

    def __enter__(self) -> None:
        if get_ident() != _main_thread:
            return
        if self._depth == 0:
            self._received, self._handlers = [], []
            try:
                for number in self._delayed:
                    # An interrupt before the swap changes nothing; after it none is raised.
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self._handlers.append((number, handler))
                        _signal.signal(number, self._note)
            except BaseException:  # Of a signal whose turn to be delayed had not come.
                _restore(self._handlers)
                raise
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if get_ident() != _main_thread:
            return
        self._depth -= 1
        if self._depth:
            return
        others = self._handlers[1:]
        try:
            if len(others) == 1:  # A call less: a unit leaves several of these blocks.
                _signal.signal(*others[0])
            elif others:
                _restore(others)
        finally:
            if self._handlers:
                _signal.signal(*self._handlers[0])
        received, self._received = self._received, []
        if received:
            _deliver(received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = next(handler for of, handler in self._handlers if of == number)
        self._received.append((handler, number, frame))

    @contextmanager
    def but_at_checks(self) -> Iterator[None]:
        """Delays every signal that has a handler in Python now until the next `check`, or the end.
        A handler may raise whatever it likes there, and nowhere else."""
        if get_ident() != _main_thread:
            yield
            return
        before = self._delayed
        found = (n for n in signal.valid_signals() if callable(_signal.getsignal(n)))
        self._delayed = tuple(sorted({*before, *map(int, found)}))
        try:
            with self:
                yield
        finally:
            self._delayed = before

    def check(self) -> None:
        """Passes the signals that were delayed so far to their handlers."""
        if self._received and get_ident() == _main_thread:
            received, self._received = self._received, []
            _deliver(received)


def _restore(handlers: list[tuple[int, Any]]) -> None:
    """Sets all handlers, even if one that is set raises meanwhile."""
    if handlers:
        try:
            _signal.signal(*handlers[-1])
        finally:
            _restore(handlers[:-1])


def _deliver(received: list[tuple[Any, int, FrameType | None]]) -> None:
    """Passes delayed signals to their handlers, to each of them even if one raises."""
    try:
        handler, number, frame = received.pop(0)
        handler(number, frame)
    finally:
        if received:
            _deliver(received)


UNINTERRUPTED = _Uninterrupted()
