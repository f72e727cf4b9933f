"""Weights between their tier and the device: fetched before use, kept, evicted, changed.

`WeightCache` decides which unit moves, and when. `WeightSpace` chooses the units that leave for it.
Both let `WeightMoves` make the moves, the only writer of residency; `state.py` has the states.

Note [Changed weights]
  `check_out` hands bytes to the optimizer (or to a user who modifies them) and `check_in` starts
  the write to where they rest. Weights that rest on the host or on NVMe are changed in their host
  block, at its own address, or while its pages stand where the model reads them. Weights that rest
  on a device are changed in place by that device, or in a host copy where the device has memory of
  its own. A host copy has the parts that the caller names and no others: a rank that keeps all
  weights updates 1/N of them, and each byte of a copy passes the link.

The training thread, an autograd thread while the training thread waits for it, or the thread of
updates; the engine's lock orders them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.state.budgets import Budgets
from infinity.state.store import StateStore
from infinity.state.units import Unit
from infinity.storage.generations import UndecidedContent
from infinity.storage.protocol import Priority
from infinity.streaming.inputs.activations import InputMemory
from infinity.streaming.weights.access_order import AccessOrder
from infinity.streaming.weights.decoding import refuse_change
from infinity.streaming.weights.eviction import ByNextUse
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.read_ahead import ReadAhead
from infinity.streaming.weights.space import WeightSpace
from infinity.streaming.weights.state import WeightProvider, Weights, WeightState
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tiers.host import Block, HostPool


class WeightCache:
    """Fetches weights before use, keeps those that are used soonest, evicts the others.

    The only writer of uses and check-outs of `Weights`. `space`: makes space, also for others.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        budgets: Budgets,
        inputs: InputMemory,
        source: WeightProvider,
    ) -> None:
        self._source = source
        self._pool = pool
        self._device = device
        self._counters = counters
        # None for a device without streams, so that a backward does not ask at every node.
        self.current_stream = None if device.shares_host_memory else device.current_stream
        self._order = AccessOrder(source.feeders())
        self._moves = WeightMoves(store, pool, device, counters, source, self._order)
        self.weights = self._moves.weights
        # Units that rest where the device computes are there already: none is fetched ahead.
        is_all_there = device.shares_host_memory and all(
            weights.rests_on_host or weights.rests_on_device for weights in self.weights
        )
        window_nbytes = 0 if is_all_there else budgets.window_nbytes
        self.space = WeightSpace(self._moves, budgets)
        self._ahead = ReadAhead(self._moves, self.space, inputs, window_nbytes)
        self._moves.decoding.prepare(
            budgets.decoded_nbytes, has_second_memory=budgets.staged_nbytes > 0
        )

    # -- Uses ------------------------------------------------------------------------------------

    def begin_pass(self, kind: str, *, is_new: bool = True) -> None:
        """Records the start of a forward of the model; `kind` is "train" or "eval". If it is not
        new, it continues the last pass of its kind."""
        self._order.turn_to(kind)
        if is_new:
            self._order.begin()
        self._note_pass(is_training=kind == "train")

    def _note_pass(self, *, is_training: bool) -> None:
        self._source.note_pass(is_training=is_training)
        self._ahead.look_anew()

    def begin_backward(self) -> None:
        """Continues the training pass with its backward. An evaluation may have run in between."""
        self._order.turn_to("train")
        self._note_pass(is_training=True)

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
        self._note_pass(is_training=False)

    def prefetch_anew(self) -> None:
        """After a step that made weights outdated: fetches for the pass to come."""
        self._order.begin()
        self._note_pass(is_training=True)  # Probably; it is said when the pass begins.
        if self._ahead.is_on:
            self._ahead.fetch(Priority.FORWARD)
        self._note_pass(is_training=False)

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
        if is_of_pass and self._ahead.is_on:
            try:
                self._ahead.fetch(priority)
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

    def by_next_use(self, *, first: int = 0) -> ByNextUse:
        """Returns an empty row, for units that will be in the order of their next uses. `first`:
        the index there of unit 0 here."""
        return ByNextUse(self._order, first=first)

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
            self._restack(weights)
        is_there = weights.state is WeightState.ATTACHED
        if is_there:
            return
        is_absent = weights.state is WeightState.ABSENT
        feeder = self._moves.feeder_of(weights) if is_absent else None
        if feeder is not None:
            self._moves.begin_fetch(feeder, priority)
            self.space.fill(weights, feeder)
        self._moves.fetch(weights, priority)
        if weights.state is not WeightState.ATTACHED:
            assert not weights.awaits_update
            self.space.fill(weights)

    def _restack(self, weights: Weights) -> None:
        """Moves the block of an idle unit, which is about to be in use, to those in use: see
        `tiers/host.py`, Note [Tight budgets]. Raises StorageError if a write has failed."""
        if self.space.is_stacked(weights):
            return
        if weights.state is WeightState.ATTACHED:
            self._moves.detach(weights)
        if weights.block is None:
            return
        self._moves.finish_write(weights)
        weights.is_checked_out = True  # It stays while the others go.
        try:
            self._pool.restack(weights.block)
        finally:
            weights.is_checked_out = False

    # -- Changing weights --------------------------------------------------------------------------

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

    def write_to(self, unit: int, undecided: UndecidedContent | None) -> None:
        """Sets what writes of the unit go to while no step has decided its update. A read would
        get the old bytes, so nothing reads the unit ahead meanwhile. None: they count at once."""
        self.weights[unit].undecided = undecided
        if undecided is None:
            self._ahead.look_anew()

    def is_evictable(self, unit: int) -> bool:
        """Whether the unit is on the device and rests elsewhere."""
        weights = self.weights[unit]
        return weights.state is WeightState.ATTACHED and not weights.rests_on_device

    def keep_check(self, unit: int, check: Callable[[], None]) -> None:
        """Has `check` called once, before the unit's memory is used again or leaves the device."""
        self.weights[unit].kept_check = check

    def check_kept(self, unit: int) -> None:
        """Calls the `check` of `keep_check`, if it has not been called."""
        self.weights[unit].check_kept()

    def refuse_change(self, unit: int) -> None:
        """Raises UnsupportedError for weights that rest in files which are not written."""
        refuse_change(self.weights[unit].unit)

    def can_check_out(self, unit: int) -> bool:
        """Whether `check_out` would neither wait nor allocate: the unit is not in use, and its host
        block has the bytes of its tier."""
        weights = self.weights[unit]
        if weights.state is WeightState.READING and weights.reading and weights.reading.done():
            with contextlib.suppress(StorageError):  # The next use reads them again.
                self._moves.finish_read(weights)
        return weights.is_quiet

    def take_off_device(self, unit: int) -> None:
        """Puts an idle unit's host bytes back to their own address, for others to read them."""
        assert not self.weights[unit].use_count, self.weights[unit].unit.name
        self._moves.take_off_device(self.weights[unit])

    def leave_home(self, unit: int) -> bool:
        """Takes weights that rest on the host off the device: nobody has the address of the bytes.
        Returns whether that is so; it is not while the unit is in use."""
        weights = self.weights[unit]
        if weights.use_count or weights.is_checked_out:
            return False
        self._moves.take_off_device(weights)
        self._moves.finish_copy(weights)
        return True

    def discard(self, unit: int) -> None:
        """Drops bytes that are out of date; the next use fetches the unit. It must not be in
        use. No copy of bytes that stay where they rest is under way any more."""
        self._moves.discard(self.weights[unit])

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

    # -- Check-outs ------------------------------------------------------------------------------

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
        weights = self.weights[unit]
        assert not weights.use_count and not weights.is_checked_out, weights.unit.name
        nbytes = weights.unit.weight_nbytes
        if weights.unit.stored is not None:
            assert read, "stored weights are not overwritten"
            return self._check_out_decoded(weights)
        if weights.rests_on_device and (stays_on_device or self._device.shares_host_memory):
            weights.is_checked_out = True
            return weights.region.content
        if weights.rests_on_device:
            copied = [range(nbytes)] if parts is None else parts
            return self._copy_out(weights, copied, read=read)
        is_attached = weights.rests_on_host and weights.state is WeightState.ATTACHED
        if is_attached and self._source.may_change_attached and weights.region.has_block_memory:
            weights.check_kept()
            weights.is_checked_out = True
            return weights.region.content  # At the address where the model reads them.
        # A block is written as a head: what is beside the parts must be there.
        is_rest_kept = parts is not None and sum(map(len, parts)) < nbytes
        return self._check_out_block(weights, read=read or is_rest_kept)

    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        """Ends `check_out`; the first `dirty_nbytes`, of the parts, were changed and go to where
        they rest.

        With `write_now` false the write waits for `write_behind`, `finish_writes` or until the
        block is evicted; not on a device. Bytes that were to be overwritten and were not are not
        valid: they are dropped.
        """
        weights = self.weights[unit]
        assert weights.is_checked_out
        weights.is_checked_out = False
        if weights.unit.stored is not None:
            assert dirty_nbytes == 0, "stored weights are not changed"
            self._moves.decoding.drop(weights)
        elif weights.host_copy is not None:
            self._copy_in(weights, weights.host_copy, dirty_nbytes)
        elif weights.rests_on_device:
            if dirty_nbytes:  # The next use may be of another stream.
                weights.copying = self._device.issued()
        elif weights.rests_on_host:
            return
        elif not is_valid:
            self._moves.drop_block(weights)
        else:
            self._moves.mark_dirty(weights, dirty_nbytes)
            if write_now:
                self._moves.start_write(weights)

    def _check_out_decoded(self, weights: Weights) -> torch.Tensor:
        """Returns the weights made of stored bytes, in a block that `check_in` frees."""
        self._moves.unstage(weights)
        if weights.state is WeightState.ATTACHED:
            self._moves.detach(weights)
        self._moves.fetch(weights, Priority.STATE)
        self._moves.finish_copy(weights)
        assert weights.block is not None
        decoded = self._moves.decoding.decode(weights, weights.block)
        weights.is_checked_out = True
        return self._pool.tensor(decoded)

    def _check_out_block(self, weights: Weights, *, read: bool) -> torch.Tensor:
        """Returns the bytes of the host block, at their own address."""
        self._moves.settle(weights)
        if self._pool.is_tight:
            self._restack(weights)
        if weights.state is WeightState.ATTACHED:
            self._moves.detach(weights)
        self._moves.finish_write(weights)
        if weights.state is WeightState.READING:
            self._moves.finish_read(weights)
        block = self._moves.provide(weights, read=read)
        self._moves.finish_copy(weights)
        weights.is_checked_out = True
        return self._pool.tensor(block)

    # -- Host copies -------------------------------------------------------------------------------

    def _copy_out(self, weights: Weights, parts: Sequence[range], *, read: bool) -> torch.Tensor:
        """Returns the bytes of a host copy, in a block that `check_in` frees. Raises
        CapacityError."""
        block = self._moves.require(weights)
        weights.host_copy, weights.copied_parts = block, tuple(parts)
        weights.is_checked_out = True
        if read:
            try:
                self._copy(weights, block, parts, inward=False)
            except BaseException:
                self.check_in(weights.unit.index, dirty_nbytes=0, write_now=False)
                raise
        return self._pool.tensor(block)

    def _copy_in(self, weights: Weights, host_copy: Block, dirty_nbytes: int) -> None:
        """Copies the changed bytes to where the weights rest, and frees the host copy."""
        head = (range(part.start, min(part.stop, dirty_nbytes)) for part in weights.copied_parts)
        try:
            self._copy(weights, host_copy, [part for part in head if part], inward=True)
        finally:
            weights.host_copy = None
            self._pool.free(host_copy)

    def _copy(
        self, weights: Weights, host_copy: Block, parts: Sequence[range], *, inward: bool
    ) -> None:
        host, memory = self._pool.tensor(host_copy), weights.region.content
        source, target = (host, memory) if inward else (memory, host)
        copies: list[Copy] = []
        try:
            for part in parts:
                span = slice(part.start, part.stop)
                copies.append(self._device.copy(source[span], target[span]))
        finally:  # After an error, too, none uses the block any more.
            what = f"parameters of {weights.unit.name} are copied for a change"
            with self._counters.timed("copy_wait_s", what, copies):
                for copy in reversed(copies):
                    copy.wait()
