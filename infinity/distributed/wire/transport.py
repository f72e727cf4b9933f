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
this rank and is sent to the other ranks, so that all ranks name the same one. Ranks connect before
they do anything else together (`group.py`), so that a death at any later time is seen.

Ranks of one machine send contents through memory, and the names of its ranges through sockets
(`channel.py`), once they share it. The format of the messages is in `protocol.py`. A rank that
connects must know the secret that the ranks have exchanged.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from infinity.distributed.wire.channel import Channel, Message, Outgoing, cause_of
from infinity.distributed.wire.connecting import accepted, closed, connect_to
from infinity.distributed.wire.failures import CAUSE_S, RankFailures
from infinity.distributed.wire.node_memory import NodeMemory
from infinity.distributed.wire.protocol import (
    MOST_RANKS,
    NOTHING,
    REQUESTS,
    MessageType,
    Peer,
    Purpose,
    RemoteRequest,
    Service,
    purpose_of,
    refuse_long,
)
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters

HEARTBEAT_S = 2.0
SILENCE_S = 20.0  # A process that sends nothing for so long does not compute, it is stuck.
_LEAST_SILENCE_S = 5.0  # Less may pass while a thread keeps the interpreter's lock.
TIMEOUT_S = 600.0  # The default of `distributed.timeout_s`.
LINGER_S = 600.0  # A rank whose model was dropped waits so long for the others: see `close`.
_MEANWHILE_S = 0.02
_REFUSED = "refused"  # The tag of a rank that ends with the error in its content.
_MOST_WORDS_NBYTES = 4096  # Of a refusal.
_QUEUED_NBYTES = 64 << 20  # Bytes of queued gradients, beyond which the sender waits.


class PeerTransport:
    """The connections of one rank to all others. Thread-safe.

    `peers` has every rank, this one included; `listener` accepts at the address of this one. `open`
    connects, `share` gives the memory that ranks of this machine read of each other, `serve` what
    other ranks request. Until `serve` a content is awaited for `timeout_s` at most.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        listener: socket.socket,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self._listener = listener
        self._counters = Counters()
        self.memory = NodeMemory(None, {}, ())
        silence_s = min(SILENCE_S, max(timeout_s, _LEAST_SILENCE_S))
        self._meeting_s = timeout_s
        self._contents: dict[int, deque[tuple[str, bytes]]] = {p.rank: deque() for p in peers}
        self._over: dict[int, tuple[int, int]] = {p.rank: (0, 0) for p in peers}
        self._outgoing: dict[tuple[int, Purpose], Outgoing] = {}
        self.failures = RankFailures(self.peers[rank], len(peers), self._outgoing, silence_s)
        self._incoming: dict[tuple[int, Purpose], Channel] = {}
        self._serving: list[threading.Thread] = []
        self._queued_nbytes = 0  # Bytes of queued gradients.
        self._num_asked = 0  # Requests without an answer yet.
        self._service: Service | None = None
        self.is_dropped: Callable[[], bool] = bool  # Whether the garbage collector closes this.

    @property
    def _heartbeat_s(self) -> float:
        return min(HEARTBEAT_S, self.failures.silence_s / 4)

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.peers)

    @property
    def others(self) -> list[Peer]:
        """Every rank but this one, in order."""
        return [peer for peer in self.peers if peer.rank != self.rank]

    # -- Opening and closing -----------------------------------------------------------------------

    def open(self) -> None:
        """Connects to every other rank. Raises RankError."""
        try:
            self._connect()
        except RankError as error:
            self.failures.note(error)
            raise
        for (rank, purpose), link in self._outgoing.items():
            name = f"infinity-{purpose.name.lower()}-{rank}"
            threading.Thread(target=self._send_all, args=(link,), name=name, daemon=True).start()

    def share(self, counters: Counters, memory: NodeMemory) -> None:
        """Gives the memory through which contents go from now on, and the counters."""
        self._counters, self.memory = counters, memory
        opened = {key: link.channel for key, link in self._outgoing.items()}
        for channels, is_answering in ((opened, False), (self._incoming, True)):
            for (rank, purpose), channel in channels.items():
                # Contents go one way: what is given goes to the rank that answers, what is asked
                # for comes from it.
                if (purpose is Purpose.GIVING) is is_answering:
                    channel.share(counters, None, memory.mapped(rank))
                else:
                    bounce = memory.bounce_buffer(rank, is_answering=is_answering)
                    channel.share(counters, bounce, None)

    def serve(self, service: Service) -> None:
        """Starts to serve the other ranks, and waits until all of them serve. From then on this
        rank waits without a limit for ranks that live: one may be at work for hours."""
        self._service = service
        self.all_gather("infinity.offload", b"")
        self._meeting_s = float("inf")

    def _connect(self) -> None:
        deadline_s = time.monotonic() + self.failures.silence_s
        accepting = threading.Thread(
            target=self._accept, args=(deadline_s,), name="infinity-accept", daemon=True
        )
        accepting.start()
        links = [(peer, purpose) for peer in self.others for purpose in Purpose]
        for peer, purpose in links:
            connection = connect_to(peer, purpose, rank=self.rank, deadline_s=deadline_s)
            channel = Channel(connection, self._counters, check=self.check)
            self._outgoing[peer.rank, purpose] = Outgoing(peer, channel)
        while accepting.is_alive():
            accepting.join(_MEANWHILE_S)
            gone = closed(link.channel.connection for link in self._outgoing.values())
            for link in self._outgoing.values():
                if link.channel.connection in gone:
                    self.failures.lost(link.peer, cause_of(ConnectionResetError()))
            self.check()
        for peer, purpose in links:
            if (peer.rank, purpose) not in self._incoming:
                raise RankError(
                    peer.number, f"{peer} has not connected within {self.failures.silence_s:.0f} s"
                )

    def _accept(self, deadline_s: float) -> None:
        """Starts a thread that serves each socket that another rank opens."""
        arrivals = accepted(self._listener, self.peers, rank=self.rank, deadline_s=deadline_s)
        for rank, purpose, connection in arrivals:
            connection.settimeout(self.failures.silence_s)
            channel = self._incoming[rank, purpose] = Channel(connection, self._counters)
            serving = threading.Thread(
                target=self._serve_all,
                args=(self.peers[rank], channel),
                name=f"infinity-serve-{rank}",
                daemon=True,
            )
            self._serving.append(serving)
            serving.start()

    def close(self) -> None:
        """Sends CLOSE, and waits until every other rank has closed or is gone: it may need shards.

        Not longer than LINGER_S in a garbage collection: another rank drops the model when its own
        collector runs, and may wait for this rank elsewhere before. During an exception, the other
        ranks receive the exception instead.
        """
        error = sys.exc_info()[1]
        if error is not None:
            self.failures.end(error)
        limit_s = LINGER_S if self.is_dropped() else None
        self._await_answers(limit_s)
        with self.failures.changed:
            if self.failures.is_closing:
                return
            self.failures.is_closing = True
            failure = self.failures.first
        if failure is None:
            for peer in self.others if self._outgoing else ():
                self._submit(peer.rank, MessageType.CLOSE, (0, 0, 0))
            self._wait_until(lambda: self.is_broken or self.failures.is_done, limit_s)
        self.failures.await_told()
        for link in self._outgoing.values():
            link.end()
            link.channel.close()
        for channel in self._incoming.values():
            channel.close()
        self.memory.close()
        self._listener.close()
        self._service = None
        for thread in self._serving:
            if thread is not threading.current_thread():
                thread.join(CAUSE_S)  # The memory that it reads from is about to be freed.

    def abort(self, cause: str) -> None:
        """See `RankFailures.abort`."""
        self.failures.abort(cause)

    @property
    def is_broken(self) -> bool:
        """Whether `check` raises."""
        return self.failures.first is not None

    def check(self) -> None:
        """Raises RankError when a rank is known to be gone."""
        self.failures.check()

    # -- Asking ------------------------------------------------------------------------------------

    def get(self, rank: int, unit: int, kind: int, sinks: Sequence[memoryview]) -> RemoteRequest:
        """Requests the bytes of another rank's shard. The sinks together have its length."""
        with self.failures.changed:
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
        with self.failures.changed:
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
                or peer.rank in self.failures.left
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
        RankError, but not for the end of a rank after what was waited for."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self._wait_until(lambda: self.is_broken or is_reached(), _MEANWHILE_S)
            if is_reached():
                return True
            self.check()
            if meanwhile is not None:
                meanwhile()
        return False

    def _wait_until(self, is_reached: Callable[[], bool], timeout_s: float | None) -> bool:
        with self.failures.changed:
            return self.failures.changed.wait_for(is_reached, timeout_s)

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
        numbers = (len(label), 0, 0)
        sent = [
            self._submit(peer.rank, MessageType.ALL_GATHER, numbers, message)
            for peer in self.others
        ]
        gathered = []
        for peer in self.peers:
            if peer.rank == self.rank:
                gathered.append(content)
                continue
            found, remote = self._next_content(peer, tag, meanwhile)
            if found != tag:
                cause = (
                    f"{peer} failed: {remote.decode(errors='replace')}"
                    if found == _REFUSED
                    else f"{peer} is at {found!r} while {self.peers[self.rank]} is at {tag!r}; all "
                    "ranks must make the same calls in the same order"
                )
                self.failures.note(
                    RankError(peer.number, cause),
                    is_alive=True,  # This rank's own content may still be queued.
                )
                self.check()
            gathered.append(remote)
        # This rank may end next, and word of that goes past what is queued: the others would learn
        # of the end, and not what this rank has said here.
        self._wait_for(lambda: all(job.done() for job in sent), meanwhile)
        return gathered

    def refuse(self, error: InfinityError) -> None:
        """Waits until the other ranks have come to a refusal of their own, or learn of this one in
        another call, before this rank ends. A RankError is known to them."""
        if not isinstance(error, RankError):
            words = f"{type(error).__name__}: {error}".encode()[:_MOST_WORDS_NBYTES]
            with contextlib.suppress(InfinityError):
                self.all_gather(_REFUSED, words)

    def all_gather_objects(self, tag: str, local: Any) -> list[Any]:
        """Returns every rank's object, in rank order. A rank that connects knows the secret."""
        return [pickle.loads(content) for content in self.all_gather(tag, pickle.dumps(local))]

    def _await_answers(self, timeout_s: float | None = None) -> None:
        """Waits for the answers to all requests.

        After a barrier of all ranks a shard may change, or its owner may be gone.
        """
        self._wait_until(lambda: self.is_broken or not self._num_asked, timeout_s)

    def _next_content(
        self, peer: Peer, tag: str, meanwhile: Callable[[], None] | None
    ) -> tuple[str, bytes]:
        contents = self._contents[peer.rank]
        limit_s = self._meeting_s
        if not self._wait_for(
            lambda: bool(contents) or peer.rank in self.failures.left, meanwhile, limit_s
        ):
            late = f"{peer} is alive and has not come to {tag!r} within {limit_s:.0f} s"
            self.failures.note(
                RankError(peer.number, f"{late}; distributed.timeout_s waits longer"), is_alive=True
            )
            self.check()
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
        for message in link.messages(self._heartbeat_s):
            posted.append(message)
            if error is None and self.failures.first is None:
                try:
                    self._carry_out(link, message)
                except (OSError, RankError) as broken:
                    self.failures.lost(link.peer, cause_of(broken))
                    error = self._end_of(link.peer)
            elif error is None:
                error = self.failures.first
            while posted and (error or posted[0].num_lent <= link.channel.num_taken):
                self._finish(posted.popleft(), error)
        for message in posted:
            self._finish(message, self._end_of(link.peer))

    def _end_of(self, peer: Peer) -> InfinityError:
        """Returns why no message goes to a rank any more."""
        if self.failures.is_closing:
            return self.failures.first or InfinityError(
                "the connections to the other ranks are closed"
            )
        return self.failures.first or RankError(peer.number, f"{peer} has closed its engine")

    def _finish(self, message: Message, error: BaseException | None) -> None:
        message.job.finish(error)
        with self.failures.changed:
            self._queued_nbytes -= message.content.nbytes * (message.kind is MessageType.PUT)
            self._num_asked -= message.kind is MessageType.GET
            self.failures.changed.notify_all()

    def _carry_out(self, link: Outgoing, message: Message) -> None:
        # Wakes to see whether the serving rank is alive, which its heartbeats show. It may
        # be slow: it has no space for gradients, or its drive is slow.
        channel = link.channel
        channel.connection.settimeout(self._heartbeat_s)
        link.post(message)
        if message.kind is not MessageType.GET:
            if link.is_empty:  # Else the answers come while the next content goes.
                channel.await_taken(message.num_lent)
            return
        kind, _, nbytes = channel.receive_header()
        wanted = sum(sink.nbytes for sink in message.sinks)
        if kind is not MessageType.DATA or nbytes != wanted:
            raise ConnectionError(f"expected {wanted} bytes of data, got {nbytes} of {kind.name}")
        fill = channel.filler(nbytes)
        for sink in message.sinks:
            fill(sink)
        self._counters.add("ranks_gathered_nbytes", nbytes)

    def _serve_all(self, peer: Peer, channel: Channel) -> None:
        """Serves one other rank until it closes or is gone."""
        try:
            while self._serve_one(peer, channel):
                pass
        except RankError as error:  # Word of a failure, in place of the rest of a content.
            self.failures.note(error)
        except InfinityError as error:  # An error of this rank: a drive that failed, no space.
            self.abort(f"{type(error).__name__}: {error}")
        except TimeoutError:
            self.failures.lost(peer, f"it said nothing for {self.failures.silence_s:.0f} s")
        except OSError as broken:
            self.failures.lost(peer, cause_of(broken))
        except Exception as error:  # A broken invariant, here or on the sending rank.
            self.abort(f"{type(error).__name__} while it served {peer}: {error}")

    def _serve_one(self, peer: Peer, channel: Channel) -> bool:
        kind, (first, second, third), nbytes = channel.receive_header()
        service = self._service
        if kind in REQUESTS:
            if service is None:
                raise ConnectionError(f"it sent a {kind.name} before this rank serves")
            service.begin_thread()
            if kind is MessageType.PUT:
                service.deliver(peer.rank, first, second, third, nbytes, channel.filler(nbytes))
                return True
        content = channel.receive_content(kind, nbytes)
        if kind is MessageType.GET and service is not None:
            total_nbytes, parts = service.serve(first, second, to=peer.rank)
            channel.send(MessageType.DATA, (0, 0, 0), total_nbytes, parts)
        elif kind is MessageType.OVER:
            with self.failures.changed:
                self._over[peer.rank] = (first, second)
                self.failures.changed.notify_all()
        elif kind is MessageType.ALL_GATHER:
            tag = content[:first].decode(errors="replace")
            note = tag, bytes(memoryview(content)[first:])
            with self.failures.changed:
                self._contents[peer.rank].append(note)
                self.failures.changed.notify_all()
        elif kind is MessageType.CONTROL and service is not None:
            service.on_message(peer.rank, bytes(content))
        elif kind is MessageType.CLOSE:
            if first > MOST_RANKS:
                raise ConnectionError(f"it says that rank {first - 1} failed, and there is none")
            if first:
                self.failures.note(RankError(first - 1, content.decode(errors="replace")))
                return False
            with self.failures.changed:
                self.failures.left.add(peer.rank)
                self.failures.changed.notify_all()
        return True
