"""A socket between two ranks, the memory that both have mapped, and the queue of its messages.

One thread at a time sends on a channel, and one receives.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy

from infinity.distributed.wire.node_memory import BounceBuffer, Bytes, MappedMemory, bytes_of
from infinity.distributed.wire.protocol import (
    HEADER,
    IN_MEMORY,
    INLINE_NBYTES,
    LENT,
    MOST_NBYTES,
    NOTHING,
    TAKEN,
    TYPES,
    MessageType,
    Peer,
    RemoteRequest,
)
from infinity.errors import RankError
from infinity.observe import Counters

_BLOCK_NBYTES = 1 << 20  # Memory for content is allocated as the content comes, not as announced.
_JOINED_NBYTES = 1 << 16  # So much is sent with its header, in one packet.
_HALF = (1 << 32) - 1
_MOST_LENT = 64  # Ranges on their way: their names and answers fit the buffers of any socket.

Fill = Callable[[memoryview], None]


class Channel:
    """Sends messages to another rank, and receives messages of that rank.

    check: called at a timeout of the socket, raises to end the wait; None raises TimeoutError
    """

    def __init__(
        self,
        connection: socket.socket,
        counters: Counters,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.connection = connection
        self._counters = counters
        self._check = check
        self._bounce: BounceBuffer | None = None
        self._mapped: MappedMemory | None = None
        self._is_in_memory = False  # The content of the message that is being received.

    def share(
        self, counters: Counters, bounce: BounceBuffer | None, mapped: MappedMemory | None
    ) -> None:
        """Gives the memory for contents; without it they go through the socket.

        bounce: for contents that this rank lends, once the other rank has mapped it
        mapped: the memory of the other rank, before that rank has its `bounce`
        """
        self._counters, self._bounce, self._mapped = counters, bounce, mapped

    def close(self) -> None:
        """Ends every wait on the channel, here and on the other rank. Unmaps the memory."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self._bounce = self._mapped = self._check = None

    # -- Sending -----------------------------------------------------------------------------------

    def post(
        self, kind: MessageType, numbers: tuple[int, int, int], content: memoryview = NOTHING
    ) -> int:
        """Sends one message, and does not wait until content that is lent has been taken.

        Returns the number for `await_taken`. The other rank sends nothing else on this channel.
        """
        for _ in self._lending(kind, numbers, content.nbytes, [content]):
            pass
        if self._bounce is None:
            return 0
        self.await_taken(self._bounce.num_lent - _MOST_LENT)
        return self._bounce.num_lent

    def send(
        self,
        kind: MessageType,
        numbers: tuple[int, int, int],
        nbytes: int,
        parts: Iterable[memoryview],
    ) -> None:
        """Sends one message. Each part of the content is taken, or in the socket, before the next
        part is asked for."""
        for num_lent in self._lending(kind, numbers, nbytes, parts):
            self.await_taken(num_lent)

    @property
    def num_taken(self) -> int:
        """The number of ranges that the other rank has taken, as far as this rank knows."""
        return 0 if self._bounce is None else self._bounce.num_taken

    def await_taken(self, number: int) -> None:
        """Waits until `num_taken` is at least `number`. Raises ConnectionError for an answer that
        is no answer to a range."""
        bounce = self._bounce
        count = 0 if bounce is None else number - bounce.num_taken
        if bounce is None or count <= 0:
            return
        answers = bytearray(count)
        self.receive_into(memoryview(answers))
        if answers != TAKEN * count:
            raise ConnectionError(f"it answered {bytes(answers)!r} to {count} ranges of memory")
        for _ in range(count):
            bounce.note_taken()

    def _lending(
        self,
        kind: MessageType,
        numbers: tuple[int, int, int],
        nbytes: int,
        parts: Iterable[memoryview],
    ) -> Iterator[int]:
        """Sends one message. Yields the number for `await_taken` behind each part."""
        bounce = self._bounce if kind in LENT and nbytes > INLINE_NBYTES else None
        header = HEADER.pack(kind | (IN_MEMORY if bounce else 0), *numbers, nbytes)
        for part in parts:
            content = part.cast("B")
            if bounce is None and content.nbytes <= _JOINED_NBYTES:
                header += content
                content = content[:0]
            self._send(memoryview(header))
            header = b""
            if bounce is None:
                self._send(content)
            else:
                self._lend(bounce, content)
                yield bounce.num_lent
        self._send(memoryview(header))

    # INV-24: the range is lent until the other rank has copied it.
    def _lend(self, bounce: BounceBuffer, content: memoryview) -> None:
        ranges = bounce.lend(content, lambda: self.await_taken(bounce.num_taken + 1))
        for region, offset_nbytes, nbytes in ranges:
            place = (region, offset_nbytes >> 32, offset_nbytes & _HALF)
            self._send(memoryview(HEADER.pack(MessageType.RANGE, *place, nbytes)))

    def _send(self, content: memoryview) -> None:
        self._counters.add("ranks_socket_nbytes", content.nbytes)
        while content.nbytes:
            content = content[self._repeated(self.connection.send, content) :]

    def _repeated(self, call: Callable[[memoryview], int], memory: memoryview) -> int:
        """Returns the result of a call of the socket, which is repeated after a timeout."""
        while True:
            try:
                return call(memory)
            except TimeoutError:
                check = self._check  # `close` may come from another thread.
                if check is None:
                    raise
                check()

    # -- Receiving ---------------------------------------------------------------------------------

    def receive_header(self) -> tuple[MessageType, tuple[int, int, int], int]:
        """Returns type, numbers and length of the content. Raises ConnectionError for a type that
        does not exist."""
        header = bytearray(HEADER.size)
        self.receive_into(memoryview(header))
        kind, first, second, third, nbytes = HEADER.unpack(header)
        self._is_in_memory = bool(kind & IN_MEMORY)
        kind &= ~IN_MEMORY
        if kind not in TYPES:
            raise ConnectionError(f"it sent a message of the kind {kind}, and there is none")
        return MessageType(kind), (first, second, third), nbytes

    def filler(self, nbytes: int) -> Fill:
        """Returns a function that fills memory with the content of the message whose header was
        received last.

        The calls together take all of the content. Raises RankError if the message ends with word
        of a failure.
        """
        mapped = self._mapped  # `close` may come from another thread.
        if not self._is_in_memory:
            return self.receive_into
        if mapped is None:
            raise ConnectionError("it lends memory that is not mapped here")
        left_nbytes, present = nbytes, bytes_of(NOTHING)  # What is left of the present range.

        def fill(sink: memoryview) -> None:
            nonlocal left_nbytes, present
            target = bytes_of(sink)
            while target.size:
                if not present.size:
                    present = self._next_range(mapped, left_nbytes)
                count = min(target.size, present.size)
                numpy.copyto(target[:count], present[:count])  # Without the interpreter's lock.
                target, present = target[count:], present[count:]
                left_nbytes -= count
                if not present.size:
                    self._send(memoryview(TAKEN))

        return fill

    def receive_content(self, kind: MessageType, nbytes: int) -> bytearray:
        """Returns the content of a message that is received whole. Raises ConnectionError if the
        content is longer than that of any message of this type."""
        most = MOST_NBYTES.get(kind, 0)
        if nbytes > most:
            raise ConnectionError(
                f"it announced a {kind.name} of {nbytes} bytes; expected up to {most}"
            )
        content, fill = bytearray(), self.filler(nbytes)
        while len(content) < nbytes:
            block = bytearray(min(_BLOCK_NBYTES, nbytes - len(content)))
            fill(memoryview(block))
            content += block
        return content

    def receive_into(self, sink: memoryview) -> None:
        """Fills `sink` from the socket. Raises ConnectionResetError if the socket is closed."""
        while sink.nbytes:
            count = self._repeated(self.connection.recv_into, sink)
            if count == 0:
                raise ConnectionResetError
            sink = sink[count:]

    def _next_range(self, mapped: MappedMemory, most_nbytes: int) -> Bytes:
        """Returns the other rank's next range, read-only. Raises RankError if word of a failure
        comes in its place."""
        kind, (region, high, low), nbytes = self.receive_header()
        if kind is MessageType.CLOSE and region:
            raise RankError(region - 1, self.receive_content(kind, nbytes).decode(errors="replace"))
        if kind is not MessageType.RANGE or nbytes > most_nbytes:
            raise ConnectionError(
                f"it sent {kind.name} of {nbytes} bytes; expected a range up to {most_nbytes}"
            )
        return mapped.view(region, high << 32 | low, nbytes)


def cause_of(broken: Exception) -> str:
    """Returns why a channel has ended, in words."""
    if isinstance(broken, (ConnectionResetError, BrokenPipeError)):
        return "its connections closed without a word; it was killed or has crashed"
    return str(broken) or type(broken).__name__


@dataclass(slots=True)
class Message:
    """A message in a queue.

    sinks: the memory for the answer to a GET
    num_lent: the ranges that were lent on the channel up to the end of the message
    """

    job: RemoteRequest
    kind: MessageType
    numbers: tuple[int, int, int] = (0, 0, 0)
    content: memoryview = NOTHING
    sinks: Sequence[memoryview] = ()
    num_lent: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The socket to a peer. Any thread adds messages; one thread takes messages.

    `sending` is held while a message is sent: an urgent message may go past the queue.
    """

    peer: Peer
    channel: Channel
    sending: threading.Lock = field(default_factory=threading.Lock)
    _waiting: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)

    def add(self, message: Message) -> None:
        """Appends a message to the queue."""
        self._waiting.put(message)

    def post(self, message: Message) -> None:
        """Sends a message. Content that is lent may be taken later."""
        with self.sending:
            message.num_lent = self.channel.post(message.kind, message.numbers, message.content)

    def tell(self, error: RankError) -> None:
        """Sends a failure to the peer, past the queue, which may be long."""
        with contextlib.suppress(OSError, RankError), self.sending:
            content = memoryview(error.cause.encode()[: MOST_NBYTES[MessageType.CLOSE]])
            self.channel.post(MessageType.CLOSE, (error.rank + 1, 0, 0), content)

    @property
    def is_empty(self) -> bool:
        """Whether no message is in the queue."""
        return self._waiting.empty()

    def end(self) -> None:
        """Ends the queue behind the messages that are in it."""
        self._waiting.put(None)

    def messages(self, heartbeat_s: float) -> Iterator[Message]:
        """Yields the messages, and a HEARTBEAT in every `heartbeat_s` without one. Behind the end
        of the queue, yields the messages that were added too late."""
        is_over = False
        while True:
            try:
                message = self._waiting.get(not is_over, heartbeat_s)
            except queue.Empty:
                if is_over:
                    return
                message = Message(RemoteRequest(), MessageType.HEARTBEAT)
            if message is None:
                is_over = True
            else:
                yield message
