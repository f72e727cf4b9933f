"""What each tier may take: from a configuration and a machine's sizes to budgets and a placement.

Pure: the machine's sizes are given, so that a machine that is not here can be asked about as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity.config import SwapConfig
from infinity.errors import CapacityError, ConfigError
from infinity.sizes import MIB, align_up, format_nbytes
from infinity.state.placement import (
    Placement,
    least_chunk_nbytes,
    place,
    plan_staging_slots,
    resting_nbytes,
    smallest_working_nbytes,
    staging_nbytes,
)
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, Unit
from infinity.tiers.ranges import rounded_nbytes

# What gradients in device memory are added to sums on the host through, at most.
STAGED_NBYTES = 16 << 20


class Budgets:
    """What each tier may take, and where every piece goes.

    `held_nbytes`: the most weight bytes that nested modules hold at once. `device_nbytes`: what the
    device may be filled with (None: unlimited). `available_host_nbytes`: what a share or "auto" of
    `tiers.host.capacity` is taken of. `shares_host_memory`: the device computes on host memory.
    With ranks, `gathered_nbytes`: the largest unit's weights that are put together from shards;
    `serving_nbytes`: what other ranks are served through, lent for good; `given_nbytes`: the most
    that they give in the time of a backward; `summed_nbytes`: what `infinity.forward_backward` sums
    gradients in before they are given away, for which room is kept where the file says that there
    are micro-batches. `needed_for_sums_nbytes` is what it works in, all together, and
    `least_for_sums_nbytes` the smallest budget that keeps it.
    `reduce_buffer_nbytes` of the budget are not in the arena.
    Raises ConfigError for a tier that is not there, CapacityError for a budget that is too small.
    """

    def __init__(
        self,
        config: SwapConfig,
        units: Sequence[Unit],
        *,
        held_nbytes: int,
        shares_host_memory: bool,
        device_nbytes: int | None,
        available_host_nbytes: int,
        gathered_nbytes: int = 0,
        serving_nbytes: int = 0,
        given_nbytes: int = 0,
        summed_nbytes: int = 0,
    ) -> None:
        self.preferences = {
            kind: tuple(getattr(config.placement, kind))
            for kind in ("parameters", "master", "moments", "gradients")
        }
        self._refuse_missing_tier(config)
        self.shares_host_memory = shares_host_memory
        self.device_nbytes = device_nbytes
        self.held_nbytes = held_nbytes
        working: dict[str, Any] = {
            "held_nbytes": self.held_nbytes,
            "chunk_nbytes": config.schedule.update_chunk,
            "staged_nbytes": self._staged_nbytes(units),
            "gathered_nbytes": gathered_nbytes,
        }
        alone, with_sums = (
            serving_nbytes
            + smallest_working_nbytes(units, self.preferences, **working, summed_nbytes=nbytes)
            for nbytes in (0, summed_nbytes)
        )
        smallest = alone if config.schedule.micro_batch is None else with_sums
        kept_nbytes = smallest - alone
        comfortable = self._comfortable(config, units, alone) + kept_nbytes
        asked_nbytes = self._host_nbytes(
            config, units, comfortable + given_nbytes, available_host_nbytes
        )
        needed_nbytes = smallest + self._resting_nbytes(units)
        has_nvme = any("nvme" in order for order in self.preferences.values())
        self.reduce_buffer_spills = given_nbytes > 0 and has_nvme  # To nvme.
        self.reduce_buffer_nbytes = self._reduce_buffer_nbytes(
            config, units, given_nbytes, asked_nbytes, asked_nbytes - needed_nbytes
        )
        self.least_for_sums_nbytes = (
            self._resting_nbytes(units) + with_sums
            + self._reduce_buffer_nbytes(config, units, given_nbytes, 0, 0)
        )  # fmt: skip
        self.host_nbytes = asked_nbytes - self.reduce_buffer_nbytes
        self._refuse_small_host(units, smallest)
        self.placement = self._place(units, smallest, comfortable)
        self._refuse_small_device(units)
        self.working_nbytes = working_nbytes = (
            self.host_nbytes - self.placement.placed_nbytes["host"] - serving_nbytes
        )
        # Where less than this is free, what is kept for later gets in the way of what is needed
        # now.
        self.is_tight = working_nbytes - kept_nbytes < 3 * alone
        self.needed_for_sums_nbytes = with_sums - serving_nbytes
        weights_nbytes = max(resting_nbytes(unit, StateKind.PARAMETERS) for unit in units)
        weights_nbytes = max(weights_nbytes, gathered_nbytes)
        granule_nbytes, travelling = least_chunk_nbytes(units), self.placement.travelling()
        self.chunk_nbytes, self.num_staging_slots = plan_staging_slots(
            working_nbytes - max(weights_nbytes, self.held_nbytes),
            config.schedule.update_chunk,
            unit_nbytes=max(unit.state_numel for unit in units) * STATE_ITEM_NBYTES,
            travelling_nbytes=sum(staging_nbytes(units, travelling, granule_nbytes).values()),
            granule_nbytes=granule_nbytes,
        )
        self.ring_nbytes = self.num_staging_slots * sum(
            staging_nbytes(units, travelling, self.chunk_nbytes).values()
        )
        self.window_nbytes = 0 if self.is_tight else self._window_nbytes(config, working_nbytes)

    def _refuse_missing_tier(self, config: SwapConfig) -> None:
        if not config.tiers.nvme:
            orders = self.preferences | {"activations": config.placement.activations}
            for kind, order in orders.items():
                if "nvme" in order:
                    raise ConfigError(
                        f"placement.{kind} names nvme but there is no [[tiers.nvme]] entry; add "
                        "one with a path, or place it on host"
                    )

    def _staged_nbytes(self, units: Sequence[Unit]) -> int:
        """What sums of gradients on the host are added to through."""
        if self.shares_host_memory or set(self.preferences["gradients"]) == {"device"}:
            return 0
        largest = max(spec.numel for unit in units for spec in unit.tensors) * STATE_ITEM_NBYTES
        return rounded_nbytes(min(largest, STAGED_NBYTES))

    def _comfortable(self, config: SwapConfig, units: Sequence[Unit], smallest: int) -> int:
        """Working memory that lets fetches, gradients and updates run ahead of each other."""
        weights_nbytes = max(
            self.held_nbytes, *(resting_nbytes(u, StateKind.PARAMETERS) for u in units)
        )
        gradients_nbytes = max(resting_nbytes(unit, StateKind.GRADIENTS) for unit in units)
        return max(
            3 * smallest,
            3 * weights_nbytes + 2 * gradients_nbytes,
            weights_nbytes + 12 * config.schedule.update_chunk,
        )

    def _host_nbytes(
        self,
        config: SwapConfig,
        units: Sequence[Unit],
        comfortable: int,
        available_host_nbytes: int,
    ) -> int:
        capacity = config.tiers.host.capacity
        asked_nbytes = config.tiers.host.budget_nbytes(available_host_nbytes)
        if not capacity.is_auto:
            return asked_nbytes
        # More than all state and comfortable working memory would never be touched.
        all_nbytes = sum(
            resting_nbytes(unit, state_kind) for unit in units for state_kind in StateKind
        )
        return min(asked_nbytes, align_up(all_nbytes + comfortable, 2 * MIB))

    def _reduce_buffer_nbytes(
        self,
        config: SwapConfig,
        units: Sequence[Unit],
        given_nbytes: int,
        asked_nbytes: int,
        spare_nbytes: int,
    ) -> int:
        """What gradients of other ranks may wait in: with nvme as little as is there, without it
        at least those of two units."""
        if not given_nbytes:
            return 0
        largest_nbytes = max(unit.state_numel for unit in units) * STATE_ITEM_NBYTES
        least_nbytes = 0 if self.reduce_buffer_spills else 2 * largest_nbytes
        if config.distributed.reduce_buffer == "auto":
            return max(least_nbytes, min(given_nbytes, asked_nbytes // 8, spare_nbytes))
        if config.distributed.reduce_buffer < least_nbytes:
            raise CapacityError(
                "host",
                needed_nbytes=least_nbytes,
                available_nbytes=config.distributed.reduce_buffer,
                key="distributed.reduce_buffer",
                remedy="raise distributed.reduce_buffer, or place a kind of state on nvme, where "
                "any size will do",
                detail="gradients of other ranks need room for those of the largest unit, twice",
            )
        return config.distributed.reduce_buffer

    def _resting_nbytes(self, units: Sequence[Unit]) -> int:
        """Bytes that can rest nowhere but on the host."""
        only_host = [kind for kind, order in self.preferences.items() if set(order) == {"host"}]
        return sum(
            resting_nbytes(unit, state_kind)
            for unit in units
            for state_kind in StateKind
            if state_kind.kind in only_host
        )

    def _refuse_small_host(self, units: Sequence[Unit], smallest: int) -> None:
        host_view = self._resting_nbytes(units)
        needed_nbytes = host_view + smallest + self.reduce_buffer_nbytes
        available_nbytes = self.host_nbytes + self.reduce_buffer_nbytes
        if available_nbytes < needed_nbytes:
            largest = max(units, key=lambda unit: unit.weight_nbytes)
            raise CapacityError(
                "host",
                needed_nbytes=needed_nbytes,
                available_nbytes=available_nbytes,
                key="tiers.host.capacity",
                remedy="change tiers.host.capacity to "
                f"{align_up(needed_nbytes, MIB) // MIB}MiB or more",
                detail=(
                    f"the smallest host budget that works is {format_nbytes(needed_nbytes)}: "
                    f"{format_nbytes(host_view)} rest there by placement, "
                    f"{format_nbytes(smallest)} are needed to work in (largest unit "
                    f"{largest.name!r}, {format_nbytes(largest.weight_nbytes)})"
                    + (
                        f", {format_nbytes(self.reduce_buffer_nbytes)} for gradients of other ranks"
                        if self.reduce_buffer_nbytes
                        else ""
                    )
                ),
            )

    @property
    def device_window_nbytes(self) -> int | None:
        """What weights that do not rest on the device may take there; None: unlimited."""
        if self.shares_host_memory or self.device_nbytes is None:
            return None
        return self.device_nbytes - self.placement.placed_nbytes["device"]

    def _refuse_small_device(self, units: Sequence[Unit]) -> None:
        window_nbytes = self.device_window_nbytes
        if window_nbytes is not None and self.held_nbytes > window_nbytes:
            largest = max(units, key=lambda unit: unit.weight_nbytes)
            raise CapacityError(
                "device",
                needed_nbytes=self.held_nbytes,
                available_nbytes=window_nbytes,
                key="tiers.device.capacity",
                detail=f"what is in use at once does not fit one device (largest unit "
                f"{largest.name!r}, {format_nbytes(largest.weight_nbytes)})",
            )

    def has_room_ahead(self, next_nbytes: int) -> bool:
        """Whether weights of so many bytes can be fetched beside those in use."""
        window_nbytes = self.device_window_nbytes
        fits = window_nbytes is None or self.held_nbytes + next_nbytes <= window_nbytes
        return fits and not self.is_tight

    def _place(self, units: Sequence[Unit], smallest: int, comfortable: int) -> Placement:
        window_nbytes = 0 if self.shares_host_memory else self.held_nbytes
        device_nbytes = self.device_nbytes
        if device_nbytes is not None:
            device_nbytes -= window_nbytes
        error: CapacityError | None = None
        for reserved_nbytes in (min(comfortable, max(smallest, self.host_nbytes // 2)), smallest):
            try:
                return place(
                    units,
                    self.preferences,
                    host_nbytes=self.host_nbytes - reserved_nbytes,
                    device_nbytes=device_nbytes,
                )
            except CapacityError as refused:
                error = refused
        assert error is not None
        raise error

    def _window_nbytes(self, config: SwapConfig, free_nbytes: int) -> int:
        if not config.schedule.prefetch:
            return 0
        return free_nbytes if config.schedule.window == "auto" else int(config.schedule.window)
