"""The node as each of its ranks sees it: its part of machine and file, and how state is sharded.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.config import SwapConfig
from infinity.config.schema.engine import RankExchange
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import (
    AgreedDevices,
    ShardingPlan,
    exchanges_on_devices,
    plan_sharding,
    with_part_of_node,
)
from infinity.distributed.wire.addresses import Machine
from infinity.errors import ConfigError
from infinity.plan.hardware import Hardware
from infinity.plan.layout import PlannedModel
from infinity.state.budgets import Budgets


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
        self.config_of_rank, self.hardware_of_rank = config, hardware.of_rank(count)
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


def layout_of_rank(
    sharding: ShardingPlan,
    hardware: Hardware,
    budgets: Budgets,
    window_nbytes: int | None,
    spare_nbytes: int,
    num_nodes: int,
) -> RankLayout:
    """Returns the bytes that one rank takes of each tier, and the bytes that the tier has."""
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
