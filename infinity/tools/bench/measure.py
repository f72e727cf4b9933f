"""A measurement: samples, contenders, the rounds in which they alternate, and their statistics."""

from __future__ import annotations

import resource
import statistics
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


def run_group(
    group: ContenderGroup,
    *,
    rounds: int,
    warm_ups: int = 1,
    on_round: Callable[[int], object] = lambda _: None,
) -> Result:
    """The samples of `rounds` rounds, after `warm_ups` that are thrown away.

    Round by round: A B C, B C A, C A B. A failed comparison stays in its sample; an exception of a
    contender goes through.
    """
    contenders = [*group.subjects, *group.ceilings]
    names = [contender.name for contender in contenders]
    assert len(set(names)) == len(names), f"two contenders of one name in {names}"
    samples: dict[str, list[Measurement]] = {name: [] for name in names}
    for index in range(-warm_ups, rounds):
        on_round(index)
        turn = index % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            sample = contender.run()
            if index >= 0:
                samples[contender.name].append(sample)
    return Result(group, samples)


# -- Statistics of interleaved samples: pure functions ---------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """A median with the smallest and largest of `count` values."""

    median: float
    low: float
    high: float
    count: int


def summarize(values: Sequence[float]) -> SampleSummary:
    """Returns median, extremes and number of the values."""
    return SampleSummary(statistics.median(values), min(values), max(values), len(values))


def paired_ratios(subject: Sequence[Measurement], ceiling: Sequence[Measurement]) -> SampleSummary:
    """Bandwidth of the subject over that of the ceiling, round by round.

    The median of ratios, not the ratio of medians: a disturbance that slows full rounds cancels.
    """
    return summarize(
        [
            subject_sample.gb_per_s / ceiling_sample.gb_per_s
            for subject_sample, ceiling_sample in zip(subject, ceiling, strict=True)
        ]
    )


def cpu_s_per_gb(samples: Sequence[Measurement]) -> float | None:
    """CPU seconds over all rounds per decimal GB moved; None when a sample does not know.

    A sum, not a median: some report CPU time in full milliseconds.
    """
    times_s = [sample.cpu_s for sample in samples if sample.cpu_s is not None]
    if len(times_s) < len(samples):
        return None
    return sum(times_s) * GB / sum(sample.nbytes for sample in samples)


def verdict(samples: Sequence[Measurement]) -> bool | None:
    """False when one comparison failed, True when all were made and held, else None."""
    if any(sample.ok is False for sample in samples):
        return False
    return True if all(sample.ok for sample in samples) else None


def quantiles(values: Sequence[float], points: Sequence[float]) -> dict[float, float]:
    """The values at `points` (0 to 1), the nearest rank of the sorted values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {point: ordered[round(point * last)] for point in points}
