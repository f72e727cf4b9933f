"""Weights that are checked out: bytes that the optimizer, or a user who modifies them, may change.

Weights that rest on the host or on NVMe are changed in their host block, at its own address, or
while its pages stand where the model reads them. Weights that rest on a
device are changed in place by that device, or in a host copy where the device has memory of its
own. A host copy has the parts that the caller names and no others: a rank that keeps all weights
updates 1/N of them, and each byte of a copy passes the link.

Training thread, or the thread of updates; the engine's lock orders them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.observe import Counters
from infinity.state.store import DeviceLocation, StateStore
from infinity.state.units import StateKind
from infinity.storage.protocol import Priority
from infinity.streaming.weights.evictor import WeightEvictor
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.state import HostCopy, Weights, WeightState, check_kept
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool


class CheckOuts:
    """The only writer of check-outs (`Weights.is_checked_out`, `host_copy`). `moves` moves the
    host blocks. `stays_attached`: weights that rest on the host are changed where the model reads
    them, if that is their block's memory. Other ranks read weights at the block's own address."""

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        moves: WeightMoves,
        evictor: WeightEvictor,
        *,
        stays_attached: bool,
    ) -> None:
        self._stays_attached = stays_attached
        self._attached: dict[int, torch.Tensor] = {}  # By unit: the bytes of its region.
        self._store = store
        self._pool = pool
        self._device = device
        self._counters = counters
        self._moves = moves
        self._evictor = evictor

    def check_out(
        self,
        weights: Weights,
        *,
        read: bool,
        stays_on_device: bool,
        parts: Sequence[range] | None,
    ) -> torch.Tensor:
        """See `WeightCache.check_out`."""
        assert not weights.use_count and not weights.is_checked_out, weights.unit.name
        nbytes = weights.unit.weight_nbytes
        if weights.unit.stored is not None:
            assert read, "stored weights are not overwritten"
            return self._check_out_decoded(weights)
        if weights.rests_on_device and (stays_on_device or self._device.shares_host_memory):
            weights.is_checked_out = True
            return self._memory_of(weights)
        if weights.rests_on_device:
            copied = [range(nbytes)] if parts is None else parts
            return self._copy_out(weights, copied, read=read)
        is_attached = weights.rests_on_host and weights.state is WeightState.ATTACHED
        if is_attached and self._stays_attached and weights.region.has_block_memory:
            return self._check_out_attached(weights)
        # A block is written as a head: what is beside the parts must be there.
        is_rest_kept = parts is not None and sum(map(len, parts)) < nbytes
        return self._check_out_block(weights, read=read or is_rest_kept)

    def check_in(
        self, weights: Weights, *, dirty_nbytes: int, write_now: bool, is_valid: bool
    ) -> None:
        """See `WeightCache.check_in`."""
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
            self._moves.drop_invalid(weights)
        else:
            self._moves.mark_dirty(weights, dirty_nbytes)
            if write_now:
                self._moves.start_write(weights)

    def restack(self, weights: Weights) -> None:
        """Moves the block of an idle unit, which is about to be in use, to those in use: see
        Note [Tight budgets]. Raises StorageError if a write has failed."""
        if self._evictor.is_stacked(weights):
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
            self.restack(weights)
        if weights.state is WeightState.ATTACHED:
            self._moves.detach(weights)
        self._moves.finish_write(weights)
        if weights.state is WeightState.READING:
            self._moves.finish_read(weights)
        block = self._moves.provide(weights, read=read)
        self._moves.finish_copy(weights)
        weights.is_checked_out = True
        return self._pool.tensor(block)

    def _check_out_attached(self, weights: Weights) -> torch.Tensor:
        """Returns the bytes of the region, at the address where the model reads them."""
        check_kept(weights)
        weights.is_checked_out = True
        index, nbytes = weights.unit.index, weights.unit.weight_nbytes
        if index not in self._attached:
            with torch.inference_mode(False):  # Else only inference could write to it.
                self._attached[index] = weights.region.tensor(0, (nbytes,), (1,), torch.uint8)
        return self._attached[index]

    # -- Host copies -------------------------------------------------------------------------------

    def _memory_of(self, weights: Weights) -> torch.Tensor:
        location = self._store.location(weights.unit, StateKind.PARAMETERS)
        assert isinstance(location, DeviceLocation)
        return location.memory

    def _copy_out(self, weights: Weights, parts: Sequence[range], *, read: bool) -> torch.Tensor:
        """Returns the bytes of a host copy, in a block that `check_in` frees. Raises
        CapacityError."""
        block = self._moves.require(weights)
        weights.host_copy, weights.is_checked_out = HostCopy(block, tuple(parts)), True
        if read:
            try:
                self._copy(weights, weights.host_copy, parts, inward=False)
            except BaseException:
                self.check_in(weights, dirty_nbytes=0, write_now=False, is_valid=False)
                raise
        return self._pool.tensor(block)

    def _copy_in(self, weights: Weights, host_copy: HostCopy, dirty_nbytes: int) -> None:
        """Copies the changed bytes to where the weights rest, and frees the host copy."""
        head = (range(part.start, min(part.stop, dirty_nbytes)) for part in host_copy.parts)
        try:
            self._copy(weights, host_copy, [part for part in head if part], inward=True)
        finally:
            weights.host_copy = None
            self._pool.free(host_copy.block)

    def _copy(
        self, weights: Weights, host_copy: HostCopy, parts: Sequence[range], *, inward: bool
    ) -> None:
        host, memory = self._pool.tensor(host_copy.block), self._memory_of(weights)
        source, target = (host, memory) if inward else (memory, host)
        copies = [
            self._device.copy(source[part.start : part.stop], target[part.start : part.stop])
            for part in parts
        ]
        what = f"parameters of {weights.unit.name} are copied for a change"
        with self._counters.timed("copy_wait_s", what, copies):
            for copy in reversed(copies):  # After an error, too, none uses the block any more.
                copy.wait()
