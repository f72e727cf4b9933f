"""The optimizer step, streamed: read a chunk of state, update it, write it back.

Three chunks are in memory at once: one being read, one being updated, one being written. Pieces that
rest where the host can address them are updated in place and move nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from infinity.engine.gradients import Gradients
from infinity.observe import Counters
from infinity.ops.adamw import AdamWSettings, adamw_
from infinity.schedule.executor import Executor
from infinity.state.store import StateStore, Transfer
from infinity.state.units import Chunk, Piece, Slice, TensorSpec, Unit, chunk_unit
from infinity.storage.engine import Priority
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_READ_AHEAD_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything one optimizer step decided: what each parameter's update needs to know."""

    settings: Mapping[TensorSpec, AdamWSettings]  # Only parameters that have a gradient.
    clip_factor: torch.Tensor | None  # fp32 scalar that gradients are multiplied by.


@dataclass(eq=False, slots=True)
class _Stage:
    """One chunk in memory."""

    chunk: Chunk
    arrays: dict[Piece, torch.Tensor] = field(default_factory=dict)  # fp32 (chunk length,)
    blocks: dict[Piece, Block] = field(default_factory=dict)
    reads: list[Transfer] = field(default_factory=list)


class Updater:
    """Applies step records to units. Called under the engine's lock."""

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        executor: Executor,
        gradients: Gradients,
        counters: Counters,
        chunk_nbytes: int,
    ) -> None:
        self._store = store
        self._pool = pool
        self._executor = executor
        self._gradients = gradients
        self._counters = counters
        self._chunk_nbytes = chunk_nbytes
        self._writes: deque[tuple[Transfer, Block]] = deque()
        self._plan: list[Chunk] = []
        self._next = 0  # The chunk of the plan that is started next.
        self._stages: deque[_Stage] = deque()

    def apply(self, record: StepRecord) -> None:
        """Updates every parameter in the record. Weights and moments are on their way to where they
        rest when this returns; nobody may hold a unit meanwhile."""
        self._plan = list(self._chunks(record))
        self._next = 0
        unit: Unit | None = None
        weights = torch.empty(0)
        try:
            for index, chunk in enumerate(self._plan):
                if chunk.unit is not unit:
                    self._check_in(unit)
                    unit = None
                    weights = self._check_out(chunk.unit, record)
                    unit = chunk.unit
                    self._fetch_next_weights(index)
                self._read_ahead()
                self._compute(self._stages[0], weights, record)
                self._write_back(self._stages.popleft())
        finally:
            self._check_in(unit)
            while self._stages:
                self._abandon(self._stages.pop())
        if record.clip_factor is not None:
            for clipped in {chunk.unit: None for chunk in self._plan}:
                self._gradients.note_clipped(clipped, record.clip_factor)

    def _read_ahead(self) -> None:
        """At least the next chunk is in memory or on its way; more of them while there is room."""
        while self._next < len(self._plan) and len(self._stages) <= _READ_AHEAD_CHUNKS:
            stage = self._start(self._plan[self._next], must=not self._stages)
            if stage is None:
                return
            self._stages.append(stage)
            self._next += 1

    def _chunks(self, record: StepRecord) -> Iterator[Chunk]:
        for unit in self._store.units:
            for chunk in chunk_unit(unit, self._chunk_nbytes) if unit.state_numel else ():
                slices = tuple(s for s in chunk.slices if s.tensor in record.settings)
                if slices:
                    yield Chunk(chunk.unit, chunk.start, chunk.stop, slices)

    # -- Weights ------------------------------------------------------------------------------------

    def _check_out(self, unit: Unit, record: StepRecord) -> torch.Tensor:
        # With a master copy every weight is written and none is read, unless some are left alone.
        overwrites_all = unit.has_master and all(
            spec in record.settings for spec in unit.tensors
        )
        with self._counters.timed("weights_s"):
            return self._executor.check_out(unit.index, read=not overwrites_all)

    def _check_in(self, unit: Unit | None) -> None:
        if unit is not None:
            self._executor.check_in(unit.index, dirty_nbytes=unit.trainable_nbytes)

    def _fetch_next_weights(self, index: int) -> None:
        unit = self._plan[index].unit
        rest = (self._plan[later].unit for later in range(index, len(self._plan)))
        following = next((each for each in rest if each is not unit), None)
        if following is not None and not following.has_master:
            self._executor.fetch_for_update(following.index)

    # -- Chunks -------------------------------------------------------------------------------------

    def _start(self, chunk: Chunk, *, must: bool) -> _Stage | None:
        """Takes blocks for the pieces that have to travel and starts reading them.

        With `must` false, None when there is no room right now.
        """
        stage = _Stage(chunk)
        for piece in (Piece.GRADIENTS, Piece.EXP_AVG, Piece.EXP_AVG_SQ, Piece.MASTER):
            if self._store.home(chunk.unit, piece) is None:
                continue
            resting = self._store.resting(chunk.unit, piece)
            if resting is not None:
                part = resting[chunk.offset_nbytes : chunk.offset_nbytes + chunk.nbytes]
                stage.arrays[piece] = part.view(torch.float32)
                continue
            label = f"{piece.value} of {chunk.unit.name}"
            allocate = self._pool.require if must else self._pool.try_allocate
            block = allocate(chunk.nbytes, label)
            if block is None:
                self._abandon(stage)
                return None
            stage.blocks[piece] = block
            stage.arrays[piece] = self._pool.tensor(block).view(torch.float32)
        for piece, block in stage.blocks.items():
            stage.reads.append(
                self._store.read(
                    chunk.unit,
                    piece,
                    block,
                    priority=Priority.STATE,
                    offset_nbytes=chunk.offset_nbytes,
                    nbytes=chunk.nbytes,
                )
            )
        return stage

    def _compute(self, stage: _Stage, weights: torch.Tensor, record: StepRecord) -> None:
        with self._counters.timed("read_wait_s"):
            for read in stage.reads:
                read.wait()
        with self._counters.timed("update_s"), torch.no_grad():
            groups: dict[AdamWSettings, list[Slice]] = {}
            for part in stage.chunk.slices:
                groups.setdefault(record.settings[part.tensor], []).append(part)
            for settings, slices in groups.items():
                self._step_group(stage, weights, settings, slices, record.clip_factor)

    def _step_group(
        self,
        stage: _Stage,
        weights: torch.Tensor,
        settings: AdamWSettings,
        slices: Sequence[Slice],
        clip_factor: torch.Tensor | None,
    ) -> None:
        def parts(piece: Piece) -> list[torch.Tensor]:
            array, origin = stage.arrays[piece], stage.chunk.start
            return [
                array[s.state_start - origin : s.state_start - origin + s.stop - s.start]
                for s in slices
            ]

        narrow = [_weight_slice(weights, part) for part in slices]
        masters = parts(Piece.MASTER) if stage.chunk.unit.has_master else narrow
        gradients = parts(Piece.GRADIENTS)
        if clip_factor is not None:
            for gradient in gradients:
                gradient.mul_(clip_factor)
        adamw_(masters, gradients, parts(Piece.EXP_AVG), parts(Piece.EXP_AVG_SQ), settings)
        if masters is not narrow:
            for weight, master in zip(narrow, masters, strict=True):
                weight.copy_(master)

    def _write_back(self, stage: _Stage) -> None:
        for piece, block in stage.blocks.items():
            if piece is Piece.GRADIENTS:
                self._pool.free(block)
                continue
            transfer = self._store.write(
                stage.chunk.unit,
                piece,
                block,
                offset_nbytes=stage.chunk.offset_nbytes,
                nbytes=stage.chunk.nbytes,
            )
            self._writes.append((transfer, block))
        while self._writes and self._writes[0][0].done():
            self.reclaim()

    def _abandon(self, stage: _Stage) -> None:
        for read in stage.reads:
            try:
                read.wait()
            except Exception:  # noqa: BLE001 - another error is on its way to the caller.
                pass
        for block in stage.blocks.values():
            self._pool.free(block)

    def reclaim(self) -> bool:
        """Frees the block of the oldest write, waiting for it, or else gives up what was read
        furthest ahead. False when nothing is left."""
        if not self._writes:
            if not self._stages:
                return False
            self._abandon(self._stages.pop())
            self._next -= 1
            return True
        transfer, block = self._writes.popleft()
        try:
            with self._counters.timed("write_wait_s"):
                transfer.wait()
        finally:
            self._pool.free(block)
        return True

    def settle(self) -> None:
        """Waits until every moment and master is where it rests."""
        while self._writes:
            self.reclaim()


def _weight_slice(weights: torch.Tensor, part: Slice) -> torch.Tensor:
    """Elements of one tensor in the unit's weight bytes, in the tensor's own dtype."""
    dtype = part.tensor.facts.dtype
    start = part.tensor.weight_offset_nbytes + part.start * dtype.itemsize
    stop = part.tensor.weight_offset_nbytes + part.stop * dtype.itemsize
    return weights[start:stop].view(dtype)
