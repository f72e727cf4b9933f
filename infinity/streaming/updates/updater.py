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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from typing_extensions import override

from infinity.errors import InfinityError, StorageError
from infinity.observe import Counters
from infinity.state.store import DeviceLocation, LocalStore, StateStore
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.early_turns import EarlyTurns
from infinity.streaming.updates.pending_beside import PendingBeside
from infinity.streaming.updates.record import (
    StepRecord,
    StepRunner,
    UpdatedWeights,
    UpdateSettings,
)
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import (
    CHUNKS_AT_REST,
    ChunkUpdates,
    UnitUpdate,
    updates_of,
)
from infinity.streaming.updates.worker import LooseWork, UpdateWorker, Waitable
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
        self._store = store
        self._pool = pool
        self._weight_cache = weight_cache
        self._gradients = gradients
        self._reads_ahead = settings.reads_ahead
        self._is_on_host = settings.on_device is None
        self._counters = counters
        undecided: UndecidedState | None = None
        if settings.in_backward and settings.reads_ahead:
            assert isinstance(store, LocalStore)
            undecided = UndecidedState(store, pool, self._leaves_home)
        self._ring = StagingRing(
            store, pool, counters, gradients,
            chunk_nbytes=settings.chunk_nbytes, num_slots=settings.num_staging_slots,
            grows=settings.rides_along,
            is_for_device=not self._is_on_host, has_fixed_arrays=isinstance(store, LocalStore),
            undecided=None if undecided is None else undecided.contents,
        )  # fmt: skip
        self.chunk_nbytes = settings.chunk_nbytes * (1 if self._ring.travels else CHUNKS_AT_REST)
        self._rides_along = settings.rides_along and settings.reads_ahead
        # The streams that copy it are known to the thread that trains.
        self._has_state_on_device = any(
            kind is not StateKind.PARAMETERS and isinstance(location, DeviceLocation)
            for (_, kind), location in store.placed().items()
        )
        self._chunks = ChunkUpdates(
            self._ring, weight_cache, counters, settings.on_device, undecided
        )
        self._early: EarlyTurns | None = None
        if undecided is not None:
            assert isinstance(store, LocalStore) and isinstance(weight_cache, WeightCache)
            self._early = EarlyTurns(
                weight_cache, gradients, undecided, self._ring, self._chunks, counters,
                chunk_nbytes=self.chunk_nbytes, settings=settings,
            )  # fmt: skip
        # Where no state travels, gradients change nothing for updates.
        self.follows_gradients = self._early is not None or self._ring.travels
        self._pending: dict[int, UnitUpdate] = {}
        # Chunks of the units that were updated since the decision, in this order.
        self._updated: dict[int, tuple[Chunk, ...]] = {}
        # Chunks that the next step will probably update, from the first gradient to the decision.
        self._next: Iterator[Chunk] | None = None
        # Chunks that the next backward will probably update, from the decision to its beginning.
        self._before_backward: Iterator[Chunk] | None = None
        self._is_applying = False
        self._worker: UpdateWorker | None = None  # Adds gradients to sums.
        self._updates_beside = False  # Whether the worker updates, too.
        self._beside = PendingBeside(
            self._pending, in_order, weight_cache, self._chunks, self._ring,
            following=self._expected, ended=self._end, torn=self._tear,
        )  # fmt: skip
        self._torn: BaseException | None = None  # Why a unit's update stopped between its chunks.
        self._decided_s = time.monotonic()  # The last decision.
        if not settings.rides_along:
            pool.add_giver(Giver.IDLE_RING, lambda _: not self._pending and self.reclaim())
        pool.add_giver(Giver.UPDATES, lambda _: self.reclaim())

    @override
    def start_worker(
        self, lock: threading.RLock, begin_thread: Callable[[], None], resources: ExitStack
    ) -> None:
        self._worker = UpdateWorker(lock, self._turn, begin_thread)
        self.follows_gradients = True
        resources.callback(self._worker.close)
        self._updates_beside = self._rides_along and self._is_on_host

    # -- Pending updates -------------------------------------------------------------------------

    @override
    def defer(self, record: StepRecord) -> None:
        """Makes every unit with a parameter in the record pending, but for those that were updated
        in the backward; nothing is moved yet."""
        self._gradients.end_readers()
        if self._worker is not None:
            self._worker.refuse_failed()  # Before anything is decided.
        self._make_space_for_weights()
        kept = self._decide(record)
        self._updated, self._next, self._before_backward = {}, None, None
        for unit in self._store.units:
            if unit.index in kept:
                continue
            # INV-9: a parameter without a gradient is in no record.
            update = updates_of(unit, record, self.chunk_nbytes)
            if update is not None:
                self._make_pending(update)
        for unit in self._gradients.in_blocks.units():
            if unit.index not in self._pending:
                self._gradients.give_back(unit)
        self._ring.drop_reads(lambda chunk: chunk.unit.index not in self._pending)
        with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
            self._ring.bring_all_gradients()
        self._beside.is_feeding = self._updates_beside and not self._has_state_on_device
        if self._early is not None and self._early.policy.is_on:
            self._before_backward = self._expected_in_backward(self._early)

    def _make_space_for_weights(self) -> None:
        """Frees the memory of gradients that rest on NVMe, those that are needed last first, until
        weights have enough. What is left is not read for the updates. Raises StorageError."""
        spare = self._pool.spare
        while self._rides_along and spare.beside_weights_nbytes < 0 and self._gradients.reclaim():
            pass

    def _make_pending(self, update: UnitUpdate) -> None:
        self._pending[update.unit.index] = update
        self._beside.in_order.add(update.unit.index)
        self._await_update(update.unit.index, True)

    def _await_update(self, unit: int, is_awaited: bool) -> None:
        self._weight_cache.await_update(unit, is_awaited)
        self._gradients.in_blocks.await_update(unit, is_awaited)

    def _decide(self, record: StepRecord) -> set[int]:
        """Tells the early updates what the step decided. Returns the units whose early updates are
        kept; those that are not done are pending."""
        now_s = time.monotonic()
        step_s, self._decided_s = now_s - self._decided_s, now_s
        if self._early is None:
            return set()
        self._early.take_back_others(record)
        kept = self._early.publish(record)
        self._early.end_step(record, [update.unit.index for update in kept], step_s)
        for update in kept:
            if not update.is_done:
                self._make_pending(update)
                if self._updates_beside:  # The worker goes on.
                    self._beside.add(update)
        return {update.unit.index for update in kept}

    @override
    def apply(self, record: StepRecord) -> None:
        """Updates every unit in the record now. After a failure either nothing was changed and
        nothing is pending, or the parameters are torn."""
        self.defer(record)
        count = len(self._pending)
        try:
            self.settle()
        except BaseException as error:
            if len(self._pending) < count:
                self._tear(error)
            elif self._torn is None:
                self._withdraw()
            raise

    def _withdraw(self) -> None:
        for unit, update in self._pending.items():
            self._await_update(unit, False)
            self._chunks.check_in(update, write_now=False)
        self._pending.clear()
        self._beside.in_order.clear()
        self._beside.clear()
        self._ring.drop_reads()

    @override
    def is_pending(self, unit: int) -> bool:
        """Whether the unit waits for its update."""
        return unit in self._pending

    @override
    def bring_up_to_date(self, unit: int, *, is_needed: bool = False) -> None:
        """Applies the unit's pending update, if it has one. Nobody may hold the unit. An early
        update, which no step has decided, is taken back.

        Its new moments are on their way to where they rest, and so are its weights, unless
        `is_needed` says that they will be used at once and written when nobody holds them. After a
        failed read the unit is as it was and still pending.
        """
        if self._early is not None:
            self._early.take_back(unit)
        if unit in self._pending:
            self._gradients.end_readers()
        update = self._pending.get(unit)
        if update is None:
            return
        self._refuse_torn()
        self._apply(update, is_needed)

    @override
    def apply_pending(self) -> None:
        """Applies everything pending."""
        for unit in list(dict.fromkeys((*self._beside.in_order.soonest(), *self._pending))):
            self.bring_up_to_date(unit)

    @override
    def settle(self) -> None:
        """Applies everything pending and waits until every moment and master is where it rests.
        Nothing is updated or read early any more before the next step. Spare memory is free."""
        if self._early is not None:
            self._early.withdraw()
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
        """Waits until what was updated so far is where it rests."""
        self._gradients.end_readers()
        self._ring.finish_writes()

    @override
    def abandon(self) -> None:
        """Forgets what is pending and waits for what is in flight; the engine is closing."""
        with contextlib.suppress(Exception):  # It would have been raised by whoever needed it.
            self._gradients.end_readers()
        self._withdraw()
        self.finish_writes()
        self._ring.forget_arrays()

    def _tear(self, error: BaseException) -> None:
        self._torn = self._torn or error.with_traceback(None)

    def _refuse_torn(self) -> None:
        if self._torn is not None:
            raise InfinityError(
                "an optimizer step failed halfway, so the parameters are a mixture of two steps; "
                "start again from a checkpoint. The cause was: "
                f"{str(self._torn) or type(self._torn).__name__}"
            ) from self._torn

    def _expected(self, but: int | None = None) -> Iterator[Chunk]:
        """Chunks that are read ahead, in the order of their updates; none of the unit `but`, whose
        update runs."""
        for unit in self._beside.in_order.soonest() if self._reads_ahead else ():
            if unit != but:
                yield from self._pending[unit].left

    def _apply(self, update: UnitUpdate, is_needed: bool) -> None:
        begun_s = time.monotonic()
        self._take_memory(update)
        self._is_applying = True
        try:
            self._run(update, is_needed)
        finally:
            self._is_applying = False
        self._end(update)
        if self._early is not None:
            self._early.note_made(time.monotonic() - begun_s)

    def _take_memory(self, update: UnitUpdate) -> None:
        """Takes the ring, and in a tight pool the weights before it. Raises CapacityError."""
        if not self._pool.is_tight:
            # The largest first: around weights that lie there already, space may be in two parts.
            self._ring.take()
            return
        self.reclaim()
        self._chunks.check_out(update)  # They stay when the ring goes: Note [Tight budgets].
        try:
            self._ring.take()
        except BaseException:
            self._chunks.check_in(update, write_now=False)
            raise

    def _end(self, update: UnitUpdate) -> None:
        """Every chunk is updated: the unit is not pending any more."""
        del self._pending[update.unit.index]
        self._beside.in_order.remove(update.unit.index)
        self._updated[update.unit.index] = update.chunks
        self._await_update(update.unit.index, False)
        if self._early is not None:  # It may have begun early.
            self._early.bring_home(update.unit)
        self._gradients.give_back(update.unit)

    def _run(self, update: UnitUpdate, is_needed: bool) -> None:
        self._chunks.check_out(update)
        try:
            while not update.is_done:
                self._chunks.run_next(update, self._expected(but=update.unit.index))
        except BaseException as error:
            if update.is_begun:
                self._tear(error)
            raise
        finally:
            self._chunks.check_in(update, write_now=not is_needed)

    # -- Beside the device -------------------------------------------------------------------------

    def _turn(self) -> Sequence[Waitable] | LooseWork | None:
        """A turn of the worker, see `UpdateWorker`: first of additions to sums, which the
        step needs, then of pending updates, then of early ones."""
        if self._is_applying or self._torn is not None:
            return None
        added = self._gradients.leaving.add_next()
        if added is not None:
            return added
        if not self._updates_beside:
            return None
        self._gradients.end_readers()
        update = self._beside.first()
        found: Sequence[Waitable] | LooseWork | None = None
        if update is not None:
            found = self._beside.turn_of(update)
        elif self._early is not None:
            found = self._early.turn()
        self._gradients.lend(found if isinstance(found, LooseWork) else None)
        return found

    def _finish(self, unit: int) -> bool:
        """Makes the rest of a pending update. Returns whether it can be made now."""
        if not self._ring.is_taken or self._torn is not None:
            return False
        self.bring_up_to_date(unit)
        return True

    # -- In the backward ---------------------------------------------------------------------------

    @override
    def note_gradient(self, unit: int) -> None:
        if self._early is not None:
            self._early.note_gradient(unit)
        if self._rides_along and self._ring.travels and self._next is None:
            self._begin_backward()
        if self._rides_along and (self._ring.travels or self._early is not None):
            self.advance()
        elif self._worker is not None and self._gradients.leaving.num_additions:
            self._worker.wake()

    def _expected_in_backward(self, early: EarlyTurns) -> Iterator[Chunk]:
        """The chunks of units that the backward will probably update and no forward will."""
        for chunk in early.expected():
            if chunk.unit.index not in self._pending:
                yield chunk

    def _begin_backward(self) -> None:
        self._next = self._expected_of_next()
        self._before_backward = None
        self._counters.add("state_held_back_nbytes", self._ring.held_back_nbytes())

    def _expected_of_next(self) -> Iterator[Chunk]:
        """The chunks of units that the forward has updated and the backward will not."""
        for unit, chunks in list(self._updated.items()):
            if self._early is None or not self._early.is_planned(unit):
                yield from chunks

    @override
    def note_left(self, unit: int) -> bool:
        return self._early is not None and self._early.note_left(unit)

    @override
    def begin_early(self, unit: int, record: StepRecord) -> None:
        assert self._early is not None, "`note_left` has asked for it"
        self._early.begin(unit, updates_of(self._store.units[unit], record, self.chunk_nbytes))

    @override
    def advance(self) -> None:
        """Updates what can be updated early, and reads chunks that will be needed next into the
        staging slots that are free. Never waits."""
        if self._is_applying or self._torn is not None:
            return
        reads_ahead = self._pending and self._reads_ahead and self._ring.travels
        if reads_ahead and self._ring.take(or_none=True):
            self._ring.start_more(self._expected())
        is_fed = bool(self._pending) and self._beside.is_feeding and self._beside.feed()
        if is_fed and self._worker is not None:
            self._worker.wake()
        if self._worker is not None and self._gradients.leaving.num_additions:
            self._worker.wake()
        if self._early is not None:
            self._early.advance()
            if self._worker is not None and self._early.has_turn:
                self._worker.wake()
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
        """Somebody else is about to change the unit's state: an early update of it is taken back,
        and what was read ahead of it is dropped. Waits for writes of updated state."""
        if self._early is not None:
            self._early.take_back(unit)
        self._ring.drop_reads(lambda chunk: chunk.unit.index == unit)
        self.finish_writes()

    # -- Memory ------------------------------------------------------------------------------------

    def _leaves_home(self, unit: Unit, kind: StateKind) -> bool:
        """See `UndecidedState`. The worker may have arrays of a pending unit."""
        if unit.index in self._pending:
            return False
        self._ring.forget_arrays(unit)
        self._ring.drop_reads(lambda chunk: chunk.unit is unit)
        if kind is not StateKind.PARAMETERS:
            return True
        assert isinstance(self._weight_cache, WeightCache)
        return self._weight_cache.leave_home(unit.index)

    def reclaim(self) -> bool:
        """Gives memory back unless an update is running: weights that the worker has, the ring's
        block, with what was read ahead, or weights of an early update that is under way."""
        if self._is_applying:
            return False
        self._gradients.end_readers()
        if self._beside.release(self._finish):
            return True
        return self._ring.give_up() or (self._early is not None and self._early.release())
