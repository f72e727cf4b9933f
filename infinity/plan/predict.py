"""From a configuration, a model and a machine to one predicted step. Pure.

Budgets and placement are the engine's own functions, asked with the machine's sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.config import SwapConfig
from infinity.engine.durability import wanted_spares
from infinity.errors import CapacityError
from infinity.plan.hardware import Hardware
from infinity.plan.model import Model
from infinity.plan.tiles import largest_nbytes, with_tiles
from infinity.schedule.order import Use
from infinity.schedule.step import WRITE, Job, Prediction, UnitLoad, predict
from infinity.sizes import format_nbytes
from infinity.state.budgets import Budgets
from infinity.state.placement import STATE_PIECES, Placement, resting_nbytes
from infinity.state.store import rewritten_nbytes
from infinity.state.tiles import fit
from infinity.state.units import Piece, Unit

_CHECKPOINT_ITEM_NBYTES = 2
# Of a device's memory, what the engine takes when the file leaves it to it.
_DEVICE_PERCENT = 50.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one micro-batch on all devices together, and how many make a step."""

    num_tokens: int
    sequence_length: int
    num_micro_batches: int = 1
    recomputes: bool = True  # Activations, in the backward.

    @property
    def tokens_per_step(self) -> int:
        return self.num_tokens * self.num_micro_batches


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would do. `placed_nbytes` is by kind and tier; `spare_nbytes` on NVMe are for what
    commits and linked checkpoints keep, in `num_spares` generations."""

    model: Model
    hardware: Hardware
    batch: Batch
    placed_nbytes: Mapping[str, Mapping[str, int]]
    host_nbytes: int
    working_nbytes: int
    num_spares: int
    spare_nbytes: int
    is_tight: bool
    job: Job
    step: Prediction
    warnings: tuple[str, ...]
    parked: tuple[str, int] | None  # Tier and bytes of inputs of blocks that wait off the device.

    @property
    def tokens_per_s(self) -> float:
        return self.batch.tokens_per_step / self.step.step_s

    @property
    def flops_per_s(self) -> float:
        """Of the model's own arithmetic, recomputation not counted: 3 times the forward."""
        forward = sum(use.forward_flops for use in self.job.uses)
        return 3 * forward * self.batch.num_micro_batches / self.step.step_s

    @property
    def endurance_steps(self) -> float | None:
        """Steps until the drives have been written as often as they are made for."""
        nvme = self.hardware.nvme
        written = self.step.moved_nbytes.get(WRITE, 0)
        if nvme is None or nvme.endurance is None or not written:
            return None
        return nvme.endurance / written


def forecast(config: SwapConfig, model: Model, hardware: Hardware, batch: Batch) -> Forecast:
    """Raises CapacityError, with the key to change, for what the machine cannot hold."""
    window_nbytes = _device_nbytes(config, hardware)
    whole = model
    model, budgets = _fitted(config, model, hardware, window_nbytes)
    placement = budgets.placement
    num_spares = wanted_spares(config, is_linked=True)
    spare_nbytes = num_spares * _rewritten_nbytes(model, placement)
    _refuse_full_tiers(model, hardware, budgets, spare_nbytes)
    parked = _parked(config, model, batch)
    job = _job(config, model, hardware, batch, budgets, window_nbytes, parked)
    return Forecast(
        model=model,
        hardware=hardware,
        batch=batch,
        placed_nbytes=_by_kind(model, placement),
        host_nbytes=budgets.host_nbytes,
        working_nbytes=budgets.working_nbytes,
        num_spares=num_spares,
        spare_nbytes=spare_nbytes,
        is_tight=budgets.is_tight,
        job=job,
        step=predict(job, hardware.rates()),
        warnings=(
            *_said_of_tiles(whole, model),
            *_warnings(config, model, hardware, batch, window_nbytes),
            *_said_of_parked(parked, hardware, budgets),
        ),
        parked=parked,
    )


def _parked(config: SwapConfig, model: Model, batch: Batch) -> tuple[str, int] | None:
    """The input of every block, for all tokens of a step, in the compute dtype: as the engine parks
    them where micro-batches go layer by layer."""
    tier = config.placement.activations[0]
    if config.schedule.micro_batch is None or tier == "device":
        return None
    blocks = sum(site.attention_width > 0 for site in model.sites)
    return tier, blocks * _input_nbytes(config, model, batch)


def _said_of_parked(
    parked: tuple[str, int] | None, hardware: Hardware, budgets: Budgets
) -> list[str]:
    if parked is None or hardware.shares_host_memory:
        return []
    tier, nbytes = parked
    if tier == "host" and nbytes > budgets.working_nbytes:
        return [
            f"layer inputs take {format_nbytes(nbytes)} of the host, which has "
            f"{format_nbytes(budgets.working_nbytes)} to work in: this batch does not fit; set "
            "placement.activations to nvme, or make the batch smaller"
        ]
    return []


def _input_nbytes(config: SwapConfig, model: Model, batch: Batch) -> int:
    """Of one block, for all tokens of a step."""
    itemsize = 2 if config.precision.compute == "bfloat16" else 4
    return batch.tokens_per_step * model.checkpoint_width * itemsize


def _fitted(
    config: SwapConfig, model: Model, hardware: Hardware, window_nbytes: int | None
) -> tuple[Model, Budgets]:
    """With tiles where the engine would make them."""

    def attempt(limit_nbytes: int | None) -> tuple[Model, Budgets]:
        tiled = with_tiles(model, limit_nbytes)
        return tiled, Budgets(
            config,
            tiled.units,
            held_nbytes=tiled.held_nbytes,
            shares_host_memory=hardware.shares_host_memory,
            device_nbytes=window_nbytes,
            available_host_nbytes=hardware.host.memory,
        )

    def has_room_ahead(found: tuple[Model, Budgets]) -> bool:
        tiled, budgets = found
        return budgets.has_room_ahead(max(unit.weight_nbytes for unit in tiled.units))

    return fit(config.schedule.tile, attempt, has_room_ahead, largest_nbytes(model))


def _device_nbytes(config: SwapConfig, hardware: Hardware) -> int | None:
    """What one device may hold of the model; None where it computes on host memory."""
    capacity = config.tiers.device.capacity
    if hardware.device.memory is None:
        return capacity.nbytes
    return capacity.resolve(hardware.device.memory, auto_percent=_DEVICE_PERCENT)


def _refuse_full_tiers(
    model: Model, hardware: Hardware, budgets: Budgets, spare_nbytes: int
) -> None:
    """What the engine finds out later: host memory that is not there, and full drives."""
    if budgets.host_nbytes > hardware.host.memory:
        raise CapacityError(
            "host", needed_nbytes=budgets.host_nbytes, available_nbytes=hardware.host.memory,
            key="tiers.host.capacity", detail="the arena is larger than the memory",
        )  # fmt: skip
    placed = budgets.placement.placed_nbytes
    drives_nbytes = 0 if hardware.nvme is None else hardware.nvme.capacity
    if placed["nvme"] + spare_nbytes > drives_nbytes:
        spares = f" with {format_nbytes(spare_nbytes)} of spare generations" if spare_nbytes else ""
        raise CapacityError(
            "nvme", needed_nbytes=placed["nvme"] + spare_nbytes, available_nbytes=drives_nbytes,
            key="tiers.nvme" + (", checkpoint.keep or checkpoint.durability" if spares else ""),
            detail=f"{model.name} does not fit the drives{spares}",
        )  # fmt: skip


def _rewritten_nbytes(model: Model, placement: Placement) -> int:
    """Of what rests on NVMe: what steps rewrite and commits keep, one generation."""
    return sum(
        rewritten_nbytes(model.units[index], piece) or 0
        for (index, piece), tier in placement.tiers.items()
        if tier == "nvme"
    )


def _by_kind(model: Model, placement: Placement) -> dict[str, dict[str, int]]:
    placed: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (index, piece), tier in placement.tiers.items():
        placed[piece.kind][tier] += resting_nbytes(model.units[index], piece)
    return {kind: dict(tiers) for kind, tiers in placed.items()}


def _said_of_tiles(whole: Model, model: Model) -> list[str]:
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
    config: SwapConfig, model: Model, hardware: Hardware, batch: Batch, window_nbytes: int | None
) -> list[str]:
    said = []
    device = hardware.device
    if device.count > 1:
        said.append(
            f"units are taken to be cut over {device.count} devices; the engine of this version "
            "uses one"
        )
    is_parked = config.schedule.micro_batch and "device" not in config.placement.activations
    if device.memory is not None and batch.recomputes and not is_parked:
        blocks = sum(site.attention_width > 0 for site in model.sites)
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
    model: Model,
    hardware: Hardware,
    batch: Batch,
    budgets: Budgets,
    window_nbytes: int | None,
    parked: tuple[str, int] | None,
) -> Job:
    # Several micro-batches through one block are summed on the device, in float32.
    micro_batch = config.schedule.micro_batch
    num_strands = 1
    if micro_batch is not None:
        num_strands = max(1, -(-batch.num_tokens // (micro_batch * batch.sequence_length)))
    is_summed = num_strands > 1
    units = tuple(_load(unit, budgets.placement, is_summed) for unit in model.units)
    # With updates at the step the ring is there for it alone. A tight pool keeps nothing.
    is_deferred = config.schedule.updates == "deferred"
    cache_nbytes = budgets.working_nbytes - (budgets.ring_nbytes if is_deferred else 0)
    if budgets.is_tight:
        cache_nbytes = 0
    device_cache_nbytes = None
    if not hardware.shares_host_memory:
        assert window_nbytes is not None
        device_cache_nbytes = window_nbytes - budgets.placement.placed_nbytes["device"]
    parked_nbytes = _input_nbytes(config, model, batch) if parked is not None else 0
    return Job(
        units=units,
        uses=tuple(
            Use(
                site.units,
                site.forward_flops(batch.num_tokens, batch.sequence_length),
                parked_nbytes if site.attention_width else 0,
                block,
            )
            for site, block in zip(model.sites, _blocks(model), strict=True)
        ),
        parked_on="device" if parked is None else parked[0],
        num_micro_batches=batch.num_micro_batches,
        num_strands=num_strands,
        num_inside=config.schedule.tile_strands,
        backward_ratio=3.0 if batch.recomputes else 2.0,
        weights_cache_nbytes=cache_nbytes,
        device_cache_nbytes=device_cache_nbytes,
        ring_nbytes=max(budgets.ring_nbytes, 1),
        reads_ahead=budgets.window_nbytes > 0,
        is_deferred=is_deferred,
        # Moments of eight bits stay with the host.
        updates_on_device=config.schedule.update_on == "device"
        and config.precision.moments != "8bit",
    )


def _blocks(model: Model) -> list[int | None]:
    """Of every site, which block it belongs to."""
    numbers: list[int | None] = []
    for index, site in enumerate(model.sites):
        is_tile = site.is_tile and bool(numbers)
        numbers.append(numbers[-1] if is_tile else index if site.attention_width else None)
    return numbers


def updated_nbytes(unit: Unit) -> int:
    """What the optimizer's pass over a unit reads and writes."""
    if not unit.state_numel:
        return 0
    moments_nbytes = unit.nbytes(Piece.EXP_AVG) + unit.nbytes(Piece.EXP_AVG_SQ)
    changed_nbytes = unit.trainable_nbytes + moments_nbytes + unit.nbytes(Piece.MASTER)
    return 2 * changed_nbytes + unit.nbytes(Piece.GRADIENTS)


def _load(unit: Unit, placement: Placement, is_summed: bool) -> UnitLoad:
    read: defaultdict[str, int] = defaultdict(int)
    written: defaultdict[str, int] = defaultdict(int)
    for piece in STATE_PIECES:
        nbytes = unit.nbytes(piece)
        if nbytes:
            tier = placement.tier(unit, piece)
            read[tier] += nbytes
            if piece is not Piece.GRADIENTS:
                written[tier] += nbytes
    gradient_nbytes = unit.nbytes(Piece.GRADIENTS)
    return UnitLoad(
        name=unit.name,
        weights=placement.tier(unit, Piece.PARAMETERS),
        weight_nbytes=unit.weight_nbytes,
        written_nbytes=unit.trainable_nbytes,
        state_read_nbytes={tier: n for tier, n in read.items() if tier != "host"},
        state_write_nbytes={tier: n for tier, n in written.items() if tier != "host"},
        update_nbytes=updated_nbytes(unit),
        gradients=placement.tier(unit, Piece.GRADIENTS) if gradient_nbytes else "host",
        gradient_nbytes=gradient_nbytes,
        leaving_nbytes=gradient_nbytes if is_summed else unit.trainable_nbytes,
    )
