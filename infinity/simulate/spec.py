"""The input of the simulated step: the load of every unit, their uses, caches, and the rates of the
machine. Pure.

With ranks, the input is that of one rank, beside other ranks that do the same at the same time. A
shared unit has a `ShardedLoad`, and every rate of a resource that ranks share is this rank's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.simulate.order import Use


@dataclass(frozen=True, slots=True)
class ShardedLoad:
    """The traffic of one rank for a unit whose state is shared by `count` ranks.

    Data that the ranks' devices do not exchange directly passes between their hosts.
    `received_nbytes`: weights of the other ranks. `served_nbytes`: weights of this rank, read
    from its tier for the other ranks if weights pass between hosts. `sent_nbytes`: gradients on
    their way to their owners. `network_received_nbytes` and `network_sent_nbytes`: this rank's part
    of these bytes that passes between nodes.
    """

    count: int
    full_nbytes: int  # Of the unit's weights on all ranks, in the dtype of the computation.
    # Every fetch gathers the weights (stage 3); otherwise every rank has all of them.
    is_gathered: bool
    are_weights_between_devices: bool
    are_gradients_between_devices: bool
    received_nbytes: int
    served_nbytes: int
    sent_nbytes: int
    # Stage 1: the place where this rank sums its gradients of a step before it sends them.
    sums: str | None = None
    sums_nbytes: int = 0
    network_received_nbytes: int = 0
    network_sent_nbytes: int = 0

    @property
    def is_gathered_on_host(self) -> bool:
        """Whether a unit's weights are gathered in host memory."""
        return self.is_gathered and not self.are_weights_between_devices

    @property
    def sends_each_backward(self) -> bool:
        """Whether a backward sends gradients to their owners; else this rank sums them first, or
        owns them all."""
        return self.count > 0 and self.sums is None


# One rank alone: nothing is gathered or sent.
NOT_SHARDED = ShardedLoad(0, 0, False, False, False, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """One unit in the simulated schedule. `weights` is the tier where they rest, or "checkpoint"
    for frozen weights that are read from the files of their checkpoint; bytes are by tier name.

    With ranks, the weights are those that rest on this rank: all of the unit's, or its part. State
    and gradients are its part. `leaving_nbytes` are of the full unit.
    """

    name: str
    weights: str
    weight_nbytes: int
    written_nbytes: int  # Of the weights, by an update: to a device this rank's part of them.
    state_read_nbytes: Mapping[str, int]
    state_write_nbytes: Mapping[str, int]
    update_nbytes: int  # Touched in memory by the optimizer's pass; 0 for a frozen unit.
    gradients: str
    gradient_nbytes: int
    leaving_nbytes: int  # Of a gradient that leaves a device, in its own dtype.
    # The fp32 bytes of the largest gradient that one thread measures; 0 of one that several do.
    largest_nbytes: int = 0
    # Of an embedding's gradient that rests on a device, the bytes of the rows that were looked up;
    # None: all of the gradients are measured.
    looked_up_nbytes: int | None = None
    decoded_nbytes: int = 0  # Of stored weights, where the device computes with them.
    # The tier of an fp32 master that weights are made of; None: they are a part of their master.
    full_master: str | None = None
    sharded: ShardedLoad = NOT_SHARDED

    @property
    def checked_out_nbytes(self) -> int:
        """Bytes of weights that an update on the host reads from a device."""
        if self.full_master is not None:
            return 0
        is_part = self.sharded is not NOT_SHARDED and not self.sharded.is_gathered
        return self.written_nbytes if is_part else self.weight_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of weights that are computed with."""
        if self.sharded.is_gathered:
            return self.decoded_nbytes or self.sharded.full_nbytes
        return self.decoded_nbytes or self.weight_nbytes

    @property
    def fetched_nbytes(self) -> int:
        """Bytes of weights that a use fetches to host memory."""
        if self.sharded.is_gathered_on_host:
            return self.sharded.full_nbytes
        return self.weight_nbytes if self.weights in ("nvme", "checkpoint") else 0

    @property
    def inward_nbytes(self) -> int:
        """Bytes of weights that a use copies from the host to a device."""
        if not self.sharded.is_gathered:
            return self.weight_nbytes
        if self.sharded.is_gathered_on_host:
            return self.sharded.full_nbytes
        return self.weight_nbytes if self.weights != "device" else 0

    @property
    def is_away(self) -> bool:
        """Whether the weights rest off the device."""
        return self.sharded.is_gathered or self.weights != "device"

    @property
    def is_changed(self) -> bool:
        """Whether a step changes the unit, on any rank."""
        return self.update_nbytes > 0 or self.sharded.sent_nbytes > 0

    @property
    def changes_on_device(self) -> bool:
        """Whether an update reads or writes state that rests on a device."""
        tiers = {self.weights, *self.state_read_nbytes} if self.update_nbytes else ()
        return "device" in tiers

    def unchanged(self) -> UnitLoad:
        """Returns the load of a sweep that leaves the unit as it is."""
        return replace(self, update_nbytes=0, sharded=replace(self.sharded, sent_nbytes=0))

    @property
    def sums(self) -> tuple[str, int]:
        """The place where the backward sums gradients, and the fp32 bytes there."""
        if self.sharded.sums is not None:
            return self.sharded.sums, self.sharded.sums_nbytes
        return self.gradients, self.gradient_nbytes


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Everything that the prediction depends on, except the machine's speed.

    `weights_cache_nbytes` is host memory for weights in transit, and `device_cache_nbytes` the same
    on the device (None if it computes on host memory). `ring_nbytes` of state are in memory at the
    same time. `backward_ratio` is the backward's FLOPs over the forward's: 2, or 3 with
    recomputation, if all weights are trained, 0 without a backward. A micro-batch may stand for
    `num_fibers` of them that pass block by block, `tile_micro_batches` at a time in a block with
    tiles. `keeps_experts`: see `moves`.
    """

    units: tuple[UnitLoad, ...]
    uses: tuple[Use, ...]
    num_micro_batches: int
    backward_ratio: float
    weights_cache_nbytes: float
    device_cache_nbytes: float | None
    ring_nbytes: float
    num_gradient_buffers: int = 2
    reads_ahead: bool = True
    is_deferred: bool = True
    updates_on_device: bool = False
    # The tier of saved inputs. Where the host takes the first of them before NVMe, the bytes that
    # it takes from weights that are only kept.
    saved_on: str = "device"
    inputs_nbytes: int | None = None
    num_fibers: int = 1
    tile_micro_batches: int = 1
    keeps_experts: bool = False
    # The share of the units' bytes that is updated in the backward, with updates in both passes.
    early_share: float = 0.0
    # Stored bytes go to a device that has no space for their decoded weights yet.
    stages_ahead: bool = False
    takes_norms: bool = True  # Of all gradients, for the step to clip them.

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device computes in host memory, as a CPU does."""
        return self.device_cache_nbytes is None

    def narrowed_nbytes(self, load: UnitLoad) -> int:
        """Returns how many bytes fewer a unit's gradients are where they stay in the dtype of the
        weights (streaming/gradients/leaving.py)."""
        is_narrow = (
            not self.shares_host_memory
            and not self.updates_on_device
            and self.num_micro_batches == 1
            and (load.gradients, load.full_master) == ("host", None)
            and load.sharded is NOT_SHARDED
        )
        return load.gradient_nbytes - load.leaving_nbytes if is_narrow else 0

    @property
    def defers(self) -> bool:
        """Whether updates follow the step. Over ranks a thread makes them, which does so only for
        assembled weights and for state that the host can address (design/0003)."""
        shared = [unit for unit in self.units if unit.sharded is not NOT_SHARDED]
        if not shared or not self.is_deferred:
            return self.is_deferred
        return (
            self.reads_ahead
            and (self.shares_host_memory or not self.updates_on_device)
            and all(unit.sharded.is_gathered for unit in shared)
            and (self.shares_host_memory or not any(unit.changes_on_device for unit in shared))
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of the links and processors of a node, all devices together: bytes and FLOPs per
    second.

    `nvme_mixed` is the sum of both directions if equal amounts are read and written. `update`
    counts every byte that the optimizer's pass reads or writes. `host` counts the bytes of summed
    gradients. `norm` is that of one thread that computes norms, of which there are `norm_threads`
    beside a device and one on the host. `hold` counts the bytes of weights that the engine maps
    under a computation on the host. `device_update` is `update` on the device. `decode` counts
    the bytes of weights that are made of stored ones where they are computed with, and `memory`
    those that products read there.

    `checkpoint_read` is the rate of the drives that hold the checkpoint of a frozen base; at most
    that of all drives.

    With ranks, `peers` is the rate at which a rank's device receives from the other devices, and
    `sockets` that at which its host receives, and `network` this rank's part of the rate at which a
    node receives from other nodes. Sending takes as long.
    """

    flops: float
    update: float
    host: float
    norm: float = float("inf")
    norm_threads: float = 1.0
    hold: float = float("inf")
    device_update: float = float("inf")
    decode: float = float("inf")
    memory: float = float("inf")
    nvme_read: float = float("inf")
    nvme_write: float = float("inf")
    nvme_mixed: float = float("inf")
    checkpoint_read: float = float("inf")
    h2d: float = float("inf")
    d2h: float = float("inf")
    peers: float = float("inf")
    sockets: float = float("inf")
    network: float = float("inf")

    def product_s(self, use: Use, forwards: float) -> float:
        """Returns the time of the products of a use, `forwards` times its forward. Those of experts
        with few rows each take as long as the device reads their weights."""
        read_s = use.expert_nbytes / self.memory - use.expert_flops / self.flops
        return use.forward_flops * forwards / self.flops + forwards * max(read_s, 0.0)

    def norms_s(self, nbytes: float) -> float:
        """Returns the time of the norms of gradients on all threads beside a device."""
        return nbytes / min(self.norm * self.norm_threads, self.host)

    def last_norm_s(self, nbytes: float, largest_nbytes: float) -> float:
        """Returns the time from `norms_s` of gradients until the largest of them is measured, on
        one thread."""
        return max(0.0, largest_nbytes / self.norm - self.norms_s(nbytes))

    def nvme_s(self, read_nbytes: float, write_nbytes: float) -> float:
        """Returns the least time to read and write these bytes, in any useful interleaving."""
        alone_s = read_nbytes / self.nvme_read + write_nbytes / self.nvme_write
        both_nbytes = min(read_nbytes, write_nbytes)
        mixed_s = (
            2 * both_nbytes / self.nvme_mixed
            + (read_nbytes - both_nbytes) / self.nvme_read
            + (write_nbytes - both_nbytes) / self.nvme_write
        )
        least_s = max(read_nbytes / self.nvme_read, write_nbytes / self.nvme_write)
        return max(min(alone_s, mixed_s), least_s)


def drive_rates(
    read: float, write: float, mixed: float | None, num_sharing: int = 1
) -> dict[str, float]:
    """Returns the drives' part of `Rates` for one of `num_sharing` ranks, from decimal GB/s.
    Without a rate for both directions at the same time, reads and writes alternate."""
    read, write = read * 1e9 / num_sharing, write * 1e9 / num_sharing
    mixed = 2 / (1 / read + 1 / write) if mixed is None else mixed * 1e9 / num_sharing
    return {"nvme_read": read, "nvme_write": write, "nvme_mixed": mixed}
