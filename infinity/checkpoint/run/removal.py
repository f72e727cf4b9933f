"""Taking checkpoints out of the way: those that are damaged, and those of a job that is gone.

Only what this package wrote is removed, file by file; whatever else lies beside it stays.
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
    reporting,
    step_of,
    sync_names,
)
from infinity.checkpoint.run.inspection import inspect
from infinity.storage.swap_directory import is_swap_name

_OWN_FILE = re.compile(
    r"manifest\.(json|sha256)|linked\.(json|crc32c)|copied\.pages|program\.pt"
    r"|(unit-\d{5,}|buffers)\.safetensors|\.(unit-\d{5,}|buffers)\.safetensors\.partial"
)
_RANK = re.compile(r"rank-\d{5,}")
_STEP = re.compile(r"step-\d{8,}")


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint; None where it is whole, or gone. Reads every byte of it."""
    for is_verified in (False, True):  # Most damage shows without reading everything.
        for found in inspect(path, verify=is_verified) if path.is_dir() else ():
            if found.faults:
                return found.faults[0]
    return None if path.is_dir() or not os.path.lexists(path) else f"{path} is no directory"


def damaged_after(directory: Path, step: int) -> tuple[list[Path], Path | None]:
    """Checkpoints later than `step` that are damaged, newest first, up to one that is whole, which
    comes second."""
    damaged: list[Path] = []
    for path in reversed(list_checkpoints(directory)):
        if step_of(path) <= step:
            break
        if fault_of(path) is None:
            return damaged, path
        damaged.append(path)
    return damaged, None


def set_aside(path: Path) -> Path:
    """Gives a checkpoint a name that is none of a checkpoint's: "step-00000120.damaged"."""
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
    """A commit loses its name for good; whoever tidies the directory next removes it."""
    with locked(path.parent), reporting("rename", path):
        os.rename(path, partial_of(path))
        sync_names(path.parent)


def remove_own(directory: Path) -> list[Path]:
    """Removes the checkpoints in a directory, and it, if nothing else is there. What stays, which
    is not ours, is returned."""
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
    """A whole one loses its name first: a crash leaves no half of it under that."""
    partial = path if is_partial_name(path.name) else partial_of(path)
    with reporting("remove", path):
        if partial != path:
            os.rename(path, partial)
            sync_names(path.parent)
        for file in _own_files(partial):
            file.unlink()
        for rank in [each for each in partial.iterdir() if _RANK.fullmatch(each.name)]:
            _remove_if_empty(rank)
        if _remove_if_empty(partial):
            return []
        # Under a name that nobody sweeps.
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
