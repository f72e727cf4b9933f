"""Connections between ranks: every rank serves requests at once, also while it computes.

Every rank has two sockets to every other rank. One carries gradients and the contents of
all-gathers (`put`, `all_gather`), one carries requests and control messages (`get`, `tell`). A
thread per socket sends the messages of its queue in order; a thread per socket that another rank
opened serves. Requests for weights and control messages therefore do not queue behind gradients,
nor behind the memory that an owner needs for gradients. No thread takes a lock of the engine: a
rank that waits for another rank still serves a third one. Ranks may thus take different paths
through a model.

A closed socket shows that a rank has ended; silence shows that a rank is stuck, because a socket
without other messages sends a HEARTBEAT every HEARTBEAT_S. The first failure ends every wait on
this rank and is sent to the other ranks, so that all ranks name the same one.

Ranks of one machine send contents through memory, and the names of its ranges through sockets
(`channel.py`). The format of the messages is in `messages.py`. A rank that connects must know the
secret that the process group has exchanged.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from infinity.distributed.channel import Channel, cause_of
from infinity.distributed.connecting import accepted, connect_to
from infinity.distributed.messages import NOTHING, MessageType, Purpose, purpose_of, refuse_long
from infinity.distributed.node_memory import NodeMemory
from infinity.distributed.outgoing import Message, Outgoing
from infinity.distributed.peer import Peer, RemoteRequest, Service
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters

_log = logging.getLogger("infinity")

HEARTBEAT_S = 2.0
SILENCE_S = 20.0  # A process that sends nothing for so long does not compute, it is stuck.
LINGER_S = 600.0  # A rank whose model was dropped waits so long for the others: see `close`.
_CAUSE_S = 1.0  # A closed socket may be seen before the message that explains it.
_TELLING_S = 3.0  # Of a failure, to all ranks: one that does not listen must not keep this one.
_MEANWHILE_S = 0.02
_QUEUED_NBYTES = 64 << 20  # Bytes of queued gradients, beyond which the sender waits.


class PeerTransport:
    """The connections of one rank to all others. Thread-safe.

    `peers` has every rank, this one included; `listener` accepts at the address of this one.
    `memory`: what ranks of this machine read of each other. Nothing is served before `open`.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        listener: socket.socket,
        counters: Counters,
        memory: NodeMemory | None = None,
    ) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self._listener = listener
        self._counters = counters
        self.memory = memory or NodeMemory(None, {}, ())
        self._changed = threading.Condition()
        self._failure: RankError | None = None
        self._contents: dict[int, deque[tuple[str, bytes]]] = {p.rank: deque() for p in peers}
        self._left: set[int] = set()  # Ranks that have closed.
        self._over: dict[int, tuple[int, int]] = {p.rank: (0, 0) for p in peers}
        self._outgoing: dict[tuple[int, Purpose], Outgoing] = {}
        self._incoming: dict[tuple[int, Purpose], Channel] = {}
        self._serving: list[threading.Thread] = []
        self._telling: list[threading.Thread] = []
        self._queued_nbytes = 0  # Bytes of queued gradients.
        self._num_asked = 0  # Requests without an answer yet.
        self._is_closing = False
        self._service: Service | None = None
        self.is_dropped: Callable[[], bool] = bool  # Whether the garbage collector closes this.

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
        links = [(peer, purpose) for peer in self.others for purpose in Purpose]
        for peer, purpose in links:
            connection = connect_to(peer, purpose, rank=self.rank, deadline_s=deadline_s)
            channel = self._channel(connection, peer.rank, purpose, is_answering=False)
            self._outgoing[peer.rank, purpose] = Outgoing(peer, channel)
        accepting.join()
        for peer, purpose in links:
            if (peer.rank, purpose) not in self._incoming:
                raise RankError(peer.rank, f"{peer} has not connected within {SILENCE_S:.0f} s")

    def _accept(self, deadline_s: float) -> None:
        """Starts a thread that serves each socket that another rank opens."""
        arrivals = accepted(self._listener, self.peers, rank=self.rank, deadline_s=deadline_s)
        for rank, purpose, connection in arrivals:
            connection.settimeout(SILENCE_S)
            channel = self._channel(connection, rank, purpose, is_answering=True)
            self._incoming[rank, purpose] = channel
            serving = threading.Thread(
                target=self._serve_all,
                args=(self.peers[rank], channel),
                name=f"infinity-serve-{rank}",
                daemon=True,
            )
            self._serving.append(serving)
            serving.start()

    def _channel(
        self, connection: socket.socket, rank: int, purpose: Purpose, *, is_answering: bool
    ) -> Channel:
        """Returns the channel of a socket to `rank`, which that rank has opened if `is_answering`.

        Contents go one way: what is given goes to the rank that answers, what is asked for comes
        from it. A rank that serves expects heartbeats, and the other one looks whether it is alive.
        """
        check = None if is_answering else self.check
        if (purpose is Purpose.GIVING) is is_answering:
            mapped = self.memory.mapped(rank)
            return Channel(connection, self._counters, mapped=mapped, check=check)
        bounce = self.memory.bounce_buffer(rank, is_answering=is_answering)
        return Channel(connection, self._counters, bounce=bounce, check=check)

    def close(self) -> None:
        """Sends CLOSE, and waits until every other rank has closed or is gone: it may need shards.

        Not longer than LINGER_S in a garbage collection: another rank drops the model when its own
        collector runs, and may wait for this rank elsewhere before. During an exception, the other
        ranks receive the exception instead.
        """
        error = sys.exc_info()[1]
        if isinstance(error, RankError):
            self._fail(error)
        elif error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        limit_s = LINGER_S if self.is_dropped() else None
        self._await_answers(limit_s)
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            failure = self._failure
        if failure is None:
            for peer in self.others if self._outgoing else ():
                self._submit(peer.rank, MessageType.CLOSE, (0, 0, 0))
            self._wait_until(lambda: self.is_broken or self._is_done(), limit_s)
        for link in self._outgoing.values():
            link.end()
            link.channel.close()
        for channel in self._incoming.values():
            channel.close()
        self.memory.close()
        self._listener.close()
        for thread in self._serving:
            if thread is not threading.current_thread():
                thread.join(_CAUSE_S)  # The memory that it reads from is about to be freed.

    def abort(self, cause: str) -> None:
        """Sends the reason why this rank ends to the other ranks. For an uncaught exception."""
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
        """Keeps the first failure, ends every wait on this rank, and sends the failure to the other
        ranks. Returns when it is sent, also on a thread with a later failure: the process may end.

        The failed rank receives it too if it `is_alive`.
        """
        with self._changed:
            is_first = self._failure is None and not self._is_done()
            if is_first:
                self._failure = error
                self._changed.notify_all()
                for (rank, purpose), link in list(self._outgoing.items()):
                    if purpose is Purpose.GIVING and (is_alive or rank != error.rank):
                        tell = threading.Thread(target=link.tell, args=(error,), daemon=True)
                        tell.start()
                        self._telling.append(tell)
        if is_first:  # At once: this process may end, or wait for its device, before it raises.
            _log.error("%s (seen by rank %d)", error, self.rank)
        deadline_s = time.monotonic() + _TELLING_S
        for thread in self._telling:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _is_done(self) -> bool:
        """Whether all other ranks have closed. A socket that closes then is no failure."""
        return len(self._left) == self.count - 1

    # INV-20: a rank that ends, ends every wait for it.
    def _lost(self, peer: Peer, why: str) -> None:
        """Handles a broken socket. Waits for a message about the cause, which may be in flight."""
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
        """Requests the bytes of another rank's shard. The sinks together have its length."""
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
    ) -> RemoteRequest:
        """Sends a part of a gradient to its owner, with `code`. `content` stays unchanged until the
        request that is returned is over.

        Waits while too much is queued, and calls `meanwhile` again and again: if no rank has
        space for what it receives, each rank has to free some.
        """
        self._wait_for(lambda: self._queued_nbytes <= _QUEUED_NBYTES, meanwhile)
        with self._changed:
            self._queued_nbytes += content.nbytes
        self._counters.add("ranks_reduced_nbytes", content.nbytes)
        return self._submit(rank, MessageType.PUT, (tensor, code, generation), content)

    def tell(self, rank: int, content: bytes) -> None:
        """Sends a control message to another rank; see `Service.on_message`. Does not wait."""
        self._submit(rank, MessageType.CONTROL, (0, 0, 0), memoryview(content))

    def note_backward(self, step: int, count: int) -> None:
        """Announces that this rank has ended `count` backward passes since a step."""
        for peer in self.others:
            self._submit(peer.rank, MessageType.OVER, (step, count, 0))

    def await_backwards(
        self, step: int, count: int, *, timeout_s: float, meanwhile: Callable[[], None]
    ) -> bool:
        """Whether every other rank has ended `count` backward passes since a step, within this
        time.

        Does not wait for a rank that waits for this one. The rank that is furthest behind therefore
        never waits. Waits outside this transport are not seen.
        """

        def is_over() -> bool:
            return all(
                self._over[peer.rank] >= (step, count)
                or self._contents[peer.rank]
                or peer.rank in self._left
                for peer in self.others
            )

        return self._wait_for(is_over, meanwhile, timeout_s)

    def _wait_for(
        self,
        is_reached: Callable[[], bool],
        meanwhile: Callable[[], None] | None,
        timeout_s: float = float("inf"),
    ) -> bool:
        """Whether `is_reached` within this time. Calls `meanwhile` again and again. Raises
        RankError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            is_over = self._wait_until(lambda: self.is_broken or is_reached(), _MEANWHILE_S)
            self.check()
            if is_over:
                return True
            if meanwhile is not None:
                meanwhile()
        return False

    def _wait_until(self, is_reached: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(is_reached, timeout_s)

    def all_gather(
        self, tag: str, content: bytes, *, meanwhile: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Returns every rank's `content`, in rank order. All ranks call it with one tag, in one
        order.

        When another rank returns, everything that this rank requested or sent before has been
        served. Gradients sent before come first; if their owner has no space for them, `meanwhile`
        has to free some.
        """
        self._await_answers()
        label = tag.encode()
        message = memoryview(label + content)
        refuse_long(tag, message.nbytes)
        for peer in self.others:
            self._submit(peer.rank, MessageType.ALL_GATHER, (len(label), 0, 0), message)
        gathered = []
        for peer in self.peers:
            if peer.rank == self.rank:
                gathered.append(content)
                continue
            found, remote = self._next_content(peer, tag, meanwhile)
            if found != tag:
                self._fail(
                    RankError(
                        peer.rank,
                        f"{peer} is at {found!r} while {self.peers[self.rank]} is at {tag!r}; all "
                        "ranks must make the same calls in the same order",
                    ),
                    is_alive=True,  # This rank's own content may still be queued.
                )
                self.check()
            gathered.append(remote)
        return gathered

    def _await_answers(self, timeout_s: float | None = None) -> None:
        """Waits for the answers to all requests.

        After a barrier of all ranks a shard may change, or its owner may be gone.
        """
        self._wait_until(lambda: self.is_broken or not self._num_asked, timeout_s)

    def _next_content(
        self, peer: Peer, tag: str, meanwhile: Callable[[], None] | None
    ) -> tuple[str, bytes]:
        contents = self._contents[peer.rank]
        self._wait_for(lambda: bool(contents) or peer.rank in self._left, meanwhile)
        if contents:
            return contents.popleft()
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
        content: memoryview = NOTHING,
        sinks: Sequence[memoryview] = (),
    ) -> RemoteRequest:
        self.check()
        message = Message(RemoteRequest(), kind, numbers, content, sinks)
        self._outgoing[rank, purpose_of(kind)].add(message)
        return message.job

    # -- Threads -----------------------------------------------------------------------------------

    def _send_all(self, link: Outgoing) -> None:
        """Sends the messages to one other rank, in order."""
        error: BaseException | None = None
        posted: deque[Message] = deque()  # Until their contents were taken.
        for message in link.messages(HEARTBEAT_S):
            posted.append(message)
            if error is None and self._failure is None:
                try:
                    self._carry_out(link, message)
                except (OSError, RankError) as broken:
                    self._lost(link.peer, cause_of(broken))
                    error = self._end_of(link.peer)
            elif error is None:
                error = self._failure
            while posted and (error or posted[0].num_lent <= link.channel.num_taken):
                self._finish(posted.popleft(), error)
        for message in posted:
            self._finish(message, self._end_of(link.peer))

    def _end_of(self, peer: Peer) -> InfinityError:
        """Returns why no message goes to a rank any more."""
        if self._is_closing:
            return self._failure or InfinityError("the links are closed")
        return self._failure or RankError(peer.rank, f"{peer} has closed its engine")

    def _finish(self, message: Message, error: BaseException | None) -> None:
        message.job.finish(error)
        with self._changed:
            self._queued_nbytes -= message.content.nbytes * (message.kind is MessageType.PUT)
            self._num_asked -= message.kind is MessageType.GET
            self._changed.notify_all()

    def _carry_out(self, link: Outgoing, message: Message) -> None:
        # Wakes to see whether the serving rank is alive, which its heartbeats show. It may
        # be slow: it has no space for gradients, or its drive is slow.
        channel = link.channel
        channel.connection.settimeout(HEARTBEAT_S)
        link.post(message)
        if message.kind is not MessageType.GET:
            if link.is_empty:  # Else the answers come while the next content goes.
                channel.await_taken(message.num_lent)
            return
        kind, _, nbytes = channel.receive_header()
        wanted = sum(sink.nbytes for sink in message.sinks)
        if kind is not MessageType.DATA or nbytes != wanted:
            raise ConnectionError(f"expected {wanted} bytes of data, got {nbytes} of {kind.name}")
        fill = channel.filler(kind, nbytes)
        for sink in message.sinks:
            fill(sink)
        self._counters.add("ranks_gathered_nbytes", nbytes)

    def _serve_all(self, peer: Peer, channel: Channel) -> None:
        """Serves one other rank until it closes or is gone."""
        assert self._service is not None
        try:
            self._service.begin_thread()
            while self._serve_one(peer, channel, self._service):
                pass
        except RankError as error:  # Word of a failure, in place of the rest of a content.
            self._fail(error)
        except InfinityError as error:  # An error of this rank: a drive that failed, no space.
            self.abort(f"{type(error).__name__}: {error}")
        except TimeoutError:
            self._lost(peer, f"it said nothing for {SILENCE_S:.0f} s")
        except OSError as broken:
            self._lost(peer, cause_of(broken))
        except Exception as error:  # A broken invariant, here or on the sending rank.
            self.abort(f"{type(error).__name__} while it served {peer}: {error}")

    def _serve_one(self, peer: Peer, channel: Channel, service: Service) -> bool:
        kind, (first, second, third), nbytes = channel.receive_header()
        if kind is MessageType.PUT:
            fill = channel.filler(kind, nbytes)
            service.deliver(peer.rank, first, second, third, nbytes, fill)
            return True
        content = channel.receive_content(kind, nbytes)
        if kind is MessageType.GET:
            total_nbytes, parts = service.serve(first, second, to=peer.rank)
            channel.send(MessageType.DATA, (0, 0, 0), total_nbytes, parts)
        elif kind is MessageType.OVER:
            with self._changed:
                self._over[peer.rank] = (first, second)
                self._changed.notify_all()
        elif kind is MessageType.ALL_GATHER:
            tag = content[:first].decode(errors="replace")
            note = tag, bytes(memoryview(content)[first:])
            with self._changed:
                self._contents[peer.rank].append(note)
                self._changed.notify_all()
        elif kind is MessageType.CONTROL:
            service.on_message(peer.rank, bytes(content))
        elif kind is MessageType.CLOSE:
            if first > self.count:
                raise ConnectionError(f"it says that rank {first - 1} failed, and there is none")
            if first:
                self._fail(RankError(first - 1, content.decode(errors="replace")))
                return False
            with self._changed:
                self._left.add(peer.rank)
                self._changed.notify_all()
        return True
