"""Moves of one unit's weights between its tier, its host block and its device region.

Every transition of `state.py` is a method here. Which unit moves, and which unit goes for it, is
decided elsewhere (`cache.py`, `space.py`).

Note [Feeders]
  Over ranks a `WeightProvider` may fill a unit's device region from another unit, its feeder, and
  from the shards of other ranks. Such a unit needs no host block: the feeder, a unit that is never
  in use itself, is read ahead instead. The unit is ARRIVING, with its memory on the device, until
  the provider reports that it has arrived. If the provider cancels the arrival, the unit is read
  into a host block like any other.

Note [Dirty weights]
  A block that is being written stays valid for readers; it is only freed, or changed again, after
  the write is done. Where the device computes on host memory, the pages of the block move under the
  model, so the next use waits for the write. Updated state may wait long for an idle drive:
  such a write goes before it, among the reads of state.
"""

from __future__ import annotations

import contextlib

from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.state.store import DeviceLocation, HostLocation, StateStore
from infinity.state.units import StateKind, Unit
from infinity.storage.protocol import Priority, Transfer
from infinity.streaming.weights.access_order import AccessOrder
from infinity.streaming.weights.decoding import WeightDecoding
from infinity.streaming.weights.eviction import ByNextUse, main_sizes
from infinity.streaming.weights.state import WeightProvider, Weights, WeightState
from infinity.tiers.device import FINISHED, DeviceAdapter, Region
from infinity.tiers.host import Block, HostPool


class WeightMoves:
    """The only writer of residency (`Weights`): reads, writes, copies, arrivals.

    `weights`: all units, by index. `nbytes`: host bytes of the weights, by unit; also of full units
    whose weights rest in shards of other units. `on_device`: units on the device that rest
    elsewhere, of `attached_nbytes`. `in_blocks`: those that have a block and rest elsewhere.
    `lost`: units that have left a block or the device since `ReadAhead` looked. `num_changes`:
    blocks outside the zone that were taken or freed. `WeightSpace` and `ReadAhead` work with its
    `pool`, `device`, `source` and `order`. Called under the engine's lock.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        source: WeightProvider,
        order: AccessOrder,
    ) -> None:
        self._store = store
        self.pool = pool
        self.device = device
        self._counters = counters
        self.source = source
        self.order = order
        self.decoding = WeightDecoding(store, pool, device, counters, self.detach)
        self.attached_nbytes = 0
        self.num_changes = 0
        self.lost: set[int] = set()
        self.nbytes = [
            unit.weight_nbytes if unit.stored is None else unit.stored.nbytes
            for unit in store.units
        ]
        self.on_device = ByNextUse(order, [unit.weight_nbytes for unit in store.units])
        self.in_blocks = ByNextUse(order, self.nbytes)
        feeders = source.feeders()
        fed = set(feeders.values())
        # A unit with a feeder has no host block, and the pages of a rank have one as a feeder only.
        self._travels = [
            unit.index not in fed
            and (unit.index in feeders or unit.stored is None or bool(unit.tensors))
            for unit in store.units
        ]
        self._main_sizes = main_sizes(
            unit.stored.nbytes
            for unit in store.units
            if unit.stored is not None and self._travels[unit.index]
        )
        self.weights = [self._weights_of(unit) for unit in store.units]

    def _weights_of(self, unit: Unit) -> Weights:
        """Returns the unit's weights where they rest, with a region on the device."""
        location = self._store.location(unit, StateKind.PARAMETERS)
        if isinstance(location, DeviceLocation):
            region = Region(location.memory)
            return Weights(unit, region, False, True, WeightState.ATTACHED)
        region = self.device.reserve(unit.weight_nbytes, unit.name)
        if isinstance(location, HostLocation):
            return Weights(unit, region, True, False, WeightState.READY, block=location.block)
        weights = Weights(unit, region, False, False)
        self._count_absent(weights, 1)
        return weights

    def _count_absent(self, weights: Weights, sign: int) -> None:
        unit = weights.unit.index
        if not weights.rests_on_device and self._travels[unit]:
            self.pool.spare.weights_to_come_nbytes += sign * self.nbytes[unit]

    # -- Host ------------------------------------------------------------------------------------

    def require(self, weights: Weights) -> Block:
        """Allocates the unit's host block. Raises CapacityError."""
        unit = weights.unit
        return self.pool.require(
            self.nbytes[unit.index], f"parameters of {unit.name}", at_top=self.is_at_top(unit)
        )

    def is_at_top(self, unit: Unit) -> bool | None:
        """The end of host memory that the unit's block comes from; None: by its size."""
        if unit.stored is None:
            return None
        least, largest = self._main_sizes
        return not least <= unit.stored.nbytes <= largest

    def _take(self, weights: Weights, block: Block) -> None:
        """Makes `block` the unit's host block."""
        weights.block = block
        self.in_blocks.add(weights.unit.index)
        self.num_changes += 1
        self._count_absent(weights, -1)

    def start_read(self, weights: Weights, block: Block, priority: Priority) -> None:
        """Begins to fill `block`, which is the unit's from now on."""
        self._take(weights, block)
        try:
            weights.reading = self._store.read(
                weights.unit, StateKind.PARAMETERS, block, priority=priority
            )
        except BaseException:
            self.drop_block(weights)
            raise
        weights.state = WeightState.READING

    def finish_read(self, weights: Weights) -> None:
        """Waits for the read. Raises StorageError; then the weights are ABSENT."""
        assert weights.reading is not None
        try:
            if not weights.reading.done():
                self._counters.add("fetches_late", 1)
                what = f"{weights.unit.name} needs its parameters"
                # The lock is held: no other thread may free or fill the block meanwhile.
                with self._counters.timed("read_wait_s", what, (weights.reading,)):
                    weights.reading.wait()
            else:
                weights.reading.wait()  # Over, but it may have failed.
        except Exception:
            weights.reading, weights.state = None, WeightState.ABSENT
            self.drop_block(weights)
            raise
        weights.reading, weights.state = None, WeightState.READY

    def begin_fetch(self, weights: Weights, priority: Priority) -> None:
        """Begins to fill the host block, unless the weights are further already."""
        if weights.state is WeightState.ABSENT:
            self.start_read(weights, self.require(weights), priority)

    def fetch(self, weights: Weights, priority: Priority) -> None:
        """Makes the host block valid, unless the weights are further already: those that arrive
        from a feeder are waited for, and read if they do not come."""
        if weights.state is WeightState.ARRIVING:
            self.finish_arrival(weights, is_patient=True)
        self.begin_fetch(weights, priority)
        if weights.state is WeightState.READING:
            self.finish_read(weights)

    def provide(self, weights: Weights, *, read: bool) -> Block:
        """Returns the host block, allocated if necessary; without `read` its bytes are any."""
        if weights.block is None:
            block = self.require(weights)
            if read:
                self.start_read(weights, block, Priority.STATE)
                self.finish_read(weights)
            else:
                self._take(weights, block)
            weights.state = WeightState.READY
        assert weights.block is not None
        return weights.block

    def evict(self, weights: Weights) -> None:
        """Frees the host block, after the bytes that are newer are where they rest."""
        if weights.state is WeightState.READING:
            self.finish_read(weights)  # A read in flight owns the block until it is over.
        if weights.state is WeightState.STAGED:
            self.unstage(weights)
        is_shown = self.device.shares_host_memory and weights.decoded is None
        if weights.state is WeightState.ATTACHED and is_shown:
            self.detach(weights)
        self.start_write(weights)
        self.finish_write(weights)
        self.drop_block(weights)

    def drop_block(self, weights: Weights) -> None:
        """Frees the host block, whatever is in it."""
        assert weights.block is not None and not weights.rests_on_host
        self.finish_copy(weights)
        # INV-2: transfers are done before the block is freed.
        self.pool.free(weights.block)
        weights.block = None
        self.in_blocks.remove(weights.unit.index)
        self.lost.add(weights.unit.index)
        self.num_changes += 1
        self._count_absent(weights, 1)
        if weights.state is WeightState.READY:
            weights.state = WeightState.ABSENT

    def drop(self, weights: Weights) -> None:
        """Drops every copy of weights that rest elsewhere, also bytes that are newer. Raises
        StorageError afterwards if a write has failed."""
        assert not weights.rests_on_host and not weights.rests_on_device
        self.unstage(weights)
        if weights.state is WeightState.READING:
            with contextlib.suppress(StorageError):  # Nobody needs these bytes.
                self.finish_read(weights)
        if weights.state is WeightState.ATTACHED:
            self.detach(weights)
        weights.dirty_nbytes = 0
        failure = None
        try:
            self.finish_write(weights)
        except StorageError as error:  # It is over.
            weights.writing, failure = None, error
        if weights.block is not None:
            self.drop_block(weights)
        weights.state = WeightState.ABSENT
        if failure is not None:
            raise failure

    def discard(self, weights: Weights) -> None:
        """Drops bytes that are out of date, of a unit that is not in use. No copy of bytes that
        stay where they rest is under way any more."""
        assert not weights.use_count and not weights.is_checked_out, weights.unit.name
        self.finish_copy(weights)
        if not weights.rests_on_host and not weights.rests_on_device:
            self.drop(weights)

    # -- Device ----------------------------------------------------------------------------------

    def fill(self, weights: Weights, feeder: Weights | None) -> None:
        """Starts to fill the device region, where space was made: from the host block, or from a
        feeder, which is in memory or is being read."""
        if feeder is None:
            self.attach(weights)
        else:
            self._start_arrival(weights, feeder, weights.region)
            self._count_attached(weights)

    def attach(self, weights: Weights) -> None:
        """Starts the copy from the block to the device, or the decoding there, where space was
        made."""
        if weights.writing is not None and self.device.shares_host_memory:
            self.finish_write(weights)  # The pages leave the address the write reads from.
        if weights.unit.stored is None:
            assert weights.block is not None
            weights.copying = self.device.attach(weights.region, weights.block)
        else:
            weights.copying = self.decoding.attach(weights)
            self._note_decoded(weights)
        self._count_attached(weights)
        weights.state = WeightState.ATTACHED

    def is_on_device(self, weights: Weights) -> bool:
        """Whether the device has the weights, or their memory and they are on their way there."""
        return weights.rests_on_device or weights.unit.index in self.on_device

    def _count_attached(self, weights: Weights) -> None:
        self.on_device.add(weights.unit.index)
        self.attached_nbytes += weights.unit.weight_nbytes

    def _note_decoded(self, weights: Weights) -> None:
        if weights.decoded is not None and not self.decoding.is_in_zone(weights):
            self.num_changes += 1

    def stage(self, weights: Weights, feeder: Weights | None) -> None:
        """Starts to bring stored bytes to the device, where their region has no space yet: from the
        block (READY), or from all ranks (ABSENT). See decoding.py, Note [Staged ahead]."""
        if self.decoding.staged is not None:
            self.unstage(self.decoding.staged)
        memory = self.decoding.lend_staging(weights)
        try:
            if feeder is not None:
                self._start_arrival(weights, feeder, None)
            else:
                assert weights.block is not None and weights.state is WeightState.READY
                weights.copying = self.device.stage(weights.block, memory)
                weights.state = WeightState.STAGED
        except BaseException:
            self.decoding.free_staging()  # What is there is of an earlier unit.
            raise
        self._counters.add("fetches_staged", 1)

    def unstage(self, weights: Weights) -> None:
        """Drops what `stage` has brought or will bring."""
        self.settle(weights)
        if self.decoding.staged is weights:
            self.decoding.free_staging()
        if weights.state is WeightState.STAGED:
            weights.state = WeightState.ABSENT if weights.block is None else WeightState.READY

    def bring_back(self, weights: Weights) -> None:
        """Copies the region to the host block, and ends ATTACHED. Raises CapacityError."""
        self.finish_copy(weights)
        self.finish_write(weights)
        block = weights.block
        if block is None:
            block = self.require(weights)
            self._take(weights, block)
        self.device.bring_back(weights.region, block).wait()
        self.detach(weights)

    def detach(self, weights: Weights) -> None:
        """Ends ATTACHED; the block stays."""
        assert (
            weights.state is WeightState.ATTACHED
            and not weights.use_count
            and not weights.rests_on_device
        )
        weights.check_kept()
        self.device.detach(weights.region)  # A copy that is still under way reads the block.
        self._note_decoded(weights)
        self.decoding.drop(weights)
        self.on_device.remove(weights.unit.index)
        self.lost.add(weights.unit.index)
        self.attached_nbytes -= weights.unit.weight_nbytes
        weights.state = WeightState.ABSENT if weights.block is None else WeightState.READY

    def take_off_device(self, weights: Weights) -> None:
        """Ends ARRIVING and ATTACHED of a unit that is not in use."""
        self.settle(weights)
        if weights.state is WeightState.ATTACHED and not weights.rests_on_device:
            self.detach(weights)

    def finish_copy(self, weights: Weights) -> None:
        """The block may be changed or freed: no copy to the device reads it any more."""
        if not weights.copying.done():
            what = f"parameters of {weights.unit.name} are being copied to the device"
            with self._counters.timed("copy_wait_s", what, (weights.copying,)):
                weights.copying.wait()
        weights.copying.wait()  # Over; drops the memory that the copy keeps.
        weights.copying = FINISHED

    # -- Feeders ---------------------------------------------------------------------------------

    def feeder_of(self, weights: Weights) -> Weights | None:
        """The unit that feeds this one, which is ABSENT where it was read before it was written;
        None: the weights come through their own host block."""
        if weights.block is not None:
            return None
        index = self.source.feeder_of(weights.unit.index)
        if index is None:
            return None
        feeder = self.weights[index]
        if feeder.fills is None and self.source.take_outdated(weights.unit.index):
            self.discard(feeder)
        return feeder

    def _start_arrival(self, weights: Weights, feeder: Weights, region: Region | None) -> None:
        unit = weights.unit
        decoding = None if unit.stored is None else self.decoding.on_device(weights)
        block = feeder.block
        local = feeder.region.content if block is None else self.pool.tensor(block)
        reading = feeder.reading or FINISHED

        def last_write() -> Transfer:  # The pending update of a shard on the device comes before.
            return feeder.copying if block is None else reading

        weights.arrival = self.source.begin(unit.index, region, local, last_write, decoding)
        if decoding is not None and region is not None:
            self.decoding.begin_pass(weights, decoding.memory)
        weights.feeder, feeder.fills = feeder, weights
        weights.state = WeightState.ARRIVING

    def finish_arrival(self, weights: Weights, *, is_patient: bool) -> None:
        """Ends ARRIVING: the weights come, at the latest after a wait, or they do not."""
        arrival, feeder = weights.arrival, weights.feeder
        assert arrival is not None and feeder is not None
        is_there = False
        try:
            with self._counters.timed("ranks_wait_s", f"ranks put {weights.unit.name} together"):
                is_there = arrival.settle(is_patient=is_patient)
        finally:
            weights.arrival = weights.feeder = feeder.fills = None
            self.decoding.end_pass(weights)
            is_staged = self.decoding.staged is weights
            weights.state = WeightState.STAGED if is_staged else WeightState.ATTACHED
            if is_there:
                weights.copying, feeder.copying = arrival.arrival, arrival.departure
            elif is_staged:
                self.unstage(weights)
            else:
                self.detach(weights)

    def settle(self, weights: Weights) -> None:
        """Ends transfers into the device region: those that have not begun are cancelled."""
        if weights.state is WeightState.ARRIVING:
            self.finish_arrival(weights, is_patient=False)

    # -- Writes ----------------------------------------------------------------------------------

    def mark_dirty(self, weights: Weights, nbytes: int) -> None:
        """Notes that the first `nbytes` of the block are newer than where they rest."""
        weights.dirty_nbytes = max(weights.dirty_nbytes, nbytes)

    def start_write(self, weights: Weights) -> None:
        """Starts the write of bytes that are newer than those at rest. Raises StorageError."""
        if weights.dirty_nbytes == 0:
            return
        assert weights.block is not None
        self.finish_write(weights)
        # Where the next use waits for the write, the write does not wait behind updated state.
        is_awaited = self.device.shares_host_memory
        weights.writing = self._store.write(
            weights.unit,
            StateKind.PARAMETERS,
            weights.block,
            nbytes=weights.dirty_nbytes,
            priority=Priority.STATE if is_awaited else Priority.WRITE_BACK,
            undecided=weights.undecided,
        )
        weights.dirty_nbytes = 0

    def finish_write(self, weights: Weights) -> None:
        """Waits for the write. Raises StorageError."""
        if weights.writing is None:
            return
        what = f"parameters of {weights.unit.name} must be written"
        with self._counters.timed("write_wait_s", what, (weights.writing,)):
            weights.writing.wait()
        weights.writing = None

    def close(self, weights: Weights) -> None:
        """Waits for transfers in flight and drops the region. Errors of transfers are
        dropped."""
        for transfer in (weights.reading, weights.writing, weights.copying):
            if transfer is not None:
                with contextlib.suppress(Exception):
                    transfer.wait()
        if weights.state is WeightState.ATTACHED and not weights.rests_on_device:
            self.device.detach(weights.region)
            self.decoding.drop(weights)
        weights.reading = weights.writing = None
