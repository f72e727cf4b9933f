"""Several paths of different speed work as one: each gets bytes in proportion to its bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity.sizes import KIB, MIB
from infinity.storage import volume_paths
from infinity.storage.arena import Arena
from infinity.storage.protocol import (
    Operation,
    Priority,
    Segment,
    StorageEngine,
    Ticket,
    WrappedTicket,
)
from infinity.storage.volume import Volume, VolumePath
from infinity.storage.volume_paths import SAMPLE_NBYTES, measure_bandwidth
from infinity.testing.faulty_engine import WrappedEngine

# The paths of a test lie on one drive of unknown speed. The engine gives each path its own bandwidth
# on a simulated clock.


class Clock:
    """Replaces the module `time`. Time advances only during a wait."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        """Returns the simulated time in seconds."""
        return self._now_s

    def wait_until(self, moment_s: float) -> None:
        """Advances the time to `moment_s`; a time in the past changes nothing."""
        self._now_s = max(self._now_s, moment_s)


class ThrottledTicket(WrappedTicket):
    """Done when the wrapped ticket is done and the drives have had their time."""

    def __init__(self, inner: Ticket, ready_at_s: float, clock: Clock) -> None:
        super().__init__(inner)
        self._ready_at_s = ready_at_s
        self._clock = clock

    def done(self) -> bool:
        return self._clock.perf_counter() >= self._ready_at_s and self._inner.done()

    def wait(self) -> None:
        self._inner.wait()
        self._clock.wait_until(self._ready_at_s)


class ThrottledEngine(WrappedEngine):
    """Wraps `engine`. `bytes_per_s` maps the start of a path to the bandwidth of the files below
    it, in seconds of `clock`; other files take no time.

    Each limit is one drive that serves its requests in the order of submission. A request is done
    when the wrapped engine is done and every drive that it touches has had the time for its share.
    For one thread.
    """

    def __init__(self, engine: StorageEngine, bytes_per_s: Mapping[str, float]) -> None:
        super().__init__(engine, "throttled")
        self.clock = Clock()
        self._limits = dict(bytes_per_s)
        self._limit_of: dict[int, str] = {}  # by file
        self._free_at_s: dict[str, float] = {}  # when each drive has served what it was given

    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        file = super().open(path, direct=direct, read_only=read_only)
        for start in self._limits:
            if path.startswith(start):
                self._limit_of[file] = start
        return file

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        inner = self._engine.submit(operation, segments, priority)
        return ThrottledTicket(inner, self._serve(segments), self.clock)

    def drain(self) -> None:
        self._engine.drain()
        self.clock.wait_until(max(self._free_at_s.values(), default=0.0))

    def _serve(self, segments: Sequence[Segment]) -> float:
        """Returns the time when the drives will have served these segments."""
        now_s = ready_s = self.clock.perf_counter()
        for segment in segments:
            limit = self._limit_of.get(segment.file)
            if limit is None:
                continue
            start_s = max(now_s, self._free_at_s.get(limit, 0.0))
            self._free_at_s[limit] = start_s + segment.nbytes / self._limits[limit]
            ready_s = max(ready_s, self._free_at_s[limit])
        return ready_s


FAST, SLOW = 160e6, 40e6  # Bytes per second.


@pytest.fixture
def drives(tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "fast"), str(tmp_path / "slow")


def paths_of(drives: tuple[str, str], *weights: float | None) -> list[VolumePath]:
    return [VolumePath(path, weight=weight) for path, weight in zip(drives, weights, strict=True)]


@pytest.fixture
def throttle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ThrottledEngine]:
    """An engine by whose clock bandwidths are measured."""

    def make(engine: StorageEngine, limits: dict[str, float]) -> ThrottledEngine:
        throttled = ThrottledEngine(engine, limits)
        monkeypatch.setattr(volume_paths, "time", throttled.clock)
        return throttled

    return make


def rate_of(volume: Volume, arena: Arena, clock: Clock, nbytes: int) -> float:
    """Bytes per second of writing and reading one range."""
    (extents,) = volume.reserve([nbytes])
    where = {"offset_nbytes": 0, "nbytes": nbytes, "address": arena.address}
    start_s = clock.perf_counter()
    volume.write(extents, **where, priority=Priority.WRITE_BACK).wait()
    volume.read(extents, **where, priority=Priority.FORWARD).wait()
    return 2 * nbytes / (clock.perf_counter() - start_s)


def test_two_paths_of_unequal_speed_add_up(open_any, native_name, arena, drives, throttle) -> None:
    """The sum of both but for a stripe, found out by measuring them. Evenly striped, the fast one
    waits for the slow one: 40 % of the sum."""
    engine = throttle(
        open_any(native_name, block_nbytes=MIB), dict(zip(drives, (FAST, SLOW), strict=True))
    )
    with Volume(engine, paths_of(drives, None, None), stripe_nbytes=256 * KIB) as volume:
        assert volume.weights[0] / volume.weights[1] == pytest.approx(FAST / SLOW)
        rate = rate_of(volume, arena, engine.clock, 32 * MIB)
        assert rate == pytest.approx(FAST + SLOW, rel=0.05)
    with Volume(engine, paths_of(drives, 1, 1), stripe_nbytes=256 * KIB) as evenly:
        rate = rate_of(evenly, arena, engine.clock, 16 * MIB)
        assert rate == pytest.approx(0.4 * (FAST + SLOW), rel=0.05)


@pytest.mark.parametrize(("num_paths", "stripe_nbytes"), [(0, MIB), (2, 5000), (2, 0)])
def test_senseless_volumes_are_refused(
    open_any, drives, num_paths: int, stripe_nbytes: int
) -> None:
    paths = paths_of(drives, 1, 1)[:num_paths]
    with pytest.raises(ConfigError, match="at least one path|multiple of 4096"):
        Volume(open_any("threads"), paths, stripe_nbytes=stripe_nbytes)


def test_measuring_leaves_nothing_behind(open_any, drives) -> None:
    with Volume(open_any("threads"), paths_of(drives, None, None)) as volume:
        assert [os.path.getsize(path) for path in volume.file_paths] == [0, 0]
        (extents,) = volume.reserve([MIB])
        assert sum(extent.nbytes for extent in extents) == MIB


def test_fresh_buffers_are_zeros_after_measuring(open_any, arena, drives) -> None:
    with Volume(open_any("threads"), paths_of(drives, None, None)) as volume:
        (extents,) = volume.reserve([8 * MIB])
        arena.memory(0, 8 * MIB)[:] = b"x" * (8 * MIB)
        where = {"offset_nbytes": 0, "nbytes": 8 * MIB, "address": arena.address}
        volume.read(extents, **where, priority=Priority.STATE).wait()
        assert arena.memory(0, 8 * MIB) == bytes(8 * MIB)


def test_weights_that_are_given_are_taken(open_any, drives) -> None:
    with Volume(open_any("threads"), paths_of(drives, 3, 1)) as volume:
        assert volume.weights == (3, 1)
        (extents,) = volume.reserve([32 * MIB])
        shares = [sum(e.nbytes for e in extents if e.path_index == index) for index in range(2)]
        assert shares == [24 * MIB, 8 * MIB]


def test_one_path_is_not_measured(open_any, drives) -> None:
    engine = open_any("threads")
    with Volume(engine, [VolumePath(drives[0])]) as volume:
        assert volume.weights == (1.0,)
    assert all(file.write_nbytes == 0 for file in engine.stats())


def test_paths_too_small_to_be_measured_are_equal(open_any, drives) -> None:
    paths = [VolumePath(drives[0], capacity_nbytes=MIB), VolumePath(drives[1])]
    with Volume(open_any("threads"), paths) as volume:
        assert volume.weights == (1.0, 1.0)


def test_measured_bandwidth_is_that_of_the_path(open_any, make_file, tmp_path, throttle) -> None:
    engine = throttle(open_any("threads", block_nbytes=MIB), {str(tmp_path): 100e6})
    file = engine.open(make_file(SAMPLE_NBYTES), direct=True)
    assert measure_bandwidth(engine, file) == pytest.approx(100e6)


def test_processes_that_share_drives_measure_them_one_after_the_other(
    open_any, drives, tmp_path, monkeypatch
) -> None:
    """Two at once would find a part of each drive."""
    inside, most = [], []

    def measure(engine: object, file: int, start_nbytes: int) -> float:
        inside.append(file)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(file)
        return 1e9

    monkeypatch.setattr(volume_paths, "measure_bandwidth", measure)

    def open_rank(rank: int) -> tuple[float, ...]:
        paths = []
        for drive in drives:
            own = os.path.join(drive, f"rank-{rank}")
            paths.append(VolumePath(own, weight=None, shared_with=drives[0]))
        with Volume(open_any("threads"), paths) as volume:
            return volume.weights

    for drive in drives:
        os.makedirs(drive, exist_ok=True)
    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(open_rank, range(3))) == [(1.0, 1.0)] * 3
    assert max(most) == 1 and len(most) == 6
