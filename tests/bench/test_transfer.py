"""What is planned, and that a wrong byte is seen: a benchmark that cannot fail proves nothing."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from infinity.errors import StorageError
from infinity.sizes import KIB, MIB
from infinity.storage.probe import explain_missing_uring
from infinity.storage.protocol import Priority
from infinity.testing.faulty_engine import FaultyEngine
from infinity.tools.bench.nvme import KINDS, DriveSet
from infinity.tools.bench.transfer import (
    FileSet,
    TransferKind,
    engine_latency,
    engine_transfer,
    plan_moves,
    raw_ring,
)
from tests.bench.conftest import NBYTES


@pytest.mark.parametrize("kind", ["read", "write"])
def test_plan_covers_the_region_once_in_order(kind: TransferKind) -> None:
    moves = plan_moves(kind, nbytes=10 * MIB, extent_nbytes=4 * MIB)
    assert [move.nbytes for move in moves] == [4 * MIB, 4 * MIB, 2 * MIB]
    assert all(a.offset_nbytes + a.nbytes == b.offset_nbytes for a, b in pairwise(moves))
    assert {move.region for move in moves} == {"still" if kind == "read" else "busy"}


def test_mixed_is_half_reads_half_writes_in_turns_and_never_the_same_memory() -> None:
    moves = plan_moves("mixed", nbytes=8 * MIB, extent_nbytes=1 * MIB)
    assert [move.operation for move in moves] == ["read", "write"] * 4
    reads = {move.offset_nbytes for move in moves if move.operation == "read"}
    writes = {move.offset_nbytes for move in moves if move.operation == "write"}
    assert len(reads) == len(writes) == 4 and not reads & writes
    assert sum(move.nbytes for move in moves) == 8 * MIB


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extent_nbytes", [64 * KIB, 3 * MIB, 16 * MIB])
def test_the_engine_moves_the_right_bytes(
    files: FileSet, kind: TransferKind, extent_nbytes: int
) -> None:
    transfer = engine_transfer("e", files, kind, nbytes=NBYTES, extent_nbytes=extent_nbytes)
    for _ in range(2):
        sample = transfer.run()
        assert sample.ok and sample.nbytes == NBYTES and sample.seconds > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_raw_ring_moves_the_right_bytes(files: FileSet, kind: TransferKind) -> None:
    if (cause := explain_missing_uring()) is not None:
        pytest.skip(f"io_uring does not work here: {cause}")
    moves = plan_moves(kind, nbytes=NBYTES, extent_nbytes=MIB)
    for depth in (1, 3):
        with raw_ring("r", files, moves, depth=depth) as ring:
            sample = ring.run()
            assert sample.ok and sample.nbytes == NBYTES


@pytest.mark.parametrize("kind", ["read", "mixed"])
def test_a_changed_byte_on_the_drive_is_seen(
    drives: DriveSet, files: FileSet, kind: TransferKind
) -> None:
    share = drives.scratch.shares("still")[0]
    with open(share.path, "r+b") as file:
        file.seek(share.offset_nbytes + 12345)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    transfer = engine_transfer("e", files, kind, nbytes=NBYTES, extent_nbytes=MIB)
    assert transfer.run().ok is False


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_transfer_that_did_nothing_is_seen(drives: DriveSet, kind: TransferKind) -> None:
    with drives.lab.engine() as engine:
        # Answers before anything moved.
        forgetful = SimpleNamespace(
            open=engine.open,
            submit=lambda operation, segments, priority: engine.submit(
                operation, [] if operation == kind else segments, priority
            ),
        )
        files = FileSet(forgetful, drives.scratch, drives.lab.arena)
        transfer = engine_transfer("e", files, kind, nbytes=NBYTES, extent_nbytes=MIB)
        assert transfer.run().ok is False


def test_an_error_of_the_drive_is_raised(drives: DriveSet) -> None:
    with drives.lab.engine() as engine:
        faulty = FaultyEngine(engine)
        files = FileSet(faulty, drives.scratch, drives.lab.arena)
        faulty.close_file(0)
        with pytest.raises(StorageError):
            engine_transfer("e", files, "read", nbytes=NBYTES, extent_nbytes=MIB).run()


def test_latency_is_taken_per_request(files: FileSet) -> None:
    for behind in (0, 1):
        latency = engine_latency("l", files, extent_nbytes=MIB, count=3, behind=behind)
        sample = latency.run()
        assert sample.ok and sample.nbytes == 3 * MIB
        assert 0 < sample.latency_s[0.01] <= sample.latency_s[0.5] <= sample.latency_s[0.999]


def test_write_backs_are_queued_while_a_demand_read_waits(drives: DriveSet) -> None:
    submitted: list[tuple[str, Priority]] = []

    with drives.lab.engine() as engine:

        def submit(operation, segments, priority):
            submitted.append((operation, priority))
            return engine.submit(operation, segments, priority)

        watched = SimpleNamespace(open=engine.open, submit=submit)
        files = FileSet(watched, drives.scratch, drives.lab.arena)
        engine_latency("l", files, extent_nbytes=MIB, count=2, behind=1).run()
    assert submitted[:2] == [("write", Priority.WRITE_BACK), ("read", Priority.FORWARD)]
