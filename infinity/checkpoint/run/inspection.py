"""Inspects checkpoints for damage. Needs no model and no engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.bounded import kind_of
from infinity.checkpoint.run.directory import (
    check_extent,
    find_checkpoint,
    list_checkpoints,
    place_of_checkpoints,
    read_linked,
    read_manifest,
    step_of,
)
from infinity.checkpoint.run.format import COPIES_NAME, LinkedState, Manifest, joined_parts
from infinity.errors import ConfigError, InfinityError, UnsupportedError

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One checkpoint. `faults` is empty if the inspection has found no damage."""

    path: Path
    manifest: Manifest | None  # None if it cannot be read.
    linked: tuple[LinkedState, ...]  # One for every rank; empty if it cannot be read.
    faults: tuple[str, ...]
    is_verified: bool  # Every byte was compared, not only names and lengths.

    @property
    def is_intact(self) -> bool:
        """Whether no fault was found."""
        return not self.faults

    @property
    def nbytes(self) -> int:
        """The size of the checkpoint, with linked state."""
        return sum(self.nbytes_by_kind().values())

    def nbytes_by_kind(self) -> dict[str, int]:
        """Returns the size of every kind of content, with linked state."""
        table = dict(self.manifest.nbytes_by_kind()) if self.manifest is not None else {}
        for entry in (entry for linked in self.linked for entry in linked.kinds):
            table[entry.kind] = table.get(entry.kind, 0) + entry.nbytes
        return table

    @property
    def shared_nbytes(self) -> int:
        """The part of the size that lies in files shared with swap files."""
        runs = (r for linked in self.linked for entry in linked.kinds for r in entry.runs)
        return sum(run.nbytes for run in runs if run.path != COPIES_NAME)

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts of the checkpoint for JSON."""
        manifest = self.manifest
        facts = {} if manifest is None else {
            "step": manifest.step,
            "created": manifest.created,
            "written_by": manifest.written_by,
            "nbytes": self.nbytes,
            "nbytes_by_kind": self.nbytes_by_kind(),
            "linked_nbytes": self.shared_nbytes,
            "files": len(manifest.files),
            "ranks": len(manifest.places),
        }  # fmt: skip
        return {
            "path": str(self.path),
            "is_intact": self.is_intact,
            "is_verified": self.is_verified,
            "faults": list(self.faults),
            **facts,
        }


def inspect(path: str | os.PathLike[str], *, verify: bool = False) -> list[Inspection]:
    """Inspects every checkpoint of a directory, oldest first, or the checkpoint `path`.

    With `verify` every byte is read and compared with its SHA-256 or CRC32C. Raises ConfigError if
    there is no checkpoint, StorageError if the directory cannot be read. Damage is not raised but
    listed in `faults`.
    """
    if not os.path.isdir(path):
        raise ConfigError(f"{path} is no directory; expected a checkpoint or a directory of them")
    place = place_of_checkpoints(Path(path))
    still: list[Inspection] = []
    for _ in range(_ATTEMPTS):  # A running job removes checkpoints meanwhile, and makes new ones.
        found = list_checkpoints(place) or [find_checkpoint(place)]
        seen = [_inspect(checkpoint, verify=verify) for checkpoint in found]
        still = [inspection for inspection in seen if os.path.lexists(inspection.path)]
        if still:
            break
    return still


def _inspect(path: Path, *, verify: bool) -> Inspection:
    manifest = None
    linked: tuple[LinkedState, ...] = ()
    faults: list[str] = []
    if not path.is_dir() and os.path.lexists(path):
        what = kind_of(path.lstat().st_mode)
        fault = f"it is {what} with the name of a checkpoint; expected a directory"
        return Inspection(path=path, manifest=None, linked=(), faults=(fault,), is_verified=verify)
    try:
        manifest = read_manifest(path)
        linked = tuple(read_linked(path, manifest).values())
        joined_parts(linked, path)
    except InfinityError as error:
        faults.append(str(error))
    if verify and manifest is not None:
        for file in manifest.files:
            for extent in file.extents:
                try:
                    check_extent(path / file.name, extent)
                except InfinityError as error:
                    faults.append(str(error))
        faults += [fault for state in linked for fault in state.faults()]
        faults += _fault_of_contents(path, manifest) if not faults else []
    return Inspection(
        path=path,
        manifest=manifest,
        linked=linked,
        faults=tuple(dict.fromkeys(faults)),
        is_verified=verify,
    )


def _fault_of_contents(path: Path, manifest: Manifest) -> list[str]:
    """Finds what no digest shows: headers and small state that contradict the manifest."""
    from infinity.checkpoint.run.load import program_of  # Imports torch.
    from infinity.checkpoint.run.opened import OpenCheckpoint

    try:
        checkpoint = OpenCheckpoint(path)
        for rank in range(len(manifest.places)):
            program_of(checkpoint, rank)
    except UnsupportedError:  # No damage: a dtype that this torch lacks.
        return []
    except InfinityError as error:
        return [str(error)]
    return []


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
