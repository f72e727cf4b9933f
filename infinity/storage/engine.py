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

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

from infinity.errors import ConfigError, StorageError, UnsupportedError
from infinity.sizes import PAGE_NBYTES
from infinity.storage.statistics import DeviceStats, EngineStats, FileStats, LatencyHistogram

if TYPE_CHECKING:
    from infinity.config.schema import Io
    from infinity.storage.arena import Arena

__all__ = [
    "DeviceStats", "EngineName", "EngineStats", "FileStats", "LatencyHistogram", "Operation",
    "Priority", "RingFlags", "Segment", "StorageEngine", "Ticket", "open_configured", "open_engine",
]  # fmt: skip

EngineName = Literal["auto", "io_uring", "threads"]
Operation = Literal["read", "write"]
RingFlags = Literal["auto", "defer_taskrun", "coop_taskrun", "none"]

MAX_BLOCK_NBYTES = 1 << 30
MAX_QUEUE_DEPTH = 1024
MAX_RINGS = 16

_log = logging.getLogger(__name__)
_warned_fallbacks: set[str] = set()


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

    def __enter__(self) -> Self: ...

    def __exit__(self, *unused: object) -> None:
        """Closes the engine."""

    def close(self) -> None:
        """Drains, ends the threads, closes the files. Idempotent."""
        ...


def open_configured(io: Io, arena: Arena | None, **changes: Any) -> StorageEngine:
    """The engine that `[io]` describes; `changes` are options of `open_engine` that differ from it,
    None where they do not."""
    options: dict[str, Any] = {
        "block_nbytes": io.block_size,
        "queue_depth": io.queue_depth,
        "num_threads": io.threads,
        "num_rings": io.rings,
        "ring_flags": io.flags,
    }
    options |= {name: value for name, value in changes.items() if value is not None}
    return open_engine(io.engine, arena=arena, **options)


def open_engine(
    name: EngineName = "auto",
    *,
    arena: Arena | None,
    block_nbytes: int = 4 << 20,
    queue_depth: int = 4,
    num_threads: int = 4,
    max_pending: int = 1024,
    num_rings: int = 1,
    ring_flags: RingFlags = "auto",
) -> StorageEngine:
    """Opens the engine `name`; "auto" takes io_uring, or threads with one warning that says why.

    `arena` is registered with the rings when the memlock limit permits, and kept alive by the
    engine. `queue_depth` counts blocks of `block_nbytes` in flight per device; smaller ones are
    issued until they weigh the same. `num_threads` threads serve one device in the thread engine.
    `max_pending` bounds the unfinished requests per device and priority. `num_rings` rings share
    the window and the queue of one device, each with a thread; `ring_flags` are what they are set
    up with, "auto" the best that the kernel grants (io/README.md); the thread engine has no use for
    either. The environment variable INFINITY_IO_ENGINE overrides "auto" only.
    Raises UnsupportedError when `name` is "io_uring" and the kernel refuses it, or when it refuses
    flags that were asked for by name.
    """
    # Here, not above: the protocol can be imported without the native module.
    from infinity.storage.native import NativeEngine
    from infinity.storage.probe import (
        explain_missing_uring,
        explain_refused_rings,
        grants_ring_flags,
    )

    _check_options(
        block_nbytes=block_nbytes,
        queue_depth=queue_depth,
        num_threads=num_threads,
        max_pending=max_pending,
        num_rings=num_rings,
        ring_flags=ring_flags,
    )
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
        elif ring_flags != "auto" and not grants_ring_flags(ring_flags):
            raise UnsupportedError(
                f"this kernel ({os.uname().release}) refuses rings with {ring_flags}; "
                'flags = "auto" takes the best that it grants'
            )
    options: dict[str, Any] = {
        "arena": arena,
        "block_nbytes": block_nbytes,
        "queue_depth": queue_depth,
        "num_threads": num_threads,
        "max_pending": max_pending,
        "num_rings": num_rings,
        "ring_flags": ring_flags,
    }
    if is_uring:
        try:
            return NativeEngine(is_uring=True, **options)
        except StorageError as error:  # A small ring was granted, those of this size are not.
            refusal = explain_refused_rings(error.errno or 0, error.detail)
            if chosen == "io_uring":
                raise UnsupportedError(f"the io_uring engine cannot start: {refusal}") from error
            _warn_of_fallback(str(refusal))
    return NativeEngine(is_uring=False, **options)


def _check_options(
    *,
    block_nbytes: int,
    queue_depth: int,
    num_threads: int,
    max_pending: int,
    num_rings: int,
    ring_flags: RingFlags,
) -> None:
    if not PAGE_NBYTES <= block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % PAGE_NBYTES:
        raise ConfigError(
            f"{block_nbytes=}, expected a multiple of {PAGE_NBYTES} up to {MAX_BLOCK_NBYTES}"
        )
    for key, value, maximum in (
        ("queue_depth", queue_depth, MAX_QUEUE_DEPTH),
        ("num_threads", num_threads, MAX_QUEUE_DEPTH),
        ("num_rings", num_rings, MAX_RINGS),
    ):
        if not 1 <= value <= maximum:
            raise ConfigError(f"{key}={value}, expected 1..{maximum}")
    if ring_flags not in get_args(RingFlags):
        raise ConfigError(f"{ring_flags=}, expected one of {', '.join(get_args(RingFlags))}")
    if max_pending < 1:
        raise ConfigError(f"{max_pending=}, expected at least 1")


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
