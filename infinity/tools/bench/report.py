"""The results of a run: rows for the table, JSON with every sample and the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infinity.tools.bench.measure import Measurement, Result
from infinity.tools.bench.statistics import (
    SampleSummary,
    cpu_s_per_gb,
    paired_ratios,
    summarize,
    verdict,
)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Against:
    """A subject beside one ceiling: `share` is the bandwidth ratio, round by round."""

    name: str
    gb_per_s: SampleSummary
    share: SampleSummary
    cpu_s_per_gb: float | None
    latency_s: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One subject: decimal GB/s, CPU seconds per GB, its ceilings with the fastest first."""

    section: str
    case: str
    subject: str
    nbytes: int
    gb_per_s: SampleSummary
    cpu_s_per_gb: float | None
    ok: bool | None
    latency_s: Mapping[float, float]
    ceilings: tuple[Against, ...]
    labels: Mapping[str, str | int | float]
    note: str


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row per subject, in the order they were measured."""
    rows = []
    for result in results:
        group = result.group
        for subject in group.subjects:
            samples = result.samples[subject.name]
            ceilings = [
                _against(samples, ceiling.name, result.samples[ceiling.name])
                for ceiling in group.ceilings
            ]
            rows.append(
                Row(
                    section=group.section,
                    case=group.case,
                    subject=subject.name,
                    nbytes=samples[0].nbytes,
                    gb_per_s=summarize([sample.gb_per_s for sample in samples]),
                    cpu_s_per_gb=cpu_s_per_gb(samples),
                    ok=verdict(samples),
                    latency_s=_median_latency(samples),
                    ceilings=tuple(sorted(ceilings, key=lambda against: -against.gb_per_s.median)),
                    labels=group.labels,
                    note=group.note,
                )
            )
    return rows


def to_json(results: Sequence[Result], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Everything: environment, rows, and each sample, so that other statistics can be taken."""
    return {
        "format": FORMAT,
        "units": "decimal GB/s (10^9 bytes), seconds, bytes",
        "environment": dict(environment),
        "rows": [asdict(row) for row in rows_of(results)],
        "samples": [
            {
                "section": result.group.section,
                "case": result.group.case,
                "labels": dict(result.group.labels),
                "contender": name,
                "rounds": [asdict(sample) for sample in samples],
            }
            for result in results
            for name, samples in result.samples.items()
        ],
    }


def _against(subject: Sequence[Measurement], name: str, ceiling: Sequence[Measurement]) -> Against:
    return Against(
        name,
        summarize([sample.gb_per_s for sample in ceiling]),
        paired_ratios(subject, ceiling),
        cpu_s_per_gb(ceiling),
        _median_latency(ceiling),
    )


def _median_latency(samples: Sequence[Measurement]) -> dict[float, float]:
    """The median over rounds of every quantile that all rounds took."""
    points = set.intersection(*(set(sample.latency_s) for sample in samples))
    return {
        point: summarize([sample.latency_s[point] for sample in samples]).median
        for point in sorted(points)
    }
