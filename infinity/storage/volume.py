"""A volume: buffers of bytes striped over one swap directory per path.

Buffers are reserved once, then read and written in ranges. A volume belongs to one job and holds
scratch data: its files end with close(), unless they are to stay, or frozen ones have other links.

With spare files the current content can be frozen: later writes go elsewhere, until it is thawed
(`infinity.storage.generations`).
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from functools import partial

from infinity.errors import ConfigError, StorageError
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.checksums import (
    BufferChecksums,
    CheckedRead,
    ExpectedRange,
    PageChecksums,
    PageDigests,
)
from infinity.storage.closing import Closing
from infinity.storage.generations import (
    NOWHERE,
    Adopted,
    FrozenContent,
    GenerationMap,
    GenerationRun,
    UndecidedContent,
    changed_runs,
    choose_targets,
    maps_of,
    split_by_frozen,
)
from infinity.storage.protocol import FileRange, Priority, Segment, StorageEngine, Ticket
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.volume_layout import (
    Extent,
    Spared,
    growths_of,
    share_with_spares,
    slice_extents,
    spares_nbytes,
    stripe,
)
from infinity.storage.volume_paths import (
    OpenPath,
    VolumePath,
    check_growths,
    close_file,
    find_weights,
    no_generation,
    spaces_of,
    uses_direct_io,
)

__all__ = ["Adopted", "Extent", "Spared", "Volume", "VolumePath"]


class Volume(Closing):
    """Buffers on NVMe: reserve, read, write, close; freeze, thaw, restore.

    One thread at a time reserves and closes; any thread reads and writes. After a write has failed,
    every call raises that first error, because the content of the path is unknown. With `verify`,
    each written page gets a checksum, and waiting for a read raises CorruptionError if a page
    differs from its last write; `num_threads` compute checksums then. Without it the program
    computes with a changed page, and its results get checksums that fit. The engine belongs to the
    caller and outlives the volume.

    `num_spares` further files per path let as many contents be frozen at a time. Then checksums are
    always kept, for checkpoints of frozen content, and reads of frozen pages are always checked.
    `num_private` of these files are for undecided writes, which every buffer but scratch may have.
    With `adopted` swap files fresh buffers hold their former bytes, for a caller that will
    `restore` a content.
    """

    def __init__(
        self,
        engine: StorageEngine,
        paths: Sequence[VolumePath],
        *,
        stripe_nbytes: int = 4 * MIB,
        verify: bool = True,
        num_threads: int = 1,
        num_spares: int = 0,
        num_private: int = 0,
        adopted: Adopted | None = None,
    ) -> None:
        if not paths:
            raise ConfigError("a volume needs at least one path")
        if stripe_nbytes <= 0 or stripe_nbytes % PAGE_NBYTES:
            raise ConfigError(f"{stripe_nbytes=}, expected a positive multiple of {PAGE_NBYTES}")
        self.engine = engine  # Other files may share the queues of the volume.
        self._stripe_nbytes = stripe_nbytes
        self._verify = verify
        self._num_threads = num_threads
        self.num_spares = num_spares
        self._num_private = num_private
        self._unkept: list[Extent] = []  # Scratch and private buffers, never frozen.
        self._open: list[OpenPath] = []
        # Checksums of the current bytes of each path, in any generation.
        self._checksums: BufferChecksums | None = None
        if verify or num_spares:
            self._checksums = BufferChecksums(num_threads)
        self._reserving = threading.Lock()
        self._write_failures = _WriteFailures()
        self._lock = threading.Lock()  # guards the two below
        self._maps = tuple(GenerationMap() for _ in paths)
        self._frozen: list[FrozenContent] = []
        self._is_closed = False
        try:
            for path in paths:
                self._open_path(path, None if adopted is None else adopted.jobs.get(path.path))
            # The share of the stripes of each path: as configured, or its measured GB/s.
            self.weights = find_weights(self._open, engine)
            for label, ranges in adopted.contents.items() if adopted is not None else ():
                self._frozen.append(FrozenContent(label, maps_of(ranges, self.swap_paths)))
        except BaseException:
            self.close()
            raise

    @property
    def file_paths(self) -> tuple[str, ...]:
        """The swap file of each path; the first one where there are spares."""
        return tuple(opened.directory.swap_path for opened in self._open)

    @property
    def swap_paths(self) -> list[tuple[str, ...]]:
        """The swap files of each path, by generation."""
        return [opened.directory.swap_paths for opened in self._open]

    def path_of(self, file: int) -> str:
        """The swap directory, as configured, behind a file id of `Ticket.passages`."""
        return next(opened.path.path for opened in self._open if file in opened.files)

    def reserve(
        self, sizes_nbytes: Sequence[int], *, spared: Sequence[Spared | None] | None = None
    ) -> list[tuple[Extent, ...]]:
        """Reserves one buffer per size, rounded up to 4096 bytes, and preallocates the files.

        spared: what frozen contents keep of each buffer, all by default. The rest may be written
            during a freeze as well, but gets its space only then. None: the buffer is scratch,
            always written in place and never frozen

        Fresh buffers read as zeros. Raises CapacityError, with the numbers of each path, before any
        file grows. May be called again, by any thread; a buffer is never freed.
        """
        self._check_usable()
        if spared is None:
            spared = [Spared(nbytes) for nbytes in sizes_nbytes]
        num_spares, num_private = self.num_spares, self._num_private
        heads = [(s.num_files(num_spares, num_private), s.nbytes) if s else (0, 0) for s in spared]
        spare_nbytes = spares_nbytes(spared, num_spares, num_private)
        with self._reserving:
            free = spaces_of(self._open, self.weights)
            spaces = share_with_spares(free, sizes_nbytes, spare_nbytes, num_spares=num_spares)
            buffers = stripe(sizes_nbytes, spaces, stripe_nbytes=self._stripe_nbytes)
            before = [opened.directory.size_nbytes for opened in self._open]
            growths = growths_of(buffers, heads, before, num_spares=num_spares)
            added = [growth.added_nbytes for growth in growths]
            check_growths(self._open, added, free, num_spares=num_spares)
            for opened, growth in zip(self._open, growths, strict=True):
                opened.directory.grow(growth.size_nbytes, spared=growth.spared)
            if self._checksums is not None:
                for index, growth in enumerate(growths):
                    self._checksums.tables[index].grow(growth.size_nbytes)
            for extents, head in zip(buffers, spared, strict=True):
                if head is None or head.is_private:
                    self._unkept.extend(extents)
        return buffers

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

        `label` names the bytes in the error of a changed page.
        """
        placed = self._place(extents, offset_nbytes, nbytes, address, self._sources)
        # Taken before the read is queued: later writes are carried out after it, or elsewhere.
        expected = [
            ExpectedRange(
                self._open[path_index].directory.swap_paths[part.generation],
                part.offset_nbytes,
                at + part.offset_nbytes - run.offset_nbytes,
                part.nbytes,
                checksums,
                label,
            )
            for path_index, run, at in placed
            for part, checksums in self._checked(path_index, run)
        ]
        ticket = self.engine.submit("read", self._segments(placed), priority)
        return CheckedRead(ticket, expected, self._num_threads) if expected else ticket

    def write(
        self,
        extents: Sequence[Extent],
        *,
        offset_nbytes: int,
        nbytes: int,
        address: int,
        priority: Priority,
        undecided: UndecidedContent | None = None,
        digests: PageDigests | None = None,
    ) -> Ticket:
        """Writes memory, which must not change until the ticket is done, to a range of a buffer.
        With `undecided` reads return its old bytes until `publish`. `digests`: of the memory."""
        targets = partial(self._targets, is_undecided=undecided is not None)
        placed = self._place(extents, offset_nbytes, nbytes, address, targets)
        checksums = b""
        if self._checksums is not None:  # Before the write: the next read needs them.
            checksums = self._checksums.digests(address, nbytes, digests)
        # Queued, then recorded: a refused write leaves the old bytes and checksums.
        ticket = self.engine.submit("write", self._segments(placed), priority)
        if undecided is not None:
            assert self._checksums is not None
            undecided.runs += [(path_index, run) for path_index, run, _ in placed]
            undecided.checksums.append(checksums)
        else:
            if self._checksums is not None:
                written = [Extent(i, run.offset_nbytes, run.nbytes) for i, run, _ in placed]
                self._checksums.put(written, checksums)
            if self.num_spares:
                with self._lock:
                    for path_index, run, _ in placed:
                        self._maps[path_index].put(run)
        self._write_failures.watch(ticket)
        return ticket

    def publish(self, undecided: UndecidedContent) -> None:
        """Makes bytes the current ones that were written beside them. No byte moves. No request of
        their ranges is in flight but these writes."""
        assert self._checksums is not None
        with self._lock:
            for path_index, run in undecided.runs:
                self._maps[path_index].put(run)
        extents = [Extent(i, run.offset_nbytes, run.nbytes) for i, run in undecided.runs]
        self._checksums.put(extents, b"".join(undecided.checksums))

    def digests(self, address: int, nbytes: int) -> PageDigests | None:
        """Returns what takes checksums of memory to be written; None if none are kept."""
        return None if self._checksums is None else PageDigests(address, nbytes)

    @property
    def can_be_undecided(self) -> bool:
        """Whether an undecided write has a generation, beside the current and the frozen ones."""
        return len(self.frozen) < self.num_spares

    def sync(self) -> None:
        """Calls fdatasync for every path, after the writes whose tickets are done."""
        self._check_usable()
        for file in self._files():
            try:
                self.engine.sync(file)
            except StorageError as error:
                self._write_failures.note(error)
                raise

    # -- Freezing ------------------------------------------------------------------------------

    @property
    def frozen(self) -> tuple[FrozenContent, ...]:
        """The frozen contents. With more than `num_spares` of them no write has a target."""
        with self._lock:
            return tuple(self._frozen)

    def freeze(self, label: str = "") -> FrozenContent:
        """Keeps the present bytes of every buffer until `thaw`; later writes go elsewhere.

        Of scratch and of private buffers it keeps nothing. All writes are done, durable only after
        a sync. `label`: see `FrozenContent`.
        """
        self._check_usable()
        with self._lock:
            maps = tuple(generation_map.copy() for generation_map in self._maps)
            for extent in self._unkept:
                maps[extent.path_index].put(
                    GenerationRun(NOWHERE, extent.offset_nbytes, extent.nbytes)
                )
            frozen = FrozenContent(label, maps)
            self._frozen.append(frozen)
        return frozen

    def restore(self, frozen: FrozenContent) -> None:
        """Sets every buffer back to the bytes of `frozen`, which stays frozen. No byte moves.

        No request is in flight, and the caller drops its copies of buffers. What `frozen` does not
        keep is unchanged.
        """
        self._check_usable()
        assert self._checksums is not None
        with self._lock:
            for index, (current, kept) in enumerate(zip(self._maps, frozen.maps, strict=True)):
                before = current.copy()
                size_nbytes = self._open[index].directory.size_nbytes
                for run in kept.of(0, size_nbytes):
                    if run.generation != NOWHERE:
                        current.put(run)
                for run in changed_runs(before, current, size_nbytes):
                    # See `put_checksums`.
                    self._checksums.tables[index].forget(run.offset_nbytes, run.nbytes)

    def put_checksums(self, extents: Sequence[Extent], checksums: bytes) -> None:
        """Sets the checksums of a restored buffer to those that `checksums` returned for it."""
        assert self._checksums is not None
        self._checksums.put(extents, checksums)

    def thaw(self, frozen: FrozenContent) -> None:
        """Drops frozen contents: their space may be written again. Idempotent."""
        with self._lock:
            self._frozen = [kept for kept in self._frozen if kept is not frozen]

    def locate(
        self, extents: Sequence[Extent], frozen: FrozenContent | None = None
    ) -> list[FileRange]:
        """Returns the file ranges of a buffer, in order: the current ones, or those of `frozen`.

        The path of a range that `frozen` does not have is empty.
        """
        found: list[FileRange] = []
        maps = self._maps if frozen is None else frozen.maps
        for extent in extents:
            paths = self._open[extent.path_index].directory.swap_paths
            with self._lock:
                runs = maps[extent.path_index].of(extent.offset_nbytes, extent.nbytes)
            for run in runs:
                path = "" if run.generation == NOWHERE else paths[run.generation]
                found.append(FileRange(path, run.offset_nbytes, run.nbytes))
        return found

    def checksums(self, extents: Sequence[Extent]) -> bytes:
        """CRC32C of each page as last written to a buffer, 4 bytes each in native order.

        Only with spares or `verify`. The tickets of the writes are done.
        """
        assert self._checksums is not None
        return self._checksums.of(extents)

    def close(self, *, remove: bool = True) -> None:
        """Waits for transfers in flight, removes the swap files, releases the locks. Idempotent.

        Without `remove` the swap files stay; later volumes in the directory leave them, too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # One failure does not keep the others from closing.
            for opened in self._open:
                stack.callback(opened.directory.close, remove=remove)
            for file in self._files():
                stack.callback(close_file, self.engine, file)

    def _files(self) -> list[int]:
        return [file for opened in self._open for file in opened.files]

    def _open_path(self, path: VolumePath, job: str | None) -> None:
        directory = SwapDirectory(path.path, num_spares=self.num_spares, adopt=job)
        opened = OpenPath(path, directory)
        self._open.append(opened)  # First: open files are closed, also if the next open fails.
        direct = uses_direct_io(path, directory)
        opened.files.extend(self.engine.open(path, direct=direct) for path in directory.swap_paths)
        if self._checksums is not None:
            self._checksums.tables.append(PageChecksums(is_fresh=job is None))

    def _place(
        self,
        extents: Sequence[Extent],
        offset_nbytes: int,
        nbytes: int,
        address: int,
        runs_of: Callable[[Extent], list[GenerationRun]],
    ) -> list[tuple[int, GenerationRun, int]]:
        """Returns the runs of a transfer, in order: path, run, address of its bytes in memory."""
        self._check_usable()
        if offset_nbytes % PAGE_NBYTES or nbytes % PAGE_NBYTES or address % PAGE_NBYTES:
            raise ValueError(
                f"{offset_nbytes=}, {nbytes=} and {address=} must be multiples of {PAGE_NBYTES}"
            )
        return [
            (extent.path_index, run, address + at + run.offset_nbytes - extent.offset_nbytes)
            for extent, at in slice_extents(extents, offset_nbytes=offset_nbytes, nbytes=nbytes)
            for run in runs_of(extent)
        ]

    def _segments(self, placed: Sequence[tuple[int, GenerationRun, int]]) -> list[Segment]:
        return [
            Segment(self._open[path_index].files[run.generation], run.offset_nbytes, at, run.nbytes)
            for path_index, run, at in placed
        ]

    def _checked(self, path_index: int, run: GenerationRun) -> list[tuple[GenerationRun, bytes]]:
        """Returns the parts of a run that a read checks: with `verify` all that are known, else the
        frozen ones of these.

        No write in flight can change the checksums of a frozen run.
        """
        if self._checksums is None:
            return []
        runs = [run]
        if not self._verify:
            with self._lock:
                maps = [frozen.maps[path_index] for frozen in self._frozen]
            runs = [part for part, is_held in split_by_frozen(run, maps) if is_held]
        table = self._checksums.tables[path_index]
        return [
            (GenerationRun(part.generation, *known), table.of(*known))
            for part in runs
            for known in table.known(part.offset_nbytes, part.nbytes)
        ]

    def _sources(self, extent: Extent) -> list[GenerationRun]:
        """Returns the files that an extent is read from."""
        if not self.num_spares:
            return [GenerationRun(0, extent.offset_nbytes, extent.nbytes)]
        with self._lock:
            return self._maps[extent.path_index].of(extent.offset_nbytes, extent.nbytes)

    def _targets(self, extent: Extent, *, is_undecided: bool) -> list[GenerationRun]:
        """Returns the files that an extent may be written to."""
        if not self.num_spares and not is_undecided:
            return [GenerationRun(0, extent.offset_nbytes, extent.nbytes)]
        current = self._maps[extent.path_index]
        with self._lock:
            kept = [frozen.maps[extent.path_index] for frozen in self._frozen]
            runs = choose_targets(
                current,
                [*kept, current] if is_undecided else kept,
                offset_nbytes=extent.offset_nbytes,
                nbytes=extent.nbytes,
                num_generations=1 + self.num_spares,
            )
        if runs is None:
            path = self._open[extent.path_index].path.path
            raise no_generation(path, extent, len(self._frozen), self.num_spares)
        return runs

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StorageError(
                errno.EBADF, operation="use", path=self._open[0].path.path,
                detail="the volume is closed",
            )  # fmt: skip
        self._write_failures.check()


class _WriteFailures:
    """Watches writes, awaited or not. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._pending: list[Ticket] = []
        self._first: StorageError | None = None

    def watch(self, ticket: Ticket) -> None:
        """Adds a write that was queued."""
        with self._lock:
            self._pending.append(ticket)

    def note(self, error: StorageError) -> None:
        """Adds a failure that was met elsewhere."""
        with self._lock:
            self._first = self._first or error

    # INV-11: after a failed write every call raises the first error.
    def check(self) -> None:
        """Raises the first error, every time."""
        with self._lock:
            pending, self._pending = self._pending, []
            for ticket in pending:
                if ticket.done():
                    self._look(ticket)
                else:
                    self._pending.append(ticket)
            if self._first is not None:
                raise self._first.with_traceback(None)

    def _look(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except StorageError as error:
            self._first = self._first or error
