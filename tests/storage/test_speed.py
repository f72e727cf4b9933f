"""Speed as ratios, each pair measured together: the machine under the test may be slow or busy.

    python -m pytest tests/storage/test_speed.py -s

prints the figures. Every ratio is the median over interleaved rounds; direct I/O, no cache.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.sizes import KIB, MIB
from infinity.storage.arena import Arena
from infinity.storage.engine import Priority, Segment, StorageEngine, open_engine
from infinity.storage.probe import explain_missing_uring
from infinity.uring import Raw, Ring

FILE_NBYTES = 512 * MIB
SMALL_NBYTES = 64 * KIB
NUM_SMALL = 2048
DEPTH = 8 * MIB // SMALL_NBYTES  # As many bytes in flight as the engine below has.
NUM_ROUNDS = 7


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena(256 * MIB) as arena:
        yield arena


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, arena: Arena) -> Iterator[StorageEngine]:
    """With the block size and depth that a run has by default."""
    if request.param == "io_uring" and (cause := explain_missing_uring()) is not None:
        pytest.skip(f"io_uring does not work here: {cause}")
    with open_engine(request.param, arena=arena, block_nbytes=4 * MIB, queue_depth=2) as engine:
        yield engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def file(engine: StorageEngine, arena: Arena, path: Path) -> Iterator[int]:
    """A file that was written once in full, so that no extent is fresh."""
    path.touch()
    file = engine.open(str(path), direct=True)
    nbytes = arena.capacity_nbytes
    for at in range(0, FILE_NBYTES, nbytes):
        engine.submit("write", [Segment(file, at, arena.address, nbytes)], Priority.STATE).wait()
    yield file
    engine.close_file(file)
    path.unlink()


def seconds(action: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def shuffled_places(arena: Arena) -> list[int]:
    """Addresses for 2048 extents, in no order."""
    places = [arena.address + at * SMALL_NBYTES for at in range(NUM_SMALL)]
    random.Random(0).shuffle(places)
    return places


@pytest.mark.parametrize("operation", ["read", "write"])
def test_small_extents_side_by_side_are_worth_large_ones(
    engine: StorageEngine, arena: Arena, file: int, operation: str
) -> None:
    """2048 extents of 64 KiB in one request, neighbours in the file and scattered in memory, against
    one of 128 MiB.

    The aim is 0.8 on a machine that does nothing else; `infinity bench --only extents` measures it.
    The limit here is what extents that travel one by one do not reach on a busy one.
    """
    small = [
        Segment(file, at * SMALL_NBYTES, place, SMALL_NBYTES)
        for at, place in enumerate(shuffled_places(arena))
    ]
    large = [Segment(file, 0, arena.address, NUM_SMALL * SMALL_NBYTES)]

    def move(segments: list[Segment]) -> Callable[[], None]:
        return lambda: engine.submit(operation, segments, Priority.STATE).wait()

    ratios = [seconds(move(large)) / seconds(move(small)) for _ in range(NUM_ROUNDS)]
    ratio = statistics.median(ratios)
    print(f"\n{engine.name} {operation}: small extents at {ratio:.2f} of large ones")
    assert ratio > 0.5


@pytest.mark.parametrize("operation", ["read", "write"])
def test_small_extents_apart_are_as_fast_as_the_drive_takes_them(
    engine: StorageEngine, arena: Arena, file: int, path: Path, operation: str
) -> None:
    """Every other 64 KiB of the file, against a raw ring with the same list and as much in flight.

    What large extents would reach is not asked for: a command of its own for each is the drive's
    business, and drives differ.
    """
    if (cause := explain_missing_uring()) is not None:
        pytest.skip(f"the raw ring does not work here: {cause}")
    places = shuffled_places(arena)
    small = [
        Segment(file, 2 * at * SMALL_NBYTES, place, SMALL_NBYTES) for at, place in enumerate(places)
    ]
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    with Ring(DEPTH) as ring:

        def raw() -> None:
            prepare = ring.read if operation == "read" else ring.write
            waiting = iter(small)
            num_left = len(small)
            for segment in itertools.islice(waiting, DEPTH):
                prepare(fd, Raw(segment.address, SMALL_NBYTES), segment.offset_nbytes)
            while num_left:
                done = ring.wait(1)
                assert all(each.nbytes == SMALL_NBYTES for each in done)
                num_left -= len(done)
                for segment in itertools.islice(waiting, len(done)):
                    prepare(fd, Raw(segment.address, SMALL_NBYTES), segment.offset_nbytes)

        def through_engine() -> None:
            engine.submit(operation, small, Priority.STATE).wait()

        ratios = [seconds(raw) / seconds(through_engine) for _ in range(NUM_ROUNDS)]
    os.close(fd)
    ratio = statistics.median(ratios)
    print(f"\n{engine.name} {operation}: extents apart at {ratio:.2f} of a raw ring")
    # Four threads hold four extents in flight at most.
    assert ratio > (0.5 if engine.name == "io_uring" else 0.1)


def test_urgent_read_behind_two_gib_of_writes_is_not_held_up(
    engine: StorageEngine, arena: Arena, file: int
) -> None:
    """8 MiB, urgent, against the same read on an idle drive."""
    read = [Segment(file, 0, arena.address, 8 * MIB)]
    writes = [
        [Segment(file, at, arena.address + 16 * MIB, 32 * MIB)]
        for at in range(64 * MIB, FILE_NBYTES, 32 * MIB)
    ]

    def read_s() -> float:
        return seconds(lambda: engine.submit("read", read, Priority.FORWARD).wait())

    ratios = []
    for _ in range(NUM_ROUNDS):
        idle_s = statistics.median(read_s() for _ in range(5))
        queued = [
            engine.submit("write", writes[index % len(writes)], Priority.WRITE_BACK)
            for index in range(64)  # Of 32 MiB: 2 GiB.
        ]
        ratios.append(read_s() / idle_s)
        assert not queued[8].done(), "the read waited for a quarter of a GiB"
        for ticket in queued:
            ticket.cancel()
        engine.drain()
    ratio = statistics.median(ratios)
    print(f"\n{engine.name}: an urgent read behind 2 GiB of writes takes {ratio:.1f} times as long")
    assert ratio < 8
