"""The capacity of a machine for a model: the part of each rank, tiles that fit, budgets, and
refusals by name. Pure.

Budgets and placement are computed by the engine's own functions with the machine's sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity.config import NvmeTier, SwapConfig
from infinity.config.schema import changed
from infinity.config.schema.engine import RankExchange
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import (
    AgreedDevices,
    ShardingPlan,
    budgets_of,
    exchanges_on_devices,
    plan_sharding,
    with_part_of_node,
)
from infinity.distributed.wire.addresses import Machine
from infinity.errors import CapacityError, ConfigError
from infinity.plan.hardware import Hardware
from infinity.plan.layout import ModuleWork, PlannedModel
from infinity.simulate.job import Batch
from infinity.simulate.memory import inputs_on_host
from infinity.simulate.spec import StepSpec
from infinity.sizes import MIB, format_nbytes
from infinity.state.budgets import Budgets, MachineSizes
from infinity.state.placement import resting_nbytes
from infinity.state.tiles import fit, is_enough
from infinity.state.units import StateKind, Unit
from infinity.storage.volume_layout import SPARES_REMEDY

# -- The node as each of its ranks sees it --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How state is sharded over all ranks of `num_nodes`, and the bytes that one rank takes of each
    tier: (bytes, of bytes).

    The device's bytes are those of the engine: state at rest, units in use, and exchange buffers.
    `of` is None without a limit. `is_over_node`: frozen weights are divided over a node's ranks.
    """

    count: int
    rank: int
    stage: int
    is_collective: bool
    taken_nbytes: Mapping[str, tuple[int, int | None]]
    num_nodes: int = 1
    is_over_node: bool = False

    @property
    def per_node(self) -> int:
        """The number of ranks of each node."""
        return self.count // self.num_nodes


class NodeView:
    """The machine and the file, as each of its ranks sees them: `count` ranks on each of
    `num_nodes` such machines."""

    def __init__(
        self, config: SwapConfig, hardware: Hardware, count: int, rank: int | None, num_nodes: int
    ) -> None:
        self.count = count
        self.num_nodes = num_nodes
        self.rank = rank
        self.is_collective = False
        self._num_devices = hardware.device.count if hardware.device.memory else 1
        if num_nodes > 1 and hardware.host.network_gb_per_s is None:
            raise ConfigError(
                f"--nodes {num_nodes}: {hardware.name} has no host.network_gb_per_s, the rate at "
                "which a node receives from the others; add it to the hardware file"
            )
        self.config_of_rank = config
        self.hardware_of_rank = hardware.of_rank(count).with_parts(config.tiers)
        if self.num_ranks > 1:
            self.config_of_rank = with_part_of_node(config, count)
            self.is_collective = _exchanges_on_devices(config.distributed.exchange, hardware)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all nodes."""
        return self.count * self.num_nodes

    def plan_sharding(self, model: PlannedModel, window_nbytes: int | None) -> ShardingPlan | None:
        """Returns the part of `rank`, or of the rank that owns most; None for one rank.
        `window_nbytes`: the capacity of each device."""
        count, rank = self.num_ranks, self.rank
        if count == 1:
            return None
        nodes = [Machine(f"node {owner // self.count}", "", 0) for owner in range(count)]
        group = RankTopology(None, 0, count, 0, count, 0, self.count, tuple(nodes))
        sharding = plan_sharding(
            model.units,
            model.nesting.units_by_block(),
            group,
            self.config_of_rank.distributed,
            self.config_of_rank.placement.parameters,
            devices=AgreedDevices(self.is_collective, window_nbytes),
        )
        # The partition of each rank contains the shards of all ranks.
        if rank is None:
            of_ranks = list(zip(*sharding.partition.shards, strict=True))
            owned = [sum(shard.unit.state_numel for shard in shards) for shards in of_ranks]
            rank = owned.index(max(owned))
        return replace(sharding, partition=replace(sharding.partition, rank=rank))

    def warnings(self) -> list[str]:
        """Returns a sentence for devices of the machine that no rank uses."""
        if self.count >= self._num_devices:
            return []
        verb = "is" if self.count == 1 else "are"
        return [f"{self.count} of the machine's {self._num_devices} devices {verb} used"]


def _exchanges_on_devices(wanted: RankExchange, hardware: Hardware) -> bool:
    """As `exchanges_on_devices`; a device with memory of its own counts as CUDA. Raises ConfigError
    for hardware without the rate of the exchange, too."""
    has_memory = not hardware.shares_host_memory
    on_devices = exchanges_on_devices(wanted, has_own_memory=has_memory, has_nccl=has_memory)
    if on_devices and hardware.device.gather_gb_per_s is None:
        raise ConfigError(
            f"{hardware.name} has no device.gather_gb_per_s, the rate at which a device receives "
            "from the others; add it to the hardware file, --set distributed.exchange=one_sided, "
            "or plan one device with --ranks 1"
        )
    return on_devices


# -- Tiles, budgets and refusals -------------------------------------------------------------------


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
    found: Fitted, hardware: Hardware, spare_nbytes: int, num_ranks: int, shard_drives: int | None
) -> None:
    """Refuses what the engine would find out late: missing host memory and full drives."""
    model, budgets = found.model, found.budgets
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
            swap_nbytes -= sum(
                resting_nbytes(found.units[index], kind)
                for (index, kind), tier in budgets.placement.tiers.items()
                if tier == "nvme" and not found.units[index].state_numel
            )
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


def by_kind(found: Fitted) -> dict[str, dict[str, int]]:
    """Returns the bytes at rest by kind of state and tier. A frozen base is a kind of its own,
    "base"; in place, its tier beside the host is "checkpoint", and a rank has its shards of it if
    devices exchange them, else all of it."""
    model, sharding, units = found.model, found.sharding, found.units
    is_divided = sharding is not None and sharding.reads_stored_shards
    placed: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (index, state_kind), rests_on in found.budgets.placement.tiers.items():
        tier = rests_on
        unit, kind = units[index], state_kind.kind
        if model.frozen is not None and not unit.state_numel:
            kind = "base"
            if unit.stored is not None and is_divided != (index >= len(model.units)):
                continue
            tier = "checkpoint" if tier == "nvme" and model.has_base_in_place else tier
        placed[kind][tier] += resting_nbytes(unit, state_kind)
    return {kind: dict(tiers) for kind, tiers in placed.items()}


def layout_of_rank(
    found: Fitted,
    hardware: Hardware,
    window_nbytes: int | None,
    spare_nbytes: int,
    num_nodes: int,
) -> RankLayout | None:
    """Returns the bytes that one rank takes of each tier, and the bytes that the tier has; None for
    one rank."""
    sharding, budgets = found.sharding, found.budgets
    if sharding is None:
        return None
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
        partition.count, partition.rank, partition.stage, sharding.is_collective, taken, num_nodes,
        partition.over_node,
    )  # fmt: skip


# -- Layer inputs that wait for the backward, and what a plan warns of -----------------------------


_CHECKPOINT_ITEM_NBYTES = 2
# Per token in a block's backward, in bf16, measured over blocks of Llama and Qwen3: with an adapter
# a fifth more, and without one as much less for the MLP.
_WIDTH_NBYTES, _PRODUCT_NBYTES, _MLP_NBYTES = 36, 5, 3
_BLAS_NBYTES = 32 * MIB  # PyTorch's workspace of cuBLAS on Hopper and later, for each thread.
_BLAS_THREADS = 2  # The thread that trains, and autograd's.


def saved_on(config: SwapConfig, budgets: Budgets) -> str:
    """Returns the last tier that the inputs of blocks may go to."""
    tiers = config.placement.activations
    first, last = tiers[0], tiers[-1]
    if config.schedule.micro_batch is None or first == "device":
        return "device"
    return "host" if first == "host" and budgets.shares_host_memory else last


def saved_inputs(job: StepSpec) -> dict[str, int]:
    """Returns the bytes by tier of the inputs of all blocks that leave the device, for all tokens
    of a step, in the compute dtype, as the engine saves them in layer-major order."""
    if job.saved_on == "device":
        return {}
    nbytes, on_host_nbytes = sum(use.saved_nbytes for use in job.uses), sum(inputs_on_host(job))
    found = {"host": on_host_nbytes, "nvme": nbytes - on_host_nbytes}
    return {tier: nbytes for tier, nbytes in found.items() if nbytes}


def activations_nbytes(config: SwapConfig, hardware: Hardware, batch: Batch) -> int:
    """Returns the memory of one device outside the window and the workspaces of cuBLAS: one for
    each thread that multiplies, and in layer-major order each micro-batch has a thread."""
    device, micro_batch = hardware.device, config.schedule.micro_batch
    threads = _BLAS_THREADS
    if micro_batch is not None:
        threads += math.ceil(batch.num_tokens / batch.sequence_length / micro_batch)
    window_nbytes = window_nbytes_of(config, hardware) or 0
    return (device.memory or 0) - window_nbytes - threads * _BLAS_NBYTES


def waiting_nbytes(
    config: SwapConfig, model: PlannedModel, hardware: Hardware, batch: Batch
) -> int:
    """Returns the bytes of hidden states and sums of a block's experts, for all tokens of a step,
    that wait on the host while experts are streamed in chunks. They go to the device and back for
    every chunk.

    They are in the compute dtype, and stay on the device if half of `activations_nbytes` holds
    them; the other half is for the activations of a micro-batch. 0 then, and without chunks.
    """
    has_chunks = any(hooked.is_experts for hooked in model.hooked_modules)
    if model.frozen is None or not has_chunks or hardware.shares_host_memory:
        return 0
    nbytes = 2 * input_nbytes(config, model, batch)
    return 0 if 2 * nbytes <= activations_nbytes(config, hardware, batch) else nbytes


def said_of_waiting(config: SwapConfig, nbytes: int) -> list[str]:
    """Returns the setting that a batch needs whose hidden states wait on the host, for a reader."""
    if not nbytes or "device" not in config.placement.experts:
        return []
    return [
        f"hidden states and sums of a block's experts take {format_nbytes(nbytes)}, which "
        'the device cannot hold: this forecast is for placement.experts = ["host"]'
    ]


def obstacles_of(
    config: SwapConfig,
    model: PlannedModel,
    machine: Hardware,
    batch: Batch,
    budgets: Budgets,
    saved: Mapping[str, int],
    waiting: int,
) -> list[str]:
    """Returns the reasons why a batch does not fit, for a reader."""
    found = _said_of_kept(config, model, machine, batch)
    found += _said_of_block(config, model, machine, batch)
    on_host, working = saved.get("host", 0), budgets.working_nbytes
    has_to_work = f"of the host, which has {format_nbytes(working)} to work in"
    if on_host > working and not machine.shares_host_memory:
        found.append(
            f"layer inputs take {format_nbytes(on_host)} {has_to_work}: this batch does not fit; "
            "set placement.activations to nvme, or make the batch smaller"
        )
    if waiting and waiting + on_host > working:
        found.append(
            f"hidden states and sums of a block's experts take {format_nbytes(waiting)} "
            f"{has_to_work}: this batch does not fit; make the batch smaller"
        )
    return found


def _said_of_kept(
    config: SwapConfig, model: PlannedModel, hardware: Hardware, batch: Batch
) -> list[str]:
    is_saved = config.schedule.micro_batch and "device" not in config.placement.activations
    if hardware.device.memory is None or not batch.recomputes or (is_saved and batch.has_backward):
        return []
    blocks = sum(hooked.attention_width > 0 for hooked in model.hooked_modules)
    if not batch.has_backward:
        blocks = 1
    kept_nbytes = batch.num_tokens * model.checkpoint_width * blocks * _CHECKPOINT_ITEM_NBYTES
    free_nbytes = activations_nbytes(config, hardware, batch)
    if kept_nbytes <= free_nbytes:
        return []
    if not batch.has_backward:
        return [
            f"the hidden states of a sweep take {format_nbytes(kept_nbytes)} a device, and "
            f"{format_nbytes(max(free_nbytes, 0))} are free: give fewer --tokens"
        ]
    return [
        f"the inputs of the blocks that the backward starts from take "
        f"{format_nbytes(kept_nbytes)} a device, and {format_nbytes(max(free_nbytes, 0))} are "
        "free: this batch does not fit; make the micro-batch smaller, or set "
        "schedule.micro_batch with placement.activations on host or nvme"
    ]


def _said_of_block(
    config: SwapConfig, model: PlannedModel, hardware: Hardware, batch: Batch
) -> list[str]:
    """About what the backward of a block holds: norms, residuals, attention and their gradients,
    which are as wide as a token; and the values of each product, whose width is that of its weights
    over that of a token. Of MLPs it holds one slice."""
    if hardware.device.memory is None or not batch.has_backward:
        return []
    num_tokens = batch.num_tokens
    if config.schedule.micro_batch is not None:
        num_tokens = min(num_tokens, config.schedule.micro_batch * batch.sequence_length)
    at_once, width = min(batch.mlp_tokens or num_tokens, num_tokens), model.checkpoint_width

    def held_nbytes(block: ModuleWork) -> float:
        others = block.frozen_params + block.trained_params - block.mlp_params
        in_mlps = at_once * _MLP_NBYTES * block.mlp_params / width
        return num_tokens * (_WIDTH_NBYTES * width + _PRODUCT_NBYTES * others / width) + in_mlps

    blocks = [hooked for hooked in model.hooked_modules if hooked.attention_width]
    can_slice = batch.mlp_tokens is None and any(block.mlp_params for block in blocks)
    nbytes = max(map(held_nbytes, blocks), default=0)
    # Workspaces for threads of more micro-batches are smaller on other devices.
    one = replace(batch, num_tokens=num_tokens)
    free_nbytes = max(activations_nbytes(config, hardware, one), 0)
    if nbytes <= free_nbytes:
        return []
    return [
        f"the activations of one block take about {format_nbytes(nbytes)} for a micro-batch, and "
        f"{format_nbytes(free_nbytes)} are free on a device: this batch does not fit; make the "
        "micro-batch, its sequences or tiers.device.capacity smaller"
        + (", or set train.mlp_tokens" if can_slice else "")
    ]


def input_nbytes(config: SwapConfig, model: PlannedModel, batch: Batch) -> int:
    """Returns the bytes of one block's input, for all tokens of a step."""
    itemsize = 2 if config.precision.compute_dtype == "bfloat16" else 4
    return batch.tokens_per_step * model.checkpoint_width * itemsize


def said_of_tiles(untiled: PlannedModel, model: PlannedModel) -> list[str]:
    """Returns how layers are divided, for a reader."""
    num_tiles = len(model.units) - len(untiled.units)
    if num_tiles <= 0:
        return []
    names = {unit.name for unit in untiled.units}
    parameters = StateKind.PARAMETERS
    tiles = [unit.nbytes(parameters) for unit in model.units if unit.name not in names]
    return [
        f"layers too large to be fetched whole run as {len(tiles):,} tiles of at most "
        f"{format_nbytes(max(tiles))}"
    ]
