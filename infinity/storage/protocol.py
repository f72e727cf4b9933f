"""The storage engine as everyone else sees it: segments in, a ticket out.

A request is a list of segments with one ticket. The engine cuts it into blocks, and gathers small
segments and small requests that go on where another ends in the file into one, wherever in memory
they are. It keeps a few blocks in flight per device, most urgent first, and examines every
completion. A buffer belongs to the
request until its ticket is done, also when the request fails or is cancelled.

Requests that overlap in a file, one of them writing, are carried out in the order in which they
were submitted, and the earlier one becomes as urgent as the later. All others go in any order, and
so do the segments of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

from infinity.storage.statistics import DeviceStats, EngineStats, FileStats, LatencyHistogram

__all__ = [
    "DeviceStats", "EngineStats", "FileStats", "LatencyHistogram", "Operation", "Priority",
    "Segment", "StorageEngine", "Ticket",
]  # fmt: skip

Operation = Literal["read", "write"]


class Priority(IntEnum):
    """Who goes first on a device. Smaller is more urgent; write-backs are slowed, never starved. A
    copy has what is left over, or one block of 17 where nothing is."""

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
    """The caller's end of one request. Any thread may use it; not a forked child."""

    def done(self) -> bool:
        """True when every block has completed, well or badly: the buffers are free again."""
        ...

    def cancel(self) -> bool:
        """Drops what has not been given to the device; what has cannot be called back.

        Returns whether anything was dropped: then wait() raises StorageError with ECANCELED, and a
        write has left its range torn between old and new. The buffers are free when done().
        """
        ...

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        """(file, nbytes, issued_ns, completed_ns) of each file; empty until done().

        From the first block given to the kernel to the last completion seen, both stamped by the
        storage thread on CLOCK_MONOTONIC. A file that no block of the request reached is absent.
        """
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for done(). Raises StorageError with the first failure, every time it is called.

        Raises TimeoutError when the time is up; the request goes on. Signals interrupt the wait
        within about 50 ms, and the request goes on as well.
        """
        ...


class StorageEngine(Protocol):
    """Moves ranges of open files to and from memory. Thread-safe but for close()."""

    name: str

    def open(self, path: str, *, direct: bool) -> int:
        """Opens an existing file for reading and writing and returns its id, never used twice.

        Raises StorageError; with `direct`, EINVAL says that the file system has no O_DIRECT.
        """
        ...

    def close_file(self, file: int) -> None:
        """Closes one file after everything queued for it has completed."""
        ...

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        """Queues one request. Raises StorageError at once for an unknown file or bad alignment.

        Waits while the device has as many unfinished requests of this priority as it takes; other
        priorities are not held up by that.
        """
        ...

    def sync(self, file: int) -> None:
        """fdatasync. Covers the requests that are done. After a failure nothing is certain."""
        ...

    def drain(self) -> None:
        """Waits until nothing is queued or in flight. Raises nothing: tickets carry the errors."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Drains, ends the threads, closes the files. Idempotent."""
        ...
