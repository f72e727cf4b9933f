"""Weights of this rank's shards while the thread of updates changes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.distributed.kept_shards import KeptShards
from infinity.errors import StorageError
from infinity.state.store import LocalStore
from infinity.state.undecided import UndecidedState
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import PageDigests
from infinity.storage.protocol import Priority, Transfer
from infinity.streaming.updates.record import UpdatedWeights
from infinity.streaming.updates.unit_update import UnitUpdate
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block, HostPool

_LABEL = "weights that are updated"
_NUM_BLOCKS = 2  # One shard's weights are read or written while those of another are updated.


@dataclass(eq=False, slots=True)
class _Place:
    """Memory for one shard's trainable weights: a block that is lent, or the shard's kept copy."""

    block: Block
    unit: int | None = None  # Whose weights are read ahead or checked out.
    digests: PageDigests | None = None  # Of weights that are checked out.
    transfer: Transfer = FINISHED  # A read for the unit; without one, a write.

    def drop_read(self) -> None:
        """Waits for a read, which may have failed: nobody needs its bytes."""
        with contextlib.suppress(StorageError):
            self.transfer.wait()
        self.unit, self.transfer = None, FINISHED


class RestingWeights(UpdatedWeights):
    """Weights of shards, for updates: where they rest, or on their way from and to a drive. They
    are changed in the copy that `kept` has of them, which saves the way from the drive, else in
    blocks. The training thread lends and takes back the blocks, the thread of updates uses them."""

    def __init__(
        self,
        local: LocalStore,
        undecided: UndecidedState,
        pool: HostPool,
        kept: KeptShards,
        shards: Iterable[Unit],
    ) -> None:
        self._local = local
        self._undecided = undecided
        self._pool = pool
        self._kept = kept
        self._blocks: list[_Place] = []
        self._copies: dict[int, _Place] = {}  # Kept ones that are read ahead or checked out.
        self._writes: list[Transfer] = []  # From kept copies.
        self._block_nbytes = max(
            (unit.trainable_nbytes for unit in shards if unit.state_numel and self.travels(unit)),
            default=0,
        )

    # -- Memory: training thread -------------------------------------------------------------------

    def lend(self) -> None:
        """Takes a block, or two if memory is free, unless they are there. Raises CapacityError."""
        if self._block_nbytes and not self._blocks:
            self._blocks.append(_Place(self._pool.require(self._block_nbytes, _LABEL)))
        while 0 < len(self._blocks) < _NUM_BLOCKS:
            block = self._pool.try_allocate(self._block_nbytes, _LABEL)
            if block is None:
                return
            self._blocks.append(_Place(block))

    def take_back(self) -> None:
        """Frees the blocks. No transfer is in flight."""
        while self._blocks:
            self._pool.free(self._blocks.pop().block)

    def travels(self, unit: Unit) -> bool:
        """Whether the unit's weights rest on a drive."""
        return self._local.host_view(unit, StateKind.PARAMETERS) is None

    # -- Updates: their thread ---------------------------------------------------------------------

    def read_ahead(self, update: UnitUpdate) -> None:
        """Starts to read the weights of the next update, unless they are kept, if a block is
        free."""
        unit = update.unit
        if update.overwrites_all or not self.travels(unit):
            return
        if self._kept.has(unit.index) or self._place_of(unit.index) is not None:
            return
        if self._kept_place(unit, read=True) is not None:
            return
        free = (place for place in self._blocks if place.unit is None and place.transfer.done())
        place = next(free, None)
        if place is not None:
            self._start_read(place, unit)

    def _start_read(self, place: _Place, unit: Unit) -> None:
        place.transfer.wait()  # Of a write, which may have failed.
        place.transfer = self._local.read(
            unit, StateKind.PARAMETERS, place.block,
            priority=Priority.STATE, nbytes=unit.trainable_nbytes,
        )  # fmt: skip
        place.unit = unit.index

    def _place_of(self, unit: int) -> _Place | None:
        in_blocks = (place for place in self._blocks if place.unit == unit)
        return self._copies.get(unit) or next(in_blocks, None)

    def _kept_place(self, unit: Unit, *, read: bool) -> _Place | None:
        """The kept copy, with `read` as soon as its transfer is over; None if there is none."""
        copy = self._kept.begin_update(unit.index)
        if copy is None:
            return None
        block, is_current = copy
        place = self._copies[unit.index] = _Place(block, unit.index)
        if read and not is_current:
            try:
                self._start_read(place, unit)
            except BaseException:
                self._end_copy(unit.index, None)
                raise
        return place

    def _end_copy(self, unit: int, write: Transfer | None) -> None:
        del self._copies[unit]
        self._kept.end_update(unit, write)

    @override
    def check_out(self, unit: int, *, read: bool, stays_on_device: bool = False) -> torch.Tensor:
        shard = self._local.units[unit]
        resting = self._local.host_view(shard, StateKind.PARAMETERS)
        if resting is not None:
            return resting
        place = self._place_of(unit) or self._kept_place(shard, read=read)
        if place is None:
            place = self._free_block()
            if read:
                self._start_read(place, shard)
            place.unit = unit
        try:
            place.transfer.wait()
        except StorageError:
            self.forget(unit)  # The next use reads them again.
            raise
        volume = self._local.volume
        assert volume is not None
        place.digests = volume.digests(place.block.address, shard.trainable_nbytes)
        return self._pool.tensor(place.block)[: shard.trainable_nbytes]

    def digests(self, unit: int) -> PageDigests | None:
        """Returns what takes checksums of the shard's weights, which are checked out."""
        place = self._place_of(unit)
        return None if place is None else place.digests

    def _free_block(self) -> _Place:
        """Returns a block without weights, or one that was read ahead for a later update; of
        several one whose transfer is over."""
        place = min(self._blocks, key=lambda at: (at.unit is not None, not at.transfer.done()))
        if place.unit is not None:
            place.drop_read()
        place.transfer.wait()
        place.transfer = FINISHED
        return place

    @override
    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        place = self._place_of(unit)
        if place is None:
            return
        write: Transfer | None = None
        try:
            if dirty_nbytes:
                write = self._local.write(
                    self._local.units[unit], StateKind.PARAMETERS, place.block,
                    nbytes=dirty_nbytes, digests=place.digests,
                    undecided=self._undecided.contents.get(unit),
                )  # fmt: skip
        finally:
            if unit in self._copies:
                self._end_copy(unit, write)
                self._writes += [] if write is None else [write]
            else:
                place.unit, place.digests, place.transfer = None, None, write or FINISHED
                self._kept.forget(unit)

    def forget(self, unit: int) -> None:
        """Drops what was read ahead of a unit."""
        place = self._place_of(unit)
        if place is not None:
            place.drop_read()
            if unit in self._copies:
                self._end_copy(unit, None)

    @property
    def is_written(self) -> bool:
        """Whether `finish_writes` would not wait."""
        return all(write.done() for write in self._writes) and all(
            place.transfer.done() for place in (*self._blocks, *self._copies.values())
        )

    def finish_writes(self) -> None:
        """Waits for all transfers. Raises StorageError if a write has failed."""
        for unit in [*self._copies, *(place.unit for place in self._blocks)]:
            if unit is not None:
                self.forget(unit)
        writes, self._writes = self._writes, []
        for write in (*writes, *(place.transfer for place in self._blocks)):
            write.wait()
