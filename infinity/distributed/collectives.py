"""Collective operations between the devices of all ranks, begun in one order.

A rank proposes an operation. When every rank has proposed it (`coordinator.py`), a thread of this
object begins it, in the order that rank 0 decides. The thread only issues operations; the device
orders them. No rank enters a collective operation that another rank does not enter, so ranks may
take different paths through the model. A rank whose proposal is cancelled requests the data from
each owner.
"""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.distributed import transport
from infinity.distributed.coordinator import Coordinator, Decision, Key, Verb
from infinity.distributed.group import RankTopology
from infinity.distributed.transport import SILENCE_S, PeerTransport
from infinity.errors import ConfigError, InfinityError, RankError
from infinity.observe import Counters

# A rank withdraws its proposal after this: another rank may be in a barrier of the program, which
# this rank does not reach while it waits. It waits once for that rank, until that rank is back.
PATIENCE_S = 10.0
# Of an operation that every rank has begun. A device may be far behind its host; the links find out
# much sooner who is gone.
TIMEOUT_S = 600.0
_LOOK_S = 0.02
_WATCH_S = 0.5  # A thread that waits in an operation notices within this time that a rank is gone.
# If more than one proposal in RARE was cancelled in a step, ranks propose nothing for some steps,
# twice as many every time.
_RARE = 8
_MOST_PAUSED = 64
_WORD = struct.Struct("<BxxxIIIQ")  # verb, step, key
_NO_KEY: Key = (0, 0, 0)
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Proposal:
    """An operation that this rank is ready for: `act` issues it. Made by `Collectives`."""

    def __init__(self, key: Key, act: Callable[[], None]) -> None:
        self.key = key
        self.act: Callable[[], None] | None = act
        self.answer: Verb | None = None
        self.is_issued = False

    @property
    def is_cancelled(self) -> bool:
        """Whether the operation was cancelled: some rank takes the host path."""
        return self.answer is Verb.CANCEL


class Collectives:
    """Proposes collective operations and begins them. The training thread proposes.

    `group` has the backend of `device`. `open` follows the constructor.
    """

    def __init__(
        self, transport: PeerTransport, group: Any, device: torch.device, counters: Counters
    ) -> None:
        self._transport = transport
        self._group = group
        self._is_aborted = False
        self._device = device
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
        self._answered = self._num_cancelled = 0  # Of rank 0's coordinator, before this step.
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def open(self) -> None:
        """Checks that the backend works, and starts the thread. Called after the transport is open.

        Backends connect in their first operation, which waits for all ranks. It runs here, where
        all ranks come, and not in the middle of a step. Raises InfinityError.
        """
        trial = Proposal(_NO_KEY, self._try)
        self._num_begun += 1
        self._begun.put(trial)
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        self._thread.start()
        with self._changed:
            self._wait(lambda: trial.is_issued)

    def _try(self) -> None:
        rows = torch.zeros((self._transport.count, 1), dtype=torch.uint8, device=self._device)
        self.all_gather(torch.empty_like(rows).flatten(), rows[0])
        self.all_to_all(torch.empty_like(rows), rows)

    def close(self) -> None:
        """Withdraws all proposals, without waiting for other ranks, and ends the thread.

        Aborts operations that wait for a rank that is gone. Called before the transport closes.
        Idempotent.
        """
        if self._thread is None or self._is_closed:
            return
        is_own = self._thread is threading.current_thread()  # Of a garbage collector's choice.
        with contextlib.suppress(InfinityError):
            with self._changed:
                for key in list(self._pending):
                    self._send_message(Verb.WITHDRAW, key)
            if not is_own:
                self.end_step()
        self._is_closed = True
        self._begun.put(None)
        while not is_own and self._thread.is_alive():
            self._thread.join(_WATCH_S)
            if self._transport.is_broken:
                self._abort()
        if self._transport.is_broken:
            self._abort()

    # -- Proposals ---------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether operations are proposed in this step. The same on all ranks."""
        return self._paused_steps == 0

    def propose(self, key: Key, act: Callable[[], None]) -> Proposal:
        """Proposes an operation. Another thread calls `act` soon after every rank has proposed it.

        Everything that `act` needs stays unchanged until the proposal is answered.
        """
        assert self.is_on and key not in self._pending
        self._transport.check()
        proposal = Proposal(key, act)
        with self._changed:
            self._pending[key] = proposal
            self._send_message(Verb.PROPOSE, key)
        return proposal

    def settle(self, proposal: Proposal, *, is_patient: bool = True) -> bool:
        """Returns whether the operation was issued; otherwise it was cancelled.

        Waits up to PATIENCE_S for the other ranks; without `is_patient` it does not. Raises
        RankError.
        """
        with self._changed:
            if proposal.answer is None:
                if is_patient:
                    self._send_message(Verb.AWAIT, proposal.key)
                    self._wait(lambda: proposal.answer is not None, PATIENCE_S)
                if proposal.answer is None:
                    self._send_message(Verb.WITHDRAW, proposal.key)
            self._wait(lambda: proposal.is_issued or proposal.is_cancelled)
        return proposal.is_issued

    def end_step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Waits until everything that this rank has proposed is issued or cancelled.

        This rank proposes nothing more in this step. `meanwhile` is called during the wait.
        """
        if self.is_on:
            with self._changed:
                self._send_message(Verb.DONE, _NO_KEY)
                self._step += 1
            while not self._is_idle(_LOOK_S):
                if meanwhile is not None:
                    meanwhile()

    def _is_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._wait(lambda: not self._pending and not self._num_begun, timeout_s)

    def _wait(self, is_reached: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        """Waits with the lock held. Raises RankError if a rank is gone, and the error of the
        thread.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(min(left_s, _LOOK_S))
            self._transport.check()
            if self._error is not None:
                raise InfinityError(f"between devices of ranks: {self._error}") from self._error
        return True

    # -- When to try -------------------------------------------------------------------------------

    def decision(self) -> bytes:
        """Returns rank 0's decision for `sync_weights`, which all ranks receive.

        The decision: whether ranks took the same path in the step that ends.
        """
        if self._coordinator is None:
            return b""
        with self._changed:
            begun, cancelled = self._coordinator.begun, self._coordinator.cancelled
            answered = begun + cancelled - self._answered
            num_cancelled = cancelled - self._num_cancelled
            self._answered, self._num_cancelled = begun + cancelled, cancelled
        return bytes([num_cancelled * _RARE <= answered])

    def sync_weights(self, decision: bytes) -> None:
        """Pauses proposals for some steps if ranks took different paths, since proposals only cost
        time then.
        """
        if self._paused_steps:
            self._paused_steps -= 1
        elif decision[0]:
            self._pause = 1
        else:
            self._paused_steps, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSED)

    # -- Words -------------------------------------------------------------------------------------

    def _send_message(self, verb: Verb, key: Key) -> None:
        """Sends a control message to the coordinator. With the lock, so that messages keep their
        order.
        """
        if self._coordinator is None:
            self._transport.tell(0, _WORD.pack(verb, self._step, *key))
        else:
            self._pass_on(self._coordinator.on_message(0, verb, self._step, key))

    def on_message(self, rank: int, content: bytes) -> None:
        """Takes a control message of another rank, in the thread that serves that rank."""
        code, step, *numbers = _WORD.unpack(content)
        verb, key = Verb(code), (numbers[0], numbers[1], numbers[2])
        with self._changed:
            if verb in (Verb.BEGIN, Verb.CANCEL):
                self._take(verb, key)
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
                    self._transport.tell(
                        rank, _WORD.pack(decision.verb, decision.step, *decision.key)
                    )

    def _take(self, verb: Verb, key: Key) -> None:
        proposal = self._pending.pop(key)
        proposal.answer = verb
        if verb is Verb.BEGIN:
            self._num_begun += 1
            self._begun.put(proposal)
            self._counters.add("ranks_collectives", 1)
        else:
            proposal.act = None
            self._counters.add("ranks_cancelled", 1)
        self._changed.notify_all()

    # -- Operations --------------------------------------------------------------------------------

    # INV-22: operations begin in the order of the coordinator.
    def _run(self) -> None:
        if self._device.index is not None:
            torch.get_device_module(self._device).set_device(self._device)  # A thread's own matter.
        while True:
            try:
                proposal = self._begun.get(timeout=_WATCH_S)
            except queue.Empty:
                if self._transport.is_broken:
                    self._abort()
                    return
                continue
            if proposal is None:
                return
            try:
                assert proposal.act is not None
                proposal.act()
            except BaseException as error:
                if not isinstance(error, RankError):  # Else the links know of it.
                    self._transport.abort(f"{type(error).__name__}: {error}")
                self._error = error  # The links take no word when all others have left.
                self._abort()
                return
            with self._changed:
                proposal.act, proposal.is_issued = None, True
                self._num_begun -= 1
                self._changed.notify_all()
            del proposal

    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Every rank's `source`, uint8 (n,), into `target`, uint8 (count * n,), in rank order. On
        the devices, in the stream that is current."""
        with self._told():
            _all_gather(target, source, group=self._group)

    def all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Row r of `source` to row `rank` of rank r's `target`: both (count, n), of one dtype."""
        with self._told():
            dist.all_to_all_single(
                target.view(torch.uint8), source.view(torch.uint8), group=self._group
            )

    @contextlib.contextmanager
    def _told(self) -> Any:
        """Returns the error of the transport, which names the rank that is gone, for one of a
        backend."""
        if self._is_aborted:  # An operation on an aborted group may wait for ever.
            self._transport.check()
            raise InfinityError("between devices of ranks: the operations were ended")
        try:
            yield
        except RuntimeError as error:
            deadline_s = time.monotonic() + SILENCE_S
            while time.monotonic() < deadline_s:
                self._transport.check()
                time.sleep(_LOOK_S)
            raise InfinityError(f"between devices of ranks: {error}") from error

    def _abort(self) -> None:
        """Ends every wait in an operation, and refuses further ones."""
        self._is_aborted = True
        with contextlib.suppress(Exception):
            self._group.abort()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def device_group(group: RankTopology, device: torch.device) -> Any:
    """Returns a process group of its own for the ranks' devices, which ends with `leave`.

    Operations of other groups are issued in another order. A collective call. Raises ConfigError.
    """
    backend = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):
        raise ConfigError(
            f'distributed.exchange: "collective" between {device.type} devices needs the backend '
            f"{backend!r} of torch.distributed, which this build of PyTorch lacks; "
            'set it to "one_sided"'
        )
    if backend == "nccl":
        _refuse_split(group)
    with _watchdog_that_ends_no_process():
        made = dist.new_group(
            dist.get_process_group_ranks(group.process_group),
            # An abort ends what NCCL waits for; gloo goes on to its timeout. Operations begin when
            # all ranks have proposed them, so one that lasts longer has lost a rank.
            timeout=timedelta(seconds=TIMEOUT_S if backend == "nccl" else transport.SILENCE_S),
            backend=backend,
            use_local_synchronization=True,
            sort_ranks=False,  # Rows of a gather are parts in the order of the caller's group.
        )
    # INV-19: row r of an operation is the part of rank r.
    assert dist.get_rank(made) == group.rank, "ranks of the group were sorted"
    return made


def leave(device_group: Any) -> None:
    """Shuts a group of `device_group` down, which frees its communicator's memory, after all ranks
    have made their last operation. Does nothing if the backend or the program has done so.

    A group of gloo is left as it is: it holds no device memory, and its shutdown would wait for a
    rank that is stuck in an operation. The group stays registered: `destroy_process_group` would
    free its name, and the next group of these ranks would meet under the same keys of the store,
    where the addresses of this one are.
    """
    with contextlib.suppress(Exception):
        if dist.get_backend(device_group) != "gloo":
            device_group.shutdown()


def _refuse_split(group: RankTopology) -> None:
    """Raises ConfigError where making a group would wait for ranks that do not offload.

    With `init_process_group(device_id=...)` NCCL makes further groups by ncclCommSplit, in which
    all ranks of the job take part.
    """
    world = dist.group.WORLD
    if getattr(world, "bound_device_id", None) is not None and group.count < group.job_count:
        raise ConfigError(
            f"init_process_group(device_id=...) makes all {group.job_count} ranks take part in "
            f"each new group, and {group.count} of them offload this model; leave device_id out, "
            'or set distributed.exchange to "one_sided"'
        )


@contextlib.contextmanager
def _watchdog_that_ends_no_process() -> Iterator[None]:
    """Makes groups whose watchdog ends no process, in the block, unless the user has chosen.

    By default NCCL's watchdog ends the process when another rank is gone, before the transport
    has named that rank. 2: it aborts the communicators of the group only. Source: PyTorch's
    documentation of ProcessGroupNCCL's environment variables.
    """
    if _WATCHDOG in os.environ:
        yield
        return
    os.environ[_WATCHDOG] = "2"
    try:
        yield
    finally:
        del os.environ[_WATCHDOG]
