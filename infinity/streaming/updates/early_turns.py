"""Early updates of one rank, chunk by chunk: between two hooks, or in turns of the worker.

`worker.py` says which thread updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

from typing_extensions import override

from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.store import Transfer
from infinity.state.undecided import UndecidedState, can_be_undecided, has_generations
from infinity.state.units import Chunk, Unit
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.early import Early, EarlyUpdates
from infinity.streaming.updates.record import StepRecord, UpdateSettings
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate, chunks_of
from infinity.streaming.updates.worker import MOST_CHECKED_OUT, LooseWork
from infinity.streaming.weights.cache import WeightCache

_MOST_LOOKED_AT = 32  # Units that could be checked out, where those before them cannot.


class EarlyTurns(EarlyUpdates):
    """Makes early updates of one rank's units. Under the engine's lock; nothing here waits for a
    drive but what takes an update back."""

    def __init__(
        self,
        weight_cache: WeightCache,
        gradients: GradientStore,
        undecided: UndecidedState,
        ring: StagingRing,
        chunks: ChunkUpdates,
        counters: Counters,
        *,
        chunk_nbytes: int,
        settings: UpdateSettings,
    ) -> None:
        store, is_beside = undecided.store, settings.is_beside
        able = [unit for unit in store.units if can_be_undecided(store, unit, is_beside=is_beside)]
        self._is_newest_first = is_beside and not any(has_generations(store, u) for u in able)
        super().__init__(
            store.units, gradients, undecided, counters,
            is_beside=is_beside, is_newest_first=self._is_newest_first,
        )  # fmt: skip
        self._weight_cache = weight_cache
        self._ring = ring
        self._chunks = chunks
        self._chunk_nbytes = chunk_nbytes
        self._is_beside = is_beside
        # All chunks of units that were planned, by unit; they stay the same.
        self._chunks_of: dict[int, tuple[Chunk, ...]] = {}
        self._to_make: dict[int, UnitUpdate] = {}  # Not DONE, in the order in which they came.
        self._checked_out: dict[int, UnitUpdate] = {}  # Those of them with their weights.
        self._to_come: dict[int, None] = {}  # Planned, and not queued since.
        self._is_advancing = False
        self.has_worker = is_beside and settings.on_device is None  # Which takes turns.
        self._made_s = 0.0

    # -- The backward ------------------------------------------------------------------------------

    @override
    def _take_memory(self, planned: list[int]) -> list[int]:
        try:
            self._ring.take()
        except CapacityError:
            planned = []
        self._to_come = dict.fromkeys(planned)
        return planned

    @override
    def _is_ready(self, unit: Unit) -> bool:
        return self._gradients.is_complete(unit)

    @override
    def _start(self, index: int, update: UnitUpdate) -> bool:
        if not self._undecided.reserve(update.unit):
            return False
        self._to_make[index] = update
        self._to_come.pop(index, None)
        return True

    def expected(self) -> Iterator[Chunk]:
        """Chunks of the units that the next backward will update if it is like the last, in the
        order of their gradients."""
        for index in self.policy.plan():
            yield from self._planned_chunks(index)

    def _planned_chunks(self, index: int) -> tuple[Chunk, ...]:
        if index not in self._chunks_of:
            unit = self._units[index]
            every = tuple(unit.trainable())
            self._chunks_of[index] = chunks_of(unit, every, self._chunk_nbytes)
        return self._chunks_of[index]

    def is_planned(self, index: int) -> bool:
        """Whether the unit is to be updated in the backward of this step."""
        return index in self._planned

    @override
    def advance(self) -> None:
        """Updates the chunks whose state is there, in the order of the gradients, or lets the
        worker do so, and reads ahead. Never waits."""
        if not self._planned or self._is_advancing:
            return
        self._is_advancing = True
        try:
            super().advance()
            if self.has_worker:
                self._check_out_first()
            else:
                while self._to_make and self._advance_at_once(next(self._in_turn())):
                    pass
            self._read_ahead()
        finally:
            self._is_advancing = False

    @property
    def has_turn(self) -> bool:
        """Whether the worker has weights of an update."""
        return self.has_worker and bool(self._checked_out)

    def _check_out_first(self) -> None:
        """Checks weights out for the worker."""
        for index in list(islice(self._in_turn(), _MOST_LOOKED_AT)):
            if len(self._checked_out) >= MOST_CHECKED_OUT:
                break
            update = self._to_make.get(index)
            if update is None:  # Its last chunk has ended, because memory was short.
                continue
            if update.weights is None and self._can_update(update):
                self._chunks.check_out(update)
                self._checked_out[index] = update

    def _in_turn(self) -> Iterator[int]:
        """The units in the order of their updates; one that is begun is finished first."""
        if not self._is_newest_first:
            return iter(self._to_make)
        begun = [index for index, update in self._checked_out.items() if update.is_begun]
        others = (index for index in reversed(self._to_make) if index not in begun)
        return chain(begun, others)

    def turn(self) -> Sequence[Transfer] | LooseWork | None:
        """A turn of the worker, see `UpdateWorker`: updates a chunk of the first unit that it can.
        The weights of a unit before it may be on their way."""
        out = self._checked_out
        units = sorted(out, key=lambda index: not out[index].is_begun)
        if not units or self._is_advancing:
            return None
        self._is_advancing = True
        try:
            begun = next(filter(None, map(self._advance, units)), None)
            with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
                self._read_ahead()
            if begun is not None:
                return begun
            first = next(iter(self._checked_out.values()), None)
            return None if first is None else self._ring.awaited(first.left[0])
        finally:
            self._is_advancing = False

    def _can_update(self, update: UnitUpdate) -> bool:
        """Whether the gradients are in their sums, and the weights are or can be checked out."""
        return self._gradients.is_complete(update.unit) and (
            update.weights is not None or self._weight_cache.can_check_out(update.unit.index)
        )

    def _advance_at_once(self, index: int) -> bool:
        """As `_advance`, on this thread. Returns whether anything was done."""
        begun = self._advance(index)
        if begun is not None:
            begun.run()
            begun.end()
        return begun is not None

    def _advance(self, index: int) -> LooseWork | None:
        """Returns the update of the next chunk of a unit; None if it cannot be updated now."""
        update = self._to_make[index]
        if not self._can_update(update):
            return None
        if index not in self._undecided.contents:
            self._weight_cache.write_to(index, self._undecided.begin(update.unit))
        try:
            work = self._chunks.try_next(update, partial(self._end_chunk, index))
        except StorageError:
            self.take_back(index)  # The next use of the unit meets the cause, and tells it.
            return None
        except BaseException:
            self.take_back(index)
            raise
        if update.weights is not None:
            self._checked_out[index] = update
        return work

    def _end_chunk(self, index: int, error: BaseException | None) -> None:
        if error is not None:
            self.take_back(index)
            if not isinstance(error, StorageError):  # As in `_advance`.
                raise error
        elif self._to_make[index].is_done:
            self._checked_out.pop(index, None)
            self._chunks.check_in(self._to_make.pop(index), write_now=True)

    def _read_ahead(self) -> None:
        self._ring.start_more(self._to_read(), with_gradients=False)

    def _to_read(self) -> Iterator[Chunk]:
        """Chunks in the order in which they will be updated; of planned units all of them."""
        for update in self._to_make.values():
            yield from update.left
        for index in self._to_come:
            yield from self._planned_chunks(index)

    # -- The decision ------------------------------------------------------------------------------

    @override
    def take_back_others(self, record: StepRecord) -> None:
        self._gradients.end_readers()
        super().take_back_others(record)

    def publish(self, record: StepRecord) -> list[UnitUpdate]:
        """Publishes what the early updates have written; the record is what they expected. Returns
        them; one that is not DONE has its weights checked out, and is to be finished by the record,
        and by `bring_home`."""
        kept = []
        for early in self._early.values():
            update = early.update
            if update.is_begun:
                update.record = record
                self._undecided.publish(early.unit)
                self._weight_cache.write_to(early.unit.index, None)
                kept.append(update)
                if update.is_done:
                    self.bring_home(early.unit)
            else:
                self._drop_unbegun(update)
        return kept

    def bring_home(self, unit: Unit) -> None:
        """What a published update has written is the unit's state: all of it is updated, and its
        weights are checked in."""
        self._undecided.bring_home(unit)
        self._undecided.free(unit)

    def _drop_unbegun(self, update: UnitUpdate) -> None:
        self._chunks.check_in(update, write_now=False)  # If the worker has them.
        self._end_undecided(update.unit)

    @override
    def take_back(self, index: int) -> None:
        if index in self._early:
            self._gradients.end_readers()
        super().take_back(index)

    @override
    def _stop(self, taken_back: Mapping[int, Early]) -> None:
        with contextlib.ExitStack() as stack:  # One failure does not keep the others from ending.
            for index, early in taken_back.items():
                stack.callback(self._stop_one, index, early.update)

    def _stop_one(self, index: int, update: UnitUpdate) -> None:
        for others in (self._to_make, self._checked_out, self._planned, self._to_come):
            others.pop(index, None)
        self._ring.drop_reads(lambda chunk: chunk.unit.index == index)
        if not update.is_begun:
            self._drop_unbegun(update)
            return
        self._note_undone(1)
        try:
            self._ring.finish_writes()
        finally:
            self._drop(update)

    def _drop(self, update: UnitUpdate) -> None:
        unit = update.unit
        try:
            self._chunks.drop(update)
            self._weight_cache.discard(unit.index)
        finally:  # The old state counts, whatever becomes of the new weights.
            self._end_undecided(unit)

    def _end_undecided(self, unit: Unit) -> None:
        self._weight_cache.write_to(unit.index, None)
        self._undecided.drop(unit)
        self._undecided.free(unit)

    @override
    def withdraw(self) -> None:
        self._gradients.end_readers()
        super().withdraw()

    @override
    def _forget(self) -> None:
        super()._forget()
        self._to_make, self._checked_out, self._to_come = {}, {}, {}

    def release(self) -> bool:
        """Gives memory back: weights that are checked out between two chunks, or a block for the
        new state of the last early update. Returns whether there was any."""
        self._gradients.end_readers()
        if self._checked_out and self._is_advancing:
            return False
        for index in self._checked_out:
            self.take_back(index)
            return True
        beside = (i for i in reversed(self._early) if self._undecided.has_memory(self._units[i]))
        last = None if self._is_advancing else next(beside, None)
        if last is not None:
            self.take_back(last)
        return self._undecided.give_back()

    # -- Waits -------------------------------------------------------------------------------------

    def note_made(self, seconds: float) -> None:
        """The thread that trains has made the rest of a pending update itself, in so much time."""
        self._made_s += seconds

    @override
    def _waited_s(self) -> float:
        """Beside a device also for updates."""
        return super()._waited_s() + (self._made_s if self._is_beside else 0.0)
