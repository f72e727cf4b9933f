"""Collective operations between the devices of all ranks, begun in one order.

A rank proposes an operation. A thread of this object issues the operations of the agreed log in its
order, without a message; what a rank does not propose is issued by a stand-in. A proposal that the
log lacks is cancelled: the rank requests the data from each owner. What ranks wanted in a step is
the next log (`order.py`); the first one is empty. The thread only issues operations; the device
orders them. No rank enters a collective operation that another rank does not enter, so ranks may
take different paths through the model.

Gathers and sums have a process group each, so that a gather does not wait behind a sum. One thread
issues the operations of both, in one order: NCCL wants the order over all communicators of a device
to be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from infinity.distributed.collective.order import (
    AgreedLog,
    Key,
    Report,
    next_log,
    report_of,
)
from infinity.distributed.collective.process_groups import DeviceGroups, GroupOperations, operating
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters
from infinity.tiers.device import Copy

# After this a rank asks the others to play the log up to what it waits for: another rank may be in
# a barrier of the program, which this rank does not reach while it waits.
PATIENCE_S = 10.0
_LOOK_S = 0.02
_POLL_S = 0.001
_WATCH_S = 0.5  # A thread that waits in an operation notices within this time that a rank is gone.
# NCCL may be making a communicator, which waits for a rank that is gone and which no abort reaches.
_GIVE_UP_S = 5.0
_PLAY = struct.Struct("<IQ")  # Step of the log, and the number of entries to issue.


class Proposal:
    """An operation that this rank is ready for: `act` issues it. Made by `Collectives`."""

    def __init__(self, key: Key, act: Callable[[], Copy | None], size: int = 0) -> None:
        self.key = key
        self.size = size  # See order.LogEntry.
        self.act: Callable[[], Copy | None] | None = act
        self.is_issued = False
        self.is_cancelled = False  # This rank takes the host path.
        self.is_needed = True  # Unless this rank took it back itself.
        self.index: int | None = None  # Of its entry in the log.


class Collectives:
    """Proposes collective operations and begins them. The training thread proposes.

    `groups` have the backend of the ranks' devices. `open` follows the constructor. `gathers`,
    `sums` and `node_gathers` (None without that group) are the operations of each group.
    """

    def __init__(
        self,
        transport: PeerTransport,
        groups: DeviceGroups,
        counters: Counters,
        begin_thread: Callable[[], None],
    ) -> None:
        """`begin_thread`: see `DeviceAdapter.begin_thread`."""
        self._transport = transport
        self._groups = groups
        told = partial(operating, groups, transport)
        self.gathers = GroupOperations(groups.gathers, transport.count, told)
        self.sums = GroupOperations(groups.sums, transport.count, told)
        self.node_gathers: GroupOperations | None = None
        if groups.node_gathers is not None:
            of_node = groups.node_gathers
            self.node_gathers = GroupOperations(of_node, of_node.size(), told)
        self._begin_thread = begin_thread
        self._counters = counters
        self._changed = threading.Condition()  # Guards all that follows.
        self._pending: dict[Key, Proposal] = {}
        self._begun: queue.SimpleQueue[Proposal | None] = queue.SimpleQueue()
        self._num_begun = 0  # In the queue, or about to be issued.
        self._step = 0
        self._error: BaseException | None = None  # Of the thread that carries out what is begun.
        self._trial: Callable[[], Sequence[Copy]] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._proposals: list[Proposal] = []  # Of this rank in this step, in order.
        self._log = AgreedLog(())
        self._log_step = 0
        self._aside: AgreedLog | None = None  # The log of the next step, see `set_aside`.
        self._played = (0, 0)  # Step, and entries that another rank wants to be issued.
        self._stand_ins: dict[int, Callable[[Key, int], Copy]] = {}  # By kind.
        self._unanimous: set[int] = set()  # Kinds that are of no use without every rank.
        # Operations of a log that other ranks may not have entered yet, with the log's step. Of the
        # thread.
        self._under_way: deque[tuple[int, Copy]] = deque()
        self._waits_since_s = 0.0
        self._patience_s: float | None = None  # None: PATIENCE_S.

    def try_first(self, act: Callable[[], Sequence[Copy]]) -> None:
        """Gives the operations that `open` tries. `act` issues operations of every kind, of the
        least and of the most bytes."""
        self._trial = act

    def open(self) -> None:
        """Checks that the backend works, and starts the thread. Called after the transport is open.

        Backends connect devices in the first operation of a kind and size, which waits for all
        ranks. It runs here, where all ranks come, and not in the middle of a step. Raises
        InfinityError.
        """
        trial = Proposal((0, 0, 0), self._try)
        self._num_begun += 1
        self._begun.put(trial)
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        self._thread.start()
        with self._changed:
            self._wait(lambda: trial.is_issued)

    def _try(self) -> None:
        copies = [] if self._trial is None else self._trial()
        for copy in copies:
            self.await_copy(copy)
            copy.wait()  # Raises what has failed.

    def close(self) -> None:
        """Issues the rest of the log, which the threads of the other ranks do then too, and ends
        the thread.

        Aborts operations that wait for a rank that is gone. Called before the transport closes.
        Idempotent. A thread that an abort does not release is given up, and ends with the process.
        """
        if self._thread is None or self._is_closed:
            return
        is_own = self._thread is threading.current_thread()  # Of a garbage collector's choice.
        with contextlib.suppress(InfinityError):
            with self._changed:
                if self._log.entries:
                    self._ask_to_play(len(self._log.entries))
            if not is_own:
                self.end_step()
        self._is_closed = True
        self._begun.put(None)
        end_s = float("inf")
        while not is_own and self._thread.is_alive() and time.monotonic() < end_s:
            self._thread.join(_WATCH_S)
            if self._transport.is_broken:
                self._groups.abort()
                end_s = min(end_s, time.monotonic() + _GIVE_UP_S)
        if self._transport.is_broken:
            self._groups.abort()

    # -- Proposals ---------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether operations are proposed in this step. The same on all ranks."""
        return self._aside is None  # GIL: the training thread alone changes it.

    def stand_in(
        self, kind: int, act: Callable[[Key, int], Copy], *, is_unanimous: bool = False
    ) -> None:
        """Gives the operation of this rank for an entry of the log that it has not proposed, from
        the entry's key and size. `is_unanimous`: the kind is of no use without every rank."""
        self._stand_ins[kind] = act
        if is_unanimous:
            self._unanimous.add(kind)

    def propose(self, key: Key, act: Callable[[], Copy | None], *, size: int = 0) -> Proposal:
        """Proposes an operation. Another thread calls `act` in the order of the log.

        Everything that `act` needs stays unchanged until the proposal is answered. `size`: less
        than 2**64, what a stand-in needs to know beside the key.
        """
        assert self.is_on and key not in self._pending
        self._check()
        proposal = Proposal(key, act, size)
        with self._changed:
            self._proposals.append(proposal)
            proposal.index = self._log.bind(key)
            if proposal.index is None:
                self._cancel(proposal)
            else:
                self._pending[key] = proposal
                self._play()
        return proposal

    def settle(self, proposal: Proposal, *, is_patient: bool = True) -> bool:
        """Returns whether the operation was issued; otherwise it was cancelled.

        Issues the log up to it; without `is_patient` takes back what is not issued. Raises
        RankError.
        """
        with self._changed:
            proposal.is_needed = is_patient
            if self._pending.get(proposal.key) is proposal:
                if is_patient:
                    self._log.await_proposal(proposal.key)
                    self._play()
                else:
                    self._log.release(proposal.key)
                    proposal.index = None
                    self._cancel(self._pending.pop(proposal.key))
            self._wait(lambda: proposal.is_issued or proposal.is_cancelled)
        return proposal.is_issued

    def end_step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Issues the log, and waits until everything that this rank has proposed is issued.

        This rank proposes nothing more in this step. `meanwhile` is called during the wait.
        """
        if self.is_on:
            with self._changed:
                self._play(len(self._log.entries))
                self._step += 1
            while not self._is_idle(_LOOK_S):
                if meanwhile is not None:
                    meanwhile()

    def end_log(self) -> None:
        """Issues the rest of the log, because weights change before the step ends. All ranks call
        it."""
        with self._changed:
            self._play(len(self._log.entries))
            self._wait(lambda: not self._num_begun)

    def _play(self, number: int = 0) -> None:
        """Hands entries of the log to the thread, with the lock: those that may be issued, and all
        before `number`."""
        self._log.require(number)
        for entry, is_proposed in self._log.issue():
            if is_proposed:
                proposal = self._pending.pop(entry.key)
                self._counters.add("ranks_collectives", 1)
            else:
                act = partial(self._stand_ins[entry.key[0]], entry.key, entry.size)
                proposal = Proposal(entry.key, act)
                self._counters.add("ranks_stand_ins", 1)
            self._num_begun += 1
            self._begun.put(proposal)

    def _cancel(self, proposal: Proposal) -> None:
        proposal.act, proposal.is_cancelled = None, True
        self._counters.add("ranks_cancelled", 1)

    def _is_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._wait(lambda: not self._pending and not self._num_begun, timeout_s)

    def _wait(self, is_reached: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        """Waits with the lock held. Raises as `_check`."""
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(min(left_s, _LOOK_S))
            self._check()
        return True

    def _check(self) -> None:
        """Raises the error with which the thread of this rank ended, as it is if the package
        raised it: a caller may know what to do about a StorageError. Raises RankError if another
        rank is gone."""
        error = self._error
        if isinstance(error, InfinityError) and not isinstance(error, RankError):
            raise error.with_traceback(None)
        self._transport.check()
        if error is not None:
            raise InfinityError(f"between devices of ranks: {error}") from error

    # -- The next log ------------------------------------------------------------------------------

    def decision(self) -> bytes:
        """Returns what all ranks receive for `sync_weights`: the `Report` of this rank. Empty on
        all ranks where they propose nothing."""
        if not self.is_on:
            return b""
        with self._changed:
            known = [p for p in self._proposals if p.is_needed or p.index is not None]
            proposals = [(p.key, p.size, p.index) for p in known]
            return report_of(self._log.entries, self._log.missed, proposals, self._step).encode()

    def sync_weights(self, decisions: Sequence[bytes]) -> None:
        """Makes the log of the next step from the decisions of all ranks: what they wanted in this
        step."""
        with self._changed:
            if self._aside is not None:
                self._log, self._aside = self._aside, None
            else:
                reports = [Report.decode(content) for content in decisions]
                entries = next_log(self._log.entries, reports, self._unanimous)
                self._log, self._log_step = AgreedLog(entries), self._step
                self._patience_s = None
                self._proposals.clear()
            self._play_asked()

    def set_aside(self) -> None:
        """Keeps the choice of `sync_weights` for its next call: the step has yet to be made. Until
        then this rank proposes nothing. All ranks call it."""
        with self._changed:
            self._log, self._aside = AgreedLog(()), self._log

    def on_message(self, content: bytes) -> None:
        """Takes a control message of another rank, in the thread that serves that rank."""
        with self._changed:
            self._played = max(self._played, _PLAY.unpack(content))
            self._play_asked()

    def _ask_to_play(self, number: int) -> None:
        """Asks all ranks to issue the entries of the log before `number`, with the lock."""
        for rank in range(self._transport.count):
            if rank != self._transport.rank:
                self._counters.add("ranks_control_messages", 1)
                self._transport.tell(rank, _PLAY.pack(self._log_step, number))

    def _play_asked(self) -> None:
        step, number = self._played
        if step == self._log_step:
            self._play(number)

    # -- Operations --------------------------------------------------------------------------------

    # INV-22: operations begin in the order of the log.
    def _run(self) -> None:
        try:
            self._begin_thread()
            while self._issue_next():
                pass
        except BaseException as error:
            self._error = error  # The links take no word when all others have left.
            if not isinstance(error, RankError):  # Else the links know of it.
                self._transport.abort(f"{type(error).__name__}: {error}")
            self._groups.abort()

    def _issue_next(self) -> bool:
        """Issues the next operation, if one comes soon. Returns whether another one may come."""
        self._watch()
        try:
            proposal = self._begun.get(timeout=min(_WATCH_S, PATIENCE_S))
        except queue.Empty:
            if self._transport.is_broken:
                self._groups.abort()
            return not self._transport.is_broken
        if proposal is None:
            return False
        assert proposal.act is not None
        copy = proposal.act()
        with self._changed:
            # No other log takes its place before `_num_begun` falls.
            if copy is not None:
                if not self._under_way:
                    self._waits_since_s = time.monotonic()
                self._under_way.append((self._log_step, copy))
            proposal.act, proposal.is_issued = None, True
            self._num_begun -= 1
            self._changed.notify_all()
        return True

    def await_copy(self, copy: Copy) -> None:
        """Waits until an operation of the log is over on the device. For stand-ins, in the thread
        that issues operations. Raises RankError."""
        while not _is_over(copy):
            self._watch()
            self._transport.check()
            time.sleep(_POLL_S)

    def _watch(self) -> None:
        """Asks the ranks to play if an operation of the log waits for one of them: its training
        thread may wait elsewhere for this rank."""
        now_s = time.monotonic()
        while self._under_way and _is_over(self._under_way[0][1]):
            self._under_way.popleft()
            self._waits_since_s = now_s
        patience_s = PATIENCE_S if self._patience_s is None else self._patience_s
        if self._under_way and now_s - self._waits_since_s > patience_s:
            with self._changed:
                # One of an earlier log has been issued by all ranks: it is only slow.
                if self._under_way[0][0] == self._log_step:
                    self._patience_s, self._waits_since_s = _WATCH_S, now_s
                    self._ask_to_play(self._log.head)


def _is_over(copy: Copy) -> bool:
    """Whether the copy is done, or has failed: whoever waits for its result gets the error."""
    try:
        return copy.done()
    except Exception:
        return True
