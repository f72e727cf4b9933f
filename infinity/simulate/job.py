"""Derives the input of the simulated step from a configuration, units and their placement. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.config import SwapConfig
from infinity.config.schema.engine import ReduceDtype
from infinity.config.schema.tiers import NvmeTier
from infinity.simulate.order import Use
from infinity.simulate.spec import ShardedLoad, StepSpec, UnitLoad
from infinity.state.budgets import Budgets
from infinity.state.partition import Partition, Shard
from infinity.state.placement import STATE_KINDS, StatePlacement, updated_nbytes
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, TensorSpec, Unit
from infinity.streaming.gradients.resting_norms import may_have_rows_of_zeros, most_picked_nbytes


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one micro-batch on all devices together, and the micro-batches of a step; with
    ranks, those of one rank."""

    num_tokens: int
    sequence_length: int
    num_micro_batches: int = 1
    recomputes: bool = True  # Whether the backward recomputes activations.
    has_backward: bool = True  # Else a step is one sweep over the weights, as `score` makes it.
    mlp_tokens: int | None = None  # That an MLP computes at a time.

    def slices_mlps(self, num_tokens: int) -> bool:
        """Whether an MLP computes so many tokens in slices, whose forward the backward repeats."""
        return self.mlp_tokens is not None and self.mlp_tokens < num_tokens

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches, of one rank."""
        return self.num_tokens * self.num_micro_batches

    @property
    def name(self) -> str:
        """The word for what passes the weights: a "step" has a backward, a "sweep" none."""
        return "step" if self.has_backward else "sweep"


_PATCH = 16  # Pixels of a side, of the pipelines that train.
_FRAMES_OF_A_LATENT = 4  # After the first.

# Of `infinity score`, where each sequence of a sweep is a suspended thread.
MOST_SEQUENCES = 256


def most_tokens(*, on_host: bool) -> int:
    """Returns the tokens of a sweep without gradients by default, for a device that computes on the
    host's memory or on its own."""
    return 1 << 15 if on_host else 1 << 17


# Nothing is known of a program of the user's own.
UNKNOWN_BATCH = Batch(0, 1)


def batch_of(config: SwapConfig, num_texts: int | None = None) -> Batch:
    """Returns the batch of a file with `[train]` and `[data]`, that of all adapters together, else
    UNKNOWN_BATCH. `num_texts` of a record of "embed" are its own calls of the model; None: as many
    as its method has at least."""
    train, data = config.train, config.data
    if train is None or data is None:
        return UNKNOWN_BATCH
    num_micro_batches = train.gradient_accumulation_steps * max(len(config.adapters), 1)
    num_sequences = train.facts.num_sequences
    if train.embed is not None:
        num_micro_batches, num_sequences = num_micro_batches * (num_texts or num_sequences), 1
    length = data.sequence_length
    if train.diffusion is not None:  # A caption, and an image or video in patches of 2 x 2 latents.
        num_frames = (train.diffusion.frames - 1) // _FRAMES_OF_A_LATENT + 1
        length += num_frames * (train.diffusion.resolution // _PATCH) ** 2
    num_tokens = train.batch_size * num_sequences * length
    if config.every_adapter and config.schedule.micro_batch is not None:
        num_tokens *= num_micro_batches  # All batches of a step pass a block together.
        num_micro_batches = 1
    return Batch(
        num_tokens,
        length,
        num_micro_batches,
        # In layer-major order a batch passes once, for any number of micro-batches, and is
        # recomputed.
        recomputes=train.activation_checkpointing or config.schedule.micro_batch is not None,
        mlp_tokens=train.mlp_tokens,
    )


def make_job(
    config: SwapConfig,
    budgets: Budgets,
    units: Sequence[Unit],
    uses: Sequence[Use],
    batch: Batch,
    *,
    saved_on: str = "device",
    inputs_nbytes: int | None = None,
    loads: Sequence[UnitLoad] | None = None,
) -> StepSpec:
    """Returns the simulated steps of these units in these budgets, updated on the host. `loads`:
    the load of each unit that ranks share; see `rank_loads`."""
    # With updates at the step, the ring exists only during it. A tight pool keeps nothing.
    is_deferred = config.schedule.updates != "at_step"
    cache_nbytes = budgets.working_nbytes - (budgets.ring_nbytes if is_deferred else 0)
    cache_nbytes -= budgets.decoded_nbytes
    device_cache_nbytes: float | None = budgets.device_window_nbytes
    if device_cache_nbytes is None and not budgets.shares_host_memory:
        device_cache_nbytes = float("inf")
    num_fibers = num_fibers_of(config.schedule.micro_batch, batch)
    return StepSpec(
        units=tuple(loads or _loads(units, uses, budgets.placement, batch, num_fibers > 1)),
        uses=tuple(uses),
        num_micro_batches=batch.num_micro_batches,
        num_fibers=num_fibers,
        tile_micro_batches=config.schedule.tile_micro_batches,
        backward_ratio=(3.0 if batch.recomputes else 2.0) if batch.has_backward else 0.0,
        weights_cache_nbytes=0 if budgets.is_tight else cache_nbytes,
        device_cache_nbytes=device_cache_nbytes,
        ring_nbytes=max(budgets.ring_nbytes, 1),
        reads_ahead=budgets.window_nbytes > 0,
        is_deferred=is_deferred,
        saved_on=saved_on,
        inputs_nbytes=inputs_nbytes,
        stages_ahead=budgets.stages_ahead,
        keeps_experts=config.schedule.micro_batch is not None,
        takes_norms=config.optimizer.max_grad_norm is not None,
    )


def num_fibers_of(micro_batch: int | None, batch: Batch) -> int:
    """Returns the number of micro-batches that pass block by block. With several, gradients are
    summed on the device in float32."""
    if micro_batch is None:
        return 1
    return max(1, -(-batch.num_tokens // (micro_batch * batch.sequence_length)))


def _loads(
    units: Sequence[Unit],
    uses: Sequence[Use],
    placement: StatePlacement,
    batch: Batch,
    is_summed: bool,
) -> Iterator[UnitLoad]:
    multiplied = {index for use in uses if use.forward_flops for index in use.units}
    for unit in units:
        load = load_of(unit, placement, is_summed)
        if batch.num_tokens and unit.index not in multiplied:
            load = replace(load, looked_up_nbytes=_looked_up_nbytes(unit, batch.tokens_per_step))
        yield load


def _looked_up_nbytes(unit: Unit, num_tokens: int) -> int | None:
    """Returns the bytes of the rows of an embedding's gradient that tokens of a step look up at the
    most; None where all of the gradient is measured."""
    tensors = list(unit.trainable())
    if len(tensors) != 1 or not may_have_rows_of_zeros(tensors[0]):
        return None
    _, num_columns = tensors[0].facts.shape
    picked_nbytes = num_tokens * num_columns * STATE_ITEM_NBYTES
    return picked_nbytes if picked_nbytes <= most_picked_nbytes(tensors[0]) else None


def load_of(unit: Unit, placement: StatePlacement, is_summed: bool) -> UnitLoad:
    """Returns the bytes of a unit's weights and state that a step moves, and the tiers."""
    read: defaultdict[str, int] = defaultdict(int)
    written: defaultdict[str, int] = defaultdict(int)
    for kind in STATE_KINDS:
        nbytes = unit.nbytes(kind)
        if nbytes:
            tier = placement.tier(unit, kind)
            read[tier] += nbytes
            if kind is not StateKind.GRADIENTS:
                written[tier] += nbytes
    gradient_nbytes = unit.nbytes(StateKind.GRADIENTS)
    return UnitLoad(
        name=unit.name,
        weights=_tier_of_weights(unit, placement),
        weight_nbytes=unit.weight_nbytes if unit.stored is None else unit.stored.nbytes,
        written_nbytes=unit.trainable_nbytes,
        state_read_nbytes={tier: n for tier, n in read.items() if tier != "host"},
        state_write_nbytes={tier: n for tier, n in written.items() if tier != "host"},
        update_nbytes=touched_nbytes(unit),
        gradients=placement.tier(unit, StateKind.GRADIENTS) if gradient_nbytes else "host",
        gradient_nbytes=gradient_nbytes,
        leaving_nbytes=gradient_nbytes if is_summed else unit.trainable_nbytes,
        largest_nbytes=max((STATE_ITEM_NBYTES * t.numel for t in unit.trainable()), default=0),
        decoded_nbytes=0 if unit.stored is None else unit.weight_nbytes,
        full_master=placement.tier(unit, StateKind.MASTER) if unit.has_full_master else None,
    )


def _tier_of_weights(unit: Unit, placement: StatePlacement) -> str:
    tier = placement.tiers.get((unit.index, StateKind.PARAMETERS), "host")
    return "checkpoint" if unit.stored is not None and tier == "nvme" else tier


def touched_nbytes(unit: Unit) -> int:
    """Returns the bytes that the optimizer's pass over a unit reads, and those that it writes."""
    if not unit.state_numel:
        return 0
    return 2 * updated_nbytes(unit) - unit.nbytes(StateKind.GRADIENTS)  # These are not written.


def tuned_gb_per_s(tiers: Sequence[NvmeTier]) -> tuple[float, float, float | None] | None:
    """Returns the rates of reading, writing and both at the same time, over all paths together, in
    decimal GB/s, as `infinity tune` wrote them; None if it did not."""
    if not all(tier.read_gb_per_s and tier.write_gb_per_s for tier in tiers):
        return None
    read, write, mixed = (
        [getattr(tier, f"{name}_gb_per_s") for tier in tiers] for name in ("read", "write", "mixed")
    )
    return sum(read), sum(write), sum(mixed) if all(mixed) else None


def rank_loads(
    partition: Partition,
    placement: StatePlacement,
    batch: Batch,
    *,
    reduce_dtype: ReduceDtype = "auto",
    micro_batch: int | None = None,
    is_collective: bool,
    num_nodes: int = 1,
) -> Iterator[UnitLoad]:
    """Returns one load for each full unit. `placement` is that of `partition.units`;
    `is_collective`: the devices of ranks exchange data directly. Ranks are divided evenly over
    `num_nodes`, in their order."""
    per_node = partition.count // num_nodes
    own_node = partition.rank // per_node
    is_summed = num_fibers_of(micro_batch, batch) > 1
    reduced = None if reduce_dtype == "auto" else torch.bfloat16
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
        # Of the weights of each shard, what the other ranks receive.
        part_nbytes = {
            shard.rank: sum(part.nbytes for part in partition.served(shard)) for shard in sources
        }
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
            decoded_nbytes=0 if full.stored is None else full.weight_nbytes,
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
    rests_on, own = _tier_of_weights(full, placement), partition.own_part(full.index)
    written_nbytes = full.trainable_nbytes if load.update_nbytes else 0
    return replace(
        load,
        weights=rests_on,
        weight_nbytes=full.nbytes(StateKind.PARAMETERS),
        written_nbytes=len(own) if rests_on == "device" else written_nbytes,
    )


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
