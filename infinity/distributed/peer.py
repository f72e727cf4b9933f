"""A rank as other ranks see it: its address, the requests that it serves, a request on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from infinity.state.store import Transfer


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of a rank of a group, and its name in error messages."""

    rank: int
    host: str
    pid: int
    address: str
    port: int
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
