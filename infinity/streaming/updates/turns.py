"""The updates of one rank, chunk by chunk: when a unit is needed, between two hooks, or in turns
of the worker.

`worker.py` says which thread updates, `updater.py` what is pending, `early.py` what is early.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

import torch
from typing_extensions import override

from infinity.errors import CapacityError, InfinityError, StorageError
from infinity.observe import Counters
from infinity.state.store import DeviceLocation
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.protocol import Transfer
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.passes import outside_inference_mode
from infinity.streaming.updates.early import EarlyUpdates
from infinity.streaming.updates.record import StepRecord, UpdatedWeights, UpdateSettings
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate
from infinity.streaming.updates.worker import MOST_CHECKED_OUT, LooseWork
from infinity.streaming.weights.cache import WeightCache
from infinity.streaming.weights.eviction import ByNextUse
from infinity.tiers.host import HostPool

_MOST_LOOKED_AT = 32  # Units that could be checked out, where those before them cannot.


class UpdateTurns(EarlyUpdates):
    """The pending and the early updates of units, and what makes them. Under the engine's lock;
    nothing that is early waits for a drive but what takes an update back.

    The worker makes updates whose weights were checked out for it, pending ones first; the thread
    that trains checks them out.
    """

    def __init__(
        self,
        weight_cache: UpdatedWeights,
        pool: HostPool,
        gradients: GradientStore,
        chunks: ChunkUpdates,
        counters: Counters,
        settings: UpdateSettings,
        in_order: ByNextUse,
    ) -> None:
        """`in_order`: an empty row, for pending units."""
        store = chunks.undecided.store
        super().__init__(store.units, gradients, chunks, counters, settings)
        self._weight_cache = weight_cache
        self._pool = pool
        self.pending: dict[int, UnitUpdate] = {}
        self._in_order = in_order  # The pending ones, by their next uses.
        # Chunks of the units that were updated since the decision, in this order.
        self._updated: dict[int, tuple[Chunk, ...]] = {}
        self._to_make: dict[int, UnitUpdate] = {}  # Early, not DONE, in the order of coming.
        # Those, pending or early, whose weights are checked out between two chunks.
        self._checked_out: dict[int, UnitUpdate] = {}
        self._to_come: dict[int, None] = {}  # Planned, and not queued since.
        self._is_advancing = False
        self.is_applying = False  # A pending update, on the thread that trains.
        self.has_worker = settings.is_beside and settings.on_device is None and settings.overlaps
        # The streams that copy it are known to the thread that trains.
        has_state_on_device = any(
            kind is not StateKind.PARAMETERS and isinstance(location, DeviceLocation)
            for (_, kind), location in store.placed().items()
        )
        self._can_feed = self.has_worker and not has_state_on_device
        self._is_feeding = False  # Whether the worker makes pending updates.
        self.torn: BaseException | None = None  # Why a unit's update stopped between its chunks.
        self._made_s = 0.0

    @property
    def _cache(self) -> WeightCache:
        assert isinstance(self._weight_cache, WeightCache), "ranks update at the step, or beside it"
        return self._weight_cache

    # -- Pending updates ---------------------------------------------------------------------------

    def make_pending(self, update: UnitUpdate) -> None:
        """The unit waits for its update."""
        self.pending[update.unit.index] = update
        self._in_order.add(update.unit.index)
        self._await_update(update.unit.index, True)

    def _await_update(self, unit: int, is_awaited: bool) -> None:
        self._weight_cache.await_update(unit, is_awaited)
        self._gradients.in_blocks.await_update(unit, is_awaited)

    def soonest(self) -> list[int]:
        """Returns the pending units, those that are needed next first."""
        return list(dict.fromkeys((*self._in_order.soonest(), *self.pending)))

    def expected(self, but: int | None = None) -> Iterator[Chunk]:
        """Yields the chunks of pending units that are read ahead, in the order of their updates;
        none of the unit `but`, whose update runs."""
        for unit in self._in_order.soonest() if self._settings.reads_ahead else ():
            if unit != but:
                yield from self.pending[unit].left

    def apply(self, index: int, *, is_needed: bool) -> None:
        """Makes a pending update, or what is left of it. `is_needed`: see `StepRunner`."""
        if torch.is_inference_mode_enabled():
            with outside_inference_mode():
                self.apply(index, is_needed=is_needed)
            return
        update, begun_s = self.pending[index], time.monotonic()
        self._take_memory(update)
        self.is_applying = True
        try:
            self._run(update, is_needed)
        finally:
            self.is_applying = False
        self._end(update)
        if self._settings.is_beside:  # Else training waits for drives alone.
            self._made_s += time.monotonic() - begun_s

    def _take_memory(self, update: UnitUpdate) -> None:
        """Takes the ring, and in a tight pool the weights before it. Raises CapacityError."""
        if not self._pool.is_tight:
            # The largest first: around weights that lie there already, space may be in two parts.
            self._ring.take()
            return
        self.reclaim()
        self._chunks.check_out(update)  # They stay when the ring goes: tiers/host.py.
        try:
            self._ring.take()
        except BaseException:
            self._chunks.check_in(update, write_now=False)
            raise

    def _run(self, update: UnitUpdate, is_needed: bool) -> None:
        self._checked_out.pop(update.unit.index, None)
        self._chunks.check_out(update)
        try:
            while not update.is_done:
                self._chunks.run_next(update, self.expected(but=update.unit.index))
        except BaseException as error:
            if update.is_begun:
                self.tear(error)
            raise
        finally:
            self._chunks.check_in(update, write_now=not is_needed)

    def _end(self, update: UnitUpdate) -> None:
        """Every chunk is updated, and the weights are checked in: the unit is not pending."""
        index = update.unit.index
        del self.pending[index]
        self._in_order.remove(index)
        self._checked_out.pop(index, None)
        self._updated[index] = update.chunks
        self._await_update(index, False)
        if self._settings.in_backward:
            self._bring_home(update.unit)  # It may have begun early.
        self._gradients.give_back(update.unit)

    def withdraw_pending(self) -> None:
        """Nothing is pending any more."""
        for unit, update in self.pending.items():
            self._await_update(unit, False)
            self._chunks.check_in(update, write_now=False)
            self._checked_out.pop(unit, None)
        self.pending.clear()
        self._in_order.clear()
        self._ring.drop_reads()

    def tear(self, error: BaseException) -> None:
        """An update has stopped between its chunks."""
        self.torn = self.torn or error.with_traceback(None)

    def refuse_torn(self) -> None:
        """Raises InfinityError if an update has stopped between its chunks."""
        if self.torn is not None:
            raise InfinityError(
                "an optimizer step failed halfway, so the parameters are a mixture of two steps; "
                "start again from a checkpoint. The cause was: "
                f"{str(self.torn) or type(self.torn).__name__}"
            ) from self.torn

    # -- The backward ------------------------------------------------------------------------------

    @override
    def _prepare(self, planned: list[int]) -> list[int]:
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

    def expected_in_backward(self) -> Iterator[Chunk]:
        """Yields the chunks of units that the next backward will update if it is like the last, and
        no forward will, in the order of their gradients."""
        for index in self.policy.plan():
            if index not in self.pending:
                yield from self._all_chunks(self._units[index])

    def expected_of_next(self) -> Iterator[Chunk]:
        """Yields the chunks of units that the forward has updated and this backward will not."""
        for unit, chunks in list(self._updated.items()):
            if unit not in self._planned:
                yield from chunks

    @override
    def advance(self) -> None:
        """Updates early chunks whose state is there, in the order of the gradients, and reads
        ahead; or checks weights out for the worker. Never waits."""
        if self.pending and self._is_feeding:
            soonest = islice(self._in_order.soonest(), 2 * MOST_CHECKED_OUT)
            self._feed(self.pending, soonest, lambda u: self._cache.can_check_out(u.unit.index))
        if not self._planned or self._is_advancing:
            return
        self._is_advancing = True
        try:
            super().advance()
            if self.has_worker:
                self._feed(
                    self._to_make, islice(self._in_turn(), _MOST_LOOKED_AT), self._can_update
                )
            else:
                while self._to_make and (work := self._advance(next(self._in_turn()))) is not None:
                    work.run()
                    work.end()
            self._read_ahead()
        finally:
            self._is_advancing = False

    @property
    def has_turn(self) -> bool:
        """Whether the worker has weights of an update."""
        return self.has_worker and bool(self._checked_out)

    def _feed(
        self,
        updates: Mapping[int, UnitUpdate],
        order: Iterable[int],
        can_update: Callable[[UnitUpdate], bool],
    ) -> None:
        """Checks weights out for the worker, in this order."""
        for index in list(order):
            if len(self._checked_out) >= MOST_CHECKED_OUT:
                return
            update = updates.get(index)
            if update is None:  # Its last chunk has ended, because memory was short.
                continue
            if update.weights is None and can_update(update):
                self._chunks.check_out(update)
                self._checked_out[index] = update

    def _early_out(self) -> dict[int, UnitUpdate]:
        return {i: update for i, update in self._checked_out.items() if i in self._to_make}

    def _in_turn(self) -> Iterator[int]:
        """The early units in the order of their updates; one that is begun is finished first."""
        if not self._is_newest_first:
            return iter(self._to_make)
        begun = [i for i, update in self._early_out().items() if update.is_begun]
        others = (index for index in reversed(self._to_make) if index not in begun)
        return chain(begun, others)

    def turn(self) -> Sequence[Transfer] | LooseWork | None:
        """A turn of the worker, see `UpdateWorker`: updates a chunk of the first unit that it can.
        The weights of an early unit before it may be on their way."""
        if self._is_feeding:
            for index, update in self._checked_out.items():
                if index in self.pending:
                    return self._turn_of(update)
        out = self._early_out()
        if not out or self._is_advancing:
            return None
        self._is_advancing = True
        try:
            units = sorted(out, key=lambda index: not out[index].is_begun)
            begun = next(filter(None, map(self._advance, units)), None)
            with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
                self._read_ahead()
            if begun is not None:
                return begun
            first = next(iter(self._early_out().values()), None)
            return None if first is None else self._ring.awaited(first.left[0])
        finally:
            self._is_advancing = False

    def _turn_of(self, update: UnitUpdate) -> Sequence[Transfer] | LooseWork | None:
        """A turn for a pending update."""
        try:
            with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
                if self._ring.take(or_none=True):
                    self._ring.start_more(self.expected())
            work = self._chunks.try_next(update, partial(self._end_chunk, update))
        except BaseException as error:
            self._fail(update, error)
            return None
        return self._ring.awaited(update.left[0]) if work is None else work

    def _can_update(self, update: UnitUpdate) -> bool:
        """Whether the gradients are in their sums, and the weights are or can be checked out."""
        return self._gradients.is_complete(update.unit) and (
            update.weights is not None or self._cache.can_check_out(update.unit.index)
        )

    def _advance(self, index: int) -> LooseWork | None:
        """Returns the update of the next chunk of an early unit; None if it cannot be updated
        now."""
        update = self._to_make[index]
        if not self._can_update(update):
            return None
        if index not in self._undecided.contents:
            self._cache.write_to(index, self._undecided.begin(update.unit))
        try:
            work = self._chunks.try_next(update, partial(self._end_chunk, update))
        except StorageError:
            self.take_back(index)  # The next use of the unit meets the cause, and tells it.
            return None
        except BaseException:
            self.take_back(index)
            raise
        if update.weights is not None:
            self._checked_out[index] = update
        return work

    def _end_chunk(self, update: UnitUpdate, error: BaseException | None) -> None:
        index = update.unit.index
        if self.pending.get(index) is update:
            try:
                if error is not None:
                    raise error
                if update.is_done:
                    self._chunks.check_in(update, write_now=True)
                    self._end(update)
            except BaseException as failure:
                self._fail(update, failure)
        elif error is not None:
            self.take_back(index)
            if not isinstance(error, StorageError):  # As in `_advance`.
                raise error
        elif update.is_done:
            self._checked_out.pop(index, None)
            self._to_make.pop(index, None)
            self._chunks.check_in(update, write_now=True)

    def _fail(self, update: UnitUpdate, error: BaseException) -> None:
        """Raises the error of a pending update, unless it is a drive's, which the next use of the
        unit raises."""
        self._is_feeding = False
        if update.is_begun:
            self.tear(error)
        if not isinstance(error, StorageError):
            raise error

    def _read_ahead(self) -> None:
        self._ring.start_more(self._to_read(), with_gradients=False)

    def _to_read(self) -> Iterator[Chunk]:
        """Chunks in the order in which they will be updated early; of planned units all of them."""
        for update in self._to_make.values():
            yield from update.left
        for index in self._to_come:
            yield from self._all_chunks(self._units[index])

    # -- The decision ------------------------------------------------------------------------------

    def decide(self, record: StepRecord) -> set[int]:
        """Takes early updates back that are not what the step decided, and publishes what the
        others have written. Returns their units. Those that are not DONE are pending, with their
        weights checked out."""
        self.take_back_others(record)
        kept = set()
        for index, update in self._early.items():
            if not update.is_begun:
                self._drop_unbegun(update)
                continue
            kept.add(index)
            update.record = record
            self._undecided.publish(update.unit)
            self._cache.write_to(index, None)
            if update.is_done:
                self._bring_home(update.unit)
            else:
                self.make_pending(update)
        self._updated = {}
        self.end_step(record, kept)
        self._is_feeding = self._can_feed
        return kept

    def _bring_home(self, unit: Unit) -> None:
        """Makes what a published update has written the unit's state: all of it is updated, and its
        weights are checked in."""
        self._undecided.bring_home(unit)
        self._undecided.free(unit)

    def _drop_unbegun(self, update: UnitUpdate) -> None:
        self._chunks.check_in(update, write_now=False)  # If the worker has them.
        self._end_undecided(update.unit)

    @override
    def _stop(self, taken_back: Sequence[UnitUpdate]) -> None:
        with contextlib.ExitStack() as stack:  # One failure does not keep the others from ending.
            for update in taken_back:
                stack.callback(self._stop_one, update)
            stack.callback(self._gradients.end_readers)  # First.

    def _stop_one(self, update: UnitUpdate) -> None:
        unit, index = update.unit, update.unit.index
        for others in (self._to_make, self._checked_out, self._planned, self._to_come):
            others.pop(index, None)
        self._ring.drop_reads(lambda chunk: chunk.unit.index == index)
        if not update.is_begun:
            self._drop_unbegun(update)
            return
        self._note_undone(1)
        with contextlib.ExitStack() as stack:  # The old state counts, whatever becomes of the new.
            stack.callback(self._end_undecided, unit)
            stack.callback(self._cache.discard, index)
            stack.callback(self._chunks.drop, update)
            self._ring.finish_writes()

    def _end_undecided(self, unit: Unit) -> None:
        self._cache.write_to(unit.index, None)
        self._undecided.drop(unit)
        self._undecided.free(unit)

    @override
    def _forget(self) -> None:
        super()._forget()
        self._to_make, self._to_come = {}, {}
        going_on = self.pending if self.has_worker else {}
        self._checked_out = {i: u for i, u in self._checked_out.items() if i in going_on}

    # -- Memory ------------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Gives memory back unless an update is running: weights that the worker has, the ring's
        block, with what was read ahead, or weights of an early update that is under way."""
        if self.is_applying:
            return False
        self._gradients.end_readers()
        return self._release_pending() or self._ring.give_up() or self._release_early()

    def _release_pending(self) -> bool:
        """Gives back weights of a pending unit that the worker has. Returns whether there were
        any. The rest of an update that has begun is made, if it can be made now."""
        for index, update in list(self._checked_out.items()):
            if index not in self.pending:
                continue
            if not update.is_begun:
                del self._checked_out[index]
                self._chunks.check_in(update, write_now=False)
                return True
            if self._ring.is_taken and self.torn is None:
                self.apply(index, is_needed=False)
                return True
        return False

    def _release_early(self) -> bool:
        """Gives back weights of early updates between two chunks, or a block for the new state of
        the last early update. Returns whether there was any."""
        out = self._early_out()
        if self._is_advancing:
            return not out and self._undecided.give_back()
        for index in out:
            self.take_back(index)
            return True
        return self._release_last()

    # -- Waits -------------------------------------------------------------------------------------

    @override
    def _waited_s(self) -> float:
        """Beside a device also for updates."""
        return super()._waited_s() + self._made_s
