"""The part of a configuration and a model that one rank has: its budgets, directories and
shards."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist

from infinity.config import SwapConfig
from infinity.config.schema import changed
from infinity.config.schema.engine import Distributed, RankExchange
from infinity.config.schema.tiers import NvmeTier
from infinity.config.values import Capacity
from infinity.distributed.collective.buckets import GradientBuckets
from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.exchange import Buffers, DeviceExchange, choose_round
from infinity.distributed.collective.process_groups import (
    DeviceGroups,
    device_groups,
    number_of_groups,
    refuse_blocking_calls,
    refuse_unequal_names,
)
from infinity.distributed.collective.unshard import DeviceUnshard
from infinity.distributed.group import RankTopology, path_of_rank, share_memory
from infinity.distributed.store import DistributedStore, serving_nbytes
from infinity.distributed.sums.grad_memory import SumsPlan, plan_sums
from infinity.distributed.sync import Ranks
from infinity.distributed.wire.failures import waiting_beside
from infinity.errors import ConfigError, StorageError
from infinity.modules.autograd.param import OffloadedParam
from infinity.observe import Counters
from infinity.ops.mean import prepare
from infinity.state.budgets import (
    Budgets,
    MachineSizes,
    RankSizes,
    WeightsInUse,
    compute_budgets,
    weights_in_use,
)
from infinity.state.nesting import Nesting
from infinity.state.partition import Partition, partition
from infinity.state.store import LocalStore
from infinity.state.units import Unit
from infinity.storage.shards import ShardIdentity
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool
from infinity.tiers.ranges import rounded_nbytes
from infinity.tiers.streams import StreamDevice

# The bytes of each parameter that ranks compare before training begins.
_COMPARED_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class AgreedDevices:
    """The facts of the ranks' devices, the same on all ranks. `is_collective`: they exchange with
    each other. `least_nbytes`: the least capacity that a rank gives; None: unlimited."""

    is_collective: bool
    least_nbytes: int | None


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Sharded state, and the host memory that it costs this rank."""

    partition: Partition
    group: RankTopology
    sharing: int  # Ranks that share this machine's memory by their configuration.
    buffers: Buffers | None  # Of the exchange between devices; None: hosts exchange.
    sums: SumsPlan  # Sums over micro-batches, before they are sent.

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange with each other."""
        return self.buffers is not None

    @property
    def gathered_nbytes(self) -> int:
        """The bytes of the largest unit's weights, if they are gathered for use; else 0."""
        partition = self.partition
        gathered = [unit for unit in partition.full_units if partition.is_gathered(unit.index)]
        return max((rounded_nbytes(unit.weight_nbytes) for unit in gathered), default=0)

    @property
    def reads_stored_shards(self) -> bool:
        """Whether a rank reads its pages of frozen weights that rest in files, and the devices put
        them together; else every rank reads all of them."""
        return self.is_collective and self.partition.shards_parameters

    @property
    def serving_nbytes(self) -> int:
        """The host bytes that a rank keeps to serve its shards."""
        return serving_nbytes(self.partition)

    @property
    def received_nbytes(self) -> int:
        """The most bytes of partial gradients that wait if ranks run alike.

        That is what all ranks send to this one in a backward, in the dtype of the weights, of two
        backward passes.
        """
        return 2 * sum(unit.trainable_nbytes for unit in self.partition.full_units)

    def part_of(self, machine: MachineSizes) -> MachineSizes:
        """Returns what a rank has of a machine whose memory its ranks share."""
        share_nbytes = machine.available_host_nbytes // self.sharing
        return replace(machine, available_host_nbytes=share_nbytes)

    def budgets(self, config: SwapConfig, in_use: WeightsInUse, machine: MachineSizes) -> Budgets:
        """Returns this rank's budgets. Devices keep the buffers of their exchange."""
        if machine.device_nbytes is not None and self.buffers is not None:
            left_nbytes = machine.device_nbytes - self.buffers.nbytes
            machine = replace(machine, device_nbytes=left_nbytes)
        ranks = RankSizes(
            gathered_nbytes=self.gathered_nbytes,
            serving_nbytes=self.serving_nbytes,
            received_nbytes=self.received_nbytes,
            summed_nbytes=self.sums.nbytes,
            num_sharing=self.sharing,
        )
        return compute_budgets(config, self.partition.units, in_use, machine, ranks)

    def join_devices(self, device: DeviceAdapter, resources: ExitStack) -> DeviceGroups | None:
        """Returns the process groups of the ranks' devices, or None if they do not exchange.

        Destroyed with `resources`, after what is added later. A collective call.
        """
        if not self.is_collective:
            return None
        # Here, where no rank waits for a connection: to compile takes seconds.
        prepare(self.partition.count, device.torch_device)
        over_nodes = self.partition.over_node
        make = partial(device_groups, self.group, device.torch_device, over_nodes=over_nodes)
        groups = waiting_beside(self.group.links.failures, make)
        resources.callback(groups.leave)
        return groups

    def exchange(
        self,
        store: DistributedStore,
        device: DeviceAdapter,
        groups: DeviceGroups | None,
        counters: Counters,
        resources: ExitStack,
    ) -> tuple[Collectives | None, GradientBuckets | None, DeviceUnshard | None]:
        """Returns the exchange of weights and of gradients between devices, or None for each.

        `groups`: of `join_devices`. Closed with `resources`.
        """
        if self.buffers is None:
            return None, None, None
        assert isinstance(device, StreamDevice) and groups is not None
        collectives = Collectives(store.transport, groups, counters, device.begin_thread)
        resources.callback(collectives.close)
        exchange = DeviceExchange(
            device, collectives.gathers, collectives.sums, self.buffers, collectives.node_gathers
        )
        collectives.try_first(exchange.try_all)
        buckets = GradientBuckets(collectives, exchange, self.partition, counters)
        gathering = DeviceUnshard(
            store, collectives=collectives, exchange=exchange, counters=counters
        )
        return collectives, buckets, gathering

    def store(
        self,
        local: LocalStore,
        host: HostPool,
        counters: Counters,
        resources: ExitStack,
        *,
        reduce_buffer_nbytes: int,
        begin_thread: Callable[[], None],
    ) -> DistributedStore:
        """Returns the store of this rank, which shares memory with other ranks of its machine. The
        links to all of them are closed with `resources`."""
        transport = self.group.links
        resources.callback(transport.close)
        share_memory(self.group, counters, host.arena)
        store = DistributedStore(
            local, self.partition, transport,
            host=host, counters=counters, reduce_buffer_nbytes=reduce_buffer_nbytes,
            begin_thread=begin_thread,
        )  # fmt: skip
        resources.callback(store.close)
        return store


def budgets_of(
    config: SwapConfig,
    units: Sequence[Unit],
    nesting: Nesting,
    machine: MachineSizes,
    sharding: ShardingPlan | None,
) -> Budgets:
    """Returns the budgets of all `units`, or of this rank's shards of them. Raises as
    `compute_budgets`."""
    in_use = weights_in_use(
        units, nesting.most_nbytes, shares_host_memory=machine.shares_host_memory
    )
    if sharding is None:
        return compute_budgets(config, units, in_use, machine)
    return sharding.budgets(config, in_use, machine)


def plan_sharding(
    units: Sequence[Unit],
    by_block: tuple[list[int], list[set[int]]],
    group: RankTopology,
    distributed: Distributed,
    weight_tiers: Sequence[str],
    *,
    devices: AgreedDevices,
) -> ShardingPlan:
    """Returns this rank's part of the units, as `[distributed]` says. `by_block`: as of
    `ModelLayout`. `weight_tiers`: those of weights.
    """
    stage = distributed.zero_stage
    divided = partition(
        units, rank=group.rank, count=group.count, stage=stage,
        nodes=group.nodes, over_node=divides_over_node(distributed, group.nodes),
    )  # fmt: skip
    return ShardingPlan(
        divided,
        group,
        group.node_count if distributed.budgets == "node" else 1,
        _buffers(divided, weight_tiers, devices),
        plan_sums(units, *by_block) if stage > 1 else plan_sums(units, (), ()),
    )


def divides_over_node(distributed: Distributed, nodes: Sequence[Sequence[int]]) -> bool:
    """Whether frozen weights are divided over the ranks of a node, as `distributed.shard_over`
    says. Pure.

    `nodes`: the ranks of each node. Raises ConfigError if nodes have unequal numbers of ranks, and
    for a stage in which every rank keeps all weights.
    """
    if distributed.shard_over == "all" or len(nodes) < 2:
        return False
    if distributed.zero_stage < 3:
        raise ConfigError(
            'distributed.shard_over: "node" divides frozen weights over the ranks of a node, and '
            f"in stage {distributed.zero_stage} every rank keeps all weights; set "
            'distributed.zero_stage to 3, or shard_over to "all"'
        )
    numbers = [len(ranks) for ranks in nodes]
    if len(set(numbers)) > 1:
        raise ConfigError(
            'distributed.shard_over: "node" needs equally many ranks on each node, and there are '
            f'{", ".join(map(str, numbers))}; start as many on each, or set it to "all"'
        )
    return True


def _buffers(
    divided: Partition, weight_tiers: Sequence[str], devices: AgreedDevices
) -> Buffers | None:
    """Returns the buffers of the exchange between devices. Stage 3 gathers all weights, stages 1
    and 2 those that rest on the device."""
    if not devices.is_collective:
        return None
    gathers = divided.shards_parameters or "device" in weight_tiers
    # The most bytes that a rank gives, by whether they go to its node alone.
    of_one = dict.fromkeys((False, True), 0)
    for unit, shards in enumerate(divided.shards if gathers else ()):
        for part in (part for shard in shards for part in divided.served(shard)):
            is_of_node = divided.is_of_node(unit)
            of_one[is_of_node] = max(of_one[is_of_node], part.shard_offset_nbytes + part.nbytes)
    owned = (shard.unit.trainable_nbytes for shards in divided.shards for shard in shards)
    return choose_round(
        divided.count, of_one[False], max(owned), devices.least_nbytes,
        node_count=len(divided.node) if divided.over_node else 0, node_weights_nbytes=of_one[True],
    )  # fmt: skip


def exchanges_on_devices(wanted: RankExchange, *, has_own_memory: bool, has_nccl: bool) -> bool:
    """Whether devices exchange with each other, as `distributed.exchange` says. Pure.

    Raises ConfigError for "collective" if the devices compute on host memory.
    """
    if wanted == "collective" and not has_own_memory:
        raise ConfigError(
            'distributed.exchange: "collective" needs devices with their own memory, and '
            'this one computes on host memory; set it to "auto" or "one_sided"'
        )
    return wanted == "collective" or (wanted == "auto" and has_nccl)


def agree_on_exchange(
    distributed: Distributed,
    weight_tiers: Sequence[str],
    group: RankTopology,
    *,
    has_own_memory: bool,
    is_cuda: bool,
    identity: str,
    device_nbytes: int | None,
) -> AgreedDevices:
    """Returns `exchanges_on_devices` and the least of all `device_nbytes`, the capacities of the
    devices.

    `identity`: see `device_identity`. A collective call. Raises ConfigError as
    `exchanges_on_devices`, `refuse_blocking_calls` and `refuse_unequal_names`, if ranks differ, and
    if two of them have one device.
    """
    local, refusal = None, None
    has_nccl = is_cuda and dist.is_nccl_available()
    try:
        local = exchanges_on_devices(
            distributed.exchange, has_own_memory=has_own_memory, has_nccl=has_nccl
        )
        if local:
            refuse_blocking_calls()
    except ConfigError as error:
        local, refusal = None, error
    # A rank that refuses sends None to the others: they would wait for it.
    division = distributed.shard_over, distributed.zero_stage
    kind = *division, weight_tiers  # What the sizes of rounds depend on.
    own = local, kind, identity, device_nbytes, number_of_groups()
    of_all = group.links.all_gather_objects("how ranks exchange", own)
    if refusal is not None:
        raise refusal
    _refuse_unlike_ranks(group, of_all)
    assert local is not None
    limits = [nbytes for *_, nbytes, _ in of_all if nbytes is not None]
    return AgreedDevices(local, min(limits, default=None))


def _refuse_unlike_ranks(group: RankTopology, of_all: Sequence[Any]) -> None:
    """Raises ConfigError on all ranks; `of_all` is what each of them sends in
    `agree_on_exchange`."""
    refuse_shared_devices([device for _, _, device, *_ in of_all])
    for rank, remote in enumerate(of_all):
        if remote[:2] != of_all[0][:2]:
            raise ConfigError(
                f"distributed.exchange, shard_over, zero_stage, placement.parameters: rank {rank} "
                "would exchange otherwise than rank 0; give all ranks one configuration and "
                "devices of one kind"
            )
    if of_all[0][0]:
        refuse_unequal_names(group.process_group, [number for *_, number in of_all])


def refuse_shared_devices(identities: Sequence[str]) -> None:
    """Raises ConfigError if two ranks have one device, by `device_identity` of each rank. Pure.

    Each would take its budget from the same memory, and NCCL refuses them later.
    """
    for rank, identity in enumerate(identities):
        first = identities.index(identity)
        if identity and first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} have one device, {identity}: expected a device for each "
                "process. Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
                "infinity.offload, and start at most as many processes as the machine has devices"
            )


def config_of_rank(config: SwapConfig, group: RankTopology) -> SwapConfig:
    """Returns the configuration of this rank, and makes its swap directories.

    Every rank gets a directory of its own in each swap directory. Capacities of a node are divided
    by its ranks; a percentage stays one, of the rank's part of the memory. In stages 1 and 2
    updates run in the step: all ranks keep the weights, and exchange them before they leave it.
    """
    commits_steps = config.checkpoint is not None and config.checkpoint.durability == "step"
    if commits_steps and group.node_count < group.count:
        raise ConfigError(
            'checkpoint.durability: "step" with ranks on several machines is not possible: one '
            "rename in one swap directory commits the step of all ranks, which that of another "
            'machine does not see. Use "checkpoint", with a directory that all of them share'
        )
    if commits_steps and group.count < group.job_count:
        raise ConfigError(
            f'checkpoint.durability: "step" is for one model on all {group.job_count} ranks of the '
            f"job, and {group.count} hold this one: steps of others would be committed in its "
            'place. Use "checkpoint", with a directory for each model'
        )
    config, drives = with_part_of_node(config, group.node_count), []
    for tier in config.tiers.nvme:
        try:
            tier.path.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(error.errno or 0, operation="mkdir", path=str(tier.path)) from None
        drives.append(tier.model_copy(update={"path": path_of_rank(tier.path, group.job_rank)}))
    return changed(config, {"tiers.nvme": tuple(drives)})


def with_part_of_node(config: SwapConfig, node_count: int) -> SwapConfig:
    """Returns the configuration of each of so many ranks of a node. Pure.

    In stages 1 and 2 updates are in the step.
    """
    count = node_count if config.distributed.budgets == "node" else 1
    drives = tuple(
        changed(tier, {"capacity": _part(tier.capacity, count)}) for tier in config.tiers.nvme
    )
    values: dict[str, Any] = {"tiers.nvme": drives}
    capacity = config.tiers.host.capacity
    if capacity.nbytes is not None:
        values["tiers.host.capacity"] = _part(capacity, count)
    if config.distributed.zero_stage < 3:
        values["schedule.updates"] = "at_step"
    return changed(config, values)


def remove_directories(tiers: Iterable[NvmeTier]) -> None:
    """Removes the directories of this rank, which are empty once its volume is closed."""
    for tier in tiers:
        with contextlib.suppress(OSError):
            tier.path.rmdir()


def _part(capacity: Capacity, count: int) -> Capacity:
    if capacity.nbytes is not None:
        return Capacity(nbytes=capacity.nbytes // count)
    return Capacity(percent=(capacity.percent or 100.0) / count) if count > 1 else capacity


def refuse_different_weights(
    ranks: Ranks,
    params: Iterable[OffloadedParam],
    replaced: Collection[str],
    identities: Iterable[ShardIdentity],
) -> None:
    """Raises InfinityError if ranks start from different weights: each keeps a part of its own.

    `replaced` names parameters whose values files will replace: their values now do not matter.
    `identities`: the files in which frozen weights rest. Each rank may find them in another
    directory, but lengths and headers are the same.
    """
    if ranks.partition is None:
        return
    sums = [str(ranks.partition.stage)]
    for identity in identities:
        name = PurePath(identity.path).name
        sums.append(f"{name} {identity.nbytes} {identity.header_sha256}")
    for param in params:
        original = param.original
        facts = param.spec.facts
        text = f"{param.name} {facts.shape} {facts.dtype} {facts.is_trainable}"
        if original is not None and not original.is_meta and param.name not in replaced:
            head = original.detach().flatten()[: _COMPARED_NBYTES // original.element_size()]
            content = head.contiguous().cpu().view(torch.uint8).numpy().data
            text += f" {zlib.crc32(content)}"
        sums.append(text)
    ranks.refuse_different(
        "infinity.offload",
        "\n".join(sums).encode(),
        remedy="Build the same model on every rank (the same seed before it is built, or "
        "weights=...) with the same [distributed] zero_stage",
    )
