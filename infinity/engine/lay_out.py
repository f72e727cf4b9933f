"""The plan of a run: units of the model, their layout, and the bytes that each tier gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from infinity.config import SwapConfig
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import ShardingPlan, agree_on_exchange, plan_sharding
from infinity.errors import CapacityError, ConfigError
from infinity.modules.reading.adapters import values_of_adapters
from infinity.modules.reading.discover import (
    FoundParam,
    ModelLayout,
    UnitRule,
    discover_units,
    storage_strides,
)
from infinity.modules.reading.dtypes import Dtypes
from infinity.modules.reading.load_plan import StoredParams
from infinity.modules.tiling.split import Tiling
from infinity.state.budgets import Budgets, MachineSizes, compute_budgets, weights_in_use
from infinity.state.moments import moments_of
from infinity.state.spare_generations import count_spares, free_nvme_nbytes, updates_in_backward
from infinity.state.tiles import decodes_experts, fit
from infinity.state.units import TensorFacts, Unit, layout_units
from infinity.storage.arena import available_host_nbytes
from infinity.tiers.open_device import ChosenDevice


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A division of the model, and what it costs."""

    layout: ModelLayout
    units: Sequence[Unit]
    sharding: ShardingPlan | None
    budgets: Budgets


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything about a run that is decided before a tier is opened.

    `layout` refers to the parameters of the model. With ranks, `units` are the full ones and
    `own_units` those of this rank. `num_spares`: generations of the volume beside the current one,
    `num_private` of them for early updates.
    """

    config: SwapConfig
    device: ChosenDevice
    layout: ModelLayout
    units: Sequence[Unit]
    own_units: Sequence[Unit]
    sharding: ShardingPlan | None
    budgets: Budgets
    num_spares: int
    num_private: int
    updates_in_backward: bool

    @property
    def num_sharing(self) -> int:
        """The ranks of this machine, which share its drives."""
        return 1 if self.sharding is None else self.sharding.group.node_count


def lay_out(
    model: nn.Module,
    config: SwapConfig,
    rule: UnitRule,
    device: ChosenDevice,
    ranks: RankTopology | None,
    tiling: Tiling,
    dtypes: Dtypes,
    stored: StoredParams,
) -> RunPlan:
    """Returns the plan of a run whose units the budgets can hold; splits modules into tiles where
    necessary.

    Raises CapacityError if no division fits, ConfigError for a model without parameters. With
    ranks, a collective call.
    """
    device_nbytes, agreed = device.nbytes(), None
    if ranks is not None:
        agreed = agree_on_exchange(
            config,
            ranks,
            has_own_memory=not device.shares_host_memory,
            is_cuda=device.is_cuda,
            identity=device.identity(),
            device_nbytes=device_nbytes,
        )
    machine = MachineSizes(device.shares_host_memory, device_nbytes, available_host_nbytes())

    def attempt(limit_nbytes: int | None) -> _Attempt:
        tiling.cut(limit_nbytes)
        in_files = stored.by_parameter(tiling.tiled_params)
        layout = discover_units(model, rule, stored=in_files, adapters=values_of_adapters(model))
        if not layout.units:
            raise ConfigError(f"{type(model).__name__} has no parameters; nothing to offload")
        units: Sequence[Unit] = layout_units(
            [
                (name, [facts_of(member, dtypes, device.type) for member in members])
                for name, members in layout.units
            ],
            moments_of(config),
            {
                member.name: in_files[id(member.parameter)]
                for _, members in layout.units
                for member in members
                if id(member.parameter) in in_files
            },
        )
        sharding = None
        if agreed is not None and ranks is not None:
            sharding = plan_sharding(units, layout.units_by_block(), ranks, config, devices=agreed)
            units = list(sharding.partition.full_units)
        budgets = _budgets(config, units, layout, machine, sharding)
        return _Attempt(layout, units, sharding, budgets)

    def has_space_ahead(found: _Attempt) -> bool:
        return found.budgets.has_space_ahead(max(unit.weight_nbytes for unit in found.units))

    def decodes(found: _Attempt) -> bool:
        return decodes_experts(found.budgets, found.units)

    try:
        found = fit(config.schedule.tile, attempt, has_space_ahead, decodes, tiling.largest_nbytes)
    except CapacityError as error:
        reasons = tiling.why_not()
        if config.schedule.tile is not None and reasons:
            error.args = (f"{error}; tiles do not help: {reasons}",)
        raise
    return _with_spares(config, device, found)


def _with_spares(config: SwapConfig, device: ChosenDevice, found: _Attempt) -> RunPlan:
    """Decides how many generations of state there are, and whether updates run in the backward."""
    sharding = found.sharding
    num_ranks = 1 if sharding is None else sharding.partition.count
    own_units = found.units if sharding is None else sharding.partition.units
    num_spares = count_spares(config, num_ranks=num_ranks)
    in_backward = updates_in_backward(
        config, own_units, found.budgets,
        num_spares=num_spares, num_ranks=num_ranks, free_nbytes=free_nvme_nbytes(config),
    )  # fmt: skip
    return RunPlan(
        config, device, found.layout, found.units, own_units, sharding, found.budgets,
        num_spares + in_backward.num_spares, in_backward.num_spares, in_backward.is_on,
    )  # fmt: skip


def facts_of(found: FoundParam, dtypes: Dtypes, device_type: str | None = None) -> TensorFacts:
    """Returns the facts of a parameter as the engine keeps it. `device_type`: where it computes;
    None: where it is."""
    parameter = found.parameter
    dtype = dtypes.of(parameter, found.name)
    return TensorFacts(
        name=found.name,
        shape=tuple(parameter.shape),
        stride=storage_strides(found, dtype, device_type),
        dtype=dtype,
        is_trainable=parameter.requires_grad,
    )


def _budgets(
    config: SwapConfig,
    units: Sequence[Unit],
    layout: ModelLayout,
    machine: MachineSizes,
    sharding: ShardingPlan | None,
) -> Budgets:
    in_use = weights_in_use(
        units,
        [unit.weight_nbytes for unit in units],
        layout.held_nbytes,
        shares_host_memory=machine.shares_host_memory,
    )
    if sharding is None:
        return compute_budgets(config, units, in_use, machine)
    share_nbytes = machine.available_host_nbytes // sharding.sharing
    machine = replace(machine, available_host_nbytes=share_nbytes)
    return sharding.budgets(config, in_use, machine)
