"""The thread that issues collective operations, in the order in which it gets them.

The thread only issues operations; the device orders them. It notices a rank that is gone, and an
operation that waits for a rank whose training thread may wait elsewhere for this one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from infinity.distributed.collective.order import Key, Verb
from infinity.distributed.collective.process_groups import DeviceGroups
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import RankError
from infinity.tiers.device import Copy

# A rank withdraws its proposal after this: another rank may be in a barrier of the program, which
# this rank does not reach while it waits. It waits once for that rank, until that rank is back.
PATIENCE_S = 10.0
WATCH_S = 0.5  # A thread that waits in an operation notices within this time that a rank is gone.
_POLL_S = 0.001
# NCCL may be making a communicator, which waits for a rank that is gone and which no abort reaches.
_GIVE_UP_S = 5.0


class Proposal:
    """An operation that this rank is ready for: `act` issues it. Made by `Collectives`."""

    def __init__(self, key: Key, act: Callable[[], Copy | None], size: int = 0) -> None:
        self.key = key
        self.size = size  # See order.LogEntry.
        self.act: Callable[[], Copy | None] | None = act
        self.answer: Verb | None = None
        self.is_issued = False
        self.is_needed = True  # Unless this rank took it back itself.
        self.index: int | None = None  # Of its entry in the log, or in what began.

    @property
    def is_cancelled(self) -> bool:
        """Whether the operation was cancelled: some rank takes the host path."""
        return self.answer is Verb.CANCEL


class Issuer:
    """Issues proposals of this rank and of stand-ins, in one thread.

    `changed` guards `num_left` and proposals, and is told of every operation. `hurry` is called
    in the thread when an operation of the log, given by its step, waits long for other ranks; it
    returns whether these were asked to issue theirs. `begin_thread`: see
    `DeviceAdapter.begin_thread`.
    """

    def __init__(
        self,
        transport: PeerTransport,
        groups: DeviceGroups,
        changed: threading.Condition,
        begin_thread: Callable[[], None],
        hurry: Callable[[int], bool],
    ) -> None:
        self._transport = transport
        self._groups = groups
        self._changed = changed
        self._begin_thread = begin_thread
        self._hurry = hurry
        self.num_left = 0  # In the queue, or about to be issued.
        self.error: BaseException | None = None  # With which the thread has ended.
        # A proposal, and the step of the log that it belongs to; None without a log.
        self._queue: queue.SimpleQueue[tuple[Proposal, int | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        # Operations of a log that other ranks may not have entered yet. Of the thread.
        self._under_way: deque[tuple[int, Copy]] = deque()
        self._waits_since_s = 0.0
        self._hurried: int | None = None  # The log whose ranks were asked last.

    def put(self, proposal: Proposal, log_step: int | None) -> None:
        """Queues an operation. With `changed` held. No other log takes the place of that of
        `log_step` before `num_left` falls."""
        self.num_left += 1
        self._queue.put((proposal, log_step))

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Ends the thread behind what is queued, and aborts operations that wait for a rank that is
        gone. A thread that an abort does not release is given up, and ends with the process."""
        self._queue.put(None)
        end_s = float("inf")
        while not self.is_current and self._thread.is_alive() and time.monotonic() < end_s:
            self._thread.join(WATCH_S)
            if self._transport.is_broken:
                self._groups.abort()
                end_s = min(end_s, time.monotonic() + _GIVE_UP_S)
        if self._transport.is_broken:
            self._groups.abort()

    def await_copy(self, copy: Copy) -> None:
        """Waits until an operation of the log is over on the device. In the thread, for stand-ins.
        Raises RankError."""
        while not _is_over(copy):
            self._watch()
            self._transport.check()
            time.sleep(_POLL_S)

    # INV-22: operations begin in the order of the coordinator.
    def _run(self) -> None:
        try:
            self._begin_thread()
            while self._issue_next():
                pass
        except BaseException as error:
            self.error = error  # The links take no word when all others have left.
            if not isinstance(error, RankError):  # Else the links know of it.
                self._transport.abort(f"{type(error).__name__}: {error}")
            self._groups.abort()

    def _issue_next(self) -> bool:
        """Issues the next operation, if one comes soon. Returns whether another one may come."""
        self._watch()
        try:
            item = self._queue.get(timeout=min(WATCH_S, PATIENCE_S))
        except queue.Empty:
            if self._transport.is_broken:
                self._groups.abort()
            return not self._transport.is_broken
        if item is None:
            return False
        proposal, log_step = item
        assert proposal.act is not None
        copy = proposal.act()
        if copy is not None and log_step is not None:
            if not self._under_way:
                self._waits_since_s = time.monotonic()
            self._under_way.append((log_step, copy))
        with self._changed:
            proposal.act, proposal.is_issued = None, True
            self.num_left -= 1
            self._changed.notify_all()
        return True

    def _watch(self) -> None:
        """Has the ranks asked to go on if an operation of the log waits for one of them."""
        now_s = time.monotonic()
        while self._under_way and _is_over(self._under_way[0][1]):
            self._under_way.popleft()
            self._waits_since_s = now_s
        if not self._under_way:
            return
        log_step = self._under_way[0][0]
        patience_s = WATCH_S if self._hurried == log_step else PATIENCE_S
        if now_s - self._waits_since_s > patience_s and self._hurry(log_step):
            self._hurried, self._waits_since_s = log_step, now_s


def _is_over(copy: Copy) -> bool:
    """Whether the copy is done, or has failed: a wait for its result raises the error."""
    try:
        return copy.done()
    except Exception:
        return True
