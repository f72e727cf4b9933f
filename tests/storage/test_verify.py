"""Checksums of what is written, and reads that are checked against them."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import CorruptionError, StorageError
from infinity.sizes import KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.checksums import ExpectedRange, PageChecksums, digest
from infinity.storage.generations import UndecidedContent
from infinity.storage.protocol import Priority, StorageEngine
from infinity.storage.volume import Extent, Volume, VolumePath
from infinity.testing.faulty_engine import Fault, FaultyEngine

CRC32C_OF_A_ZERO_PAGE = 0x98F94189


@pytest.fixture
def drives(tmp_path: Path) -> list[VolumePath]:
    return [VolumePath(str(tmp_path / name)) for name in "ab"]


def write(volume: Volume, piece: tuple[Extent, ...], address: int, nbytes: int) -> None:
    volume.write(
        piece, offset_nbytes=0, nbytes=nbytes, address=address, priority=Priority.WRITE_BACK
    ).wait()


def read(volume: Volume, piece: tuple[Extent, ...], address: int, nbytes: int) -> None:
    volume.read(
        piece, offset_nbytes=0, nbytes=nbytes, address=address, priority=Priority.FORWARD
    ).wait()


def place_of(volume: Volume, piece: tuple[Extent, ...], page: int) -> tuple[str, int]:
    """The file and the offset that have a page of a buffer."""
    at = page * PAGE_NBYTES
    for extent in piece:
        if at < extent.nbytes:
            return volume.file_paths[extent.path_index], extent.offset_nbytes + at
        at -= extent.nbytes
    raise AssertionError(page)


@pytest.mark.parametrize("page", [0, 15, 16, 200, 255])
def test_bit_flipped_on_the_drive_is_found_and_named(
    open_any, native_name, arena: Arena, drives: list[VolumePath], page: int
) -> None:
    with Volume(open_any(native_name), drives, stripe_nbytes=64 * KIB, verify=True) as volume:
        (piece,) = volume.reserve([MIB])
        arena.memory(0, MIB)[:] = random.Random(page).randbytes(MIB)
        write(volume, piece, arena.address, MIB)
        path, offset = place_of(volume, piece, page)
        with open(path, "r+b") as raw:
            (byte,) = os.pread(raw.fileno(), 1, offset + 77)
            os.pwrite(raw.fileno(), bytes([byte ^ 8]), offset + 77)
            os.fsync(raw.fileno())
        ticket = volume.read(
            piece, offset_nbytes=0, nbytes=MIB, address=arena.address, priority=Priority.STATE
        )
        for _ in range(2):  # Every time it is asked.
            with pytest.raises(CorruptionError, match="CRC32C") as caught:
                ticket.wait()
        error = caught.value
        assert (error.errno, error.path, error.offset_nbytes) == (errno.EBADMSG, path, offset)
        assert (error.operation, error.nbytes) == ("read", PAGE_NBYTES)
        write(volume, piece, arena.address, MIB)  # Written anew, it is right again.
        read(volume, piece, arena.address, MIB)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("is_undecided", [True, False])
def test_a_write_takes_the_checksums_that_an_update_has_taken(
    open_any, arena: Arena, drives: list[VolumePath], verify: bool, is_undecided: bool
) -> None:
    """Those of pages that no update had are taken at the write."""
    with Volume(
        open_any("threads"), drives, stripe_nbytes=64 * KIB, verify=verify, num_spares=1
    ) as volume:
        (piece,) = volume.reserve([MIB])
        arena.memory(0, MIB)[:] = bytes(MIB)
        write(volume, piece, arena.address, MIB)
        arena.memory(0, MIB)[:] = random.Random(0).randbytes(MIB)
        digests = volume.digests(arena.address, MIB)
        assert digests is not None
        undecided = UndecidedContent() if is_undecided else None
        volume.write(
            piece, offset_nbytes=0, nbytes=MIB, address=arena.address,
            priority=Priority.WRITE_BACK, undecided=undecided, digests=digests,
        ).wait()  # fmt: skip
        if undecided is not None:
            assert volume.checksums(piece) != digest(arena.address, MIB)
            volume.publish(undecided)
        assert volume.checksums(piece) == digest(arena.address, MIB)
        read(volume, piece, arena.address + 8 * MIB, MIB)


def test_without_checksums_none_are_taken(open_any, drives: list[VolumePath]) -> None:
    with Volume(open_any("threads"), drives, verify=False) as volume:
        assert volume.digests(PAGE_NBYTES, PAGE_NBYTES) is None


@pytest.mark.parametrize("operation", ["read", "write"])
def test_bit_flipped_on_the_way_is_found(
    open_any, arena: Arena, drives: list[VolumePath], operation: str
) -> None:
    fault = Fault(nth=2, operation=operation, corrupt=True)
    engine = FaultyEngine(open_any("threads"), [fault])
    with Volume(engine, drives, verify=True) as volume:
        pieces = volume.reserve([MIB, MIB, MIB])
        arena.memory(0, MIB)[:] = random.Random(0).randbytes(MIB)
        for piece in pieces:
            write(volume, piece, arena.address, MIB)
        for index, piece in enumerate(pieces):
            if index == 1:
                with pytest.raises(CorruptionError):
                    read(volume, piece, arena.address + 8 * MIB, MIB)
            else:
                read(volume, piece, arena.address + 8 * MIB, MIB)


def test_failed_read_is_not_taken_for_corruption(
    open_any, arena: Arena, drives: list[VolumePath]
) -> None:
    engine = FaultyEngine(open_any("threads"), [Fault(nth=1, operation="read", errno=errno.EIO)])
    with Volume(engine, drives, verify=True) as volume:
        (piece,) = volume.reserve([MIB])
        with pytest.raises(StorageError) as caught:
            read(volume, piece, arena.address, MIB)
        assert not isinstance(caught.value, CorruptionError)
        read(volume, piece, arena.address, MIB)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_ranges_in_any_state_of_the_queue_are_never_called_corrupt(
    open_any, native_name, arena: Arena, tmp_path: Path, seed: int
) -> None:
    """Writes and reads overlap in the queue; each read is checked against what it must see."""
    prng = random.Random(seed)
    num_pages = 64
    paths = [VolumePath(str(tmp_path / name)) for name in "ab"]
    engine: StorageEngine = open_any(native_name)
    with Volume(engine, paths, stripe_nbytes=16 * KIB, verify=True) as volume:
        (piece,) = volume.reserve([num_pages * PAGE_NBYTES])
        reads = []
        for turn in range(40):
            low = prng.randrange(num_pages)
            nbytes = (prng.randrange(low, num_pages) + 1 - low) * PAGE_NBYTES
            address = arena.address + turn * MIB
            where = {"offset_nbytes": low * PAGE_NBYTES, "nbytes": nbytes, "address": address}
            priority = prng.choice(list(Priority))
            if prng.random() < 0.5:
                arena.memory(turn * MIB, nbytes)[:] = prng.randbytes(nbytes)
                volume.write(piece, **where, priority=priority)
            else:
                reads.append(volume.read(piece, **where, priority=priority))
        for ticket in reads:
            ticket.wait()
    engine.close()


def test_without_verify_what_is_frozen_is_checked_and_what_was_written_since_is_not(
    open_any, arena: Arena, drives: list[VolumePath]
) -> None:
    with Volume(open_any("threads"), drives[:1], verify=False, num_spares=1) as volume:
        (piece,) = volume.reserve([4 * PAGE_NBYTES])
        write(volume, piece, arena.address, 4 * PAGE_NBYTES)
        volume.freeze()
        write(volume, piece, arena.address, 2 * PAGE_NBYTES)  # Elsewhere: the spare file.
        changed, kept = (volume.locate(piece)[index] for index in (0, 1))
        assert changed.path != kept.path
        for each in (changed, kept):
            with open(each.path, "r+b") as raw:
                os.pwrite(raw.fileno(), b"another", each.offset_nbytes)
                os.fsync(raw.fileno())
        read(volume, piece, arena.address, 2 * PAGE_NBYTES)  # Nobody looks: the choice.
        with pytest.raises(CorruptionError) as caught:
            read(volume, piece, arena.address, 4 * PAGE_NBYTES)
        assert (caught.value.path, caught.value.offset_nbytes) == (kept.path, kept.offset_nbytes)


def test_the_checksum_table_covers_ranges_and_zeros() -> None:
    table = PageChecksums()
    table.grow(8 * PAGE_NBYTES)
    zero = CRC32C_OF_A_ZERO_PAGE.to_bytes(4, "little")
    assert table.of(0, 8 * PAGE_NBYTES) == zero * 8
    with Arena(2 * PAGE_NBYTES) as arena:
        arena.memory(0, PAGE_NBYTES)[:] = b"x" * PAGE_NBYTES
        table.put(3 * PAGE_NBYTES, digest(arena.address, 2 * PAGE_NBYTES))
    assert table.of(4 * PAGE_NBYTES, PAGE_NBYTES) == zero
    mark = table.of(3 * PAGE_NBYTES, PAGE_NBYTES)
    assert mark != zero
    table.grow(16 * PAGE_NBYTES)
    table.grow(4 * PAGE_NBYTES)  # A file never shrinks.
    assert table.of(0, 16 * PAGE_NBYTES) == zero * 3 + mark + zero * 12


def test_pages_that_another_job_left_are_unknown_until_written() -> None:
    table = PageChecksums(is_fresh=False)
    table.grow(8 * PAGE_NBYTES)
    assert table.known(0, 8 * PAGE_NBYTES) == []
    table.put(2 * PAGE_NBYTES, bytes(4 * 3))
    assert table.known(0, 8 * PAGE_NBYTES) == [(2 * PAGE_NBYTES, 3 * PAGE_NBYTES)]
    table.forget(3 * PAGE_NBYTES, PAGE_NBYTES)
    assert table.known(0, 8 * PAGE_NBYTES) == [
        (2 * PAGE_NBYTES, PAGE_NBYTES),
        (4 * PAGE_NBYTES, PAGE_NBYTES),
    ]
    table.put(0, bytes(4 * 8))
    assert table.known(0, 8 * PAGE_NBYTES) == [(0, 8 * PAGE_NBYTES)]


@settings(max_examples=30, deadline=None)
@given(
    num_pages=st.integers(1, 700), bad=st.sets(st.integers(0, 699), max_size=3),
    num_threads=st.integers(1, 5),
)  # fmt: skip
def test_threads_change_no_checksum_and_find_the_first_bad_page(
    num_pages: int, bad: set[int], num_threads: int
) -> None:
    pages = bytearray(random.Random(num_pages).randbytes(num_pages * PAGE_NBYTES))
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    expected = digest(memory.data_ptr(), len(pages))
    assert digest(memory.data_ptr(), len(pages), num_threads) == expected
    for page in bad:
        if page < num_pages:
            pages[page * PAGE_NBYTES + page] ^= 1
    whole = ExpectedRange("file", 0, memory.data_ptr(), len(pages), expected)
    error = whole.check(num_threads)
    first = min((page for page in bad if page < num_pages), default=None)
    assert (None if error is None else error.offset_nbytes // PAGE_NBYTES) == first
