"""The load of one rank for units whose state is shared, for the simulated step. Pure.

docs/RANKS.md describes the transfers; docs/design/0005 and 0008 give the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from infinity.config import SwapConfig
from infinity.simulate.job import Batch, load_of, num_fibers_of
from infinity.simulate.spec import ShardedLoad, UnitLoad
from infinity.state.partition import Partition, Shard
from infinity.state.placement import StatePlacement
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, TensorSpec, Unit


def rank_loads(
    config: SwapConfig,
    partition: Partition,
    placement: StatePlacement,
    batch: Batch,
    *,
    is_collective: bool,
    num_nodes: int = 1,
) -> Iterator[UnitLoad]:
    """Returns one load for each full unit. `placement` is that of `partition.units`;
    `is_collective`: the devices of ranks exchange data directly. Ranks are divided evenly over
    `num_nodes`, in their order."""
    per_node = partition.count // num_nodes
    own_node = partition.rank // per_node
    is_summed = num_fibers_of(config, batch) > 1
    reduced = None if config.distributed.reduce_dtype == "auto" else torch.bfloat16
    for full, of_ranks in zip(partition.full_units, partition.shards, strict=True):
        own = of_ranks[partition.rank]
        load = replace(load_of(own.unit, placement, is_summed), largest_nbytes=0)
        stage, sums = partition.stage, None
        # Frozen weights in their files are gathered by devices; else each rank reads all of them.
        is_gathered = stage == 3 and (full.stored is None or is_collective)
        if not is_gathered:
            load = _with_all_weights(load, partition, full, placement)
        if stage == 1 and full.state_numel:
            sums = placement.tier(full, StateKind.GRADIENTS)
        are_wide = is_summed or (stage == 1 and batch.num_micro_batches > 1)
        is_shared = is_gathered or full.stored is None
        sources = partition.sources(full.index) if is_shared else ()
        part_nbytes = {shard.rank: _served_nbytes(partition, shard) for shard in sources}
        own_nbytes = part_nbytes.get(partition.rank, 0)
        are_weights_between_devices = is_collective and (is_gathered or load.weights == "device")
        remote = [shard.rank for shard in of_ranks if shard.rank // per_node != own_node]
        remote_nbytes = sum(part_nbytes.get(rank, 0) for rank in remote)
        sent_nbytes = [_gradient_nbytes(shard, reduced, are_wide) for shard in of_ranks]
        # In stages 2 and 3 the bytes that leave a device are those sent; in other stages, those
        # received.
        leaves_as = reduced if stage > 1 and not is_summed else None
        yield replace(
            load,
            name=full.name,
            leaving_nbytes=sum(
                spec.numel * _itemsize(spec, leaves_as, is_summed) for spec in full.trainable()
            ),
            sharded=ShardedLoad(
                count=partition.count,
                full_nbytes=full.weight_nbytes if full.stored is None else full.stored.nbytes,
                is_gathered=is_gathered,
                are_weights_between_devices=are_weights_between_devices,
                are_gradients_between_devices=is_collective and sums in (None, "device"),
                received_nbytes=sum(part_nbytes.values()) - own_nbytes,
                served_nbytes=(len(sources) - 1) * own_nbytes,
                sent_nbytes=sum(sent_nbytes) - sent_nbytes[partition.rank],
                sums=sums,
                sums_nbytes=full.state_numel * STATE_ITEM_NBYTES if sums else 0,
                # An all-gather passes a node's border once, for all ranks of the node. A gradient
                # goes from each rank to each owner.
                network_received_nbytes=remote_nbytes // per_node
                if are_weights_between_devices
                else remote_nbytes,
                network_sent_nbytes=sum(sent_nbytes[rank] for rank in remote),
            ),
        )


def _with_all_weights(
    load: UnitLoad, partition: Partition, full: Unit, placement: StatePlacement
) -> UnitLoad:
    """Returns the load of a rank that has all weights of the unit, and updates its part."""
    rests_on, own = placement.tier(full, StateKind.PARAMETERS), partition.own_part(full.index)
    written_nbytes = full.trainable_nbytes if load.update_nbytes else 0
    return replace(
        load,
        weights=rests_on,
        weight_nbytes=full.nbytes(StateKind.PARAMETERS),
        written_nbytes=len(own) if rests_on == "device" else written_nbytes,
    )


def _served_nbytes(partition: Partition, shard: Shard) -> int:
    """Returns the bytes of a shard's weights that the other ranks receive."""
    return sum(part.nbytes for part in partition.served(shard))


def _gradient_nbytes(shard: Shard, reduced: torch.dtype | None, are_wide: bool) -> int:
    """Returns the bytes of a shard's gradients, as they are sent."""
    return sum(
        (share.stop - share.start) * _itemsize(share.full, reduced, are_wide)
        for share in shard.shares
    )


def _itemsize(spec: TensorSpec, reduced: torch.dtype | None, is_wide: bool) -> int:
    if reduced is not None:
        return reduced.itemsize
    return STATE_ITEM_NBYTES if is_wide else spec.facts.dtype.itemsize
