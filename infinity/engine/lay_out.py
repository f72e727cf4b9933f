"""The plan of a run: units of the model, their layout, and the bytes that each tier gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from infinity.config import SwapConfig
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import ShardingPlan, agree_on_exchange, budgets_of, plan_sharding
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
from infinity.state.budgets import Budgets, MachineSizes
from infinity.state.spare_generations import NO_SPARES, Spares, free_nvme_nbytes, plan_spares
from infinity.state.stored import StoredTensor
from infinity.state.tiles import fit, is_enough
from infinity.state.units import Moments, TensorFacts, Unit, layout_units, moments_of
from infinity.storage.arena import available_host_nbytes
from infinity.tiers.open_device import ChosenDevice


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything about a run that is decided before a tier is opened.

    `layout` refers to the parameters of the model. With ranks, `units` are the full ones.
    """

    config: SwapConfig
    device: ChosenDevice
    layout: ModelLayout
    units: Sequence[Unit]
    sharding: ShardingPlan | None
    budgets: Budgets
    spares: Spares = NO_SPARES

    @property
    def own_units(self) -> Sequence[Unit]:
        """The units whose state this rank has."""
        return self.units if self.sharding is None else self.sharding.partition.units

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
    device_nbytes, available_nbytes = device.sizes(config.tiers, available_host_nbytes())
    agreed = None
    if ranks is not None:
        agreed = agree_on_exchange(
            config.distributed, config.placement.parameters, ranks,
            has_own_memory=not device.shares_host_memory, is_cuda=device.is_cuda,
            identity=device.identity(), device_nbytes=device_nbytes,
        )  # fmt: skip
    machine = MachineSizes(device.shares_host_memory, device_nbytes, available_nbytes)

    def attempt(limit_nbytes: int | None) -> RunPlan:
        tiling.cut(limit_nbytes)
        in_files = stored.by_parameter(tiling.tiled_params)
        layout = discover_units(model, rule, stored=in_files, adapters=values_of_adapters(model))
        if not layout.units:
            raise ConfigError(f"{type(model).__name__} has no parameters; nothing to offload")
        moments = moments_of(config.optimizer, config.precision)
        units = _units(layout, in_files, moments, lambda m: facts_of(m, dtypes, device.type))
        sharding = None
        if agreed is not None and ranks is not None:
            sharding = plan_sharding(
                units, layout.nesting.units_by_block(), ranks,
                config.distributed, config.placement.parameters, devices=agreed,
            )  # fmt: skip
            units = list(sharding.partition.full_units)
        own = machine if sharding is None else sharding.part_of(machine)
        budgets = budgets_of(config, units, layout.nesting, own, sharding)
        return RunPlan(config, device, layout, units, sharding, budgets)

    def is_good(found: RunPlan, is_untiled: bool) -> bool:
        return is_enough(found.budgets, found.units, is_untiled=is_untiled)

    try:
        found = fit(config.schedule.tile, attempt, is_good, tiling.largest_nbytes)
    except CapacityError as error:
        reasons = tiling.why_not()
        if config.schedule.tile is not None and reasons:
            error.args = (f"{error}; tiles do not help: {reasons}",)
        raise
    spares = plan_spares(
        config, found.own_units, found.budgets, num_ranks=1 if ranks is None else ranks.count,
        free_nbytes=free_nvme_nbytes(config.tiers.nvme),
    )  # fmt: skip
    return replace(found, spares=spares)


def _units(
    layout: ModelLayout,
    in_files: Mapping[int, StoredTensor],
    moments: Moments,
    facts: Callable[[FoundParam], TensorFacts],
) -> Sequence[Unit]:
    members = [member for _, members in layout.units for member in members]
    stored = {m.name: in_files[id(m.parameter)] for m in members if id(m.parameter) in in_files}
    return layout_units(
        [(name, list(map(facts, of_unit))) for name, of_unit in layout.units], moments, stored
    )


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
