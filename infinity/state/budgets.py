"""Bytes that each tier may take: from a configuration and a machine's sizes to a placement.

Pure: the sizes of the machine are arguments, so that a forecast can ask about another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from infinity.config import SwapConfig
from infinity.config.schema.tiers import Placement
from infinity.config.values import PLACED_KINDS
from infinity.errors import CapacityError, ConfigError
from infinity.sizes import MIB, align_up, format_nbytes
from infinity.state.placement import (
    StatePlacement,
    least_chunk_nbytes,
    place,
    plan_staging_slots,
    resting_nbytes,
    smallest_working_nbytes,
    staging_nbytes,
)
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, Unit
from infinity.tiers.ranges import rounded_nbytes

# The most memory through which gradients of a device are added to sums on the host.
STAGED_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of each tier, and the tier of every state kind of every unit.

    `device_nbytes`: the budget of the device; None: unlimited. `held_nbytes`: the most weight bytes
    that nested modules hold at once. `host_nbytes`: the arena; `reduce_buffer_nbytes` of the host
    budget are outside the arena, for gradients of other ranks, which go to NVMe when that buffer is
    full and `reduce_buffer_spills`. `working_nbytes`: the part of the arena in which no state
    rests. `is_tight`: so little is free that nothing may be kept for later. `window_nbytes`: host
    memory for weights that are read ahead. `inputs_nbytes`: host memory that layer inputs take from
    weights that are only kept, before they go to NVMe. `ring_nbytes`: all staging slots of the
    optimizer, `num_staging_slots` slots for chunks of `chunk_nbytes`. `needed_for_sums_nbytes`: the
    working memory of `infinity.forward_backward`; `least_for_sums_nbytes`: the smallest host budget
    that has it. `decoded_from_nbytes`: the stored bytes of the largest unit that is decoded when it
    is attached; `largest_decoded_nbytes`: the weights of one unit that are decoded on a device with
    memory of its own. `decoded_nbytes`: host memory for decoded weights alone; 0 in a tight pool.
    `staged_nbytes`: device memory for the stored bytes of the next unit, which come while one is
    decoded, or computed with where there is no space for two decoded ones; 0 if there is none.
    """

    shares_host_memory: bool
    device_nbytes: int | None
    held_nbytes: int
    host_nbytes: int
    reduce_buffer_nbytes: int
    reduce_buffer_spills: bool
    placement: StatePlacement
    working_nbytes: int
    is_tight: bool
    window_nbytes: int
    inputs_nbytes: int
    chunk_nbytes: int
    num_staging_slots: int
    ring_nbytes: int
    needed_for_sums_nbytes: int
    least_for_sums_nbytes: int
    decoded_from_nbytes: int
    largest_decoded_nbytes: int
    decoded_nbytes: int
    staged_nbytes: int

    @property
    def device_window_nbytes(self) -> int | None:
        """Device memory for weights that rest elsewhere; None: unlimited."""
        sizes = MachineSizes(self.shares_host_memory, self.device_nbytes, 0)
        window_nbytes = sizes.device_window_nbytes(self.placement)
        stored_nbytes = self.decoded_from_nbytes + self.staged_nbytes
        return None if window_nbytes is None else window_nbytes - stored_nbytes

    @property
    def stages_ahead(self) -> bool:
        """Whether stored bytes come to the device before there is space for their weights."""
        return self.staged_nbytes > 0 and not self.has_space_ahead(self.largest_decoded_nbytes)

    def has_space_ahead(self, next_nbytes: int) -> bool:
        """Returns whether `next_nbytes` of weights can be fetched beside those in use."""
        window_nbytes = self.device_window_nbytes
        fits = window_nbytes is None or self.held_nbytes + next_nbytes <= window_nbytes
        return fits and not self.is_tight


@dataclass(frozen=True, slots=True)
class MachineSizes:
    """The memory of a machine for one process. `device_nbytes`: None: unlimited.
    `available_host_nbytes`: free host memory, of which `tiers.host.capacity` may be a share."""

    shares_host_memory: bool
    device_nbytes: int | None
    available_host_nbytes: int

    def device_window_nbytes(self, placement: StatePlacement) -> int | None:
        """Device memory for weights that rest elsewhere; None: unlimited."""
        if self.shares_host_memory or self.device_nbytes is None:
            return None
        return self.device_nbytes - placement.placed_nbytes["device"]


@dataclass(frozen=True, slots=True)
class WeightsInUse:
    """The most weights that nested modules use at once.

    `held_nbytes`: as the device computes with them. `host_held_nbytes`: in host memory, where
    frozen weights may be quantised, or quantised and decoded, of which `decoded_nbytes` are decoded
    there. `largest_decoded_nbytes`: decoded weights of one unit on a device with memory of its own.
    """

    held_nbytes: int
    host_held_nbytes: int
    decoded_nbytes: int = 0
    largest_decoded_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Needs of ranks. `gathered_nbytes`: the weights of the largest unit, gathered from shards;
    `serving_nbytes`: memory to serve other ranks from, lent once; `received_nbytes`: the most
    gradients that other ranks send during a backward; `summed_nbytes`: sums of gradients before
    they are sent, if there are micro-batches; `num_sharing`: ranks that share the host budget
    (errors name all of it)."""

    gathered_nbytes: int = 0
    serving_nbytes: int = 0
    received_nbytes: int = 0
    summed_nbytes: int = 0
    num_sharing: int = 1


_ONE_RANK = RankSizes()


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `compute_budgets`, and `preferences`: the tiers of each kind, in order."""

    config: SwapConfig
    units: Sequence[Unit]
    preferences: Mapping[str, tuple[str, ...]]
    in_use: WeightsInUse
    machine: MachineSizes
    ranks: RankSizes

    @property
    def decoded_from_nbytes(self) -> int:
        """The stored bytes of one unit, which are on the device while they are decoded there."""
        return max(
            (unit.stored.nbytes for unit in self.units if unit.stored is not None), default=0
        )

    @property
    def spills(self) -> bool:
        """Whether gradients of other ranks can wait on NVMe."""
        has_nvme = any("nvme" in order for order in self.preferences.values())
        return self.ranks.received_nbytes > 0 and has_nvme

    @property
    def least_nbytes(self) -> tuple[int, int]:
        """The least working memory: for a backward of each micro-batch, and for sums of several."""
        alone, with_sums = (
            self.ranks.serving_nbytes
            + smallest_working_nbytes(
                self.units,
                self.preferences,
                held_nbytes=self.in_use.host_held_nbytes,
                chunk_nbytes=self.config.schedule.update_chunk,
                staged_nbytes=_staged_nbytes(self),
                gathered_nbytes=self.ranks.gathered_nbytes,
                summed_nbytes=summed_nbytes,
            )
            for summed_nbytes in (0, self.ranks.summed_nbytes)
        )
        return alone, with_sums


def weights_in_use(
    units: Sequence[Unit], most: Callable[[Sequence[int]], int], *, shares_host_memory: bool
) -> WeightsInUse:
    """Returns the weights that nested modules use at once. `most(nbytes_of_unit)` returns the most
    bytes of nested modules.

    Stored weights are decoded into a second block, and their own block may go. In a pool that keeps
    nothing, blocks lie like a stack: the space of an outer unit's stored bytes is below its decoded
    block, where a larger block of an inner unit does not fit. So both count, for every unit.
    """
    attached = [rounded_nbytes(unit.weight_nbytes) for unit in units]
    held_nbytes = most(attached)
    if all(unit.stored is None for unit in units):
        return WeightsInUse(held_nbytes, held_nbytes)
    resting = [resting_nbytes(unit, StateKind.PARAMETERS) for unit in units]
    is_stored = [unit.stored is not None for unit in units]
    if not shares_host_memory:
        largest = max(a for a, s in zip(attached, is_stored, strict=True) if s)
        return WeightsInUse(held_nbytes, most(resting), largest_decoded_nbytes=largest)
    decoded = [a if s else 0 for a, s in zip(attached, is_stored, strict=True)]
    both = [a + r if s else a for a, r, s in zip(attached, resting, is_stored, strict=True)]
    return WeightsInUse(held_nbytes, most(both), decoded_nbytes=most(decoded))


def compute_budgets(
    config: SwapConfig,
    units: Sequence[Unit],
    in_use: WeightsInUse,
    machine: MachineSizes,
    ranks: RankSizes = _ONE_RANK,
) -> Budgets:
    """Divides the tiers of a machine among the state of `units` and the memory to work in.

    Raises ConfigError for a tier that is not configured, CapacityError for too small a budget.
    """
    request = _Request(
        config,
        units,
        _preferences(config.placement, has_nvme=bool(config.tiers.nvme)),
        in_use,
        machine,
        ranks,
    )
    alone, with_sums = request.least_nbytes
    smallest = alone if config.schedule.micro_batch is None else with_sums
    comfortable = _comfortable_nbytes(request, alone) + smallest - alone
    asked_nbytes = _asked_host_nbytes(
        request, comfortable + ranks.received_nbytes, machine.available_host_nbytes
    )
    resting = _only_on_host_nbytes(request)
    least_for_sums = resting + with_sums + _reduce_buffer_nbytes(request, 0, 0)
    buffer_nbytes = _reduce_buffer_nbytes(request, asked_nbytes, asked_nbytes - smallest - resting)
    host_nbytes = asked_nbytes - buffer_nbytes
    _refuse_small_host(request, host_nbytes, buffer_nbytes, smallest)
    placement = _place(request, host_nbytes, smallest, comfortable)
    _refuse_small_device(request, placement)
    working_nbytes = host_nbytes - placement.placed_nbytes["host"] - ranks.serving_nbytes
    zone_nbytes = rounded_nbytes(in_use.decoded_nbytes) if in_use.decoded_nbytes else 0
    # With less free memory, weights that are kept for later displace those needed now.
    free_nbytes = working_nbytes - (smallest - alone) - zone_nbytes
    is_tight = free_nbytes < 3 * (alone - zone_nbytes)
    chunk_nbytes, num_slots, ring_nbytes = _staging_ring(request, placement, working_nbytes)
    return Budgets(
        shares_host_memory=machine.shares_host_memory,
        device_nbytes=machine.device_nbytes,
        held_nbytes=in_use.held_nbytes,
        host_nbytes=host_nbytes,
        reduce_buffer_nbytes=buffer_nbytes,
        reduce_buffer_spills=request.spills,
        placement=placement,
        working_nbytes=working_nbytes,
        is_tight=is_tight,
        window_nbytes=0 if is_tight else _window_nbytes(request, working_nbytes),
        inputs_nbytes=0 if is_tight else max(0, working_nbytes - ring_nbytes - comfortable),
        chunk_nbytes=chunk_nbytes,
        num_staging_slots=num_slots,
        ring_nbytes=ring_nbytes,
        needed_for_sums_nbytes=with_sums - ranks.serving_nbytes,
        least_for_sums_nbytes=ranks.num_sharing * least_for_sums,
        decoded_from_nbytes=request.decoded_from_nbytes,
        largest_decoded_nbytes=request.in_use.largest_decoded_nbytes,
        decoded_nbytes=0 if is_tight else zone_nbytes,
        staged_nbytes=0 if is_tight else _staged_ahead_nbytes(request, placement),
    )


def _staged_ahead_nbytes(request: _Request, placement: StatePlacement) -> int:
    """Returns the device memory for the stored bytes of the next unit: none where they do not fit,
    nor where its decoded weights fit beside those in use and would not with them."""
    window_nbytes = request.machine.device_window_nbytes(placement)
    stored_nbytes = request.decoded_from_nbytes
    if window_nbytes is None or not request.config.schedule.prefetch:
        return 0
    left_nbytes = window_nbytes - stored_nbytes - request.in_use.held_nbytes
    if left_nbytes >= request.in_use.largest_decoded_nbytes:
        left_nbytes -= request.in_use.largest_decoded_nbytes
    return stored_nbytes if stored_nbytes <= left_nbytes else 0


def _preferences(placement: Placement, *, has_nvme: bool) -> dict[str, tuple[str, ...]]:
    """Returns the tiers of each kind. Raises ConfigError for one that is not configured."""
    preferences = {kind: tuple(getattr(placement, kind)) for kind in PLACED_KINDS}
    if has_nvme:
        return preferences
    others = {name: getattr(placement, name) for name in ("activations", "experts")}
    for kind, order in {**preferences, **others}.items():
        if "nvme" in order:
            raise ConfigError(
                f"placement.{kind} names nvme but there is no [[tiers.nvme]] entry; add "
                "one with a path, or place it on host"
            )
    return preferences


def _staged_nbytes(request: _Request) -> int:
    """Memory through which gradients of the device are added to sums on the host."""
    if request.machine.shares_host_memory or set(request.preferences["gradients"]) == {"device"}:
        return 0
    largest_numel = max(spec.numel for unit in request.units for spec in unit.tensors)
    return rounded_nbytes(min(largest_numel * STATE_ITEM_NBYTES, STAGED_NBYTES))


def _comfortable_nbytes(request: _Request, smallest: int) -> int:
    """Working memory that lets fetches, gradients and updates run ahead of each other."""
    weights_nbytes = max(
        request.in_use.host_held_nbytes,
        *(resting_nbytes(u, StateKind.PARAMETERS) for u in request.units),
    )
    gradients_nbytes = max(resting_nbytes(unit, StateKind.GRADIENTS) for unit in request.units)
    return max(
        3 * smallest,
        3 * weights_nbytes + 2 * gradients_nbytes,
        weights_nbytes + 12 * request.config.schedule.update_chunk,
    )


def _asked_host_nbytes(request: _Request, comfortable: int, available_host_nbytes: int) -> int:
    host, config = request.config.tiers.host, request.config
    asked_nbytes = host.budget_nbytes(available_host_nbytes)
    is_for_inputs = (
        config.schedule.micro_batch is not None
        and "host" in config.placement.activations
        and not request.machine.shares_host_memory
    )
    if not host.capacity.is_auto or is_for_inputs:
        return asked_nbytes
    # More than all state and comfortable working memory would never be touched, unless layer inputs
    # come there, of which nobody knows how many.
    all_nbytes = sum(
        resting_nbytes(unit, state_kind) for unit in request.units for state_kind in StateKind
    )
    return min(asked_nbytes, align_up(all_nbytes + comfortable, 2 * MIB))


def _reduce_buffer_nbytes(request: _Request, asked_nbytes: int, spare_nbytes: int) -> int:
    """Memory in which gradients of other ranks wait.

    If they can wait on NVMe, any size will do; else the least is the gradients of two units.
    """
    if not request.ranks.received_nbytes:
        return 0
    largest_nbytes = max(unit.state_numel for unit in request.units) * STATE_ITEM_NBYTES
    least_nbytes = 0 if request.spills else 2 * largest_nbytes
    chosen = request.config.distributed.reduce_buffer
    if chosen == "auto":
        return max(
            least_nbytes, min(request.ranks.received_nbytes, asked_nbytes // 8, spare_nbytes)
        )
    if chosen < least_nbytes:
        raise CapacityError(
            "host",
            needed_nbytes=least_nbytes,
            available_nbytes=chosen,
            key="distributed.reduce_buffer",
            remedy="raise distributed.reduce_buffer, or place a kind of state on nvme, where "
            "any size will do",
            detail="the gradients of other ranks need space for the largest unit, twice",
        )
    return chosen


def _only_on_host_nbytes(request: _Request) -> int:
    """Bytes of state that may rest on the host only."""
    kinds = [kind for kind in StateKind if set(request.preferences[kind.kind]) == {"host"}]
    return sum(
        resting_nbytes(unit, kind)
        for kind in kinds
        for unit in request.units
        if not (kind is StateKind.PARAMETERS and unit.stored is not None)
    )


def _refuse_small_host(
    request: _Request, host_nbytes: int, buffer_nbytes: int, smallest: int
) -> None:
    resting = _only_on_host_nbytes(request)
    needed_nbytes = resting + smallest + buffer_nbytes
    available_nbytes = host_nbytes + buffer_nbytes
    if available_nbytes >= needed_nbytes:
        return
    count = request.ranks.num_sharing
    largest = max(request.units, key=lambda unit: unit.weight_nbytes)
    all_ranks_nbytes = count * needed_nbytes
    ranks = f" for {count} ranks; on each of them" if count > 1 else ":"
    others = f", {format_nbytes(buffer_nbytes)} for gradients of other ranks"
    raise CapacityError(
        "host",
        needed_nbytes=all_ranks_nbytes,
        available_nbytes=count * available_nbytes,
        key="tiers.host.capacity",
        remedy=f"change tiers.host.capacity to {align_up(all_ranks_nbytes, MIB) // MIB}MiB or more",
        detail=f"the smallest host budget that works is {format_nbytes(all_ranks_nbytes)}{ranks} "
        f"{format_nbytes(resting)} rest there by placement, "
        f"{format_nbytes(smallest)} are needed to work in (largest unit "
        f"{largest.name!r}, {format_nbytes(largest.weight_nbytes)})"
        + (others if buffer_nbytes else ""),
    )


def _place(request: _Request, host_nbytes: int, smallest: int, comfortable: int) -> StatePlacement:
    """Places all state, with comfortable working memory if that fits, else with the smallest."""
    device_nbytes = request.machine.device_nbytes
    if device_nbytes is not None and not request.machine.shares_host_memory:
        device_nbytes -= request.in_use.held_nbytes + request.decoded_from_nbytes
    error: CapacityError | None = None
    for reserved_nbytes in (min(comfortable, max(smallest, host_nbytes // 2)), smallest):
        try:
            return place(
                request.units,
                request.preferences,
                host_nbytes=host_nbytes - reserved_nbytes,
                device_nbytes=device_nbytes,
            )
        except CapacityError as refused:
            error = refused
    assert error is not None
    raise error


def _refuse_small_device(request: _Request, placement: StatePlacement) -> None:
    window_nbytes = request.machine.device_window_nbytes(placement)
    stored = request.decoded_from_nbytes
    needed_nbytes = request.in_use.held_nbytes + stored
    if window_nbytes is not None and needed_nbytes > window_nbytes:
        largest = max(request.units, key=lambda unit: unit.weight_nbytes)
        held = format_nbytes(request.in_use.held_nbytes)
        decoded = f"; {format_nbytes(stored)} as they are stored and {held} decoded"
        raise CapacityError(
            "device",
            needed_nbytes=needed_nbytes,
            available_nbytes=window_nbytes,
            key="tiers.device.capacity",
            detail=f"the weights in use at once do not fit one device (largest unit "
            f"{largest.name!r}, {format_nbytes(largest.weight_nbytes)}{decoded if stored else ''})",
        )


def _staging_ring(
    request: _Request, placement: StatePlacement, working_nbytes: int
) -> tuple[int, int, int]:
    """(bytes of a chunk, staging slots, bytes of the ring) of the optimizer's pipeline."""
    units = request.units
    weights_nbytes = max(resting_nbytes(unit, StateKind.PARAMETERS) for unit in units)
    weights_nbytes = max(weights_nbytes, request.ranks.gathered_nbytes)
    granule_nbytes, travelling = least_chunk_nbytes(units), placement.travelling()
    chunk_nbytes, num_slots = plan_staging_slots(
        working_nbytes - max(weights_nbytes, request.in_use.host_held_nbytes),
        request.config.schedule.update_chunk,
        # In fp32, of each unit whose state travels: over ranks that is a shard.
        units_nbytes=[
            unit.state_numel * STATE_ITEM_NBYTES
            for unit in units
            if not travelling or any((unit.index, kind) in placement.tiers for kind in travelling)
        ],
        travelling_nbytes=sum(staging_nbytes(units, travelling, granule_nbytes).values()),
        granule_nbytes=granule_nbytes,
    )
    slot_nbytes = sum(staging_nbytes(units, travelling, chunk_nbytes).values())
    return chunk_nbytes, num_slots, num_slots * slot_nbytes


def _window_nbytes(request: _Request, working_nbytes: int) -> int:
    """Host memory for weights that are read ahead."""
    schedule = request.config.schedule
    if not schedule.prefetch:
        return 0
    if schedule.window != "auto":
        return int(schedule.window)
    # On the host, reads ahead must leave space for the weights decoded from them.
    decodes_on_host = request.machine.shares_host_memory and request.decoded_from_nbytes > 0
    return working_nbytes - (request.in_use.host_held_nbytes if decodes_on_host else 0)
