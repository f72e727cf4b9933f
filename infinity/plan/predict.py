"""Predicts one step from a configuration, a model and a machine. Pure.

Budgets and placement are computed by the engine's own functions with the machine's sizes. With
ranks, the step is that of the rank that owns most. Other ranks differ by the remainder of units
that do not divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from infinity.config import SwapConfig
from infinity.plan.capacity import (
    Fitted,
    NodeView,
    RankLayout,
    by_kind,
    fitted,
    input_nbytes,
    layout_of_rank,
    obstacles_of,
    refuse_full_tiers,
    said_of_tiles,
    said_of_waiting,
    saved_inputs,
    saved_on,
    waiting_nbytes,
    window_nbytes_of,
    with_checkpoint_tier,
)
from infinity.plan.hardware import Hardware
from infinity.plan.layout import ModuleWork, PlannedModel
from infinity.simulate.job import Batch, make_job, num_fibers_of, rank_loads
from infinity.simulate.log import WRITE
from infinity.simulate.order import Use
from infinity.simulate.spec import Rates, StepSpec
from infinity.simulate.step import EARLY_SHARES, Prediction, best_share, without_collections
from infinity.simulate.update_device import UpdateDevice, choose, settled
from infinity.state.spare_generations import plan_spares, spares_nbytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a run. `placed_nbytes` is by state kind and tier. `spare_nbytes` on NVMe hold
    the `num_spares` generations of commits, linked checkpoints and early updates.

    `hardware` is one node. With ranks, batch, bytes and seconds are those of one rank; tokens and
    FLOPs per second are of all ranks. For the answer to a user: `data_tokens` of data are passed
    once; `other` is the same run with the checkpoint on another number of drives, `of_data` that
    with sequences as long as the data's. A step that generates makes a sweep `of_token` for each of
    `num_generated` tokens at most, none if a server generates, and then one `of_scores`.
    """

    model: PlannedModel
    hardware: Hardware
    batch: Batch
    placed_nbytes: Mapping[str, Mapping[str, int]]
    host_nbytes: int
    working_nbytes: int
    num_spares: int
    spare_nbytes: int
    is_tight: bool
    update_place: UpdateDevice
    job: StepSpec
    step: Prediction
    warnings: tuple[str, ...]
    saved: Mapping[str, int]  # By tier, off the device.
    obstacles: tuple[str, ...] = ()  # Reasons why this batch does not fit; among the warnings.
    shard_drives: int | None = None
    ranks: RankLayout | None = None
    data_tokens: int | None = None
    other: Forecast | None = None
    of_data: Forecast | None = None
    of_token: Forecast | None = None
    num_generated: int = 0
    of_scores: Forecast | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the forecast."""
        return 1 if self.ranks is None else self.ranks.count

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second of a step."""
        return self.num_ranks * self.batch.tokens_per_step / self.step.step_s

    @property
    def flops_per_s(self) -> float:
        """FLOPs per second of the model's own arithmetic, without recomputation: 3 times the
        forward, if all weights are trained."""
        has_backward = self.batch.has_backward
        own = sum((1 + has_backward * u.gradient_ratio) * u.forward_flops for u in self.job.uses)
        return own * self.num_ranks * self.batch.num_micro_batches / self.step.step_s

    @property
    def endurance_steps(self) -> float | None:
        """Steps until the endurance of the drives is used up."""
        nvme = self.hardware.nvme
        written = self.step.moved_nbytes.get(WRITE, 0)
        if nvme is None or nvme.endurance is None or not written:
            return None
        per_node = 1 if self.ranks is None else self.ranks.per_node
        return nvme.endurance / (written * per_node)


@without_collections()
def forecast(
    config: SwapConfig,
    model: PlannedModel,
    hardware: Hardware,
    batch: Batch,
    *,
    num_ranks: int = 1,
    num_nodes: int = 1,
    rank: int | None = None,
    shard_drives: int | None = None,
) -> Forecast:
    """Predicts a step. Raises CapacityError, with the key to change, for demands the machine cannot
    meet.

    With `num_ranks` on each of `num_nodes`, each with its own batch, the forecast is that of
    `rank`, or of the rank that owns most. `shard_drives` of the drives hold the checkpoint of a
    frozen base; None: all of them.
    """
    config, model = with_base(config, model)
    node = NodeView(config, hardware, num_ranks, rank, num_nodes)
    config, machine = node.config_of_rank, node.hardware_of_rank
    window_nbytes = window_nbytes_of(config, machine)
    untiled = model
    found = fitted(node, model, window_nbytes)
    model, budgets = found.model, found.budgets
    spares = plan_spares(
        config, found.units, budgets, num_ranks=node.num_ranks, is_linked=True,
        free_nbytes=0.0 if machine.nvme is None else machine.nvme.capacity,
    )  # fmt: skip
    spare_nbytes = spares_nbytes(found.units, budgets.placement, spares)
    refuse_full_tiers(found, machine, spare_nbytes, num_ranks, shard_drives)
    waiting = waiting_nbytes(config, model, machine, batch)
    job = _job(config, found, batch, waiting, num_nodes)
    saved = saved_inputs(job)
    obstacles = obstacles_of(config, model, machine, batch, budgets, saved, waiting)
    rates = machine.rates(shard_drives)
    place = _update_place(config, machine, job, rates)
    job = replace(job, updates_on_device=place.is_on_device)
    job, step = best_share(job, rates, EARLY_SHARES if spares.in_backward else [job.early_share])
    return Forecast(
        model=model,
        hardware=hardware,
        batch=batch,
        placed_nbytes=by_kind(found),
        host_nbytes=budgets.host_nbytes,
        working_nbytes=budgets.working_nbytes,
        num_spares=spares.count,
        spare_nbytes=spare_nbytes,
        is_tight=budgets.is_tight,
        update_place=place,
        job=job,
        step=step,
        warnings=(
            *said_of_waiting(config, waiting),
            *said_of_tiles(untiled, model),
            *obstacles,
            *node.warnings(),
        ),
        saved=saved,
        obstacles=tuple(obstacles),
        shard_drives=shard_drives,
        ranks=layout_of_rank(found, machine, window_nbytes, spare_nbytes, num_nodes),
    )


def forecast_again(
    base: Forecast, config: SwapConfig, model: PlannedModel, **changes: Any
) -> Forecast:
    """Returns the forecast of another configuration, on as many ranks; `changes` are other
    arguments of `forecast`. Raises as `forecast`."""
    num_ranks, num_nodes = _ranks_of(base)
    same: dict[str, Any] = {
        "hardware": base.hardware,
        "batch": base.batch,
        "num_ranks": num_ranks,
        "num_nodes": num_nodes,
        "shard_drives": base.shard_drives,
    }
    return forecast(config, model, **same | changes)


@without_collections()
def is_tight_again(base: Forecast, config: SwapConfig, model: PlannedModel) -> bool:
    """Whether another configuration, too, keeps nothing in memory: what `forecast_again` says, for
    a small part of its time. Raises CapacityError as `forecast`."""
    config, model = with_base(config, model)
    num_ranks, num_nodes = _ranks_of(base)
    node = NodeView(config, base.hardware, num_ranks, None, num_nodes)
    window_nbytes = window_nbytes_of(node.config_of_rank, node.hardware_of_rank)
    return fitted(node, model, window_nbytes).budgets.is_tight


def _ranks_of(base: Forecast) -> tuple[int, int]:
    return (1, 1) if base.ranks is None else (base.ranks.per_node, base.ranks.num_nodes)


def with_base(config: SwapConfig, model: PlannedModel) -> tuple[SwapConfig, PlannedModel]:
    """Returns both with a frozen base where the engine reads it: in its files, or in a copy."""
    if model.frozen is None:
        return config, model
    if not config.placement.reads_in_place:
        return config, model.copied()
    return with_checkpoint_tier(config), model


def _job(config: SwapConfig, found: Fitted, batch: Batch, waiting: int, num_nodes: int) -> StepSpec:
    model, sharding, budgets = found.model, found.sharding, found.budgets
    tier = saved_on(config, budgets) if batch.has_backward else "device"
    saved_nbytes = input_nbytes(config, model, batch) if tier != "device" else 0
    inputs_nbytes = None
    if config.placement.activations[0] == "host":
        inputs_nbytes = max(budgets.inputs_nbytes - waiting, 0)
    num_fibers = num_fibers_of(config.schedule.micro_batch, batch)
    works = model.hooked_modules
    experts = [_experts(config, model, work, batch, num_fibers) for work in works]
    uses = [
        Use(
            hooked.units,
            hooked.forward_flops(batch.num_tokens, batch.sequence_length),
            saved_nbytes if hooked.attention_width else 0,
            block,
            gradient_ratio=hooked.gradient_ratio(
                batch.sequence_length, slices_mlps=batch.slices_mlps(batch.num_tokens)
            ),
            has_backward=hooked.has_backward,
            is_experts=hooked.is_experts,
            decoded_nbytes=sum(model.decoded_nbytes(model.units[unit]) for unit in hooked.units),
            passing_nbytes=(waiting, waiting) if hooked.is_experts else (0, 0),
            expert_flops=expert_flops,
            expert_nbytes=expert_nbytes,
        )
        for hooked, block, (expert_flops, expert_nbytes) in zip(
            works, model.blocks, experts, strict=True
        )
    ]
    loads = None
    if sharding is not None:
        loads = list(
            rank_loads(
                sharding.partition,
                budgets.placement,
                batch,
                reduce_dtype=config.distributed.reduce_dtype,
                micro_batch=config.schedule.micro_batch,
                is_collective=sharding.is_collective,
                num_nodes=num_nodes,
            )
        )
    job = make_job(
        config, budgets, model.units, uses, batch, loads=loads,
        saved_on=tier, inputs_nbytes=inputs_nbytes,
    )  # fmt: skip
    if not batch.has_backward:
        job = replace(job, units=tuple(load.unchanged() for load in job.units))
    return replace(job, keeps_experts=True) if model.has_base_in_place else job


def _experts(
    config: SwapConfig, model: PlannedModel, work: ModuleWork, batch: Batch, num_fibers: int
) -> tuple[float, int]:
    """Returns the FLOPs of routed experts in a forward of the batch, and the bytes of weights that
    their products read: for all tokens at once in grouped tiles, else for each micro-batch."""
    products = config.schedule.experts
    is_grouped = products == "grouped" or (work.is_experts and products != "exact")
    num_reads = 1 if is_grouped else num_fibers
    flops, nbytes = 0.0, 0.0
    for tensor in (t for unit in work.units for t in model.groups[unit].experts):
        # Of an expert that no token has chosen, nothing is read.
        chosen = batch.num_tokens / num_reads * tensor.multiplied / math.prod(tensor.facts.shape)
        flops += 2.0 * batch.num_tokens * tensor.multiplied
        nbytes += num_reads * min(chosen, 1.0) * tensor.nbytes
    return flops, int(nbytes)


def _update_place(
    config: SwapConfig, hardware: Hardware, job: StepSpec, rates: Rates
) -> UpdateDevice:
    """Decides as the engine would with the rates of this machine."""
    place = settled(
        config.schedule.update_on,
        config.precision.moments,
        shares_host_memory=hardware.shares_host_memory,
        update_nbytes=sum(unit.update_nbytes for unit in job.units),
    )
    if place is not None:
        return place
    if hardware.device.update_gb_per_s is None:
        return UpdateDevice(
            "host", f"{hardware.name} has no device.update_gb_per_s to compare it with"
        )
    return choose(job, rates)
