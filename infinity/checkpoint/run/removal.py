"""Removes or renames checkpoints that are damaged, and those of a job that has ended.

Only files of this package are removed, one by one; all other files stay.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from infinity.checkpoint.run.directory import (
    is_partial_name,
    list_checkpoints,
    locked,
    partial_of,
    step_of,
    sync_names,
)
from infinity.checkpoint.run.inspection import inspect
from infinity.errors import reporting
from infinity.storage.swap_directory import is_swap_name

_OWN_FILE = re.compile(
    r"manifest\.(json|sha256)|linked\.(json|crc32c)|copied\.pages|program\.pt|shards\.json"
    r"|(unit-\d{5,}|buffers)\.safetensors|\.(unit-\d{5,}|buffers)\.safetensors\.partial"
)
_RANK = re.compile(r"rank-\d{5,}")
_STEP = re.compile(r"step-\d{8,}")


def fault_of(path: Path) -> str | None:
    """Returns the first fault of a checkpoint; None if it is intact or gone. Reads every byte.

    Raises StorageError.
    """
    for is_verified in (False, True):  # Most damage shows without reading everything.
        for found in inspect(path, verify=is_verified) if path.is_dir() else ():
            if found.faults:
                return found.faults[0]
    return None if path.is_dir() or not os.path.lexists(path) else f"{path} is no directory"


def damaged_after(directory: Path, step: int) -> tuple[list[Path], Path | None]:
    """Finds damaged checkpoints that are newer than the newest intact one.

    Returns (damaged ones later than `step`, newest first; the intact one after `step`, or None).
    Raises StorageError.
    """
    damaged: list[Path] = []
    for path in reversed(list_checkpoints(directory)):
        if step_of(path) <= step:
            break
        if fault_of(path) is None:
            return damaged, path
        damaged.append(path)
    return damaged, None


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to "step-00000120.damaged" and returns the new path.

    Raises ConfigError if another process writes in the directory, StorageError.
    """
    with locked(path.parent), reporting("rename", path):
        target = path.with_name(f"{path.name}.damaged")
        number = 1
        while os.path.lexists(target):
            number += 1
            target = path.with_name(f"{path.name}.damaged-{number}")
        os.rename(path, target)
        sync_names(path.parent)
    return target


def give_up(path: Path) -> None:
    """Takes the name of a commit away durably; the next sweep of the directory removes its files.

    Raises ConfigError if another process writes in the directory, StorageError.
    """
    with locked(path.parent), reporting("rename", path):
        os.rename(path, partial_of(path))
        sync_names(path.parent)


def remove_own(directory: Path) -> list[Path]:
    """Removes the checkpoints in a directory, and the directory if it is empty then.

    Returns the entries that stay, because this package did not write them. Raises ConfigError if
    another process writes in the directory, StorageError.
    """
    stays: list[Path] = []
    with locked(directory):
        for entry in sorted(directory.iterdir()):
            is_ours = _STEP.fullmatch(entry.name) or is_partial_name(entry.name)
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
            sync_names(path.parent)
        for file in _own_files(partial):
            file.unlink()
        for rank in [entry for entry in partial.iterdir() if _RANK.fullmatch(entry.name)]:
            _remove_if_empty(rank)
        if _remove_if_empty(partial):
            return []
        # The new name is safe from a sweep.
        target = path.with_name(path.name.removeprefix(".").removesuffix(".partial") + ".foreign")
        os.rename(partial, target)
        return [target]


def _own_files(path: Path) -> Iterator[Path]:
    for entry in list(path.iterdir()):
        if _RANK.fullmatch(entry.name) and _is_real_directory(entry):
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
