"""One swap directory: creation, the lock, stale files, and the abilities of its file system.

A directory belongs to one living process at a time. The lock is a flock on `infinity.lock`, which
the kernel releases when its holder dies; the JSON in it names the holder. Swap files are named
`infinity-<job>.swap`, those of spare generations `infinity-<job>-<generation>.swap`, where the job
is 16 hex digits; no other name is ever touched (docs/formats/swap.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infinity import _core
from infinity.bounded import kind_of
from infinity.errors import StorageError, reporting
from infinity.sizes import GIB, PAGE_NBYTES, align_up
from infinity.storage.lock_file import (
    LOCK_NAME,
    SCHEMA,
    DirectoryLock,
    is_swap_name,
    open_lock,
    read_holder,
    swap_names,
    try_lock,
    unlink_logged,
)

_NO_RANGE_SUPPORT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class SwapDirectory:
    """A locked swap directory and the swap files in it: one, and `num_spares` of the same size.

    The files are new, or those of the dead job `adopt`, whose content stays.

    Raises SwapLockedError if a living process holds the directory, StorageError if it cannot be
    used, UnsupportedError if a newer version has left it.
    """

    def __init__(self, path: str, *, num_spares: int = 0, adopt: str | None = None) -> None:
        self.path = path
        was_made = _ensure_directory(path)
        job = adopt or secrets.token_hex(8)
        try:
            self._lock = DirectoryLock(path, job)
        except BaseException:
            if was_made:  # On a full drive a directory may fit where a lock does not.
                with contextlib.suppress(OSError):
                    os.rmdir(path)
            raise
        names = swap_names(job, num_spares)
        self.swap_paths = tuple(os.path.join(path, name) for name in names)
        self._fds: list[int] = []
        try:
            kept = {*self._lock.kept, *(names if adopt else ())}
            for name in filter(is_swap_name, _names_in(path)):
                if name not in kept:  # Of a dead job.
                    remove_swap_file(os.path.join(path, name))
            for swap_path in self.swap_paths:
                is_there = adopt is not None and os.path.lexists(swap_path)
                self._fds.append(_open(swap_path) if is_there else _create(swap_path))
        except BaseException:
            self._close_files(remove=adopt is None)
            self._lock.release()
            raise
        self.size_nbytes = 0  # The reserved length; adopted files may be longer.
        found = [os.fstat(fd) for fd in self._fds]
        self._adopted_sizes = [status.st_size for status in found]
        # Blocks of adopted files that `grow` has not taken yet, and the bytes that it has taken.
        self.adopted_nbytes = sum(status.st_blocks * 512 for status in found)
        self.taken_nbytes = 0
        self.device: int = os.fstat(self._fds[0]).st_dev

    @property
    def swap_path(self) -> str:
        """The file of generation 0."""
        return self.swap_paths[0]

    def free_nbytes(self) -> int | None:
        """Bytes that may still be taken, less a reserve of 5 % or 1 GiB, whichever is smaller.

        None when the file system does not say (ramfs).
        """
        with reporting("statvfs", self.path):
            found = os.fstatvfs(self._fds[0])
        if found.f_blocks == 0:
            return None
        reserve_nbytes = min(GIB, found.f_blocks * found.f_frsize // 20)
        return max(0, found.f_bavail * found.f_frsize - reserve_nbytes)

    def grow(self, size_nbytes: int, *, spared: Sequence[Sequence[tuple[int, int]]] = ()) -> None:
        """Preallocates up to `size_nbytes`; new ranges read as zeros.

        Spare files get the same length, but blocks only for their ranges (offset, bytes) in
        `spared`; by default none.
        On failure the files have their old size again. fallocate(2); written once where there is
        none.
        """
        if size_nbytes <= self.size_nbytes:
            return
        own = (self.size_nbytes, size_nbytes - self.size_nbytes)
        ranges = [[own], *(spared or [()] * (len(self._fds) - 1))]
        before_nbytes = self._blocks_nbytes()
        together = list(zip(self._fds, self._adopted_sizes, strict=True))
        with reporting("fallocate", self.swap_path, *own):
            try:
                for number, (fd, adopted_nbytes) in enumerate(together):
                    if number and adopted_nbytes < size_nbytes:
                        os.ftruncate(fd, size_nbytes)
                    for offset_nbytes, nbytes in ranges[number]:
                        _allocate(fd, offset_nbytes, nbytes, adopted_nbytes=adopted_nbytes)
            except OSError:
                for fd, adopted_nbytes in together:
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, max(adopted_nbytes, self.size_nbytes))
                raise
        self.size_nbytes = size_nbytes
        taken_nbytes = sum(nbytes for of_file in ranges for _, nbytes in of_file)
        self.taken_nbytes += taken_nbytes
        if self.adopted_nbytes:  # What the file system did not have to give was there.
            new_nbytes = self._blocks_nbytes() - before_nbytes
            self.adopted_nbytes -= min(self.adopted_nbytes, max(0, taken_nbytes - new_nbytes))

    def _blocks_nbytes(self) -> int:
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds) if self.adopted_nbytes else 0

    @contextlib.contextmanager
    def scratch(self, nbytes: int) -> Iterator[int]:
        """Grows the file of generation 0 for a measurement, and truncates it afterwards. Yields
        where the new bytes are. No request may be in flight at the end."""
        end_nbytes = self._end_nbytes
        start_nbytes = align_up(end_nbytes, PAGE_NBYTES)
        try:
            with reporting("fallocate", self.swap_path, start_nbytes, nbytes):
                _allocate(self._fds[0], start_nbytes, nbytes, adopted_nbytes=start_nbytes)
            yield start_nbytes
        finally:
            os.ftruncate(self._fds[0], end_nbytes)

    @property
    def _end_nbytes(self) -> int:
        """The length of the file of generation 0."""
        return max(self.size_nbytes, self._adopted_sizes[0])

    def refusal_of_direct_io(self) -> str | None:
        """Tries direct I/O in units of 4096 bytes behind the end of the file. Returns None if it
        works, else the reason."""
        end_nbytes = self._end_nbytes
        try:
            fd = os.open(self.swap_path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW)
        except OSError as error:
            return f"open with O_DIRECT failed: {error.strerror}"
        try:
            memory_nbytes, offset_nbytes = _core.direct_alignment(fd)
            if max(memory_nbytes, offset_nbytes) > PAGE_NBYTES:
                return f"it needs an alignment of {max(memory_nbytes, offset_nbytes)} bytes"
            with mmap.mmap(-1, PAGE_NBYTES) as page:  # Page-aligned memory.
                os.pwrite(fd, page, align_up(end_nbytes, PAGE_NBYTES))
            return None
        except OSError as error:
            return f"a direct write failed: {error.strerror}"
        finally:
            with reporting("truncate", self.swap_path), open(fd, "rb", buffering=0):
                os.ftruncate(fd, end_nbytes)

    def close(self, *, remove: bool) -> None:
        """Removes the swap files, or leaves them to checkpoints, and releases the lock.
        Idempotent."""
        if not self._fds:
            return
        self._close_files(remove=remove)
        self._lock.release(keep=() if remove else map(os.path.basename, self.swap_paths))

    def _close_files(self, *, remove: bool) -> None:
        for path, fd in zip(self.swap_paths, self._fds, strict=False):
            os.close(fd)
            if remove:
                unlink_logged(path)
        self._fds.clear()


def _ensure_directory(path: str) -> bool:
    """Creates the last component of `path` if need be; a mistyped mount point stays an error.
    Returns whether it was created."""
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        if not os.access(path, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            code = errno.EROFS if is_read_only else errno.EACCES
            why = "its file system is mounted read-only" if is_read_only else "check its mode"
            detail = f"the swap directory is not writable: {why}, or give a directory of your own"
            raise _unusable(path, code, detail)
        return False
    if os.path.lexists(path):
        raise _unusable(path, errno.ENOTDIR, "the swap path exists and is not a directory")
    if not os.path.isdir(parent):
        _refuse_unreachable(path, parent)
        raise _unusable(
            path,
            errno.ENOENT,
            f"its parent {parent!r} does not exist. Only the last component is created: mount the "
            "drive or create the parent, or correct the path",
        )
    try:
        os.mkdir(path, 0o700)
        _sync_directory(parent)  # Commits in it need it.
        return True
    except FileExistsError:
        return False  # Another rank was faster.
    except OSError as error:
        code = error.errno or errno.EIO
        raise _unusable(
            path, code, f"cannot create it ({os.strerror(code)}); choose a writable parent"
        ) from error


def _refuse_unreachable(path: str, parent: str) -> None:
    """A directory that this user may not look into is no missing one."""
    try:
        os.stat(parent)
    except PermissionError:
        detail = f"{parent!r} cannot be looked into; check owner and mode of the directories above"
        raise _unusable(path, errno.EACCES, detail) from None
    except OSError:
        return


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unusable(path: str, code: int, detail: str) -> StorageError:
    return StorageError(code, operation="create swap directory", path=path, detail=detail)


def _create(path: str) -> int:
    with reporting("create", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _open(path: str) -> int:
    _check_regular(path)
    with reporting("open", path):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def remove_swap_file(path: str) -> None:
    """Removes a swap file. Raises StorageError for a foreign file with such a name."""
    _check_regular(path)
    with reporting("remove", path):
        os.unlink(path)


def _check_regular(path: str) -> None:
    with reporting("open", path):
        mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise StorageError(
            errno.EEXIST,
            operation="open",
            path=path,
            detail=f"it is {kind_of(mode)} with the name of a swap file; move it away",
        )


def _names_in(path: str) -> list[str]:
    with reporting("list", path):
        return sorted(os.listdir(path))


def _allocate(fd: int, offset_nbytes: int, nbytes: int, *, adopted_nbytes: int) -> None:
    """Takes the blocks of a range. What was in the first `adopted_nbytes` stays."""
    try:
        os.posix_fallocate(fd, offset_nbytes, nbytes)
    except OSError as error:
        if error.errno not in _NO_RANGE_SUPPORT:
            raise
        zeros = bytes(1 << 20)
        end_nbytes = offset_nbytes + nbytes
        for at in range(max(offset_nbytes, adopted_nbytes), end_nbytes, len(zeros)):
            os.pwrite(fd, zeros[: end_nbytes - at], at)


# -- A look from outside, without the lock --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwapFile:
    """A swap file. `taken_nbytes` are its blocks on the drive; `num_links` above 1 says that
    commits or checkpoints share them."""

    name: str
    nbytes: int
    taken_nbytes: int
    num_links: int


@dataclass(frozen=True, slots=True)
class SwapContents:
    """A swap directory. `holder` is the content of its lock file: schema, job, pid, host, time.

    `is_held`: the process of that job is alive.
    """

    path: str
    holder: dict[str, Any]
    is_held: bool
    files: tuple[SwapFile, ...]
    faults: tuple[str, ...] = ()  # A file with a swap file's name that is none.

    @property
    def is_newer(self) -> bool:
        """Whether a version with an unknown format has left the directory."""
        schema = self.holder.get("schema", SCHEMA)
        return type(schema) is not int or schema > SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents for JSON; sizes are bytes."""
        return {**asdict(self), "is_newer": self.is_newer}


def examine(path: str) -> SwapContents | None:
    """Returns the contents; None when the directory has neither a lock nor a swap file."""
    names = _names_in(path)
    files, faults = [], []
    for name in filter(is_swap_name, names):
        place = os.path.join(path, name)
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            continue  # A running job has removed it meanwhile.
        if stat.S_ISREG(found.st_mode):
            files.append(SwapFile(name, found.st_size, found.st_blocks * 512, found.st_nlink))
        else:
            faults.append(f"{place}: it is {kind_of(found.st_mode)}; expected a swap file")
    holder: dict[str, Any] = {}
    is_held = False
    if LOCK_NAME in names:
        try:
            holder, is_held = _look_at_lock(os.path.join(path, LOCK_NAME))
        except FileNotFoundError:
            pass
        except StorageError as error:
            faults.append(str(error))
    elif not files and not faults:
        return None
    return SwapContents(path, holder, is_held, tuple(files), tuple(faults))


def _look_at_lock(path: str) -> tuple[dict[str, Any], bool]:
    fd = open_lock(path, create=False)
    try:
        holder = read_holder(fd)
        return holder, not try_lock(fd, path, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def remove_stale(path: str) -> list[str]:
    """Removes the swap files of jobs that are gone, and their lock. Returns the names.

    Raises SwapLockedError while a living process holds the directory, UnsupportedError when a
    newer version has left it.
    """
    lock = DirectoryLock(path, job="")
    try:
        removed = []
        for name in filter(is_swap_name, _names_in(path)):
            remove_swap_file(os.path.join(path, name))
            removed.append(name)
    finally:
        lock.release()
    return removed
