"""Latency histograms as Python sees them."""

from __future__ import annotations

import math

import pytest

from infinity.storage.protocol import EngineStats, FileStats, LatencyHistogram, histogram

from .latencies import mean_in_flight, quantile_s


def with_samples(**buckets: int) -> LatencyHistogram:
    counts = [0] * 94
    for name, count in buckets.items():
        counts[int(name[1:])] = count
    return histogram(counts)


def test_bounds_grow_by_quarters_of_a_power_of_two() -> None:
    bounds = LatencyHistogram.bounds_s()
    assert len(bounds) == 93
    assert bounds[:5] == pytest.approx([16.384e-6, 20.48e-6, 24.576e-6, 28.672e-6, 32.768e-6])
    assert bounds[-1] > 128


def test_quantiles_are_the_end_of_their_bucket() -> None:
    bounds = LatencyHistogram.bounds_s()
    samples = with_samples(b0=1, b5=8, b93=1)
    assert quantile_s(samples, 0.05) == bounds[0]
    assert quantile_s(samples, 0.5) == bounds[5]
    assert quantile_s(samples, 0.9) == bounds[5]
    assert quantile_s(samples, 0.99) == math.inf
    assert quantile_s(LatencyHistogram(), 0.5) == 0


def test_histograms_add_and_subtract() -> None:
    before, after = with_samples(b5=2), with_samples(b5=3, b9=4)
    assert after - before == with_samples(b5=1, b9=4)
    assert before + (after - before) == after


def test_engine_statistics_are_sums_over_files() -> None:
    files = (
        FileStats(0, "a", read_nbytes=5, num_errors=1, busy_s=0.5, in_flight_s=1.5),
        FileStats(1, "b", read_nbytes=7, busy_s=0.25),
    )
    stats = EngineStats(files)
    assert (stats.read_nbytes, stats.num_errors, stats.busy_s) == (12, 1, 0.75)
    assert [mean_in_flight(file) for file in files] == [3.0, 0.0]
