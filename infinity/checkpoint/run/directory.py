"""The directory of checkpoints: names, the one atomic rename, and removal.

    directory/step-00000120/            complete: it got its name after everything in it was durable
    directory/.step-00000140.partial/   being written, being removed, or left by a crash

Has effects on files only; imports no torch. An flock on the directory admits one writing process at
a time. `remove_own` removes only files of this package, one by one.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.bounded import MalformedError, open_regular, read_bytes
from infinity.checkpoint.durable import (
    PRIVATE_DIRECTORY,
    TRANSFER_NBYTES,
    make_durably,
    new_directory,
    partial_of,
    sync_directory,
    write_file,
)
from infinity.checkpoint.run.format import (
    CHECKSUMS_NAME,
    DIGEST_NAME,
    MANIFEST_NAME,
    MAX_NBYTES,
    PROGRAM_NAME,
    TABLE_NAME,
    LinkedState,
    Manifest,
    StoredRange,
    digest_line,
    is_of_rank,
    length_of,
    manifest_to_bytes,
    parse_manifest,
    parse_table,
)
from infinity.config.paths import RUN_NAMES, runs_remedy
from infinity.errors import ConfigError, CorruptionError, corrupt, reporting
from infinity.storage.lock_file import is_swap_name, locked

_BUSY = "another process is writing a checkpoint there; give every run its own directory"
_locked = functools.partial(locked, busy=_BUSY)
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")
_OWN_FILE = re.compile(
    r"manifest\.(json|sha256)|linked\.(json|crc32c)|copied\.pages|program\.pt|shards\.json"
    r"|(unit-\d{5,}|buffers)\.safetensors|\.(unit-\d{5,}|buffers)\.safetensors\.partial"
)


def checkpoint_name(step: int) -> str:
    """Returns the name of the directory of a checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint, which `list_checkpoints` has found."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def is_partial_name(name: str) -> bool:
    """Whether a checkpoint of this name is being written or removed, or was left by a crash."""
    return _PARTIAL.fullmatch(name) is not None


def list_checkpoints(directory: Path) -> list[Path]:
    """Lists the checkpoints that have their final name, oldest first.

    Returns an empty list if there is no directory. Raises StorageError.
    """
    with reporting("list", directory):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
    found = [directory / name for name in names if _NAME.fullmatch(name)]
    return sorted(found, key=step_of)


def find_checkpoint(path: Path) -> Path:
    """Returns `path` if it is a checkpoint, else the newest checkpoint in it, or in the output of a
    run.

    Raises ConfigError if there is none, StorageError if the directory cannot be read.
    """
    with reporting("open", path):
        if _NAME.fullmatch(path.name) or os.path.lexists(path / MANIFEST_NAME):
            return path
    found = list_checkpoints(place_of_checkpoints(path))
    if not found:
        remedy = runs_remedy(path)
        if (path / "config.json").is_file():
            remedy = f". It is a model, which `infinity plan --model {path}` describes"
        raise ConfigError(
            f"{path} is no checkpoint and has none; expected {MANIFEST_NAME} in it{remedy}"
        )
    return found[-1]


def place_of_checkpoints(path: Path) -> Path:
    """Returns the checkpoints in the output of a run, and another path as it is."""
    inner = path / "checkpoints"
    with reporting("open", path):
        return inner if (path / RUN_NAMES[0]).is_file() and inner.is_dir() else path


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint and compares the length of every file that it names.

    Raises CorruptionError with the path of the file that is damaged, truncated or missing,
    UnsupportedError for a newer schema, StorageError.
    """
    content, digest = (read_content(path / name) for name in (MANIFEST_NAME, DIGEST_NAME))
    manifest = parse_manifest(content, digest, path=str(path / MANIFEST_NAME))
    names = {file.name for file in manifest.files}
    for place in manifest.places:
        if place + PROGRAM_NAME not in names:
            raise corrupt(str(path / place / PROGRAM_NAME), "the manifest does not name it")
    for file in manifest.files:
        nbytes = length_of(path / file.name)
        if nbytes != file.nbytes:
            detail = f"it has {nbytes} bytes, the manifest says {file.nbytes}"
            raise corrupt(str(path / file.name), detail)
    return manifest


def read_linked(path: Path, manifest: Manifest) -> dict[str, LinkedState]:
    """Reads the tables of linked state, by `manifest.places`; empty if there is no linked state.

    Compares the tables and checksums with their SHA-256, and the linked files with the least length
    they must have. Raises CorruptionError with the path of the file that is damaged or missing.
    """
    entries = {file.name: file for file in manifest.files}
    found: dict[str, LinkedState] = {}
    for place in manifest.places:
        if TABLE_NAME not in entries and not manifest.ranks:
            continue
        for name in (place + TABLE_NAME, place + CHECKSUMS_NAME):
            if name not in entries:
                raise corrupt(str(path / name), "the manifest does not name it")
            for extent in entries[name].extents:
                check_extent(path / name, extent)
        table_path = path / place / TABLE_NAME
        content, is_of_one_rank = read_content(table_path), not manifest.ranks
        kinds = parse_table(content, path=str(table_path), is_of_one_rank=is_of_one_rank)
        found[place] = LinkedState(path / place, kinds)
    return found


def comparing(path: Path, extent: StoredRange) -> Callable[[bytes | memoryview], None]:
    """Returns what takes the bytes of an extent, part by part in order, and compares their SHA-256
    when the last ones have come. It raises CorruptionError."""
    digest, left_nbytes = hashlib.sha256(), extent.nbytes

    def compare(part: bytes | memoryview) -> None:
        nonlocal left_nbytes
        digest.update(part)
        left_nbytes -= len(part)
        if not left_nbytes and digest.hexdigest() != extent.sha256:
            raise damaged(path, extent, "its SHA-256 is not the manifest's")

    return compare


def check_extent(path: Path, extent: StoredRange) -> None:
    """Reads an extent and compares its SHA-256. Raises CorruptionError."""
    compare = comparing(path, extent)
    compare(b"")  # All of an extent without bytes.
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            end = extent.offset_nbytes + extent.nbytes
            position = extent.offset_nbytes
            while position < end:
                block = os.pread(file.fileno(), min(TRANSFER_NBYTES, end - position), position)
                if not block:
                    raise damaged(path, extent, f"the file ends at byte {position}, inside it")
                compare(block)
                position += len(block)
            # The bytes are read once; the page cache has better uses.
            os.posix_fadvise(
                file.fileno(), extent.offset_nbytes, extent.nbytes, os.POSIX_FADV_DONTNEED
            )
    except CorruptionError:
        raise
    except (OSError, MalformedError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise corrupt(str(path), f"{extent.name!r} cannot be read: {why}") from None


def damaged(path: Path, extent: StoredRange, detail: str) -> CorruptionError:
    """Returns the error for an extent, with its name and its range in the file."""
    return corrupt(
        str(path),
        f"{extent.name!r} is damaged: {detail}",
        offset_nbytes=extent.offset_nbytes,
        nbytes=extent.nbytes,
    )


@contextmanager
def writing(directory: Path, step: int) -> Iterator[Path]:
    """Gives a fresh directory for a checkpoint, which gets its final name when the block succeeds.

    The block syncs every file that it writes. Raises ConfigError if the directory has a checkpoint
    of this or a later step, or if another process writes there; StorageError. After a failure the
    older checkpoints are unchanged.
    """
    with reporting("create", directory):
        make_durably(directory, PRIVATE_DIRECTORY)
    with _locked(directory):
        refuse_later(directory, step)
        _sweep(directory)
        # INV-14, INV-17: the rename at the end of the block commits, when all files are durable.
        with new_directory(directory / checkpoint_name(step), PRIVATE_DIRECTORY) as partial:
            yield partial


def sweep(directory: Path) -> None:
    """Removes the partial checkpoints that a crash has left. Raises ConfigError, StorageError."""
    with _locked(directory):
        _sweep(directory)


def refuse_later(directory: Path, step: int) -> None:
    """Raises ConfigError if the directory has a checkpoint of `step` or of a later step."""
    checkpoints = list_checkpoints(directory)
    if checkpoints and step_of(checkpoints[-1]) >= step:
        raise ConfigError(
            f"{checkpoints[-1]} already exists, expected none of step {step} or later: resume "
            "from it, remove it, or use another directory"
        )


def prune(directory: Path, keep: int) -> list[Path]:
    """Removes all but the newest `keep` checkpoints; returns the paths of the removed ones.

    The names are removed durably before the first file, so a crash leaves no incomplete checkpoint
    under its final name. A link is removed, the directory behind it stays, and its path is not
    returned. Raises ConfigError, StorageError.
    """
    with _locked(directory):
        checkpoints = list_checkpoints(directory)
        removed = checkpoints[: max(0, len(checkpoints) - keep)]
        links = {path for path in removed if path.is_symlink()}
        partials = [partial_of(path) for path in removed]
        for path, partial in zip(removed, partials, strict=True):
            with reporting("remove", path):
                os.rename(path, partial)
        if removed:
            sync_directory(directory)
        for partial in partials:
            _remove_tree(partial)
    return [path for path in removed if path not in links]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes and syncs the manifest and its digest. Raises StorageError."""
    content = manifest_to_bytes(manifest)
    for name, text in ((MANIFEST_NAME, content), (DIGEST_NAME, digest_line(content))):
        write_file(path / name, text)


def make_in(directory: Path, names: Iterable[str]) -> None:
    """Makes directories with these names. Raises StorageError."""
    for name in names:
        with reporting("create", directory / name):
            (directory / name).mkdir(PRIVATE_DIRECTORY)


def _sweep(directory: Path) -> None:
    """Removes partial checkpoints; the caller holds the lock."""
    for entry in list(directory.iterdir()):
        if _PARTIAL.fullmatch(entry.name):
            _remove_tree(entry)


def _remove_tree(path: Path) -> None:
    with reporting("remove", path):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def read_content(path: Path) -> bytes:
    """Reads a small file of a checkpoint. Raises CorruptionError, StorageError."""
    with reporting("read", path):
        try:
            return read_bytes(path, max_nbytes=MAX_NBYTES)
        except (FileNotFoundError, NotADirectoryError):
            detail = f"there is no {path.name}, so this is no whole checkpoint"
            raise corrupt(str(path), detail) from None
        except MalformedError as error:
            raise corrupt(str(path), str(error)) from None


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to "step-00000120.damaged" and returns the new path.

    Raises ConfigError if another process writes in the directory, StorageError.
    """
    with _locked(path.parent), reporting("rename", path):
        target = path.with_name(f"{path.name}.damaged")
        number = 1
        while os.path.lexists(target):
            number += 1
            target = path.with_name(f"{path.name}.damaged-{number}")
        os.rename(path, target)
        sync_directory(path.parent)
    return target


def give_up(path: Path) -> None:
    """Takes the name of a commit away durably; the next sweep of the directory removes its files.

    Raises ConfigError if another process writes in the directory, StorageError.
    """
    with _locked(path.parent), reporting("rename", path):
        os.rename(path, partial_of(path))
        sync_directory(path.parent)


def remove_own(directory: Path) -> list[Path]:
    """Removes the checkpoints in a directory, and the directory if it is empty then.

    Returns the entries that stay, because this package did not write them. Raises ConfigError if
    another process writes in the directory, StorageError.
    """
    stays: list[Path] = []
    with _locked(directory):
        for entry in sorted(directory.iterdir()):
            is_ours = _NAME.fullmatch(entry.name) or is_partial_name(entry.name)
            if not is_ours or not _is_real_directory(entry):
                stays.append(entry)
            else:
                stays += _remove_checkpoint(entry)
    if not stays:
        with reporting("remove", directory):
            directory.rmdir()
    return stays


def _remove_checkpoint(path: Path) -> list[Path]:
    """Removes a checkpoint; returns its new path if it has files that must stay.

    A complete checkpoint loses its name first, so that a crash leaves no part under that name.
    """
    partial = path if is_partial_name(path.name) else partial_of(path)
    with reporting("remove", path):
        if partial != path:
            os.rename(path, partial)
            sync_directory(path.parent)
        for file in _own_files(partial):
            file.unlink()
        for rank in [entry for entry in partial.iterdir() if is_of_rank(entry.name)]:
            _remove_if_empty(rank)
        if _remove_if_empty(partial):
            return []
        # The new name is safe from a sweep.
        target = path.with_name(path.name.removeprefix(".").removesuffix(".partial") + ".foreign")
        os.rename(partial, target)
        return [target]


def _own_files(path: Path) -> Iterator[Path]:
    for entry in list(path.iterdir()):
        if is_of_rank(entry.name) and _is_real_directory(entry):
            yield from _own_files(entry)
            continue
        is_own = _OWN_FILE.fullmatch(entry.name) or is_swap_name(entry.name)
        if is_own and stat.S_ISREG(entry.lstat().st_mode):
            yield entry


def _is_real_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _remove_if_empty(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True
