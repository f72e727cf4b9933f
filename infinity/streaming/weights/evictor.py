"""Eviction of weights: which units leave the host or the device so that another unit fits.

`eviction.py` has the rule. This file finds the candidates and lets them go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from infinity.errors import CapacityError
from infinity.state.units import Unit
from infinity.streaming.weights.access_order import NEVER, AccessOrder
from infinity.streaming.weights.device_window import DeviceWindow
from infinity.streaming.weights.eviction import Evictable, choose_neighbours, choose_victim
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.state import Weights, WeightState
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool
from infinity.tiers.ranges import rounded_nbytes


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


class WeightEvictor:
    """Makes space by moves of idle units. Writes no field of `Weights` itself.

    `weights`: all units, by index. Each call takes the recorded `order` of the pass. Called under
    the engine's lock.
    """

    def __init__(
        self,
        weights: Sequence[Weights],
        moves: WeightMoves,
        pool: HostPool,
        device: DeviceAdapter,
        device_window: DeviceWindow,
    ) -> None:
        self._weights = weights
        self._moves = moves
        self._pool = pool
        self._device = device
        self._device_window = device_window
        # Stored blocks, tiles of them and decoded blocks have very different sizes.
        self._has_stored = any(entry.unit.stored is not None for entry in weights)
        self._refusal: _Refusal | None = None  # Of the last read ahead among stored weights.

    def make_device_space(self, order: AccessOrder, unit: Unit, *, is_ahead: bool = False) -> bool:
        """Detaches the units whose next use is furthest away until the unit fits the device window.

        Ahead of its use, only units that are used later are detached. Returns whether it fits.
        """
        window_nbytes = self._device_window.left_nbytes
        nearer_than = unit.index if is_ahead else None
        if is_ahead and window_nbytes is not None:
            # All or nothing: units detached for one that does not fit would be fetched again.
            least_distance = order.distance(unit.index)
            later = sum(
                self._weights[index].unit.weight_nbytes
                for index in self._idle_on_device(WeightState.ATTACHED)
                if order.distance(index) > least_distance
            )
            if self._moves.attached_nbytes + unit.weight_nbytes - later > window_nbytes:
                return False
        return self._detach_idle(order, unit.weight_nbytes, nearer_than=nearer_than)

    def _detach_idle(
        self, order: AccessOrder, wanted_nbytes: int, *, nearer_than: int | None = None
    ) -> bool:
        """Detaches idle units, those that are used later than `nearer_than`, until so many bytes of
        the device window are free. Returns whether they are."""
        window_nbytes = self._device_window.left_nbytes
        while (
            window_nbytes is not None
            and self._moves.attached_nbytes + wanted_nbytes > window_nbytes
        ):
            idle = list(self._idle_on_device(WeightState.ATTACHED))
            if not idle and nearer_than is None:
                idle = list(self._idle_on_device(WeightState.ARRIVING))
            victim = self._choose(order, idle, wanted_nbytes, nearer_than=nearer_than)
            if victim is None:
                return False
            self._moves.settle(self._weights[victim])
            if self._weights[victim].state is WeightState.ATTACHED:
                self._moves.detach(self._weights[victim])
        return True

    def require_device_space(self, order: AccessOrder, unit: Unit) -> None:
        """As `make_device_space`. Raises CapacityError if the unit does not fit beside those in
        use."""
        if self.make_device_space(order, unit):
            return
        window_nbytes = self._device_window.left_nbytes
        assert window_nbytes is not None
        in_use = [weights.unit.name for weights in self._weights if weights.use_count]
        raise CapacityError(
            "device",
            needed_nbytes=unit.weight_nbytes,
            available_nbytes=max(0, window_nbytes - self._moves.attached_nbytes),
            key="tiers.device.capacity",
            detail=f"parameters of {unit.name!r} (in use: {', '.join(in_use)})",
        )

    def lend_device(self, order: AccessOrder, nbytes: int) -> bool:
        """Detaches idle units and lends the space until `end_device_loans`. Returns False, and
        lends nothing, if the weights that are used together need it."""
        in_use = sum(weights.unit.weight_nbytes for weights in self._weights if weights.use_count)
        if not self._device_window.lend(nbytes, in_use_nbytes=in_use):
            return False
        if self._detach_idle(order, 0):
            return True
        self._device_window.lent_nbytes -= nbytes
        return False

    def end_device_loans(self) -> None:
        """Weights may take all of the device window again."""
        self._device_window.lent_nbytes = 0

    def find_block(
        self, order: AccessOrder, weights: Weights, *, only_free: bool = False
    ) -> Block | None:
        """Allocates a unit's host block, if that drops nothing that is needed sooner; with
        `only_free` if it drops nothing."""
        unit, nbytes = weights.unit, self._moves.nbytes[weights.unit.index]
        label = f"parameters of {unit.name}"
        at_top = self._moves.is_at_top(unit)
        while (block := self._pool.try_allocate(nbytes, label, at_top=at_top)) is None:
            if self._pool.is_tight or only_free or not self._make_space(order, nbytes, unit.index):
                return None
        return block

    def is_stacked(self, weights: Weights) -> bool:
        """Returns whether the block of an idle unit lies beside those in use, or need not: see
        `tiers/pool.py`, Note [Tight budgets]. Called of a tight pool."""
        block = weights.decoded or weights.block
        is_there = weights.state in (WeightState.READY, WeightState.ATTACHED)
        if block is None or not is_there:
            return True
        if weights.rests_on_host or not self._device.shares_host_memory:
            return True
        in_use = [w for w in self._moves.there() if w.use_count or w.is_checked_out]
        kept = [kept for w in in_use for kept in (w.block, w.decoded) if kept is not None]
        # The budget has the space of stored bytes, which may be dropped, beside the decoded ones.
        nbytes = self._moves.nbytes[weights.unit.index]
        spare_nbytes = 0 if weights.decoded is None else rounded_nbytes(nbytes)
        return self._pool.is_stacked(block, kept, spare_nbytes)

    def reclaim(self, order: AccessOrder, wanted_nbytes: int) -> bool:
        """Frees a block that is needed late. Returns whether there was one."""
        if self.free_kept(order, wanted_nbytes):
            return True
        victim = self._choose(order, self._feeding(), wanted_nbytes)
        if victim is None:
            return False
        arriving = self._weights[victim].fills
        assert arriving is not None
        self._moves.settle(arriving)
        self._moves.evict(self._weights[victim])
        return True

    def free_kept(self, order: AccessOrder, wanted_nbytes: int) -> bool:
        """As `reclaim`, of a block that no all-gather is fed from."""
        return self._make_space(order, wanted_nbytes) or self._free_one(order, wanted_nbytes)

    def reclaim_zone(self) -> bool:
        """Drops the blocks of the zone that are not in use. Returns whether there were any."""
        idle = [self._weights[index] for index in self._idle_decoded()]
        dropped = [weights for weights in idle if self._moves.decoding.is_in_zone(weights)]
        for weights in dropped:
            self._moves.detach(weights)
        return bool(dropped)

    def _make_space(
        self, order: AccessOrder, wanted_nbytes: int, nearer_than: int | None = None
    ) -> bool:
        """Frees what makes the wanted space, or, where all weights are blocks of similar sizes, one
        block. Returns whether something was freed."""
        make = self._free_neighbours if self._has_stored else self._free_one
        return make(order, wanted_nbytes, nearer_than)

    def _free_neighbours(
        self, order: AccessOrder, wanted_nbytes: int, nearer_than: int | None = None
    ) -> bool:
        """Frees neighbouring blocks, of units that are used later than `nearer_than`, which make
        the wanted space. Returns whether there were some; else nothing is freed."""
        if nearer_than is not None and self._is_refused(order, nearer_than):
            return False
        limit = -1 if nearer_than is None else order.distance(nearer_than)
        blocks = list(self._freeable(order, limit))
        chosen = choose_neighbours(blocks, self._pool.holes(), wanted_nbytes)
        needed = [block.unit for block in chosen if block.distance <= NEVER]
        is_needed = any(order.distance(unit) <= limit for unit in needed)
        if nearer_than is not None and (is_needed or not chosen):
            idle, of_size = {block.unit for block in blocks}, rounded_nbytes(wanted_nbytes)
            self._refusal = _Refusal(
                nearer_than,
                needed,
                [w.unit.index for w in self._moves.there() if w.unit.index not in idle],
                sum(block.range.nbytes for block in chosen) <= of_size,
                order.order,
                self._moves.num_changes,
                self._pool.free_nbytes,
            )
            return False  # See eviction.py, Note [Reads ahead].
        for block in chosen:
            self._free(block.unit, is_decoded=block.is_decoded)
        return bool(chosen)

    def _is_refused(self, order: AccessOrder, unit: int) -> bool:
        """Whether the last refusal still holds, at the cost of the few units it names: the model
        may have thousands of blocks, and every use asks."""
        last = self._refusal
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
            weights = self._weights[index]
            if self._is_evictable(weights) or self._is_droppable(weights):
                if not last.is_of_size or order.distance(index, beyond=limit) >= soonest:
                    return False
                last.in_use.remove(index)
        return True

    def _free_one(
        self, order: AccessOrder, wanted_nbytes: int, nearer_than: int | None = None
    ) -> bool:
        """Frees a block, of a unit that is used later than `nearer_than`. Returns whether there was
        one."""
        evictable = list(self._evictable())
        units = dict.fromkeys([*self._droppable(), *evictable])
        victim = self._choose(order, units, wanted_nbytes, nearer_than=nearer_than)
        if victim is None:
            return False
        self._free(victim, is_decoded=victim not in evictable)
        return True

    def _freeable(self, order: AccessOrder, limit: int) -> Iterator[Evictable]:
        """Yields the blocks that may be freed, with their uses beyond the limit. A decoded block
        whose stored bytes are in memory, too, costs no read."""
        for index in self._droppable():
            weights = self._weights[index]
            assert weights.decoded is not None
            is_spare = weights.block is not None
            distance = NEVER + 1 if is_spare else order.distance(index, beyond=limit)
            yield Evictable(weights.decoded.range, index, distance, is_decoded=True)
        for index in self._evictable():
            block = self._weights[index].block
            assert block is not None
            yield Evictable(block.range, index, order.distance(index, beyond=limit))

    def _free(self, unit: int, *, is_decoded: bool) -> None:
        if is_decoded:
            self._moves.detach(self._weights[unit])
        else:
            self._moves.evict(self._weights[unit])

    def _droppable(self) -> Iterator[int]:
        """Yields units whose decoded block may be freed alone: not in use, and outside the zone."""
        for weights in self._moves.there():
            if self._is_droppable(weights):
                yield weights.unit.index

    def _is_droppable(self, weights: Weights) -> bool:
        return weights.is_decoded_idle and not self._moves.decoding.is_in_zone(weights)

    def _idle_decoded(self) -> list[int]:
        return [weights.unit.index for weights in self._moves.there() if weights.is_decoded_idle]

    def _choose(
        self,
        order: AccessOrder,
        candidates: Iterable[int],
        wanted_nbytes: int,
        *,
        nearer_than: int | None = None,
    ) -> int | None:
        return choose_victim(
            order,
            candidates,
            nearer_than=nearer_than,
            nbytes=self._moves.nbytes,
            wanted_nbytes=wanted_nbytes,
        )

    def _idle_on_device(self, state: WeightState) -> Iterable[int]:
        for weights in self._moves.there():
            has_region = not weights.rests_on_device and weights is not self._moves.decoding.staged
            is_idle = not weights.use_count and not weights.is_checked_out
            if weights.state is state and is_idle and has_region:
                yield weights.unit.index

    def _evictable(self) -> Iterable[int]:
        """Returns units whose host block may be freed: not at rest there, not used by the
        device."""
        for weights in self._moves.there():
            if self._is_evictable(weights):
                yield weights.unit.index

    def _is_evictable(self, weights: Weights) -> bool:
        if weights.block is None or weights.rests_on_host or weights.is_checked_out:
            return False
        if weights.fills is not None:
            return False
        if weights.unit.stored is not None:
            # The decoded block is attached: the stored bytes are not in use.
            return not weights.is_decoding
        return weights.use_count == 0 or not self._device.shares_host_memory

    def _feeding(self) -> Iterable[int]:
        """Feeders whose host block could be freed if the all-gather that they feed were
        cancelled."""
        for weights in self._moves.there():
            is_feeding = weights.fills is not None and weights.block is not None
            if is_feeding and not weights.rests_on_host:
                yield weights.unit.index
