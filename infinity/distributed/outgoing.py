"""A socket that this rank opened, with the queue of its messages."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.distributed.channel import Channel
from infinity.distributed.messages import MOST_NBYTES, NOTHING, MessageType
from infinity.distributed.peer import Peer, RemoteRequest
from infinity.errors import RankError


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
