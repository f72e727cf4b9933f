"""How many spare generations a configuration asks for: what commits and linked checkpoints need."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from infinity.config import SwapConfig
from infinity.errors import ConfigError


def count_spares(config: SwapConfig, *, num_ranks: int = 1) -> int:
    """One for every checkpoint that is kept by links, and one for the last committed step.

    Checkpoints on another file system than the swap paths need one, for the step that is being
    copied; with swap paths on several file systems none, as nothing can be linked, and with several
    ranks none either, as these do not copy behind training. Raises ConfigError where steps are to
    be committed on several file systems: the links of a commit are in one directory.
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
    if len(swap) > 1:
        return 0
    is_linked = not is_elsewhere(config, config.checkpoint_directory)
    return wanted_spares(config, is_linked=is_linked, num_ranks=num_ranks)


def is_elsewhere(config: SwapConfig, directory: Path) -> bool:
    """Whether all swap paths are on one file system, and the directory on another."""
    swap = _file_systems(tier.path for tier in config.tiers.nvme)
    return len(swap) == 1 and swap != _file_systems([directory])


def wanted_spares(config: SwapConfig, *, is_linked: bool, num_ranks: int = 1) -> int:
    """The same where it is known whether checkpoints can be links."""
    checkpoint = config.checkpoint
    if checkpoint is None or checkpoint.durability == "none" or not config.tiers.nvme:
        return 0
    # `infinity train` without `every` writes one checkpoint, at its end.
    kept = checkpoint.keep if checkpoint.every or config.train is None else 1
    num_copying = 1 if num_ranks == 1 else 0
    return (kept if is_linked else num_copying) + (checkpoint.durability == "step")


def _file_systems(paths: Iterable[Path]) -> set[int]:
    """st_dev of each path, or of the nearest directory above that is there."""
    found = set()
    for path in paths:
        there = path
        while not there.exists() and there != there.parent:
            there = there.parent
        found.add(os.stat(there).st_dev)
    return found
