"""The format of messages between ranks: a fixed header, then raw bytes; nothing is unpickled.

The header has the type of the message, three numbers and the length of the content. A message of a
type in `MOST_NBYTES` is received whole. Every other message has no content, or content that the
receiver takes to memory of its own after a check of the length.

Between ranks of one machine the content of a type in `LENT` that is longer than `INLINE_NBYTES`
stays in memory that both ranks have mapped, and the type in its header has the bit `IN_MEMORY`.
Behind the header come RANGE messages, which name the content's ranges in order; the receiver
answers each with `TAKEN` when it has copied the range.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from infinity.errors import InfinityError

HEADER = struct.Struct("<BxxxIIIQ")  # type, three numbers, bytes that follow
IN_MEMORY = 0x80
TAKEN = b"\x06"  # The sender may change the memory of a range again.
INLINE_NBYTES = 1 << 10
NOTHING = memoryview(b"")


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
    RANGE = 10  # (region, high and low half of the offset): a range of that length, in memory


TYPES = frozenset(map(int, MessageType))
REQUESTS = frozenset((MessageType.GET, MessageType.PUT, MessageType.CONTROL))
MOST_RANKS = 1 << 20  # Of a job.
LENT = frozenset((MessageType.DATA, MessageType.PUT, MessageType.ALL_GATHER))
MOST_NBYTES = {
    MessageType.ALL_GATHER: 1 << 30,
    MessageType.CONTROL: 1 << 12,
    MessageType.CLOSE: 1 << 16,
}


def refuse_long(tag: str, nbytes: int) -> None:
    """Raises InfinityError if an all-gather with this tag has more bytes than a message holds."""
    most = MOST_NBYTES[MessageType.ALL_GATHER]
    if nbytes > most:
        raise InfinityError(
            f"{tag!r} is {nbytes} bytes, expected at most {most}: divide the model into fewer "
            "tensors, or over fewer ranks"
        )


def purpose_of(kind: MessageType) -> Purpose:
    """Returns the use of the socket that sends a message. A control message must not queue behind
    gradients that the owner has no space for."""
    is_word = kind in (MessageType.GET, MessageType.CONTROL)
    return Purpose.ASKING if is_word else Purpose.GIVING
