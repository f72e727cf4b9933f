"""bench/drive_sections.py, small: results come, bytes are right, and wrong ones are seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.errors import CorruptionError
from infinity.storage.probe import explain_missing_uring
from infinity.storage.volume import Volume, VolumePath
from infinity.tools.bench import fio
from infinity.tools.bench.lab import Lab
from infinity.tools.bench.report import rows_of
from infinity.tools.bench.transfer import FileSet, MovesTransfer, RawRing, TransferKind
from tests.bench.conftest import NBYTES, all_equal

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from drive_sections import (  # type: ignore[import-not-found]
    SMALL_NBYTES,
    VolumeTransfer,
    apart,
    run,
    side_by_side,
)


@pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
def test_small_extents_that_lie_apart_are_compared_with_the_same_pattern(
    make_lab: Callable[..., Lab],
) -> None:
    results = list(run(make_lab(with_fio=True), "extents"))
    assert all_equal(results)
    for operation in ("read", "write"):
        mine = [each for each in results if each.group.labels["operation"] == operation]
        (near, *far) = [[each.name for each in result.group.ceilings] for result in mine]
        assert near[0] == "extents of 16 MiB"
        assert [names[-1] for names in far] == [
            "fio 64 KiB x 256, strided", "fio 64 KiB x 256, random",
        ]  # fmt: skip
        for result in mine:  # Ceilings moved as much as their subjects.
            moved = {sample.nbytes for samples in result.samples.values() for sample in samples}
            assert len(moved) == 1


def test_checksums_are_measured_beside_none_and_leave_nothing(
    make_lab: Callable[..., Lab],
) -> None:
    lab = make_lab()
    results = list(run(lab, "verify"))
    assert all_equal(results)
    assert [result.group.section for result in results] == ["verify read", "verify write"]
    subjects = [row.subject for row in rows_of(results)]
    assert subjects == ["verify = true", "verify = false, read once", "verify = true"]
    assert list(lab.directories[0].iterdir()) == []


def test_a_changed_page_is_an_error_with_checksums_and_wrong_bytes_without(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab()
    nbytes = lab.effort.nbytes
    for has_checksums in (True, False):
        path = VolumePath(str(tmp_path / f"swap-{has_checksums}"))
        with lab.engine() as engine, Volume(engine, [path], verify=has_checksums) as volume:
            (reserved,) = volume.reserve([nbytes])
            transfer = VolumeTransfer("v", volume, reserved, lab.arena, "read", nbytes)
            with open(volume.file_paths[0], "r+b") as file:
                file.seek(12345)
                file.write(b"?")
            if has_checksums:
                with pytest.raises(CorruptionError):
                    transfer.run()
            else:
                assert transfer.run().ok is False


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("plan", [side_by_side, apart])
def test_small_extents_go_where_they_belong(files: FileSet, kind: TransferKind, plan) -> None:
    moves = plan(kind, NBYTES)
    places = sorted(move.place for move in moves)
    assert places == list(range(0, NBYTES, SMALL_NBYTES))
    assert [move.offset_nbytes for move in moves] != [move.place for move in moves]
    for in_one_request in (True, False):
        sample = MovesTransfer("e", files, moves, in_one_request=in_one_request).run()
        assert sample.ok and sample.nbytes == NBYTES
    if explain_missing_uring() is None:
        with RawRing("r", files, moves, depth=8) as ring:
            assert ring.run().ok


@pytest.mark.parametrize("kind", ["read", "write"])
def test_two_extents_that_change_places_are_seen(files: FileSet, kind: TransferKind) -> None:
    moves = side_by_side(kind, NBYTES)
    transfer = MovesTransfer("e", files, moves, in_one_request=True)
    ((_, segments),) = transfer._requests
    first, second = segments[:2]
    segments[:2] = [
        replace(first, address=second.address),
        replace(second, address=first.address),
    ]
    assert transfer.run().ok is False
