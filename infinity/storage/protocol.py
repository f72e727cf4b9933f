"""The protocol of a storage engine: a request of segments goes in, a ticket comes out.

A request is a list of segments with one ticket. The engine splits requests into blocks. It merges
small segments and small requests that are adjacent in the file, wherever they are in memory. A few
blocks are in flight per device, the most urgent first, and every completion is examined. A buffer
belongs to the request until its ticket is done, also when the request fails or is cancelled.

Requests that overlap in a file, one of them a write, run in the order of submission; the earlier
one becomes as urgent as the later one. All other requests run in any order, and so do the segments
of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, Self

from infinity.storage.statistics import DeviceStats, EngineStats, FileStats, LatencyHistogram

__all__ = [
    "DeviceStats", "EngineStats", "FileStats", "LatencyHistogram", "Operation", "Priority",
    "Segment", "StorageEngine", "Ticket",
]  # fmt: skip

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


class Ticket(Protocol):
    """The state of one request, for the caller. Any thread may use it; a forked child may not."""

    def done(self) -> bool:
        """Returns whether every block has completed or failed: the buffers are free again."""
        ...

    def cancel(self) -> bool:
        """Drops the blocks that were not submitted to the device; the others continue.

        Returns whether anything was dropped: then wait() raises StorageError with ECANCELED, and a
        write has left its range torn between old and new. The buffers are free when done().
        """
        ...

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        """(file, nbytes, issued_ns, completed_ns) of each file; empty until done().

        The times are those of the first block submitted and of the last completion, taken by the
        storage thread on CLOCK_MONOTONIC. A file that no block of the request reached is absent.
        """
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for done(). Raises StorageError with the first failure, every time it is called.

        Raises TimeoutError after `timeout_s`; the request continues. Signals interrupt the wait
        within about 50 ms; the request continues then, too.
        """
        ...


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

    def stats(self) -> EngineStats:
        """Returns the counts since the engine was opened, by device and by file."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *unused: object) -> None:
        """Closes the engine."""

    def close(self) -> None:
        """Drains, ends the threads, closes the files. Idempotent."""
        ...
