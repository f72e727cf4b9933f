"""The optimizer step, streamed: read a chunk of state, update it, write it back.

`optimizer.step()` only decides (`StepRecord`) and makes every unit it touches *pending*. A pending
unit is updated when it is next needed, right before its forward: its weights are on their way in
anyway, and the traffic of the optimizer overlaps with the compute of the units before it.

A part of the units is updated before the decision, in the backward, where that can be undone
(`early.py`): the drives then have their part of the traffic in both passes.

Chunks are read ahead in the order in which units are expected to be updated (`staging_ring.py`).
In the backward the next step's are: their state, without the gradients, which are still to come. In
the forward the state of units that the backward will update follows that of pending units.
`chunk_update.py` has the arithmetic.

Note [Pending units]
  Nobody sees the state of a pending unit: every way to its weights, moments or gradients goes
  through `bring_up_to_date` first. A unit is updated whole or not at all, but for a failure between
  its chunks, which is remembered as torn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack

from typing_extensions import override

from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.state.store import StateStore
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.protocol import Transfer
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.record import StepRecord, StepRunner, UpdatedWeights, UpdateSettings
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.turns import UpdateTurns
from infinity.streaming.updates.unit_update import ChunkUpdates, updates_of
from infinity.streaming.updates.worker import LooseWork, UpdateWorker
from infinity.streaming.weights.cache import WeightCache
from infinity.streaming.weights.eviction import ByNextUse
from infinity.tiers.host import HostPool
from infinity.tiers.spare import Giver


class Updater(StepRunner):
    """Applies step records to units. Called under the engine's lock."""

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        weight_cache: UpdatedWeights,
        gradients: GradientStore,
        counters: Counters,
        settings: UpdateSettings,
        in_order: ByNextUse,
    ) -> None:
        """`in_order`: an empty row, for pending units."""
        self._store, self._pool = store, pool
        self._weight_cache, self._gradients = weight_cache, gradients
        self._counters, self._settings = counters, settings
        undecided = UndecidedState(store, pool, self._leaves_home)
        self._ring = StagingRing(store, pool, counters, gradients, settings, undecided)
        chunks = ChunkUpdates(self._ring, weight_cache, counters, settings.on_device, undecided)
        self._turns = UpdateTurns(
            weight_cache, pool, gradients, chunks, counters, settings, in_order
        )
        self.chunk_nbytes = self._ring.chunk_nbytes
        # If no state moves, updates need not be told about gradients.
        self.follows_gradients = settings.in_backward or bool(self._ring.travelling)
        # Chunks that the next step will probably update, from the first gradient to the decision.
        self._next: Iterator[Chunk] | None = None
        # Chunks that the next backward will probably update, from the decision to its beginning.
        self._before_backward: Iterator[Chunk] | None = None
        self._worker: UpdateWorker | None = None  # Adds gradients to sums, and may update.
        turns = self._turns
        if not settings.rides_along:
            pool.add_giver(Giver.IDLE_RING, lambda _: not turns.pending and turns.reclaim())
        pool.add_giver(Giver.UPDATES, lambda _: turns.reclaim())

    @override
    def start_worker(
        self, lock: threading.RLock, begin_thread: Callable[[], None], resources: ExitStack
    ) -> None:
        self._worker = UpdateWorker(lock, self._turn, begin_thread)
        self.follows_gradients = True
        resources.callback(self._worker.close)

    # -- Pending updates -------------------------------------------------------------------------

    @override
    def defer(self, record: StepRecord) -> None:
        self._gradients.end_readers()
        if self._worker is not None:
            self._worker.refuse_failed()  # Before anything is decided.
        self._make_space_for_weights()
        kept, pending = self._turns.decide(record), self._turns.pending
        self._next, self._before_backward = None, None
        for unit in self._store.units:
            if unit.index in kept:
                continue
            # INV-9: a parameter without a gradient is in no record.
            update = updates_of(unit, record, self.chunk_nbytes)
            if update is not None:
                self._turns.make_pending(update)
        for unit in self._gradients.in_blocks.units():
            if unit.index not in pending:
                self._gradients.give_back(unit)
        self._ring.drop_reads(lambda chunk: chunk.unit.index not in pending)
        with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
            self._ring.bring_all_gradients()
        if self._turns.policy.is_on:
            self._before_backward = self._turns.expected_in_backward()

    def _make_space_for_weights(self) -> None:
        """Frees the memory of gradients that rest on NVMe, those that are needed last first, until
        weights have enough. What is left is not read for the updates. Raises StorageError."""
        spare = self._pool.spare
        while self._settings.overlaps and spare.beside_weights_nbytes < 0:
            if not self._gradients.reclaim():
                return

    @override
    def apply(self, record: StepRecord) -> None:
        self.defer(record)
        count = len(self._turns.pending)
        try:
            self.settle()
        except BaseException as error:
            if len(self._turns.pending) < count:
                self._turns.tear(error)
            elif self._turns.torn is None:
                self._turns.withdraw_pending()
            raise

    @override
    def is_pending(self, unit: int) -> bool:
        return unit in self._turns.pending

    @override
    def bring_up_to_date(self, unit: int, *, is_needed: bool = False) -> None:
        if self._settings.in_backward:
            self._turns.take_back(unit)
        if unit in self._turns.pending:
            self._gradients.end_readers()
        if unit in self._turns.pending:
            self._turns.refuse_torn()
            self._turns.apply(unit, is_needed=is_needed)

    @override
    def apply_pending(self) -> None:
        for unit in self._turns.soonest():
            self.bring_up_to_date(unit)

    @override
    def settle(self) -> None:
        self._turns.withdraw()
        if self._next is not None:
            self._next = iter(())
        self._before_backward = None
        self.apply_pending()
        self._ring.drop_reads()
        self.finish_writes()
        while self._ring.give_back_spare():
            pass

    @override
    def finish_writes(self) -> None:
        self._gradients.end_readers()
        self._ring.finish_writes()

    @override
    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # The updates are given up, and so is their error.
            self._gradients.end_readers()
        self._turns.withdraw_pending()
        self.finish_writes()
        self._ring.forget_arrays()

    # -- While passes run --------------------------------------------------------------------------

    def _turn(self) -> Sequence[Transfer] | LooseWork | None:
        """A turn of the worker, see `UpdateWorker`: first of additions to sums, which the
        step needs, then of updates."""
        if self._turns.is_applying or self._turns.torn is not None:
            return None
        added = self._gradients.leaving.add_next()
        if added is not None:
            return added
        if not self._turns.has_worker:
            return None
        self._gradients.end_readers()
        found = self._turns.turn()
        self._gradients.lend(found.end if isinstance(found, LooseWork) else None)
        return found

    @override
    def note_gradient(self, unit: int) -> None:
        self._turns.note_gradient(unit)
        overlaps = self._settings.overlaps
        if overlaps and self._ring.travelling and self._next is None:
            self._next, self._before_backward = self._turns.expected_of_next(), None
            self._counters.add("state_held_back_nbytes", self._ring.held_back_nbytes())
        if overlaps and (self._ring.travelling or self._settings.in_backward):
            self.advance()
        elif self._worker is not None and self._gradients.leaving.num_additions:
            self._worker.wake()

    @override
    def note_dropped(self, units: Collection[int]) -> None:
        if self._settings.in_backward:
            self._turns.note_dropped(units)

    @override
    def note_left(self, unit: int) -> bool:
        return self._settings.in_backward and self._turns.note_left(unit)

    @override
    def begin_early(self, unit: int, record: StepRecord) -> None:
        update = updates_of(self._store.units[unit], record, self.chunk_nbytes)
        self._turns.begin_early(unit, update)

    @override
    def advance(self) -> None:
        turns = self._turns
        if turns.is_applying or turns.torn is not None:
            return
        reads_ahead = turns.pending and self._settings.reads_ahead and self._ring.travelling
        if reads_ahead and self._ring.take(or_none=True):
            self._ring.start_more(turns.expected())
        if self._settings.in_backward or turns.has_worker:
            turns.advance()
        worker, leaving = self._worker, self._gradients.leaving
        if worker is not None and (turns.has_turn or leaving.num_additions):
            worker.wake()
        if self._before_backward is not None:
            self._read_ahead("forward", self._before_backward)
        if self._next is not None:
            self._read_ahead("backward", self._next)

    def _read_ahead(self, this_pass: str, chunks: Iterator[Chunk]) -> None:
        """Reads state for the next pass in this one, into free slots. Its gradients will come."""
        if self._ring.take(or_none=True):
            count = self._ring.start_more(chunks, with_gradients=False)
            self._counters.add(f"chunks_read_in_{this_pass}", count)

    @override
    def withdraw(self, unit: int) -> None:
        self._turns.take_back(unit)
        self._ring.drop_reads(lambda chunk: chunk.unit.index == unit)
        self.finish_writes()

    def _leaves_home(self, unit: Unit, kind: StateKind) -> bool:
        """See `UndecidedState`. The worker may have arrays of a pending unit."""
        if unit.index in self._turns.pending:
            return False
        self._ring.forget_arrays(unit)
        self._ring.drop_reads(lambda chunk: chunk.unit is unit)
        if kind is not StateKind.PARAMETERS:
            return True
        assert isinstance(self._weight_cache, WeightCache)
        return self._weight_cache.leave_home(unit.index)
