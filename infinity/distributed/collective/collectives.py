"""Collective operations between the devices of all ranks, begun in one order.

A rank proposes an operation. In lockstep a thread of this object issues the
operations of the agreed log in its order, without a message; what a rank does not propose is issued
by a stand-in. Without a log, the thread begins an operation when every rank has proposed it
(`order.py`), in the order that rank 0 decides. What ranks wanted in a step, with or without a
log, is the next log. The thread only issues operations; the device orders them. No rank enters a
collective operation that another rank does not enter, so ranks may take different paths through the
model. A rank whose proposal is cancelled requests the data from each owner.

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

import torch

from infinity.distributed.collective.order import (
    AgreedLog,
    Coordinator,
    Decision,
    Key,
    LogEntry,
    Report,
    Verb,
    next_log,
    report_of,
)
from infinity.distributed.collective.process_groups import DeviceGroups, GroupOperations, operating
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters
from infinity.tiers.device import Copy

# A rank withdraws its proposal after this: another rank may be in a barrier of the program, which
# this rank does not reach while it waits. It waits once for that rank, until that rank is back.
PATIENCE_S = 10.0
_LOOK_S = 0.02
_POLL_S = 0.001
_WATCH_S = 0.5  # A thread that waits in an operation notices within this time that a rank is gone.
# NCCL may be making a communicator, which waits for a rank that is gone and which no abort reaches.
_GIVE_UP_S = 5.0
# If what ranks proposed in a step makes no log, they propose nothing for some steps, twice as many
# every time.
_MOST_PAUSED = 64
# Nothing is fetched ahead of the first pass, which leaves weights on the device for the second one.
_FIRST_STEPS = 2
_WORD = struct.Struct("<BxxxIIIQ")  # verb, step, key
_NO_KEY: Key = (0, 0, 0)


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


class Collectives:
    """Proposes collective operations and begins them. The training thread proposes.

    `groups` have the backend of `device`. `open` follows the constructor. `gathers`, `sums` and
    `node_gathers` (None without that group) are the operations of each group.
    """

    def __init__(
        self,
        transport: PeerTransport,
        groups: DeviceGroups,
        device: torch.device,
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
        self._device = device
        self._begin_thread = begin_thread
        self._counters = counters
        self._coordinator = Coordinator(transport.count) if transport.rank == 0 else None
        self._changed = threading.Condition()  # Guards all that follows, and the coordinator.
        self._pending: dict[Key, Proposal] = {}
        self._begun: queue.SimpleQueue[Proposal | None] = queue.SimpleQueue()
        self._num_begun = 0  # In the queue, or about to be issued.
        self._step = 0
        self._paused_steps = 0
        self._pause = 1
        self._error: BaseException | None = None  # Of the thread that carries out what is begun.
        self._trial: Callable[[], Sequence[Copy]] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._proposals: list[Proposal] = []  # Of this rank in this step, in order.
        self._trace: list[LogEntry] = []  # What began in this step, without a log.
        self._log: AgreedLog | None = None
        self._log_step = 0
        self._aside: AgreedLog | None = None  # The log of the next step, see `set_aside`.
        self._is_aside = False
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
        trial = Proposal(_NO_KEY, self._try)
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
        """Withdraws all proposals, without waiting for other ranks, and ends the thread.

        With a log, issues the rest of it, which the threads of the other ranks do then too. Aborts
        operations that wait for a rank that is gone. Called before the transport closes.
        Idempotent. A thread that an abort does not release is given up, and ends with the process.
        """
        if self._thread is None or self._is_closed:
            return
        is_own = self._thread is threading.current_thread()  # Of a garbage collector's choice.
        with contextlib.suppress(InfinityError):
            with self._changed:
                for key in list(self._pending) if self._log is None else ():
                    self._send_message(Verb.WITHDRAW, key)
                if self._log is not None:
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
        # GIL: the training thread alone changes them.
        return self._paused_steps == 0 and not self._is_aside

    @property
    def is_in_lockstep(self) -> bool:
        """Whether a rank may stand in for a proposal in this step. The same on all ranks."""
        return self._log is not None  # GIL: the training thread alone changes it.

    def stand_in(
        self, kind: int, act: Callable[[Key, int], Copy], *, is_unanimous: bool = False
    ) -> None:
        """Gives the operation of this rank for an entry of the log that it has not proposed, from
        the entry's key and size. `is_unanimous`: the kind is of no use without every rank."""
        self._stand_ins[kind] = act
        if is_unanimous:
            self._unanimous.add(kind)

    def propose(self, key: Key, act: Callable[[], Copy | None], *, size: int = 0) -> Proposal:
        """Proposes an operation. Another thread calls `act` soon after every rank has proposed it.

        Everything that `act` needs stays unchanged until the proposal is answered. `size`: less
        than 2**64, what a stand-in needs to know beside the key.
        """
        assert self.is_on and key not in self._pending
        self._check()
        proposal = Proposal(key, act, size)
        with self._changed:
            self._pending[key] = proposal
            self._proposals.append(proposal)
            if self._log is None:
                self._send_message(Verb.PROPOSE, key)
            elif (index := self._log.bind(key)) is not None:
                proposal.index = index
                self._play()
            else:
                self._take(Verb.CANCEL, key)
        return proposal

    def settle(self, proposal: Proposal, *, is_patient: bool = True) -> bool:
        """Returns whether the operation was issued; otherwise it was cancelled.

        Waits up to PATIENCE_S for the other ranks; without `is_patient` it does not. Raises
        RankError.
        """
        with self._changed:
            proposal.is_needed = is_patient
            if proposal.answer is None and self._log is not None:
                if is_patient:
                    self._log.await_proposal(proposal.key)
                    self._play()
                else:
                    self._log.release(proposal.key)
                    proposal.index = None
                    self._take(Verb.CANCEL, proposal.key)
            elif proposal.answer is None:
                if is_patient:
                    self._send_message(Verb.AWAIT, proposal.key)
                    self._wait(lambda: proposal.answer is not None, PATIENCE_S)
                if proposal.answer is None:
                    self._send_message(Verb.WITHDRAW, proposal.key)
            self._wait(lambda: proposal.is_issued or proposal.is_cancelled)
        return proposal.is_issued

    def end_step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Waits until everything that this rank has proposed is issued or cancelled, and the log.

        This rank proposes nothing more in this step. `meanwhile` is called during the wait.
        """
        if self.is_on:
            with self._changed:
                if self._log is None:
                    self._send_message(Verb.DONE, _NO_KEY)
                else:
                    self._log.require(len(self._log.entries))
                    self._play()
                self._step += 1
            while not self._is_idle(_LOOK_S):
                if meanwhile is not None:
                    meanwhile()

    def end_log(self) -> None:
        """Issues the rest of the log, because weights change before the step ends. All ranks call
        it."""
        if self._log is not None:
            with self._changed:
                self._log.require(len(self._log.entries))
                self._play()
                self._wait(lambda: not self._num_begun)

    def _play(self) -> None:
        """Hands entries of the log to the thread, with the lock."""
        assert self._log is not None
        for entry, is_proposed in self._log.issue():
            if is_proposed:
                self._take(Verb.BEGIN, entry.key)
            else:
                act = partial(self._stand_ins[entry.key[0]], entry.key, entry.size)
                self._num_begun += 1
                self._begun.put(Proposal(entry.key, act))
                self._counters.add("ranks_stand_ins", 1)

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

    # -- When to try -------------------------------------------------------------------------------

    def decision(self) -> bytes:
        """Returns what all ranks receive for `sync_weights`: the `Report` of this rank. Empty on
        all ranks where they propose nothing."""
        if not self.is_on:
            return b""
        with self._changed:
            known = [p for p in self._proposals if p.is_needed or p.index is not None]
            proposals = [(p.key, p.size, p.index) for p in known]
            missed = 0 if self._log is None else self._log.missed
            return report_of(self._played_now(), missed, proposals, self._step).encode()

    def _played_now(self) -> Sequence[LogEntry]:
        return self._trace if self._log is None else self._log.entries

    def sync_weights(self, decisions: Sequence[bytes]) -> None:
        """Chooses how the next step begins operations, from the decisions of all ranks.

        By the log of what they wanted in this step. If they have proposed in vain, pauses proposals
        for some steps, since proposals only cost time then.
        """
        with self._changed:
            if self._is_aside:
                self._log, self._aside, self._is_aside = self._aside, None, False
                self._play_asked()
                return
            played, has_log = self._played_now(), self._log is not None
            self._log, self._trace, self._patience_s = None, [], None
            self._proposals.clear()
            if self._paused_steps:
                self._paused_steps -= 1
                return
            reports = [Report.decode(content) for content in decisions]
            entries = next_log(played, reports, self._unanimous)
            if entries is None or self._step <= _FIRST_STEPS:
                return
            if entries:
                self._pause = 1
                self._log, self._log_step = AgreedLog(entries), self._step
                self._play_asked()
            elif not has_log and any(report.lacking for report in reports):
                self._paused_steps, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSED)

    def set_aside(self) -> None:
        """Keeps the choice of `sync_weights` for its next call: the step has yet to be made. Until
        then this rank proposes nothing. All ranks call it."""
        with self._changed:
            self._log, self._aside, self._is_aside = None, self._log, True

    # -- Words -------------------------------------------------------------------------------------

    def _send_message(self, verb: Verb, key: Key) -> None:
        """Sends a control message to the coordinator. With the lock, so that messages keep their
        order.
        """
        if self._coordinator is None:
            self._tell(0, verb, self._step, key)
        else:
            self._pass_on(self._coordinator.on_message(0, verb, self._step, key))

    def on_message(self, rank: int, content: bytes) -> None:
        """Takes a control message of another rank, in the thread that serves that rank."""
        code, step, *numbers = _WORD.unpack(content)
        verb, key = Verb(code), (numbers[0], numbers[1], numbers[2])
        with self._changed:
            if verb in (Verb.BEGIN, Verb.CANCEL):
                self._take(verb, key)
            elif verb is Verb.PLAY:
                self._played = max(self._played, (step, key[2]))
                self._play_asked()
            else:
                assert self._coordinator is not None
                self._pass_on(self._coordinator.on_message(rank, verb, step, key))

    def _pass_on(self, decisions: list[Decision]) -> None:
        """Sends decisions, with the lock: every rank receives them in one order."""
        for decision in decisions:
            for rank in decision.ranks:
                if rank == self._transport.rank:
                    self._take(decision.verb, decision.key)
                else:
                    self._tell(rank, decision.verb, decision.step, decision.key)

    def _tell(self, rank: int, verb: Verb, step: int, key: Key) -> None:
        self._counters.add("ranks_control_messages", 1)
        self._transport.tell(rank, _WORD.pack(verb, step, *key))

    def _ask_to_play(self, number: int) -> None:
        """Asks all ranks to issue the entries of the log before `number`, with the lock."""
        for rank in range(self._transport.count):
            if rank != self._transport.rank:
                self._tell(rank, Verb.PLAY, self._log_step, (0, 0, number))

    def _play_asked(self) -> None:
        step, number = self._played
        if self._log is not None and step == self._log_step:
            self._log.require(number)
            self._play()

    def _take(self, verb: Verb, key: Key) -> None:
        proposal = self._pending.pop(key)
        proposal.answer = verb
        if verb is Verb.BEGIN:
            self._num_begun += 1
            self._begun.put(proposal)
            if self._log is None:
                proposal.index = len(self._trace)
                self._trace.append(LogEntry(key, proposal.size))
            self._counters.add("ranks_collectives", 1)
        else:
            proposal.act = None
            self._counters.add("ranks_cancelled", 1)
        self._changed.notify_all()

    # -- Operations --------------------------------------------------------------------------------

    # INV-22: operations begin in the order of the coordinator.
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
            if copy is not None and self._log is not None:
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
                if self._log is not None and self._under_way[0][0] == self._log_step:
                    self._patience_s, self._waits_since_s = _WATCH_S, now_s
                    self._ask_to_play(self._log.head)


def _is_over(copy: Copy) -> bool:
    """Whether the copy is done, or has failed: whoever waits for its result gets the error."""
    try:
        return copy.done()
    except Exception:
        return True
