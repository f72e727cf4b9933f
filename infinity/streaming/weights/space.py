"""Space for weights: which units leave the host or the device so that another unit fits.

`eviction.py` has the rule. This file finds the candidates and lets them go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import CapacityError
from infinity.state.budgets import Budgets
from infinity.streaming.weights.access_order import NEVER
from infinity.streaming.weights.eviction import Evictable, choose_neighbours, last_uses
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.state import Weights, WeightState
from infinity.tiers.host import Block
from infinity.tiers.ranges import rounded_nbytes
from infinity.tiers.spare import Giver


@dataclass(slots=True)
class _Refusal:
    """The units that should go for a read ahead of `unit`, one of which is needed before it; none
    if nothing makes the space.

    `predicted`, `num_changes`, `free_nbytes`: the order, and the blocks and free memory that the
    choice was made among. `in_use`: units whose block could not go, and may be the better choice
    when their use ends. `is_of_size`: the chosen blocks leave no new hole.
    """

    unit: int
    chosen: list[int]
    in_use: list[int]
    is_of_size: bool
    predicted: tuple[int, ...]
    num_changes: int
    free_nbytes: int


class WeightSpace:
    """Makes space by moves of idle units. Writes no field of `Weights`. Under the engine's lock."""

    def __init__(self, moves: WeightMoves, budgets: Budgets) -> None:
        self._moves = moves
        self._weights = moves.weights
        self._order = moves.order
        self._pool = moves.pool
        self._device = moves.device
        # Of the device, for weights that rest elsewhere: what they may take now; None: unlimited.
        self._window_nbytes = budgets.device_window_nbytes
        # Never lent: what nested modules use at once, and the largest unit, which is fetched ahead.
        self._largest_nbytes = max(weights.unit.weight_nbytes for weights in moves.weights)
        self._least_nbytes = budgets.held_nbytes + self._largest_nbytes
        self._lent_nbytes = 0
        # Stored blocks, tiles of them and decoded blocks have very different sizes.
        self._has_stored = any(entry.unit.stored is not None for entry in self._weights)
        self._refusal: _Refusal | None = None  # Of the last read ahead among stored weights.
        self._pool.add_giver(Giver.WEIGHTS, self.reclaim)
        self._pool.add_giver(Giver.DECODED_ZONE, lambda _: self.give_up_zone())

    # -- Device ------------------------------------------------------------------------------------

    def fill(self, weights: Weights, feeder: Weights | None = None) -> None:
        """Starts to fill the unit's region. Raises CapacityError if it does not fit beside the
        units in use."""
        nbytes = weights.unit.weight_nbytes
        if not self._detach_idle(nbytes):
            assert self._window_nbytes is not None
            in_use = [other.unit.name for other in self._weights if other.use_count]
            raise CapacityError(
                "device",
                needed_nbytes=nbytes,
                available_nbytes=max(0, self._window_nbytes - self._moves.attached_nbytes),
                key="tiers.device.capacity",
                detail=f"parameters of {weights.unit.name!r} (in use: {', '.join(in_use)})",
            )
        try:
            self._moves.fill(weights, feeder)
        except torch.OutOfMemoryError:
            self.shrink()
            self._moves.fill(weights, feeder)

    def shrink(self) -> int | None:
        """Takes all idle weights off the device, whose memory others get. From now on the device
        window is what the units in use have, and the largest unit beside them. Returns its bytes;
        None on a device that computes on host memory."""
        for unit in list(self._moves.on_device):
            if self._is_idle(unit) or self._is_arriving(unit):
                self._moves.take_off_device(self._weights[unit])
        self._device.give_back_memory()
        if self._window_nbytes is not None:
            nbytes = max(self._least_nbytes, self._moves.attached_nbytes + self._largest_nbytes)
            if nbytes < self._window_nbytes:
                self._window_nbytes, self._lent_nbytes = nbytes, 0
        return self._window_nbytes

    def fill_ahead(self, weights: Weights, feeder: Weights | None) -> bool:
        """Starts to fill the unit's region, or stages its bytes, if that drops no weights that are
        needed sooner. Returns whether there may be space for more."""
        nbytes, unit, order = weights.unit.weight_nbytes, weights.unit.index, self._order
        excess_nbytes = 0
        if self._window_nbytes is not None:
            # All or nothing: units detached for one that does not fit would be fetched again.
            excess_nbytes = self._moves.attached_nbytes + nbytes - self._window_nbytes
            for other in self._moves.on_device.later_than(order.next_use(unit)):
                if excess_nbytes <= 0:
                    break
                if self._is_idle(other):
                    excess_nbytes -= self._weights[other].unit.weight_nbytes
        if excess_nbytes <= 0 and self._detach_idle(nbytes, nearer_than=unit):
            self._moves.fill(weights, feeder)
            return True
        is_on_way = weights.state is WeightState.STAGED
        if not is_on_way and self._moves.decoding.can_stage(weights.unit):
            self._moves.stage(weights, feeder)
        return False

    def _detach_idle(self, wanted_nbytes: int, *, nearer_than: int | None = None) -> bool:
        """Detaches the idle units whose next use is furthest away, and later than that of
        `nearer_than`, until so much of the device window is free. Returns whether it is."""
        while (
            self._window_nbytes is not None
            and self._moves.attached_nbytes + wanted_nbytes > self._window_nbytes
        ):
            victim = self._moves.on_device.victim(
                self._is_idle, nearer_than=nearer_than, wanted_nbytes=wanted_nbytes
            )
            if victim is None and nearer_than is None:
                victim = self._moves.on_device.victim(
                    self._is_arriving, wanted_nbytes=wanted_nbytes
                )
            if victim is None:
                return False
            self._moves.take_off_device(self._weights[victim])
        return True

    def _is_idle(self, unit: int, state: WeightState = WeightState.ATTACHED) -> bool:
        weights = self._weights[unit]
        return weights.state is state and not (weights.use_count or weights.is_checked_out)

    def _is_arriving(self, unit: int) -> bool:
        return self._is_idle(unit, WeightState.ARRIVING)

    def lend_device(self, nbytes: int) -> bool:
        """Lends memory of the device window for anything but weights, until `end_device_loans`.
        Returns False, and lends nothing, if the weights that are used together need it."""
        if self._window_nbytes is None:
            return True
        in_use = sum(weights.unit.weight_nbytes for weights in self._weights if weights.use_count)
        if self._window_nbytes - nbytes < self._least_nbytes + in_use:
            return False
        self._lend(nbytes)
        if not self._detach_idle(0):
            self._lend(-nbytes)
            return False
        return True

    def _lend(self, nbytes: int) -> None:
        if self._window_nbytes is not None:
            self._lent_nbytes += nbytes
            self._window_nbytes -= nbytes

    def end_device_loans(self) -> None:
        """Weights may take all of the device window again."""
        self._lend(-self._lent_nbytes)

    # -- Host --------------------------------------------------------------------------------------

    def find_block(self, weights: Weights, *, only_free: bool = False) -> Block | None:
        """Allocates a unit's host block, if that drops nothing that is needed sooner; with
        `only_free` if it drops nothing."""
        unit, nbytes = weights.unit, self._moves.nbytes[weights.unit.index]
        label = f"parameters of {unit.name}"
        at_top = self._moves.is_at_top(unit)
        while (block := self._pool.try_allocate(nbytes, label, at_top=at_top)) is None:
            if self._pool.is_tight or only_free or not self.free_kept(nbytes, unit.index):
                return None
        return block

    def is_stacked(self, weights: Weights) -> bool:
        """Returns whether the block of an idle unit lies beside those in use, or need not: see
        `tiers/host.py`, Note [Tight budgets]. Called of a tight pool."""
        block = weights.decoded or weights.block
        is_there = weights.state in (WeightState.READY, WeightState.ATTACHED)
        if block is None or not is_there:
            return True
        if weights.rests_on_host or not self._device.shares_host_memory:
            return True
        there = (self._weights[unit] for unit in self._there())
        in_use = [w for w in there if w.use_count or w.is_checked_out]
        kept = [kept for w in in_use for kept in (w.block, w.decoded) if kept is not None]
        # The budget has the space of stored bytes, which may be dropped, beside the decoded ones.
        nbytes = self._moves.nbytes[weights.unit.index]
        spare_nbytes = 0 if weights.decoded is None else rounded_nbytes(nbytes)
        return self._pool.is_stacked(block, kept, spare_nbytes)

    def reclaim(self, wanted_nbytes: int) -> bool:
        """Frees a block that is needed late, at last a feeder's. Returns whether there was one.
        Called by the pool when it is out of memory."""
        if self.free_kept(wanted_nbytes):
            return True
        # Feeders whose block is free once the all-gather that they feed is cancelled.
        victim = self._moves.in_blocks.victim(
            lambda unit: self._weights[unit].fills is not None, wanted_nbytes=wanted_nbytes
        )
        if victim is None:
            return False
        arriving = self._weights[victim].fills
        assert arriving is not None
        self._moves.settle(arriving)
        self._moves.evict(self._weights[victim])
        return True

    def give_up_zone(self) -> bool:
        """Frees host memory that is for decoded weights alone. Called by the pool when nobody else
        has space to free. Returns whether there was any."""
        return self._moves.decoding.give_up_zone()

    def free_kept(self, wanted_nbytes: int, nearer_than: int | None = None) -> bool:
        """Frees weights that are kept for later, after their own transfer, and that no all-gather
        is fed from: what makes the wanted space, or, of units of similar sizes, one block. Returns
        whether something was freed."""
        free = self._free_neighbours if self._has_stored else self._free_one
        return free(wanted_nbytes, nearer_than)

    def _free_one(self, wanted_nbytes: int, nearer_than: int | None = None) -> bool:
        """Frees a block, of a unit that is used later than `nearer_than`. Returns whether there was
        one."""
        victim = self._moves.in_blocks.victim(
            self._is_evictable, nearer_than=nearer_than, wanted_nbytes=wanted_nbytes
        )
        if victim is not None:
            self._moves.evict(self._weights[victim])
        return victim is not None

    def _there(self) -> list[int]:
        """The units with a block that is not at rest, or with device memory."""
        return sorted({*self._moves.in_blocks, *self._moves.on_device})

    def _free_neighbours(self, wanted_nbytes: int, nearer_than: int | None = None) -> bool:
        """Frees neighbouring blocks that make the wanted space, or else one, whose use is furthest
        away; with `nearer_than` those that make it alone, of units that are used later. Returns
        whether something was freed."""
        if nearer_than is not None and self._is_refused(nearer_than):
            return False
        order = self._order
        limit = -1 if nearer_than is None else order.distance(nearer_than)
        blocks = list(self._freeable(limit))
        chosen = choose_neighbours(blocks, self._pool.holes(), wanted_nbytes)
        needed = [block.unit for block in chosen if block.distance <= NEVER]
        is_needed = any(order.distance(unit) <= limit for unit in needed)
        if nearer_than is not None and (is_needed or not chosen):
            idle, of_size = {block.unit for block in blocks}, rounded_nbytes(wanted_nbytes)
            self._refusal = _Refusal(
                nearer_than,
                needed,
                [there for there in self._there() if there not in idle],
                sum(block.range.nbytes for block in chosen) <= of_size,
                order.order,
                self._moves.num_changes,
                self._pool.free_nbytes,
            )
            return False  # See eviction.py, Note [Reads ahead].
        if nearer_than is not None:
            chosen = self._others(chosen, blocks, wanted_nbytes, limit)
        elif blocks and not chosen:
            chosen = [max(blocks, key=lambda block: block.distance)]
        for block in chosen:
            self._free(block.unit, is_decoded=block.is_decoded)
        return bool(chosen)

    def _others(
        self, chosen: list[Evictable], blocks: Sequence[Evictable], wanted_nbytes: int, limit: int
    ) -> list[Evictable]:
        """Returns blocks that go instead of `chosen` if one of these is of the last uses; see
        eviction.py, Note [Two in turns]. `chosen` if no others make the space."""
        if self._device.shares_host_memory:
            return chosen
        order = self._order
        before = map(order.unit_at, range(order.now - 1, order.now - len(order.order), -1))
        last = last_uses(before, self._moves.nbytes, wanted_nbytes)
        if not any(block.unit in last for block in chosen):
            return chosen
        older = [block for block in blocks if block.unit not in last]
        others = choose_neighbours(older, self._pool.holes(), wanted_nbytes)
        is_needed = any(order.distance(block.unit) <= limit for block in others)
        return chosen if is_needed or not others else others

    def _is_refused(self, unit: int) -> bool:
        """Whether the last refusal still holds, at the cost of the few units it names: the model
        may have thousands of blocks, and every use asks."""
        last, order = self._refusal, self._order
        if last is None or last.unit != unit or last.predicted is not order.order:
            return False
        is_changed = last.num_changes != self._moves.num_changes
        if is_changed or self._pool.free_nbytes > last.free_nbytes:
            return False
        limit = order.distance(unit)
        if last.chosen and all(order.distance(chosen) > limit for chosen in last.chosen):
            return False
        soonest = min((order.distance(u, beyond=limit) for u in last.chosen), default=-1)
        for index in last.in_use[:]:
            if self._is_evictable(index) or self._is_droppable(index):
                if not last.is_of_size or order.distance(index, beyond=limit) >= soonest:
                    return False
                last.in_use.remove(index)
        return True

    def _freeable(self, limit: int) -> Iterator[Evictable]:
        """Yields the blocks that may be freed, with their uses beyond the limit. A decoded block
        whose stored bytes are in memory, too, costs no read."""
        order, there = self._order, self._there()
        for index in filter(self._is_droppable, there):
            weights = self._weights[index]
            assert weights.decoded is not None
            is_spare = weights.block is not None
            distance = NEVER + 1 if is_spare else order.distance(index, beyond=limit)
            yield Evictable(weights.decoded.range, index, distance, is_decoded=True)
        for index in filter(self._is_evictable, there):
            block = self._weights[index].block
            assert block is not None
            yield Evictable(block.range, index, order.distance(index, beyond=limit))

    def _free(self, unit: int, *, is_decoded: bool) -> None:
        (self._moves.detach if is_decoded else self._moves.evict)(self._weights[unit])

    def _is_droppable(self, unit: int) -> bool:
        """Whether the decoded block may be freed alone: not in use, and outside the zone."""
        weights = self._weights[unit]
        return weights.is_decoded_idle and not self._moves.decoding.is_in_zone(weights)

    def _is_evictable(self, unit: int) -> bool:
        """Whether the host block may be freed: not at rest there, not used by the device."""
        weights = self._weights[unit]
        if weights.block is None or weights.rests_on_host or weights.is_checked_out:
            return False
        if weights.fills is not None:
            return False
        if weights.unit.stored is not None:
            # The decoded block is attached: the stored bytes are not in use.
            return not weights.is_decoding
        return weights.use_count == 0 or not self._device.shares_host_memory
