"""The host tier: blocks lent out of one preallocated arena.

Every byte that travels between a drive and the device passes through here, and state placed on
"host" rests here. The arena is made once, to its budget; nothing else in the package allocates
host memory that grows with the model.

An owner of blocks that can be freed registers as a giver. `HostPool.require` asks the givers, in
the order of `spare.py`, until a block of the wanted size is free or no giver frees one.

Note [Tight budgets]
  A block that is in use cannot be moved, so kept blocks around it may leave only holes that are too
  small. If memory is scarce, the pool therefore keeps nothing: before it allocates a block, it
  reclaims every block that can be reclaimed. Blocks are then allocated and freed like a stack, and
  leave no holes. The smallest stated budget works because of this. A block that is idle, and still
  there when it is needed again, may lie below others that are idle. Its owner moves it to the stack
  by `restack` before the block is in use.

Note [Spare memory]
  `try_spare` allocates memory for something that is only faster with it. Its owner registers as a
  giver that gives blocks back at once. Every other allocation asks it first, so nobody has less
  memory because of spare blocks.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import GIB, format_nbytes
from infinity.storage.arena import Arena
from infinity.tiers.ranges import Range, RangeAllocator, is_stacked
from infinity.tiers.spare import Giver, SpareMemory

# The most bytes that are page-locked for a device at once. CUDA drivers keep one object of page
# table entries for each registration: with pages of 4 KiB 512 GiB need 2 GiB of them, more than the
# kernel allocates (NVIDIA open-gpu-kernel-modules, pull request 1234).
MAX_REGISTERED_NBYTES = 64 * GIB


@dataclass(eq=False, slots=True)
class Block:
    """A range of the arena with one owner until `HostPool.free`.

    `is_mapped_away` is set by the device adapter while the pages stand in a window: the arena's own
    address of the range must not be touched then.
    """

    range: Range
    nbytes: int
    address: int
    label: str
    is_mapped_away: bool = False


class HostPool:
    """Lends blocks of the arena: for state at rest by `allocate`, which asks nobody, and for work
    with reclaim. Lending is thread-safe; givers are asked under the engine's lock. Sizes are bytes.
    """

    def __init__(self, arena: Arena, counters: Counters, *, is_tight: bool = False) -> None:
        self.arena = arena
        self.is_tight = is_tight
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
        self._working: set[Block] = set()  # Of these, what does not rest here.
        self._givers: list[tuple[Giver, Callable[[int], bool]]] = []  # In the order of the asking.

    @property
    def free_nbytes(self) -> int:
        """The bytes that are not lent. Any thread."""
        # GIL: a number of a moment, by which nobody takes memory: `allocate` decides, locked.
        return self._ranges.free_nbytes

    @property
    def in_use_nbytes(self) -> int:
        """The bytes that are lent."""
        return self.capacity_nbytes - self._ranges.free_nbytes

    # -- Blocks ------------------------------------------------------------------------------------

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
            self._working.discard(block)
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
            self._working.discard(block)
            self._lent.update(parts)
            self._working.update(parts)
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
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def lent(self) -> list[str]:
        """Labels of the blocks in use, for error messages and leak tests."""
        with self._lock:
            return sorted(block.label for block in self._lent)

    def _note_use(self) -> None:
        self.spare.free_nbytes = self._ranges.free_nbytes
        self._counters.set("host_in_use_nbytes", self.in_use_nbytes)

    # -- Work, with reclaim ------------------------------------------------------------------------

    def add_giver(self, giver: Giver, give: Callable[[int], bool]) -> None:
        """`give(wanted_nbytes)` frees at least one block, or returns False. `wanted_nbytes`: the
        size of the block that is needed."""
        self._givers = sorted([*self._givers, (giver, give)], key=itemgetter(0))

    def try_allocate(self, nbytes: int, label: str, *, at_top: bool | None = None) -> Block | None:
        """Allocates a block for use ahead of time; None when no space is free now. `at_top`: the
        end of memory that it comes from; None: by its size."""
        return None if self.is_tight else self._allocate(nbytes, label, at_top)

    def try_spare(self, nbytes: int, label: str) -> Block | None:
        """As `try_allocate`, for a block that its owner gives back when it is asked for."""
        return None if self.is_tight else self._allocate_free(nbytes, label)

    def _allocate(self, nbytes: int, label: str, at_top: bool | None = None) -> Block | None:
        while (block := self._allocate_free(nbytes, label, at_top)) is None:
            if not self._ask(nbytes, at_once=True):
                return None
        return block

    def _allocate_free(self, nbytes: int, label: str, at_top: bool | None = None) -> Block | None:
        block = self.allocate(nbytes, label, at_top=at_top)
        if block is not None:
            self._working.add(block)
        return block

    def require(self, nbytes: int, label: str, *, at_top: bool | None = None) -> Block:
        """Allocates a block, and reclaims memory for it. Raises CapacityError when none is left to
        reclaim; `available_nbytes` is then the largest free piece. `at_top`: as for `try_allocate`;
        a tight pool is a stack, and does not regard it."""
        while self.is_tight and self._reclaim(nbytes):
            pass
        end = None if self.is_tight else at_top
        while (block := self._allocate(nbytes, label, end)) is None:
            if not self._reclaim(nbytes):
                raise self._too_small(nbytes, label)
        return block

    def is_stacked(self, block: Block, kept: Sequence[Block], spare_nbytes: int) -> bool:
        """Returns whether a tight pool would leave at most `spare_nbytes` free between the block
        and those that stay. `kept`: blocks of the pool that stay."""
        ranges = [other.range for other in self._working - {block, *kept}]
        return is_stacked(block.range, [*ranges, *self.holes()], spare_nbytes)

    def restack(self, block: Block) -> None:
        """Moves the bytes of an idle block to where a block would be allocated now, in a tight pool
        that has kept nothing else. Nobody reads or writes the bytes, or has their address."""
        while self._reclaim(block.nbytes):
            pass
        self.move(block)

    def _too_small(self, nbytes: int, label: str) -> CapacityError:
        holes = [hole.nbytes for hole in self.holes()]
        free = f"{format_nbytes(sum(holes))} are free in {len(holes)} pieces; "
        return CapacityError(
            "host",
            needed_nbytes=nbytes,
            available_nbytes=max(holes, default=0),
            key="tiers.host.capacity",
            detail=f"{label} ({free if len(holes) > 1 else ''}"
            f"in use: {', '.join(self.lent()[:8])})",
        )

    def _reclaim(self, wanted_nbytes: int) -> bool:
        return self._ask(wanted_nbytes, at_once=False)

    def _ask(self, wanted_nbytes: int, *, at_once: bool) -> bool:
        """Returns whether a giver, of those that give at once or of the others, has freed a
        block."""
        givers = (give for giver, give in self._givers if giver.gives_at_once is at_once)
        return any(give(wanted_nbytes) for give in givers)
