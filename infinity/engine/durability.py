"""The number of spare generations that commits and linked checkpoints need."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from infinity.config import SwapConfig
from infinity.errors import ConfigError


def count_spares(config: SwapConfig, *, num_ranks: int = 1) -> int:
    """Returns the number of spare generations: one per linked checkpoint, and one for the last
    commit.

    Checkpoints on another file system than the swap paths need one spare generation, for the step
    that is being copied. With swap paths on several file systems they need none, because nothing
    can be linked. With several ranks they need none, because ranks do not copy behind training.
    Raises ConfigError for commits of every step on several file systems, because the links of a
    commit lie in one directory.
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
    """Whether all swap paths lie on one file system and the directory lies on another."""
    swap = _file_systems(tier.path for tier in config.tiers.nvme)
    return len(swap) == 1 and swap != _file_systems([directory])


def wanted_spares(config: SwapConfig, *, is_linked: bool, num_ranks: int = 1) -> int:
    """Like `count_spares`, if it is known whether checkpoints can be links."""
    checkpoint = config.checkpoint
    if checkpoint is None or checkpoint.durability == "none" or not config.tiers.nvme:
        return 0
    # Without `every`, `infinity train` writes one checkpoint at the end.
    kept = checkpoint.keep if checkpoint.every or config.train is None else 1
    num_copying = 1 if num_ranks == 1 else 0
    return (kept if is_linked else num_copying) + (checkpoint.durability == "step")


def _file_systems(paths: Iterable[Path]) -> set[int]:
    """Returns st_dev of each path, or of its nearest existing parent directory."""
    found = set()
    for path in paths:
        there = path
        while not there.exists() and there != there.parent:
            there = there.parent
        found.add(os.stat(there).st_dev)
    return found
