"""`infinity train --trace`: the traced steps, and the time when the file is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError
from infinity.observe import Tracer, chrome


@dataclass(frozen=True, slots=True)
class TracePlan:
    """The requested file and steps, counted from 1, both ends included."""

    path: Path
    first_step: int
    last_step: int

    def check(self, *, num_steps: int) -> None:
        """Raises ConfigError for faults that would otherwise appear after hours of training."""
        if not 1 <= self.first_step <= self.last_step:
            raise ConfigError(
                f"trace steps {self.first_step}:{self.last_step}: expected 1 <= FIRST <= LAST"
            )
        if self.first_step > num_steps:
            raise ConfigError(
                f"trace steps {self.first_step}:{self.last_step} are never reached: "
                f"train.steps is {num_steps}"
            )
        directory = self.path.absolute().parent
        if self.path.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"the trace cannot be written to {str(self.path)!r}; expected a file in a "
                "directory that exists and may be written to"
            )


class Tracing:
    """Turns the tracer on and off around the planned steps and writes the file once.

    The file is written after the planned steps, as soon as their transfers have ended, so that it
    can be read during the run. `say` is called with its path, or with the reason for a failure,
    which does not end the run.
    """

    def __init__(self, plan: TracePlan, tracer: Tracer, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._tracer = tracer
        self._say = say
        self._is_written = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds optimizer step `number`."""
        if number == self._plan.first_step:
            self._tracer.start()
        with self._tracer.step(number):
            yield
        if number == self._plan.last_step:
            self._tracer.stop()
        if number >= self._plan.last_step and self._tracer.is_settled:
            self._write()

    def finish(self) -> None:
        """Ends tracing after the run, when nothing is in flight. Idempotent."""
        self._tracer.stop()
        self._write()

    def _write(self) -> None:
        if self._is_written:
            return
        self._is_written = True
        try:
            chrome.write(self._plan.path, self._tracer.spans(), self._tracer.counts())
            self._say(f"wrote the trace to {self._plan.path}")
        except OSError as error:
            self._say(f"the trace was not written: {error}")
        self._tracer.forget()
