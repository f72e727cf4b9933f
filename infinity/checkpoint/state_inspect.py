"""What is in a directory of checkpoints, and whether it is whole. Needs no model and no engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.state_directory import (
    check_extent,
    find_checkpoint,
    list_checkpoints,
    read_manifest,
)
from infinity.checkpoint.state_manifest import Manifest
from infinity.errors import ConfigError, InfinityError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One checkpoint. `faults` is empty when it is whole as far as it was looked at."""

    path: Path
    manifest: Manifest | None  # None where it cannot be read.
    faults: tuple[str, ...]
    is_verified: bool  # Every byte was read and checked, not only names and lengths.

    @property
    def is_whole(self) -> bool:
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        manifest = self.manifest
        facts = {} if manifest is None else {
            "step": manifest.step,
            "created": manifest.created,
            "written_by": manifest.written_by,
            "nbytes": manifest.nbytes,
            "nbytes_by_kind": manifest.nbytes_by_kind(),
            "files": len(manifest.files),
        }  # fmt: skip
        return {
            "path": str(self.path),
            "is_whole": self.is_whole,
            "is_verified": self.is_verified,
            "faults": list(self.faults),
            **facts,
        }


def inspect(path: Path, *, verify: bool = False) -> list[Inspection]:
    """Every checkpoint of a directory, oldest first, or the one that `path` is.

    With `verify` every byte is read and compared with its SHA-256. Raises ConfigError where there
    is none; damage is not raised, it is what the answer is about.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; expected a checkpoint or a directory of them")
    found = list_checkpoints(path) or [find_checkpoint(path)]
    return [_inspect(each, verify=verify) for each in found]


def _inspect(path: Path, *, verify: bool) -> Inspection:
    try:
        manifest = read_manifest(path)
    except InfinityError as error:
        return Inspection(path=path, manifest=None, faults=(str(error),), is_verified=verify)
    faults = []
    for file in manifest.files if verify else ():
        for extent in file.extents:
            try:
                check_extent(path / file.name, extent)
            except InfinityError as error:
                faults.append(str(error))
    return Inspection(path=path, manifest=manifest, faults=tuple(faults), is_verified=verify)
