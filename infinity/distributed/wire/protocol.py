"""Messages between ranks, and a rank as the others see it: address, requests, answers.

A message is a fixed header, then raw bytes; nothing is unpickled. The header has the type of the
message, three numbers and the length of the content. A message of a type in `MOST_NBYTES` is
received whole. Every other message has no content, or content that the receiver takes to memory of
its own after a check of the length.

Between ranks of one machine the content of a type in `LENT` that is longer than `INLINE_NBYTES`
stays in memory that both ranks have mapped, and the type in its header has the bit `IN_MEMORY`.
Behind the header come RANGE messages, which name the content's ranges in order; the receiver
answers each with `TAKEN` when it has copied the range.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from typing_extensions import override

from infinity.errors import InfinityError
from infinity.storage.protocol import Transfer

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


# Host and port, an abstract name of unix(7), or None for a rank that cannot be reached.
Address = tuple[str, int] | bytes | None


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of a rank of a group, and its name in error messages."""

    rank: int
    host: str
    pid: int
    address: Address
    secret: bytes
    job_rank: int = -1  # Among all ranks of the job. -1: the group has all of them.

    @property
    def number(self) -> int:
        """The rank in error messages: that of the job, which the launcher counts."""
        return self.rank if self.job_rank < 0 else self.job_rank

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid} on {self.host})"


class Service(Protocol):
    """The requests of other ranks. The threads of `PeerTransport` call it, several at a time."""

    def begin_thread(self) -> None:
        """Called before each request, in the thread that serves it."""

    def serve(self, unit: int, kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        """Returns the bytes of this rank's shard: the length, and the parts in order.

        The transport sends a part before it takes the next one from the iterator.
        """

    def deliver(
        self,
        rank: int,
        tensor: int,
        code: int,
        generation: int,
        nbytes: int,
        receive: Callable[[memoryview], None],
    ) -> None:
        """Takes a part of a gradient from `rank`: `nbytes`. Each call of `receive` fills the memory
        of its argument with the next bytes."""

    def on_message(self, rank: int, content: bytes) -> None:
        """Takes a control message from `rank`. Messages of one rank come in the order in which the
        rank sent them."""


class RemoteRequest(Transfer):
    """A message on its way. Thread-safe. `wait` raises the error of the message, every time."""

    def __init__(self, future: Future[None] | None = None) -> None:
        """`future`: of work that ends the request; None where `finish` does."""
        self._future: Future[None] = Future() if future is None else future

    @override
    def done(self) -> bool:
        return self._future.done()

    @override
    def wait(self) -> None:
        self._future.result()

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the request, with an error that every `wait` raises."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
