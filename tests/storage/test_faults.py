"""Fault ladders: fail the first operation, the second, ... until the scenario succeeds."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.sizes import KIB, MIB
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority, Segment, StorageEngine
from infinity.storage.volume import Volume, VolumePath
from infinity.testing.faulty_engine import Fault, FaultyEngine

PIECE_NBYTES = MIB


def scenario(
    engine: StorageEngine, arena: Arena, drives: list[str], *, verify: bool = True
) -> None:
    """Two buffers on two drives: written together, synced, read together, compared."""
    paths = [VolumePath(drive) for drive in drives]
    with Volume(engine, paths, stripe_nbytes=64 * KIB, verify=verify) as volume:
        pieces = volume.reserve([PIECE_NBYTES, PIECE_NBYTES])
        data = [random.Random(index).randbytes(PIECE_NBYTES) for index in range(2)]
        tickets = []
        for index, piece in enumerate(pieces):
            arena.memory(index * PIECE_NBYTES, PIECE_NBYTES)[:] = data[index]
            address = arena.address + index * PIECE_NBYTES
            tickets.append(
                volume.write(
                    piece, offset_nbytes=0, nbytes=PIECE_NBYTES, address=address,
                    priority=Priority.WRITE_BACK,
                )
            )  # fmt: skip
        for ticket in tickets:
            ticket.wait()
        volume.sync()
        for index, piece in enumerate(pieces):
            address = arena.address + (8 + index) * MIB
            volume.read(
                piece, offset_nbytes=0, nbytes=PIECE_NBYTES, address=address,
                priority=Priority.FORWARD,
            ).wait()  # fmt: skip
            assert arena.memory((8 + index) * MIB, PIECE_NBYTES) == data[index]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("nbytes_before_failure", [0, 128 * KIB])
def test_ladder_every_failure_is_reported_and_leaves_nothing_behind(
    open_any, native_name, arena, tmp_path: Path, code: int, nbytes_before_failure: int
) -> None:
    """Rung n fails the n-th open, read, write or sync.

    Each must be a StorageError that names what, where and why; afterwards nothing is in flight, the
    directories are empty, and the next rung starts from there.
    """
    drives = [str(tmp_path / name) for name in "ab"]
    for drive in drives:
        os.mkdir(drive)
    for rung in range(1, 100):
        fault = Fault(nth=rung, errno=code, nbytes_before_failure=nbytes_before_failure)
        engine = FaultyEngine(open_any(native_name), [fault])
        try:
            scenario(engine, arena, drives)
        except StorageError as error:
            assert error.errno == code
            assert error.operation in ("open", "read", "write", "sync")
            assert os.path.dirname(error.path) in drives
            if error.operation in ("read", "write"):
                assert error.nbytes > 0
                assert f"offset {error.offset_nbytes}" in str(error)
            engine.drain()
            assert all(file.num_errors == 0 for file in engine.stats())
        else:
            assert engine.num_operations < rung
            break
        finally:
            engine.close()
            assert not [name for drive in drives for name in os.listdir(drive)]
    else:
        pytest.fail("the scenario never succeeded")
    assert rung == 9, "2 opens, 2 writes, 2 syncs, 2 reads, and a rung that hits nothing"


@pytest.mark.parametrize("operation", ["read", "write"])
def test_ladder_sees_silent_corruption(
    open_any, native_name, arena, tmp_path: Path, operation: str
) -> None:
    """A canary: the scenario's comparison would notice one flipped bit."""
    engine = FaultyEngine(open_any(native_name), [Fault(nth=2, operation=operation, corrupt=True)])
    with pytest.raises(AssertionError):
        scenario(engine, arena, [str(tmp_path / "a")], verify=False)


def test_corrupted_write_leaves_the_callers_memory_alone(open_any, arena, make_file) -> None:
    engine = FaultyEngine(open_any("threads"), [Fault(nth=1, operation="write", corrupt=True)])
    path = make_file(MIB)
    file = engine.open(path, direct=True)
    data = random.Random(0).randbytes(MIB)
    arena.memory(0, MIB)[:] = data
    engine.submit("write", [Segment(file, 0, arena.address, MIB)], Priority.STATE).wait()
    engine.sync(file)
    assert arena.memory(0, MIB) == data
    with open(path, "rb") as plain:
        stored = plain.read()
    assert sum(a != b for a, b in zip(stored, data, strict=True)) == 1


def test_delayed_request_is_done_late_and_right(open_any, arena, make_file) -> None:
    fault = Fault(nth=1, operation="read", delay_s=0.3)
    engine = FaultyEngine(open_any("threads"), [fault])
    file = engine.open(make_file(b"x" * MIB), direct=True)
    start_s = time.monotonic()
    ticket = engine.submit("read", [Segment(file, 0, arena.address, MIB)], Priority.FORWARD)
    was_done = ticket.done()
    assert not was_done or time.monotonic() - start_s >= 0.3
    ticket.wait()
    assert time.monotonic() - start_s >= 0.3
    assert ticket.done()
    assert arena.memory(0, MIB) == b"x" * MIB


def test_failing_request_fails_every_time_it_is_asked(open_any, arena, make_file) -> None:
    engine = FaultyEngine(open_any("threads"), [Fault(nth=1, operation="write", errno=errno.EIO)])
    path = make_file(MIB)
    file = engine.open(path, direct=True)
    segment = Segment(file, 4096, arena.address, 8192)
    ticket = engine.submit("write", [segment], Priority.WRITE_BACK)
    engine.drain()
    assert ticket.done()
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            ticket.wait()
        error = caught.value
        assert (error.errno, error.operation, error.path) == (errno.EIO, "write", path)
        assert (error.offset_nbytes, error.nbytes) == (4096, 8192)
    with open(path, "rb") as plain:
        assert plain.read() == bytes(MIB), "a failing write moves no byte"
