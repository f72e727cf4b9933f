"""Connections between ranks: requests that are served at once, whatever the other rank computes.

Every rank has two sockets to every other, one for what it gives and says (put, note) and one for
what it asks for (get, word), each with a thread that empties its queue, in order; and a thread
behind every socket that others opened, which serves. So weights that are needed soon, and words
that ranks wait for, do not wait for gradients that nobody is waiting for, nor for room at who gets
these. None of the threads takes a lock of the engine, so a rank that waits for another is still of
use to a third. That is what lets ranks take different ways through a model.

A rank that is gone is noticed by its closed sockets, one that is stuck by its silence: a link that
has nothing to say beats every BEAT_S. The first failure ends all waiting on this rank and is told
to the others, so that all of them name the same rank.

Messages are a fixed header and raw bytes; nothing is unpickled. Who connects must know the secret
that was exchanged through the process group.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Protocol

from infinity.distributed.reception import Reception
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters

BEAT_S = 2.0
SILENCE_S = 20.0  # A process that says nothing for so long does not compute, it is stuck.
LINGER_S = 600.0  # A rank that is done waits so long for the others, who may need its shards.
_CAUSE_S = 1.0  # A closed socket may be seen before the word that explains it.
_MEANWHILE_S = 0.02
_QUEUED_NBYTES = 64 << 20  # Gradients on their way out, beyond which the giver waits.
_HEADER = struct.Struct("<BxxxIIIQ")  # kind, three numbers, bytes that follow
_BLOCK_NBYTES = 1 << 20  # Memory for content is taken as it comes, not as it was announced.


class Purpose(IntEnum):
    """What a socket is for."""

    GIVING = 0
    ASKING = 1


class MessageType(IntEnum):
    HELLO = 1  # (rank, purpose): the server's secret
    GET = 2  # (unit, piece)
    DATA = 3  # the answer to GET
    PUT = 4  # (tensor, code, generation): a part of a gradient
    NOTE = 5  # (length of the tag): tag and content
    BEAT = 6
    BYE = 7  # (rank + 1 that failed, or 0): why
    OVER = 8  # (step, count): how many backward passes since that step are over
    WORD = 9  # what `Service.on_message` is told


_KINDS = frozenset(map(int, MessageType))
# The most content of messages that are taken whole. The others have none, or are streamed to where
# their length is checked.
MOST_NBYTES = {MessageType.NOTE: 1 << 30, MessageType.WORD: 1 << 12, MessageType.BYE: 1 << 16}


@dataclass(frozen=True, slots=True)
class Peer:
    """How a rank is reached, and what it is called in messages."""

    rank: int
    host: str
    pid: int
    address: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Service(Protocol):
    """What a rank does for others. Called by the threads of links, several at a time."""

    def serve(self, unit: int, kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        """The bytes of this rank's shard: how many, and the parts. A part is sent before the next
        is asked for."""

    def deliver(
        self,
        rank: int,
        tensor: int,
        code: int,
        generation: int,
        nbytes: int,
        receive: Callable[[memoryview], None],
    ) -> None:
        """Takes a part of a gradient that `rank` gives: `nbytes`, by calls of `receive`, each of
        which fills the memory it is given."""

    def on_message(self, rank: int, content: bytes) -> None:
        """What `rank` tells this one, in the order in which it does."""


class RemoteRequest:
    """One message on its way, and its end. `wait` raises what went wrong, every time."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._over.set()


@dataclass(slots=True)
class _Message:
    job: RemoteRequest
    kind: MessageType
    numbers: tuple[int, int, int]
    content: memoryview = field(default_factory=lambda: memoryview(b""))
    sinks: Sequence[memoryview] = ()  # Where the answer goes.


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A socket that this rank opened, and what waits to be sent there."""

    peer: Peer
    connection: socket.socket
    waiting: queue.SimpleQueue[_Message | None] = field(default_factory=queue.SimpleQueue)
    sending: threading.Lock = field(default_factory=threading.Lock)  # One message at a time.


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
        self._outgoing: dict[tuple[int, Purpose], _Outgoing] = {}
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
        return len(self.peers)

    @property
    def others(self) -> list[Peer]:
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
            try:
                left_s = max(0.1, deadline_s - time.monotonic())
                connection = socket.create_connection((peer.address, peer.port), timeout=left_s)
                _prepare(connection)
                _send(
                    connection, MessageType.HELLO, (self.rank, purpose, 0), memoryview(peer.secret)
                )
            except OSError as error:
                raise RankError(peer.rank, f"{peer} cannot be reached: {error}") from error
            self._outgoing[peer.rank, purpose] = _Outgoing(peer, connection)
        accepting.join()
        for rank, _ in sorted(self._missing):
            raise RankError(rank, f"{self.peers[rank]} has not connected within {SILENCE_S:.0f} s")

    def _accept(self, deadline_s: float) -> None:
        """Takes the connections of every other rank; anybody else's is closed."""
        secret = self.peers[self.rank].secret
        reception = Reception(
            self._listener,
            hello_nbytes=_HEADER.size + len(secret),
            secret=secret,
            name_of=self._missing_name,
        )
        with (
            contextlib.suppress(OSError),
            self._listener,
            contextlib.closing(reception.arrivals(deadline_s)) as arrivals,
        ):
            for (rank, purpose), connection in arrivals:
                self._let_in(rank, purpose, connection)
                if not self._missing:
                    break

    def _missing_name(self, header: bytes) -> tuple[int, Purpose] | None:
        """Which of the connections that are missing this hello is, if any."""
        kind, rank, purpose, _, nbytes = _HEADER.unpack(header)
        is_hello = kind == MessageType.HELLO and nbytes == len(self.peers[self.rank].secret)
        return (rank, Purpose(purpose)) if is_hello and (rank, purpose) in self._missing else None

    def _let_in(self, rank: int, purpose: Purpose, connection: socket.socket) -> None:
        _prepare(connection)
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
            link.waiting.put(None)
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

    def _tell(self, link: _Outgoing, error: RankError) -> None:
        # Not through the queue, which may be long.
        with contextlib.suppress(OSError), link.sending:
            content = memoryview(str(error).encode()[: MOST_NBYTES[MessageType.BYE]])
            _send(link.connection, MessageType.BYE, (error.rank + 1, 0, 0), content)

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
        message = _Message(job, kind, numbers, content or memoryview(b""), sinks)
        self._outgoing[rank, purpose].waiting.put(message)
        return job

    # -- Threads -----------------------------------------------------------------------------------

    def _send_all(self, link: _Outgoing) -> None:
        """Carries out what is wanted of one other rank, in order."""
        waiting, peer = link.waiting, link.peer
        error: BaseException | None = None
        while True:
            try:
                message = waiting.get(timeout=BEAT_S)
            except queue.Empty:
                message = _Message(RemoteRequest(), MessageType.BEAT, (0, 0, 0))
            if message is None:
                break
            if error is None and self._failure is None:
                try:
                    self._carry_out(link, message)
                except (OSError, RankError) as broken:
                    self._lost(peer, _describe(broken))
                    error = self._failure or RankError(peer.rank, f"{peer} has closed its engine")
            elif error is None:
                error = self._failure
            self._finish(message, error)
        while True:  # What was asked for after the end.
            try:
                message = waiting.get_nowait()
            except queue.Empty:
                return
            if message is not None:
                self._finish(message, self._failure or InfinityError("the links are closed"))

    def _finish(self, message: _Message, error: BaseException | None) -> None:
        message.job.finish(error)
        with self._changed:
            self._queued_nbytes -= message.content.nbytes * (message.kind is MessageType.PUT)
            self._num_asked -= message.kind is MessageType.GET
            self._changed.notify_all()

    def _carry_out(self, link: _Outgoing, message: _Message) -> None:
        # Wakes to see whether the rank that serves is still there, which its beats tell. It may
        # take its time: it has no room for what it is given, or its drive is slow.
        connection = link.connection
        connection.settimeout(BEAT_S)
        with link.sending:
            _send(connection, message.kind, message.numbers, message.content, self.check)
        if message.kind is not MessageType.GET:
            return
        kind, _, nbytes = _receive_header(connection, self.check)
        wanted = sum(sink.nbytes for sink in message.sinks)
        if kind is not MessageType.DATA or nbytes != wanted:
            raise ConnectionError(f"expected {wanted} bytes of data, got {nbytes} of {kind.name}")
        for sink in message.sinks:
            _receive_into(connection, sink, self.check)
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
        kind, (first, second, third), nbytes = _receive_header(connection)
        if kind is MessageType.GET:
            _receive_content(connection, kind, nbytes)
            total_nbytes, parts = service.serve(first, second, to=peer.rank)
            connection.sendall(_HEADER.pack(MessageType.DATA, 0, 0, 0, total_nbytes))
            for part in parts:
                connection.sendall(part)
            return True
        if kind is MessageType.PUT:
            receive = partial(_receive_into, connection)
            service.deliver(peer.rank, first, second, third, nbytes, receive)
            return True
        content = _receive_content(connection, kind, nbytes)
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


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _describe(broken: Exception) -> str:
    if isinstance(broken, (ConnectionResetError, BrokenPipeError)):
        return "its connections closed without a word; it was killed or has crashed"
    return str(broken) or type(broken).__name__


def _send(
    connection: socket.socket,
    kind: MessageType,
    numbers: tuple[int, int, int],
    content: memoryview,
    check: Callable[[], None] | None = None,
) -> None:
    """With `check`, a timeout asks it whether to go on waiting."""
    content = content.cast("B") if content.nbytes else content
    header = _HEADER.pack(kind, *numbers, content.nbytes)
    parts = (header + bytes(content),) if content.nbytes <= 1 << 16 else (header, content)
    for part in parts:
        rest = memoryview(part)
        while rest.nbytes:
            try:
                rest = rest[connection.send(rest) :]
            except TimeoutError:
                if check is None:
                    raise
                check()


def _receive_header(
    connection: socket.socket, check: Callable[[], None] | None = None
) -> tuple[MessageType, tuple[int, int, int], int]:
    header = bytearray(_HEADER.size)
    _receive_into(connection, memoryview(header), check)
    kind, first, second, third, nbytes = _HEADER.unpack(header)
    if kind not in _KINDS:
        raise ConnectionError(f"it sent a message of the kind {kind}, and there is none")
    return MessageType(kind), (first, second, third), nbytes


def _receive_content(connection: socket.socket, kind: MessageType, nbytes: int) -> bytearray:
    """What follows the header of a message that is taken whole. Raises ConnectionError where that
    is more than such a message has."""
    most = MOST_NBYTES.get(kind, 0)
    if nbytes > most:
        raise ConnectionError(
            f"it announced a {kind.name} of {nbytes} bytes; expected up to {most}"
        )
    content = bytearray()
    while len(content) < nbytes:
        block = bytearray(min(_BLOCK_NBYTES, nbytes - len(content)))
        _receive_into(connection, memoryview(block))
        content += block
    return content


def _receive_into(
    connection: socket.socket, sink: memoryview, check: Callable[[], None] | None = None
) -> None:
    """Fills `sink`. With `check`, a timeout asks it whether to go on waiting."""
    while sink.nbytes:
        try:
            count = connection.recv_into(sink)
        except TimeoutError:
            if check is None:
                raise
            check()
            continue
        if count == 0:
            raise ConnectionResetError
        sink = sink[count:]
