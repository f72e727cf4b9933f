"""Working memory on the host tier: `require` frees blocks of other owners to find space.

An owner of blocks that can be freed registers as a giver. `require` asks the givers, in the order
of `spare.py`, until a block of the wanted size is free or no giver frees one.

Note [Tight budgets]
  A block that is in use cannot be moved, so kept blocks around it may leave only holes that are too
  small. If memory is scarce, the pool therefore keeps nothing: before it allocates a block, it
  reclaims every block that can be reclaimed. Blocks are then allocated and freed like a stack, and
  leave no holes. The smallest stated budget works because of this. A block that is idle, and still
  there when it is needed again, may lie below others that are idle. Its owner moves it to the stack
  by `restack` before the block is in use.

Note [Spare memory]
  `try_spare` allocates memory for something that is only faster with it. Its owner registers as a
  giver that gives blocks back at once. Whoever else allocates asks it first, so nobody has less
  memory because of spare blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from infinity.errors import CapacityError
from infinity.sizes import format_nbytes
from infinity.tiers.host import Block, HostBlocks
from infinity.tiers.ranges import Range, is_stacked
from infinity.tiers.spare import Giver


class HostPool:
    """Allocation with reclaim over the host tier."""

    def __init__(self, host: HostBlocks, *, is_tight: bool = False) -> None:
        self._host = host
        self.is_tight = is_tight
        self.spare = host.spare
        self._givers: list[tuple[Giver, Callable[[int], bool]]] = []  # In the order of the asking.
        self._lent: set[Block] = set()  # By the pool; what rests on the host is not among them.

    @property
    def capacity_nbytes(self) -> int:
        """The host budget."""
        return self._host.capacity_nbytes

    @property
    def in_use_nbytes(self) -> int:
        """Bytes of the budget that are lent."""
        return self._host.capacity_nbytes - self._host.free_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes of the budget that are not lent."""
        return self._host.free_nbytes

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
        block = self._host.allocate(nbytes, label, at_top=at_top)
        if block is not None:
            self._lent.add(block)
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
        ranges = [other.range for other in self._lent - {block, *kept}]
        return is_stacked(block.range, [*ranges, *self.holes()], spare_nbytes)

    def restack(self, block: Block) -> None:
        """Moves the bytes of an idle block to where a block would be allocated now, in a tight pool
        that has kept nothing else. Nobody reads or writes the bytes, or has their address."""
        while self._reclaim(block.nbytes):
            pass
        self._host.move(block)

    def _too_small(self, nbytes: int, label: str) -> CapacityError:
        holes = [hole.nbytes for hole in self.holes()]
        free = f"{format_nbytes(sum(holes))} are free in {len(holes)} pieces; "
        return CapacityError(
            "host",
            needed_nbytes=nbytes,
            available_nbytes=max(holes, default=0),
            key="tiers.host.capacity",
            detail=f"{label} ({free if len(holes) > 1 else ''}"
            f"in use: {', '.join(self._host.lent()[:8])})",
        )

    def _reclaim(self, wanted_nbytes: int) -> bool:
        return self._ask(wanted_nbytes, at_once=False)

    def _ask(self, wanted_nbytes: int, *, at_once: bool) -> bool:
        """Returns whether a giver, of those that give at once or of the others, has freed a
        block."""
        givers = (give for giver, give in self._givers if giver.gives_at_once is at_once)
        return any(give(wanted_nbytes) for give in givers)

    def carve(self, block: Block, offset_nbytes: int, nbytes: int) -> Block:
        """A part of a lent block; see HostBlocks.carve."""
        return self._host.carve(block, offset_nbytes, nbytes)

    def dissolve(self, block: Block, parts: Sequence[Block]) -> None:
        """Takes a lent block back, but for parts of it; see HostBlocks.dissolve."""
        self._host.dissolve(block, parts)
        self._lent.discard(block)
        self._lent.update(parts)

    def holes(self) -> list[Range]:
        """Returns the free ranges, by offset; neighbours are one."""
        return self._host.holes()

    def tensor(self, block: Block) -> torch.Tensor:
        """uint8, shape (block.nbytes,)."""
        return self._host.tensor(block)

    def free(self, block: Block) -> None:
        """Takes a lent block back."""
        self._host.free(block)
        self._lent.discard(block)
