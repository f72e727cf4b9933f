"""The protocol of a storage engine: a request of segments goes in, a ticket comes out.

A request is a list of segments with one ticket. The engine splits requests into blocks. It merges
small segments and small requests that are adjacent in the file, wherever they are in memory. A few
blocks are in flight per device, the most urgent first, and every completion is examined. A buffer
belongs to the request until its ticket is done, also when the request fails.

Requests that overlap in a file, one of them a write, run in the order of submission; the earlier
one becomes as urgent as the later one. All other requests run in any order, and so do the segments
of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, Self, TypeAlias

from typing_extensions import override

from infinity.sizes import ByteRange

Operation = Literal["read", "write"]


class Priority(IntEnum):
    """Urgency of a request on its device. A smaller number is more urgent.

    Write-backs are slowed, never starved. A copy gets the bandwidth that is left over, or one block
    of 17 if nothing is left.
    """

    FORWARD = 0
    BACKWARD = 1
    STATE = 2
    WRITE_BACK = 3
    COPY = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """`nbytes` of file `file` at `offset_nbytes`, and the memory at `address` they move to or from.

    With direct I/O all three numbers are multiples of the file's alignment (4096 always is one).
    """

    file: int
    offset_nbytes: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileRange(ByteRange):
    """A range of the file at `path`."""

    path: str
    offset_nbytes: int
    nbytes: int


class Transfer(Protocol):
    """Bytes under way. Any thread may use it; a forked child may not."""

    def done(self) -> bool:
        """Returns whether every part has arrived or failed: the buffers are free again."""
        ...

    def wait(self) -> None:
        """Waits for done(). Raises the first failure, every time it is called.

        Signals interrupt the wait within about 50 ms; the transfer continues then.
        """
        ...


class Ticket(Transfer, Protocol):
    """The transfer of one request. Raises StorageError."""

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        """(file, nbytes, issued_ns, completed_ns) of each file; empty until done().

        The times are those of the first block submitted and of the last completion, taken by the
        storage thread on CLOCK_MONOTONIC. A file that no block of the request reached is absent.
        """
        ...


class WrappedTicket(Ticket):
    """A ticket that passes every call on to another one."""

    def __init__(self, inner: Ticket) -> None:
        self._inner = inner

    @override
    def done(self) -> bool:
        return self._inner.done()

    @override
    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return self._inner.passages()

    @override
    def wait(self) -> None:
        self._inner.wait()


class FollowedTicket(WrappedTicket):
    """A request on whose memory another thread works as well. It is done when both are, and raises
    the error of either."""

    def __init__(self, inner: Ticket, work: Future[None]) -> None:
        super().__init__(inner)
        self._work = work

    @override
    def done(self) -> bool:
        return self._work.done() and self._inner.done()

    @override
    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return self._inner.passages() if self.done() else ()

    @override
    def wait(self) -> None:
        try:
            self._inner.wait()
        finally:  # The memory is free when both have ended, whatever either raises.
            error = self._work.exception()
        if error is not None:
            raise error.with_traceback(None)


class StorageEngine(Protocol):
    """Moves ranges of open files to and from memory. Thread-safe but for close()."""

    name: str

    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        """Opens an existing file and returns its id, never used twice.

        A file is opened for reading and writing, or with `read_only` for reading alone. Then a read
        may end behind the end that the file had when it was opened: the bytes behind the end are
        left as they are. Raises StorageError; with `direct`, EINVAL says that the file system has
        no O_DIRECT.
        """
        ...

    def close_file(self, file: int) -> None:
        """Closes one file after everything queued for it has completed."""
        ...

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        """Queues one request. Raises StorageError at once for an unknown file or bad alignment.

        Waits while the device has its maximum of unfinished requests of this priority. Requests of
        other priorities do not wait for that.
        """
        ...

    def sync(self, file: int) -> None:
        """Calls fdatasync, for the requests that are done. After a failure nothing is certain."""
        ...

    def drain(self) -> None:
        """Waits until nothing is queued or in flight. Raises nothing: tickets carry the errors."""
        ...

    def stats(self) -> Sequence[FileStats]:
        """Returns the counts since the engine was opened, of each open file and of the first 64
        paths that were closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Drains, ends the threads, closes the files. Idempotent."""
        ...


# -- Statistics ------------------------------------------------------------------------------------
#
# Bytes, latencies, queue depth. Numbers only grow; subtract two snapshots, latencies bucket by
# bucket, to see what happened in between.


# Counts of latencies, in four buckets per power of two from 16 us to 128 s
# (io/include/infinity_io/histogram.h).
LatencyCounts: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileStats:
    """Statistics of one file, hence of one swap path. Reads and writes count blocks, not requests.

    `busy_s` is the time with at least one block in flight, `in_flight_s` the time in flight summed
    over blocks; `in_flight_s / busy_s` is the mean queue depth while the device was busy. Latencies
    run from the issue of a block to its completion.
    """

    file: int
    path: str
    read_nbytes: int = 0
    write_nbytes: int = 0
    num_reads: int = 0
    num_writes: int = 0
    num_retries: int = 0
    num_short_transfers: int = 0
    num_errors: int = 0
    busy_s: float = 0.0
    in_flight_s: float = 0.0
    max_in_flight: int = 0
    read_latency: LatencyCounts = ()
    write_latency: LatencyCounts = ()
