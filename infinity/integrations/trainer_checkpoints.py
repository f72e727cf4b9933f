"""Directories of a Trainer's checkpoints: each has its name only when it is whole.

Written against transformers 5.23.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from infinity.checkpoint.run.directory import sync_directory, sync_file
from infinity.checkpoint.run.save import save
from infinity.engine.registry import engine_of
from infinity.errors import reporting
from infinity.optimizers.offloaded import OffloadedOptimizer

STATE_NAME = "infinity"  # The directory inside a Trainer's checkpoint.
# Not a name that `get_last_checkpoint` takes for a checkpoint.
_PARTIAL = re.compile(rf"\.{PREFIX_CHECKPOINT_DIR}-\d+\.partial")

_log = logging.getLogger("infinity")


def save_over(
    directory: Path, model: nn.Module, optimizer: OffloadedOptimizer, *, step: int | None = None
) -> None:
    """Replaces the state of an earlier run, as Trainer does with the rest of a checkpoint. If
    writing fails, the earlier state is restored. All ranks call it, and rank 0 replaces."""
    engine, has_before = engine_of(model), False
    before = directory.with_name(f".{directory.name}.replaced")
    with engine.collective_section("replace a saved state"):
        if engine.rank == 0:
            has_before = _move_away(directory, before)
    own = _frozen_in(model, directory)
    try:
        save(directory, model, optimizer, step=step)
    except BaseException:
        # Released files of this engine are shared with swap files that training rewrites.
        if has_before and own == _frozen_in(model, directory):
            shutil.rmtree(directory, ignore_errors=True)
            before.rename(directory)
        raise
    with engine.collective_section("remove the saved state that was replaced"):
        if engine.rank == 0:
            shutil.rmtree(before, ignore_errors=True)


def _move_away(directory: Path, before: Path) -> bool:
    """Renames a directory. Returns whether it was there."""
    with reporting("replace", before):
        if before.exists():
            shutil.rmtree(before)
        if not directory.exists():
            return False
        directory.rename(before)
        return True


def remove_partials(directory: Path) -> None:
    """Removes what a Trainer that was killed has left of checkpoints, in the making or in their
    removal."""
    for path in directory.glob(f".{PREFIX_CHECKPOINT_DIR}-*"):
        if _PARTIAL.fullmatch(path.name):
            with reporting("remove", path):
                shutil.rmtree(path)
            _log.warning("%s is removed: a run was killed while it wrote or removed it", path)


def rotate(directory: Path, limit: int | None, best: str | None) -> None:
    """Removes the checkpoints that `transformers.trainer_utils.rotate_checkpoints` does, each of
    which loses its name before its files."""
    checkpoints = sort_checkpoints(str(directory), use_mtime=True) if limit and limit > 0 else []
    protected = {*checkpoints[-1:], *([] if best is None else [str(Path(best))])}
    num_surplus = max(0, len(checkpoints) - max(limit or 0, len(protected)))
    removable = [path for path in checkpoints if path not in protected]
    for checkpoint in removable[:num_surplus]:
        partial = directory / f".{Path(checkpoint).name}.partial"
        with contextlib.suppress(OSError):  # As in Trainer, what cannot be removed stays.
            os.rename(checkpoint, partial)
            sync_directory(directory)
            shutil.rmtree(partial)


def give_name(made: Path, target: Path) -> None:
    """Syncs a checkpoint and renames it to its final name, in place of an earlier one. What a
    subclass has written under that name by itself goes with it."""
    replaced = made.parent / f"{target.name}.replaced"
    with reporting("write", target):
        for path in (made, *made.rglob("*")):
            if STATE_NAME not in path.relative_to(made).parts:  # That is synced already.
                (sync_directory if path.is_dir() else sync_file)(path)
        if target.exists() and not (target / TRAINER_STATE_NAME).exists():
            for path in target.iterdir():
                if not (made / path.name).exists():
                    path.rename(made / path.name)
        if target.exists():
            target.rename(replaced)
        made.rename(target)
        sync_directory(target.parent)
        shutil.rmtree(made.parent)


def _frozen_in(model: nn.Module, directory: Path) -> set[str]:
    """Returns the checkpoints there whose content this engine protects from being overwritten."""
    volume = engine_of(model).store.volume
    place = os.path.realpath(directory)
    labels = (extent.label for extent in volume.frozen) if volume is not None else ()
    return {label for label in labels if os.path.dirname(label) == place}
