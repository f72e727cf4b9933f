"""The storage engine as everyone else sees it: segments in, a ticket out.

A request is a list of segments with one ticket. The engine cuts it into blocks, keeps a few of them
in flight per device, most urgent first, and examines every completion. A buffer belongs to the
request until its ticket is done, also when the request fails.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Protocol

from infinity.errors import ConfigError, UnsupportedError
from infinity.sizes import PAGE_NBYTES

if TYPE_CHECKING:
    from infinity.storage.arena import Arena

EngineName = Literal["auto", "io_uring", "threads"]
Operation = Literal["read", "write"]

MAX_BLOCK_NBYTES = 1 << 30
MAX_QUEUE_DEPTH = 1024

_log = logging.getLogger(__name__)
_warned_fallbacks: set[str] = set()


class Priority(IntEnum):
    """Who goes first on a device. Smaller is more urgent; write-backs are slowed, never starved."""

    FORWARD = 0
    BACKWARD = 1
    STATE = 2
    WRITE_BACK = 3


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
class FileStats:
    """What one file has seen since it was opened. Reads and writes count blocks, not requests."""

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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums over all files ever opened, and the files one by one. `busy_s` adds up over files."""

    by_file: tuple[FileStats, ...] = ()
    read_nbytes: int = field(init=False)
    write_nbytes: int = field(init=False)
    num_reads: int = field(init=False)
    num_writes: int = field(init=False)
    num_retries: int = field(init=False)
    num_short_transfers: int = field(init=False)
    num_errors: int = field(init=False)
    busy_s: float = field(init=False)

    def __post_init__(self) -> None:
        for name in (
            "read_nbytes", "write_nbytes", "num_reads", "num_writes", "num_retries",
            "num_short_transfers", "num_errors", "busy_s",
        ):  # fmt: skip
            object.__setattr__(self, name, sum(getattr(file, name) for file in self.by_file))


class Ticket(Protocol):
    """The caller's end of one request. Any thread may use it; not a forked child."""

    def done(self) -> bool:
        """True when every block has completed, well or badly: the buffers are free again."""
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

        Two requests that overlap are not ordered with each other: wait for the first one.
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


def open_engine(
    name: EngineName = "auto",
    *,
    arena: Arena | None,
    block_nbytes: int = 4 << 20,
    queue_depth: int = 4,
    num_threads: int = 4,
) -> StorageEngine:
    """Opens the engine `name`; "auto" takes io_uring, or threads with one warning that says why.

    `arena` is registered with the rings when the memlock limit permits, and kept alive by the
    engine. `queue_depth` counts blocks in flight per device; `num_threads` threads serve one device
    in the thread engine. The environment variable INFINITY_IO_ENGINE overrides "auto" only.
    Raises UnsupportedError when `name` is "io_uring" and the kernel refuses it.
    """
    # Here, not above: the protocol can be imported without the native module.
    from infinity.storage.native import NativeEngine
    from infinity.storage.probe import explain_missing_uring

    _check_options(block_nbytes=block_nbytes, queue_depth=queue_depth, num_threads=num_threads)
    chosen = os.environ.get("INFINITY_IO_ENGINE", "auto") if name == "auto" else name
    if chosen not in ("auto", "io_uring", "threads"):
        where = "INFINITY_IO_ENGINE" if name == "auto" else "engine"
        raise ConfigError(f"{where}={chosen!r}, expected 'auto', 'io_uring' or 'threads'")
    is_uring = False
    if chosen != "threads":
        cause = explain_missing_uring()
        is_uring = cause is None
        if cause is not None and chosen == "io_uring":
            raise UnsupportedError(f"the io_uring engine cannot start: {cause}")
        if cause is not None:
            _warn_of_fallback(cause)
    return NativeEngine(
        is_uring=is_uring,
        arena=arena,
        block_nbytes=block_nbytes,
        queue_depth=queue_depth,
        num_threads=num_threads,
    )


def _check_options(*, block_nbytes: int, queue_depth: int, num_threads: int) -> None:
    if not PAGE_NBYTES <= block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % PAGE_NBYTES:
        raise ConfigError(
            f"{block_nbytes=}, expected a multiple of {PAGE_NBYTES} up to {MAX_BLOCK_NBYTES}"
        )
    for key, value in (("queue_depth", queue_depth), ("num_threads", num_threads)):
        if not 1 <= value <= MAX_QUEUE_DEPTH:
            raise ConfigError(f"{key}={value}, expected 1..{MAX_QUEUE_DEPTH}")


def _warn_of_fallback(cause: str) -> None:
    message = (
        f"storage engine: threads, because io_uring is not available: {cause} "
        "Bandwidth is normally the same, CPU use is 2-3 times higher. "
        "engine='threads' chooses this without the warning."
    )
    if message in _warned_fallbacks:
        return
    _warned_fallbacks.add(message)
    _log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
