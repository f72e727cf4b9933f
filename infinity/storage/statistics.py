"""Statistics of a storage engine: bytes, latencies, queue depth, stalls, processor time.

Numbers only grow; subtract two snapshots to see what happened in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_FIRST_BOUND_S = 2**14 * 1e-9
_NUM_BUCKETS = 94
_SUMMED = (
    "read_nbytes", "write_nbytes", "num_reads", "num_writes", "num_retries", "num_short_transfers",
    "num_errors", "busy_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Counts of latencies in log-linear buckets, four per power of two from 16 us to 128 s.

    `counts` has one number per bucket: below the first bound, between neighbours, above the last.
    """

    counts: tuple[int, ...] = (0,) * _NUM_BUCKETS

    @staticmethod
    def bounds_s() -> tuple[float, ...]:
        """The lower bounds of all buckets but the first, in seconds."""
        return tuple(
            _FIRST_BOUND_S * 2 ** (index // 4) * (1 + index % 4 / 4)
            for index in range(_NUM_BUCKETS - 1)
        )

    @property
    def num_samples(self) -> int:
        """The number of requests that were counted."""
        return sum(self.counts)

    def __add__(self, other: LatencyHistogram) -> LatencyHistogram:
        return LatencyHistogram(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        )

    def __sub__(self, other: LatencyHistogram) -> LatencyHistogram:
        return LatencyHistogram(
            tuple(a - b for a, b in zip(self.counts, other.counts, strict=True))
        )


@dataclass(frozen=True, slots=True)
class FileStats:
    """Statistics of one file, hence of one swap path. Reads and writes count blocks, not requests.

    `busy_s` is the time with at least one block in flight, `in_flight_s` the time in flight summed
    over blocks; `in_flight_s / busy_s` is the mean queue depth while the device was busy. Latencies
    run from the issue of a block to its completion.
    """

    file: int
    path: str
    read_nbytes: int = 0
    write_nbytes: int = 0
    num_reads: int = 0
    num_writes: int = 0
    num_retries: int = 0
    num_short_transfers: int = 0
    num_errors: int = 0
    busy_s: float = 0.0
    in_flight_s: float = 0.0
    max_in_flight: int = 0
    read_latency: LatencyHistogram = LatencyHistogram()
    write_latency: LatencyHistogram = LatencyHistogram()


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Statistics of the queue of one device, over all its files.

    `device` is the st_dev of stat(2); `num_pending` requests and `num_in_flight` blocks are of this
    moment. `cpu_s` is the processor time of the engine's own threads; kernel workers, to which some
    file systems push requests, are not in it. `stall_s` is how long submitters stood still because
    the queue was full, `queue_wait` how long requests waited for their first block to be issued.
    """

    device: int
    num_pending: int = 0
    num_in_flight: int = 0
    num_cancelled: int = 0
    cpu_s: float = 0.0
    stall_s: float = 0.0
    queue_wait: LatencyHistogram = LatencyHistogram()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums over all files, the files, and the devices. `busy_s` adds up over files.

    `by_file` has one row per open file, and one per path of the first 64 that were closed.
    """

    by_file: tuple[FileStats, ...] = ()
    by_device: tuple[DeviceStats, ...] = ()
    read_nbytes: int = field(init=False)
    write_nbytes: int = field(init=False)
    num_reads: int = field(init=False)
    num_writes: int = field(init=False)
    num_retries: int = field(init=False)
    num_short_transfers: int = field(init=False)
    num_errors: int = field(init=False)
    busy_s: float = field(init=False)

    def __post_init__(self) -> None:
        for name in _SUMMED:
            object.__setattr__(self, name, sum(getattr(file, name) for file in self.by_file))


def histogram(counts: Sequence[int]) -> LatencyHistogram:
    """Makes a histogram of the native engine's counts."""
    assert len(counts) == _NUM_BUCKETS
    return LatencyHistogram(tuple(counts))
