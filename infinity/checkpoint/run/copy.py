"""Copying a checkpoint to another file system while training goes on.

What is copied is a commit in the swap directory: its ranges are frozen, its other files are never
changed, so nothing of it moves while it is read. It goes through the storage engine of training, in
the class that has what training leaves of the drive, block by block, each compared with its digest
before it is written. The copy is a checkpoint like others, but that its pieces lie one behind
the other in a file of its own. docs/formats/swap.md has the order of effects.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from infinity.checkpoint.huggingface.export_weights import check_space
from infinity.checkpoint.run.directory import (
    checkpoint_name,
    damaged,
    new_file,
    read_linked,
    read_manifest,
    write_manifest,
    writing,
)
from infinity.checkpoint.run.files import write_small
from infinity.checkpoint.run.linked import (
    COPIES_NAME,
    TABLE_NAME,
    LinkedPiece,
    LinkedRun,
    LinkedState,
    to_bytes,
)
from infinity.checkpoint.run.manifest import FileEntry, StoredRange
from infinity.errors import InfinityError, StorageError
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.checksums import CHECKSUM_NBYTES, ExpectedRange
from infinity.storage.protocol import Priority, Segment, StorageEngine, Ticket

_BLOCK_NBYTES = 4 * MIB
_POLL_S = 0.01
_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class Orders:
    """What a copy is told while it runs: to end, or not to spare training, which waits for it."""

    stop: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)


class Saving:
    """A checkpoint that is being written. Any thread may ask; the copy has a thread of its own.

    The step itself is committed in the swap directory before there is a Saving, so a crash loses
    nothing of it: `infinity.checkpoint.load` goes on from there as well.
    """

    def __init__(
        self,
        path: Path,
        source: Path | None = None,
        copy: Callable[[Orders], None] | None = None,
    ) -> None:
        """`copy` makes `path` of `source`; None: it is there."""
        self.path = path
        self.source = source
        self._orders = Orders()
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self.is_told = False  # Of its failure somebody knows.
        if copy is None:
            self._ended.set()
        else:
            # No daemon: a program that forgets to wait ends when the copy has.
            threading.Thread(target=self._run, args=(copy,), name="infinity-copy").start()

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """The checkpoint, once it is durable. Raises what went wrong first, every time it is asked,
        and TimeoutError when the time is up; it goes on then, as fast as it can."""
        self.hurry()
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"{self.path} is still being copied")
        if self._failure is not None:
            self.is_told = True
            raise self._failure.with_traceback(None)
        return self.path

    def hurry(self) -> None:
        """From here on the copy does not spare training."""
        self._orders.hurry.set()

    def abandon(self) -> None:
        """Gives the copy up, if it is not done: within a block or two. The checkpoints that were
        there stay, and so does the step in the swap directory."""
        self._orders.stop.set()
        self._ended.wait()

    @property
    def is_abandoned(self) -> bool:
        return isinstance(self._failure, _AbandonedError)

    def close(self) -> None:
        """Waits until it has ended, without raising its failure; interrupted, gives it up."""
        self.hurry()
        try:
            self._ended.wait()
        except BaseException:
            self.abandon()
            raise

    def _run(self, copy: Callable[[Orders], None]) -> None:
        try:
            copy(self._orders)
        except Exception as error:
            self._failure = error
            _log.warning("%s is not there: %s", self.path, error)
        finally:
            self._ended.set()


class _AbandonedError(InfinityError):
    """Nobody waits for the copy any more."""


def copy_checkpoint(
    source: Path, directory: Path, storage: StorageEngine, *, orders: Orders
) -> Path:
    """Writes a copy of the checkpoint `source` into `directory` and returns it, once it is durable.

    `source` stays as it is meanwhile. Raises CorruptionError where it is not what its digests say,
    StorageError naming operation and file, ConfigError when a checkpoint of this or a later step is
    there, InfinityError when stopped. Whatever happens, `directory` has what it had.
    """
    manifest = read_manifest(source)
    assert not manifest.ranks, source
    linked = read_linked(source, manifest).get("")
    with writing(directory, manifest.step) as partial, ExitStack() as stack:
        check_space(partial, manifest.nbytes + (linked.nbytes if linked is not None else 0))
        copier = _Copier(source, partial, storage, orders, stack)
        files = []
        for file in manifest.files:
            if file.name != TABLE_NAME:
                copier.copy_file(file)
                files.append(file)
        if linked is not None:
            table = to_bytes(copier.copy_state(linked))
            files.append(write_small(partial / TABLE_NAME, "table", table))
        write_manifest(partial, replace(manifest, files=tuple(files)))
    return directory / checkpoint_name(manifest.step)


class Pace:
    """When the next block of a copy may go: after training has moved ten times as much, or nothing
    for a while; and after four times as long as the block before it took. So a drive that training
    keeps busy loses a tenth to it, and a processor a fifth of one core.

    The class in the storage engine is not enough: it fills every gap between two requests, and
    where a drive's limit is bytes per second, not time, training pays for these later.
    """

    RATIO = 10
    QUIET_S = 0.05
    REST = 4

    def __init__(self, training_nbytes: int) -> None:
        self._seen_nbytes = training_nbytes
        self._credit_nbytes = 0
        self._changed_s = self._rests_until_s = float("-inf")

    def allows(self, nbytes: int, training_nbytes: int, now_s: float) -> bool:
        """Whether a block of so many bytes may go now; if so, it is counted. `training_nbytes` is
        what training has moved since it began."""
        price_nbytes = self.RATIO * nbytes
        if training_nbytes != self._seen_nbytes:
            self._credit_nbytes += training_nbytes - self._seen_nbytes
            self._seen_nbytes, self._changed_s = training_nbytes, now_s
        if self._credit_nbytes < price_nbytes and now_s - self._changed_s < self.QUIET_S:
            return False
        if now_s < self._rests_until_s:
            return False
        # What was not used meanwhile is not saved up for a burst.
        self._credit_nbytes = min(max(self._credit_nbytes - price_nbytes, 0), price_nbytes)
        return True

    def rest(self, start_s: float, end_s: float) -> None:
        """A block has taken from then to then."""
        self._rests_until_s = end_s + self.REST * (end_s - start_s)


@dataclass(frozen=True, slots=True)
class _CopyBlock:
    """Bytes of an open file, where they go, and what raises unless they are right in memory."""

    file: int
    offset_nbytes: int
    nbytes: int
    target_offset_nbytes: int
    check: Callable[[memoryview, int], None]


class _Copier:
    """Moves blocks from files to files; in a hurry, one is read while the last one is written."""

    def __init__(
        self,
        source: Path,
        target: Path,
        storage: StorageEngine,
        orders: Orders,
        stack: ExitStack,
    ) -> None:
        self._source = source
        self._target = target
        self._storage = storage
        self._orders = orders
        self._stack = stack  # Closes the files.
        self._own: set[str] = set()  # Paths of what is open.
        self._pace = Pace(self._training_nbytes())
        self._buffers = [mmap.mmap(-1, _BLOCK_NBYTES) for _ in range(2)]  # Page-aligned.
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self._buffers
        ]

    def copy_file(self, file: FileEntry) -> None:
        new_file(self._target / file.name, file.nbytes)
        to = self._open(self._target / file.name, direct=False)
        self._copy(self._file_blocks(file), to)
        self._storage.sync(to)

    def _file_blocks(self, file: FileEntry) -> Iterator[_CopyBlock]:
        path = self._source / file.name
        come_from = self._open(path, direct=False)
        for extent in file.extents:
            check = _ExtentCheck(path, extent)
            for start, nbytes in _cut(extent.nbytes):
                at = extent.offset_nbytes + start
                yield _CopyBlock(come_from, at, nbytes, at, check)

    def copy_state(self, linked: LinkedState) -> list[LinkedPiece]:
        """All linked pieces into one file; the pieces as they lie there."""
        path = self._target / COPIES_NAME
        new_file(path, linked.nbytes)
        to = self._open(path, direct=True)
        self._copy(self._state_blocks(linked), to)
        self._storage.sync(to)
        moved, start = [], 0
        for state_kind in linked.kinds:
            moved.append(
                replace(state_kind, runs=(LinkedRun(COPIES_NAME, start, state_kind.nbytes),))
            )
            start += state_kind.nbytes
        return moved

    def _state_blocks(self, linked: LinkedState) -> Iterator[_CopyBlock]:
        files = {name: self._open(self._source / name, direct=True) for name in linked.files()}
        target = 0
        for state_kind in linked.kinds:
            checksums = memoryview(linked.checksums_of(state_kind))
            for run in state_kind.runs:
                for start, nbytes in _cut(run.nbytes):
                    size = nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
                    offset_nbytes = run.offset_nbytes + start
                    check = _PageCheck(
                        str(self._source / run.file), offset_nbytes, bytes(checksums[:size])
                    )
                    yield _CopyBlock(files[run.file], offset_nbytes, nbytes, target, check)
                    checksums = checksums[size:]
                    target += nbytes

    def _copy(self, blocks: Iterable[_CopyBlock], to: int) -> None:
        writes: list[Ticket] = []
        try:
            for number, block in enumerate(blocks):
                self._await_turn(block.nbytes)
                start_s = time.monotonic()
                if len(writes) == len(self._buffers):
                    writes.pop(0).wait()
                turn = number % len(self._buffers)
                buffer, address = self._buffers[turn], self._addresses[turn]
                read = Segment(block.file, block.offset_nbytes, address, block.nbytes)
                self._storage.submit("read", [read], Priority.COPY).wait()
                block.check(memoryview(buffer)[: block.nbytes], address)
                write = replace(read, file=to, offset_nbytes=block.target_offset_nbytes)
                writes.append(self._storage.submit("write", [write], Priority.COPY))
                while writes and not self._orders.hurry.is_set():
                    writes.pop(0).wait()
                self._pace.rest(start_s, time.monotonic())
            while writes:
                writes.pop(0).wait()
        finally:
            _settle(writes)  # The buffers are theirs until then.

    def _await_turn(self, nbytes: int) -> None:
        while not self._orders.stop.is_set():
            if self._orders.hurry.is_set():
                return
            if self._pace.allows(nbytes, self._training_nbytes(), time.monotonic()):
                return
            time.sleep(_POLL_S)
        raise _AbandonedError(f"the copy was given up; its step is in {self._source}")

    def _training_nbytes(self) -> int:
        files = self._storage.stats().by_file
        return sum(f.read_nbytes + f.write_nbytes for f in files if f.path not in self._own)

    def _open(self, path: Path, *, direct: bool) -> int:
        try:
            file = self._storage.open(str(path), direct=direct)
        except StorageError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return self._open(path, direct=False)
        self._stack.callback(self._close, file)
        self._own.add(str(path))
        return file

    def _close(self, file: int) -> None:
        """What was written is synced by now, or another failure is told of."""
        try:
            self._storage.close_file(file)
        except StorageError:
            _log.debug("while a copy ended", exc_info=True)


class _ExtentCheck:
    """Compares an extent of a file, given part by part, with its SHA-256."""

    def __init__(self, path: Path, extent: StoredRange) -> None:
        self._path = path
        self._extent = extent
        self._digest = hashlib.sha256()
        self._left_nbytes = extent.nbytes

    def __call__(self, view: memoryview, address: int) -> None:
        self._digest.update(view)
        self._left_nbytes -= len(view)
        if not self._left_nbytes and self._digest.hexdigest() != self._extent.sha256:
            raise damaged(self._path, self._extent, "its SHA-256 is not the manifest's")


@dataclass(frozen=True, slots=True)
class _PageCheck:
    """Compares pages of a file with their CRC32Cs."""

    path: str
    offset_nbytes: int
    checksums: bytes

    def __call__(self, view: memoryview, address: int) -> None:
        found = ExpectedRange(
            self.path, self.offset_nbytes, address, len(view), self.checksums
        ).check()
        if found is not None:
            raise found


def _cut(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the blocks of a range."""
    for start in range(0, nbytes, _BLOCK_NBYTES):
        yield start, min(_BLOCK_NBYTES, nbytes - start)


def _settle(tickets: Sequence[Ticket]) -> None:
    """Waits for requests of which another failure is told."""
    for ticket in tickets:
        try:
            ticket.wait()
        except StorageError:
            _log.debug("while a copy ended", exc_info=True)
