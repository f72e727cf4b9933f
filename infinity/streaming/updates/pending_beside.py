"""Pending updates that the worker makes while the model's own code runs on a device.

The thread that trains checks weights out, those that are needed next; the worker updates them.
`worker.py` has the thread, `updater.py` what is pending.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from infinity.errors import StorageError
from infinity.state.store import Transfer
from infinity.state.units import Chunk
from infinity.streaming.updates.record import UpdatedWeights
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate
from infinity.streaming.updates.worker import MOST_CHECKED_OUT, LooseWork
from infinity.streaming.weights.cache import WeightCache
from infinity.streaming.weights.eviction import ByNextUse


class PendingBeside:
    """The pending updates whose weights the worker has, in the order in which it makes them. Under
    the engine's lock.

    pending: all of them by unit; the owner changes them
    in_order: the same, by their next uses
    following: returns the chunks that are read ahead, in the order of their updates
    ended: is told of an update whose chunks are all updated, and whose weights are checked in
    torn: is told why an update has stopped between its chunks
    """

    def __init__(
        self,
        pending: Mapping[int, UnitUpdate],
        in_order: ByNextUse,
        weight_cache: UpdatedWeights,
        chunks: ChunkUpdates,
        ring: StagingRing,
        following: Callable[[], Iterator[Chunk]],
        ended: Callable[[UnitUpdate], None],
        torn: Callable[[BaseException], None],
    ) -> None:
        self._pending = pending
        self.in_order = in_order
        self._weight_cache = weight_cache
        self._chunks = chunks
        self._ring = ring
        self._following = following
        self._ended = ended
        self._torn = torn
        self._updates: list[UnitUpdate] = []
        self.is_feeding = False  # Whether the worker makes pending updates.

    def add(self, update: UnitUpdate) -> None:
        """The worker goes on with an update that it has begun early."""
        self._updates.append(update)

    def clear(self) -> None:
        """Nothing is pending."""
        self._updates.clear()

    def _has(self, update: UnitUpdate) -> bool:
        """Whether the update is still to be made, with the weights that were checked out."""
        return self._pending.get(update.unit.index) is update and update.weights is not None

    def feed(self) -> bool:
        """Checks weights of pending units out for the worker, those that are needed next. Returns
        whether the worker has any. On the thread that trains."""
        weight_cache = self._weight_cache
        assert isinstance(weight_cache, WeightCache), "ranks update at the step, or beside it"
        self._updates = list(filter(self._has, self._updates))
        for unit in list(islice(self.in_order.soonest(), 2 * MOST_CHECKED_OUT)):
            update = self._pending[unit]
            if len(self._updates) == MOST_CHECKED_OUT:
                break
            if update.weights is None and weight_cache.can_check_out(update.unit.index):
                self._chunks.check_out(update)
                self._updates.append(update)
        return bool(self._updates)

    def first(self) -> UnitUpdate | None:
        """Returns the update that the worker's next turn is for, if there is one."""
        return next(filter(self._has, self._updates), None) if self.is_feeding else None

    def turn_of(self, update: UnitUpdate) -> Sequence[Transfer] | LooseWork | None:
        """A turn of the worker, see `UpdateWorker`."""
        try:
            with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
                if self._ring.take(or_none=True):
                    self._ring.start_more(self._following())
            work = self._chunks.try_next(update, partial(self._end_chunk, update))
        except BaseException as error:
            self._fail(update, error)
            return None
        return self._ring.awaited(update.left[0]) if work is None else work

    def _end_chunk(self, update: UnitUpdate, error: BaseException | None) -> None:
        if error is not None:
            self._fail(update, error)
        elif update.is_done:
            try:
                self._chunks.check_in(update, write_now=True)
                self._ended(update)
            except BaseException as failure:
                self._fail(update, failure)

    def _fail(self, update: UnitUpdate, error: BaseException) -> None:
        """Raises the error, unless it is a drive's: who needs the unit next meets that, and tells
        it."""
        self.is_feeding = False
        if update.is_begun:
            self._torn(error)
        if not isinstance(error, StorageError):
            raise error

    def release(self, finish: Callable[[int], bool]) -> bool:
        """Gives back weights that are checked out for the worker. Returns whether there were any.
        `finish` makes the rest of an update that has begun, and returns whether it did."""
        for update in filter(self._has, self._updates):
            if not update.is_begun:
                self._chunks.check_in(update, write_now=False)
                return True
            if finish(update.unit.index):
                return True
        return False
