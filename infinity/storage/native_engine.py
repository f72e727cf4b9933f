"""The two native engines, io_uring and threads, behind the StorageEngine protocol.

The native engine compares a queue depth with its neighbours while the drive works
(io/src/depth_control.h). The depth changes how fast bytes move, never which bytes: requests that
overlap keep their order.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Sequence
from errno import EINVAL, ENOMEM
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from typing_extensions import override

from infinity import _core
from infinity.errors import ConfigError, StorageError, UnsupportedError
from infinity.sizes import MIB, format_nbytes
from infinity.storage.arena import Arena
from infinity.storage.probe import (
    explain_missing_uring,
    explain_refused_rings,
    memlock_nbytes,
)
from infinity.storage.protocol import (
    FileStats,
    Operation,
    Priority,
    Segment,
    StorageEngine,
    Ticket,
)

if TYPE_CHECKING:
    from infinity.config.schema.engine import Io

EngineName = Literal["auto", "io_uring", "threads"]

# Bytes in flight per drive: at the least, at first, at the most. An urgent read waits behind them.
_IN_FLIGHT_NBYTES = (8 * MIB, 16 * MIB, 32 * MIB)
_AUTO_DEPTH = (2, 256)  # 1 leaves the drive idle between two requests.

_log = logging.getLogger(__name__)


def depth_range(queue_depth: int | Literal["auto"], block_nbytes: int) -> tuple[int, int, int]:
    """Returns the blocks in flight on one drive for `[io] queue_depth`: at the least, at first, at
    the most. A number is all three."""
    if queue_depth != "auto":
        return queue_depth, queue_depth, queue_depth
    low, high = _AUTO_DEPTH
    least, start, most = (min(high, max(low, n // block_nbytes)) for n in _IN_FLIGHT_NBYTES)
    return least, start, most


class NativeEngine(StorageEngine):
    """Thin: converts arguments and reports. Queues, rings and threads live in `infinity._core`.

    Opened by `open_engine`. Keeps the arena's memory alive as long as it lives itself.
    """

    def __init__(self, core: _core.Engine, *, is_uring: bool, has_arena: bool) -> None:
        self.name = "io_uring" if is_uring else "threads"
        self._has_reported_buffers = not (has_arena and is_uring)
        self._core = core

    @override
    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        file = self._core.open(os.fspath(path), direct, read_only)
        if not self._has_reported_buffers:
            self._has_reported_buffers = True
            self._report_buffers()
        return file

    @override
    def close_file(self, file: int) -> None:
        self._core.close_file(file)

    @override
    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        if operation not in ("read", "write"):
            raise ValueError(f"{operation=}, expected 'read' or 'write'")
        fields = [
            (segment.file, segment.offset_nbytes, segment.address, segment.nbytes)
            for segment in segments
        ]
        for file, offset_nbytes, address, nbytes in fields:
            if offset_nbytes < 0 or nbytes < 0 or address < 0:
                raise StorageError(
                    EINVAL,
                    operation=operation,
                    path=self._path_of(file),
                    offset_nbytes=offset_nbytes,
                    nbytes=nbytes,
                    detail="offset, length and address must not be negative",
                )
        return self._core.submit(operation == "write", fields, Priority(priority))

    @override
    def sync(self, file: int) -> None:
        self._core.sync(file)

    @override
    def drain(self) -> None:
        self._core.drain()

    @override
    def stats(self) -> Sequence[FileStats]:
        return [FileStats(*fields[:-2], *map(tuple, fields[-2:])) for fields in self._core.stats()]

    @override
    def close(self) -> None:
        self._core.close()

    def _path_of(self, file: int) -> str:
        paths = {report.file: report.path for report in self.stats()}
        return paths.get(file, f"file {file}")

    def _report_buffers(self) -> None:
        lane = self._core.lanes()[0]
        if lane["has_registered_buffers"]:
            return
        code = lane["register_buffers_errno"]
        remedy = ""
        if code == ENOMEM:
            limit_nbytes = memlock_nbytes()
            limit = "none" if limit_nbytes is None else format_nbytes(limit_nbytes)
            remedy = f" (memlock limit {limit}; raise it with 'ulimit -l' or LimitMEMLOCK)"
        _log.info(
            "io_uring without registered buffers: %s%s; plain buffers cost somewhat more CPU",
            os.strerror(code),
            remedy,
        )


def open_configured(io: Io, arena: Arena | None, **changes: Any) -> StorageEngine:
    """Opens the engine that `[io]` describes.

    `changes` are options of `open_engine` that replace those of `io`; None keeps the option.
    """
    options: dict[str, Any] = {
        "block_nbytes": io.block_size,
        "queue_depth": io.queue_depth,
        "num_threads": io.threads,
    }
    options |= {name: value for name, value in changes.items() if value is not None}
    return open_engine(io.engine, arena=arena, **options)


def open_engine(
    name: EngineName = "auto",
    *,
    arena: Arena | None,
    block_nbytes: int = 4 << 20,
    queue_depth: int | Literal["auto"] = 4,
    num_threads: int = 4,
    max_pending: int = 1024,
) -> StorageEngine:
    """Opens the engine `name`; "auto" takes io_uring, or threads with one warning and its cause.

    `arena` is registered with the rings when the memlock limit permits, and kept alive by the
    engine. `queue_depth` counts blocks of `block_nbytes` in flight per device; smaller ones are
    issued until their bytes are as many; "auto" finds the number while the drive works.
    `num_threads` threads serve a device of the thread engine.
    `max_pending` bounds the unfinished requests per device and priority. The environment variable
    INFINITY_IO_ENGINE overrides "auto" only. Raises UnsupportedError when `name` is "io_uring" and
    the kernel refuses it.
    """
    least, start, most = depth_range(queue_depth, block_nbytes)

    def opened(*, is_uring: bool) -> StorageEngine:
        try:
            core = _core.Engine(
                is_uring, None if arena is None else arena.core,
                block_nbytes=block_nbytes, queue_depth=start, num_threads=num_threads,
                max_pending=max_pending, min_queue_depth=least if least < most else 0,
                max_queue_depth=most if least < most else 0,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return NativeEngine(core, is_uring=is_uring, has_arena=arena is not None)

    chosen = _chosen(name)
    if chosen == "threads":
        return opened(is_uring=False)
    try:
        return opened(is_uring=True)
    except StorageError as error:  # A small ring was granted, those of this size are not.
        refusal = explain_refused_rings(error.errno or 0, error.detail)
        if chosen == "io_uring":
            raise UnsupportedError(f"the io_uring engine cannot start: {refusal}") from error
        _warn_of_fallback(str(refusal))
        return opened(is_uring=False)


def _chosen(name: EngineName) -> EngineName:
    """Returns "threads" where io_uring is not asked for, or "auto" may not have it; else `name`."""
    chosen = os.environ.get("INFINITY_IO_ENGINE", "auto") if name == "auto" else name
    if chosen not in get_args(EngineName):
        where = "INFINITY_IO_ENGINE" if name == "auto" else "engine"
        raise ConfigError(f"{where}={chosen!r}, expected 'auto', 'io_uring' or 'threads'")
    cause = None if chosen == "threads" else explain_missing_uring()
    if cause is not None and chosen == "io_uring":
        raise UnsupportedError(f"the io_uring engine cannot start: {cause}")
    if cause is not None:
        _warn_of_fallback(cause)
        return "threads"
    return cast(EngineName, chosen)


@functools.cache  # Once for each cause.
def _warn_of_fallback(cause: str) -> None:
    message = (
        f"storage engine: threads, because io_uring is not available: {cause} "
        "Bandwidth is normally the same, CPU use is 2-3 times higher. "
        "engine='threads' chooses this without the warning."
    )
    _log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
