"""bench/drive_sections.py, small: results come, bytes are right, and wrong ones are seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.errors import CorruptionError
from infinity.storage.probe import explain_missing_uring
from infinity.storage.volume import Volume, VolumePath
from infinity.tools.bench import fio
from infinity.tools.bench.measure import Lab
from infinity.tools.bench.report import rows_of
from infinity.tools.bench.transfer import FileSet, TransferKind, moves_transfer, raw_ring
from tests.bench.conftest import NBYTES, all_equal

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from drive_sections import (  # type: ignore[import-not-found]
    SMALL_NBYTES,
    apart,
    run,
    side_by_side,
    volume_transfer,
)


@pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
def test_small_extents_that_lie_apart_are_compared_with_the_same_pattern(
    make_lab: Callable[..., Lab],
) -> None:
    results = list(run(make_lab(with_fio=True), "extents"))
    assert all_equal(results)
    for operation in ("read", "write"):
        mine = [each for each in results if each.labels["operation"] == operation]
        (near, *far) = [[each.name for each in result.ceilings] for result in mine]
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
    assert [result.section for result in results] == ["verify read", "verify write"]
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
            transfer = volume_transfer("v", volume, reserved, lab.arena, "read", nbytes)
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
    places = sorted(move.place_nbytes for move in moves)
    assert places == list(range(0, NBYTES, SMALL_NBYTES))
    assert [move.offset_nbytes for move in moves] != [move.place_nbytes for move in moves]
    for in_one_request in (True, False):
        sample = moves_transfer("e", files, moves, in_one_request=in_one_request).run()
        assert sample.ok and sample.nbytes == NBYTES
    if explain_missing_uring() is None:
        with raw_ring("r", files, moves, depth=8) as ring:
            assert ring.run().ok


@pytest.mark.parametrize("kind", ["read", "write"])
def test_two_extents_that_change_places_are_seen(files: FileSet, kind: TransferKind) -> None:
    submit = files.engine.submit

    def swapped(operation, segments, priority):
        if len(segments) > 2:
            first, second, *rest = segments
            here, there = first.address, second.address
            segments = [replace(first, address=there), replace(second, address=here), *rest]
        return submit(operation, segments, priority)

    files.engine = SimpleNamespace(submit=swapped)
    moves = side_by_side(kind, NBYTES)
    assert moves_transfer("e", files, moves, in_one_request=True).run().ok is False
