"""Host memory through which gradients of a device pass on their way to sums on the host.

Two blocks are within every budget; where memory is free there are more, so that as many gradients
may be on their way as device memory is kept for. A block is free when what it has is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.state.budgets import STAGED_NBYTES
from infinity.state.units import STATE_ITEM_NBYTES
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool
from infinity.tiers.ranges import rounded_nbytes

_LABEL = "gradients that are added"


@dataclass(eq=False, slots=True)
class StagingBlock:
    """Memory for a part of a gradient: uint8. `block` None: one of the first two."""

    memory: torch.Tensor
    block: Block | None = None


class GradientStaging:
    """Lends staging blocks. Under the engine's lock.

    `largest_numel`: elements of the largest tensor. `most_nbytes`: all blocks but the first two.
    """

    def __init__(self, pool: HostPool, largest_numel: int, most_nbytes: int) -> None:
        self._pool = pool
        largest_nbytes = max(1, largest_numel) * STATE_ITEM_NBYTES
        self._both_nbytes = rounded_nbytes(min(largest_nbytes, STAGED_NBYTES))
        self._most_more = most_nbytes // self.part_nbytes
        self._num_more = 0
        self._both: Block | None = None
        self._free: list[StagingBlock] = []  # Of the two.

    @property
    def part_nbytes(self) -> int:
        """The bytes of a block."""
        return self._both_nbytes // 2

    def take(self) -> StagingBlock | None:
        """Returns a block until `give_back`; None while all of them are taken. Raises CapacityError
        if there is no memory for two."""
        if self._both is None:
            self._both = self._pool.require(self._both_nbytes, _LABEL)
            halves = self._pool.tensor(self._both)[: self._both_nbytes].split(self.part_nbytes)
            self._free = [StagingBlock(half) for half in halves]
        if self._free:
            return self._free.pop(0)
        if self._num_more < self._most_more:
            block = self._pool.try_allocate(self.part_nbytes, _LABEL)
            if block is not None:
                self._num_more += 1
                return StagingBlock(self._pool.tensor(block), block)
        return None

    def give_back(self, taken: StagingBlock) -> None:
        """Ends the use of a block."""
        if taken.block is None:
            self._free.append(taken)
        else:
            self._num_more -= 1
            self._pool.free(taken.block)

    def release(self) -> bool:
        """Frees the memory if no block is taken. Returns whether there was some."""
        if self._both is None or len(self._free) < 2 or self._num_more:
            return False
        self._free.clear()
        self._pool.free(self._both)
        self._both = None
        return True
