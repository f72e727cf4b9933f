"""Readers of an engine's statistics: quantiles of latencies, the mean queue depth."""

from __future__ import annotations

import bisect
import itertools

from infinity.storage.protocol import FileStats, LatencyHistogram


def quantile_s(latencies: LatencyHistogram, share: float) -> float:
    """Returns the latency that `share` of the samples do not exceed, rounded up to its bucket's
    end: 0.0 without samples, infinity in the open last bucket."""
    running = list(itertools.accumulate(latencies.counts))
    if not running[-1]:
        return 0.0
    bucket = bisect.bisect_left(running, max(1, share * running[-1]))
    bounds = latencies.bounds_s()
    return bounds[bucket] if bucket < len(bounds) else float("inf")


def mean_in_flight(file: FileStats) -> float:
    """Returns the mean queue depth at the device while it was busy, in blocks."""
    return file.in_flight_s / file.busy_s if file.busy_s else 0.0
