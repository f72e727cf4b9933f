"""The two native engines, io_uring and threads, behind the StorageEngine protocol.

The native engine compares a queue depth with its neighbours while the drive works
(io/src/depth_control.h). The depth changes how fast bytes move, never which bytes: requests that
overlap keep their order.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EINVAL, ENOMEM
from typing import Literal

from typing_extensions import override

from infinity import _core
from infinity.errors import ConfigError, StorageError
from infinity.sizes import MIB, format_nbytes
from infinity.storage.arena import Arena
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.storage.statistics import DeviceStats, EngineStats, FileStats, histogram

RingFlags = Literal["auto", "defer_taskrun", "coop_taskrun", "none"]


MAX_QUEUE_DEPTH = 1024

# Bytes in flight per drive: at the least, at first, at the most. An urgent read waits behind them.
_IN_FLIGHT_NBYTES = (8 * MIB, 16 * MIB, 32 * MIB)
_AUTO_DEPTH = (2, 256)  # 1 leaves the drive idle between two requests.


@dataclass(frozen=True, slots=True)
class DepthRange:
    """Blocks in flight on one drive: at the least, at first, at the most."""

    least: int
    start: int
    most: int

    @property
    def is_fixed(self) -> bool:
        """Whether the limits are one number."""
        return self.least == self.most


def depth_range(queue_depth: int | Literal["auto"], block_nbytes: int) -> DepthRange:
    """Returns the limits for `[io] queue_depth`; a number is both. Raises ConfigError."""
    if queue_depth != "auto":
        if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
            raise ConfigError(f"queue_depth={queue_depth}, expected 1..{MAX_QUEUE_DEPTH}")
        return DepthRange(queue_depth, queue_depth, queue_depth)
    low, high = _AUTO_DEPTH
    return DepthRange(*(min(high, max(low, n // block_nbytes)) for n in _IN_FLIGHT_NBYTES))


_log = logging.getLogger(__name__)


class NativeEngine(StorageEngine):
    """Thin: converts arguments and reports. Queues, rings and threads live in `infinity._core`.

    Opened by `open_engine`. Keeps the arena's memory alive as long as it lives itself.
    """

    def __init__(
        self,
        *,
        is_uring: bool,
        arena: Arena | None,
        block_nbytes: int,
        depths: DepthRange,
        num_threads: int,
        max_pending: int,
        num_rings: int,
        ring_flags: RingFlags,
    ) -> None:
        self.name = "io_uring" if is_uring else "threads"
        self._has_reported_buffers = arena is None or not is_uring
        limits = {"min_queue_depth": depths.least, "max_queue_depth": depths.most}
        self._core = _core.Engine(
            is_uring,
            None if arena is None else arena.core,
            block_nbytes=block_nbytes,
            queue_depth=depths.start,
            num_threads=num_threads,
            max_pending=max_pending,
            num_rings=num_rings,
            ring_flags=ring_flags,
            **({} if depths.is_fixed else limits),
        )

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

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

    def alignment_nbytes(self, file: int) -> int:
        """Multiple that offsets, lengths and addresses must keep: 1 when the file is buffered."""
        return self._core.alignment_nbytes(file)

    def submit(
        self,
        operation: Operation,
        segments: Sequence[Segment],
        priority: Priority,
        *,
        timeout_s: float | None = None,
    ) -> Ticket:
        """See `StorageEngine.submit`. Raises TimeoutError if the queue is full for `timeout_s`."""
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
        return self._core.submit(operation == "write", fields, Priority(priority), timeout_s)

    @override
    def sync(self, file: int) -> None:
        self._core.sync(file)

    @override
    def drain(self) -> None:
        self._core.drain()

    @override
    def stats(self) -> EngineStats:
        files = tuple(
            FileStats(*fields[:-2], *map(histogram, fields[-2:])) for fields in self._core.stats()
        )
        devices = tuple(
            DeviceStats(
                device=lane["device"],
                num_pending=lane["num_pending"],
                num_in_flight=lane["num_in_flight"],
                num_cancelled=lane["num_cancelled"],
                cpu_s=lane["cpu_s"],
                stall_s=lane["stall_s"],
                queue_wait=histogram(lane["queue_wait"]),
            )
            for lane in self._core.lanes()
        )
        return EngineStats(files, devices)

    def describe(self) -> list[_core.LaneInfo]:
        """One dict per device in use: ring flags, registered buffers and files, refusals, and the
        numbers behind `DeviceStats`."""
        return self._core.lanes()

    @override
    def close(self) -> None:
        self._core.close()

    def _path_of(self, file: int) -> str:
        paths = {report.file: report.path for report in self.stats().by_file}
        return paths.get(file, f"file {file}")

    def _report_buffers(self) -> None:
        lane = self._core.lanes()[0]
        if lane["has_registered_buffers"]:
            return
        code = lane["register_buffers_errno"]
        remedy = ""
        if code == ENOMEM:
            limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            remedy = (
                f" (memlock limit {format_nbytes(limit_nbytes)}; raise it with 'ulimit -l' or "
                "LimitMEMLOCK)"
            )
        _log.info(
            "io_uring without registered buffers: %s%s; plain buffers cost somewhat more CPU",
            os.strerror(code),
            remedy,
        )
