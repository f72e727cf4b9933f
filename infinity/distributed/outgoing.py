"""A socket that this rank opened, with the queue of its messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.distributed.channel import Channel, Check
from infinity.distributed.messages import MessageType
from infinity.distributed.peer import Peer, RemoteRequest

_NOTHING = memoryview(b"")


@dataclass(slots=True)
class Message:
    """A message in a queue.

    sinks: the memory for the answer to a GET
    num_lent: the ranges that were lent on the channel up to the end of the message
    """

    job: RemoteRequest
    kind: MessageType
    numbers: tuple[int, int, int] = (0, 0, 0)
    content: memoryview = _NOTHING
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

    def post(self, message: Message, check: Check) -> None:
        """Sends a message. `check` raises to end a wait for the other rank."""
        with self.sending:
            message.num_lent = self.channel.post(
                message.kind, message.numbers, message.content, check
            )

    @property
    def is_empty(self) -> bool:
        """Whether no message is in the queue."""
        return self._waiting.empty()

    def end(self) -> None:
        """Ends the queue behind the messages that are in it."""
        self._waiting.put(None)

    def messages(self, heartbeat_s: float) -> Iterator[Message]:
        """Yields the messages up to the end of the queue, and a HEARTBEAT in every `heartbeat_s`
        without one."""
        while True:
            try:
                message = self._waiting.get(timeout=heartbeat_s)
            except queue.Empty:
                message = Message(RemoteRequest(), MessageType.HEARTBEAT)
            if message is None:
                return
            yield message

    def late_messages(self) -> Iterator[Message]:
        """Yields the messages that were added after the end, as far as they are there."""
        while True:
            try:
                message = self._waiting.get_nowait()
            except queue.Empty:
                return
            if message is not None:
                yield message
