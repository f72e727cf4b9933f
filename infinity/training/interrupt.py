"""Signals: the first asks for an orderly end, a second that means it ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self

# Somebody wants an end: two of these, and it comes at once.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# An end is near: a terminal is gone, a scheduler warns, time is up. Some are sent again and again.
_NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
# torchrun sends its workers what the terminal has sent them already.
_FORWARDER_VARIABLE = "TORCHELASTIC_RUN_ID"
_FORWARDED_WITHIN_S = 5.0


class Interrupt:
    """While entered, signals set `received` instead of ending the process.

    A second SIGINT, SIGTERM or SIGQUIT raises KeyboardInterrupt wherever the main thread is, and
    gives the signals back their former handlers, so that a third one is not caught again. SIGHUP,
    SIGUSR1, SIGUSR2 and SIGXCPU ask for the same orderly end, and never count as the second. All
    but SIGINT and SIGTERM are left alone where somebody handles or ignores them already, as nohup
    does. `notice` is written to standard error on the first. Outside the main thread, where signals
    cannot be handled, this does nothing.
    """

    def __init__(self, notice: str = "") -> None:
        self.received: signal.Signals | None = None
        self._notice = notice
        self._former: dict[signal.Signals, object] = {}
        self._asked_s: float | None = None  # When the first of `_ENDING` came.
        self._is_forwarded = _FORWARDER_VARIABLE in os.environ

    @property
    def exit_code(self) -> int:
        """What shells expect of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_ENDING, *_NOTICES):
                if number in _ALWAYS or signal.getsignal(number) is signal.SIG_DFL:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            now_s = time.monotonic()
            if self._asked_s is None:
                self._asked_s = now_s
            elif not self._is_forwarded or now_s - self._asked_s > _FORWARDED_WITHIN_S:
                self._restore()
                raise KeyboardInterrupt
        elif self.received is not None:
            return
        if self.received is None:
            self.received = signal.Signals(number)
        self._say()

    def _say(self) -> None:
        """Not print: the signal may have come in the middle of one. Without a standard error its
        number may be another file's."""
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError):  # Who read it may be gone by the same signal.
                os.write(2, self._notice.encode())

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        self._former.clear()
