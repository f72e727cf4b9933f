"""Signals: the first one requests an orderly end, a second one ends the run at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self

# Requests of a person. The second one ends the run at once.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# Warnings of an end: a terminal hangs up, a scheduler warns, time is up. Some are sent repeatedly.
_NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
# torchrun sends its workers signals that the terminal has sent them already.
_FORWARDER_VARIABLE = "TORCHELASTIC_RUN_ID"
_FORWARDED_WITHIN_S = 5.0


class Interrupt:
    """While entered, signals set `received` instead of ending the process.

    A second SIGINT, SIGTERM or SIGQUIT raises KeyboardInterrupt in the main thread, and restores
    the former handlers, so that a third one is not caught. SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU
    request the same orderly end, and never count as the second signal. Except for SIGINT and
    SIGTERM, a signal that is already handled or ignored (as by nohup) is left alone. The first
    signal writes `notice` to standard error. Outside the main thread, where signals cannot be
    handled, an Interrupt has no effect.
    """

    def __init__(self, notice: str = "") -> None:
        self.received: signal.Signals | None = None
        self._notice = notice
        self._former: dict[signal.Signals, object] = {}
        self._asked_s: float | None = None  # The time of the first signal in `_ENDING`.
        self._is_forwarded = _FORWARDER_VARIABLE in os.environ

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect of a process ended by a signal: 130 for SIGINT, 143 for
        SIGTERM."""
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
        """Writes without print, which the signal may have interrupted. Without a standard error,
        its descriptor may belong to another file."""
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError):  # The same signal may have ended the reader.
                os.write(2, self._notice.encode())

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        self._former.clear()
