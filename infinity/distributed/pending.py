"""The shards that await the update of the last step.

After `optimizer.step()` a thread of this rank updates the shards, one at a time
(`shard_updates.py`). Every other thread that needs a shard waits here until that shard is updated:
the threads that serve other ranks, the thread of the own shard, and the training thread. The
updating thread waits for drives only, never for another rank or for the engine's lock. Every wait
here therefore ends, whatever the other ranks do (docs/design/0015-deferred-over-ranks.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from infinity.errors import InfinityError


class PendingShards:
    """The pending shards by unit index, in the order of their updates. Thread-safe.

    The training thread adds shards, one thread takes them, any thread waits for them. A shard that
    some thread waits for comes first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # Guards all that follows.
        self._order: dict[int, None] = {}
        self._wanted: deque[int] = deque()
        self._is_resting = True  # Nothing is pending, and all writes of updates are over.
        self._failure: BaseException | None = None
        self._is_closed = False

    # -- Training thread ---------------------------------------------------------------------------

    def add(self, shards: Iterable[int]) -> None:
        """Makes shards pending. None is pending before."""
        with self._changed:
            assert not self._order and not self._is_closed
            self._order = dict.fromkeys(shards)
            self._wanted.clear()
            self._is_resting = not self._order
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the updates after the one that runs. Waits for pending shards raise from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- Any thread --------------------------------------------------------------------------------

    @property
    def are_resting(self) -> bool:
        """Whether no shard is pending and every updated shard is where it rests."""
        return self._is_resting

    def is_pending(self, shard: int) -> bool:
        """Whether the shard awaits its update."""
        return shard in self._order

    def check(self) -> None:
        """Raises InfinityError if an update has failed."""
        if self._failure is not None:
            raise self._error()

    def await_update(self, shard: int) -> None:
        """Waits until the shard is updated. Raises InfinityError if it will never be."""
        if shard not in self._order:
            return
        with self._changed:
            self._wanted.append(shard)
            self._changed.wait_for(lambda: shard not in self._order or self._is_over())
            if shard in self._order:
                raise self._error()

    def await_all(self) -> None:
        """Waits until every shard is updated and is where it rests. Raises InfinityError if some
        shard never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_resting or self._is_over())
            if not self._is_resting:
                raise self._error()

    def _is_over(self) -> bool:
        return self._failure is not None or self._is_closed

    def _error(self) -> InfinityError:
        if self._failure is None:
            return InfinityError(
                "this rank has closed its engine while weights awaited their update"
            )
        cause = str(self._failure) or type(self._failure).__name__
        error = InfinityError(
            "an update after optimizer.step() has failed, so the parameters are a mixture of two "
            f"steps; start again from a checkpoint. The cause was: {cause}"
        )
        error.__cause__ = self._failure
        return error

    # -- The updating thread -----------------------------------------------------------------------

    def take(self) -> int | None:
        """Returns the shard to update next, which stays pending; None if there is none."""
        with self._changed:
            if self._is_closed:
                return None
            while self._wanted:
                shard = self._wanted.popleft()
                if shard in self._order:
                    return shard
            return next(iter(self._order), None)

    def upcoming(self, but: int) -> Iterator[int]:
        """Yields the pending shards without one, in order. For the updating thread."""
        return (shard for shard in self._order if shard != but)

    def note_updated(self, shard: int) -> None:
        """Marks a shard as updated: reads of its state see the new one."""
        with self._changed:
            del self._order[shard]
            self._changed.notify_all()

    def await_more(self) -> bool:
        """Marks all writes as over, then waits for the next shards. Returns whether there are
        some; False after `close`."""
        with self._changed:
            self._is_resting = not self._order
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._order or self._is_closed)
            return not self._is_closed

    def fail(self, error: BaseException) -> None:
        """Ends the updates: what is pending stays pending, and every wait for it raises."""
        with self._changed:
            self._failure = error.with_traceback(None)
            self._changed.notify_all()
