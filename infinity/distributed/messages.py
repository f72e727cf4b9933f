"""The format of messages between ranks: a fixed header, then raw bytes; nothing is unpickled.

The header has the type of the message, three numbers and the length of the content. A message of a
type in `MOST_NBYTES` is received whole. Every other message has no content, or content that the
receiver streams to memory of its own after a check of the length.

The functions send and receive on connected sockets. One thread at a time sends on a socket, and one
receives.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from enum import IntEnum

HEADER = struct.Struct("<BxxxIIIQ")  # type, three numbers, bytes that follow
_BLOCK_NBYTES = 1 << 20  # Memory for content is allocated as the content comes, not as announced.


class Purpose(IntEnum):
    """The use of a socket: gradients and contents (GIVING), or requests and control messages."""

    GIVING = 0
    ASKING = 1


class MessageType(IntEnum):
    """The types of messages, with the meaning of the three numbers and of the content."""

    HELLO = 1  # (rank, purpose): the server's secret
    GET = 2  # (unit, state kind)
    DATA = 3  # the answer to GET
    PUT = 4  # (tensor, code, generation): a part of a gradient
    ALL_GATHER = 5  # (length of the tag): tag and content
    HEARTBEAT = 6
    CLOSE = 7  # (rank + 1 that failed, or 0): why
    OVER = 8  # (step, count): how many backward passes since that step are over
    CONTROL = 9  # the content for `Service.on_message`


_TYPES = frozenset(map(int, MessageType))
MOST_NBYTES = {
    MessageType.ALL_GATHER: 1 << 30,
    MessageType.CONTROL: 1 << 12,
    MessageType.CLOSE: 1 << 16,
}


def send(
    connection: socket.socket,
    kind: MessageType,
    numbers: tuple[int, int, int],
    content: memoryview,
    check: Callable[[], None] | None = None,
) -> None:
    """Sends one message.

    A timeout of the socket calls `check`, which raises to end the message. Without `check` the
    timeout raises TimeoutError.
    """
    content = content.cast("B") if content.nbytes else content
    header = HEADER.pack(kind, *numbers, content.nbytes)
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


def receive_header(
    connection: socket.socket, check: Callable[[], None] | None = None
) -> tuple[MessageType, tuple[int, int, int], int]:
    """Returns type, numbers and length of the content; `check` as for `send`. Raises
    ConnectionError for a type that does not exist."""
    header = bytearray(HEADER.size)
    receive_into(connection, memoryview(header), check)
    kind, first, second, third, nbytes = HEADER.unpack(header)
    if kind not in _TYPES:
        raise ConnectionError(f"it sent a message of the kind {kind}, and there is none")
    return MessageType(kind), (first, second, third), nbytes


def receive_content(connection: socket.socket, kind: MessageType, nbytes: int) -> bytearray:
    """Returns the content of a message that is received whole. Raises ConnectionError if the
    content is longer than that of any message of this type."""
    most = MOST_NBYTES.get(kind, 0)
    if nbytes > most:
        raise ConnectionError(
            f"it announced a {kind.name} of {nbytes} bytes; expected up to {most}"
        )
    content = bytearray()
    while len(content) < nbytes:
        block = bytearray(min(_BLOCK_NBYTES, nbytes - len(content)))
        receive_into(connection, memoryview(block))
        content += block
    return content


def receive_into(
    connection: socket.socket, sink: memoryview, check: Callable[[], None] | None = None
) -> None:
    """Fills `sink`; `check` as for `send`. Raises ConnectionResetError if the socket is closed."""
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
