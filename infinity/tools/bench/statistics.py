"""Medians, spreads and ratios of interleaved samples: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.tools.bench.measure import GB, Measurement


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
