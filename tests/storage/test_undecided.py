"""Undecided writes: every read has the old bytes until they are published, whatever is frozen."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path

import pytest

from infinity.errors import CorruptionError, StorageError
from infinity.sizes import KIB, PAGE_NBYTES
from infinity.state.store import await_end
from infinity.storage.arena import Arena
from infinity.storage.generations import UndecidedContent
from infinity.storage.protocol import FollowedTicket, Priority, Ticket
from infinity.storage.volume import Extent, Volume, VolumePath

from .test_generations import SIZE, bytes_of, on_drive, read, write


def write_undecided(
    volume: Volume,
    arena: Arena,
    extents: tuple[Extent, ...],
    content: UndecidedContent,
    data: bytes,
) -> None:
    arena.memory(0, len(data))[:] = data
    volume.write(
        extents, offset_nbytes=0, nbytes=len(data), address=arena.address,
        priority=Priority.WRITE_BACK, undecided=content,
    ).wait()  # fmt: skip


@pytest.mark.parametrize("verify", [True, False])
def test_undecided_writes_are_seen_when_they_are_published_and_leave_frozen_bytes(
    open_any, arena: Arena, tmp_path: Path, verify: bool
) -> None:
    drawn = random.Random(verify)
    drives = [VolumePath(str(tmp_path / name)) for name in "ab"]
    with Volume(
        open_any("threads"), drives, stripe_nbytes=32 * KIB, verify=verify, num_spares=2
    ) as volume:
        one, other = volume.reserve([SIZE, SIZE])
        expected = {one: bytes(SIZE), other: bytes(SIZE)}
        frozen = []
        for number in range(40):
            assert volume.can_be_undecided
            content, data = UndecidedContent(), drawn.randbytes(SIZE)
            write_undecided(volume, arena, one, content, data)
            if drawn.random() < 0.5:  # Beside it, something decided.
                expected[other] = drawn.randbytes(SIZE)
                write(volume, arena, other, 0, expected[other])
            if number % 5 == 0:
                frozen.append((volume.freeze(), on_drive(volume, one), expected[one]))
            assert read(volume, arena, one) == expected[one]
            if drawn.random() < 0.6:
                volume.publish(content)
                expected[one] = data
            elif drawn.random() < 0.5:  # Dropped; the update is made in place of the old bytes.
                expected[one] = drawn.randbytes(SIZE)
                write(volume, arena, one, 0, expected[one])
            for extents, wanted in expected.items():
                assert read(volume, arena, extents) == wanted
            for _, places, wanted in frozen:
                assert bytes_of(places) == wanted
            if len(frozen) > 1:
                volume.thaw(frozen.pop(0)[0])


def test_a_published_page_that_changed_on_the_drive_is_found(
    open_any, arena: Arena, tmp_path: Path
) -> None:
    drives = [VolumePath(str(tmp_path / "a"))]
    with Volume(open_any("threads"), drives, verify=True, num_spares=1) as volume:
        (extents,) = volume.reserve([SIZE])
        write(volume, arena, extents, 0, b"1" * SIZE)
        content = UndecidedContent()
        write_undecided(volume, arena, extents, content, b"2" * SIZE)
        volume.publish(content)
        ((path, offset, _),) = on_drive(volume, extents)
        with open(path, "r+b") as file:
            file.seek(offset + PAGE_NBYTES)
            file.write(b"3")
        with pytest.raises(CorruptionError):
            read(volume, arena, extents)


class InFlight(Ticket):
    """A request that is over once it has been awaited."""

    is_over = False

    def done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True


def test_a_request_is_over_before_the_error_of_work_beside_it_is_raised() -> None:
    work: Future[None] = Future()
    work.set_exception(MemoryError("checksums"))
    ticket = FollowedTicket(InFlight(), work)
    await_end(ticket)
    assert ticket.done()
    with pytest.raises(MemoryError, match="checksums"):
        ticket.wait()


@pytest.mark.parametrize("num_spares", [0, 1])
def test_without_a_spare_generation_nothing_is_written_undecided(
    open_any, arena: Arena, tmp_path: Path, num_spares: int
) -> None:
    drives = [VolumePath(str(tmp_path / "a"))]
    with Volume(open_any("threads"), drives, num_spares=num_spares) as volume:
        (extents,) = volume.reserve([SIZE])
        write(volume, arena, extents, 0, b"1" * SIZE)
        if num_spares:
            volume.freeze()
            write(volume, arena, extents, 0, b"1" * SIZE)
        assert not volume.can_be_undecided
        with pytest.raises(StorageError, match="spare generations"):
            write_undecided(volume, arena, extents, UndecidedContent(), b"2" * SIZE)
        assert read(volume, arena, extents) == b"1" * SIZE
