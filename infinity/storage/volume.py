"""A volume: buffers of bytes striped over one swap directory per path.

Buffers are reserved once, then read and written in ranges. A volume belongs to one job and holds
scratch data: nothing in it outlives close(), unless the files are asked to stay, or are linked to
while they are frozen.

With spare files the current content can be frozen: later writes go elsewhere, until it is thawed
(`infinity.storage.generations`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from infinity.errors import CapacityError, ConfigError, StorageError, UnsupportedError
from infinity.sizes import MIB, PAGE_NBYTES, format_nbytes
from infinity.storage.bandwidth import SAMPLE_NBYTES, measure_bandwidth
from infinity.storage.checksums import (
    CHECKSUM_NBYTES,
    CheckedRead,
    DigestedWrite,
    ExpectedRange,
    PageChecksums,
    digest,
)
from infinity.storage.generations import (
    NOWHERE,
    GenerationMap,
    GenerationRun,
    choose_targets,
    split_by_frozen,
)
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.volume_layout import (
    SPARES_REMEDY,
    Extent,
    PathSpace,
    share_with_spares,
    slice_extents,
    stripe,
)

__all__ = ["Adopted", "Extent", "FileRange", "Frozen", "Volume", "VolumePath"]

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


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of the swap file at `path`."""

    path: str
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """The contents of the volume at one moment, with a label. Its maps are never changed."""

    label: str
    maps: tuple[GenerationMap, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """Swap files of a job that has ended, which this job continues to use.

    `jobs`: the job of the files, by path as configured. `contents`: by label, the ranges of the
    files that are frozen.
    """

    jobs: Mapping[str, str]
    contents: Mapping[str, Sequence[FileRange]]


class Volume:
    """Buffers on NVMe: reserve, read, write, close; freeze, thaw, restore.

    One thread at a time reserves and closes; reads and writes may come from any thread. After a
    write has failed, every call raises that first error: what is on the path is not known any more.
    With `verify`, each page that is written gets a checksum, and waiting for a read raises
    CorruptionError when a page is not what was written last. Without it a page that has changed is
    computed with, and what comes of it is written with a checksum that fits. The engine is the
    caller's and outlives the volume.

    `num_spares` further files per path let as many contents be frozen at a time. Then checksums are
    kept in any case, for whoever stores what was frozen, and what is read from frozen pages is
    always checked. With `adopted` swap files fresh pieces hold
    whatever was there; it is for who will `restore` a content.
    """

    def __init__(
        self,
        engine: StorageEngine,
        paths: Sequence[VolumePath],
        *,
        stripe_nbytes: int = 4 * MIB,
        verify: bool = True,
        num_spares: int = 0,
        adopted: Adopted | None = None,
    ) -> None:
        if not paths:
            raise ConfigError("a volume needs at least one path")
        if stripe_nbytes <= 0 or stripe_nbytes % PAGE_NBYTES:
            raise ConfigError(f"{stripe_nbytes=}, expected a positive multiple of {PAGE_NBYTES}")
        self._engine = engine
        self._paths = tuple(paths)
        self._stripe_nbytes = stripe_nbytes
        self._verify = verify
        self.num_spares = num_spares
        self._jobs = adopted.jobs if adopted is not None else {}
        self._scratch: list[Extent] = []  # What a commit does not keep.
        self._directories: list[SwapDirectory] = []
        self._files: list[list[int]] = []  # Of each path, by generation.
        # Of the current bytes of each path, whichever generations they are in.
        self._checksums: list[PageChecksums] | None = [] if verify or num_spares else None
        # A write needs its checksum when something is frozen, not before: beside the transfer.
        self._digester = ThreadPoolExecutor(1) if num_spares and not verify else None
        self._reserving = threading.Lock()
        self._lock = threading.Lock()  # guards the four below
        self._maps = tuple(GenerationMap() for _ in paths)
        self._frozen: list[Frozen] = []
        self._pending_writes: list[Ticket] = []
        self._failure: StorageError | None = None
        self._is_closed = False
        try:
            for path in self._paths:
                self._open_path(path)
            self._weights = self._find_weights()
            for label, ranges in adopted.contents.items() if adopted is not None else ():
                self._frozen.append(Frozen(label, self._maps_of(ranges)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def engine(self) -> StorageEngine:
        """For files beside the volume's, whose requests are to wait their turn with them."""
        return self._engine

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of the stripes that each path gets: as configured, or its measured GB/s."""
        return self._weights

    @property
    def file_paths(self) -> tuple[str, ...]:
        """The swap file of each path; the first one where there are spares."""
        return tuple(directory.swap_path for directory in self._directories)

    def path_of(self, file: int) -> str:
        """The swap directory, as configured, behind a file id of `Ticket.passages`."""
        return next(
            path.path for path, files in zip(self._paths, self._files, strict=True) if file in files
        )

    def reserve(
        self, sizes_nbytes: Sequence[int], *, spared_nbytes: Sequence[int | None] | None = None
    ) -> list[tuple[Extent, ...]]:
        """Reserves one buffer per size, rounded up to 4096 bytes, and preallocates the files.

        Of each piece the first `spared_nbytes` (default: all of it) are preallocated in the spare
        files too. The rest may be written while something is frozen as well, but finds its space
        only then. None: the piece is scratch, always written in place and never frozen.
        Fresh pieces read as zeros. Raises CapacityError, with the numbers of each path, before any
        file grows. May be called again, by any thread; pieces are never given back.
        """
        self._check_usable()
        with self._reserving:
            return self._reserve(sizes_nbytes, spared_nbytes)

    def _reserve(
        self, sizes_nbytes: Sequence[int], spared_nbytes: Sequence[int | None] | None
    ) -> list[tuple[Extent, ...]]:
        kept = sizes_nbytes if spared_nbytes is None else spared_nbytes
        heads = [(head or 0) if self.num_spares else 0 for head in kept]
        rooms = self._spaces()
        spaces = share_with_spares(rooms, sizes_nbytes, heads, num_spares=self.num_spares)
        pieces = stripe(sizes_nbytes, spaces, stripe_nbytes=self._stripe_nbytes)
        ends = [directory.size_nbytes for directory in self._directories]
        spared: list[list[tuple[int, int]]] = [[] for _ in self._paths]
        for extents, head_nbytes in zip(pieces, heads, strict=True):
            for extent in extents:
                end_nbytes = extent.offset_nbytes + extent.nbytes
                ends[extent.path_index] = max(ends[extent.path_index], end_nbytes)
            for extent, _ in slice_extents(extents, offset_nbytes=0, nbytes=head_nbytes):
                spared[extent.path_index].append((extent.offset_nbytes, extent.nbytes))
        self._scratch += [
            extent
            for extents, head in zip(pieces, kept, strict=True)
            for extent in extents
            if head is None
        ]
        growths = [
            end - directory.size_nbytes + self.num_spares * sum(nbytes for _, nbytes in ranges)
            for end, directory, ranges in zip(ends, self._directories, spared, strict=True)
        ]
        self._check_growths(growths, rooms)
        for directory, end_nbytes, ranges in zip(self._directories, ends, spared, strict=True):
            directory.grow(end_nbytes, spared=ranges)
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
        label: str = "",
    ) -> Ticket:
        """Reads a range of a buffer into memory. Offset, length and address: multiples of 4096.
        `label` says what the bytes are, in the error of a page that has changed."""
        return self._submit(
            "read", extents, offset_nbytes=offset_nbytes, nbytes=nbytes, address=address,
            priority=priority, label=label,
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
        """Writes memory, which must not change until the ticket is done, to a range of a buffer."""
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
        for file in (file for files in self._files for file in files):
            try:
                self._engine.sync(file)
            except StorageError as error:
                with self._lock:
                    self._failure = self._failure or error
                raise

    # -- Freezing ------------------------------------------------------------------------------

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """The frozen contents. With more than `num_spares` of them no write has a target."""
        with self._lock:
            return tuple(self._frozen)

    def freeze(self, label: str = "") -> Frozen:
        """Keeps the present bytes of every buffer until `thaw`; later writes go elsewhere.

        The tickets of all writes are done. The bytes are durable only after a sync.
        """
        self._check_usable()
        with self._lock:
            maps = tuple(each.copy() for each in self._maps)
            for extent in self._scratch:
                maps[extent.path_index].put(
                    GenerationRun(NOWHERE, extent.offset_nbytes, extent.nbytes)
                )
            frozen = Frozen(label, maps)
            self._frozen.append(frozen)
        return frozen

    def restore(self, frozen: Frozen) -> None:
        """Sets every buffer back to the bytes of `frozen`, which stays frozen. No byte moves.

        No request is in flight, and the caller drops what was read since. Scratch is unchanged.
        """
        self._check_usable()
        with self._lock:
            for index, (current, kept) in enumerate(zip(self._maps, frozen.maps, strict=True)):
                before = current.copy()
                current.assign(kept, where_nowhere=0)
                self._forget_checksums(index, before, current)

    def _forget_checksums(self, index: int, before: GenerationMap, after: GenerationMap) -> None:
        """Drops the checksums of ranges whose current bytes changed; see `put_checksums`."""
        assert self._checksums is not None
        for run in after.of(0, self._directories[index].size_nbytes):
            for part, is_same in split_by_frozen(run, [before]):
                if not is_same:
                    self._checksums[index].forget(part.offset_nbytes, part.nbytes)

    def put_checksums(self, extents: Sequence[Extent], checksums: bytes) -> None:
        """Sets the checksums of a restored buffer, as `checksums` gave them when it was frozen."""
        assert self._checksums is not None
        at = 0
        for extent in extents:
            nbytes = extent.nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
            self._checksums[extent.path_index].put(
                extent.offset_nbytes, checksums[at : at + nbytes]
            )
            at += nbytes

    def thaw(self, frozen: Frozen) -> None:
        """Drops frozen contents: their space may be written again. Idempotent."""
        with self._lock:
            self._frozen = [each for each in self._frozen if each is not frozen]

    def locate(self, extents: Sequence[Extent], frozen: Frozen | None = None) -> list[FileRange]:
        """Returns the file ranges of a buffer, in order: the current ones, or those of `frozen`.

        The path of a range that `frozen` does not have is empty.
        """
        found: list[FileRange] = []
        maps = self._maps if frozen is None else frozen.maps
        for extent in extents:
            paths = self._directories[extent.path_index].swap_paths
            with self._lock:
                runs = maps[extent.path_index].of(extent.offset_nbytes, extent.nbytes)
            for run in runs:
                path = "" if run.generation == NOWHERE else paths[run.generation]
                found.append(FileRange(path, run.offset_nbytes, run.nbytes))
        return found

    def _maps_of(self, ranges: Sequence[FileRange]) -> tuple[GenerationMap, ...]:
        """The maps by which just these ranges are frozen."""
        places = {
            swap_path: (index, generation)
            for index, directory in enumerate(self._directories)
            for generation, swap_path in enumerate(directory.swap_paths)
        }
        maps = tuple(GenerationMap(NOWHERE) for _ in self._directories)
        for each in ranges:
            index, generation = places[each.path]
            maps[index].put(GenerationRun(generation, each.offset_nbytes, each.nbytes))
        return maps

    def checksums(self, extents: Sequence[Extent]) -> bytes:
        """CRC32C of each page as last written to a buffer, 4 bytes each in native order.

        Only with spares or `verify`. The tickets of the writes are done.
        """
        assert self._checksums is not None
        return b"".join(
            self._checksums[extent.path_index].of(extent.offset_nbytes, extent.nbytes)
            for extent in extents
        )

    def close(self, *, remove: bool = True) -> None:
        """Waits for what is in flight, removes its own files, releases the locks. Idempotent.

        `remove` False leaves the swap files; later volumes in the directory leave them, too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # One failure does not keep the others from closing.
            if self._digester is not None:
                stack.callback(self._digester.shutdown)
            for directory in self._directories:
                stack.callback(directory.close, remove=remove)
            for file in (file for files in self._files for file in files):
                stack.callback(self._close_file, file)

    def _close_file(self, file: int) -> None:
        try:
            self._engine.close_file(file)
        except StorageError as error:
            if error.errno != errno.EBADF:  # EBADF: the engine was closed first.
                raise

    def _open_path(self, path: VolumePath) -> None:
        directory = SwapDirectory(
            path.path, num_spares=self.num_spares, adopt=self._jobs.get(path.path)
        )
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
        files: list[int] = []
        self._files.append(files)  # First: what is opened is closed, also when the next one fails.
        files.extend(self._engine.open(each, direct=is_direct) for each in directory.swap_paths)
        if self._checksums is not None:
            self._checksums.append(PageChecksums(is_fresh=path.path not in self._jobs))

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
        for weight, directory, files in zip(given, self._directories, self._files, strict=True):
            if weight is None:
                with directory.scratch(SAMPLE_NBYTES):
                    weight = measure_bandwidth(self._engine, files[0]) / 1e9
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
        """The bytes by which each path may grow. Paths on one device share its space by weight."""
        spaces = []
        together = list(zip(self._paths, self._directories, self._weights, strict=True))
        for path, directory, weight in together:
            sharing = [
                other_weight
                for other, there, other_weight in together
                if there.device == directory.device and other.capacity_nbytes is None
            ]
            free_nbytes = directory.free_nbytes()
            if free_nbytes is not None:
                free_nbytes += directory.adopted_nbytes
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

    def _check_growths(self, growths: Sequence[int], rooms: Sequence[PathSpace]) -> None:
        """A path has room for its own file and its spares; two paths on one device fill it
        together."""
        together = list(zip(self._directories, growths, rooms, strict=True))
        for directory, growth_nbytes, room in together:
            free_nbytes = directory.free_nbytes()
            same = [other for other, _, _ in together if other.device == directory.device]
            on_device = sum(each for other, each, _ in together if other in same)
            if free_nbytes is not None:
                free_nbytes += sum(other.adopted_nbytes for other in same)
            if growth_nbytes > room.room_nbytes:
                self._refuse(directory, growth_nbytes, room.room_nbytes, "the swap path")
            if free_nbytes is not None and on_device > free_nbytes:
                self._refuse(directory, on_device, free_nbytes, "the device")

    def _refuse(
        self, directory: SwapDirectory, needed_nbytes: int, room_nbytes: int, what: str
    ) -> None:
        spares = f", {self.num_spares} spare generations included" if self.num_spares else ""
        raise CapacityError(
            "nvme",
            needed_nbytes=needed_nbytes,
            available_nbytes=room_nbytes,
            key="tiers.nvme.capacity",
            remedy=SPARES_REMEDY if self.num_spares else "",
            detail=f"{what} of {directory.path!r} is too full "
            f"({format_nbytes(room_nbytes)} free{spares})",
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
        label: str = "",
    ) -> Ticket:
        self._check_usable()
        if offset_nbytes % PAGE_NBYTES or nbytes % PAGE_NBYTES or address % PAGE_NBYTES:
            raise ValueError(
                f"{offset_nbytes=}, {nbytes=} and {address=} must be multiples of {PAGE_NBYTES}"
            )
        parts = slice_extents(extents, offset_nbytes=offset_nbytes, nbytes=nbytes)
        runs = [self._runs(operation, extent) for extent, _ in parts]
        segments = [
            Segment(
                self._files[extent.path_index][run.generation],
                run.offset_nbytes,
                address + at + run.offset_nbytes - extent.offset_nbytes,
                run.nbytes,
            )
            for (extent, at), found in zip(parts, runs, strict=True)
            for run in found
        ]
        if operation == "write":
            return self._write(parts, runs, segments, address, priority)
        # Taken before the read is queued: later writes are carried out after it, or elsewhere.
        expected = [
            ExpectedRange(
                self._directories[extent.path_index].swap_paths[run.generation],
                run.offset_nbytes,
                address + at + run.offset_nbytes - extent.offset_nbytes,
                run.nbytes,
                checksums,
                label,
            )
            for (extent, at), found in zip(parts, runs, strict=True)
            for run, checksums in self._checked(extent.path_index, found)
        ]
        ticket = self._engine.submit(operation, segments, priority)
        return CheckedRead(ticket, expected) if expected else ticket

    def _checked(
        self, path_index: int, runs: Sequence[GenerationRun]
    ) -> list[tuple[GenerationRun, bytes]]:
        """What of the runs is checked when it is read: with `verify` all of it, else what is
        frozen, whose checksums no write that is under way can change."""
        if self._checksums is None:
            return []
        if not self._verify:
            with self._lock:
                maps = [frozen.maps[path_index] for frozen in self._frozen]
            runs = [part for run in runs for part, held in split_by_frozen(run, maps) if held]
        table = self._checksums[path_index]
        return [
            (GenerationRun(run.generation, *part), table.of(*part))
            for run in runs
            for part in table.known(run.offset_nbytes, run.nbytes)
        ]

    def _runs(self, operation: Operation, extent: Extent) -> list[GenerationRun]:
        """The files that an extent is read from, or may be written to."""
        if not self.num_spares:
            return [GenerationRun(0, extent.offset_nbytes, extent.nbytes)]
        current = self._maps[extent.path_index]
        with self._lock:
            if operation == "read":
                return current.of(extent.offset_nbytes, extent.nbytes)
            runs = choose_targets(
                current,
                [frozen.maps[extent.path_index] for frozen in self._frozen],
                offset_nbytes=extent.offset_nbytes,
                nbytes=extent.nbytes,
                num_generations=1 + self.num_spares,
            )
        if runs is None:
            raise StorageError(
                errno.ENOSPC,
                operation="write",
                path=self._paths[extent.path_index].path,
                offset_nbytes=extent.offset_nbytes,
                nbytes=extent.nbytes,
                detail=f"{len(self._frozen)} commits are kept and there are {self.num_spares} "
                "spare generations; one that could not be given up is kept for good. Resume from "
                "the newest checkpoint",
            )
        return runs

    def _write(
        self,
        parts: Sequence[tuple[Extent, int]],
        runs: Sequence[Sequence[GenerationRun]],
        segments: Sequence[Segment],
        address: int,
        priority: Priority,
    ) -> Ticket:
        """Recorded once the write is queued: a refused one leaves the old bytes, where they are,
        and their checksums."""
        found: list[bytes] | None = None
        if self._verify:  # Who reads next must find them.
            found = [digest(address + at, extent.nbytes) for extent, at in parts]
        ticket = self._engine.submit("write", segments, priority)
        if found is not None:
            self._put_digests(parts, found)
        elif self._digester is not None:
            ticket = DigestedWrite(ticket, self._digester.submit(self._digest, parts, address))
        if self.num_spares:
            with self._lock:
                for (extent, _), targets in zip(parts, runs, strict=True):
                    for run in targets:
                        self._maps[extent.path_index].put(run)
        return ticket

    def _digest(self, parts: Sequence[tuple[Extent, int]], address: int) -> None:
        """One after the other, in the order of the writes."""
        self._put_digests(parts, [digest(address + at, extent.nbytes) for extent, at in parts])

    def _put_digests(self, parts: Sequence[tuple[Extent, int]], found: Sequence[bytes]) -> None:
        assert self._checksums is not None
        for (extent, _), checksums in zip(parts, found, strict=True):
            self._checksums[extent.path_index].put(extent.offset_nbytes, checksums)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StorageError(
                errno.EBADF, operation="use", path=self._paths[0].path,
                detail="the volume is closed",
            )  # fmt: skip
        with self._lock:
            self._look_for_failed_writes()
            # INV-11: after a failed write every call raises the first error.
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
