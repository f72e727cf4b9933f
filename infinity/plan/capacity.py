"""The capacity of a machine for a model: tiles that fit, budgets, and refusals by name. Pure.

Budgets and placement are computed by the engine's own functions with the machine's sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.config import NvmeTier, SwapConfig
from infinity.config.schema import changed
from infinity.distributed.setup import ShardingPlan, budgets_of
from infinity.errors import CapacityError, ConfigError
from infinity.plan.hardware import Hardware
from infinity.plan.layout import PlannedModel
from infinity.plan.node import NodeView
from infinity.sizes import format_nbytes
from infinity.state.budgets import Budgets, MachineSizes
from infinity.state.placement import StatePlacement, resting_nbytes
from infinity.state.tiles import fit, is_enough
from infinity.state.units import Unit
from infinity.storage.volume_layout import SPARES_REMEDY


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model with the tiles that the engine would make. `sharding` is None with one rank."""

    model: PlannedModel
    sharding: ShardingPlan | None
    budgets: Budgets

    @property
    def units(self) -> Sequence[Unit]:
        """The units that rest here: with ranks, shards."""
        return self.model.units if self.sharding is None else self.sharding.partition.units


def fitted(node: NodeView, model: PlannedModel, window_nbytes: int | None) -> Fitted:
    """Returns the model with the largest tiles that the machine has space for."""
    config, hardware = node.config_of_rank, node.hardware_of_rank
    # A share of the node's memory means a share of this rank's part.
    takes_all = node.count > 1 and config.distributed.budgets == "rank"
    available_nbytes = hardware.host.memory * (node.count if takes_all else 1)
    machine = MachineSizes(hardware.shares_host_memory, window_nbytes, available_nbytes)

    def attempt(limit_nbytes: int | None) -> Fitted:
        tiled = model.with_tiles(limit_nbytes)
        sharding = node.plan_sharding(tiled, window_nbytes)
        budgets = budgets_of(config, tiled.units, tiled.nesting, machine, sharding)
        return Fitted(tiled, sharding, budgets)

    def is_good(found: Fitted, is_untiled: bool) -> bool:
        return is_enough(found.budgets, found.model.units, is_untiled=is_untiled)

    return fit(config.schedule.tile, attempt, is_good, model.largest_nbytes)


def window_nbytes_of(config: SwapConfig, hardware: Hardware) -> int | None:
    """Returns the bytes of the model that one device may hold; None if it computes on host
    memory."""
    if hardware.device.memory is None:
        return config.tiers.device.capacity.nbytes
    return config.tiers.device.budget_nbytes(hardware.device.memory)


def refuse_full_tiers(
    model: PlannedModel,
    units: Sequence[Unit],
    hardware: Hardware,
    budgets: Budgets,
    spare_nbytes: int,
    num_ranks: int,
    shard_drives: int | None,
) -> None:
    """Refuses what the engine would find out late: missing host memory and full drives. `units` are
    those that rest here: with ranks, shards."""
    part = "" if num_ranks == 1 else f", of which a rank has 1/{num_ranks}"
    needed_nbytes = budgets.host_nbytes + budgets.reduce_buffer_nbytes
    if needed_nbytes > hardware.host.memory:
        raise CapacityError(
            "host", needed_nbytes=needed_nbytes, available_nbytes=hardware.host.memory,
            key="tiers.host.capacity", detail=f"the arena is larger than the memory{part}",
        )  # fmt: skip
    swap_nbytes = budgets.placement.placed_nbytes["nvme"]
    drives_nbytes = 0 if hardware.nvme is None else hardware.nvme.capacity
    if model.frozen is not None:
        if not model.frozen.is_copied:
            swap_nbytes -= _frozen_nbytes(units, budgets.placement, "nvme")
        base_nbytes = (model.frozen.stored.nbytes + model.frozen.stored.unused_nbytes) // num_ranks
        _refuse_large_checkpoint(model, hardware, base_nbytes, shard_drives)
        if hardware.nvme is not None and hardware.nvme.checkpoint_read_gb_per_s is None:
            drives_nbytes -= base_nbytes
    if swap_nbytes + spare_nbytes > max(drives_nbytes, 0):
        spares = f" with {format_nbytes(spare_nbytes)} of spare generations" if spare_nbytes else ""
        raise CapacityError(
            "nvme", needed_nbytes=swap_nbytes + spare_nbytes, available_nbytes=drives_nbytes,
            key="tiers.nvme.capacity", remedy=SPARES_REMEDY if spares else "",
            detail=f"{model.name} does not fit the drives{part}{spares}",
        )  # fmt: skip


def _refuse_large_checkpoint(
    model: PlannedModel, hardware: Hardware, base_nbytes: int, shard_drives: int | None
) -> None:
    """Refuses drives that cannot hold the files of a frozen base."""
    nvme = hardware.nvme
    if nvme is None:
        raise ConfigError(
            f"{hardware.name} has no [nvme]; the checkpoint of {model.name} rests on a drive whose "
            "read_gb_per_s is needed. Add the table to the hardware file"
        )
    if nvme.checkpoint_read_gb_per_s is not None:
        return  # It lies elsewhere, and does so already.
    drives = nvme.drives if shard_drives is None else shard_drives
    available_nbytes = nvme.capacity * drives // nvme.drives
    if base_nbytes > available_nbytes:
        raise CapacityError(
            "nvme", needed_nbytes=base_nbytes, available_nbytes=available_nbytes,
            key="tiers.nvme.capacity",
            remedy="spread the files over more drives (infinity spread), or take larger ones",
            detail=f"the checkpoint of {model.name} does not fit {drives} of {nvme.drives} drives",
        )  # fmt: skip


def with_checkpoint_tier(config: SwapConfig) -> SwapConfig:
    """Returns the configuration with space for weights outside the host: that of a frozen base is
    in the files of its checkpoint, with or without a tier for swap files."""
    values: dict[str, Any] = {}
    if not config.tiers.nvme:
        values["tiers.nvme"] = (NvmeTier.model_validate({"path": Path("checkpoint")}),)
    if "nvme" not in config.placement.parameters:
        values["placement.parameters"] = (*config.placement.parameters, "nvme")
    return changed(config, values)


def _frozen_nbytes(units: Sequence[Unit], placement: StatePlacement, tier: str) -> int:
    return sum(
        resting_nbytes(units[index], kind)
        for (index, kind), rests_on in placement.tiers.items()
        if rests_on == tier and not units[index].state_numel
    )


def by_kind(
    units: Sequence[Unit],
    placement: StatePlacement,
    model: PlannedModel,
    sharding: ShardingPlan | None,
) -> dict[str, dict[str, int]]:
    """Returns the bytes at rest by kind of state and tier. A frozen base is a kind of its own,
    "base"; in place, its tier beside the host is "checkpoint", and a rank has its shards of it if
    `sharding` has devices that exchange them, else all of it."""
    is_divided = sharding is not None and sharding.reads_stored_shards
    placed: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (index, state_kind), rests_on in placement.tiers.items():
        tier = rests_on
        unit, kind = units[index], state_kind.kind
        if model.frozen is not None and not unit.state_numel:
            kind = "base"
            if unit.stored is not None and is_divided != (index >= len(model.units)):
                continue
            tier = "checkpoint" if tier == "nvme" and model.has_base_in_place else tier
        placed[kind][tier] += resting_nbytes(unit, state_kind)
    return {kind: dict(tiers) for kind, tiers in placed.items()}
