"""The host tier: blocks lent out of one preallocated arena.

Every byte that travels between a drive and the device passes through here, and state placed on
"host" rests here. The arena is made once, to its budget; nothing else in the package allocates
host memory that grows with the model.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.observe import Counters
from infinity.sizes import GIB
from infinity.storage.arena import Arena
from infinity.tiers.ranges import Range, RangeAllocator
from infinity.tiers.spare import SpareMemory

# The most bytes that are page-locked for a device at once. CUDA drivers keep one object of page
# table entries for each registration: with pages of 4 KiB 512 GiB need 2 GiB of them, more than the
# kernel allocates (NVIDIA open-gpu-kernel-modules, pull request 1234).
MAX_REGISTERED_NBYTES = 64 * GIB


@dataclass(eq=False, slots=True)
class Block:
    """A range of the arena with one owner until `HostBlocks.free`.

    `is_mapped_away` is set by the device adapter while the pages stand in a window: the arena's own
    address of the range must not be touched then.
    """

    range: Range
    nbytes: int
    address: int
    label: str
    is_mapped_away: bool = False


class HostBlocks:
    """Lends blocks of the arena. Thread-safe. All sizes are bytes."""

    def __init__(self, arena: Arena, counters: Counters) -> None:
        self.arena = arena
        self.capacity_nbytes = arena.capacity_nbytes
        self._bytes = torch.frombuffer(arena.memory(0, arena.capacity_nbytes), dtype=torch.uint8)
        # A device may have registered the arena in parts of this size.
        self._ranges = RangeAllocator(
            arena.capacity_nbytes, registered_nbytes=MAX_REGISTERED_NBYTES
        )
        self.spare = SpareMemory(self._ranges.free_nbytes)
        self._counters = counters
        self._lock = threading.Lock()
        self._lent: set[Block] = set()
        self.high_water_nbytes = 0

    @property
    def free_nbytes(self) -> int:
        """The bytes that are not lent."""
        return self._ranges.free_nbytes

    def allocate(self, nbytes: int, label: str, *, at_top: bool | None = None) -> Block | None:
        """A block of at least `nbytes`, or None when no hole is large enough. Not zeroed.
        `at_top`: see RangeAllocator.allocate."""
        with self._lock:
            # INV-4: no range beyond the capacity is lent.
            taken = self._ranges.allocate(nbytes, at_top=at_top)
            if taken is None:
                return None
            block = Block(taken, nbytes, self.arena.address + taken.offset_nbytes, label)
            self._lent.add(block)
            self._note_use()
            return block

    def carve(self, block: Block, offset_nbytes: int, nbytes: int) -> Block:
        """Returns a part of a lent block, in full pages. It is freed with the lent block, never by
        itself."""
        assert offset_nbytes + nbytes <= block.range.nbytes
        part = Range(block.range.offset_nbytes + offset_nbytes, nbytes)
        return Block(part, nbytes, block.address + offset_nbytes, block.label)

    def free(self, block: Block) -> None:
        """Takes a lent block back."""
        with self._lock:
            assert block in self._lent, f"block of {block.label} was freed twice"
            # INV-2: bytes that are in use elsewhere are not freed.
            assert not block.is_mapped_away, f"block of {block.label} is still mapped"
            self._lent.remove(block)
            self._ranges.free(block.range)
            self._note_use()

    def move(self, block: Block) -> None:
        """Moves the bytes of a lent block to where a block of its size would be allocated if this
        one were free. Nobody reads or writes them."""
        with self._lock:
            assert block in self._lent, f"block of {block.label} was freed"
            assert not block.is_mapped_away, f"block of {block.label} is still mapped"
            self._ranges.free(block.range)
            taken = self._ranges.allocate(block.nbytes)
            assert taken is not None, "its own range is free"
            address = self.arena.address + taken.offset_nbytes
            if taken != block.range:
                ctypes.memmove(address, block.address, block.nbytes)  # They may overlap.
            block.range, block.address = taken, address

    def exchange(self, first: Block, second: Block) -> None:
        """Exchanges the memory of two lent blocks of one size, with what is in it. Nobody has their
        addresses."""
        with self._lock:
            for block in (first, second):
                assert block in self._lent, f"block of {block.label} was freed"
                assert not block.is_mapped_away, f"block of {block.label} is still mapped"
            assert first.range.nbytes == second.range.nbytes
            first.range, second.range = second.range, first.range
            first.address, second.address = second.address, first.address

    def dissolve(self, block: Block, parts: Sequence[Block]) -> None:
        """Takes a lent block back, but for `parts` that were carved from it: each of these is lent
        by itself from now on."""
        ends = [block.range.offset_nbytes, *sorted(part.range.end_nbytes for part in parts)]
        starts = [*sorted(part.range.offset_nbytes for part in parts), block.range.end_nbytes]
        with self._lock:
            assert block in self._lent, f"block of {block.label} was freed twice"
            self._lent.remove(block)
            self._lent.update(parts)
            for end, start in zip(ends, starts, strict=True):
                if end < start:
                    self._ranges.free(Range(end, start - end))
            self._note_use()

    def holes(self) -> list[Range]:
        """Returns the free ranges, by offset; neighbours are one."""
        with self._lock:
            return self._ranges.holes()

    def tensor(
        self, block: Block, offset_nbytes: int = 0, nbytes: int | None = None
    ) -> torch.Tensor:
        """uint8 view, shape (nbytes,), of the block's memory; valid until the block is freed."""
        assert not block.is_mapped_away, f"block of {block.label} is mapped away"
        start = block.range.offset_nbytes + offset_nbytes
        length = block.nbytes - offset_nbytes if nbytes is None else nbytes
        assert offset_nbytes + length <= block.range.nbytes
        return self._bytes[start : start + length]

    def close(self) -> None:
        """Gives up its view of the arena, which is unmapped when no other view is left."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Returns whether the memory of the tensor is in the arena."""
        start = self.arena.address
        return start <= tensor.data_ptr() < start + self.capacity_nbytes

    def lent(self) -> list[str]:
        """Labels of the blocks in use, for error messages and leak tests."""
        with self._lock:
            return sorted(block.label for block in self._lent)

    def _note_use(self) -> None:
        self.spare.free_nbytes = self._ranges.free_nbytes
        used_nbytes = self.capacity_nbytes - self._ranges.free_nbytes
        self.high_water_nbytes = max(self.high_water_nbytes, used_nbytes)
        self._counters.set("host_in_use_nbytes", used_nbytes)
