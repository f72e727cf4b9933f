"""Checksums of a swap file, one per page, and reads that are compared with them.

A checksum is that of the last submitted write of a page. It catches later changes by a drive, a
cable or a file system that report no error. The table is in memory, 1 MiB per GiB of the file. `of`
and `put` take ranges, 4 bytes per page in the order of the pages, so that a manifest can store them
beside each extent, for a comparison in a later run. `PageReader` reads pages of a file past the
page cache, and compares them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EBADMSG
from functools import cache
from pathlib import Path

from typing_extensions import override

from infinity import _core
from infinity._core import PageDigests as PageDigests
from infinity.errors import CorruptionError, corrupt, reporting
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.closing import Closing
from infinity.storage.generations import GenerationMap, GenerationRun
from infinity.storage.protocol import Ticket, WrappedTicket
from infinity.storage.volume_layout import Extent

CHECKSUM_NBYTES = 4


def digest(address: int, nbytes: int, num_threads: int = 1) -> bytes:
    """CRC32C of each page in memory, 4 bytes each in native order. Without the GIL."""
    return _core.crc32c_pages(address, nbytes, num_threads)


_POLYNOMIAL = 0xEDB88320  # Of CRC-32, its bits reversed, as in zlib.
_ONE, _X = 1 << 31, 1 << 30  # Polynomials: bit 31 is the coefficient of x^0.


def joined_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Returns the CRC-32 of two adjacent ranges of bytes, from those of each. Source:
    crc32_combine of zlib: crc(A B) = crc(A) x^(8 |B|) + crc(B), modulo the polynomial."""
    return _product(_power(8 * second_nbytes), first) ^ second


@cache
def _power(exponent: int) -> int:
    """Returns x^exponent modulo the polynomial of CRC-32."""
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = _product(square, power)
        square, exponent = _product(square, square), exponent >> 1
    return power


def _product(left: int, right: int) -> int:
    """Returns the product of two polynomials over GF(2), modulo that of CRC-32."""
    found = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            found ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return found


_UNKNOWN, _KNOWN = 0, 1


class PageChecksums:
    """The table of one swap file. The pages of a file that grew are zeros, and known as such.

    In a file of another job (`is_fresh` False) no page is known before it is written or its
    checksums are put. A page that is not known cannot be checked.

    Any thread may use the table. Two threads that write one page, or write and read it, must be
    ordered by their caller, as for the file itself.
    """

    def __init__(self, *, is_fresh: bool = True) -> None:
        self._table = bytearray()  # Only full slices are copied in and out, under the GIL.
        self._lock = threading.Lock()  # guards the one below
        self._known = GenerationMap(_KNOWN if is_fresh else _UNKNOWN)
        self._zeros = _core.crc32c_of_zeros()

    def grow(self, size_nbytes: int) -> None:
        """Takes notice that the file has become so long."""
        missing = size_nbytes // PAGE_NBYTES - len(self._table) // CHECKSUM_NBYTES
        self._table.extend(self._zeros * max(0, missing))

    def of(self, offset_nbytes: int, nbytes: int) -> bytes:
        """Returns the checksums of a range of full pages."""
        found = bytes(self._table[_entries(offset_nbytes, nbytes)])
        assert len(found) == nbytes // PAGE_NBYTES * CHECKSUM_NBYTES, (
            "the file was not grown so far"
        )
        return found

    def put(self, offset_nbytes: int, checksums: bytes) -> None:
        """Replaces the checksums from a page on."""
        nbytes = len(checksums) // CHECKSUM_NBYTES * PAGE_NBYTES
        self._table[_entries(offset_nbytes, nbytes)] = checksums
        with self._lock:
            if len(self._known) > 1 or self._known.at(0) == _UNKNOWN:
                self._known.put(GenerationRun(_KNOWN, offset_nbytes, nbytes))

    def forget(self, offset_nbytes: int, nbytes: int) -> None:
        """Drops the checksums of a range whose bytes have changed."""
        with self._lock:
            self._known.put(GenerationRun(_UNKNOWN, offset_nbytes, nbytes))

    def known(self, offset_nbytes: int, nbytes: int) -> list[tuple[int, int]]:
        """The parts of a range that can be checked: offset and length."""
        with self._lock:
            parts = self._known.of(offset_nbytes, nbytes)
        return [(part.offset_nbytes, part.nbytes) for part in parts if part.generation == _KNOWN]


def _entries(offset_nbytes: int, nbytes: int) -> slice:
    first = offset_nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
    return slice(first, first + nbytes // PAGE_NBYTES * CHECKSUM_NBYTES)


class BufferChecksums:
    """CRC32C of each page of every buffer, as last written: a table for each path. Thread-safe as
    `PageChecksums`. The caller of a write computes them, on up to `num_threads` threads."""

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self.tables: list[PageChecksums] = []

    def of(self, extents: Sequence[Extent]) -> bytes:
        """Returns the checksums of a buffer, 4 bytes for each page in native order."""
        return b"".join(
            self.tables[extent.path_index].of(extent.offset_nbytes, extent.nbytes)
            for extent in extents
        )

    def put(self, extents: Sequence[Extent], checksums: bytes) -> None:
        """Sets the checksums of a buffer, as `of` returns them."""
        at = 0
        for extent in extents:
            nbytes = extent.nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
            self.tables[extent.path_index].put(extent.offset_nbytes, checksums[at : at + nbytes])
            at += nbytes

    def digests(self, address: int, nbytes: int, known: PageDigests | None) -> bytes:
        """Returns the checksums of what is written. `known`: as far as an update has taken them."""
        if known is not None:
            return known.finish(self._num_threads)
        return digest(address, nbytes, self._num_threads)


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """A range that is read: the source, the target, and the expected checksums. `label` names the
    bytes.
    """

    path: str
    offset_nbytes: int
    address: int
    nbytes: int
    checksums: bytes
    label: str = ""

    def check(self, num_threads: int = 1) -> CorruptionError | None:
        """None when the bytes in memory are the expected ones."""
        page = _core.first_bad_page(self.address, self.nbytes, self.checksums, num_threads)
        if page < 0:
            return None
        what = f"{self.label}: " if self.label else ""
        detail = (
            f"{what}the page is not what was written last "
            "(CRC32C). The drive, its cable, its file system or another program changed it. "
            "Nothing was computed from it; resume from the newest checkpoint, and check the drive"
        )
        first = self.offset_nbytes + page * PAGE_NBYTES
        return corrupt(self.path, detail, first, PAGE_NBYTES, code=EBADMSG)


class CheckedRead(WrappedTicket):
    """A ticket whose wait() compares checksums, once, on the thread that waits first and up to
    `num_threads` - 1 others. It raises CorruptionError, which names the first bad page."""

    def __init__(
        self, inner: Ticket, ranges: Sequence[ExpectedRange], num_threads: int = 1
    ) -> None:
        super().__init__(inner)
        self._num_threads = num_threads
        self._ranges = tuple(ranges)
        self._error: CorruptionError | None = None
        self._lock = threading.Lock()  # guards the ranges and the error

    @override
    def wait(self) -> None:
        super().wait()
        with self._lock:
            ranges, self._ranges = self._ranges, ()  # Later the memory is the caller's to change.
            for page_range in ranges:
                self._error = self._error or page_range.check(self._num_threads)
            if self._error is not None:
                raise self._error.with_traceback(None)


# -- Whole pages of files, read past the page cache and compared -----------------------------------


BUFFER_NBYTES = 4 * MIB
_TRANSFER_NBYTES = 16 * MIB


def read_into(fd: int, view: memoryview, offset_nbytes: int, *, path: str) -> int:
    """Fills `view` from an offset of a file on; how many bytes there were before its end.

    `path` names it in the StorageError that is raised where it cannot be read.
    """
    done = 0
    while done < len(view):
        with reporting("read", path, offset_nbytes + done, len(view) - done):
            part = view[done : done + _TRANSFER_NBYTES]
            count = os.preadv(fd, [part], offset_nbytes + done)
        if count == 0:
            break
        done += count
    return done


class PageReader(Closing):
    """Reads at most BUFFER_NBYTES at a time into memory of its own. Not thread-safe; close it.

    Reads are direct if the file system allows: bytes that are read once do not belong in the page
    cache, and other pages of the file may be written directly at the same time.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BUFFER_NBYTES)  # Page-aligned.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._fds: dict[Path, int] = {}

    def close(self) -> None:
        """Closes all files. Idempotent."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(self, path: Path, offset_nbytes: int, nbytes: int, checksums: bytes) -> memoryview:
        """Returns the bytes of a range of full pages, valid until the next read.

        `checksums`: CRC32C of each page, 4 bytes each. Raises CorruptionError naming the first bad
        page, also where the file ends too early, and StorageError where it cannot be read.
        """
        assert nbytes <= BUFFER_NBYTES and not (offset_nbytes | nbytes) % PAGE_NBYTES
        view = memoryview(self._memory)[:nbytes]
        done = read_into(self._open(path), view, offset_nbytes, path=str(path))
        if done < nbytes:
            end = offset_nbytes + done
            detail = f"the file ends at byte {end}, inside the state"
            raise corrupt(str(path), detail, end, nbytes - done, code=EBADMSG)
        expected = ExpectedRange(str(path), offset_nbytes, self._address, nbytes, checksums)
        found = expected.check()
        if found is not None:
            raise found
        return view

    def _open(self, path: Path) -> int:
        fd = self._fds.get(path)
        if fd is None:
            flags = os.O_RDONLY | os.O_CLOEXEC
            with contextlib.suppress(OSError):
                fd = os.open(path, flags | os.O_DIRECT)
            if fd is None:
                with reporting("open", path):
                    fd = os.open(path, flags)
            self._fds[path] = fd
        return fd
