"""The output directory: whose it is, and that a run may write there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from infinity.checkpoint.safetensors_export import make_directory
from infinity.config import SwapConfig
from infinity.errors import ConfigError, StorageError

MARKER_NAME = "infinity-run.json"
SUMMARY_NAME = "summary.json"


def claim_output(config: SwapConfig) -> Path:
    """The output directory, made if need be; nothing in it is changed yet.

    Only a directory that is new, empty or marked by an earlier run is taken. Raises ConfigError for
    a foreign one and for one that is also read from, StorageError where it cannot be written.
    """
    directory = config.output.directory
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"output.directory: {directory} is no directory")
    if config.model is not None and config.model.path is not None:
        _refuse_same(directory, config.model.path, "model.path")
    for index, tier in enumerate(config.tiers.nvme):
        _refuse_same(directory, tier.path, f"tiers.nvme[{index}].path")
    make_directory(directory)
    try:
        names = sorted(os.listdir(directory))
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StorageError(error.errno or 0, operation="write", path=str(directory)) from None
    if names and MARKER_NAME not in names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(
            f"output.directory: {directory} has files that no run of infinity wrote "
            f"({names[0]!r}{more}); name another directory, or empty it"
        )
    return directory


def mark_output(config: SwapConfig) -> None:
    """Records in the output directory that it is this program's, and the configuration."""
    marker = config.output.directory / MARKER_NAME
    partial = marker.with_name(f".{MARKER_NAME}.partial")
    content = {"program": "infinity train", "config": config.to_dict()}
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, marker)


def _refuse_same(directory: Path, other: Path, key: str) -> None:
    if os.path.realpath(directory) == os.path.realpath(other):
        raise ConfigError(f"output.directory and {key} are the same directory, {directory}")
