"""Whole pages of files, read past the page cache and compared with their checksums."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from infinity.errors import corrupt, reporting
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.checksums import ExpectedRange
from infinity.storage.closing import Closing

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
            raise corrupt(str(path), detail, end, nbytes - done, code=errno.EBADMSG)
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
