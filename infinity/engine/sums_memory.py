"""Host memory for sums of gradients that must be there whole until they are given away.

In stages 2 and 3 `infinity.accumulate` sums a rank's micro-batches before their owners get them:
those of a block until the block's micro-batches are through, those of what is outside of blocks
until the end. The place of every sum is known beforehand, and all of it is taken before anything is
computed: a step cannot run out of it in the middle, nor find it in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.errors import CapacityError
from infinity.sizes import HUGE_PAGE_NBYTES, MIB, align_up
from infinity.state.budgets import Budgets
from infinity.state.units import STATE_ITEM_NBYTES, Unit
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool
from infinity.tiers.ranges import Range, RangeAllocator, rounded_nbytes


def _sum_nbytes(unit: Unit) -> int:
    return rounded_nbytes(unit.state_numel * STATE_ITEM_NBYTES) if unit.state_numel else 0


@dataclass(frozen=True, slots=True)
class SumsPlan:
    """Where sums go, as offsets in bytes: units outside of blocks each have a place of their own,
    the blocks share `shared_nbytes` from 0 on, one block at a time."""

    shared_nbytes: int
    places: Mapping[int, int]
    nbytes: int

    @property
    def taken_nbytes(self) -> int:
        """Of the arena, at most: what is large starts at a huge page."""
        return self.nbytes + (HUGE_PAGE_NBYTES if self.nbytes >= HUGE_PAGE_NBYTES else 0)


def plan_sums(units: Sequence[Unit], outside: Sequence[int], blocks: Sequence[set[int]]) -> SumsPlan:
    """`outside`: units that are used outside of blocks; `blocks`: those of each block alone."""
    shared_nbytes = max((sum(_sum_nbytes(units[u]) for u in block) for block in blocks), default=0)
    places, end_nbytes = {}, shared_nbytes
    for unit in outside:
        places[unit] = end_nbytes
        end_nbytes += _sum_nbytes(units[unit])
    return SumsPlan(shared_nbytes, places, rounded_nbytes(end_nbytes) if end_nbytes else 0)


class SumsMemory:
    """Lends what a plan says, between `open` and `close`. Called under the engine's lock."""

    def __init__(self, pool: HostPool, plan: SumsPlan, budgets: Budgets) -> None:
        self._pool = pool
        self._plan = plan
        self._needed_nbytes = budgets.needed_for_sums_nbytes
        self._working_nbytes = budgets.working_nbytes
        self._least_nbytes = budgets.least_for_sums_nbytes
        self._whole: Block | None = None
        self._shared = RangeAllocator(plan.shared_nbytes)
        self._lent: dict[Block, Range | None] = {}  # None: a place of its own.

    def open(self) -> None:
        """Takes all of it. Raises CapacityError, before anything was done, where it does not fit
        beside what training works in."""
        if self._working_nbytes < self._needed_nbytes:
            least = f"{align_up(self._least_nbytes, MIB) // MIB}MiB"
            raise CapacityError(
                "host",
                needed_nbytes=self._needed_nbytes,
                available_nbytes=self._working_nbytes,
                key="schedule.micro_batch to the sequences of a micro-batch: room is then kept "
                f"when the model is offloaded, of a tiers.host.capacity of {least} or more",
                detail="infinity.accumulate over ranks sums the gradients of a block, and of what "
                "is outside of blocks, in float32 before they are sent, and works in the rest of "
                "the host budget that no state rests in",
            )
        if self._plan.nbytes and self._whole is None:
            self._whole = self._pool.require(self._plan.nbytes, "sums of micro-batches")

    def close(self) -> None:
        """All that was lent has come back, unless a failure ends the job."""
        if self._whole is not None and not self._lent:
            self._pool.free(self._whole)
            self._whole = None

    def take(self, unit: Unit) -> Block:
        """Room for the unit's gradients in fp32. A gradient that comes while another block has its
        turn (a penalty on weights, say) may find none here, and takes working memory."""
        nbytes = unit.state_numel * STATE_ITEM_NBYTES
        block, part = None, None
        if self._whole is not None:
            place = self._plan.places.get(unit.index)
            if place is None and (part := self._shared.allocate(nbytes)) is not None:
                place = part.offset_nbytes
            if place is not None:
                block = self._pool.carve(self._whole, place, nbytes)
                self._lent[block] = part
        return block or self._pool.require(nbytes, f"gradients of {unit.name}")

    def give_back(self, block: Block) -> None:
        if block not in self._lent:
            self._pool.free(block)
        elif (part := self._lent.pop(block)) is not None:
            self._shared.free(part)
