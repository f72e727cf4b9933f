"""`infinity train --trace`: the traced steps, and the time when the file is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import ConfigError
from infinity.observe import Tracer, chrome


class Tracing:
    """Turns the tracer on and off around some steps, counted from 1, and writes the file once.

    The file is written after the last of them, as soon as its transfers have ended, so that it can
    be read during the run.
    """

    def __init__(self, path: Path, first_step: int, last_step: int) -> None:
        self._path = path
        self._first_step = first_step
        self._last_step = last_step
        self._tracer: Tracer | None = None
        self._say: Callable[[str], None] = print
        self._is_written = False

    def check(self, *, num_steps: int) -> None:
        """Raises ConfigError for faults that would otherwise appear after hours of training."""
        if not 1 <= self._first_step <= self._last_step:
            raise ConfigError(
                f"trace steps {self._first_step}:{self._last_step}: expected 1 <= FIRST <= LAST"
            )
        if self._first_step > num_steps:
            raise ConfigError(
                f"trace steps {self._first_step}:{self._last_step} are never reached: "
                f"train.steps is {num_steps}"
            )
        directory = self._path.absolute().parent
        if self._path.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"the trace cannot be written to {str(self._path)!r}; expected a file in a "
                "directory that exists and may be written to"
            )

    def follow(self, tracer: Tracer, say: Callable[[str], None]) -> None:
        """Takes the tracer of the engine. `say` is called with the path of the written file, or
        with the reason for a failure, which does not end the run."""
        self._tracer, self._say = tracer, say

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds optimizer step `number`."""
        assert self._tracer is not None
        if number == self._first_step:
            self._tracer.start()
        with self._tracer.step(number):
            yield
        if number == self._last_step:
            self._tracer.stop()
        if number >= self._last_step and self._tracer.is_settled:
            self._write(self._tracer)

    def finish(self) -> None:
        """Ends tracing after the run, when nothing is in flight. Idempotent."""
        if self._tracer is not None:
            self._tracer.stop()
            self._write(self._tracer)

    def _write(self, tracer: Tracer) -> None:
        if self._is_written:
            return
        self._is_written = True
        try:
            chrome.write(self._path, tracer.spans(), tracer.counts())
            self._say(f"wrote the trace to {self._path}")
        except OSError as error:
            self._say(f"the trace was not written: {error}")
        tracer.forget()
