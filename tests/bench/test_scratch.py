"""BenchDirectory files: the size that was asked for, full drives, and nothing left behind."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity.errors import CapacityError, StorageError, SwapLockedError
from infinity.sizes import GIB, MIB
from infinity.storage.arena import Arena
from infinity.storage.protocol import FileRange
from infinity.storage.volume import Extent
from infinity.tools.bench import pattern
from infinity.tools.bench.measure import Lab
from infinity.tools.bench.scratch import (
    DIRECTORY_NAME,
    bench_directory,
    shares_of,
)

NBYTES = 16 * MIB
_Statvfs = namedtuple("_Statvfs", "f_frsize f_blocks f_bavail")


def test_files_have_the_stated_size_and_are_removed(arena: Arena, tmp_path: Path) -> None:
    with bench_directory(arena, [tmp_path], NBYTES) as scratch:
        (path,) = scratch.file_paths
        assert os.stat(path).st_size == 2 * NBYTES
        # Allocated and written, not sparse: holes would be read without the drive.
        assert os.stat(path).st_blocks * 512 >= 2 * NBYTES
        data = memoryview(bytearray(Path(path).read_bytes()))
        for share in (*scratch.shares("still"), *scratch.shares("busy")):
            region = data[share.offset_nbytes : share.offset_nbytes + share.nbytes]
            assert pattern.matches(region, offset_nbytes=0, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_striped_files_share_the_regions(arena: Arena, make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    with bench_directory(arena, lab.directories, NBYTES) as scratch:
        sizes = [os.stat(path).st_size for path in scratch.file_paths]
        assert sizes == [NBYTES, NBYTES]
        assert [share.nbytes for share in scratch.shares("busy")] == [NBYTES // 2, NBYTES // 2]
    assert all(list(directory.iterdir()) == [] for directory in lab.directories)


def test_files_are_removed_when_the_block_raises(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), bench_directory(arena, [tmp_path], NBYTES):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_in_our_directory_stays(arena: Arena, tmp_path: Path) -> None:
    foreign = tmp_path / DIRECTORY_NAME / "foreign"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    with bench_directory(arena, [tmp_path], NBYTES):
        pass
    assert foreign.read_text() == "mine"
    assert [path.name for path in foreign.parent.iterdir()] == ["foreign"]


def test_two_benchmarks_on_one_path_are_refused(arena: Arena, tmp_path: Path) -> None:
    with bench_directory(arena, [tmp_path], NBYTES) as scratch:
        with pytest.raises(SwapLockedError), bench_directory(arena, [tmp_path], NBYTES):
            pass
        assert os.path.exists(scratch.file_paths[0])


def test_a_full_drive_is_refused_before_a_file_is_made(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 100 GiB with 1 GiB and 20 MiB free: the reserve of 1 GiB leaves 20 MiB, 32 MiB are wanted.
    pages = 4096
    full = _Statvfs(pages, 100 * GIB // pages, (GIB + 20 * MIB) // pages)
    monkeypatch.setattr(os, "fstatvfs", lambda _: full)
    with (
        pytest.raises(CapacityError, match="too full.*--size") as caught,
        bench_directory(arena, [tmp_path], NBYTES),
    ):
        pass
    assert caught.value.needed_nbytes == 2 * NBYTES
    assert caught.value.available_nbytes == 20 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_named(arena: Arena, tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="nowhere"),
        bench_directory(arena, [tmp_path / "nowhere"], NBYTES),
    ):
        pass


def test_shares_are_one_range_per_file() -> None:
    extents = [Extent(0, 8, 4), Extent(1, 0, 4), Extent(0, 12, 4)]
    assert shares_of(extents, ["a", "b"]) == [FileRange("a", 8, 8), FileRange("b", 0, 4)]
