"""The changes that would help most: the same prediction with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from infinity.config import SwapConfig
from infinity.config.schema import changed
from infinity.config.values import Capacity
from infinity.errors import InfinityError
from infinity.plan.hardware import Hardware, Nvme
from infinity.plan.layout import PlannedModel
from infinity.plan.predict import Forecast, forecast_again, is_tight_again
from infinity.simulate.job import Batch
from infinity.simulate.log import WRITE
from infinity.simulate.update_device import Place
from infinity.sizes import format_nbytes
from infinity.state.tiles import limits
from infinity.state.units import moments_of


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and the ratio of tokens per second: 1.2 is a fifth more."""

    change: str
    ratio: float


def advise(config: SwapConfig, model: PlannedModel, base: Forecast) -> list[Advice]:
    """Returns every change that can be predicted, the most helpful first."""
    found = []
    for change, case in _changes(config, base):
        other = _forecast_of(case, model, base)
        if other is not None and not other.obstacles:  # A batch that does not fit is no advice.
            found.append(Advice(change, other.tokens_per_s / base.tokens_per_s))
    found += [*_tiles(config, model, base), *_small_moments(config, model, base)]
    return sorted(found, key=lambda advice: -advice.ratio)


_Case = tuple[SwapConfig, Hardware, Batch]


def _forecast_of(case: _Case, model: PlannedModel, base: Forecast) -> Forecast | None:
    """Returns the forecast of a change, None if it is impossible."""
    config, hardware, batch = case
    try:
        return forecast_again(base, config, model, hardware=hardware, batch=batch)
    except InfinityError:
        return None


def _tiles(config: SwapConfig, model: PlannedModel, base: Forecast) -> Iterator[Advice]:
    """Yields the largest tiles with which a budget that keeps nothing keeps something. "auto" takes
    none where the model fits without: tiles of dense layers round."""
    if not base.is_tight or config.schedule.tile != "auto":
        return
    largest_nbytes = math.inf
    for limit_nbytes in limits(model.largest_nbytes):
        before_nbytes, cut = largest_nbytes, model.with_tiles(limit_nbytes)
        largest_nbytes = max(unit.weight_nbytes for unit in cut.units)
        if largest_nbytes == before_nbytes:
            return  # Smaller tiles are more units, and the largest one stays as it is.
        tiled = changed(config, {"schedule.tile": limit_nbytes})
        try:
            is_tight = is_tight_again(base, tiled, model)
        except InfinityError:
            continue
        case = tiled, base.hardware, base.batch
        other = None if is_tight else _forecast_of(case, model, base)
        if other is not None:
            size = format_nbytes(limit_nbytes)
            change = f"tiles of {size}, so that memory keeps something (schedule.tile)"
            yield Advice(change, other.tokens_per_s / base.tokens_per_s)
            return


def _small_moments(config: SwapConfig, model: PlannedModel, base: Forecast) -> Iterator[Advice]:
    """Yields 8-bit moments where moments of all weights rest on drives, with what that saves of
    the drives' endurance."""
    written_nbytes = base.step.moved_nbytes.get(WRITE, 0)
    is_on_drives = base.placed_nbytes.get("moments", {}).get("nvme", 0) > 0
    is_small = config.precision.moments == "8bit"
    if model.frozen is not None or is_small or not is_on_drives or not written_nbytes:
        return
    small = changed(config, {"precision.moments": "8bit"})
    rounded = replace(model, moments=moments_of(small.optimizer, small.precision))
    other = _forecast_of((small, base.hardware, base.batch), rounded, base)
    if other is not None and not other.obstacles:
        share = other.step.moved_nbytes.get(WRITE, 0) / written_nbytes
        change = f"8-bit moments, which are rounded, and {1 - share:.0%} fewer bytes written"
        ratio = other.tokens_per_s / base.tokens_per_s
        yield Advice(f"{change} (precision.moments)", ratio)


def _changes(config: SwapConfig, base: Forecast) -> Iterator[tuple[str, _Case]]:
    hardware, batch, ranks = base.hardware, base.batch, base.ranks
    device = hardware.device

    def machine(values: Mapping[str, Any]) -> _Case:
        return config, changed(hardware, values), batch

    def file(values: Mapping[str, Any]) -> _Case:
        return changed(config, values), hardware, batch

    def twice(*places: str) -> dict[str, float]:
        """Doubles the rates that the machine has."""
        found = {place: attrgetter(place)(hardware) for place in places}
        return {place: 2 * rate for place, rate in found.items() if rate is not None}

    budget = config.tiers.host.capacity.nbytes  # A share of the memory, or "auto", grows with it.
    more = {} if budget is None else {"tiers.host.capacity": Capacity(nbytes=2 * budget)}
    yield "twice the host memory", (changed(config, more), *machine(twice("host.memory"))[1:])
    rates = ("host.update_gb_per_s", "host.sum_gb_per_s", "host.norm_gb_per_s")
    yield "memory twice as fast", machine(twice(*rates))
    if hardware.nvme is not None:
        yield "another drive", machine({"nvme": _with_another_drive(hardware.nvme)})
    yield "compute twice as fast", machine(twice("device.tflops"))
    is_narrow = config.precision.compute_dtype != "float32"
    # The units of the forecast are in the narrow dtype: where memory is tight, others may not fit.
    if device.float32_tflops is not None and is_narrow and not base.is_tight:
        speed = changed(hardware, {"device.tflops": device.float32_tflops})
        wide = changed(config, {"precision.compute": "float32"})
        yield "computing in fp32 (precision.compute)", (wide, speed, batch)
    if device.h2d_gb_per_s is not None and device.d2h_gb_per_s is not None:
        links = twice("device.h2d_gb_per_s", "device.d2h_gb_per_s")
        yield "a link to the device twice as fast", machine(links)
    if ranks is not None:
        sockets = {"host.sockets_gb_per_s": 2 * hardware.rates().sockets / 1e9}
        yield "twice as fast between ranks", machine(twice("device.gather_gb_per_s") | sockets)
    if ranks is not None and ranks.num_nodes > 1:
        yield "a network twice as fast", machine(twice("host.network_gb_per_s"))
        if ranks.stage == 3 and not ranks.is_over_node:
            change = "frozen weights divided over each node (distributed.shard_over)"
            yield change, file({"distributed.shard_over": "node"})
    is_updated = batch.has_backward and not hardware.shares_host_memory
    if device.update_gb_per_s is not None and is_updated:
        other: Place = "host" if base.update_place.is_on_device else "device"
        yield f"updates on the {other} (schedule.update_on)", file({"schedule.update_on": other})
    is_divided = config.train is None or config.train.embed is None
    if batch.num_micro_batches > 1 and config.schedule.micro_batch is None and is_divided:
        all_tokens = batch.num_tokens * batch.num_micro_batches
        as_one = replace(batch, num_tokens=all_tokens, num_micro_batches=1, recomputes=True)
        # Saved inputs go to the host, and to drives that there are.
        tiers = ("host",) if hardware.nvme is None else ("host", "nvme")
        tiers = ("device",) if hardware.shares_host_memory else tiers
        count = max(batch.num_tokens // batch.sequence_length, 1)
        order = {"schedule.micro_batch": count, "placement.activations": tiers}
        yield (
            "all micro-batches through a block while it is there (schedule.micro_batch, "
            "placement.activations)",
            (changed(config, order), hardware, as_one),
        )
    larger = replace(batch, num_tokens=2 * batch.num_tokens)
    if base.model.frozen is not None and config.schedule.micro_batch is not None:
        yield f"twice as many tokens a {base.batch.name}", (config, hardware, larger)
        return
    yield "micro-batches twice as large", (config, hardware, larger)
    longer = replace(batch, num_micro_batches=2 * batch.num_micro_batches)
    yield "twice as many micro-batches a step", (config, hardware, longer)


def _with_another_drive(nvme: Nvme) -> Nvme:
    grown = (nvme.drives + 1) / nvme.drives
    return nvme.scaled(
        grown, "read_gb_per_s", "write_gb_per_s", "mixed_gb_per_s", drives=nvme.drives + 1,
        capacity=int(nvme.capacity * grown),
        endurance=None if nvme.endurance is None else int(nvme.endurance * grown),
    )  # fmt: skip
