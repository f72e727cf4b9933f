"""A volume: pieces of bytes striped over one swap directory per path.

Pieces are reserved once, then read and written in ranges. A volume belongs to one job and holds
scratch data: nothing in it outlives close(), unless the files are asked to stay.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infinity.errors import CapacityError, ConfigError, StorageError, UnsupportedError
from infinity.sizes import MIB, PAGE_NBYTES, format_nbytes
from infinity.storage.bandwidth import SAMPLE_NBYTES, measure_bandwidth
from infinity.storage.checksums import CheckedRead, ExpectedRange, PageChecksums, digest
from infinity.storage.engine import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.volume_layout import Extent, PathSpace, slice_extents, stripe

__all__ = ["Extent", "Volume", "VolumePath"]

_log = logging.getLogger(__name__)
_warned_buffered: set[str] = set()


@dataclass(frozen=True, slots=True)
class VolumePath:
    """One swap directory. `capacity_nbytes` None takes the free space less a reserve.

    `direct` "auto" uses O_DIRECT where the file system has it, "always" insists on it, "never" goes
    through the page cache. `weight` is the path's bandwidth in GB/s, or a number proportional to it
    where every path has one. None measures it, when there are several paths.
    """

    path: str
    capacity_nbytes: int | None = None
    direct: Literal["auto", "always", "never"] = "auto"
    weight: float | None = 1.0


class Volume:
    """Pieces on NVMe: reserve, read, write, close.

    One thread at a time reserves and closes; reads and writes may come from any thread. After a
    write has failed, every call raises that first error: what is on the path is not known any more.
    With `verify`, each page that is written gets a checksum, and waiting for a read raises
    CorruptionError when a page is not what was written last. The engine is the caller's and
    outlives the volume.
    """

    def __init__(
        self,
        engine: StorageEngine,
        paths: Sequence[VolumePath],
        *,
        stripe_nbytes: int = 4 * MIB,
        verify: bool = False,
    ) -> None:
        if not paths:
            raise ConfigError("a volume needs at least one path")
        if stripe_nbytes <= 0 or stripe_nbytes % PAGE_NBYTES:
            raise ConfigError(f"{stripe_nbytes=}, expected a positive multiple of {PAGE_NBYTES}")
        self._engine = engine
        self._paths = tuple(paths)
        self._stripe_nbytes = stripe_nbytes
        self._directories: list[SwapDirectory] = []
        self._files: list[int] = []
        self._checksums: list[PageChecksums] | None = [] if verify else None  # of each file
        self._lock = threading.Lock()  # guards the two below
        self._pending_writes: list[Ticket] = []
        self._failure: StorageError | None = None
        self._is_closed = False
        try:
            for path in self._paths:
                self._open_path(path)
            self._weights = self._find_weights()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of the stripes that each path gets: as configured, or its measured GB/s."""
        return self._weights

    @property
    def file_paths(self) -> tuple[str, ...]:
        """The swap file of each path."""
        return tuple(directory.swap_path for directory in self._directories)

    def path_of(self, file: int) -> str:
        """The swap directory, as configured, behind a file id of `Ticket.passages`."""
        return self._paths[self._files.index(file)].path

    def reserve(self, sizes_nbytes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Reserves one piece per size, rounded up to 4096 bytes, and preallocates the files.

        Fresh pieces read as zeros. Raises CapacityError, with the numbers of each path, before any
        file grows. May be called again; pieces are never given back.
        """
        self._check_usable()
        pieces = stripe(sizes_nbytes, self._spaces(), stripe_nbytes=self._stripe_nbytes)
        ends = [directory.size_nbytes for directory in self._directories]
        for extents in pieces:
            for extent in extents:
                end_nbytes = extent.offset_nbytes + extent.nbytes
                ends[extent.path_index] = max(ends[extent.path_index], end_nbytes)
        self._check_devices(ends)
        for directory, end_nbytes in zip(self._directories, ends, strict=True):
            directory.grow(end_nbytes)
        for checksums, end_nbytes in zip(self._checksums or (), ends, strict=False):
            checksums.grow(end_nbytes)
        return pieces

    def read(
        self,
        extents: Sequence[Extent],
        *,
        offset_nbytes: int,
        nbytes: int,
        address: int,
        priority: Priority,
    ) -> Ticket:
        """Reads a range of a piece into memory. Offset, length and address: multiples of 4096."""
        return self._submit(
            "read", extents, offset_nbytes=offset_nbytes, nbytes=nbytes, address=address,
            priority=priority,
        )  # fmt: skip

    def write(
        self,
        extents: Sequence[Extent],
        *,
        offset_nbytes: int,
        nbytes: int,
        address: int,
        priority: Priority,
    ) -> Ticket:
        """Writes memory to a range of a piece. It must not change until the ticket is done."""
        ticket = self._submit(
            "write", extents, offset_nbytes=offset_nbytes, nbytes=nbytes, address=address,
            priority=priority,
        )  # fmt: skip
        with self._lock:
            self._pending_writes.append(ticket)
        return ticket

    def sync(self) -> None:
        """fdatasync of every path, after the writes whose tickets are done."""
        self._check_usable()
        for file in self._files:
            try:
                self._engine.sync(file)
            except StorageError as error:
                with self._lock:
                    self._failure = self._failure or error
                raise

    def close(self, *, remove: bool = True) -> None:
        """Waits for what is in flight, removes its own files, releases the locks. Idempotent.

        `remove` False leaves the swap files; later volumes in the directory leave them, too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # One failure does not keep the others from closing.
            for directory in self._directories:
                stack.callback(directory.close, remove=remove)
            for file in self._files:
                stack.callback(self._close_file, file)

    def _close_file(self, file: int) -> None:
        try:
            self._engine.close_file(file)
        except StorageError as error:
            if error.errno != errno.EBADF:  # EBADF: the engine was closed first.
                raise

    def _open_path(self, path: VolumePath) -> None:
        directory = SwapDirectory(path.path)
        self._directories.append(directory)
        is_direct = path.direct != "never"
        refusal = directory.refusal_of_direct_io() if is_direct else None
        if refusal is not None:
            if path.direct == "always":
                raise UnsupportedError(
                    f"direct I/O was asked for and is not possible in {path.path!r}: {refusal}. "
                    "Use another file system (ext4, XFS), or direct='auto'"
                )
            _warn_of_buffering(path.path, refusal)
            is_direct = False
        self._files.append(self._engine.open(directory.swap_path, direct=is_direct))
        if self._checksums is not None:
            self._checksums.append(PageChecksums())

    def _find_weights(self) -> tuple[float, ...]:
        """Measures the paths without a weight. When one of them has no room for it, all are equal:
        a guess for one would be no better than that."""
        given = [path.weight for path in self._paths]
        if len(given) == 1:
            return (given[0] or 1.0,)
        if not all(
            weight is not None or self._has_room_to_measure(index)
            for index, weight in enumerate(given)
        ):
            _log.info("swap paths too small to be measured are striped evenly")
            return tuple(weight or 1.0 for weight in given)
        found = []
        for weight, directory, file in zip(given, self._directories, self._files, strict=True):
            if weight is None:
                with directory.scratch(SAMPLE_NBYTES):
                    weight = measure_bandwidth(self._engine, file) / 1e9
                _log.info("swap path %r moves %.2f GB/s", directory.path, weight)
            found.append(weight)
        return tuple(found)

    def _has_room_to_measure(self, index: int) -> bool:
        capacity_nbytes = self._paths[index].capacity_nbytes
        free_nbytes = self._directories[index].free_nbytes()
        return all(
            nbytes is None or nbytes >= SAMPLE_NBYTES for nbytes in (capacity_nbytes, free_nbytes)
        )

    def _spaces(self) -> list[PathSpace]:
        """What each path may still grow. Paths on one device share its free space by weight."""
        spaces = []
        together = list(zip(self._paths, self._directories, self._weights, strict=True))
        for path, directory, weight in together:
            sharing = [
                other_weight
                for other, there, other_weight in together
                if there.device == directory.device and other.capacity_nbytes is None
            ]
            free_nbytes = directory.free_nbytes()
            if path.capacity_nbytes is not None:
                room_nbytes = max(0, path.capacity_nbytes - directory.size_nbytes)
                if free_nbytes is not None:
                    room_nbytes = min(room_nbytes, free_nbytes)
            elif free_nbytes is None:
                room_nbytes = 1 << 62
            else:
                room_nbytes = int(free_nbytes * (weight / sum(sharing)))
            spaces.append(PathSpace(directory.size_nbytes, room_nbytes, weight))
        return spaces

    def _check_devices(self, ends: Sequence[int]) -> None:
        """Two paths on one device fill it together."""
        for directory in self._directories:
            free_nbytes = directory.free_nbytes()
            growth_nbytes = sum(
                end - other.size_nbytes
                for end, other in zip(ends, self._directories, strict=True)
                if other.device == directory.device
            )
            if free_nbytes is not None and growth_nbytes > free_nbytes:
                raise CapacityError(
                    "nvme",
                    needed_nbytes=growth_nbytes,
                    available_nbytes=free_nbytes,
                    key="tiers.nvme.capacity",
                    detail=f"the device of {directory.path!r} is too full "
                    f"({format_nbytes(free_nbytes)} free)",
                )

    def _submit(
        self,
        operation: Operation,
        extents: Sequence[Extent],
        *,
        offset_nbytes: int,
        nbytes: int,
        address: int,
        priority: Priority,
    ) -> Ticket:
        self._check_usable()
        if offset_nbytes % PAGE_NBYTES or nbytes % PAGE_NBYTES or address % PAGE_NBYTES:
            raise ValueError(
                f"{offset_nbytes=}, {nbytes=} and {address=} must be multiples of {PAGE_NBYTES}"
            )
        parts = slice_extents(extents, offset_nbytes=offset_nbytes, nbytes=nbytes)
        segments = [
            Segment(
                self._files[extent.path_index], extent.offset_nbytes, address + at, extent.nbytes
            )
            for extent, at in parts
        ]
        if self._checksums is None:
            return self._engine.submit(operation, segments, priority)
        if operation == "write":
            # Recorded once the write is queued: a refused one leaves the old bytes and checksums.
            found = [digest(address + at, extent.nbytes) for extent, at in parts]
            ticket = self._engine.submit(operation, segments, priority)
            for (extent, _), checksums in zip(parts, found, strict=True):
                self._checksums[extent.path_index].put(extent.offset_nbytes, checksums)
            return ticket
        # Taken before the read is queued: later writes are carried out after it.
        expected = [
            ExpectedRange(
                self._directories[extent.path_index].swap_path,
                extent.offset_nbytes,
                address + at,
                extent.nbytes,
                self._checksums[extent.path_index].of(extent.offset_nbytes, extent.nbytes),
            )
            for extent, at in parts
        ]
        return CheckedRead(self._engine.submit(operation, segments, priority), expected)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StorageError(
                errno.EBADF, operation="use", path=self._paths[0].path,
                detail="the volume is closed",
            )  # fmt: skip
        with self._lock:
            self._look_for_failed_writes()
            if self._failure is not None:
                raise self._failure.with_traceback(None)

    def _look_for_failed_writes(self) -> None:
        """Also those whose tickets nobody waits for. `_lock` is held."""
        pending, self._pending_writes = self._pending_writes, []
        for ticket in pending:
            if not ticket.done():
                self._pending_writes.append(ticket)
                continue
            try:
                ticket.wait()
            except StorageError as error:
                if error.errno != errno.ECANCELED:  # Torn by request, as its caller knows.
                    self._failure = self._failure or error


def _warn_of_buffering(path: str, refusal: str) -> None:
    message = (
        f"swap path {path!r} goes through the page cache, because direct I/O is not possible: "
        f"{refusal}. Expect 40-100 times the CPU use and less bandwidth; ext4 and XFS support it, "
        "direct='never' silences this"
    )
    if path in _warned_buffered:
        return
    _warned_buffered.add(path)
    _log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)
