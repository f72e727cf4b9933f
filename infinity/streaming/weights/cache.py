"""Weights between their tier and the device: fetched before use, kept, evicted, changed.

`WeightCache` decides which unit moves, and when. It writes the uses of a unit; `CheckOuts` writes
its check-outs. `WeightMoves` makes the moves and is the only writer of residency; `state.py`
has the states. `WeightEvictor` chooses the units that leave, and lets `WeightMoves` move them.

Note [Feeders]
  A `WeightProvider` may fill a unit's device region from another unit, its feeder, and from
  elsewhere (the shards of other ranks). Such a unit needs no host block: the feeder, a unit that is
  never in use itself, is read ahead instead. The unit is ARRIVING, with its memory on the device,
  until the provider reports that it has arrived. If the provider cancels the arrival, the unit is
  read into a host block like any other.

Note [Changed weights]
  `check_out` hands the host bytes to the optimizer (or to a user who modifies them) and `check_in`
  starts the write to where they rest (`check_outs.py`).

Training thread, or an autograd thread while the training thread waits for it; the engine's lock
orders them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.state.store import StateStore
from infinity.state.units import Unit
from infinity.storage.protocol import Priority
from infinity.streaming.inputs.input_memory import InputMemory
from infinity.streaming.weights.access_order import AccessOrder
from infinity.streaming.weights.check_outs import CheckOuts
from infinity.streaming.weights.decoding import refuse_change
from infinity.streaming.weights.device_window import DeviceWindow
from infinity.streaming.weights.evictor import WeightEvictor
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.provider import TierWeights, WeightProvider
from infinity.streaming.weights.state import Weights, WeightState, check_kept
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool

# Units: the next ones are read in time even if their space must be made.
_NEAR = 2


class WeightCache:
    """Fetches weights before use, keeps those that are used soonest, evicts the others."""

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        window_nbytes: int,
        device_window: DeviceWindow,
        inputs: InputMemory,
        decoded_nbytes: int = 0,
        has_second_memory: bool = False,
        source: WeightProvider | None = None,
    ) -> None:
        self._source = source or TierWeights()
        self._store = store
        self._pool = pool
        self._device = device
        self._counters = counters
        self._window_nbytes = window_nbytes  # 0: nothing is fetched ahead.
        self._inputs = inputs  # Layer inputs in the same memory.
        feeders = self._source.feeders()
        # None for a device without streams, so that a backward does not ask at every node.
        self.current_stream = None if device.shares_host_memory else device.current_stream
        self.orders = {"train": AccessOrder(feeders), "eval": AccessOrder(feeders)}
        self._order = self.orders["train"]
        self._moves = WeightMoves(store, pool, device, counters, self._source)
        self.weights = [self._moves.weights_of(unit) for unit in store.units]
        # Units that rest where the device computes are there already: none is fetched ahead.
        self._is_all_there = device.shares_host_memory and all(
            weights.rests_on_host or weights.rests_on_device for weights in self.weights
        )
        self._evictor = WeightEvictor(self.weights, self._moves, pool, device, device_window)
        self._check_outs = CheckOuts(
            store, pool, device, counters, self._moves, self._evictor,
            stays_attached=isinstance(self._source, TierWeights),
        )  # fmt: skip
        self._moves.decoding.prepare(
            decoded_nbytes,
            self._evictor.reclaim_zone,
            self.absent_nbytes,
            has_second_memory=has_second_memory,
        )

    # -- Uses ------------------------------------------------------------------------------------

    def begin_pass(self, kind: str, *, is_new: bool = True) -> None:
        """Records the start of a forward of the model; `kind` is "train" or "eval". If it is not
        new, it continues the last pass of its kind."""
        self._order = self.orders[kind]
        if is_new:
            self._order.begin()
        self._source.note_pass(is_training=kind == "train")

    def begin_backward(self) -> None:
        """Continues the training pass with its backward. An evaluation may have run in between."""
        self._order = self.orders["train"]
        self._source.note_pass(is_training=True)

    def end_training(self) -> None:
        """Records that no use begins before the next pass, and ends pending arrivals.

        Drops host blocks of stored weights that come from feeders now: an evaluation, or a pass
        that could not use them, has read all of these bytes, and a feeder keeps this rank's part.
        """
        for weights in self.weights:
            self._moves.settle(weights)
            is_kept = weights.unit.stored is not None and weights.block is not None
            if is_kept and self._source.feeder_of(weights.unit.index) is not None:
                self._moves.evict(weights)
        self._source.note_pass(is_training=False)

    def acquire(self, unit: int, priority: Priority, *, is_of_pass: bool = True) -> bool:
        """Makes the unit's weights usable on the device until `release`.

        A use without `is_of_pass` predicts no later use: it is not recorded, and nothing is fetched
        ahead. Returns whether this is the first use. Raises CapacityError when
        the units in use do not fit, StorageError when a read failed.
        """
        weights = self.weights[unit]
        assert not weights.is_checked_out, f"{weights.unit.name} is being updated"
        if weights.use_count == 0:
            if not is_of_pass or not self._order.visit(unit):
                self._counters.add("fetches_unplanned", 1)
            self._bring_in(weights, priority)
        weights.copying.order()  # Each use may be of another stream.
        self._device.begin_use(weights.region)
        weights.use_count += 1
        if weights.use_count > 1:
            return False
        if is_of_pass:
            try:
                self._prefetch(priority)
            except BaseException:
                self.release(unit)  # Nobody has the use that this call would have begun.
                raise
        return True

    def release(self, unit: int) -> bool:
        """Ends one use. Returns whether it was the last. The bytes stay until memory is needed."""
        weights = self.weights[unit]
        assert weights.use_count > 0, f"{weights.unit.name} is not in use"
        weights.use_count -= 1
        self._device.end_use(weights.region, is_last=weights.use_count == 0)
        return weights.use_count == 0

    def join(self, unit: int) -> None:
        """Makes the unit, which is in use, usable for the stream that is current, too."""
        weights = self.weights[unit]
        assert weights.use_count > 0, f"{weights.unit.name} is not in use"
        weights.copying.order()
        self._device.begin_use(weights.region)

    def expected(self) -> Iterator[int]:
        """Units in the order in which they will probably be used next, each once."""
        return self._order.upcoming()

    def in_use(self) -> list[str]:
        """Names of the units in use."""
        return [weights.unit.name for weights in self.weights if weights.use_count]

    def present(self) -> list[Unit]:
        """Returns the units whose weights are in host or device memory."""
        absent = (WeightState.ABSENT, WeightState.READING)
        return [
            weights.unit
            for weights in self.weights
            if weights.state not in absent or weights.rests_on_host or weights.rests_on_device
        ]

    def _bring_in(self, weights: Weights, priority: Priority) -> None:
        self._counters.add("fetches", 1)
        if self._pool.is_tight:
            self._check_outs.restack(weights)
        if weights.state is WeightState.ABSENT:
            feeder = self._feeder_of(weights)
            if feeder is not None:
                if feeder.state is WeightState.ABSENT:
                    self._moves.start_read(feeder, self._moves.require(feeder), priority)
                self._start_arrival(weights, feeder)
        if weights.state is WeightState.ARRIVING:
            self._moves.finish_arrival(weights, is_patient=True)
        self._moves.fetch(weights, priority)
        if weights.state is not WeightState.ATTACHED:
            self._attach(weights)

    def _feeder_of(self, weights: Weights) -> Weights | None:
        """The unit that feeds this one, which is ABSENT where it was read before it was written;
        None: the weights come through their own host block."""
        if weights.block is not None:
            return None
        index = self._source.feeder_of(weights.unit.index)
        if index is None:
            return None
        feeder = self.weights[index]
        if feeder.fills is None and self._source.take_outdated(weights.unit.index):
            self.discard(index)
        return feeder

    def _start_arrival(self, weights: Weights, feeder: Weights) -> None:
        self._evictor.require_device_space(self._order, weights.unit)
        self._moves.start_arrival(weights, feeder)

    def _start_arrival_ahead(self, weights: Weights, feeder: Weights) -> bool:
        """As `_attach_ahead`, for a unit with a feeder."""
        has_space = self._evictor.make_device_space(self._order, weights.unit, is_ahead=True)
        if has_space:
            self._moves.start_arrival(weights, feeder)
        elif self._moves.decoding.can_stage(weights.unit):
            self._moves.stage(weights, feeder)
        return has_space

    def _attach(self, weights: Weights) -> None:
        assert not weights.awaits_update
        self._evictor.require_device_space(self._order, weights.unit)
        self._moves.attach(weights)

    # -- Fetching ahead and evicting ---------------------------------------------------------------

    def _prefetch(self, priority: Priority) -> None:
        """Starts reads for the next units of the prediction, up to the window."""
        if not self._window_nbytes or self._is_all_there:
            return
        window_nbytes, ahead_nbytes = self._inputs.window_nbytes(self._window_nbytes), 0
        has_device_space = not self._device.shares_host_memory
        for index in self._order.upcoming(this_pass=self._source.is_outdated_by_step):
            weights = self.weights[index]
            feeder = self._feeder_of(weights)
            read = weights if feeder is None else feeder
            ahead_nbytes += self._moves.nbytes[read.unit.index]
            if ahead_nbytes > window_nbytes:
                return
            is_absent = weights.state is WeightState.ABSENT and read.state is WeightState.ABSENT
            if is_absent and not self._read_ahead(read, priority, ahead_nbytes):
                return
            if feeder is not None and weights.state is WeightState.ABSENT and has_device_space:
                has_device_space = self._start_arrival_ahead(weights, feeder)
            if weights.state is WeightState.READING and weights.reading and weights.reading.done():
                try:
                    self._moves.finish_read(weights)
                except StorageError:
                    return  # Who needs these weights reads them again.
            if weights.state in (WeightState.READY, WeightState.STAGED) and has_device_space:
                try:
                    has_device_space = self._attach_ahead(weights)
                except torch.OutOfMemoryError:
                    has_device_space = False  # The computation may still have enough.
            if weights is self._moves.decoding.staged:
                has_device_space = False  # It is decoded when it is there, and has space.

    def _read_ahead(self, weights: Weights, priority: Priority, ahead_nbytes: int) -> bool:
        """Starts a read if there is space without dropping weights that are needed sooner.
        `ahead_nbytes`: of the uses until then, with its own."""
        is_near = ahead_nbytes <= _NEAR * self._moves.nbytes[weights.unit.index]
        waits = self._inputs.are_returning and not is_near
        block = self._evictor.find_block(self._order, weights, only_free=waits)
        if block is None:
            return False
        self._moves.start_read(weights, block, priority)
        return True

    def _attach_ahead(self, weights: Weights) -> bool:
        """Starts the copy to the device if there is space without dropping weights that are needed
        sooner. Returns whether there may be space for more."""
        if weights.is_checked_out or weights.awaits_update:
            return True
        has_space = self._evictor.make_device_space(self._order, weights.unit, is_ahead=True)
        if has_space:
            self._attach(weights)
        elif weights.state is WeightState.READY and self._moves.decoding.can_stage(weights.unit):
            self._moves.stage(weights, None)
        return has_space

    def forget(self) -> None:
        """Drops every copy of weights that rest on NVMe, because the bytes there are going to
        change.

        No unit is in use, and no write is due.
        """
        for weights in self.weights:
            assert not weights.use_count and not weights.is_checked_out and not weights.dirty_nbytes
            self._moves.settle(weights)
            if not weights.rests_on_host and not weights.rests_on_device:
                self._moves.drop(weights)

    def reclaim(self, wanted_nbytes: int) -> bool:
        """Frees a block that is needed late. Called by the pool when it is out of memory."""
        return self._evictor.reclaim(self._order, wanted_nbytes)

    def free_kept(self, wanted_nbytes: int) -> bool:
        """Frees a block of weights that are kept for later, after their own transfer. Returns
        whether there was one."""
        return self._evictor.free_kept(self._order, wanted_nbytes)

    def lend_device(self, nbytes: int) -> bool:
        """Lends device memory of the window until `end_device_loans`. Returns whether it did."""
        return self._evictor.lend_device(self._order, nbytes)

    def end_device_loans(self) -> None:
        """Takes all of the window back for weights."""
        self._evictor.end_device_loans()

    def give_up_zone(self) -> bool:
        """Frees host memory that is for decoded weights alone. Called by the pool when nobody else
        has space to free. Returns whether there was any."""
        return self._moves.decoding.give_up_zone()

    # -- Changing weights --------------------------------------------------------------------------

    def absent_nbytes(self) -> int:
        """Host memory that the weights still need until all of them are kept there."""
        return self._moves.absent_nbytes

    def is_in_use(self, unit: int) -> bool:
        """Whether the unit has a use."""
        return self.weights[unit].use_count > 0

    def has_one_use(self, unit: int) -> bool:
        """Whether the unit has exactly one use."""
        return self.weights[unit].use_count == 1

    def await_update(self, unit: int, is_awaited: bool) -> None:
        """Sets whether the unit awaits an update. Between the decision of a step and the update,
        the weights are out of date."""
        self.weights[unit].awaits_update = is_awaited

    def is_evictable(self, unit: int) -> bool:
        """Whether the unit is on the device and rests elsewhere."""
        weights = self.weights[unit]
        return weights.state is WeightState.ATTACHED and not weights.rests_on_device

    def keep_check(self, unit: int, check: Callable[[], None]) -> None:
        """Has `check` called once, before the unit's memory is used again or leaves the device."""
        self.weights[unit].kept_check = check

    def check_kept(self, unit: int) -> None:
        """Calls the `check` of `keep_check`, if it has not been called."""
        if self.weights[unit].kept_check is not None:
            check_kept(self.weights[unit])

    def refuse_change(self, unit: int) -> None:
        """Raises UnsupportedError for weights that rest in files which are not written."""
        refuse_change(self.weights[unit].unit)

    def can_check_out(self, unit: int) -> bool:
        """Whether `check_out` would neither wait nor allocate: the unit is not in use, and its host
        block has the bytes of its tier."""
        return self.weights[unit].is_quiet

    def check_out(
        self,
        unit: int,
        *,
        read: bool,
        stays_on_device: bool = False,
        parts: Sequence[range] | None = None,
    ) -> torch.Tensor:
        """Returns the unit's weights as host bytes to change: uint8, shape (weight_nbytes,).

        With `read` false the caller overwrites all of it, so nothing is fetched. With
        `stays_on_device` weights that rest on the device are returned there. The unit must not
        be in use. Ends with `check_in`. Stored weights can be read, not changed.

        `parts`: ascending ranges of bytes outside of which nothing is read or changed; None: all.
        `read` says of them alone whether they are read. Raises CapacityError, StorageError.
        """
        return self._check_outs.check_out(
            self.weights[unit], read=read, stays_on_device=stays_on_device, parts=parts
        )

    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        """Ends `check_out`; the first `dirty_nbytes`, of the parts, were changed and go to where
        they rest.

        With `write_now` false the write waits for `write_behind`, `finish_writes` or until the
        block is evicted; not on a device. Bytes that were to be overwritten and were not are not
        valid: they are dropped.
        """
        self._check_outs.check_in(
            self.weights[unit], dirty_nbytes=dirty_nbytes, write_now=write_now, is_valid=is_valid
        )

    def prefetch_anew(self) -> None:
        """After a step that made weights outdated: fetches for the pass to come."""
        self._order.begin()
        self._source.note_pass(is_training=True)  # Probably; it is said when the pass begins.
        self._prefetch(Priority.FORWARD)
        self._source.note_pass(is_training=False)

    def take_off_device(self, unit: int) -> None:
        """Puts an idle unit's host bytes back to their own address, for others to read them."""
        weights = self.weights[unit]
        assert not weights.use_count, weights.unit.name
        self._moves.settle(weights)
        if weights.state is WeightState.ATTACHED and not weights.rests_on_device:
            self._moves.detach(weights)

    def discard(self, unit: int) -> None:
        """Drops bytes that are out of date; the next use fetches the unit. It must not be in
        use. No copy of bytes that stay where they rest is under way any more."""
        weights = self.weights[unit]
        assert not weights.use_count and not weights.is_checked_out, weights.unit.name
        self._moves.finish_copy(weights)
        if not weights.rests_on_host and not weights.rests_on_device:
            self._moves.drop(weights)

    def absorb(self, unit: int) -> None:
        """Takes over the changes that were made on the device while the unit was in use.

        The unit must not be in use any more. The write waits until the block is evicted or
        `finish_writes`.
        """
        weights = self.weights[unit]
        assert not weights.use_count and weights.state is WeightState.ATTACHED
        if weights.unit.stored is not None:
            digests = self._moves.decoding.digests(weights)
            self._moves.detach(weights)  # The next use decodes the stored weights again.
            if self._moves.decoding.differs(weights, digests):
                self.refuse_change(unit)
            return
        if weights.rests_on_device:
            return
        self._moves.bring_back(weights)
        if not weights.rests_on_host:
            self._moves.mark_dirty(weights, weights.unit.weight_nbytes)

    def write_behind(self, unit: int) -> None:
        """Starts the write of a changed unit that is not in use any more.

        A unit that is used next is not written, because the write would delay its use. If the write
        is refused, the unit stays dirty, and the next request to the volume raises the error.
        """
        weights = self.weights[unit]
        if not weights.dirty_nbytes or weights.use_count or self._order.distance(unit) == 0:
            return
        if weights.state is WeightState.ATTACHED and self._device.shares_host_memory:
            self._moves.detach(weights)
        with contextlib.suppress(StorageError):
            self._moves.start_write(weights)

    def finish_writes(self) -> None:
        """Waits until every changed weight is where it rests."""
        for weights in self.weights:
            if weights.dirty_nbytes:
                if weights.state is WeightState.ATTACHED and self._device.shares_host_memory:
                    self._moves.detach(weights)
                self._moves.start_write(weights)
        for weights in self.weights:
            self._moves.finish_write(weights)

    def close(self) -> None:
        """Waits for everything in flight and drops all regions, and errors of reads."""
        for weights in self.weights:
            with contextlib.suppress(Exception):
                self._moves.settle(weights)
            if weights.use_count:
                weights.use_count = 0
                self._device.end_use(weights.region)
            self._moves.close(weights)
        self._moves.decoding.close()
