"""Updates in the backward, before `optimizer.step()` has decided; kept or taken back by the step.

An early update of a unit:

  state      changed state          next
  PLANNED    none; read ahead       COMPLETE (its gradients are there), gone (the step decides)
  COMPLETE   none                   BEGUN, gone (the step decides)
  BEGUN      some chunks; weights   DONE, taken back, finished by the ordinary update if the step
             are checked out        decides as expected
  DONE       all of it              kept or taken back, as the step decides

Note [Old state]
  An early update reads the state of the last step and writes the new beside it
  (`state/undecided.py`). The decision publishes it; to take it back is to publish nothing.

Note [Which first]
  Chunks of drives are read ahead in the order of the gradients, and updated in it. Where all state
  rests on the host, beside a device, nothing is read: every unit is planned, and the worker takes
  the one whose gradients came last. What the backward does not get to is then what the forward
  needs last.

Note [Nobody sees an early update]
  Before the decision, whoever needs the weights or the state of a unit gets the old ones: the early
  update is taken back first. Gradients are only read, so nothing is lost but time.

`policy.py` predicts which units, and whether at all. `worker.py` says which thread
updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.placement import updated_nbytes
from infinity.state.store import LocalStore, Transfer
from infinity.state.undecided import UndecidedState, can_be_undecided, has_generations
from infinity.state.units import Chunk, TensorSpec, Unit
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.policy import EarlyPolicy
from infinity.streaming.updates.record import StepRecord
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate, chunks_of, updates_of
from infinity.streaming.updates.worker import MOST_CHECKED_OUT, LooseWork
from infinity.streaming.weights.cache import WeightCache

_WAITS = ("read_wait_s", "write_wait_s")


@dataclass(eq=False, slots=True)
class _Early:
    """An early update; the table is in the docstring of the file."""

    unit: Unit
    chunks: tuple[Chunk, ...]  # If every parameter gets a gradient.
    update: UnitUpdate | None = None  # From COMPLETE on.
    stamps: dict[TensorSpec, tuple[int, int] | None] = field(default_factory=dict)

    @property
    def is_begun(self) -> bool:
        return self.update is not None and self.update.is_begun

    @property
    def is_done(self) -> bool:
        return self.update is not None and self.update.is_done


class EarlyUpdates:
    """Early updates of one rank's units. Under the engine's lock; nothing here waits for a drive
    but what takes an update back."""

    def __init__(
        self,
        store: LocalStore,
        weight_cache: WeightCache,
        gradients: GradientStore,
        ring: StagingRing,
        chunks: ChunkUpdates,
        counters: Counters,
        undecided: UndecidedState,
        *,
        chunk_nbytes: int,
        is_beside: bool,
    ) -> None:
        """`is_beside`: the device that computes has memory of its own."""
        self._store = store
        self._weight_cache = weight_cache
        self._gradients = gradients
        self._ring = ring
        self._chunks = chunks
        self._counters = counters
        self._undecided = undecided
        self._chunk_nbytes = chunk_nbytes
        self._is_beside = is_beside
        units = [unit for unit in store.units if can_be_undecided(store, unit, is_beside=is_beside)]
        # Note [Which first].
        self._is_newest_first = is_beside and not any(has_generations(store, u) for u in units)
        self.policy = EarlyPolicy(
            {unit.index: updated_nbytes(unit) for unit in units},
            is_newest_first=self._is_newest_first,
        )
        self._planned: dict[int, _Early] = {}  # In the order of their gradients.
        self._complete: dict[int, _Early] = {}  # Not DONE, in the order in which they came.
        self._done: dict[int, _Early] = {}
        self._num_undone = 0  # Taken back before the step has decided.
        self._is_advancing = False
        # Of the worker that updates, where there is one: wakes it, and ends what it does without
        # the lock.
        self.wake_worker: Callable[[], None] | None = None
        self.end_work: Callable[[], None] = lambda: None
        # For `wait_share`: the waits and the time at the last decision.
        self._waits_before_s = 0.0
        self._forward_wait_s = 0.0
        self._made_s = 0.0

    # -- The backward ------------------------------------------------------------------------------

    def note_gradient(self, unit: int) -> None:
        """A gradient of a parameter of the unit arrived."""
        if self.policy.note_gradient(unit):
            self._forward_wait_s = self._waited_s() - self._waits_before_s
            self._begin()
        if unit in self._done or unit in self._complete:
            self.take_back(unit)  # It was not the last.

    def _begin(self) -> None:
        planned = [self._store.units[index] for index in self.policy.plan()]
        if not self._undecided.has_space:
            planned = [unit for unit in planned if not has_generations(self._store, unit)]
        if not planned:
            return
        try:
            self._ring.take()
        except CapacityError:
            return
        self._planned = {unit.index: self._plan(unit) for unit in planned}

    def expected(self) -> Iterator[Chunk]:
        """Chunks of the units that the next backward will update if it is like the last, in the
        order of their gradients."""
        for index in self.policy.plan():
            yield from self._plan(self._store.units[index]).chunks

    def _plan(self, unit: Unit) -> _Early:
        return _Early(unit, chunks_of(unit, tuple(unit.trainable()), self._chunk_nbytes))

    def note_left(self, unit: int) -> bool:
        """A backward has left the unit, and its gradients are on their way to where they rest.
        Returns whether `begin` is to follow."""
        is_complete = self.policy.note_left(unit)
        early = self._planned.get(unit)
        return is_complete and early is not None and early.update is None

    def is_planned(self, unit: int) -> bool:
        """Whether the unit is to be updated in the backward of this step."""
        return unit in self._planned

    def begin(self, unit: int, record: StepRecord) -> None:
        """The gradients of a planned unit are complete, and this step is expected of it."""
        early = self._planned[unit]
        early.update = updates_of(early.unit, record, self._chunk_nbytes)
        if early.update is None:
            return
        early.stamps = {spec: self._gradients.stamp(spec) for spec in early.unit.trainable()}
        self._complete[unit] = early

    def advance(self) -> None:
        """Updates the chunks whose state is there, in the order of the gradients, or lets the
        worker do so, and reads ahead. Never waits."""
        if not self._planned or self._is_advancing:
            return
        self._is_advancing = True
        try:
            if self.wake_worker is None:
                while self._complete and self._advance_at_once(self._in_turn()[0]):
                    pass
            elif self._check_out_first():
                self.wake_worker()
            self._read_ahead()
        finally:
            self._is_advancing = False

    def _check_out_first(self) -> bool:
        """Checks weights out for the worker. Returns whether the worker has any."""
        num_checked_out = sum(map(self._is_checked_out, self._complete))
        for index in self._in_turn():
            if num_checked_out >= MOST_CHECKED_OUT:
                break
            early = self._complete.get(index)
            if early is None:  # Its last chunk has ended, because memory was short.
                continue
            assert early.update is not None
            if early.update.weights is None and self._can_update(early):
                self._chunks.check_out(early.update)
                num_checked_out += 1
        return num_checked_out > 0

    def _in_turn(self) -> list[int]:
        """The complete units in the order of their updates; one that is begun is finished first."""
        if not self._is_newest_first:
            return list(self._complete)
        newest_first = list(self._complete)[::-1]
        return sorted(newest_first, key=lambda unit: not self._complete[unit].is_begun)

    def _is_checked_out(self, unit: int) -> bool:
        update = self._complete[unit].update
        return update is not None and update.weights is not None

    def turn(self) -> Sequence[Transfer] | LooseWork | None:
        """A turn of the worker, see `UpdateWorker`: updates a chunk of the first unit that it can.
        The weights of a unit before it may be on their way."""
        units = list(filter(self._is_checked_out, self._in_turn()))
        if not units or self._is_advancing:
            return None
        self._is_advancing = True
        try:
            begun = next(filter(None, map(self._advance, units)), None)
            with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
                self._read_ahead()
            if begun is not None:
                return begun if isinstance(begun, LooseWork) else ()
            waiting = filter(self._is_checked_out, self._complete)
            first = next((self._complete[unit].update for unit in waiting), None)
            return None if first is None else self._ring.awaited(first.left[0])
        finally:
            self._is_advancing = False

    def _can_update(self, early: _Early) -> bool:
        """Whether the gradients are in their sums, and the weights are or can be checked out."""
        update = early.update
        assert update is not None
        return self._gradients.is_complete(early.unit) and (
            update.weights is not None or self._weight_cache.can_check_out(early.unit.index)
        )

    def _advance_at_once(self, index: int) -> bool:
        """As `_advance`, on this thread. Returns whether anything was done."""
        begun = self._advance(index)
        if isinstance(begun, LooseWork):
            begun.run()
            begun.end()
        return bool(begun)

    def _advance(self, index: int) -> LooseWork | bool:
        """Returns the update of the next chunk of a complete unit; False if it cannot be updated
        now, True if the unit has no early update any more."""
        early = self._complete[index]
        update = early.update
        assert update is not None
        if not self._can_update(early):
            return False
        if not self._undecided.reserve(early.unit):
            del self._complete[index]
            self._chunks.check_in(update, write_now=False)
            early.update = None  # The step makes it.
            return True
        if index not in self._undecided.contents:
            self._weight_cache.write_to(index, self._undecided.begin(early.unit))
        keep = self._undecided.keep
        try:
            work = self._chunks.try_next(update, partial(self._end_chunk, index), keep)
        except StorageError:
            self.take_back(index)  # Who needs the unit next meets the cause, and tells it.
            return False
        except BaseException:
            self.take_back(index)
            raise
        return work or False

    def _end_chunk(self, index: int, error: BaseException | None) -> None:
        update = self._complete[index].update
        assert update is not None
        if error is not None:
            self.take_back(index)
            if not isinstance(error, StorageError):  # As in `_advance`.
                raise error
        elif update.is_done:
            self._chunks.check_in(update, write_now=True)
            self._done[index] = self._complete.pop(index)

    def _read_ahead(self) -> None:
        self._ring.start_more(self._to_read(), with_gradients=False)

    def _to_read(self) -> Iterator[Chunk]:
        """Chunks in the order in which they will be updated; of planned units all of them."""
        for early in self._complete.values():
            assert early.update is not None
            yield from early.update.left
        for early in self._planned.values():
            if early.update is None:
                yield from early.chunks

    # -- The decision ------------------------------------------------------------------------------

    def decide(self, record: StepRecord, step_s: float) -> list[UnitUpdate]:
        """Keeps the early updates that are what the step decided, and takes back the others.
        Returns those that are kept; one that is not done has its weights checked out, and is to be
        finished by the record."""
        self.end_work()
        kept = []
        for index, early in [*self._done.items(), *self._complete.items()]:
            assert early.update is not None
            if not self._is_as_expected(early, record):
                self.take_back(index)
            elif early.is_begun:
                early.update.record = record
                self._undecided.publish(early.unit)
                self._end_undecided(early.unit)
                kept.append(early.update)
            else:
                self._chunks.check_in(early.update, write_now=False)  # If the worker has them.
                self._undecided.drop(early.unit)
                self._end_undecided(early.unit)
        self._counters.add("early_updates_kept", len(kept))
        missed = [unit for unit, early in self._planned.items() if not early.is_done]
        self.policy.end_step(
            num_undone=self._num_undone,
            is_clipped=bool(record.factors),
            missed=missed,
            wait_share=self._forward_wait_s / step_s if step_s else 0.0,
        )
        self._forget()
        self._num_undone = 0
        self._waits_before_s = self._waited_s()
        return kept

    def _is_as_expected(self, early: _Early, record: StepRecord) -> bool:
        assert early.update is not None
        expected = early.update.record.settings
        decided = {s: record.settings[s] for s in early.unit.trainable() if s in record.settings}
        # A factor changes the stamp of its gradient.
        return decided == expected and all(
            self._gradients.stamp(spec) == stamp for spec, stamp in early.stamps.items()
        )

    def take_back(self, unit: int) -> None:
        """Undoes the unit's early update, if there is one: its state is that of the last step.
        Raises StorageError if a write has failed."""
        if unit in self._done or unit in self._complete:
            self.end_work()
        early = self._done.pop(unit, None) or self._complete.pop(unit, None)
        if early is None or early.update is None:
            return
        update, early.update = early.update, None
        self._planned.pop(unit, None)
        self._ring.drop_reads(lambda chunk: chunk.unit.index == unit)
        if not update.is_begun:
            self._chunks.check_in(update, write_now=False)
            self._undecided.drop(early.unit)
            self._end_undecided(early.unit)
            return
        self._num_undone += 1
        self._counters.add("early_updates_undone", 1)
        try:
            self._ring.finish_writes()
        finally:
            self._drop(early.unit, update)

    def _drop(self, unit: Unit, update: UnitUpdate) -> None:
        try:
            self._chunks.drop(update)
            self._weight_cache.discard(unit.index)
        finally:  # The old state counts, whatever becomes of the new weights.
            if self._undecided.needs_weights(unit):
                weights = self._weight_cache.check_out(unit.index, read=True)
                self._undecided.drop(unit, weights)
                self._weight_cache.check_in(unit.index, dirty_nbytes=0)
            else:
                self._undecided.drop(unit)
            self._end_undecided(unit)

    def _end_undecided(self, unit: Unit) -> None:
        self._weight_cache.write_to(unit.index, None)
        self._undecided.free(unit)

    def withdraw(self) -> None:
        """Takes back every early update, and plans none before the next step."""
        for unit in [*self._done, *self._complete]:
            self.take_back(unit)
        self._forget()

    def release(self) -> bool:
        """Gives memory back: weights that are checked out between two chunks, or the last copy of
        old state. Returns whether there was any."""
        self.end_work()
        for unit, early in self._complete.items():
            if early.update is not None and early.update.weights is not None:
                if self._is_advancing:
                    return False
                self.take_back(unit)
                return True
        copied = [] if self._is_advancing else self._undecided.units_in_memory()
        if copied:
            self.take_back(copied[-1])
        return len(self._undecided.units_in_memory()) < len(copied)

    def _forget(self) -> None:
        self._planned, self._complete, self._done = {}, {}, {}

    def note_made(self, seconds: float) -> None:
        """The thread that trains has made the rest of a pending update itself, in so much time."""
        self._made_s += seconds

    def _waited_s(self) -> float:
        """Returns the time that training has waited for drives, and beside a device for updates."""
        values = self._counters.snapshot()
        waited_s = sum(values.get(name, 0.0) for name in _WAITS)
        return waited_s + (self._made_s if self._is_beside else 0.0)
