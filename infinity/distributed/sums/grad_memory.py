"""Host memory for sums of gradients that must be complete before they are sent.

In stages 2 and 3 `infinity.forward_backward` sums the micro-batches of a rank before it sends them
to their owners: the sums of a block wait until the micro-batches have passed the block, those
outside of blocks until the end. The place of every sum is known beforehand, and all of the memory
is taken before anything is computed: a step can neither run out of it in the middle nor find it
fragmented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from infinity.errors import CapacityError
from infinity.sizes import MIB, align_up
from infinity.state.budgets import Budgets
from infinity.state.units import STATE_ITEM_NBYTES, Unit
from infinity.streaming.gradients.blocks import SumBlocks
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import Range, RangeAllocator, rounded_nbytes


def _sum_nbytes(unit: Unit) -> int:
    return rounded_nbytes(unit.state_numel * STATE_ITEM_NBYTES) if unit.state_numel else 0


@dataclass(frozen=True, slots=True)
class SumsPlan:
    """Bytes of units outside of blocks, each with its own memory; blocks share `shared_nbytes`, one
    at a time.
    """

    shared_nbytes: int
    own_nbytes: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """The bytes that are reserved at offload."""
        return self.shared_nbytes + sum(self.own_nbytes.values())


def plan_sums(
    units: Sequence[Unit], outside: Sequence[int], blocks: Sequence[set[int]]
) -> SumsPlan:
    """`outside`: units that are used outside of blocks; `blocks`: the units of each block alone."""
    of_blocks = [sum(_sum_nbytes(units[unit]) for unit in block) for block in blocks]
    shared_nbytes = max(of_blocks, default=0)
    own_nbytes = {unit: _sum_nbytes(units[unit]) for unit in outside if units[unit].state_numel}
    return SumsPlan(rounded_nbytes(shared_nbytes) if shared_nbytes else 0, own_nbytes)


class SumsMemory(SumBlocks):
    """Lends the memory of a plan, between `open` and `close`. Called under the engine lock."""

    def __init__(self, pool: HostPool, plan: SumsPlan, budgets: Budgets) -> None:
        self._pool = pool
        self._plan = plan
        self._needed_nbytes = budgets.needed_for_sums_nbytes
        self._working_nbytes = budgets.working_nbytes
        self._least_nbytes = budgets.least_for_sums_nbytes
        self._shared: Block | None = None
        self._ranges = RangeAllocator(plan.shared_nbytes)  # Of the shared block.
        self._own: dict[int, Block] = {}  # By unit, while nobody uses them.
        self._lent: dict[Block, int | Range] = {}  # What it is given back to.

    def open(self) -> None:
        """Takes all memory. Raises CapacityError, before anything changes, if it does not fit."""
        if self._working_nbytes < self._needed_nbytes:
            least = f"{align_up(self._least_nbytes, MIB) // MIB}MiB"
            raise CapacityError(
                "host",
                needed_nbytes=self._needed_nbytes,
                available_nbytes=self._working_nbytes,
                key="schedule.micro_batch",
                remedy="set schedule.micro_batch to the sequences of a micro-batch: the memory is "
                f"then reserved at the start, of a tiers.host.capacity of {least} or more",
                detail="infinity.forward_backward over ranks sums the gradients of a block, and "
                "of what "
                "is outside of blocks, in float32 before they are sent, and works in the rest of "
                "the host budget that no state rests in",
            )
        try:
            if self._plan.shared_nbytes:
                self._shared = self._pool.require(self._plan.shared_nbytes, "gradients of a block")
            for unit, nbytes in self._plan.own_nbytes.items():
                self._own[unit] = self._pool.require(nbytes, "gradients outside of blocks")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory. Blocks that a failure has left lent stay lent."""
        for unit in list(self._own):
            self._pool.free(self._own.pop(unit))
        if self._shared is not None and not self._lent:
            self._pool.free(self._shared)
            self._shared = None

    @override
    def take(self, unit: Unit) -> Block:
        """A gradient that comes while another block uses the shared memory (a penalty on weights,
        say) gets working memory."""
        nbytes = unit.state_numel * STATE_ITEM_NBYTES
        block = self._own.pop(unit.index, None)
        if block is not None:
            self._lent[block] = unit.index
        elif self._shared is not None and (part := self._ranges.allocate(nbytes)) is not None:
            block = self._pool.carve(self._shared, part.offset_nbytes, nbytes)
            self._lent[block] = part
        return block or self._pool.require(nbytes, f"gradients of {unit.name}")

    @override
    def give_back(self, block: Block) -> None:
        match self._lent.pop(block, None):
            case None:
                self._pool.free(block)
            case int(unit):
                self._own[unit] = block
            case part:
                self._ranges.free(part)
