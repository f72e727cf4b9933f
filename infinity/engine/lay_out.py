"""The units of a model, their layout, and the bytes that each tier gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from infinity.state.budgets import Budgets, compute_budgets, weights_in_use
from infinity.state.moments import moments_of
from infinity.state.stored import lay_out_stored
from infinity.state.tiles import decodes_experts, fit
from infinity.state.units import TensorFacts, Unit, layout_unit
from infinity.storage.arena import available_host_nbytes
from infinity.tiers.open_device import (
    OwnDevice,
    device_identity,
    device_kind,
    device_nbytes,
    shares_host_memory,
)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A model as units, and what they cost. `layout` refers to the parameters of the model.

    With ranks, `units` are the full ones; `sharding` has this rank's.
    """

    layout: ModelLayout
    units: Sequence[Unit]
    sharding: ShardingPlan | None
    budgets: Budgets


def lay_out(
    model: nn.Module,
    config: SwapConfig,
    rule: UnitRule,
    device: OwnDevice | None,
    ranks: RankTopology | None,
    tiling: Tiling,
    dtypes: Dtypes,
    stored: StoredParams,
) -> LaidOut:
    """Returns units that the budgets can hold; splits modules into tiles where necessary.

    Raises CapacityError if no division fits, ConfigError for a model without parameters. With
    ranks, a collective call.
    """
    agreed = None
    if ranks is not None:
        agreed = agree_on_exchange(
            config,
            ranks,
            has_own_memory=not shares_host_memory(config, device),
            is_cuda=device is None and device_kind(config) == "cuda",
            identity=device_identity(config, device),
            device_nbytes=_device_nbytes(config, device),
        )

    device_type = device_kind(config) if device is None else device.torch_device.type

    def attempt(limit_nbytes: int | None) -> LaidOut:
        tiling.cut(limit_nbytes)
        in_files = stored.by_parameter(tiling.tiled_params)
        layout = discover_units(model, rule, stored=in_files, adapters=values_of_adapters(model))
        if not layout.units:
            raise ConfigError(f"{type(model).__name__} has no parameters; nothing to offload")
        moments = moments_of(config)
        laid_out = [
            layout_unit(index, name, [facts_of(p, dtypes, device_type) for p in members], moments)
            for index, (name, members) in enumerate(layout.units)
        ]
        for index, (_, members) in enumerate(layout.units):
            if id(members[0].parameter) in in_files:
                tensors = {param.name: in_files[id(param.parameter)] for param in members}
                laid_out[index] = replace(laid_out[index], stored=lay_out_stored(tensors))
        sharding = None
        if ranks is not None and agreed is not None:
            sharding = plan_sharding(
                laid_out, layout.units_by_block(), ranks, config, devices=agreed
            )
            laid_out = list(sharding.partition.full_units)
        budgets = _budgets(config, laid_out, layout, device, sharding)
        return LaidOut(layout, laid_out, sharding, budgets)

    def has_space_ahead(found: LaidOut) -> bool:
        return found.budgets.has_space_ahead(max(unit.weight_nbytes for unit in found.units))

    def decodes(found: LaidOut) -> bool:
        return decodes_experts(found.budgets, found.units)

    try:
        return fit(config.schedule.tile, attempt, has_space_ahead, decodes, tiling.largest_nbytes)
    except CapacityError as error:
        reasons = tiling.why_not()
        if config.schedule.tile is not None and reasons:
            error.args = (f"{error}; tiles do not help: {reasons}",)
        raise


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
    device: OwnDevice | None,
    sharding: ShardingPlan | None,
) -> Budgets:
    """Computes the budgets from the sizes of this machine."""
    is_cpu = shares_host_memory(config, device)
    attached = [unit.weight_nbytes for unit in units]
    sizes: dict[str, Any] = {
        **weights_in_use(units, attached, layout.held_nbytes, shares_host_memory=is_cpu),
        "shares_host_memory": is_cpu,
        "device_nbytes": _device_nbytes(config, device),
        "available_host_nbytes": available_host_nbytes(),
    }
    if sharding is None:
        return compute_budgets(config, units, **sizes)
    sizes["available_host_nbytes"] //= sharding.sharing
    return sharding.budgets(config, **sizes)


def _device_nbytes(config: SwapConfig, device: OwnDevice | None) -> int | None:
    is_cpu = shares_host_memory(config, device)
    return device_nbytes(config, is_cuda=not is_cpu and device is None)
