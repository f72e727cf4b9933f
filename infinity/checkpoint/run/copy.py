"""Copies a checkpoint to another file system while training continues.

The source is a commit in the swap directory. Its ranges are frozen and its other files never
change, so its bytes are constant during the copy. The copy uses the storage engine of training,
with the lowest priority. Every block is compared with its digest before it is written. The result
is a checkpoint whose state kinds lie back to back in one file. docs/formats/swap.md has the order
of effects.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from infinity.checkpoint.durable import check_space, new_file
from infinity.checkpoint.run.contents import write_small
from infinity.checkpoint.run.directory import (
    checkpoint_name,
    comparing,
    read_linked,
    read_manifest,
    write_manifest,
    writing,
)
from infinity.checkpoint.run.format import (
    COPIES_NAME,
    TABLE_NAME,
    FileEntry,
    LinkedKind,
    LinkedState,
    table_to_bytes,
)
from infinity.errors import InfinityError, StorageError
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.checksums import CHECKSUM_NBYTES, ExpectedRange
from infinity.storage.closing import Closing
from infinity.storage.protocol import FileRange, Priority, Segment, StorageEngine, Ticket
from infinity.storage.shards import open_past_cache

_BLOCK_NBYTES = 4 * MIB
_POLL_S = 0.01
_log = logging.getLogger("infinity")


class Saving(Closing):
    """A checkpoint that is being written by a thread of its own. All methods are thread-safe.

    The step is committed in the swap directory before the copy begins, so a crash loses nothing:
    `infinity.checkpoint.load` reads the commit as well.
    """

    def __init__(
        self, path: Path, source: Path | None = None, copy: Callable[[Saving], None] | None = None
    ) -> None:
        """Starts the thread that runs `copy`; None means that `path` is already complete."""
        self.path = path
        self.source = source
        self.stop_order = threading.Event()  # To the copy, as is the next one.
        self.hurry_order = threading.Event()
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self.is_told = False  # `wait` has raised the failure.
        if copy is None:
            self._ended.set()
        else:
            # No daemon: the interpreter exits only after the copy.
            threading.Thread(target=self._run, args=(copy,), name="infinity-copy").start()

    def done(self) -> bool:
        """Whether the copy has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Waits until the checkpoint is durable, and returns its path.

        Raises the error of the copy on every call, and TimeoutError after `timeout_s` seconds; the
        copy then continues at full speed.
        """
        self.hurry()
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"{self.path} is still being copied")
        if self._failure is not None:
            self.is_told = True
            raise self._failure.with_traceback(None)
        return self.path

    def hurry(self) -> None:
        """Lets the copy run at full speed, without yielding to training."""
        self.hurry_order.set()

    def abandon(self) -> None:
        """Stops a running copy after at most two blocks, and waits for its end.

        Older checkpoints stay, and so does the commit in the swap directory.
        """
        self.stop_order.set()
        self._ended.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the copy has ended with an error, or was abandoned. The commit stays then."""
        return self._failure is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` has stopped the copy."""
        return isinstance(self._failure, _AbandonedError)

    @override
    def close(self) -> None:
        """Waits for the end of the copy, raises none of its errors; an interrupt abandons it."""
        self.hurry()
        try:
            self._ended.wait()
        except BaseException:
            self.abandon()
            raise

    def _run(self, copy: Callable[[Saving], None]) -> None:
        try:
            copy(self)
        except Exception as error:
            self._failure = error
            _log.warning("%s is not there: %s", self.path, error)
        finally:
            self._ended.set()


class _AbandonedError(InfinityError):
    """The copy was abandoned."""


def copy_checkpoint(
    source: Path, directory: Path, storage: StorageEngine, *, saving: Saving
) -> Path:
    """Copies the checkpoint `source` into `directory`; returns the new path when it is durable.

    `saving` tells when to hurry and when to stop. `source` must not change meanwhile. Raises
    CorruptionError for damaged bytes of `source`, StorageError with operation and file, ConfigError
    if `directory` has a checkpoint of this or a later step, InfinityError when stopped. The older
    checkpoints of `directory` stay intact.
    """
    manifest = read_manifest(source)
    assert not manifest.ranks, source
    linked = read_linked(source, manifest).get("")
    with writing(directory, manifest.step) as target, ExitStack() as stack:
        check_space(target, manifest.nbytes + (linked.nbytes if linked is not None else 0))
        copier = _Copier(source, target, storage, saving, stack)
        files = []
        for file in manifest.files:
            if file.name != TABLE_NAME:
                copier.copy_file(file)
                files.append(file)
        if linked is not None:
            table = table_to_bytes(copier.copy_state(linked))
            files.append(write_small(target / TABLE_NAME, "table", table))
        write_manifest(target, replace(manifest, files=tuple(files)))
    return directory / checkpoint_name(manifest.step)


class Pace:
    """Decides when the next block of a copy may start.

    A block starts after training has moved ten times as many bytes, or none for QUIET_S seconds;
    and after a pause of four times the duration of the previous block. So a copy takes at most a
    tenth of a busy drive, and a fifth of one core.

    The priority in the storage engine is not sufficient: it fills every gap between two requests.
    If a drive limits bytes per second, training pays for these gaps later.
    """

    RATIO = 10
    QUIET_S = 0.05
    REST = 4

    def __init__(self, training_nbytes: int) -> None:
        self._seen_nbytes = training_nbytes
        self._credit_nbytes = 0
        self._changed_s = self._rests_until_s = float("-inf")

    def allows(self, nbytes: int, training_nbytes: int, now_s: float) -> bool:
        """Whether a block of `nbytes` may start now; counts the block if it may.

        `training_nbytes` is the total that training has moved.
        """
        price_nbytes = self.RATIO * nbytes
        if training_nbytes != self._seen_nbytes:
            self._credit_nbytes += training_nbytes - self._seen_nbytes
            self._seen_nbytes, self._changed_s = training_nbytes, now_s
        if self._credit_nbytes < price_nbytes and now_s - self._changed_s < self.QUIET_S:
            return False
        if now_s < self._rests_until_s:
            return False
        # Unused credit is capped, so that no burst follows.
        self._credit_nbytes = min(max(self._credit_nbytes - price_nbytes, 0), price_nbytes)
        return True

    def rest(self, start_s: float, end_s: float) -> None:
        """Records that a block has taken the time from `start_s` to `end_s`."""
        self._rests_until_s = end_s + self.REST * (end_s - start_s)


# Compares the bytes of a block, and raises for wrong ones.
_Check = Callable[[memoryview], None]
# (segment of an open file without its address, offset in the copy, check)
_Block = tuple[Segment, int, _Check]


class _Copier:
    """Copies files block by block; in a hurry it reads a block while the last one is written."""

    def __init__(
        self, source: Path, target: Path, storage: StorageEngine, saving: Saving, stack: ExitStack
    ) -> None:
        self._source = source
        self._target = target
        self._storage = storage
        self._saving = saving
        self._stack = stack  # Closes the files.
        self._own: set[str] = set()  # Paths of the open files of this copy.
        self._pace = Pace(self._training_nbytes())
        self._buffers = [mmap.mmap(-1, _BLOCK_NBYTES) for _ in range(2)]  # Page-aligned.
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self._buffers
        ]

    def copy_file(self, file: FileEntry) -> None:
        """Copies one file and syncs it. Raises CorruptionError, StorageError."""
        self._copy(file.name, file.nbytes, self._file_blocks(file), direct=False)

    def copy_state(self, linked: LinkedState) -> list[LinkedKind]:
        """Copies all linked state into one file and syncs it; returns the new rows of the table.

        Raises CorruptionError, StorageError.
        """
        self._copy(COPIES_NAME, linked.nbytes, self._state_blocks(linked), direct=True)
        moved, start = [], 0
        for entry in linked.kinds:
            moved.append(replace(entry, runs=(FileRange(COPIES_NAME, start, entry.nbytes),)))
            start += entry.nbytes
        return moved

    def _file_blocks(self, file: FileEntry) -> Iterator[_Block]:
        path = self._source / file.name
        source = self._open(path, direct=False)
        for extent in file.extents:
            check = comparing(path, extent)
            for start, nbytes in _cut(extent.nbytes):
                at = extent.offset_nbytes + start
                yield Segment(source, at, 0, nbytes), at, check

    def _state_blocks(self, linked: LinkedState) -> Iterator[_Block]:
        files = {name: self._open(self._source / name, direct=True) for name in linked.files()}
        target = 0
        for entry in linked.kinds:
            checksums, page = linked.checksums_of(entry), 0
            for run in entry.runs:
                for start, nbytes in _cut(run.nbytes):
                    count = nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
                    at, path = run.offset_nbytes + start, str(self._source / run.path)
                    check = partial(_check_pages, path, at, checksums[page : page + count])
                    yield Segment(files[run.path], at, 0, nbytes), target, check
                    page += count
                    target += nbytes

    def _copy(self, name: str, nbytes: int, blocks: Iterable[_Block], *, direct: bool) -> None:
        """Makes the file `name` of the copy from blocks, and syncs it."""
        new_file(self._target / name, nbytes)
        to = self._open(self._target / name, direct=direct)
        writes: list[Ticket] = []
        try:
            for number, (segment, offset_nbytes, check) in enumerate(blocks):
                self._await_turn(segment.nbytes)
                start_s = time.monotonic()
                if len(writes) == len(self._buffers):
                    writes.pop(0).wait()
                turn = number % len(self._buffers)
                buffer, address = self._buffers[turn], self._addresses[turn]
                read = replace(segment, address=address)
                self._storage.submit("read", [read], Priority.COPY).wait()
                check(memoryview(buffer)[: segment.nbytes])
                write = Segment(to, offset_nbytes, address, segment.nbytes)
                writes.append(self._storage.submit("write", [write], Priority.COPY))
                while writes and not self._saving.hurry_order.is_set():
                    writes.pop(0).wait()
                self._pace.rest(start_s, time.monotonic())
            while writes:
                writes.pop(0).wait()
        finally:
            _settle(writes)  # Pending writes use the buffers.
        self._storage.sync(to)

    def _await_turn(self, nbytes: int) -> None:
        while not self._saving.stop_order.is_set():
            if self._saving.hurry_order.is_set():
                return
            if self._pace.allows(nbytes, self._training_nbytes(), time.monotonic()):
                return
            time.sleep(_POLL_S)
        raise _AbandonedError(f"the copy was given up; its step is in {self._source}")

    def _training_nbytes(self) -> int:
        files = self._storage.stats()
        return sum(f.read_nbytes + f.write_nbytes for f in files if f.path not in self._own)

    def _open(self, path: Path, *, direct: bool) -> int:
        if direct:
            file = open_past_cache(self._storage, str(path), read_only=False)
        else:
            file = self._storage.open(str(path), direct=False)
        self._stack.callback(self._close, file)
        self._own.add(str(path))
        return file

    def _close(self, file: int) -> None:
        """Closes a file, which is synced, unless another error is being raised."""
        try:
            self._storage.close_file(file)
        except StorageError:
            _log.debug("while a copy ended", exc_info=True)


def _check_pages(path: str, offset_nbytes: int, checksums: bytes, view: memoryview) -> None:
    """Compares pages of a file with their CRC32C."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    found = ExpectedRange(path, offset_nbytes, address, len(view), checksums).check()
    if found is not None:
        raise found


def _cut(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length in bytes) of every block of a range."""
    for start in range(0, nbytes, _BLOCK_NBYTES):
        yield start, min(_BLOCK_NBYTES, nbytes - start)


def _settle(tickets: Sequence[Ticket]) -> None:
    """Waits for pending requests without raising their errors; the first error is on its way."""
    for ticket in tickets:
        try:
            ticket.wait()
        except StorageError:
            _log.debug("while a copy ended", exc_info=True)
