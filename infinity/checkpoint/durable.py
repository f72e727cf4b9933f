"""Files that last: written, synced and renamed so that a crash leaves the old ones or the new ones.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Self

from infinity.errors import StorageError, reporting
from infinity.sizes import MIB, format_nbytes

# Checkpoints are as private as swap files. Exports are for other users and follow the umask.
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
TRANSFER_NBYTES = 16 * MIB


def write_file(path: Path, content: bytes) -> None:
    """Writes and syncs a new file. Raises StorageError."""
    with SequentialFile(path) as file:
        file.write(memoryview(content))


def replace_file(path: Path, content: str) -> None:
    """Gives a file this content. An earlier one keeps its own until all of it is synced. Raises
    OSError."""
    partial = partial_of(path)
    try:
        partial.write_text(content, encoding="utf-8")
        sync_file(partial)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


class SequentialFile:
    """A new file that is written sequentially, and synced when its block succeeds.

    Raises StorageError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reporting("create", path):
            self._file = _create(path)

    def write(self, view: memoryview) -> None:
        """Appends all of `view`. Raises StorageError."""
        with reporting("write", self._path):
            while view:
                view = view[os.write(self._file.fileno(), view[:TRANSFER_NBYTES]) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        with self._file, reporting("fsync", self._path):
            if kind is None:
                os.fsync(self._file.fileno())
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def new_file(path: Path, nbytes: int) -> None:
    """Makes a new file of `nbytes` and allocates its space. Raises StorageError."""
    with reporting("allocate", path), _create(path) as file:
        reserve_space(file.fileno(), nbytes)


def reserve_space(fd: int, nbytes: int) -> None:
    """Gives a new file its length, and its blocks where the file system can. Raises OSError."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def _create(path: Path) -> FileIO:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    return open(fd, "r+b", buffering=0)


def make_durably(directory: Path, mode: int = 0o777) -> None:
    """Makes the directory and its missing parents, and syncs every new name.

    `mode` applies to the directory, not to its parents.
    """
    if not directory.is_dir():
        make_durably(directory.parent)
        directory.mkdir(mode, exist_ok=True)
        sync_directory(directory.parent)


def make_directory(directory: Path) -> None:
    """Creates `directory` and its parents. Raises StorageError naming the path."""
    with reporting("create", directory):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            paths = (directory, *directory.parents)
            present = next((path for path in paths if os.path.lexists(path)), directory)
            what = "a file"
            if not present.exists():
                what = f"a link to {os.readlink(present)}, which is not there"
            raise StorageError(
                error.errno or 0,
                operation="create",
                path=str(directory),
                detail=f"{present} is {what}; expected a directory, or a name that is free",
            ) from None


def check_space(
    directory: Path,
    nbytes: int,
    *,
    path: Path | None = None,
    operation: str = "export",
    needs: str = "the export needs",
    remedy: str = "",
) -> None:
    """Raises StorageError if the file system of `directory` has less than `nbytes` free.

    `path`: the file or directory that the error names, by default `directory`.
    """
    stats = os.statvfs(directory)
    free_nbytes = stats.f_bavail * stats.f_frsize
    if free_nbytes < nbytes:
        raise StorageError(
            errno.ENOSPC,
            operation=operation,
            path=str(path or directory),
            nbytes=nbytes,
            detail=f"{needs} {format_nbytes(nbytes)}, the file system has "
            f"{format_nbytes(free_nbytes)} free{remedy}",
        )


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. Raises StorageError."""
    _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Makes the content of a file durable, whichever program has written it. Raises
    StorageError."""
    _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    with reporting("fsync", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def partial_of(target: Path) -> Path:
    """Returns the path of `target` while it is written or removed."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def new_directory(target: Path, mode: int = 0o777) -> Iterator[Path]:
    """Gives a hidden directory beside `target`, which gets that name durably when the block
    succeeds; the block syncs its files. An empty directory of the name is replaced. An error leaves
    nothing behind. Raises StorageError."""
    partial = partial_of(target)
    if partial.exists():  # A crash has left it.
        shutil.rmtree(partial, ignore_errors=True)
    with reporting("create", partial):
        partial.mkdir(mode)
    may_be_named = False
    try:
        yield partial
        sync_directory(partial)
        may_be_named = True
        with reporting("rename", target):
            os.rename(partial, target)
        sync_directory(target.parent)
    except BaseException:
        if may_be_named and not partial.exists():  # The rename may not be durable.
            with contextlib.suppress(OSError):
                os.rename(target, partial)
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_files(partial: Path, directory: Path, *, last: str, gone: Collection[str] = ()) -> None:
    """Syncs the files below `partial` and moves them to the same names in `directory`.

    If that fails, the files that had these names have them again. Raises OSError.

    last: the name of the file that is moved at the end
    gone: names of earlier files that do not go with the new ones. They lose these in this order,
        and for good before the first of the others gets its own
    """
    files = sorted(filter(Path.is_file, partial.rglob("*")), key=lambda file: file.name == last)
    names = [file.relative_to(partial) for file in files]
    for file in files:
        sync_file(file)
    before, earlier = partial / ".before", dict.fromkeys((*map(Path, gone), *names))
    try:
        for name in filter(lambda name: (directory / name).is_file(), earlier):
            (before / name).parent.mkdir(parents=True, exist_ok=True)
            keep = os.replace if str(name) in gone else link_or_copy
            keep(directory / name, before / name)
        sync_directory(directory)
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / name, directory / name)
        for parent in {(directory / name).parent for name in names}:
            sync_directory(parent)
    except BaseException:
        for name in earlier:
            with contextlib.suppress(OSError):
                if (before / name).exists():
                    os.replace(before / name, directory / name)
                elif not (partial / name).exists():
                    (directory / name).unlink(missing_ok=True)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Gives the content of a file a second name. Raises OSError."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # A file system without links.
        shutil.copy2(source, target, follow_symlinks=False)
