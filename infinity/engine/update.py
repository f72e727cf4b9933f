"""The optimizer step, streamed: read a chunk of state, update it, write it back.

Chunks go round a few *berths*, parts of one host block: while one is updated, the next is being
read and the last one written. Pieces that rest where the host can address them are updated in place
and need no berth.
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

_STATE_PIECES = (Piece.GRADIENTS, Piece.EXP_AVG, Piece.EXP_AVG_SQ, Piece.MASTER)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything one optimizer step decided: what each parameter's update needs to know."""

    settings: Mapping[TensorSpec, AdamWSettings]  # Only parameters that have a gradient.
    clip_factor: torch.Tensor | None  # fp32 scalar that gradients are multiplied by.


@dataclass(eq=False, slots=True)
class _Berth:
    """Room for one chunk of every piece that travels, and what is happening in it."""

    parts: dict[Piece, Block]
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Stage:
    """One chunk in memory: fp32 arrays of the chunk's length, by piece."""

    chunk: Chunk
    berth: _Berth | None
    arrays: dict[Piece, torch.Tensor]


class Updater:
    """Applies step records to units. Called under the engine's lock.

    `num_berths` chunks of `chunk_nbytes` per piece are in memory at once; at least one.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        executor: Executor,
        gradients: Gradients,
        counters: Counters,
        chunk_nbytes: int,
        num_berths: int,
    ) -> None:
        self._store = store
        self._pool = pool
        self._executor = executor
        self._gradients = gradients
        self._counters = counters
        self._chunk_nbytes = chunk_nbytes
        self._num_berths = num_berths
        self._travelling = [
            piece
            for piece in _STATE_PIECES
            if any(
                store.home(unit, piece) is not None and store.resting(unit, piece) is None
                for unit in store.units
            )
        ]
        self._block: Block | None = None
        self._berths: deque[_Berth] = deque()  # Free or being written, oldest first.
        self._is_applying = False
        self.is_torn = False  # The last step stopped after it had changed something.

    def apply(self, record: StepRecord) -> None:
        """Updates every parameter in the record. Weights and moments are on their way to where they
        rest when this returns; nobody may hold a unit meanwhile."""
        plan = list(self._chunks(record))
        self.settle()
        self._take_berths()
        stages: deque[_Stage] = deque()
        waiting = deque(plan)
        unit: Unit | None = None
        weights = torch.empty(0)
        self._is_applying = True
        try:
            for index, chunk in enumerate(plan):
                if chunk.unit is not unit:
                    done, unit = unit, None
                    self._check_in(done)
                    weights = self._check_out(chunk.unit, record)
                    unit = chunk.unit
                    self._fetch_next_weights(plan, index)
                while waiting and self._may_start(stages):
                    stages.append(self._start(waiting.popleft()))
                stage = stages.popleft()
                try:
                    self._await_reads(stage)
                    self.is_torn = True
                    self._compute(stage, weights, record)
                    self._write_back(stage)
                finally:
                    self._moor(stage)
            done, unit = unit, None
            self._check_in(done)
            self.is_torn = False
        finally:
            self._is_applying = False
            for stage in stages:
                self._moor(stage)
            if unit is not None:
                self._check_in(unit)
        if record.clip_factor is not None:
            for clipped in {chunk.unit: None for chunk in plan}:
                self._gradients.note_clipped(clipped, record.clip_factor)

    def _chunks(self, record: StepRecord) -> Iterator[Chunk]:
        for unit in self._store.units:
            for chunk in chunk_unit(unit, self._chunk_nbytes) if unit.state_numel else ():
                slices = tuple(s for s in chunk.slices if s.tensor in record.settings)
                if slices:
                    yield Chunk(chunk.unit, chunk.start, chunk.stop, slices)

    # -- Berths ------------------------------------------------------------------------------------

    def _take_berths(self) -> None:
        if self._block is not None or not self._travelling:
            return
        stride = self._chunk_nbytes
        per_berth = stride * len(self._travelling)
        self._block = self._pool.require(per_berth * self._num_berths, "chunks of the optimizer")
        for number in range(self._num_berths):
            parts = {
                piece: self._pool.carve(self._block, number * per_berth + place * stride, stride)
                for place, piece in enumerate(self._travelling)
            }
            self._berths.append(_Berth(parts))

    def _may_start(self, stages: deque[_Stage]) -> bool:
        """Always the chunk that is due; others only into a berth that is free already."""
        if not stages or not self._travelling:
            return not stages
        return bool(self._berths) and all(t.done() for t in self._berths[0].transfers)

    def _moor(self, stage: _Stage) -> None:
        """The berth goes to the end of the queue; what is in flight there is waited for later."""
        if stage.berth is not None:
            self._berths.append(stage.berth)

    def _wait(self, transfers: list[Transfer], counter: str) -> None:
        """All of them, even if one failed: the memory is not ours before. Raises the first
        error."""
        first: Exception | None = None
        with self._counters.timed(counter):
            for transfer in transfers:
                try:
                    transfer.wait()
                except Exception as error:
                    first = first or error
        transfers.clear()
        if first is not None:
            raise first

    def reclaim(self) -> bool:
        """Between steps, gives the berths' block back, waiting for its writes. False if there is
        none."""
        if self._is_applying or self._block is None:
            return False
        try:
            self.settle()
        finally:
            self._berths.clear()
            block, self._block = self._block, None
            self._pool.free(block)
        return True

    def settle(self) -> None:
        """Waits until every moment and master is where it rests."""
        self._wait([t for berth in self._berths for t in berth.transfers], "write_wait_s")
        for berth in self._berths:
            berth.transfers.clear()

    # -- Weights -----------------------------------------------------------------------------------

    def _check_out(self, unit: Unit, record: StepRecord) -> torch.Tensor:
        # With a master copy every weight is written and none is read, unless some are left alone.
        overwrites_all = unit.has_master and all(spec in record.settings for spec in unit.tensors)
        with self._counters.timed("weights_s"):
            return self._executor.check_out(unit.index, read=not overwrites_all)

    def _check_in(self, unit: Unit | None) -> None:
        if unit is not None:
            self._executor.check_in(unit.index, dirty_nbytes=unit.trainable_nbytes)

    def _fetch_next_weights(self, plan: Sequence[Chunk], index: int) -> None:
        unit = plan[index].unit
        rest = (plan[later].unit for later in range(index, len(plan)))
        following = next((each for each in rest if each is not unit), None)
        if following is not None and not following.has_master:
            self._executor.fetch_for_update(following.index)

    # -- Chunks ------------------------------------------------------------------------------------

    def _start(self, chunk: Chunk) -> _Stage:
        """Starts reading the pieces of a chunk that have to travel."""
        berth = None
        if self._travelling:
            berth = self._berths.popleft()
            self._wait(berth.transfers, "write_wait_s")
        stage = _Stage(chunk, berth, {})
        for piece in _STATE_PIECES:
            if self._store.home(chunk.unit, piece) is None:
                continue
            resting = self._store.resting(chunk.unit, piece)
            if resting is not None:
                part = resting[chunk.offset_nbytes : chunk.offset_nbytes + chunk.nbytes]
            else:
                assert berth is not None
                block = berth.parts[piece]
                part = self._pool.tensor(block)[: chunk.nbytes]
                berth.transfers.append(
                    self._store.read(
                        chunk.unit,
                        piece,
                        block,
                        priority=Priority.STATE,
                        offset_nbytes=chunk.offset_nbytes,
                        nbytes=chunk.nbytes,
                    )
                )
            stage.arrays[piece] = part.view(torch.float32)
        return stage

    def _await_reads(self, stage: _Stage) -> None:
        if stage.berth is not None:
            self._wait(stage.berth.transfers, "read_wait_s")

    def _compute(self, stage: _Stage, weights: torch.Tensor, record: StepRecord) -> None:
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
        chunk = stage.chunk
        for piece in (Piece.EXP_AVG, Piece.EXP_AVG_SQ, Piece.MASTER):
            if piece not in stage.arrays or self._store.resting(chunk.unit, piece) is not None:
                continue
            assert stage.berth is not None
            stage.berth.transfers.append(
                self._store.write(
                    chunk.unit,
                    piece,
                    stage.berth.parts[piece],
                    offset_nbytes=chunk.offset_nbytes,
                    nbytes=chunk.nbytes,
                )
            )


def _weight_slice(weights: torch.Tensor, part: Slice) -> torch.Tensor:
    """Elements of one tensor in the unit's weight bytes, in the tensor's own dtype."""
    dtype = part.tensor.facts.dtype
    start = part.tensor.weight_offset_nbytes + part.start * dtype.itemsize
    stop = part.tensor.weight_offset_nbytes + part.stop * dtype.itemsize
    return weights[start:stop].view(dtype)
