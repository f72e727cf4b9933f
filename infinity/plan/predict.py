"""Predicts one step from a configuration, a model and a machine. Pure.

Budgets and placement are computed by the engine's own functions with the machine's sizes. With
ranks, the step is that of the rank that owns most. Other ranks differ by the remainder of units
that do not divide evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infinity.config import SwapConfig
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import ShardingPlan, plan_sharding, with_part_of_node
from infinity.engine.durability import wanted_spares
from infinity.errors import CapacityError, ConfigError
from infinity.plan.hardware import Hardware
from infinity.plan.model import PlannedModel
from infinity.plan.tiles import largest_nbytes, with_tiles
from infinity.simulate.job import Batch, make_job
from infinity.simulate.order import Use
from infinity.simulate.rank_job import rank_loads
from infinity.simulate.step import WRITE, Prediction, StepSpec, predict
from infinity.simulate.update_device import UpdateDevice, choose, settled
from infinity.sizes import format_nbytes
from infinity.state.budgets import Budgets, compute_budgets
from infinity.state.placement import StatePlacement, resting_nbytes
from infinity.state.store import rewritten_nbytes
from infinity.state.tiles import fit
from infinity.state.units import Unit
from infinity.storage.volume_layout import SPARES_REMEDY

_CHECKPOINT_ITEM_NBYTES = 2


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How state is divided, and what one rank uses of its share, by tier: (bytes, of bytes).

    The device's bytes are those of the engine: state at rest, units in use, and exchange buffers.
    `of` is None without a limit.
    """

    count: int
    rank: int
    stage: int
    is_collective: bool
    taken_nbytes: Mapping[str, tuple[int, int | None]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a run. `placed_nbytes` is by state kind and tier. `spare_nbytes` on NVMe hold
    the `num_spares` generations of commits and linked checkpoints.

    `hardware` is the node. With ranks, batch, bytes and seconds are those of one rank; tokens and
    FLOPs per second are of all ranks.
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
    saved: tuple[str, int] | None  # Tier and bytes of block inputs that are saved off the device.
    ranks: RankLayout | None = None

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.count

    @property
    def tokens_per_s(self) -> float:
        return self.num_ranks * self.batch.tokens_per_step / self.step.step_s

    @property
    def flops_per_s(self) -> float:
        """FLOPs per second of the model's own arithmetic, without recomputation: 3 times the
        forward."""
        forward = sum(use.forward_flops for use in self.job.uses)
        return 3 * forward * self.num_ranks * self.batch.num_micro_batches / self.step.step_s

    @property
    def endurance_steps(self) -> float | None:
        """Steps until the endurance of the drives is used up."""
        nvme = self.hardware.nvme
        written = self.step.moved_nbytes.get(WRITE, 0)
        if nvme is None or nvme.endurance is None or not written:
            return None
        return nvme.endurance / (written * self.num_ranks)


def forecast(
    config: SwapConfig,
    model: PlannedModel,
    hardware: Hardware,
    batch: Batch,
    *,
    num_ranks: int = 1,
    rank: int | None = None,
) -> Forecast:
    """Predicts a step. Raises CapacityError, with the key to change, for demands the machine cannot
    meet.

    With `num_ranks` on the node, each with its own batch, the forecast is that of `rank`, or of the
    rank that owns most.
    """
    node = _Node(config, hardware, num_ranks, rank)
    config, machine = node.config_of_rank, node.hardware_of_rank
    window_nbytes = _device_nbytes(config, machine)
    whole = model
    model, sharding, budgets = _fitted(node, model, window_nbytes)
    placement = budgets.placement
    units = model.units if sharding is None else sharding.partition.units
    num_spares = wanted_spares(config, is_linked=True, num_ranks=num_ranks)
    spare_nbytes = num_spares * _rewritten_nbytes(units, placement)
    _refuse_full_tiers(model, machine, budgets, spare_nbytes, num_ranks)
    saved = _saved(config, model, batch)
    job = _job(config, model, batch, sharding, budgets, saved)
    place = _update_place(config, machine, job)
    job = replace(job, updates_on_device=place.is_on_device)
    return Forecast(
        model=model,
        hardware=hardware,
        batch=batch,
        placed_nbytes=_by_kind(units, placement),
        host_nbytes=budgets.host_nbytes,
        working_nbytes=budgets.working_nbytes,
        num_spares=num_spares,
        spare_nbytes=spare_nbytes,
        is_tight=budgets.is_tight,
        update_place=place,
        job=job,
        step=predict(job, machine.rates()),
        warnings=(
            *_said_of_tiles(whole, model),
            *_warnings(config, model, machine, batch, window_nbytes),
            *_said_of_saved(saved, machine, budgets),
            *node.warnings(),
        ),
        saved=saved,
        ranks=None
        if sharding is None
        else _ranks(sharding, machine, budgets, window_nbytes, spare_nbytes),
    )


class _Node:
    """The machine and the file, as each of its ranks sees them."""

    def __init__(
        self, config: SwapConfig, hardware: Hardware, count: int, rank: int | None
    ) -> None:
        self.count = count
        self.rank = rank
        self.config_of_rank, self.hardware_of_rank = config, hardware
        self.is_collective = False
        self._num_devices = hardware.device.count
        if count > 1:
            self.config_of_rank = with_part_of_node(config, count)
            self.hardware_of_rank = hardware.of_rank(count)
            self.is_collective = _is_collective(config, hardware)

    def plan_sharding(self, model: PlannedModel) -> ShardingPlan | None:
        count, rank = self.count, self.rank
        if count == 1:
            return None
        group = RankTopology(None, 0, count, 0, count, 0, count, ("this node",) * count)
        sharding = plan_sharding(
            model.units,
            _units_by_block(model),
            group,
            self.config_of_rank,
            is_collective=self.is_collective,
        )
        # The partition of each rank contains the shards of all ranks.
        if rank is None:
            of_ranks = list(zip(*sharding.partition.shards, strict=True))
            owned = [sum(shard.unit.state_numel for shard in shards) for shards in of_ranks]
            rank = owned.index(max(owned))
        return replace(sharding, partition=replace(sharding.partition, rank=rank))

    def warnings(self) -> list[str]:
        if self.count == 1 or self.count >= self._num_devices:
            return []
        return [f"{self.count} of the machine's {self._num_devices} devices are used"]


def _is_collective(config: SwapConfig, hardware: Hardware) -> bool:
    """Decides as the engine does. The engine asks its device; a device with memory counts as
    CUDA."""
    wanted = config.distributed.exchange
    if hardware.shares_host_memory:
        if wanted == "collective":
            raise ConfigError(
                'distributed.exchange: "collective" is between devices with memory of their own, '
                "and "
                f'{hardware.name} computes on host memory; set it to "auto" or "one_sided"'
            )
        return False
    if wanted != "one_sided" and hardware.device.gather_gb_per_s is None:
        raise ConfigError(
            f"{hardware.name} has no device.gather_gb_per_s, what a device gets from the others; "
            f"add "
            "it to the hardware file, or --set distributed.exchange=one_sided"
        )
    return wanted != "one_sided"


def _ranks(
    sharding: ShardingPlan,
    hardware: Hardware,
    budgets: Budgets,
    window_nbytes: int | None,
    spare_nbytes: int,
) -> RankLayout:
    placed, partition = budgets.placement.placed_nbytes, sharding.partition
    taken: dict[str, tuple[int, int | None]] = {}
    if not hardware.shares_host_memory:
        buffers_nbytes = 0 if sharding.buffers is None else sharding.buffers.nbytes
        used_nbytes = placed["device"] + budgets.held_nbytes + buffers_nbytes
        taken["device"] = used_nbytes, window_nbytes
    taken["host"] = budgets.host_nbytes + budgets.reduce_buffer_nbytes, hardware.host.memory
    if hardware.nvme is not None:
        taken["nvme"] = placed["nvme"] + spare_nbytes, hardware.nvme.capacity
    return RankLayout(
        partition.count, partition.rank, partition.stage, sharding.is_collective, taken
    )


def _saved(config: SwapConfig, model: PlannedModel, batch: Batch) -> tuple[str, int] | None:
    """Returns the input of every block, for all tokens of a step, in the compute dtype, as the
    engine saves it in layer-major order."""
    tier = config.placement.activations[0]
    if config.schedule.micro_batch is None or tier == "device":
        return None
    blocks = sum(hooked.attention_width > 0 for hooked in model.hooked_modules)
    return tier, blocks * _input_nbytes(config, model, batch)


def _said_of_saved(
    saved: tuple[str, int] | None, hardware: Hardware, budgets: Budgets
) -> list[str]:
    if saved is None or hardware.shares_host_memory:
        return []
    tier, nbytes = saved
    if tier == "host" and nbytes > budgets.working_nbytes:
        return [
            f"layer inputs take {format_nbytes(nbytes)} of the host, which has "
            f"{format_nbytes(budgets.working_nbytes)} to work in: this batch does not fit; set "
            "placement.activations to nvme, or make the batch smaller"
        ]
    return []


def _input_nbytes(config: SwapConfig, model: PlannedModel, batch: Batch) -> int:
    """Returns the bytes of one block's input, for all tokens of a step."""
    itemsize = 2 if config.precision.compute_dtype == "bfloat16" else 4
    return batch.tokens_per_step * model.checkpoint_width * itemsize


_Fitted = tuple[PlannedModel, ShardingPlan | None, Budgets]


def _fitted(node: _Node, model: PlannedModel, window_nbytes: int | None) -> _Fitted:
    """Returns the model with the tiles that the engine would make."""
    config, hardware = node.config_of_rank, node.hardware_of_rank
    # A share of the node's memory means a share of this rank's part.
    takes_all = node.count > 1 and config.distributed.budgets == "rank"

    def attempt(limit_nbytes: int | None) -> _Fitted:
        tiled = with_tiles(model, limit_nbytes)
        sharding = node.plan_sharding(tiled)
        sizes: dict[str, Any] = {
            "held_nbytes": tiled.held_nbytes,
            "shares_host_memory": hardware.shares_host_memory,
            "device_nbytes": window_nbytes,
            "available_host_nbytes": hardware.host.memory * (node.count if takes_all else 1),
        }
        if sharding is None:
            return tiled, None, compute_budgets(config, tiled.units, **sizes)
        return tiled, sharding, sharding.budgets(config, **sizes)

    def has_room_ahead(found: _Fitted) -> bool:
        tiled, _, budgets = found
        return budgets.has_room_ahead(max(unit.weight_nbytes for unit in tiled.units))

    return fit(config.schedule.tile, attempt, has_room_ahead, largest_nbytes(model))


def _device_nbytes(config: SwapConfig, hardware: Hardware) -> int | None:
    """Returns the bytes of the model that one device may hold; None if it computes on host
    memory."""
    if hardware.device.memory is None:
        return config.tiers.device.capacity.nbytes
    return config.tiers.device.budget_nbytes(hardware.device.memory)


def _refuse_full_tiers(
    model: PlannedModel, hardware: Hardware, budgets: Budgets, spare_nbytes: int, num_ranks: int
) -> None:
    """Refuses what the engine would find out late: missing host memory and full drives."""
    part = "" if num_ranks == 1 else f", of which a rank has 1/{num_ranks}"
    needed_nbytes = budgets.host_nbytes + budgets.reduce_buffer_nbytes
    if needed_nbytes > hardware.host.memory:
        raise CapacityError(
            "host", needed_nbytes=needed_nbytes, available_nbytes=hardware.host.memory,
            key="tiers.host.capacity", detail=f"the arena is larger than the memory{part}",
        )  # fmt: skip
    placed = budgets.placement.placed_nbytes
    drives_nbytes = 0 if hardware.nvme is None else hardware.nvme.capacity
    if placed["nvme"] + spare_nbytes > drives_nbytes:
        spares = f" with {format_nbytes(spare_nbytes)} of spare generations" if spare_nbytes else ""
        raise CapacityError(
            "nvme", needed_nbytes=placed["nvme"] + spare_nbytes, available_nbytes=drives_nbytes,
            key="tiers.nvme.capacity", remedy=SPARES_REMEDY if spares else "",
            detail=f"{model.name} does not fit the drives{part}{spares}",
        )  # fmt: skip


def _rewritten_nbytes(units: Sequence[Unit], placement: StatePlacement) -> int:
    """Returns the bytes on NVMe that steps rewrite and commits keep, for one generation."""
    return sum(
        rewritten_nbytes(units[index], state_kind) or 0
        for (index, state_kind), tier in placement.tiers.items()
        if tier == "nvme"
    )


def _by_kind(units: Sequence[Unit], placement: StatePlacement) -> dict[str, dict[str, int]]:
    placed: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (index, state_kind), tier in placement.tiers.items():
        placed[state_kind.kind][tier] += resting_nbytes(units[index], state_kind)
    return {kind: dict(tiers) for kind, tiers in placed.items()}


def _said_of_tiles(whole: PlannedModel, model: PlannedModel) -> list[str]:
    num_tiles = len(model.units) - len(whole.units)
    if num_tiles <= 0:
        return []
    names = {unit.name for unit in whole.units}
    tiles = [unit.weight_nbytes for unit in model.units if unit.name not in names]
    return [
        f"layers too large to be fetched whole run as {len(tiles):,} tiles of at most "
        f"{format_nbytes(max(tiles))}"
    ]


def _warnings(
    config: SwapConfig,
    model: PlannedModel,
    hardware: Hardware,
    batch: Batch,
    window_nbytes: int | None,
) -> list[str]:
    said = []
    device = hardware.device
    if device.count > 1:
        said.append(
            f"units are taken to be cut over {device.count} devices by one program; the engine has "
            f"a rank for each, see --ranks {device.count}"
        )
    is_saved = config.schedule.micro_batch and "device" not in config.placement.activations
    if device.memory is not None and batch.recomputes and not is_saved:
        blocks = sum(hooked.attention_width > 0 for hooked in model.hooked_modules)
        values = batch.num_tokens / device.count * model.checkpoint_width * blocks
        kept_nbytes = values * _CHECKPOINT_ITEM_NBYTES
        free_nbytes = device.memory - (window_nbytes or 0)
        if kept_nbytes > free_nbytes:
            said.append(
                f"the inputs of the blocks that the backward starts from take "
                f"{format_nbytes(kept_nbytes)} a device, and {format_nbytes(free_nbytes)} are "
                "free: this batch does not fit; make the micro-batch smaller, or set "
                "schedule.micro_batch with placement.activations on host or nvme"
            )
    return said


# -- The schedule's input --------------------------------------------------------------------------


def _job(
    config: SwapConfig,
    model: PlannedModel,
    batch: Batch,
    sharding: ShardingPlan | None,
    budgets: Budgets,
    saved: tuple[str, int] | None,
) -> StepSpec:
    saved_nbytes = _input_nbytes(config, model, batch) if saved is not None else 0
    uses = [
        Use(
            hooked.units,
            hooked.forward_flops(batch.num_tokens, batch.sequence_length),
            saved_nbytes if hooked.attention_width else 0,
            block,
        )
        for hooked, block in zip(model.hooked_modules, _blocks(model), strict=True)
    ]
    saved_on = "device" if saved is None else saved[0]
    loads = None
    if sharding is not None:
        loads = list(
            rank_loads(
                config,
                sharding.partition,
                budgets.placement,
                batch,
                is_collective=sharding.is_collective,
            )
        )
    return make_job(config, budgets, model.units, uses, batch, saved_on=saved_on, loads=loads)


def _blocks(model: PlannedModel) -> list[int | None]:
    """Returns, for every hooked module, the block that it belongs to."""
    numbers: list[int | None] = []
    for index, hooked in enumerate(model.hooked_modules):
        is_tile = hooked.is_tile and bool(numbers)
        numbers.append(numbers[-1] if is_tile else index if hooked.attention_width else None)
    return numbers


def _units_by_block(model: PlannedModel) -> tuple[list[int], list[set[int]]]:
    """Returns the units that are used outside blocks or by several blocks, and the units of each
    single block."""
    users: defaultdict[int, set[int | None]] = defaultdict(set)
    for hooked, block in zip(model.hooked_modules, _blocks(model), strict=True):
        for unit in hooked.units:
            users[unit].add(block)
    blocks: defaultdict[int, set[int]] = defaultdict(set)
    outside = []
    for unit, of in users.items():
        block = next(iter(of))
        if len(of) > 1 or block is None:
            outside.append(unit)
        else:
            blocks[block].add(unit)
    return sorted(outside), list(blocks.values())


def _update_place(config: SwapConfig, hardware: Hardware, job: StepSpec) -> UpdateDevice:
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
    return choose(job, hardware.rates())
