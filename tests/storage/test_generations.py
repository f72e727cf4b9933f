"""Volumes with spare files: what is frozen stays as it is on the drive, and space is counted."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest

from infinity.errors import CapacityError, CorruptionError, StorageError, UnsupportedError
from infinity.sizes import KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.generations import Adopted, FrozenContent
from infinity.storage.lock_file import job_of
from infinity.storage.protocol import Priority
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.volume import Extent, Spared, Volume, VolumePath

SIZE = 512 * KIB


@pytest.fixture
def drives(tmp_path: Path) -> list[VolumePath]:
    return [VolumePath(str(tmp_path / name)) for name in "ab"]


def write(volume: Volume, arena: Arena, extents: tuple[Extent, ...], at: int, data: bytes) -> None:
    arena.memory(0, len(data))[:] = data
    volume.write(
        extents, offset_nbytes=at, nbytes=len(data), address=arena.address,
        priority=Priority.WRITE_BACK,
    ).wait()  # fmt: skip


def read(volume: Volume, arena: Arena, extents: tuple[Extent, ...]) -> bytes:
    volume.read(
        extents, offset_nbytes=0, nbytes=SIZE, address=arena.address, priority=Priority.FORWARD
    ).wait()
    return bytes(arena.memory(0, SIZE))


def on_drive(volume: Volume, extents: tuple[Extent, ...]) -> list[tuple[str, int, int]]:
    return [(r.path, r.offset_nbytes, r.nbytes) for r in volume.locate(extents)]


def bytes_of(places: list[tuple[str, int, int]]) -> bytes:
    content = b""
    for path, offset, nbytes in places:
        with open(path, "rb") as file:
            file.seek(offset)
            content += file.read(nbytes)
    return content


@pytest.mark.parametrize("num_spares", [1, 2])
def test_frozen_content_stays_on_the_drive_whatever_is_written(
    open_any, native_name, arena: Arena, drives: list[VolumePath], num_spares: int
) -> None:
    drawn = random.Random(num_spares)
    with Volume(
        open_any(native_name), drives, stripe_nbytes=32 * KIB, verify=True, num_spares=num_spares
    ) as volume:
        extents, _ = volume.reserve([SIZE, MIB])
        expected = bytes(SIZE)
        kept: list[tuple[FrozenContent, list[tuple[str, int, int]], bytes]] = []
        for _ in range(60):
            for _ in range(drawn.randint(1, 6)):
                at = drawn.randrange(0, SIZE, PAGE_NBYTES)
                nbytes = min(SIZE - at, drawn.randint(1, 20) * PAGE_NBYTES)
                data = drawn.randbytes(nbytes)
                write(volume, arena, extents, at, data)
                expected = expected[:at] + data + expected[at + nbytes :]
            assert read(volume, arena, extents) == expected
            volume.sync()
            kept.append((volume.freeze(), on_drive(volume, extents), expected))
            if len(kept) > num_spares:
                volume.thaw(kept.pop(drawn.randrange(num_spares))[0])
            assert len(volume.frozen) == len(kept) <= num_spares
            for _, places, content in kept:
                assert bytes_of(places) == content
        files = {path for path, _, _ in on_drive(volume, extents)}
        assert len(files) > len(drives), "generations were used"


def test_without_a_commit_nothing_moves_and_without_spares_there_is_one_file(
    open_any, arena: Arena, drives: list[VolumePath]
) -> None:
    for num_spares in (0, 1):
        with Volume(open_any("threads"), drives[:1], num_spares=num_spares) as volume:
            (extents,) = volume.reserve([SIZE])
            write(volume, arena, extents, 0, b"x" * SIZE)
            assert on_drive(volume, extents) == [(volume.file_paths[0], 0, SIZE)]
            assert len(list(Path(drives[0].path).glob("*.swap"))) == 1 + num_spares
        assert not list(Path(drives[0].path).iterdir())


def test_a_bit_flipped_in_a_spare_file_is_found_and_named(
    open_any, arena: Arena, drives: list[VolumePath]
) -> None:
    with Volume(open_any("threads"), drives[:1], verify=True, num_spares=1) as volume:
        (extents,) = volume.reserve([SIZE])
        write(volume, arena, extents, 0, b"1" * SIZE)
        volume.freeze()
        write(volume, arena, extents, 64 * KIB, b"2" * 64 * KIB)
        (_, (path, offset, _), _) = on_drive(volume, extents)
        assert path.endswith("-1.swap") and offset == 64 * KIB
        with open(path, "r+b") as file:
            file.seek(offset + 5000)
            file.write(b"3")
        with pytest.raises(CorruptionError) as caught:
            read(volume, arena, extents)
        assert caught.value.path == path
        assert caught.value.offset_nbytes == offset + PAGE_NBYTES


def test_more_commits_than_spares_leave_no_space_for_a_write(
    open_any, arena: Arena, drives: list[VolumePath]
) -> None:
    with Volume(open_any("threads"), drives[:1], num_spares=1) as volume:
        (extents,) = volume.reserve([SIZE])
        write(volume, arena, extents, 0, b"1" * SIZE)
        first = volume.freeze()
        write(volume, arena, extents, 0, b"2" * SIZE)
        volume.freeze()
        with pytest.raises(StorageError, match="2 commits are kept and there are 1 spare") as full:
            write(volume, arena, extents, 0, b"3" * SIZE)
        assert full.value.errno == errno.ENOSPC
        assert read(volume, arena, extents) == b"2" * SIZE
        volume.thaw(first)
        volume.thaw(first)
        write(volume, arena, extents, 0, b"3" * SIZE)
        assert read(volume, arena, extents) == b"3" * SIZE


def test_links_outlive_the_volume(open_any, arena: Arena, drives, tmp_path: Path) -> None:
    with Volume(open_any("threads"), drives[:1], num_spares=1) as volume:
        (extents,) = volume.reserve([SIZE])
        write(volume, arena, extents, 0, b"1" * SIZE)
        volume.sync()
        volume.freeze()
        ((path, offset, nbytes),) = on_drive(volume, extents)
        os.link(path, tmp_path / "link")
        write(volume, arena, extents, 0, b"2" * SIZE)
    assert bytes_of([(str(tmp_path / "link"), offset, nbytes)]) == b"1" * SIZE


# Space.


def test_spares_are_preallocated_for_what_is_rewritten_only(
    open_any, drives: list[VolumePath]
) -> None:
    with Volume(open_any("threads"), drives[:1], num_spares=2) as volume:
        volume.reserve([MIB, 4 * MIB], spared=[Spared(MIB), Spared(64 * KIB)])
        base, *spares = sorted(Path(drives[0].path).glob("*.swap"), key=lambda path: len(path.name))
        assert {os.stat(path).st_size for path in (base, *spares)} == {5 * MIB}
        assert os.stat(base).st_blocks * 512 >= 5 * MIB
        for path in spares:
            assert MIB + 64 * KIB <= os.stat(path).st_blocks * 512 < 2 * MIB


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("missing_nbytes", [0, PAGE_NBYTES])
def test_spares_are_counted_before_anything_is_taken(
    open_any, tmp_path: Path, paths: int, missing_nbytes: int
) -> None:
    """2 MiB of which 1 is rewritten, and 3 spares of that: 5 MiB, to the page."""
    room_nbytes = (5 * MIB - missing_nbytes) // paths // PAGE_NBYTES * PAGE_NBYTES
    drives = [VolumePath(str(tmp_path / str(i)), capacity_nbytes=room_nbytes) for i in range(paths)]
    with Volume(open_any("threads"), drives, stripe_nbytes=PAGE_NBYTES, num_spares=3) as volume:
        if not missing_nbytes:
            volume.reserve([2 * MIB], spared=[Spared(MIB)])
            return
        with pytest.raises(CapacityError, match=r"checkpoint\.keep") as refused:
            volume.reserve([2 * MIB], spared=[Spared(MIB)])
        assert "3 spare generations" in str(refused.value)
        assert [os.path.getsize(path) for path in volume.file_paths] == [0] * paths


def test_later_buffers_get_what_the_spares_have_left(open_any, tmp_path: Path) -> None:
    """2 MiB and its spare are a capacity of 4 MiB, on one path or on two."""
    for paths in (1, 2):
        places = [str(tmp_path / f"{paths}-{index}") for index in range(paths)]
        drives = [VolumePath(place, capacity_nbytes=4 * MIB // paths) for place in places]
        with Volume(open_any("threads"), drives, stripe_nbytes=PAGE_NBYTES, num_spares=1) as volume:
            volume.reserve([2 * MIB], spared=[Spared(2 * MIB)])
            with pytest.raises(CapacityError) as refused:
                volume.reserve([MIB], spared=[None])
            assert refused.value.available_nbytes == 0


def test_blocks_of_adopted_files_are_counted_until_they_are_taken(open_any, tmp_path: Path) -> None:
    drive = VolumePath(str(tmp_path / "drive"))
    with Volume(open_any("threads"), [drive], num_spares=1) as volume:
        volume.reserve([2 * MIB], spared=[Spared(MIB)])
        job = job_of(os.path.basename(volume.file_paths[0]))
        volume.close(remove=False)
    (tmp_path / "drive" / "infinity.lock").unlink()
    directory = SwapDirectory(drive.path, num_spares=1, adopt=job)
    try:
        left = [directory.adopted_nbytes // MIB]  # The file system may add a block of its own.
        for size_nbytes, spared in ((MIB, [(0, MIB)]), (2 * MIB, []), (3 * MIB, [])):
            directory.grow(size_nbytes, spared=[spared])
            left.append(directory.adopted_nbytes // MIB)
        assert left == [3, 1, 0, 0]
        assert directory.taken_nbytes == 4 * MIB
    finally:
        directory.close(remove=True)


def test_one_full_path_is_named_although_the_others_have_space(open_any, tmp_path: Path) -> None:
    small = VolumePath(str(tmp_path / "small"), capacity_nbytes=MIB + 512 * KIB, weight=5.0)
    large = VolumePath(str(tmp_path / "large"), capacity_nbytes=64 * MIB, weight=0.001)
    with Volume(open_any("threads"), [small, large], num_spares=1) as volume:
        # What is rewritten all comes to lie on the small path.
        with pytest.raises(CapacityError, match="small") as refused:
            volume.reserve([MIB, 40 * MIB], spared=[Spared(MIB), Spared(0)])
        assert refused.value.needed_nbytes > refused.value.available_nbytes
        assert [os.path.getsize(path) for path in volume.file_paths] == [0, 0]


def test_a_directory_that_a_newer_version_left_is_refused(open_any, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "infinity.lock").write_text(json.dumps({"schema": 99, "pid": None}))
    (drive / "infinity-0123456789abcdef.swap").write_bytes(b"of the newer one")
    with pytest.raises(UnsupportedError, match="schema 99"):
        Volume(open_any("threads"), [VolumePath(str(drive))])
    assert len(list(drive.iterdir())) == 2


# Files of a job that is gone.


@pytest.mark.parametrize("can_allocate", [True, False])
def test_frozen_contents_survive_and_are_restored(
    open_any, arena: Arena, tmp_path: Path, monkeypatch, can_allocate: bool
) -> None:
    """Two contents of a job that ended are frozen again, before a byte is written; also where the
    file system has no fallocate and ranges are written once instead."""

    def refuse(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if not can_allocate:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    drive = VolumePath(str(tmp_path / "drive"))
    drawn = random.Random(0)
    contents, checksums, data = {}, {}, {}
    volume = Volume(open_any("threads"), [drive], num_spares=2)
    (extents, scratch) = volume.reserve([SIZE, SIZE], spared=[Spared(SIZE), None])
    for label in ("first", "second"):
        data[label] = drawn.randbytes(SIZE)
        write(volume, arena, extents, 0, data[label])
        volume.freeze(label)
        contents[label] = volume.locate(extents)
        checksums[label] = volume.checksums(extents)
    write(volume, arena, extents, 0, b"x" * SIZE)
    size = os.path.getsize(volume.file_paths[0])
    job = job_of(os.path.basename(volume.file_paths[0]))
    volume.close(remove=False)
    (tmp_path / "drive" / "infinity.lock").unlink()  # A killed job does not ask to keep anything.

    adopted = Adopted({drive.path: job}, contents)
    with Volume(open_any("threads"), [drive], num_spares=2, verify=True, adopted=adopted) as later:
        assert os.path.getsize(later.file_paths[0]) == size, "probing has left it as it was"
        (again, scratch) = later.reserve([SIZE, SIZE], spared=[Spared(SIZE), None])
        assert again == extents
        write(later, arena, again, 0, b"y" * SIZE)
        for label in ("second", "first", "second"):
            (frozen,) = [each for each in later.frozen if each.label == label]
            later.restore(frozen)
            later.put_checksums(again, checksums[label])
            assert read(later, arena, again) == data[label]
            write(later, arena, again, 8 * PAGE_NBYTES, b"z" * PAGE_NBYTES)
            write(later, arena, scratch, 0, b"s" * SIZE)
            assert read(later, arena, scratch) == b"s" * SIZE
    assert not list((tmp_path / "drive").iterdir())


def test_scratch_is_written_in_place_whatever_is_frozen(
    open_any, arena: Arena, tmp_path: Path
) -> None:
    with Volume(open_any("threads"), [VolumePath(str(tmp_path / "d"))], num_spares=1) as volume:
        extents, scratch = volume.reserve([SIZE, 4 * MIB], spared=[Spared(SIZE), None])
        taken = [os.stat(path).st_blocks for path in (tmp_path / "d").glob("*.swap")]
        for number in range(3):
            write(volume, arena, extents, 0, bytes([number]) * SIZE)
            write(volume, arena, scratch, 0, bytes([number]) * MIB)
            for frozen in volume.frozen:
                volume.thaw(frozen)
            volume.freeze()
            assert {each.path for each in volume.locate(scratch)} == {volume.file_paths[0]}
        now = [os.stat(path).st_blocks for path in (tmp_path / "d").glob("*.swap")]
        assert now == taken, "no block beyond those that were reserved"


def test_a_private_buffer_is_kept_by_no_commit(open_any, arena: Arena, tmp_path: Path) -> None:
    """It takes the space of one spare file of three; a commit does not keep it; `restore` of one
    leaves it as it is."""
    drive = VolumePath(str(tmp_path / "d"))
    with Volume(open_any("threads"), [drive], num_spares=3, num_private=1) as volume:
        spared = [Spared(SIZE), Spared(SIZE, is_private=True)]
        extents, private = volume.reserve([SIZE, SIZE], spared=spared)
        files = list((tmp_path / "d").glob("*.swap"))
        taken = [os.stat(path).st_blocks for path in files]
        assert sorted(blocks * 512 // SIZE for blocks in taken) == [1, 1, 2, 2]
        for number in range(4):
            data = bytes([number]) * SIZE
            write(volume, arena, extents, 0, data)
            write(volume, arena, private, 0, data)
            commit = volume.freeze("a commit")
            assert {each.path for each in volume.locate(private, commit)} == {""}
            write(volume, arena, private, 0, b"x" * SIZE)
            volume.restore(commit)
            assert read(volume, arena, private) == b"x" * SIZE
            assert read(volume, arena, extents) == data
            write(volume, arena, private, 0, b"y" * SIZE)
            volume.thaw(commit)
        assert [os.stat(path).st_blocks for path in files] == taken
