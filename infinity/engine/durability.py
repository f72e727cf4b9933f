"""How many spare generations a configuration asks for: what commits and linked checkpoints need."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from infinity.config import SwapConfig
from infinity.errors import ConfigError


def count_spares(config: SwapConfig) -> int:
    """One for every checkpoint that is kept by links, and one for the last committed step.

    A checkpoint on another file system than the swap paths is a copy and needs none. Raises
    ConfigError where steps are to be committed and the swap paths are on several file systems: the
    links of a commit are in one directory.
    """
    checkpoint = config.checkpoint
    if checkpoint is None or checkpoint.durability == "none" or not config.tiers.nvme:
        return 0
    swap = _file_systems(tier.path for tier in config.tiers.nvme)
    if checkpoint.durability == "step" and len(swap) > 1:
        raise ConfigError(
            'checkpoint.durability: "step" needs all [[tiers.nvme]] paths on one file system, and '
            'these are on several; use "checkpoint", or one file system over the drives (RAID 0)'
        )
    is_linked = len(swap | _file_systems([config.checkpoint_directory])) == 1
    return wanted_spares(config, is_linked=is_linked)


def wanted_spares(config: SwapConfig, *, is_linked: bool) -> int:
    """The same where it is known whether checkpoints can be links."""
    checkpoint = config.checkpoint
    if checkpoint is None or checkpoint.durability == "none" or not config.tiers.nvme:
        return 0
    # `infinity train` without `every` writes one checkpoint, at its end.
    kept = checkpoint.keep if checkpoint.every or config.train is None else 1
    return (kept if is_linked else 0) + (checkpoint.durability == "step")


def _file_systems(paths: Iterable[Path]) -> set[int]:
    """st_dev of each path, or of the nearest directory above that is there."""
    found = set()
    for path in paths:
        there = path
        while not there.exists() and there != there.parent:
            there = there.parent
        found.add(os.stat(there).st_dev)
    return found
