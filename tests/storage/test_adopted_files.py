"""Swap files of a job that is gone, gone on with by the next one."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from infinity.sizes import KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.engine import Priority
from infinity.storage.swap_directory import job_of
from infinity.storage.volume import Adopted, Extent, Volume, VolumePath

SIZE = 256 * KIB


def write(volume: Volume, arena: Arena, piece: tuple[Extent, ...], data: bytes, at: int = 0):
    arena.memory(0, len(data))[:] = data
    volume.write(
        piece, offset_nbytes=at, nbytes=len(data), address=arena.address,
        priority=Priority.WRITE_BACK,
    ).wait()  # fmt: skip


def read(volume: Volume, arena: Arena, piece: tuple[Extent, ...]) -> bytes:
    volume.read(
        piece, offset_nbytes=0, nbytes=SIZE, address=arena.address, priority=Priority.FORWARD
    ).wait()
    return bytes(arena.memory(0, SIZE))


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
    (piece, scratch) = volume.reserve([SIZE, SIZE], spared_nbytes=[SIZE, None])
    for label in ("first", "second"):
        data[label] = drawn.randbytes(SIZE)
        write(volume, arena, piece, data[label])
        volume.freeze(label)
        contents[label] = volume.locate(piece)
        checksums[label] = volume.checksums(piece)
    write(volume, arena, piece, b"x" * SIZE)
    size = os.path.getsize(volume.file_paths[0])
    job = job_of(os.path.basename(volume.file_paths[0]))
    volume.close(remove=False)
    (tmp_path / "drive" / "infinity.lock").unlink()  # A killed job does not ask to keep anything.

    adopted = Adopted({drive.path: job}, contents)
    with Volume(open_any("threads"), [drive], num_spares=2, verify=True, adopted=adopted) as later:
        assert os.path.getsize(later.file_paths[0]) == size, "probing has left it as it was"
        (again, scratch) = later.reserve([SIZE, SIZE], spared_nbytes=[SIZE, None])
        assert again == piece
        write(later, arena, again, b"y" * SIZE)
        for label in ("second", "first", "second"):
            (frozen,) = [each for each in later.frozen if each.label == label]
            later.restore(frozen)
            later.put_checksums(again, checksums[label])
            assert read(later, arena, again) == data[label]
            write(later, arena, again, b"z" * PAGE_NBYTES, at=8 * PAGE_NBYTES)
            write(later, arena, scratch, b"s" * SIZE)
            assert read(later, arena, scratch) == b"s" * SIZE
    assert not list((tmp_path / "drive").iterdir())


def test_scratch_is_written_in_place_whatever_is_frozen(
    open_any, arena: Arena, tmp_path: Path
) -> None:
    with Volume(open_any("threads"), [VolumePath(str(tmp_path / "d"))], num_spares=1) as volume:
        piece, scratch = volume.reserve([SIZE, 4 * MIB], spared_nbytes=[SIZE, None])
        taken = [os.stat(path).st_blocks for path in (tmp_path / "d").glob("*.swap")]
        for number in range(3):
            write(volume, arena, piece, bytes([number]) * SIZE)
            write(volume, arena, scratch, bytes([number]) * MIB)
            for frozen in volume.frozen:
                volume.thaw(frozen)
            volume.freeze()
            assert {each.path for each in volume.locate(scratch)} == {volume.file_paths[0]}
        now = [os.stat(path).st_blocks for path in (tmp_path / "d").glob("*.swap")]
        assert now == taken, "no block beyond those that were reserved"
