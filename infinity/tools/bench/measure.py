"""The nouns of a measurement: a sample, its contender, and the group of contenders."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

GB = 10**9


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed transfer.

    `nbytes` moved; `cpu_s` is the processor time of the process (None: unknown). `ok`: the
    bytes were compared and equal; None: nothing was compared. `latency_s` maps a quantile, 0 to 1,
    to the time of single requests, if it was measured.
    """

    nbytes: int
    seconds: float
    cpu_s: float | None = None
    ok: bool | None = None
    latency_s: Mapping[float, float] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """Decimal GB/s."""
        return self.nbytes / self.seconds / GB


class Contender(Protocol):
    """Something that can be timed again and again. Prepares and compares outside the clock."""

    name: str

    def run(self) -> Measurement:
        """Prepares, moves the bytes under the clock, and compares them where it can."""


@dataclass(frozen=True, slots=True)
class ContenderGroup:
    """Contenders that do the same work: `subjects` of this package, and the `ceilings` beside them.

    `section` is the test that the group belongs to, `case` one line for the reader of the table,
    `labels` the same for programs: operation, extent_nbytes, depth, num_paths.
    """

    section: str
    case: str
    subjects: Sequence[Contender]
    ceilings: Sequence[Contender] = ()
    labels: Mapping[str, str | int | float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A group that was run: the samples of every contender, the i-th of each from one round."""

    group: ContenderGroup
    samples: Mapping[str, Sequence[Measurement]]


def clock(transfer: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all threads of this process, that `transfer` takes.

    The kernel's threads for a ring are counted, interrupts are not. getrusage(2).
    """
    cpu_s = -_process_cpu_s()
    start_s = time.perf_counter()
    transfer()
    seconds = time.perf_counter() - start_s
    return seconds, cpu_s + _process_cpu_s()


def _process_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
