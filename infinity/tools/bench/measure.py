"""A measurement: samples, contenders, the rounds in which they alternate, and their statistics; and
the lab, which has what all sections share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infinity.config.schema.engine import Io
from infinity.sizes import GIB, MIB, format_nbytes
from infinity.storage.arena import Arena
from infinity.storage.native_engine import depth_range, open_configured
from infinity.storage.protocol import StorageEngine

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


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that can be timed again and again. `run` prepares, moves the bytes under the clock,
    and compares them where it can."""

    name: str
    run: Callable[[], Measurement]


def timed(
    name: str,
    nbytes: int,
    transfer: Callable[[], object],
    *,
    prepare: Callable[[], object] = lambda: None,
    compare: Callable[[], bool | None] = lambda: None,
) -> Contender:
    """Returns a contender whose `transfer` moves `nbytes` under the clock."""

    def run() -> Measurement:
        prepare()
        seconds, cpu_s = clock(transfer)
        return Measurement(nbytes, seconds, cpu_s, ok=compare())

    return Contender(name, run)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contenders that do the same work: `subjects` of this package, and the `ceilings` beside them.

    `section` is the test that they belong to, `case` one line for the reader of the table, `labels`
    the same for programs: operation, extent_nbytes, depth, num_paths. `samples` of each contender
    are there once it was run, the i-th of each from one round.
    """

    section: str
    case: str
    subjects: Sequence[Contender]
    ceilings: Sequence[Contender] = ()
    labels: Mapping[str, str | int | float] = field(default_factory=dict)
    note: str = ""
    samples: Mapping[str, Sequence[Measurement]] = field(default_factory=dict)


def clock(transfer: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all threads of this process, that `transfer` takes.

    The kernel's threads for a ring are counted, interrupts are not.
    """
    cpu_s, start_s = time.process_time(), time.perf_counter()
    transfer()
    seconds = time.perf_counter() - start_s
    return seconds, time.process_time() - cpu_s


def run_rounds(
    compared: Comparison,
    *,
    rounds: int,
    warm_ups: int = 1,
    on_round: Callable[[int], object] = lambda _: None,
) -> Comparison:
    """Returns it with the samples of `rounds` rounds, after `warm_ups` that are thrown away.

    Round by round: A B C, B C A, C A B. A failed comparison stays in its sample; an exception of a
    contender goes through.
    """
    contenders = [*compared.subjects, *compared.ceilings]
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
    return replace(compared, samples=samples)


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


def bandwidth_of(samples: Sequence[Measurement]) -> SampleSummary:
    """Returns the summary of the samples' GB/s."""
    return summarize([sample.gb_per_s for sample in samples])


def paired_ratios(subject: Sequence[Measurement], ceiling: Sequence[Measurement]) -> SampleSummary:
    """Bandwidth of the subject over that of the ceiling, round by round.

    The median of ratios, not the ratio of medians: a disturbance that slows full rounds cancels.
    """
    pairs = zip(subject, ceiling, strict=True)
    return summarize([own.gb_per_s / other.gb_per_s for own, other in pairs])


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


# -- The lab: what all sections share --------------------------------------------------------------


Access = Literal["sequential", "strided", "random"]


@dataclass(frozen=True, slots=True)
class IoSettings:
    """Settings that are varied to find the best, of the engine or of fio: bytes of a request, and
    requests in flight.

    `access`, of fio alone: "strided" leaves out every other block, "random" jumps between blocks.
    """

    block_nbytes: int
    depth: int
    access: Access = "sequential"

    @property
    def in_flight_nbytes(self) -> int:
        """The bytes that a drive has in flight at once."""
        return self.block_nbytes * self.depth

    def __str__(self) -> str:
        text = f"{short_size(self.block_nbytes)} x {self.depth}"
        return text if self.access == "sequential" else f"{text}, {self.access}"


def short_size(nbytes: float) -> str:
    """Without a zero fraction: "4 MiB" for 4.0 MiB."""
    return format_nbytes(nbytes).replace(".0 ", " ")


# Of fio, from few large to many small requests in flight; the best is found by trying.
FIO_CANDIDATES = tuple(
    IoSettings(block_mib * MIB, depth)
    for block_mib, depths in {1: (8, 16), 4: (2, 4, 8), 8: (1, 2), 16: (1, 2)}.items()
    for depth in depths
)


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of work.

    nbytes: of a timed transfer of the headline figures
    sweep_nbytes: of a cell of a sweep
    """

    nbytes: int = GIB
    sweep_nbytes: int = 128 * MIB
    rounds: int = 7
    sweep_rounds: int = 3
    search_rounds: int = 2
    depths: tuple[int, ...] = (1, 2, 4)
    extents_nbytes: tuple[int, ...] = (
        64 << 10, 512 << 10, 4 * MIB, 32 * MIB, 256 * MIB, 1 * GIB,
    )  # fmt: skip
    num_latencies: int = 64
    fio_candidates: tuple[IoSettings, ...] = FIO_CANDIDATES


QUICK = Effort(
    nbytes=256 * MIB,
    sweep_nbytes=64 * MIB,
    rounds=3,
    sweep_rounds=1,
    search_rounds=1,
    depths=(1, 4),
    extents_nbytes=(64 << 10, 1 * MIB, 16 * MIB),
    num_latencies=16,
    fio_candidates=FIO_CANDIDATES[2:6],
)


@dataclass(frozen=True, slots=True)
class Lab:
    """The bench's tools. `arena` holds `effort.nbytes` at least; `io` is the configured engine.

    `on_step` receives the name of each step, for a progress line.
    """

    arena: Arena
    directories: tuple[Path, ...]
    io: Io
    effort: Effort
    with_fio: bool
    weights: tuple[float, ...] = ()
    huge_pages: bool = True
    on_step: Callable[[str], object] = field(default=lambda _: None)

    @property
    def start_depth(self) -> int:
        """Blocks that the configured engine has in flight on a drive at first."""
        return depth_range(self.io.queue_depth, self.io.block_size)[1]

    def engine(self, **changes: Any) -> StorageEngine:
        """The configured engine, or one with other options of `open_engine`."""
        return open_configured(self.io, self.arena, **changes)

    def measure(self, compared: Comparison, rounds: int, *, warm_ups: int = 1) -> Comparison:
        """Runs the contenders in interleaved rounds after `warm_ups` that do not count."""
        what = f"{compared.section}: {compared.case}"
        return run_rounds(
            compared,
            rounds=rounds,
            warm_ups=warm_ups,
            on_round=lambda index: self.on_step(
                f"{what}, " + (f"round {index + 1} of {rounds}" if index >= 0 else "warm-up")
            ),
        )
