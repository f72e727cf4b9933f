"""The number of spare generations that commits, linked checkpoints and early updates need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.config.schema.tiers import NvmeTier
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
        if len(swap) > 1 and checkpoint.durability == "step":
            raise ConfigError(
                'checkpoint.durability: "step" needs all [[tiers.nvme]] paths on one file system, '
                'and these are on several; use "checkpoint", or one file system over the drives '
                "(RAID 0)"
            )
        if len(swap) > 1:
            return 0
        is_linked = not is_elsewhere(config.tiers.nvme, config.checkpoint_directory)
    # Without `every`, `infinity train` writes one checkpoint at the end.
    kept = checkpoint.keep if checkpoint.every or config.train is None else 1
    num_copying = 1 if num_ranks == 1 else 0
    return (kept if is_linked else num_copying) + (checkpoint.durability == "step")


def is_elsewhere(tiers: Iterable[NvmeTier], directory: Path) -> bool:
    """Whether all swap paths lie on one file system and the directory lies on another."""
    swap = _file_systems(tier.path for tier in tiers)
    return len(swap) == 1 and swap != _file_systems([directory])


@dataclass(frozen=True, slots=True)
class Spares:
    """Generations of state on NVMe beside the current one: `num_private` (0 or 1) of `count` are
    for early updates. `in_backward`: units are updated in the backward, too."""

    count: int = 0
    num_private: int = 0
    in_backward: bool = False


NO_SPARES = Spares()


def plan_spares(
    config: SwapConfig,
    units: Sequence[Unit],
    budgets: Budgets,
    *,
    num_ranks: int,
    free_nbytes: float,
    is_linked: bool | None = None,
) -> Spares:
    """Returns the generations of a run. `is_linked`: see `count_spares`, and for errors, too.

    With early updates state on NVMe takes one more spare generation; new state on the host goes to
    memory that is free, beside a device alone. `free_nbytes`: space on NVMe before anything is
    reserved; for "auto" as much as the weights take stays free: an export, or activations, fit.
    """
    count = count_spares(config, num_ranks=num_ranks, is_linked=is_linked)
    schedule, placement = config.schedule, budgets.placement
    is_inside_step = num_ranks > 1 and (
        schedule.update_on == "device" or config.distributed.zero_stage < 3
    )
    if schedule.updates not in ("auto", "both_passes") or is_inside_step:
        return Spares(count)
    if budgets.is_tight or not schedule.prefetch:
        return Spares(count)
    tiers = [tiers for unit in units if (tiers := tiers_of_old_state(unit, placement))]
    if not any("nvme" in of_unit for of_unit in tiers):
        return Spares(count, in_backward=bool(tiers) and not budgets.shares_host_memory)
    resting_nbytes = sum(
        units[index].nbytes(kind)
        for (index, kind), tier in placement.tiers.items()
        if tier == "nvme"
    )
    generations_nbytes = spares_nbytes(units, placement, Spares(count + 1, 1))
    kind = StateKind.PARAMETERS  # Ranks keep their shards alone.
    left_nbytes = sum(unit.nbytes(kind) for unit in units if (unit.index, kind) in placement.tiers)
    has_space = free_nbytes >= resting_nbytes + generations_nbytes + left_nbytes
    if schedule.updates == "both_passes" or has_space:
        return Spares(count + 1, 1, in_backward=True)
    return Spares(count)


def tiers_of_old_state(unit: Unit, placement: StatePlacement) -> set[str]:
    """Returns the tiers of everything that an update of the unit changes; none if some of it can
    not be brought back: state on a device."""
    kinds = changing_kinds(unit) if unit.state_numel else []
    tiers = {placement.tiers.get((unit.index, kind), "") for kind in kinds}
    return tiers if tiers <= {"host", "nvme"} else set()


def spares_nbytes(units: Sequence[Unit], placement: StatePlacement, spares: Spares) -> int:
    """Returns the bytes that all spare generations take."""
    placed = placement.tiers.items()
    heads = [spared(units[index], kind) for (index, kind), tier in placed if tier == "nvme"]
    return volume_layout.spares_nbytes(heads, spares.count, spares.num_private)


def free_nvme_nbytes(tiers: Iterable[NvmeTier]) -> float:
    """Returns the bytes that all swap paths may still take: of each path its limit, and of each
    file system its free space."""
    limits: dict[int, float] = {}
    for tier in tiers:
        there = nearest(tier.path)
        device, free_nbytes = os.stat(there).st_dev, float(shutil.disk_usage(there).free)
        limit = free_nbytes if tier.capacity.is_auto else tier.capacity.resolve(int(free_nbytes))
        limits[device] = min(limits.get(device, 0.0) + limit, free_nbytes)
    return sum(limits.values())


def nearest(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists and can be reached."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _file_systems(paths: Iterable[Path]) -> set[int]:
    """Returns st_dev of each path, or of its nearest existing parent directory."""
    return {os.stat(nearest(path)).st_dev for path in paths}
