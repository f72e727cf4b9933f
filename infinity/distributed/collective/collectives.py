"""Collective operations between the devices of all ranks, begun in one order.

A rank proposes an operation. In lockstep a thread (`issuing.py`) issues the operations of the
agreed log in its order, without a message; what a rank does not propose is issued by a stand-in.
Without a log, the thread issues an operation when every rank has proposed it, in the order that
rank 0 decides. What ranks wanted in a step, with or without a log, is the next log (`order.py`). No
rank enters a collective operation that another rank does not enter, so ranks may take different
paths through the model. A rank whose proposal is cancelled requests the data from each owner.

Gathers and sums have a process group each, so that a gather does not wait behind a sum. One thread
issues the operations of both, in one order: NCCL wants the order over all communicators of a device
to be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from infinity.distributed.collective import issuing
from infinity.distributed.collective.issuing import Issuer, Proposal
from infinity.distributed.collective.order import Coordinator, Decision, Key, StepOrder, Verb
from infinity.distributed.collective.process_groups import DeviceGroups, GroupOperations, operating
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters
from infinity.tiers.device import Copy

_LOOK_S = 0.02
_WORD = struct.Struct("<BxxxIIIQ")  # verb, step, key
_NO_KEY: Key = (0, 0, 0)


class Collectives:
    """Proposes collective operations and begins them. The training thread proposes.

    `groups` have the device's backend. `open` follows the constructor. `gathers`, `sums` and
    `node_gathers` (None without that group) are the operations of each group.
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
        told = partial(operating, groups, transport)
        self.gathers = GroupOperations(groups.gathers, transport.count, told)
        self.sums = GroupOperations(groups.sums, transport.count, told)
        self.node_gathers: GroupOperations | None = None
        if groups.node_gathers is not None:
            of_node = groups.node_gathers
            self.node_gathers = GroupOperations(of_node, of_node.size(), told)
        self._counters = counters
        self._coordinator = Coordinator(transport.count) if transport.rank == 0 else None
        self._changed = threading.Condition()  # Guards all that follows, and the coordinator.
        self._issuer = Issuer(transport, groups, self._changed, begin_thread, self._hurry)
        self._order = StepOrder()
        self._pending: dict[Key, Proposal] = {}
        self._proposals: list[Proposal] = []  # Of this rank in this step, in order.
        self._played = (0, 0)  # Step, and entries that another rank wants to be issued.
        self._stand_ins: dict[int, Callable[[Key, int], Copy]] = {}  # By kind.
        self._trial: Callable[[], Sequence[Copy]] | None = None
        self._is_closed = False

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
        with self._changed:
            self._issuer.put(trial, None)
            self._issuer.start()
            self._wait(lambda: trial.is_issued)

    def _try(self) -> None:
        copies = [] if self._trial is None else self._trial()
        for copy in copies:
            self.await_copy(copy)
            copy.wait()  # Raises what has failed.

    def close(self) -> None:
        """Withdraws all proposals, without waiting for other ranks, and ends the thread.

        With a log, issues the rest of it, which the threads of the other ranks do then too. Aborts
        operations that wait for a rank that is gone (`Issuer.close`). Called before the transport
        closes. Idempotent.
        """
        if not self._issuer.is_started or self._is_closed:
            return
        is_own = self._issuer.is_current  # Of a garbage collector's choice.
        with contextlib.suppress(InfinityError):
            with self._changed:
                log = self._order.log
                for key in list(self._pending) if log is None else ():
                    self._send_message(Verb.WITHDRAW, key)
                if log is not None:
                    self._ask_to_play(len(log.entries))
            if not is_own:
                self.end_step()
        self._is_closed = True
        self._issuer.close()

    # -- Proposals ---------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether operations are proposed in this step. The same on all ranks."""
        # GIL: the training thread alone changes them.
        return self._order.is_on

    @property
    def is_in_lockstep(self) -> bool:
        """Whether a rank may stand in for a proposal in this step. The same on all ranks."""
        return self._order.log is not None  # GIL: the training thread alone changes it.

    def stand_in(
        self, kind: int, act: Callable[[Key, int], Copy], *, is_unanimous: bool = False
    ) -> None:
        """Gives the operation of this rank for an entry of the log that it has not proposed, from
        the entry's key and size. `is_unanimous`: the kind is of no use without every rank."""
        self._stand_ins[kind] = act
        if is_unanimous:
            self._order.unanimous.add(kind)

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
            if self._order.log is None:
                self._send_message(Verb.PROPOSE, key)
            elif (index := self._order.log.bind(key)) is not None:
                proposal.index = index
                self._play()
            else:
                self._take(Verb.CANCEL, key)
        return proposal

    def settle(self, proposal: Proposal, *, is_patient: bool = True) -> bool:
        """Returns whether the operation was issued; otherwise it was cancelled.

        Waits up to `issuing.PATIENCE_S` for the other ranks; without `is_patient` it does not.
        Raises RankError.
        """
        with self._changed:
            proposal.is_needed = is_patient
            log = self._order.log
            if proposal.answer is None and log is not None:
                if is_patient:
                    log.await_proposal(proposal.key)
                    self._play()
                else:
                    log.release(proposal.key)
                    proposal.index = None
                    self._take(Verb.CANCEL, proposal.key)
            elif proposal.answer is None:
                if is_patient:
                    self._send_message(Verb.AWAIT, proposal.key)
                    self._wait(lambda: proposal.answer is not None, issuing.PATIENCE_S)
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
                if self._order.log is None:
                    self._send_message(Verb.DONE, _NO_KEY)
                else:
                    self._play_all()
                self._order.step += 1
            while not self._is_idle(_LOOK_S):
                if meanwhile is not None:
                    meanwhile()

    def end_log(self) -> None:
        """Issues the rest of the log, because weights change before the step ends. All ranks call
        it."""
        if self._order.log is not None:
            with self._changed:
                self._play_all()
                self._wait(lambda: not self._issuer.num_left)

    def _play_all(self) -> None:
        assert self._order.log is not None
        self._order.log.require(len(self._order.log.entries))
        self._play()

    def _play(self) -> None:
        """Hands entries of the log to the thread, with the lock."""
        assert self._order.log is not None
        for entry, is_proposed in self._order.log.issue():
            if is_proposed:
                self._take(Verb.BEGIN, entry.key)
            else:
                act = partial(self._stand_ins[entry.key[0]], entry.key, entry.size)
                self._issuer.put(Proposal(entry.key, act), self._order.log_step)
                self._counters.add("ranks_stand_ins", 1)

    def _is_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._wait(lambda: not self._pending and not self._issuer.num_left, timeout_s)

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
        error = self._issuer.error
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
            return self._order.report((p.key, p.size, p.index) for p in known).encode()

    def sync_weights(self, decisions: Sequence[bytes]) -> None:
        """Chooses how the next step begins operations, from the decisions of all ranks.

        By the log of what they wanted in this step. If they have proposed in vain, pauses proposals
        for some steps, since proposals only cost time then.
        """
        with self._changed:
            if self._order.begin_step(decisions):
                self._proposals.clear()
            self._play_asked()

    def set_aside(self) -> None:
        """Keeps the choice of `sync_weights` for its next call: the step has yet to be made. Until
        then this rank proposes nothing. All ranks call it."""
        with self._changed:
            self._order.set_aside()

    # -- Words -------------------------------------------------------------------------------------

    def _send_message(self, verb: Verb, key: Key) -> None:
        """Sends a control message to the coordinator. With the lock, so that messages keep their
        order.
        """
        if self._coordinator is None:
            self._tell(0, verb, self._order.step, key)
        else:
            self._pass_on(self._coordinator.on_message(0, verb, self._order.step, key))

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
                self._tell(rank, Verb.PLAY, self._order.log_step, (0, 0, number))

    def _play_asked(self) -> None:
        step, number = self._played
        if self._order.log is not None and step == self._order.log_step:
            self._order.log.require(number)
            self._play()

    def _hurry(self, log_step: int) -> bool:
        """Asks the ranks to play if the log is that of now, in the thread that issues: the training
        thread of one may wait elsewhere for this rank. An operation of an earlier log has been
        issued by all ranks: it is only slow."""
        with self._changed:
            log = self._order.log
            if log is None or log_step != self._order.log_step:
                return False
            self._ask_to_play(log.head)
            return True

    def _take(self, verb: Verb, key: Key) -> None:
        proposal = self._pending.pop(key)
        proposal.answer = verb
        if verb is Verb.BEGIN:
            is_of_log = self._order.log is not None
            if not is_of_log:
                proposal.index = self._order.note_begun(key, proposal.size)
            self._issuer.put(proposal, self._order.log_step if is_of_log else None)
            self._counters.add("ranks_collectives", 1)
        else:
            proposal.act = None
            self._counters.add("ranks_cancelled", 1)
        self._changed.notify_all()

    def await_copy(self, copy: Copy) -> None:
        """See `Issuer.await_copy`."""
        self._issuer.await_copy(copy)
