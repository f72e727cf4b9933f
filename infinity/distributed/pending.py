"""The shards that await the update of the last step, and those that are updated before the next.

After `optimizer.step()` a thread of this rank updates the shards, one at a time
(`shard_updates.py`). Every other thread that needs a shard waits here until that shard is updated:
the threads that serve other ranks, the thread of the own shard, and the training thread. The
updating thread waits for drives only, never for another rank or for the engine's lock. Every wait
here therefore ends, whatever the other ranks do (docs/design/0003-updates.md).

While it has nothing else to read, the thread may read the state of *expected* shards: of those that
it will probably update in the next backward or after the next step.

In the backward the same thread updates shards *early*, before the step has decided:

  early shard   the thread                     next
  QUEUED        may have read chunks ahead     RUNNING, withdrawn, pending (the step decides)
  RUNNING       updates it, undecided          DONE, withdrawn, pending and goes on
  DONE          none of it                     withdrawn, kept (the step decides)

Nobody waits for an early shard: until the decision its bytes are those of the last step.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable

from infinity.errors import InfinityError


class PendingShards:
    """The pending shards by unit index, in the order of their updates, and the early ones.
    Thread-safe.

    The training thread adds shards, one thread takes them, any thread waits for pending ones. A
    shard that some thread waits for comes first; early shards come last, the newest of them first:
    the forward needs it first. What the backward does not get to is what the forward needs late.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # Guards all that follows.
        self._order: dict[int, None] = {}
        self._wanted: deque[int] = deque()
        self._early: dict[int, None] = {}  # QUEUED or RUNNING, in order.
        self._done: set[int] = set()  # Early and DONE.
        self._running: int | None = None  # Which the thread updates.
        # Their state may be read before anything else of their next updates is there, in order.
        self._expected: dict[int, None] = {}
        self._is_expected_anew = False
        # No more early or expected, and the thread may have something of it.
        self._stale: set[int] = set()
        self._num_changes: Counter[int] = Counter()  # Beginnings and ends of other changes.
        self.are_resting = True  # Nothing is pending, and all writes of updates are over.
        self.is_idle = True  # The same with early updates.
        self._failure: BaseException | None = None
        self._is_closed = False

    # -- Training thread ---------------------------------------------------------------------------

    def add(self, shards: Iterable[int]) -> tuple[set[int], set[int]]:
        """Makes shards pending; none is pending before. Early shards are as the step has decided;
        others were withdrawn. Returns those that are DONE, which are not pending, and the one that
        is RUNNING, which is pending and goes on."""
        with self._changed:
            assert not self._order and not self._is_closed
            done = set(self._done)
            running = {shard for shard in self._early if shard == self._running}
            self._order = {shard: None for shard in shards if shard not in done}
            assert running <= self._order.keys()
            self._wanted.clear()
            self._early.clear()
            self._done.clear()
            self.is_idle = self.is_idle and not self._order
            self.are_resting = self.is_idle
            self._changed.notify_all()
            return done, running

    def add_early(self, shard: int) -> None:
        """Queues a shard for an update that no step has decided. It is not pending."""
        with self._changed:
            assert shard not in self._order and shard not in self._done
            self._expected.pop(shard, None)
            self._early[shard] = None
            self.is_idle = False
            self._changed.notify_all()

    def withdraw(self, shards: Iterable[int]) -> set[int]:
        """Makes shards early no more. Returns those whose update had begun. Waits until the thread
        has dropped what it has of them."""
        with self._changed:
            back = {shard for shard in shards if shard in self._early or shard in self._done}
            begun = {shard for shard in back if shard in self._done or shard == self._running}
            self._stale |= back - self._done
            self._done -= back
            for shard in back:
                self._early.pop(shard, None)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._stale & back or self._is_over())
            return begun

    def expect(self, shards: Iterable[int]) -> None:
        """The thread may read the state of these shards, in this order, while it has nothing else
        to read. Their updates come later, if at all."""
        with self._changed:
            before, self._expected = self._expected, dict.fromkeys(shards)
            self._stale |= before.keys() - self._expected.keys() - self._order.keys()
            self._is_expected_anew = True
            self.is_idle = False
            self._changed.notify_all()

    def forget_expected(self, shards: Iterable[int] | None = None) -> None:
        """The state of these shards may change, of all without `shards`: it is not read ahead any
        more. Waits until the thread has dropped what it has of them."""
        with self._changed:
            back = self._expected.keys() & (self._expected if shards is None else set(shards))
            for shard in back:
                del self._expected[shard]
            # What was pending since has been read for its update.
            self._stale |= back - self._order.keys()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._stale & back or self._is_over())

    def close(self) -> None:
        """Ends the updates after the one that runs. Waits for pending shards raise from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- Any thread --------------------------------------------------------------------------------

    def is_pending(self, shard: int) -> bool:
        """Whether the shard awaits its update."""
        return shard in self._order  # GIL: one look-up. Only the training thread adds.

    def is_read(self, shard: int) -> bool:
        """Whether the thread may read gradients of the shard: it awaits its update, or is early and
        not DONE."""
        with self._changed:  # `add` moves shards between them.
            return shard in self._order or shard in self._early or shard in self._stale

    def note_change(self, shard: int) -> None:
        """The shard's weights are about to be set, or were set: an early update that has begun is
        not kept."""
        with self._changed:
            self._num_changes[shard] += 1

    def num_changes(self, shard: int) -> int:
        """Returns how often `note_change` was called."""
        with self._changed:
            return self._num_changes[shard]

    def check(self) -> None:
        """Raises InfinityError if an update has failed."""
        if self._failure is not None:  # GIL: set once, and never changed.
            raise self._error()

    def await_update(self, shard: int) -> None:
        """Waits until the shard is updated. Raises InfinityError if it will never be."""
        if shard not in self._order:  # GIL: as in `is_pending`. Most uses find nothing pending.
            return
        with self._changed:
            self._wanted.append(shard)
            self._changed.wait_for(lambda: shard not in self._order or self._is_over())
            if shard in self._order:
                raise self._error()

    def await_all(self) -> None:
        """Waits until every pending shard is updated and is where it rests. Raises InfinityError if
        some shard never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self.are_resting or self._is_over())
            if not self.are_resting or self._failure is not None:
                raise self._error()

    def await_idle(self) -> None:
        """As `await_all`, and waits for early updates, too."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle or self._is_over())
            if not self.is_idle:
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
            "an update during training has failed, so the parameters may be a mixture of two "
            f"steps; start again from a checkpoint. The cause was: {cause}"
        )
        error.__cause__ = self._failure
        return error

    # -- The updating thread -----------------------------------------------------------------------

    def take(self) -> int | None:
        """Returns the shard to update next, which stays pending, or early; None if there is none,
        or if writes of pending ones are to be finished first."""
        with self._changed:
            self._running = self._next()
            return self._running

    def _next(self) -> int | None:
        if self._is_closed:
            return None
        while self._wanted:
            shard = self._wanted.popleft()
            if shard in self._order:
                return shard
        if self._order:
            return next(iter(self._order))
        return next(reversed(self._early), None) if self.are_resting else None

    def upcoming(self, but: int) -> list[int]:
        """Returns the pending shards, then the early ones, without one, in their order."""
        with self._changed:
            return [shard for shard in (*self._order, *reversed(self._early)) if shard != but]

    def expected(self) -> list[int]:
        """Returns the expected shards that are neither pending nor early, in order."""
        with self._changed:
            self._is_expected_anew = False
            return [shard for shard in self._expected if shard not in self._order]

    def note_updated(self, shard: int) -> None:
        """Marks a shard as updated: reads of its state see the new one."""
        with self._changed:
            del self._order[shard]
            self._running = None
            self._changed.notify_all()

    def end_early(self, shard: int, *, is_made: bool) -> bool:
        """Ends the early update of a shard. Returns whether the step has decided as expected in the
        meantime: then the shard is pending, and `note_updated` follows."""
        with self._changed:
            self._running = None
            if shard in self._order:
                return True
            if shard in self._early:
                del self._early[shard]
                if is_made:
                    self._done.add(shard)
            return False

    def stale(self) -> set[int]:
        """Returns the shards that were withdrawn. The thread drops what it has of them."""
        with self._changed:
            return set(self._stale)

    def goes_on(self, shard: int) -> bool:
        """Whether an early update is still wanted."""
        # GIL: two single reads. A shard that is withdrawn after them is waited for.
        return shard not in self._stale and not self._is_closed

    def note_dropped(self, shards: Iterable[int]) -> None:
        """Marks withdrawn shards as dropped."""
        with self._changed:
            self._stale.difference_update(shards)
            self._changed.notify_all()

    def await_next(self, timeout_s: float) -> None:
        """Waits until `take` has a shard, or something is to be dropped, for so long at most."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    (self._order or self._stale or (self._early and self.are_resting))
                    or self._is_closed
                ),
                timeout_s,
            )

    def await_more(self) -> bool:
        """Marks all writes as over, then waits for the next shards. Returns whether there are
        some; False after `close`."""
        with self._changed:
            self.are_resting = not self._order
            self.is_idle = not (self._order or self._early or self._is_expected_anew)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    (self._order or self._early or self._stale or self._is_expected_anew)
                    or self._is_closed
                )
            )
            return not self._is_closed

    def fail(self, error: BaseException) -> None:
        """Ends the updates: what is pending stays pending, and every wait for it raises."""
        with self._changed:
            self._failure = error.with_traceback(None)
            self._changed.notify_all()
