"""Memory that the ranks of one machine read of each other, in place of bytes through sockets.

A rank has two regions that other ranks of its machine map, read-only: its host arena, where the
kernel makes that a file in memory, and a bounce buffer for contents that are elsewhere. A rank
opens the files of another one as /proc/PID/fd/N. A token in the bounce buffer shows that the file
is the right one: in another PID namespace the number means another process. Where anything of this
fails, contents go through sockets, in that direction alone.

A mapping keeps its memory after the end of the rank that made it, so a read never faults.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy

from infinity.distributed.wire.protocol import Purpose
from infinity.sizes import KIB, MIB, PAGE_NBYTES, align_up
from infinity.storage.arena import Arena, view_arena

CHUNK_NBYTES = 512 * KIB  # A chunk is copied in while the other rank copies the one before out.
NUM_CHUNKS = 2  # Of a bounce buffer.
# The most of a range in an arena: a rank says that it lives when it has copied one.
RANGE_NBYTES = 256 * MIB
_TOKEN_NBYTES = 32
_LINE_NBYTES = 64  # Of a processor's cache.

Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
_NOTHING: Bytes = numpy.empty(0, numpy.uint8)


class SharedRegion(IntEnum):
    """Memory of a rank that other ranks of its machine read."""

    BOUNCE = 0
    ARENA = 1


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The facts that a rank tells the other ranks of its memory. `token` is at the start of BOUNCE.
    `files`: the descriptor in that process and the bytes of each file in memory."""

    boot: str
    pid: int
    token: bytes
    files: dict[SharedRegion, tuple[int, int]]


class BounceBuffer:
    """The ranges that one thread of this rank has lent to another rank, and memory for contents
    that the other rank has not mapped: a ring of NUM_CHUNKS chunks.

    The other rank takes ranges in the order in which they were lent.
    """

    def __init__(self, own: OwnMemory, offset_nbytes: int) -> None:
        self._own = own
        self._offset_nbytes = offset_nbytes
        self._next = self._used_nbytes = 0  # In the ring.
        self._lent: deque[int] = deque()  # Bytes of the ring, by range that is not taken.
        self.num_taken = 0  # Ranges, ever.

    @property
    def num_lent(self) -> int:
        """The number of ranges that were lent, ever."""
        return self.num_taken + len(self._lent)

    def lend(
        self, content: memoryview, await_taken: Callable[[], None]
    ) -> Iterator[tuple[SharedRegion, int, int]]:
        """Yields the ranges of `content`, in order: region, offset, bytes. They are the memory
        itself where other ranks have it mapped, else chunks of a copy.

        await_taken: waits until the oldest range is taken and calls `note_taken`; called while the
        ring is full
        """
        start = self._own.place_in_arena(content)
        if start is not None:
            for done in range(0, content.nbytes, RANGE_NBYTES):
                self._lent.append(0)
                nbytes = min(RANGE_NBYTES, content.nbytes - done)
                yield SharedRegion.ARENA, start + done, nbytes
            return
        source = bytes_of(content)
        for done in range(0, content.nbytes, CHUNK_NBYTES):
            part = source[done : done + CHUNK_NBYTES]
            place = self._offset_nbytes + self._take(align_up(part.size, _LINE_NBYTES), await_taken)
            numpy.copyto(self._own.bounce[place : place + part.size], part)
            yield SharedRegion.BOUNCE, place, part.size

    def _take(self, nbytes: int, await_taken: Callable[[], None]) -> int:
        """Returns the start of so many adjacent bytes of the ring, at most a chunk."""
        capacity_nbytes = NUM_CHUNKS * CHUNK_NBYTES
        start, taken_nbytes = self._next, nbytes
        if start + nbytes > capacity_nbytes:  # What is left at the end is passed over.
            start, taken_nbytes = 0, capacity_nbytes - start + nbytes
        while self._used_nbytes + taken_nbytes > capacity_nbytes:
            await_taken()
        self._next = start + nbytes
        self._used_nbytes += taken_nbytes
        self._lent.append(taken_nbytes)
        return start

    def note_taken(self) -> None:
        """Notes that the other rank has copied the oldest range."""
        self._used_nbytes -= self._lent.popleft()
        self.num_taken += 1


class OwnMemory:
    """The memory of this rank that other ranks read. Raises OSError if the kernel has no memfd."""

    def __init__(self, num_ranks: int, boot: str, arena: Arena | None) -> None:
        buffers_nbytes = num_ranks * len(Purpose) * NUM_CHUNKS * CHUNK_NBYTES
        self._buffers = Arena(PAGE_NBYTES + buffers_nbytes, huge_pages=False, is_shared=True)
        self.bounce = bytes_of(self._buffers.memory(0, self._buffers.capacity_nbytes))
        token = secrets.token_bytes(_TOKEN_NBYTES)
        self.bounce[:_TOKEN_NBYTES] = bytes_of(memoryview(token))
        self._arena = None if arena is None or arena.descriptor is None else arena
        regions = {SharedRegion.BOUNCE: self._buffers}
        if self._arena is not None:
            regions[SharedRegion.ARENA] = self._arena
        files = {
            region: (memory.descriptor, memory.capacity_nbytes)
            for region, memory in regions.items()
            if memory.descriptor is not None
        }
        self.offer = MemoryOffer(boot, os.getpid(), token, files)

    def bounce_buffer(self, rank: int, *, is_answering: bool) -> BounceBuffer:
        """Returns the buffer for contents that go to `rank`, on a socket that this rank has opened
        or, `is_answering`, that `rank` has opened."""
        number = rank * len(Purpose) + is_answering
        return BounceBuffer(self, PAGE_NBYTES + number * NUM_CHUNKS * CHUNK_NBYTES)

    @property
    def lends_arena(self) -> bool:
        """Whether other ranks map the arena too."""
        return self._arena is not None

    def place_in_arena(self, content: memoryview) -> int | None:
        """Returns the offset of memory in the arena; None for other memory, and without an arena
        that other ranks read."""
        if self._arena is None:
            return None
        start = int(bytes_of(content).ctypes.data) - self._arena.address
        is_inside = start >= 0 and start + content.nbytes <= self._arena.capacity_nbytes
        return start if is_inside else None

    def close_files(self) -> None:
        """Ends the offer. What is mapped, here or elsewhere, stays."""
        self._buffers.close_file()
        if self._arena is not None:
            self._arena.close_file()


class MappedMemory:
    """The memory of another rank, as this rank reads it."""

    def __init__(self, regions: dict[int, Bytes]) -> None:
        self._regions = regions

    def view(self, region: int, offset_nbytes: int, nbytes: int) -> Bytes:
        """Returns a range of a region, read-only. Raises ConnectionError for one that is not
        there."""
        found = self._regions.get(region)
        if found is None or not 0 < nbytes <= found.size - offset_nbytes:
            raise ConnectionError(
                f"it named {nbytes} bytes at {offset_nbytes} of region {region}, and there are none"
            )
        return found[offset_nbytes : offset_nbytes + nbytes]


def map_memory(offer: MemoryOffer, boot: str) -> MappedMemory | None:
    """Returns the memory of another rank; None if this process cannot map it."""
    if not boot or offer.boot != boot:
        return None
    regions: dict[int, Bytes] = {}
    with contextlib.suppress(OSError, ValueError):
        for region, (descriptor, nbytes) in offer.files.items():
            regions[region] = bytes_of(view_arena(offer.pid, descriptor, nbytes))
        if regions[SharedRegion.BOUNCE][:_TOKEN_NBYTES].tobytes() == offer.token:
            return MappedMemory(regions)
    return None


class NodeMemory:
    """The memory that this rank and the others of its machine read of each other.

    own: None without memory to offer
    mapped: by rank, the memory that this rank reads
    readers: the ranks that read the memory of this one
    """

    def __init__(
        self, own: OwnMemory | None, mapped: dict[int, MappedMemory], readers: Sequence[int]
    ) -> None:
        self._own = own
        self._mapped = mapped
        self.readers = frozenset(readers)
        self._place = "arena" if own is not None and own.lends_arena else "bounce buffers"

    def mapped(self, rank: int) -> MappedMemory | None:
        """Returns the memory of another rank; None if contents come through sockets."""
        return self._mapped.get(rank)

    def bounce_buffer(self, rank: int, *, is_answering: bool) -> BounceBuffer | None:
        """Returns `OwnMemory.bounce_buffer`; None if contents go to `rank` through sockets."""
        if self._own is None or rank not in self.readers:
            return None
        return self._own.bounce_buffer(rank, is_answering=is_answering)

    def routes(self, num_others: int) -> str:
        """Returns how contents go from this rank to the other ranks, for a log or a table."""
        count = len(self.readers)
        ways = [f"contents to {count} ranks through shared memory ({self._place})"] if count else []
        if num_others > count:
            ways.append(f"contents to {num_others - count} ranks through sockets")
        return ", ".join(ways)

    def close(self) -> None:
        """Unmaps the memory, which channels may still use. A mapping keeps the memory of a rank."""
        self._own, self._mapped = None, {}


def bytes_of(content: memoryview) -> Bytes:
    """Returns the memory as bytes: uint8 (nbytes,), not a copy."""
    return numpy.frombuffer(content, numpy.uint8) if content.nbytes else _NOTHING
