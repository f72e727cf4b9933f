"""Files of a checkpoint that are read in place, and never written.

The files belong to the user. They are opened for reading alone, and compared with what they were
when the checkpoint was opened: length, modification time and inode. With `verify`, the first read
of a run takes a checksum of its part of each chunk of the file, and every later read is compared
with them. A few threads do that as reads complete: the base is all that a step of an adapter reads,
so a check on the thread that waits would stand between the drives and the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from typing_extensions import override

from infinity.config.machine import usable_cores
from infinity.errors import CorruptionError, StorageError, corrupt
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.checksums import CHECKSUM_NBYTES, digest
from infinity.storage.daemon_threads import DaemonThreads
from infinity.storage.protocol import (
    FileRange,
    FollowedTicket,
    Priority,
    Segment,
    StorageEngine,
    Ticket,
    WrappedTicket,
)

_MOST_CHECKERS = 4
# Checksums are of the parts of a run in each chunk of its file: whatever reads a whole chunk, a
# rank of any number of them or a run over another division of the model, has the same one.
CHUNK_NBYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class ShardRun(FileRange):
    """Whole pages of one file, and the offset in the host block that they are read to."""

    block_offset_nbytes: int


@dataclass(frozen=True, slots=True)
class RunChecksum(FileRange):
    """The checksum of pages of a file: a CRC32 of the CRC32C of each page."""

    crc32c: int


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """The facts that distinguish a file from another one, and from itself after a change.

    `header_sha256`: the digest of the safetensors header, in hexadecimal.
    """

    path: str
    nbytes: int
    mtime_ns: int
    inode: int
    header_sha256: str


def split_at_chunks(offset_nbytes: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) of the parts of a range in each chunk of its file."""
    start, stop = offset_nbytes, offset_nbytes + nbytes
    while start < stop:
        end = min(stop, (start // CHUNK_NBYTES + 1) * CHUNK_NBYTES)
        yield start, end - start
        start = end


def difference(identity: ShardIdentity) -> str | None:
    """Returns how the file at the path differs from `identity`, without reading it; None if it does
    not."""
    try:
        found = os.stat(identity.path)
    except OSError as error:
        return f"it cannot be found any more ({os.strerror(error.errno or 0)})"
    if found.st_size != identity.nbytes:
        return f"it has {found.st_size} bytes, and had {identity.nbytes}"
    if found.st_mtime_ns != identity.mtime_ns:
        return "it was modified"
    if found.st_ino != identity.inode:
        return "another file has its name"
    return None


def refuse_changed(identity: ShardIdentity, *, is_open: bool = False) -> None:
    """Raises CorruptionError for a file that has changed since the checkpoint was opened. One that
    `is_open` may have lost its name."""
    has_name = not is_open
    if is_open:
        with contextlib.suppress(OSError):
            has_name = os.stat(identity.path).st_ino == identity.inode
    changed = difference(identity) if has_name else None
    if changed is not None:
        detail = (
            f"{changed} since the checkpoint was opened. Weights of the model come from this "
            "file: put the original back, or start again from the changed one"
        )
        raise corrupt(identity.path, detail, code=errno.ESTALE)


class _ReadChecks:
    """Checksums of first reads, and the threads that compare later reads with them."""

    def __init__(self, identities: Mapping[str, ShardIdentity]) -> None:
        self._identities = identities  # By path.
        self._checksums: dict[tuple[str, int, int], int] = {}
        self._earlier: set[tuple[str, int, int]] = set()  # Those of an earlier run alone.
        self._lock = threading.Lock()  # Guards the table of checksums.
        num_threads = max(1, min(_MOST_CHECKERS, usable_cores() // 2))
        self._threads = DaemonThreads(num_threads, "infinity-shards")

    def start(
        self, read: _NamedRead, runs: Sequence[ShardRun], address: int, label: str
    ) -> Future[None]:
        """Checks what was read as soon as it is there."""

        def check() -> None:
            read.wait()
            for run in runs:
                self._check(run, address + run.block_offset_nbytes, label)

        return self._threads.submit(check)

    def _check(self, run: ShardRun, address: int, label: str) -> None:
        """Compares a run with its first read, and notes it if there was none: the file must not
        have changed until then. Raises CorruptionError; then nothing is noted."""
        identity = self._identities[run.path]
        valid_nbytes = min(run.nbytes, identity.nbytes - run.offset_nbytes)
        ctypes.memset(address + valid_nbytes, 0, run.nbytes - valid_nbytes)  # Behind the end.
        digests = digest(address, run.nbytes)
        of_chunks = {}
        for offset_nbytes, nbytes in split_at_chunks(run.offset_nbytes, run.nbytes):
            start = (offset_nbytes - run.offset_nbytes) // PAGE_NBYTES * CHECKSUM_NBYTES
            of_chunk = zlib.crc32(digests[start : start + nbytes // PAGE_NBYTES * CHECKSUM_NBYTES])
            of_chunks[run.path, offset_nbytes, nbytes] = of_chunk
        # Old checkpoints have checksums of whole runs.
        of_run = {(run.path, run.offset_nbytes, run.nbytes): zlib.crc32(digests)}
        with self._lock:
            for key, found in (of_chunks | of_run).items():
                if self._checksums.get(key, found) != found:
                    raise _other_bytes(*key, label)
            if not of_chunks.keys() <= self._checksums.keys():
                refuse_changed(identity, is_open=True)
            self._checksums |= of_chunks

    def known(self, *, with_earlier: bool) -> list[RunChecksum]:
        with self._lock:
            return [
                RunChecksum(*key, value)
                for key, value in self._checksums.items()
                if with_earlier or key not in self._earlier
            ]

    def expect(self, checksums: Iterable[RunChecksum]) -> None:
        with self._lock:
            for checksum in checksums:
                key = checksum.path, checksum.offset_nbytes, checksum.nbytes
                if key not in self._checksums:
                    self._checksums[key] = checksum.crc32c
                    self._earlier.add(key)
                elif self._checksums[key] != checksum.crc32c:
                    raise _other_bytes(*key, "before the checkpoint was loaded")

    def close(self) -> None:
        """Waits for the checks that were started."""
        self._threads.close()


def _other_bytes(path: str, offset_nbytes: int, nbytes: int, label: str) -> CorruptionError:
    detail = (
        f"{label}: the bytes are not those that were read first, in this run or the one that it "
        "continues (CRC32C). The drive, its cable, its file system or another program changed "
        "them. Nothing was computed from them; check the file, and resume from the newest "
        "checkpoint"
    )
    return corrupt(path, detail, offset_nbytes, nbytes, code=errno.EBADMSG)


class ShardFiles:
    """The open shards of a model. Any thread may read; the storage engine is the caller's.

    `close` waits for reads. Raises StorageError for a file that cannot be opened, CorruptionError
    for one that changed.
    """

    def __init__(
        self, engine: StorageEngine, identities: Sequence[ShardIdentity], *, verify: bool
    ) -> None:
        self._engine = engine
        self.identities: Mapping[str, ShardIdentity] = {file.path: file for file in identities}
        self._files: dict[str, int] = {}
        self._directories: dict[int, str] = {}  # By file id; a trace is written after `close`.
        self._checks = _ReadChecks(self.identities) if verify else None
        try:
            for identity in identities:
                refuse_changed(identity)
                file = self._files[identity.path] = open_past_cache(engine, identity.path)
                self._directories[file] = os.path.dirname(os.path.realpath(identity.path))
        except BaseException:
            self.close()
            raise

    def path_of(self, file: int) -> str:
        """The directory on its drive of the shard behind a file id of `Ticket.passages`."""
        return self._directories[file]

    def read(
        self, runs: Sequence[ShardRun], *, address: int, priority: Priority, label: str
    ) -> Ticket:
        """Reads runs into a host block at `address`, a multiple of 4096. `label` is for errors."""
        segments = [
            Segment(
                self._files[run.path],
                run.offset_nbytes,
                address + run.block_offset_nbytes,
                run.nbytes,
            )
            for run in runs
        ]
        read = _NamedRead(self._engine.submit("read", segments, priority), self, label)
        if self._checks is None:
            return read
        return FollowedTicket(read, self._checks.start(read, runs, address, label))

    def checksums(self, *, with_earlier: bool) -> list[RunChecksum]:
        """Returns the checksums that the first reads have taken, and those of `expect`, or without
        `with_earlier` the first reads' that `expect` did not have."""
        return [] if self._checks is None else self._checks.known(with_earlier=with_earlier)

    def expect(self, checksums: Iterable[RunChecksum]) -> None:
        """Compares the first reads, too, with these checksums of an earlier run. Raises
        CorruptionError if one that was made has others."""
        if self._checks is not None:
            self._checks.expect(checksums)

    def explain(self, error: StorageError, label: str) -> StorageError:
        """Returns the error of a read with the name of the tensor, and with the change of the
        file."""
        if isinstance(error, CorruptionError):
            return error
        identity = self.identities.get(error.path)
        changed = None if identity is None else difference(identity)
        reason = error.detail or os.strerror(error.errno or errno.EIO)
        return error.with_detail(f"{label}: {changed or reason}. Frozen weights rest in this file")

    def close(self) -> None:
        """Closes the files, after the reads and checks of them. Idempotent."""
        if self._checks is not None:
            self._checks.close()
        while self._files:
            self._engine.close_file(self._files.popitem()[1])


class _NamedRead(WrappedTicket):
    """A ticket whose errors name the bytes of the read."""

    def __init__(self, inner: Ticket, files: ShardFiles, label: str) -> None:
        super().__init__(inner)
        self._files = files
        self._label = label

    @override
    def wait(self) -> None:
        try:
            super().wait()
        except StorageError as error:
            raise self._files.explain(error, self._label) from None


def open_past_cache(engine: StorageEngine, path: str, *, read_only: bool = True) -> int:
    """Opens a file past the page cache, or through it where the file system has no O_DIRECT."""
    try:
        return engine.open(path, direct=True, read_only=read_only)
    except StorageError as error:
        if error.errno != errno.EINVAL:
            raise
    return engine.open(path, direct=False, read_only=read_only)
