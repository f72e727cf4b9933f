"""The update of one unit, chunk by chunk: check its weights out, update chunks, check them in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, TensorSpec, Unit, chunk_unit
from infinity.storage.checksums import PageDigests
from infinity.streaming.updates.chunk_update import StagedChunk, update_chunk, written_ranges
from infinity.streaming.updates.record import StepRecord, UpdatedWeights
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.worker import LooseWork
from infinity.tiers.device import DeviceAdapter


@dataclass(eq=False, slots=True)
class UnitUpdate:
    """One unit's update by one record. `chunks` are in order and not empty."""

    unit: Unit
    record: StepRecord
    chunks: tuple[Chunk, ...]
    num_begun: int = 0
    num_done: int = 0
    weights: torch.Tensor | None = None  # While they are checked out: uint8 (weight_nbytes,).
    is_begun: bool = False  # Some state may have changed.
    # Of an early update: stands for the content that it reads, another one after a change.
    content: object = None

    @property
    def is_done(self) -> bool:
        """Whether every chunk is updated."""
        return self.num_done == len(self.chunks)

    @property
    def left(self) -> tuple[Chunk, ...]:
        """The chunks whose updates have not begun."""
        return self.chunks[self.num_begun :]

    @property
    def overwrites_all(self) -> bool:
        """With an fp32 master every weight is written and none is read, unless some are left
        alone."""
        is_made_of_master = self.unit.has_full_master
        return is_made_of_master and all(spec in self.record.settings for spec in self.unit.tensors)


def updates_of(unit: Unit, record: StepRecord, chunk_nbytes: int) -> UnitUpdate | None:
    """Returns the update of a unit by a record; None if the record has no parameter of it."""
    chunks = chunks_of(unit, record.settings, chunk_nbytes)
    return UnitUpdate(unit, record, chunks) if chunks else None


def chunks_of(unit: Unit, updated: Container[TensorSpec], chunk_nbytes: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a unit that have slices of `updated`, with these slices, in order."""
    found = []
    for chunk in chunk_unit(unit, chunk_nbytes) if unit.state_numel else ():
        slices = [part for part in chunk.slices if part.tensor in updated]
        if slices:
            found.append(Chunk(chunk.unit, chunk.start, chunk.stop, tuple(slices)))
    return tuple(found)


class ChunkUpdates:
    """Updates the next chunk of a unit, through the staging ring. Under the engine's lock.

    `on_device`: the device that computes updates; None: the host does. `undecided` has the updates
    whose new bytes go beside the old. `digests`: returns what takes checksums of a unit's weights
    that are checked out, and written once; None: nothing does.
    """

    def __init__(
        self,
        ring: StagingRing,
        weight_cache: UpdatedWeights,
        counters: Counters,
        on_device: DeviceAdapter | None,
        undecided: UndecidedState,
        digests: Callable[[int], PageDigests | None] | None = None,
    ) -> None:
        self._digests = digests
        self.ring, self.undecided = ring, undecided
        self._weight_cache = weight_cache
        self._counters = counters
        self._on_device = on_device

    def check_out(self, update: UnitUpdate) -> None:
        """Checks the unit's weights out, unless they are. Nobody may hold the unit."""
        if update.weights is not None:
            return
        start_ns = time.monotonic_ns()
        try:
            # Weights are made of a full master where it rests.
            is_master_elsewhere = update.unit.has_full_master and not self.ring.is_on_device(
                update.unit, StateKind.MASTER
            )
            update.weights = self._weight_cache.check_out(
                update.unit.index,
                read=not update.overwrites_all,
                stays_on_device=self._on_device is not None and not is_master_elsewhere,
            )
        finally:
            self._counters.add_time("weights_s", start_ns)

    def check_in(self, update: UnitUpdate, *, write_now: bool) -> None:
        """Ends `check_out`. Changed weights start on their way to where they rest, with
        `write_now`; else they are written when nobody holds the unit."""
        if update.weights is None:
            return
        update.weights = None
        self._weight_cache.check_in(
            update.unit.index,
            dirty_nbytes=update.unit.trainable_nbytes if update.is_begun else 0,
            is_valid=update.is_begun or not update.overwrites_all,
            write_now=write_now,
        )

    def drop(self, update: UnitUpdate) -> None:
        """Ends `check_out` of weights that are to be forgotten."""
        if update.weights is not None:
            update.weights = None
            self._weight_cache.check_in(update.unit.index, dirty_nbytes=0, is_valid=False)

    def run_next(self, update: UnitUpdate, following: Iterable[Chunk]) -> None:
        """Updates the next chunk, and waits for its state. The weights are checked out.
        `following`: chunks of other units, which are read next."""
        left = update.left
        staged = self.ring.due(left[0])
        try:
            self.ring.start_more(left[1:])
            with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
                self.ring.start_more(following)
            self.ring.await_reads(staged)
            self._update(update, staged)
        finally:
            self.ring.give_back(staged)

    def try_next(
        self, update: UnitUpdate, then: Callable[[BaseException | None], None]
    ) -> LooseWork | None:
        """As `run_next` where the state of the chunk was read ahead and is there; never waits for
        it. Returns the update of the chunk, which needs no lock, and its end, which calls `then`
        with what the update has raised; None if the state is not there."""
        chunk = update.left[0]
        if self.ring.travelling:
            staged = self.ring.started(chunk)
            if staged is None or not self.ring.is_there(staged):
                return None
            self.ring.bring_gradients(staged)
            if not self.ring.is_there(staged):
                return None
            self.ring.take_started(chunk)
        else:
            staged = self.ring.due(chunk)
        try:
            self.check_out(update)
            self.ring.await_reads(staged)  # Over, but they may have failed.
            compute = self._begin(update, staged)
        except BaseException:
            self.ring.give_back(staged)
            raise

        def end(error: BaseException | None) -> None:
            try:
                if error is None:
                    self.ring.write_back(staged)
                    update.num_done += 1
            except BaseException as failure:
                error = failure
            self.ring.give_back(staged)
            then(error)

        return LooseWork(compute, end)

    def _update(self, update: UnitUpdate, staged: StagedChunk) -> None:
        self._begin(update, staged)()
        self.ring.write_back(staged)
        update.num_done += 1

    def _begin(self, update: UnitUpdate, staged: StagedChunk) -> Callable[[], None]:
        """Returns the arithmetic of a chunk. Nobody else touches its arrays before it is over."""
        weights = update.weights
        assert weights is not None
        update.is_begun = True
        update.num_begun += 1
        of_weights = None if self._digests is None else self._digests(update.unit.index)
        if staged.slot is not None and self._on_device is None:
            self.ring.take_digests(staged, staged.slot)
        into = self.undecided.into(update.unit)

        def compute() -> None:
            if into:
                self._fill(update, weights)
            start_ns = time.monotonic_ns()
            try:
                with torch.no_grad():
                    update_chunk(staged, weights, update.record, self._on_device, of_weights, into)
            finally:
                self._counters.add_time("update_s", start_ns, f"update of {update.unit.name}")

        return compute

    def _fill(self, update: UnitUpdate, weights: torch.Tensor) -> None:
        """Copies what the update leaves as it is to where its new bytes go, once."""
        if not self.undecided.is_filled(update.unit):
            written = partial(written_ranges, update.chunks, update.record)
            self.undecided.fill(update.unit, written, weights)
