"""Weights between their tier and the device: the only writer of residency.

A unit's weights are, at any moment, in one of these states:

  state      host block            device region   next
  ABSENT     none                  empty           READING
  READING    being filled          empty           READY (read done), ABSENT (failed)
  READY      valid                 empty           ATTACHED, ABSENT (evicted)
  ARRIVING   none                  being filled    ATTACHED, ABSENT (called off)
  ATTACHED   valid, or freed once  valid           READY (detached), ABSENT (detached, evicted)
             copied to a device
             with own memory

`use_count` counts the uses in progress; a held unit is ATTACHED and never evicted. A unit that
rests on the host always has its block; one that rests on the device is always ATTACHED.

Note [Stored weights]
  A frozen unit may rest in a checkpoint's own files (`Unit.stored`). Its host block holds the bytes
  of the files, which may be quantised, and attaching decodes them: on a device with memory of its
  own after the copy, into the region; on the host into a second block (`decoded`), whose pages the
  region shows. The decoded block lives while the unit is ATTACHED, and costs no read to make again,
  so it is the first to go when room is needed. The block of stored bytes may go at any time.

Note [Feeders]
  A `WeightProvider` may fill a unit's device region from another unit, its feeder, and from
  elsewhere (the shards that other ranks have). Such a unit needs no host block: what is read ahead
  is the feeder, a unit that is never held. The unit is ARRIVING until the source says that it
  comes; it
  takes its room on the device before. If it does not come, it is read into a host block like any
  other.

Note [Dirty weights]
  `check_out` hands the host bytes to the optimizer (or to a user who modifies them) and `check_in`
  starts the write to where they rest. A block that is being written stays valid for readers; it is
  only freed, or changed again, after the write is done.

Training thread, or an autograd thread while the training thread waits for it; the engine's lock
orders them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

import torch

from infinity.errors import CapacityError, StorageError, UnsupportedError
from infinity.observe import Counters
from infinity.state.store import DeviceLocation, HostLocation, StateStore, Transfer
from infinity.state.units import StateKind, Unit, weight_of
from infinity.storage.protocol import Priority
from infinity.streaming.access_order import AccessOrder
from infinity.streaming.eviction import choose_victim
from infinity.streaming.weight_provider import Arrival, TierWeights, WeightProvider
from infinity.tiers.device import FINISHED, Copy, DeviceAdapter, Region
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool


class WeightState(Enum):
    ABSENT = auto()
    READING = auto()
    READY = auto()
    ARRIVING = auto()
    ATTACHED = auto()


@dataclass(eq=False, slots=True)
class Weights:
    """One unit's weights on their way. Written by the executor alone."""

    unit: Unit
    region: Region
    rests_on_host: bool
    rests_on_device: bool
    state: WeightState = WeightState.ABSENT
    use_count: int = 0
    block: Block | None = None
    decoded: Block | None = None  # While ATTACHED or checked out, if made from stored bytes here.
    is_decoding: bool = False  # Its blocks are in use while room is made for another.
    reading: Transfer | None = None
    writing: Transfer | None = None
    arrival: Arrival | None = None  # While ARRIVING.
    feeder: Weights | None = None  # While ARRIVING: the unit it is filled from.
    fills: Weights | None = None  # Of a feeder: the unit that arrives.
    copying: Copy = FINISHED
    dirty_nbytes: int = 0  # The head of the block that is newer than where it rests.
    is_checked_out: bool = False
    awaits_update: bool = False  # These bytes are a step behind: the device must not see them.


def tensor_in(region: Region, unit: Unit, name: str) -> torch.Tensor:
    """Returns a parameter of the unit over its device region."""
    spec = unit.spec(name)
    facts = spec.facts
    return region.tensor(spec.weight_offset_nbytes, facts.shape, facts.stride, facts.dtype)


def tensor_among(weights: torch.Tensor, unit: Unit, name: str) -> torch.Tensor:
    """Returns a parameter of the unit, in its shape, among weight bytes (uint8) of the unit."""
    spec = unit.spec(name)
    return weight_of(weights, spec).as_strided(spec.facts.shape, spec.facts.stride)


class WeightCache:
    """Fetches weights before use, keeps what is used soonest, lets go of the rest."""

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        window_nbytes: int,
        device_window_nbytes: int | None,
        source: WeightProvider | None = None,
    ) -> None:
        self._source = source or TierWeights()
        self._store = store
        self._pool = pool
        self._device = device
        self._counters = counters
        self._window_nbytes = window_nbytes  # 0: nothing is fetched ahead.
        self._device_window_nbytes = device_window_nbytes
        self._attached_nbytes = 0
        feeders = self._source.feeders()
        self.orders = {"train": AccessOrder(feeders), "eval": AccessOrder(feeders)}
        self._order = self.orders["train"]
        self.weights = [self._weights_of(unit) for unit in store.units]
        # Host bytes of the weights; also of full units whose weights rest in shards of other units.
        self._nbytes = [
            unit.weight_nbytes if unit.stored is None else unit.stored.nbytes
            for unit in store.units
        ]
        stored = [unit.stored.nbytes for unit in store.units if unit.stored is not None]
        if stored:
            device.prepare_decoding(max(stored))

    def _weights_of(self, unit: Unit) -> Weights:
        location = self._store.location(unit, StateKind.PARAMETERS)
        if isinstance(location, DeviceLocation):
            region = self._device.reserve_resident(location.memory)
            return Weights(unit, region, False, True, WeightState.ATTACHED)
        region = self._device.reserve(unit.weight_nbytes)
        if isinstance(location, HostLocation):
            return Weights(unit, region, True, False, WeightState.READY, block=location.block)
        return Weights(unit, region, False, False)

    # -- Uses ------------------------------------------------------------------------------------

    def begin_pass(self, kind: str, *, is_new: bool = True) -> None:
        """A forward of the model starts; `kind` is "train" or "eval". Where it is not new, the last
        of its kind goes on."""
        self._order = self.orders[kind]
        if is_new:
            self._order.begin()
        self._source.note_pass(is_training=kind == "train")

    def begin_backward(self) -> None:
        """Of a training pass, which goes on: a pass of another kind may have come in between."""
        self._order = self.orders["train"]
        self._source.note_pass(is_training=True)

    def end_training(self) -> None:
        """Nothing begins any more before the next pass: ends what is under way."""
        self._source.note_pass(is_training=False)
        for weights in self.weights:
            self._settle(weights)

    def acquire(self, unit: int, priority: Priority, *, is_of_pass: bool = True) -> bool:
        """Makes the unit's weights usable on the device until `release`.

        A use that is not `is_of_pass` says nothing of those to come: it is not recorded, and
        nothing is fetched ahead. Returns whether this is the first hold. Raises CapacityError when
        the held units of this moment do not fit, StorageError when a read failed.
        """
        weights = self.weights[unit]
        assert not weights.is_checked_out, f"{weights.unit.name} is being updated"
        if weights.use_count == 0:
            if not is_of_pass or not self._order.visit(unit):
                self._counters.add("fetches_unplanned", 1)
            self._bring_in(weights, priority)
        weights.copying.order()  # Each use may be of another stream.
        weights.use_count += 1
        if weights.use_count > 1:
            return False
        if is_of_pass:
            self._prefetch(priority)
        return True

    def release(self, unit: int) -> bool:
        """Ends one use. Returns whether it was the last. The bytes stay until room is needed."""
        weights = self.weights[unit]
        assert weights.use_count > 0, f"{weights.unit.name} is not held"
        weights.use_count -= 1
        self._device.end_use(weights.region)
        return weights.use_count == 0

    def expected(self) -> Iterator[int]:
        """Units in the order in which they will probably be used next, each once."""
        return self._order.upcoming()

    def in_use(self) -> list[str]:
        """Names of the units in use."""
        return [weights.unit.name for weights in self.weights if weights.use_count]

    def _bring_in(self, weights: Weights, priority: Priority) -> None:
        self._counters.add("fetches", 1)
        if weights.state is WeightState.ABSENT:
            feeder = self._feeder_of(weights)
            if feeder is not None:
                if feeder.state is WeightState.ABSENT:
                    self._start_read(feeder, self._require(feeder), priority)
                self._start_arrival(weights, feeder)
        if weights.state is WeightState.ARRIVING:
            self._finish_arrival(weights, is_patient=True)
        if weights.state is WeightState.ABSENT:
            self._start_read(weights, self._require(weights), priority)
        if weights.state is WeightState.READING:
            self._finish_read(weights)
        if weights.state is WeightState.READY:
            self._attach(weights)

    def _require(self, weights: Weights) -> Block:
        unit = weights.unit
        return self._pool.require(self._nbytes[unit.index], f"parameters of {unit.name}")

    def _start_read(self, weights: Weights, block: Block, priority: Priority) -> None:
        weights.block = block
        try:
            weights.reading = self._store.read(
                weights.unit, StateKind.PARAMETERS, block, priority=priority
            )
        except BaseException:
            self._drop_block(weights)
            raise
        weights.state = WeightState.READING

    def _finish_read(self, weights: Weights) -> None:
        assert weights.reading is not None
        try:
            if not weights.reading.done():
                self._counters.add("fetches_late", 1)
                what = f"{weights.unit.name} needs its parameters"
                with self._counters.timed("read_wait_s", what, (weights.reading,)):
                    weights.reading.wait()
            else:
                weights.reading.wait()  # Over, but it may have failed.
        except Exception:
            weights.reading, weights.state = None, WeightState.ABSENT
            self._drop_block(weights)
            raise
        weights.reading, weights.state = None, WeightState.READY

    # -- Feeders ---------------------------------------------------------------------------------

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

    def _start_arrival(self, weights: Weights, feeder: Weights, *, is_ahead: bool = False) -> bool:
        """Begins to fill a unit's region; its feeder is there, or on its way. Returns whether there
        was room, which is only asked for ahead of its use."""
        if not self._make_device_room(weights.unit, is_ahead=is_ahead):
            if is_ahead:
                return False
            self._refuse_device(weights.unit)
        weights.arrival = self._source.begin(
            weights.unit.index, weights.region, self._bytes_of(feeder), feeder.reading
        )
        weights.feeder, feeder.fills = feeder, weights
        self._attached_nbytes += weights.unit.weight_nbytes
        weights.state = WeightState.ARRIVING
        return True

    def _bytes_of(self, feeder: Weights) -> torch.Tensor:
        if feeder.block is not None:
            return self._pool.tensor(feeder.block)
        location = self._store.location(feeder.unit, StateKind.PARAMETERS)
        assert isinstance(location, DeviceLocation)
        return location.memory

    def _finish_arrival(self, weights: Weights, *, is_patient: bool) -> None:
        arrival, feeder = weights.arrival, weights.feeder
        assert arrival is not None and feeder is not None
        is_there = False
        try:
            with self._counters.timed("ranks_wait_s", f"ranks put {weights.unit.name} together"):
                is_there = arrival.settle(is_patient=is_patient)
        finally:
            weights.arrival = weights.feeder = feeder.fills = None
            weights.state = WeightState.ATTACHED
            if is_there:
                weights.copying, feeder.copying = arrival.arrival, arrival.departure
            else:
                self._detach(weights)

    def _settle(self, weights: Weights) -> None:
        """Nothing is under way into the device region: what has not begun to come is called off."""
        if weights.state is WeightState.ARRIVING:
            self._finish_arrival(weights, is_patient=False)

    # -- Device ----------------------------------------------------------------------------------

    def _attach(self, weights: Weights) -> None:
        assert weights.block is not None and not weights.awaits_update
        if not self._make_device_room(weights.unit):
            self._refuse_device(weights.unit)
        if weights.writing is not None and self._device.shares_host_memory:
            self._finish_write(weights)  # The pages leave the address the write reads from.
        weights.copying = self._fill_region(weights, weights.block)
        self._attached_nbytes += weights.unit.weight_nbytes
        weights.state = WeightState.ATTACHED

    def _fill_region(self, weights: Weights, block: Block) -> Copy:
        unit, region = weights.unit, weights.region
        stored = unit.stored
        if stored is None:
            return self._device.attach(region, block)
        if self._device.shares_host_memory:
            return self._device.attach(region, self._decode(weights, block))
        return self._device.attach_decoded(
            region,
            block,
            lambda content: stored.decode(content, lambda name: tensor_in(region, unit, name)),
        )

    def _decode(self, weights: Weights, block: Block) -> Block:
        """Makes the weights of the stored bytes in `block`, in another block."""
        unit = weights.unit
        assert unit.stored is not None and weights.decoded is None
        weights.is_decoding = True
        try:
            decoded = self._pool.require(unit.weight_nbytes, f"decoded parameters of {unit.name}")
        finally:
            weights.is_decoding = False
        memory = self._pool.tensor(decoded)
        try:
            with self._counters.timed("decode_s", f"parameters of {unit.name} are decoded"):
                unit.stored.decode(
                    self._pool.tensor(block), lambda name: tensor_among(memory, unit, name)
                )
        except BaseException:
            self._pool.free(decoded)
            raise
        weights.decoded = decoded
        return decoded

    def _drop_decoded(self, weights: Weights) -> None:
        if weights.decoded is not None:
            self._pool.free(weights.decoded)
            weights.decoded = None

    def _detach(self, weights: Weights) -> None:
        assert (
            weights.state is WeightState.ATTACHED
            and not weights.use_count
            and not weights.rests_on_device
        )
        self._device.detach(weights.region)  # A copy that is still under way reads the block.
        self._drop_decoded(weights)
        self._attached_nbytes -= weights.unit.weight_nbytes
        weights.state = WeightState.ABSENT if weights.block is None else WeightState.READY

    def _finish_copy(self, weights: Weights) -> None:
        """The block may be changed or freed: no copy to the device reads it any more."""
        if not weights.copying.done():
            what = f"parameters of {weights.unit.name} are being copied to the device"
            with self._counters.timed("copy_wait_s", what, (weights.copying,)):
                weights.copying.wait()
        weights.copying.wait()  # Over; lets go of what the copy keeps.
        weights.copying = FINISHED

    def _make_device_room(self, unit: Unit, *, is_ahead: bool = False) -> bool:
        """Detaches what is used last until the unit fits the device window; ahead of its use, only
        what is used later than it. Returns whether it fits."""
        window_nbytes = self._device_window_nbytes
        nearer_than = unit.index if is_ahead else None
        if is_ahead and window_nbytes is not None:
            # All or nothing: what goes for a unit that does not fit has to come back for naught.
            least_distance = self._order.distance(unit.index)
            there = self._idle_on_device(WeightState.ATTACHED)
            later = sum(self._nbytes[i] for i in there if self._order.distance(i) > least_distance)
            if self._attached_nbytes + unit.weight_nbytes - later > window_nbytes:
                return False
        while (
            window_nbytes is not None and self._attached_nbytes + unit.weight_nbytes > window_nbytes
        ):
            idle = list(self._idle_on_device(WeightState.ATTACHED))
            if not idle and not is_ahead:
                idle = list(self._idle_on_device(WeightState.ARRIVING))
            victim = self._choose(idle, unit.weight_nbytes, nearer_than=nearer_than)
            if victim is None:
                return False
            self._settle(self.weights[victim])
            if self.weights[victim].state is WeightState.ATTACHED:
                self._detach(self.weights[victim])
        return True

    def _refuse_device(self, unit: Unit) -> NoReturn:
        assert self._device_window_nbytes is not None
        raise CapacityError(
            "device",
            needed_nbytes=unit.weight_nbytes,
            available_nbytes=max(0, self._device_window_nbytes - self._attached_nbytes),
            key="tiers.device.capacity",
            detail=f"parameters of {unit.name!r} (in use: {', '.join(self.in_use())})",
        )

    def _idle_on_device(self, state: WeightState) -> Iterable[int]:
        for weights in self.weights:
            if weights.state is state and not weights.use_count and not weights.rests_on_device:
                yield weights.unit.index

    # -- Fetching ahead, and letting go ------------------------------------------------------------

    def _prefetch(self, priority: Priority) -> None:
        """Starts reads for the next units of the prediction, up to the window."""
        if not self._window_nbytes:
            return
        ahead_nbytes = 0
        has_device_room = not self._device.shares_host_memory
        for index in self._order.upcoming(this_pass=self._source.is_outdated_by_step):
            weights = self.weights[index]
            feeder = self._feeder_of(weights)
            read = weights if feeder is None else feeder
            ahead_nbytes += self._nbytes[read.unit.index]
            if ahead_nbytes > self._window_nbytes:
                return
            is_absent = weights.state is WeightState.ABSENT and read.state is WeightState.ABSENT
            if is_absent and not self._read_ahead(read, priority):
                return
            if feeder is not None:
                if weights.state is WeightState.ABSENT and has_device_room:
                    has_device_room = self._start_arrival(weights, feeder, is_ahead=True)
                continue
            if weights.state is WeightState.READING and weights.reading and weights.reading.done():
                self._finish_read(weights)
            if weights.state is WeightState.READY and has_device_room:
                has_device_room = self._attach_ahead(weights)

    def _read_ahead(self, weights: Weights, priority: Priority) -> bool:
        """Starts a read if room can be had without dropping anything needed sooner."""
        unit, nbytes = weights.unit, self._nbytes[weights.unit.index]
        label = f"parameters of {unit.name}"
        while (block := self._pool.try_allocate(nbytes, label)) is None:
            if self._reclaim_decoded(nbytes, nearer_than=unit.index):
                continue
            victim = self._choose(self._evictable(), nbytes, nearer_than=unit.index)
            if victim is None:
                return False
            self._evict(self.weights[victim])
        self._start_read(weights, block, priority)
        return True

    def _attach_ahead(self, weights: Weights) -> bool:
        """Starts the copy to the device, if room can be had without dropping what is needed
        sooner. Returns whether there may be room for more."""
        if weights.is_checked_out or weights.awaits_update:
            return True
        has_room = self._make_device_room(weights.unit, is_ahead=True)
        if has_room:
            self._attach(weights)
        return has_room

    def _evictable(self) -> Iterable[int]:
        """Units whose host block may be freed: not resting here, not in use by the device."""
        for weights in self.weights:
            if weights.block is None or weights.rests_on_host or weights.is_checked_out:
                continue
            if weights.fills is not None:
                continue
            if weights.unit.stored is not None:
                # What is attached is the decoded block: the stored bytes are not in use.
                if not weights.is_decoding:
                    yield weights.unit.index
            elif weights.use_count == 0 or not self._device.shares_host_memory:
                yield weights.unit.index

    def _reclaim_decoded(self, wanted_nbytes: int, *, nearer_than: int | None = None) -> bool:
        """Frees a decoded block that is not in use. Returns whether there was one."""
        idle = [
            weights.unit.index
            for weights in self.weights
            if weights.decoded is not None
            and not weights.use_count
            and not weights.is_decoding
            and weights.state is WeightState.ATTACHED
        ]
        victim = self._choose(idle, wanted_nbytes, nearer_than=nearer_than)
        if victim is None:
            return False
        self._detach(self.weights[victim])
        return True

    def _feeding(self) -> Iterable[int]:
        """Feeders whose host block could be freed if what they fill were called off."""
        for weights in self.weights:
            is_feeding = weights.fills is not None and weights.block is not None
            if is_feeding and not weights.rests_on_host:
                yield weights.unit.index

    def forget(self) -> None:
        """Drops every copy of weights that rest on NVMe: what rests there is going to be other.

        Nobody holds a unit, and no write is due.
        """
        for weights in self.weights:
            assert not weights.use_count and not weights.is_checked_out and not weights.dirty_nbytes
            self._settle(weights)
            if weights.rests_on_host or weights.rests_on_device:
                continue
            self._finish_write(weights)
            if weights.state is WeightState.READING:
                self._finish_read(weights)
            if weights.state is WeightState.ATTACHED:
                self._detach(weights)
            if weights.block is not None:
                self._drop_block(weights)
            weights.state = WeightState.ABSENT

    def reclaim(self, wanted_nbytes: int) -> bool:
        """Frees a block that is needed late. Called by the pool when it is out of room."""
        if self._reclaim_decoded(wanted_nbytes):
            return True
        victim = self._choose(self._evictable(), wanted_nbytes)
        if victim is None:
            victim = self._choose(self._feeding(), wanted_nbytes)
            if victim is None:
                return False
            arriving = self.weights[victim].fills
            assert arriving is not None
            self._settle(arriving)
        self._evict(self.weights[victim])
        return True

    def _choose(
        self, candidates: Iterable[int], wanted_nbytes: int, *, nearer_than: int | None = None
    ) -> int | None:
        return choose_victim(
            self._order,
            candidates,
            nearer_than=nearer_than,
            nbytes=self._nbytes,
            wanted_nbytes=wanted_nbytes,
        )

    def _evict(self, weights: Weights) -> None:
        if weights.state is WeightState.READING:
            self._finish_read(weights)  # A read in flight owns the block until it is over.
        is_shown = self._device.shares_host_memory and weights.decoded is None
        if weights.state is WeightState.ATTACHED and is_shown:
            self._detach(weights)
        self._start_write(weights)
        self._finish_write(weights)
        self._drop_block(weights)
        if weights.state is WeightState.READY:
            weights.state = WeightState.ABSENT

    def _drop_block(self, weights: Weights) -> None:
        assert weights.block is not None and not weights.rests_on_host
        self._finish_copy(weights)
        # INV-2: transfers are done before the block is freed.
        self._pool.free(weights.block)
        weights.block = None

    # -- Changing weights --------------------------------------------------------------------------

    def is_in_use(self, unit: int) -> bool:
        return self.weights[unit].use_count > 0

    def is_last_hold(self, unit: int) -> bool:
        return self.weights[unit].use_count == 1

    def await_update(self, unit: int, is_awaited: bool) -> None:
        """Between a step's decision and the update of the unit, its weights are out of date."""
        self.weights[unit].awaits_update = is_awaited

    def refuse_change(self, unit: int) -> None:
        """Raises UnsupportedError for weights that rest in files which are not written."""
        stored = self.weights[unit].unit.stored
        if stored is not None:
            names = list(dict.fromkeys(name for name, _, _ in stored.pieces))
            raise UnsupportedError(
                f"{', '.join(map(repr, names[:3]))} of {self.weights[unit].unit.name!r} cannot be "
                f"changed: the frozen weights rest in {stored.runs[0].path}, which is only read. "
                'To change them, offload with placement.frozen = "copy"'
            )

    def _differs(self, weights: Weights) -> bool:
        """Returns whether the attached weights are other than the stored ones. Code may write a
        parameter without changing it."""
        unit, stored = weights.unit, weights.unit.stored
        assert stored is not None
        block, self_made = weights.block, weights.block is None
        weights.is_decoding = True
        try:
            if block is None:
                block = self._require(weights)
        finally:
            weights.is_decoding = False
        try:
            if self_made:
                kind, urgency = StateKind.PARAMETERS, Priority.STATE
                self._store.read(unit, kind, block, priority=urgency).wait()
            content = self._pool.tensor(block)
            pieces = stored.decoded_pieces(content, lambda name: unit.spec(name).facts.dtype)
            for name, piece, expected in pieces:
                shown = piece.target(tensor_in(weights.region, unit, name)).contiguous().cpu()
                if not torch.equal(shown.view(torch.uint8), expected.view(torch.uint8)):
                    return True
            return False
        finally:
            if self_made:
                self._pool.free(block)

    def _check_out_decoded(self, weights: Weights) -> torch.Tensor:
        """The weights made of stored bytes, in a block that `check_in` frees."""
        self._settle(weights)
        if weights.state is WeightState.ATTACHED:
            self._detach(weights)
        if weights.state is WeightState.ABSENT:
            self._start_read(weights, self._require(weights), Priority.STATE)
        if weights.state is WeightState.READING:
            self._finish_read(weights)
        self._finish_copy(weights)
        assert weights.block is not None
        decoded = self._decode(weights, weights.block)
        weights.is_checked_out = True
        return self._pool.tensor(decoded)

    def check_out(self, unit: int, *, read: bool) -> torch.Tensor:
        """The unit's weights as host bytes to change: uint8, shape (weight_nbytes,).

        With `read` false the caller overwrites all of it, so nothing is fetched. Nobody may hold
        the unit. Ends with `check_in`. Stored weights can be looked at, not changed.
        """
        weights = self.weights[unit]
        assert not weights.use_count and not weights.is_checked_out, weights.unit.name
        if weights.unit.stored is not None:
            assert read, "stored weights are not overwritten"
            return self._check_out_decoded(weights)
        if weights.rests_on_device and self._device.shares_host_memory:
            weights.is_checked_out = True
            host_view = self._store.host_view(weights.unit, StateKind.PARAMETERS)
            assert host_view is not None
            return host_view
        self._settle(weights)
        if weights.state is WeightState.ATTACHED and not weights.rests_on_device:
            self._detach(weights)
        self._finish_write(weights)
        if weights.state is WeightState.READING:
            self._finish_read(weights)
        if weights.block is None:
            block = self._require(weights)
            if read:
                self._start_read(weights, block, Priority.STATE)
                self._finish_read(weights)
            else:
                weights.block = block
            weights.state = WeightState.ATTACHED if weights.rests_on_device else WeightState.READY
        self._finish_copy(weights)
        weights.is_checked_out = True
        assert weights.block is not None
        return self._pool.tensor(weights.block)

    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        """Ends `check_out`; the first `dirty_nbytes` were changed and go to where they rest.

        With `write_now` false the write waits for `write_behind`, `finish_writes` or until the
        block is evicted. Bytes that were to be overwritten and were not are not valid: they are
        dropped.
        """
        weights = self.weights[unit]
        assert weights.is_checked_out
        weights.is_checked_out = False
        if weights.unit.stored is not None:
            assert dirty_nbytes == 0, "stored weights are not changed"
            self._drop_decoded(weights)
            return
        if weights.rests_on_host or (weights.rests_on_device and weights.block is None):
            return
        if not is_valid:
            self._drop_block(weights)
            if weights.state is WeightState.READY:
                weights.state = WeightState.ABSENT
            return
        weights.dirty_nbytes = max(weights.dirty_nbytes, dirty_nbytes)
        if write_now or weights.rests_on_device:
            self._start_write(weights)
        if weights.rests_on_device:
            self._finish_write(weights)
            self._drop_block(weights)

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
        self._settle(weights)
        if weights.state is WeightState.ATTACHED and not weights.rests_on_device:
            self._detach(weights)

    def discard(self, unit: int) -> None:
        """Drops bytes that are out of date: who needs the unit next fetches it. Nobody holds it."""
        weights = self.weights[unit]
        assert not weights.use_count and not weights.is_checked_out, weights.unit.name
        if weights.rests_on_host or weights.rests_on_device:
            return
        self._settle(weights)
        if weights.state is WeightState.READING:
            self._finish_read(weights)
        if weights.state is WeightState.ATTACHED:
            self._detach(weights)
        weights.dirty_nbytes = 0
        self._finish_write(weights)
        if weights.block is not None:
            self._drop_block(weights)
        weights.state = WeightState.ABSENT

    def absorb(self, unit: int) -> None:
        """What was changed on the device since the unit was held becomes the unit's weights.

        Nobody may hold it any more. The write waits until the block is evicted or `finish_writes`.
        """
        weights = self.weights[unit]
        assert not weights.use_count and weights.state is WeightState.ATTACHED
        if weights.unit.stored is not None:
            try:
                is_changed = self._differs(weights)
            finally:
                self._detach(weights)  # The next use decodes the stored weights again.
            if is_changed:
                self.refuse_change(unit)
            return
        if weights.rests_on_device:
            return
        self._finish_copy(weights)
        self._finish_write(weights)
        if weights.block is None:
            weights.block = self._require(weights)
        self._device.bring_back(weights.region, weights.block).wait()
        self._detach(weights)
        if not weights.rests_on_host:
            weights.dirty_nbytes = weights.unit.weight_nbytes

    def write_behind(self, unit: int) -> None:
        """Nobody holds the unit now: if it was changed, it starts on its way to where it rests.

        Not when it is the next to be used: a write would only be in its way. A refusal is left to
        the next one who asks the volume for something; the unit stays dirty.
        """
        weights = self.weights[unit]
        if not weights.dirty_nbytes or weights.use_count or self._order.distance(unit) == 0:
            return
        if weights.state is WeightState.ATTACHED and self._device.shares_host_memory:
            self._detach(weights)
        with contextlib.suppress(StorageError):
            self._start_write(weights)

    def _start_write(self, weights: Weights) -> None:
        if weights.dirty_nbytes == 0:
            return
        assert weights.block is not None
        self._finish_write(weights)
        weights.writing = self._store.write(
            weights.unit, StateKind.PARAMETERS, weights.block, nbytes=weights.dirty_nbytes
        )
        weights.dirty_nbytes = 0

    def _finish_write(self, weights: Weights) -> None:
        if weights.writing is None:
            return
        what = f"parameters of {weights.unit.name} must be written"
        with self._counters.timed("write_wait_s", what, (weights.writing,)):
            weights.writing.wait()
        weights.writing = None

    def finish_writes(self) -> None:
        """Waits until every changed weight is where it rests."""
        for weights in self.weights:
            if weights.dirty_nbytes:
                if weights.state is WeightState.ATTACHED and self._device.shares_host_memory:
                    self._detach(weights)
                self._start_write(weights)
        for weights in self.weights:
            self._finish_write(weights)

    def close(self) -> None:
        """Waits for everything in flight and lets go of all regions. Errors of reads are
        dropped."""
        for weights in self.weights:
            with contextlib.suppress(Exception):
                self._settle(weights)
            if weights.use_count:
                weights.use_count = 0
                self._device.end_use(weights.region)
            for transfer in (weights.reading, weights.writing, weights.copying):
                if transfer is not None:
                    with contextlib.suppress(Exception):
                        transfer.wait()
            if weights.state is WeightState.ATTACHED and not weights.rests_on_device:
                self._device.detach(weights.region)
                self._drop_decoded(weights)
            weights.reading = weights.writing = None
