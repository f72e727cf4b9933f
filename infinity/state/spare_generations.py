"""The number of spare generations that commits, linked checkpoints and early updates need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.config.schema.engine import Distributed, Schedule
from infinity.config.schema.tiers import NvmeTier
from infinity.config.schema.train import Checkpoint
from infinity.errors import ConfigError
from infinity.state.budgets import Budgets
from infinity.state.placement import StatePlacement
from infinity.state.store import changing_kinds, spared
from infinity.state.units import StateKind, Unit
from infinity.storage import volume_layout


def count_spares(config: SwapConfig, *, num_ranks: int = 1, is_linked: bool | None = None) -> int:
    """Returns the number of spare generations: one per linked checkpoint, and one for the last
    commit. `is_linked`: whether checkpoints can be links; None: the file systems say it.

    Checkpoints on another file system than the swap paths need one spare generation, for the step
    that is being copied. With swap paths on several file systems they need none, because nothing
    can be linked. With several ranks they need none, because ranks do not copy behind training.
    Raises ConfigError for commits of every step on several file systems, because the links of a
    commit lie in one directory.
    """
    checkpoint = config.checkpoint
    if checkpoint is None or checkpoint.durability == "none" or not config.tiers.nvme:
        return 0
    if is_linked is None:
        swap = _file_systems(tier.path for tier in config.tiers.nvme)
        if len(swap) > 1:
            _refuse_commits_over(swap, checkpoint)
            return 0
        is_linked = not is_elsewhere(config.tiers.nvme, config.checkpoint_directory)
    # Without `every`, `infinity train` writes one checkpoint at the end.
    kept = checkpoint.keep if checkpoint.every or config.train is None else 1
    num_copying = 1 if num_ranks == 1 else 0
    return (kept if is_linked else num_copying) + (checkpoint.durability == "step")


def _refuse_commits_over(swap: set[int], checkpoint: Checkpoint) -> None:
    if checkpoint.durability == "step" and len(swap) > 1:
        raise ConfigError(
            'checkpoint.durability: "step" needs all [[tiers.nvme]] paths on one file system, and '
            'these are on several; use "checkpoint", or one file system over the drives (RAID 0)'
        )


def is_elsewhere(tiers: Iterable[NvmeTier], directory: Path) -> bool:
    """Whether all swap paths lie on one file system and the directory lies on another."""
    swap = _file_systems(tier.path for tier in tiers)
    return len(swap) == 1 and swap != _file_systems([directory])


@dataclass(frozen=True, slots=True)
class BackwardUpdates:
    """Whether units are updated in the backward, too, and the spare generations that this takes."""

    is_on: bool
    num_spares: int  # 0 or 1.


_NOT_IN_BACKWARD = BackwardUpdates(is_on=False, num_spares=0)


def updates_in_backward(
    schedule: Schedule,
    units: Sequence[Unit],
    budgets: Budgets,
    *,
    num_spares: int,
    are_inside_step: bool,
    free_nbytes: float,
) -> BackwardUpdates:
    """Returns whether units are updated in the backward, too.

    State on NVMe takes one more spare generation for this; new state on the host goes to memory
    that is free, beside a device alone.

    `num_spares`: of commits and checkpoints. `are_inside_step`: the updates; see
    `are_inside_step`. `free_nbytes`: space on NVMe before anything is
    reserved; for "auto" as much as the weights take stays free: an export, or activations, fit.
    """
    placement = budgets.placement
    if schedule.updates not in ("auto", "both_passes") or are_inside_step:
        return _NOT_IN_BACKWARD
    if budgets.is_tight or not schedule.prefetch:
        return _NOT_IN_BACKWARD
    tiers = [tiers for unit in units if (tiers := tiers_of_old_state(unit, placement))]
    has_generations = any("nvme" in of_unit for of_unit in tiers)
    if not has_generations:
        is_on = bool(tiers) and not budgets.shares_host_memory
        return BackwardUpdates(is_on=is_on, num_spares=0)
    if schedule.updates == "both_passes":
        return BackwardUpdates(is_on=True, num_spares=1)
    resting_nbytes = sum(
        units[index].nbytes(kind)
        for (index, kind), tier in placement.tiers.items()
        if tier == "nvme"
    )
    generations_nbytes = spares_nbytes(units, placement, num_spares + 1, 1)
    kind = StateKind.PARAMETERS  # Ranks keep their shards alone.
    left_nbytes = sum(unit.nbytes(kind) for unit in units if (unit.index, kind) in placement.tiers)
    if free_nbytes < resting_nbytes + generations_nbytes + left_nbytes:
        return _NOT_IN_BACKWARD
    return BackwardUpdates(is_on=True, num_spares=1)


def are_inside_step(schedule: Schedule, distributed: Distributed, num_ranks: int) -> bool:
    """Whether ranks make their updates inside the step."""
    return num_ranks > 1 and (schedule.update_on == "device" or distributed.zero_stage < 3)


def tiers_of_old_state(unit: Unit, placement: StatePlacement) -> set[str]:
    """Returns the tiers of everything that an update of the unit changes; none if some of it can
    not be brought back: state on a device."""
    kinds = changing_kinds(unit) if unit.state_numel else []
    tiers = {placement.tiers.get((unit.index, kind), "") for kind in kinds}
    return tiers if tiers <= {"host", "nvme"} else set()


def spares_nbytes(
    units: Sequence[Unit], placement: StatePlacement, num_spares: int, num_private: int
) -> int:
    """Returns the bytes that all spare generations take; `num_private` of them are of early
    updates."""
    placed = placement.tiers.items()
    heads = [spared(units[index], kind) for (index, kind), tier in placed if tier == "nvme"]
    return volume_layout.spares_nbytes(heads, num_spares, num_private)


def free_nvme_nbytes(tiers: Iterable[NvmeTier]) -> float:
    """Returns the bytes that all swap paths may still take: of each path its limit, and of each
    file system its free space."""
    limits: dict[int, float] = {}
    for tier in tiers:
        there = _nearest(tier.path)
        device, free_nbytes = os.stat(there).st_dev, float(shutil.disk_usage(there).free)
        limit = free_nbytes if tier.capacity.is_auto else tier.capacity.resolve(int(free_nbytes))
        limits[device] = min(limits.get(device, 0.0) + limit, free_nbytes)
    return sum(limits.values())


def _nearest(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists and can be reached."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _file_systems(paths: Iterable[Path]) -> set[int]:
    """Returns st_dev of each path, or of its nearest existing parent directory."""
    return {os.stat(_nearest(path)).st_dev for path in paths}
