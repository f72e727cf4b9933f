"""Ctrl-C: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, SIGINT and SIGTERM set `received` instead of ending the process.

    The second signal raises KeyboardInterrupt wherever the main thread is, and gives the signals
    back their former handlers, so that a third one is not caught again. `notice` is written to
    standard error on the first. Outside the main thread, where signals cannot be handled, this does
    nothing.
    """

    def __init__(self, notice: str = "") -> None:
        self.received: signal.Signals | None = None
        self._notice = notice
        self._former: dict[signal.Signals, object] = {}

    @property
    def exit_code(self) -> int:
        """What shells expect of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
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
        if self.received is not None:
            self._restore()
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        # Not print: the signal may have come in the middle of one.
        os.write(2, self._notice.encode())

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        self._former.clear()
