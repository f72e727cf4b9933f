"""A socket between two ranks, and the memory that both have mapped if they share a machine.

One thread at a time sends on a channel, and one receives. A timeout of the socket calls `check`,
which raises to end the wait. Without `check` the timeout raises TimeoutError.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy

from infinity.distributed.messages import (
    HEADER,
    INLINE_NBYTES,
    LENT,
    MOST_NBYTES,
    TAKEN,
    TYPES,
    MessageType,
    Purpose,
)
from infinity.distributed.node_memory import (
    BounceBuffer,
    Bytes,
    MappedMemory,
    NodeMemory,
    bytes_of,
)
from infinity.errors import RankError
from infinity.observe import Counters

_BLOCK_NBYTES = 1 << 20  # Memory for content is allocated as the content comes, not as announced.
_JOINED_NBYTES = 1 << 16  # So much is sent with its header, in one packet.
_HALF = (1 << 32) - 1
_MOST_LENT = 64  # Ranges on their way: their names and answers fit the buffers of any socket.

Check = Callable[[], None]
Fill = Callable[[memoryview], None]


class Channel:
    """Sends messages to another rank, and receives messages of that rank.

    bounce: for contents that this rank lends; None sends them through the socket
    mapped: the memory of the other rank; None receives contents through the socket
    """

    def __init__(
        self,
        connection: socket.socket,
        counters: Counters,
        *,
        bounce: BounceBuffer | None = None,
        mapped: MappedMemory | None = None,
    ) -> None:
        self.connection = connection
        self._counters = counters
        self._bounce = bounce
        self._mapped = mapped

    def close(self) -> None:
        """Ends every wait on the channel, here and on the other rank. Unmaps the memory."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self._bounce = self._mapped = None

    # -- Sending -----------------------------------------------------------------------------------

    def send(
        self,
        kind: MessageType,
        numbers: tuple[int, int, int],
        content: memoryview,
        check: Check | None = None,
    ) -> None:
        """Sends one message. Content that is lent has been taken on return."""
        self.send_parts(kind, numbers, content.nbytes, [content] if content.nbytes else (), check)

    def post(
        self,
        kind: MessageType,
        numbers: tuple[int, int, int],
        content: memoryview,
        check: Check | None = None,
    ) -> int:
        """Sends one message, and does not wait until content that is lent has been taken.

        Returns the number for `await_taken`. The other rank sends nothing else on this channel.
        """
        self._send_message(
            kind, numbers, content.nbytes, [content] if content.nbytes else (), check
        )
        if self._bounce is None:
            return 0
        self.await_taken(self._bounce.num_lent - _MOST_LENT, check)
        return self._bounce.num_lent

    @property
    def num_taken(self) -> int:
        """The number of ranges that the other rank has taken, as far as this rank knows."""
        return 0 if self._bounce is None else self._bounce.num_taken

    def await_taken(self, number: int, check: Check | None = None) -> None:
        """Waits until `num_taken` is at least `number`. Raises ConnectionError for an answer that
        is no answer to a range."""
        bounce = self._bounce
        count = 0 if bounce is None else number - bounce.num_taken
        if bounce is None or count <= 0:
            return
        answers = bytearray(count)
        self.receive_into(memoryview(answers), check)
        if answers != TAKEN * count:
            raise ConnectionError(f"it answered {bytes(answers)!r} to {count} ranges of memory")
        for _ in range(count):
            bounce.note_taken()

    def send_parts(
        self,
        kind: MessageType,
        numbers: tuple[int, int, int],
        nbytes: int,
        parts: Iterable[memoryview],
        check: Check | None = None,
    ) -> None:
        """Sends one message. Each part of the content is taken, or in the socket, before the next
        part is asked for."""
        self._send_message(kind, numbers, nbytes, self._each_taken(parts, check), check)

    def _each_taken(self, parts: Iterable[memoryview], check: Check | None) -> Iterator[memoryview]:
        for part in parts:
            yield part
            if self._bounce is not None:
                self.await_taken(self._bounce.num_lent, check)

    def _send_message(
        self,
        kind: MessageType,
        numbers: tuple[int, int, int],
        nbytes: int,
        parts: Iterable[memoryview],
        check: Check | None,
    ) -> None:
        header = HEADER.pack(kind, *numbers, nbytes)
        bounce = self._bounce if _is_lent(kind, nbytes) else None
        for part in parts:
            content = part.cast("B")
            if bounce is None and content.nbytes <= _JOINED_NBYTES:
                header += content
                content = content[:0]
            self._send(memoryview(header), check)
            header = b""
            if bounce is None:
                self._send(content, check)
            else:
                self._lend(bounce, content, check)
        self._send(memoryview(header), check)

    # INV-24: the range is lent until the other rank has copied it.
    def _lend(self, bounce: BounceBuffer, content: memoryview, check: Check | None) -> None:
        def await_oldest() -> None:
            self.await_taken(bounce.num_taken + 1, check)

        for part in bounce.lend(content, await_oldest):
            place = (part.region, part.offset_nbytes >> 32, part.offset_nbytes & _HALF)
            header = HEADER.pack(MessageType.RANGE, *place, part.nbytes)
            self._send(memoryview(header), check)

    def _send(self, content: memoryview, check: Check | None) -> None:
        self._counters.add("ranks_socket_nbytes", content.nbytes)
        while content.nbytes:
            try:
                content = content[self.connection.send(content) :]
            except TimeoutError:
                if check is None:
                    raise
                check()

    # -- Receiving ---------------------------------------------------------------------------------

    def receive_header(
        self, check: Check | None = None
    ) -> tuple[MessageType, tuple[int, int, int], int]:
        """Returns type, numbers and length of the content. Raises ConnectionError for a type that
        does not exist."""
        header = bytearray(HEADER.size)
        self.receive_into(memoryview(header), check)
        kind, first, second, third, nbytes = HEADER.unpack(header)
        if kind not in TYPES:
            raise ConnectionError(f"it sent a message of the kind {kind}, and there is none")
        return MessageType(kind), (first, second, third), nbytes

    def filler(self, kind: MessageType, nbytes: int, check: Check | None = None) -> Fill:
        """Returns a function that fills memory with the next bytes of a message's content.

        The calls together take all of the content. Raises RankError if the message ends with word
        of a failure.
        """
        mapped = self._mapped  # `close` may come from another thread.
        if mapped is not None and _is_lent(kind, nbytes):
            return _LentContent(self, mapped, nbytes, check).fill
        return partial(self.receive_into, check=check)

    def receive_content(self, kind: MessageType, nbytes: int) -> bytearray:
        """Returns the content of a message that is received whole. Raises ConnectionError if the
        content is longer than that of any message of this type."""
        most = MOST_NBYTES.get(kind, 0)
        if nbytes > most:
            raise ConnectionError(
                f"it announced a {kind.name} of {nbytes} bytes; expected up to {most}"
            )
        content, fill = bytearray(), self.filler(kind, nbytes)
        while len(content) < nbytes:
            block = bytearray(min(_BLOCK_NBYTES, nbytes - len(content)))
            fill(memoryview(block))
            content += block
        return content

    def receive_into(self, sink: memoryview, check: Check | None = None) -> None:
        """Fills `sink` from the socket. Raises ConnectionResetError if the socket is closed."""
        while sink.nbytes:
            try:
                count = self.connection.recv_into(sink)
            except TimeoutError:
                if check is None:
                    raise
                check()
                continue
            if count == 0:
                raise ConnectionResetError
            sink = sink[count:]

    def next_range(self, mapped: MappedMemory, most_nbytes: int, check: Check | None) -> Bytes:
        """Returns the other rank's next range, read-only. Raises RankError if word of a failure
        comes in its place."""
        kind, (region, high, low), nbytes = self.receive_header(check)
        if kind is MessageType.CLOSE and region:
            raise RankError(region - 1, self.receive_content(kind, nbytes).decode(errors="replace"))
        if kind is not MessageType.RANGE or nbytes > most_nbytes:
            raise ConnectionError(
                f"it sent {kind.name} of {nbytes} bytes; expected a range up to {most_nbytes}"
            )
        return mapped.view(region, high << 32 | low, nbytes)

    def note_taken(self) -> None:
        """Tells the other rank that its range has been copied."""
        self._send(memoryview(TAKEN), None)


def open_channel(
    connection: socket.socket,
    counters: Counters,
    memory: NodeMemory,
    rank: int,
    purpose: Purpose,
    *,
    is_answering: bool,
) -> Channel:
    """Returns the channel of a socket to `rank`, which that rank has opened if `is_answering`.

    Contents go one way: what is given goes to the rank that answers, what is asked for comes from
    it.
    """
    if (purpose is Purpose.GIVING) is is_answering:
        return Channel(connection, counters, mapped=memory.mapped(rank))
    bounce = memory.bounce_buffer(rank, is_answering=is_answering)
    return Channel(connection, counters, bounce=bounce)


class _LentContent:
    """The content of one message in memory of the other rank, taken piece by piece."""

    def __init__(
        self, channel: Channel, mapped: MappedMemory, nbytes: int, check: Check | None
    ) -> None:
        self._channel = channel
        self._mapped = mapped
        self._left_nbytes = nbytes
        self._check = check
        self._range = bytes_of(memoryview(b""))  # What is left of the present one.

    def fill(self, sink: memoryview) -> None:
        """Fills memory with the next bytes."""
        target = bytes_of(sink)
        while target.size:
            if not self._range.size:
                self._range = self._channel.next_range(self._mapped, self._left_nbytes, self._check)
            count = min(target.size, self._range.size)
            numpy.copyto(target[:count], self._range[:count])  # Without the interpreter's lock.
            target, self._range = target[count:], self._range[count:]
            self._left_nbytes -= count
            if not self._range.size:
                self._channel.note_taken()


def _is_lent(kind: MessageType, nbytes: int) -> bool:
    return kind in LENT and nbytes > INLINE_NBYTES


def cause_of(broken: Exception) -> str:
    """Returns why a channel has ended, in words."""
    if isinstance(broken, (ConnectionResetError, BrokenPipeError)):
        return "its connections closed without a word; it was killed or has crashed"
    return str(broken) or type(broken).__name__
