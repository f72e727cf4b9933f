"""Access to the state of units in parts that fit the host budget, for reading and writing
checkpoints.

`Engine.at_rest` provides a StateAccess. It has flushed all state and holds the engine's lock, so
every location is up to date and nothing else moves state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from infinity.distributed.store import DistributedStore
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.ops.dynamic_8bit import State8Bit, decode
from infinity.state.moments_8bit import states_within
from infinity.state.partition import Partition
from infinity.state.store import StateStore, await_end
from infinity.state.units import (
    STATE_ITEM_NBYTES,
    StateKind,
    TensorSpec,
    Unit,
    chunk_unit,
    weight_of,
)
from infinity.storage.closing import Closing
from infinity.storage.protocol import Priority, Transfer
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.weights.cache import WeightCache
from infinity.tiers.host import HostPool


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, start + values.numel()) of one tensor of one state kind, in memory order.

    `values` is flat, on the host, in the dtype of the state kind. Its memory is valid until the
    next part is requested. If `values` are codes of eight bits, `scales` are the fp32 scales of
    their blocks (the last block may be short), and `start` is a multiple of BLOCK_NUMEL.
    """

    spec: TensorSpec
    start: int
    values: torch.Tensor
    scales: torch.Tensor | None = None

    def wide(self, kind: StateKind) -> torch.Tensor:
        """Returns the values of a moment in fp32."""
        codes, scales = self.values, self.scales
        return codes if scales is None else decode(State8Bit(codes, scales), kind.value)


@dataclass(frozen=True, slots=True)
class StateAccess:
    """Reads and writes state at rest. Valid inside `Engine.at_rest`."""

    store: StateStore
    pool: HostPool
    weight_cache: WeightCache
    gradients: GradientSink
    chunk_nbytes: int
    partition: Partition | None = None  # None unless ranks share the state.
    chosen: Collection[int] | None = None  # Full units; None: all.

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with state on this rank."""
        return tuple(filter(self.is_chosen, self.store.units))

    @property
    def full_units(self) -> tuple[Unit, ...]:
        """The units of the model, whichever rank keeps their state."""
        units = self.store.units if self.partition is None else self.partition.full_units
        return tuple(filter(self.is_chosen, units))

    def is_chosen(self, unit: Unit) -> bool:
        """Whether the state of a unit, or of the unit that it is a shard of, is accessed."""
        divided = self.partition
        # The index of a shard is as far behind that of its unit as there are full units.
        number = unit.index if divided is None else unit.index % len(divided.full_units)
        return self.chosen is None or number in self.chosen

    def is_kept(self, unit: Unit, kind: StateKind) -> bool:
        """Whether this rank, or all ranks together, keep this state kind of one of `full_units`."""
        if self.partition is None:
            return self.has_kind(unit, kind)
        return unit.state_numel > 0 and unit.dtype(kind) is not None

    def has_kind(self, unit: Unit, kind: StateKind) -> bool:
        """Whether the unit has state of this kind on any tier."""
        return self.store.location(unit, kind) is not None

    def parts(
        self, unit: Unit, kind: StateKind, *, keep: bool = False, only: TensorSpec | None = None
    ) -> Iterator[Part]:
        """Yields every element of a state kind once, tensor by tensor in memory order. `only`: no
        more than the part of this tensor need be read.

        With `keep`, nothing is read: the caller fills the `values` of every part, and the parts are
        written to the location of the state. The state of a full unit that is sharded is read from
        all ranks, which must not change it meanwhile. For gradients see `gradient`.
        """
        assert kind is not StateKind.GRADIENTS
        assert not (keep and only), "a chunk is written whole"
        if kind is StateKind.PARAMETERS:
            return self._weights(unit, keep=keep)
        if self.partition is not None and unit.index < len(self.partition.full_units):
            assert not keep, "each rank writes its own shard"
            return self._from_all_ranks(self.partition, unit, kind)
        return self._state(unit, kind, keep, only)

    def pages(
        self, unit: Unit, kind: StateKind, start_nbytes: int, stop_nbytes: int
    ) -> Iterator[torch.Tensor]:
        """Yields whole pages of a state kind as it rests: uint8, on the host, in parts that are
        valid until the next part is requested."""
        if kind is StateKind.PARAMETERS:
            weights = self.weight_cache.check_out(unit.index, read=True)
            try:
                yield weights[start_nbytes:stop_nbytes]
            finally:
                self.weight_cache.check_in(unit.index, dirty_nbytes=0)
            return
        host_view = self.store.host_view(unit, kind)
        if host_view is not None:
            yield host_view[start_nbytes:stop_nbytes]
            return
        nbytes = min(self.chunk_nbytes, stop_nbytes - start_nbytes)
        with _LentBlock(self.store, self.pool, nbytes, kind.value) as lent:
            for start in range(start_nbytes, stop_nbytes, lent.block.nbytes):
                nbytes = min(lent.block.nbytes, stop_nbytes - start)
                lent.read(unit, kind, start, nbytes)
                yield self.pool.tensor(lent.block)[:nbytes]

    def _weights(self, unit: Unit, *, keep: bool) -> Iterator[Part]:
        """Reads through the weight cache, because a forward may have left the weights in host or
        device memory."""
        if keep:
            self.weight_cache.refuse_change(unit.index)
        weights = self.weight_cache.check_out(unit.index, read=not keep)
        try:
            for spec in unit.tensors:
                yield Part(spec, 0, weight_of(weights, spec))
        finally:
            self.weight_cache.check_in(unit.index, dirty_nbytes=unit.weight_nbytes if keep else 0)

    def _state(
        self, unit: Unit, kind: StateKind, keep: bool, only: TensorSpec | None
    ) -> Iterator[Part]:
        dtype = unit.dtype(kind)
        if dtype is None or not unit.state_numel:
            return
        host_view = self.store.host_view(unit, kind)
        if host_view is not None:
            for spec in unit.trainable() if only is None else (only,):
                start, stop = spec.state_offset, spec.state_offset + spec.numel
                yield from _parts(unit, kind, host_view, unit.state_numel, spec, start, stop)
            return
        nbytes = min(self.chunk_nbytes, unit.state_numel * STATE_ITEM_NBYTES)
        with _LentBlock(self.store, self.pool, nbytes, f"{kind.value} of {unit.name}") as lent:
            for chunk in chunk_unit(unit, self.chunk_nbytes):
                slices = [part for part in chunk.slices if only in (None, part.tensor)]
                if only is not None and not slices:
                    continue
                offset_nbytes, nbytes = chunk.offset_nbytes(kind), chunk.nbytes(kind)
                if keep:
                    self.pool.tensor(lent.block).zero_()  # Clears the padding between tensors.
                else:
                    lent.read(unit, kind, offset_nbytes, nbytes)
                memory = self.pool.tensor(lent.block)[:nbytes]
                numel = chunk.stop - chunk.start
                for part in slices:
                    start = part.state_start - chunk.start
                    stop = start + part.stop - part.start
                    for inner in _parts(unit, kind, memory, numel, part.tensor, start, stop):
                        yield replace(inner, start=part.start + inner.start)
                if keep:
                    lent.write(unit, kind, offset_nbytes, nbytes)

    def _from_all_ranks(self, divided: Partition, unit: Unit, kind: StateKind) -> Iterator[Part]:
        """Yields the shards rank by rank. They take memory beside the host budget."""
        assert isinstance(self.store, DistributedStore)
        for shard in sorted(divided.shards[unit.index], key=lambda shard: shard.start):
            memory = torch.empty(shard.unit.nbytes(kind), dtype=torch.uint8, device="cpu")
            if not memory.numel():
                continue
            self.store.get_state(shard, kind, memory).wait()
            for share in shard.shares:
                part = share.part
                start, stop = part.state_offset, part.state_offset + part.numel
                numel = shard.unit.state_numel
                for inner in _parts(shard.unit, kind, memory, numel, part, start, stop):
                    yield replace(inner, spec=share.full, start=share.start + inner.start)

    def has_gradient(self, spec: TensorSpec) -> bool:
        """Whether this step has a gradient of the tensor."""
        return self.gradients.has(spec)

    def gradient(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """Returns a copy of the gradient summed so far: fp32, the parameter's shape, on the
        host."""
        return self.gradients.read(unit, spec)

    def put_gradient(
        self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor, device: torch.device
    ) -> None:
        """Replaces the sum so far with `gradient` (fp32, the parameter's shape)."""
        self.gradients.forget(spec)
        self.gradients.add(unit, spec, gradient.to(device))
        self.gradients.settle()

    def forget_gradients(self) -> None:
        """Drops the gradients of all units."""
        for unit in self.units:
            for spec in unit.trainable():
                self.gradients.forget(spec)


class _LentBlock(Closing):
    """A block of the pool for one transfer at a time, freed at the end of a `with` block.

    INV-2: where Ctrl-C ends the wait for a transfer, the block is freed behind that transfer.
    """

    def __init__(self, store: StateStore, pool: HostPool, nbytes: int, label: str) -> None:
        self.block = pool.require(nbytes, label)
        self._store = store
        self._pool = pool
        self._transfer: Transfer | None = None

    def read(self, unit: Unit, kind: StateKind, offset_nbytes: int, nbytes: int) -> None:
        """Reads a range of state into the start of the block."""
        with UNINTERRUPTED:  # No transfer stays unknown.
            self._transfer = self._store.read(
                unit, kind, self.block, priority=Priority.STATE,
                offset_nbytes=offset_nbytes, nbytes=nbytes,
            )  # fmt: skip
        self._transfer.wait()

    def write(self, unit: Unit, kind: StateKind, offset_nbytes: int, nbytes: int) -> None:
        """Writes the start of the block to a range of state."""
        with UNINTERRUPTED:
            self._transfer = self._store.write(
                unit, kind, self.block, offset_nbytes=offset_nbytes, nbytes=nbytes
            )
        self._transfer.wait()

    @override
    def close(self) -> None:
        with UNINTERRUPTED:
            await_end(self._transfer)
            self._pool.free(self.block)


def _parts(
    unit: Unit,
    kind: StateKind,
    memory: torch.Tensor,
    numel: int,
    spec: TensorSpec,
    start: int,
    stop: int,
) -> Iterator[Part]:
    """Yields the elements [start, stop) of the `numel` elements in `memory` (uint8). The starts of
    the parts count from the first element in `memory`."""
    if unit.is_8bit(kind):
        for first, state in states_within(memory, numel, start, stop):
            yield Part(spec, first - start, state.codes, state.scales)
        return
    dtype = unit.dtype(kind)
    assert dtype is not None
    yield Part(spec, 0, memory.view(dtype)[start:stop])
