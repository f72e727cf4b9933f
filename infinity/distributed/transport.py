"""Connections between ranks: every rank serves requests at once, also while it computes.

Every rank has two sockets to every other rank. One carries gradients and notes (put, note), one
carries requests and control messages (get, tell). A thread per socket sends the messages of its
queue in order; a thread per socket that another rank opened serves. Requests for weights and
control messages therefore do not queue behind gradients, nor behind the memory that an owner needs
for gradients. No thread takes a lock of the engine: a rank that waits for another rank still serves
a third one. Ranks may thus take different ways through a model.

A closed socket shows that a rank has ended; silence shows that a rank is stuck, because a socket
without other messages sends a BEAT every BEAT_S. The first failure ends every wait on this rank and
is sent to the other ranks, so that all ranks name the same one.

The format of the messages is in `messages.py`. A rank that connects must know the secret that the
process group has exchanged.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from infinity.distributed.connecting import accepted, connect_to
from infinity.distributed.messages import (
    HEADER,
    MOST_NBYTES,
    MessageType,
    Purpose,
    receive_content,
    receive_header,
    receive_into,
    send,
)
from infinity.distributed.outgoing import Message, Outgoing
from infinity.distributed.peer import Peer, RemoteRequest, Service
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters

BEAT_S = 2.0
SILENCE_S = 20.0  # A process that says nothing for so long does not compute, it is stuck.
LINGER_S = 600.0  # A rank that is done waits so long for the others, who may need its shards.
_CAUSE_S = 1.0  # A closed socket may be seen before the word that explains it.
_MEANWHILE_S = 0.02
_QUEUED_NBYTES = 64 << 20  # Gradients on their way out, beyond which the giver waits.


class PeerTransport:
    """One rank's connections to all others. Thread-safe.

    `peers` has every rank, this one included; `listener` accepts at this one's address. Nothing is
    served before `open`.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer], listener: socket.socket, counters: Counters
    ) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self._listener = listener
        self._counters = counters
        self._changed = threading.Condition()
        self._failure: RankError | None = None
        self._notes: dict[int, deque[tuple[str, bytes]]] = {p.rank: deque() for p in peers}
        self._left: set[int] = set()  # Ranks that said goodbye: done, and not in need of anything.
        self._over: dict[int, tuple[int, int]] = {p.rank: (0, 0) for p in peers}
        self._outgoing: dict[tuple[int, Purpose], Outgoing] = {}
        self._incoming: list[socket.socket] = []
        # What others have not connected yet.
        self._missing = {(peer.rank, purpose) for peer in self.others for purpose in Purpose}
        self._serving: list[threading.Thread] = []
        self._queued_nbytes = 0  # Of what is given.
        self._num_asked = 0  # Answers that are not there yet.
        self._is_closing = False
        self._service: Service | None = None

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.peers)

    @property
    def others(self) -> list[Peer]:
        """Every rank but this one, in order."""
        return [peer for peer in self.peers if peer.rank != self.rank]

    # -- Opening and closing -----------------------------------------------------------------------

    def open(self, service: Service) -> None:
        """Connects to every other rank and starts serving them. Raises RankError."""
        self._service = service
        try:
            self._connect()
        except RankError as error:
            self._fail(error)
            raise
        for (rank, purpose), link in self._outgoing.items():
            name = f"infinity-{purpose.name.lower()}-{rank}"
            threading.Thread(target=self._send_all, args=(link,), name=name, daemon=True).start()

    def _connect(self) -> None:
        deadline_s = time.monotonic() + SILENCE_S
        accepting = threading.Thread(
            target=self._accept, args=(deadline_s,), name="infinity-accept", daemon=True
        )
        accepting.start()
        for peer, purpose in ((peer, purpose) for peer in self.others for purpose in Purpose):
            connection = connect_to(peer, purpose, rank=self.rank, deadline_s=deadline_s)
            self._outgoing[peer.rank, purpose] = Outgoing(peer, connection)
        accepting.join()
        for rank, _ in sorted(self._missing):
            raise RankError(rank, f"{self.peers[rank]} has not connected within {SILENCE_S:.0f} s")

    def _accept(self, deadline_s: float) -> None:
        """Starts a thread that serves each socket that another rank opens."""
        arrivals = accepted(self._listener, self.peers, rank=self.rank, deadline_s=deadline_s)
        for rank, purpose, connection in arrivals:
            connection.settimeout(SILENCE_S)
            self._missing.discard((rank, purpose))
            self._incoming.append(connection)
            serving = threading.Thread(
                target=self._serve_all,
                args=(self.peers[rank], connection),
                name=f"infinity-serve-{rank}",
                daemon=True,
            )
            self._serving.append(serving)
            serving.start()

    def close(self) -> None:
        """Says goodbye and waits until every other rank has, or is gone: it may need shards.

        While an exception is on its way, the others are told of it instead.
        """
        error = sys.exc_info()[1]
        if isinstance(error, RankError):
            self._fail(error)
        elif error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self._await_answers(LINGER_S)
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            failure = self._failure
        if failure is None:
            for peer in self.others if self._outgoing else ():
                self._submit(peer.rank, MessageType.BYE, (0, 0, 0))
            deadline_s = time.monotonic() + LINGER_S
            with self._changed:
                while self._failure is None and len(self._left) < self.count - 1:
                    if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                        break
        for link in self._outgoing.values():
            link.end()
        outgoing = [link.connection for link in self._outgoing.values()]
        for connection in (*outgoing, *self._incoming):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._listener.close()
        for thread in self._serving:
            if thread is not threading.current_thread():
                thread.join(_CAUSE_S)  # What it reads from is about to go.

    def abort(self, cause: str) -> None:
        """Tells the others that this rank ends, and why. For an exception nobody has caught."""
        if not self._is_closing:
            self._fail(RankError(self.rank, f"{self.peers[self.rank]} failed: {cause}"))

    # -- Failure -----------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether `check` raises."""
        return self._failure is not None

    def check(self) -> None:
        """Raises RankError when a rank is known to be gone."""
        if self._failure is not None:
            raise self._failure.again()

    def _fail(self, error: RankError, *, is_alive: bool = False) -> None:
        """The first failure counts. All that waits on this rank ends, and the others are told; the
        rank that the error is about as well where it `is_alive` to hear it."""
        with self._changed:
            if self._failure is not None or self._is_done():
                return
            self._failure = error
            self._changed.notify_all()
        telling = [
            threading.Thread(target=self._tell, args=(link, error), daemon=True)
            for (rank, purpose), link in self._outgoing.items()
            if purpose is Purpose.GIVING and (is_alive or rank != error.rank)
        ]
        for thread in telling:
            thread.start()
        for thread in telling:
            thread.join(_CAUSE_S)  # A rank that does not listen must not keep this one.

    def _tell(self, link: Outgoing, error: RankError) -> None:
        # Not through the queue, which may be long.
        with contextlib.suppress(OSError), link.sending:
            content = memoryview(str(error).encode()[: MOST_NBYTES[MessageType.BYE]])
            send(link.connection, MessageType.BYE, (error.rank + 1, 0, 0), content)

    def _is_done(self) -> bool:
        """All the others have said goodbye; what closes now is nobody's death."""
        return len(self._left) == self.count - 1

    # INV-20: a rank that ends, ends every wait for it.
    def _lost(self, peer: Peer, why: str) -> None:
        """A link broke. If a word about the cause is on its way, it is waited for."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._is_closing or peer.rank in self._left,
                _CAUSE_S,
            )
            if self._is_closing:
                self._left.add(peer.rank)
                self._changed.notify_all()
            if peer.rank in self._left:
                return
        self._fail(RankError(peer.rank, f"{peer} is gone: {why}"))

    # -- Asking ------------------------------------------------------------------------------------

    def get(self, rank: int, unit: int, kind: int, sinks: Sequence[memoryview]) -> RemoteRequest:
        """Asks for the bytes of another rank's shard, into `sinks`, which together are as long."""
        with self._changed:
            self._num_asked += 1
        return self._submit(rank, MessageType.GET, (unit, kind, 0), sinks=sinks)

    def put(
        self,
        rank: int,
        tensor: int,
        code: int,
        generation: int,
        content: memoryview,
        *,
        meanwhile: Callable[[], None],
    ) -> None:
        """Gives a part of a gradient to its owner, who is told `code`. `content` stays unchanged
        until it is sent.

        Waits while much is on its way, and calls `meanwhile` now and then: where no rank has room
        for what it is given, each has to make some.
        """
        self._wait_for(lambda: self._queued_nbytes <= _QUEUED_NBYTES, meanwhile)
        with self._changed:
            self._queued_nbytes += content.nbytes
        self._counters.add("ranks_reduced_nbytes", content.nbytes)
        self._submit(rank, MessageType.PUT, (tensor, code, generation), content)

    def tell(self, rank: int, content: bytes) -> None:
        """Says something to another rank; see `Service.on_message`. Does not wait."""
        self._submit(rank, MessageType.WORD, (0, 0, 0), memoryview(content))

    def note_backward(self, step: int, count: int) -> None:
        """Tells the others that `count` backward passes since a step are over on this rank."""
        for peer in self.others:
            self._submit(peer.rank, MessageType.OVER, (step, count, 0))

    def await_backwards(
        self, step: int, count: int, *, timeout_s: float, meanwhile: Callable[[], None]
    ) -> bool:
        """Whether `count` backward passes since a step are over on every other rank, in this time.

        A rank that waits for this one somewhere is not waited for. So of all ranks the one that is
        furthest behind never waits. What ranks wait for that is not of these links is not seen.
        """

        def is_over() -> bool:
            return all(
                self._over[peer.rank] >= (step, count)
                or self._notes[peer.rank]
                or peer.rank in self._left
                for peer in self.others
            )

        return self._wait_for(is_over, meanwhile, timeout_s)

    def _wait_for(
        self,
        is_reached: Callable[[], bool],
        meanwhile: Callable[[], None],
        timeout_s: float = float("inf"),
    ) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            is_over = self._wait_until(
                lambda: self._failure is not None or is_reached(), _MEANWHILE_S
            )
            self.check()
            if is_over:
                return True
            meanwhile()
        return False

    def _wait_until(self, is_reached: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(is_reached, timeout_s)

    def all_gather(
        self, tag: str, content: bytes, *, meanwhile: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Every rank's `content`, in rank order. All ranks call it with one tag, in one order.

        All that this rank asked for or gave before has been served when another rank returns. What
        others gave before comes first, so where that may have no room `meanwhile` has to make some;
        it is called now and then.
        """
        self._await_answers()
        label = tag.encode()
        if len(label) + len(content) > MOST_NBYTES[MessageType.NOTE]:
            raise InfinityError(
                f"{tag!r} is {len(content)} bytes, expected at most "
                f"{MOST_NBYTES[MessageType.NOTE]}: "
                "divide the model into fewer tensors, or over fewer ranks"
            )
        for peer in self.others:
            self._submit(
                peer.rank, MessageType.NOTE, (len(label), 0, 0), memoryview(label + content)
            )
        gathered = []
        for peer in self.peers:
            if peer.rank == self.rank:
                gathered.append(content)
                continue
            found, theirs = self._next_note(peer, tag, meanwhile)
            if found != tag:
                self._fail(
                    RankError(
                        peer.rank,
                        f"{peer} is at {found!r} while {self.peers[self.rank]} is at {tag!r}; all "
                        "ranks must make the same calls in the same order",
                    ),
                    is_alive=True,  # This rank's own note may not have left before the failure.
                )
                self.check()
            gathered.append(theirs)
        return gathered

    def _await_answers(self, timeout_s: float | None = None) -> None:
        """Returns when all that was asked for is there. A shard may change, or its owner be gone,
        once all ranks have met."""
        self._wait_until(lambda: not self._num_asked or self._failure is not None, timeout_s)

    def _next_note(
        self, peer: Peer, tag: str, meanwhile: Callable[[], None] | None
    ) -> tuple[str, bytes]:
        notes = self._notes[peer.rank]

        def is_over() -> bool:
            return bool(notes) or self._failure is not None or peer.rank in self._left

        while not self._wait_until(is_over, None if meanwhile is None else _MEANWHILE_S):
            assert meanwhile is not None
            meanwhile()
        if notes:
            return notes.popleft()
        self.check()
        raise InfinityError(
            f"{peer} has closed its engine while {self.peers[self.rank]} waits for it in {tag!r}; "
            "all ranks must make the same number of steps. A rank without data still calls "
            "optimizer.step()"
        )

    def _submit(
        self,
        rank: int,
        kind: MessageType,
        numbers: tuple[int, int, int],
        content: memoryview | None = None,
        sinks: Sequence[memoryview] = (),
    ) -> RemoteRequest:
        self.check()
        job = RemoteRequest()
        # A word that is waited for must not come behind gradients that have no room.
        purpose = Purpose.ASKING if kind in (MessageType.GET, MessageType.WORD) else Purpose.GIVING
        message = Message(job, kind, numbers, content or memoryview(b""), sinks)
        self._outgoing[rank, purpose].add(message)
        return job

    # -- Threads -----------------------------------------------------------------------------------

    def _send_all(self, link: Outgoing) -> None:
        """Sends the messages to one other rank, in order."""
        error: BaseException | None = None
        for message in link.messages(BEAT_S):
            if error is None and self._failure is None:
                try:
                    self._carry_out(link, message)
                except (OSError, RankError) as broken:
                    self._lost(link.peer, _describe(broken))
                    error = self._failure or RankError(
                        link.peer.rank, f"{link.peer} has closed its engine"
                    )
            elif error is None:
                error = self._failure
            self._finish(message, error)
        for message in link.late_messages():
            self._finish(message, self._failure or InfinityError("the links are closed"))

    def _finish(self, message: Message, error: BaseException | None) -> None:
        message.job.finish(error)
        with self._changed:
            self._queued_nbytes -= message.content.nbytes * (message.kind is MessageType.PUT)
            self._num_asked -= message.kind is MessageType.GET
            self._changed.notify_all()

    def _carry_out(self, link: Outgoing, message: Message) -> None:
        # Wakes to see whether the rank that serves is still there, which its beats tell. It may
        # take its time: it has no room for what it is given, or its drive is slow.
        connection = link.connection
        connection.settimeout(BEAT_S)
        with link.sending:
            send(connection, message.kind, message.numbers, message.content, self.check)
        if message.kind is not MessageType.GET:
            return
        kind, _, nbytes = receive_header(connection, self.check)
        wanted = sum(sink.nbytes for sink in message.sinks)
        if kind is not MessageType.DATA or nbytes != wanted:
            raise ConnectionError(f"expected {wanted} bytes of data, got {nbytes} of {kind.name}")
        for sink in message.sinks:
            receive_into(connection, sink, self.check)
        self._counters.add("ranks_gathered_nbytes", nbytes)

    def _serve_all(self, peer: Peer, connection: socket.socket) -> None:
        """Serves one other rank until it says goodbye or is gone."""
        assert self._service is not None
        try:
            while self._serve_one(peer, connection, self._service):
                pass
        except InfinityError as error:  # Of this rank: a drive that failed, no room.
            self.abort(f"{type(error).__name__}: {error}")
        except TimeoutError:
            self._lost(peer, f"it said nothing for {SILENCE_S:.0f} s")
        except OSError as broken:
            self._lost(peer, _describe(broken))
        except Exception as error:  # A broken invariant, here or of who said it.
            self.abort(f"{type(error).__name__} while it served {peer}: {error}")

    def _serve_one(self, peer: Peer, connection: socket.socket, service: Service) -> bool:
        kind, (first, second, third), nbytes = receive_header(connection)
        if kind is MessageType.GET:
            receive_content(connection, kind, nbytes)
            total_nbytes, parts = service.serve(first, second, to=peer.rank)
            connection.sendall(HEADER.pack(MessageType.DATA, 0, 0, 0, total_nbytes))
            for part in parts:
                connection.sendall(part)
            return True
        if kind is MessageType.PUT:
            receive = partial(receive_into, connection)
            service.deliver(peer.rank, first, second, third, nbytes, receive)
            return True
        content = receive_content(connection, kind, nbytes)
        if kind is MessageType.OVER:
            with self._changed:
                self._over[peer.rank] = (first, second)
                self._changed.notify_all()
        elif kind is MessageType.NOTE:
            note = content[:first].decode(errors="replace"), bytes(content[first:])
            with self._changed:
                self._notes[peer.rank].append(note)
                self._changed.notify_all()
        elif kind is MessageType.WORD:
            service.on_message(peer.rank, bytes(content))
        elif kind is MessageType.BYE:
            if first > self.count:
                raise ConnectionError(f"it says that rank {first - 1} failed, and there is none")
            if first:
                self._fail(RankError(first - 1, content.decode(errors="replace")))
                return False
            with self._changed:
                self._left.add(peer.rank)
                self._changed.notify_all()
        return True


def _describe(broken: Exception) -> str:
    if isinstance(broken, (ConnectionResetError, BrokenPipeError)):
        return "its connections closed without a word; it was killed or has crashed"
    return str(broken) or type(broken).__name__
