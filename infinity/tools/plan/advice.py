"""The changes that would help most: the same prediction with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from infinity.config import SwapConfig
from infinity.config.values import Capacity
from infinity.errors import InfinityError
from infinity.plan.hardware import Hardware, Nvme
from infinity.plan.model import PlannedModel
from infinity.plan.predict import Forecast, forecast_again
from infinity.plan.tiles import largest_nbytes
from infinity.simulate.job import Batch
from infinity.simulate.update_device import Place
from infinity.sizes import format_nbytes
from infinity.state.tiles import limits


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
        if other is None:
            continue  # An impossible change is no advice,
        if len(other.warnings) > len(base.warnings):
            continue  # nor is a batch whose activations do not fit.
        found.append(Advice(change, other.tokens_per_s / base.tokens_per_s))
    found += _tiles(config, model, base)
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
    for limit_nbytes in limits(largest_nbytes(model)):
        schedule = config.schedule.model_copy(update={"tile": limit_nbytes})
        changed = config.model_copy(update={"schedule": schedule})
        other = _forecast_of((changed, base.hardware, base.batch), model, base)
        if other is not None and not other.is_tight:
            size = format_nbytes(limit_nbytes)
            change = f"tiles of {size}, so that memory keeps something (schedule.tile)"
            yield Advice(change, other.tokens_per_s / base.tokens_per_s)
            return


def _changes(config: SwapConfig, base: Forecast) -> Iterator[tuple[str, _Case]]:
    hardware, batch = base.hardware, base.batch
    host = hardware.host
    doubled = host.model_copy(update={"memory": 2 * host.memory})
    yield (
        "twice the host memory",
        (_with_twice_the_host(config), hardware.model_copy(update={"host": doubled}), batch),
    )
    faster = host.model_copy(
        update={
            name: 2 * getattr(host, name)
            for name in ("update_gb_per_s", "sum_gb_per_s", "norm_gb_per_s")
        }
    )
    yield "memory twice as fast", (config, hardware.model_copy(update={"host": faster}), batch)
    if hardware.nvme is not None:
        nvme = _with_another_drive(hardware.nvme)
        yield "another drive", (config, hardware.model_copy(update={"nvme": nvme}), batch)
    device = hardware.device
    faster_device = device.model_copy(update={"tflops": 2 * device.tflops})
    yield (
        "compute twice as fast",
        (config, hardware.model_copy(update={"device": faster_device}), batch),
    )
    if device.h2d_gb_per_s is not None and device.d2h_gb_per_s is not None:
        links = device.model_copy(
            update={
                "h2d_gb_per_s": 2 * device.h2d_gb_per_s,
                "d2h_gb_per_s": 2 * device.d2h_gb_per_s,
            }
        )
        yield (
            "a link to the device twice as fast",
            (config, hardware.model_copy(update={"device": links}), batch),
        )
    if base.ranks is not None:
        yield "twice as fast between ranks", (config, _with_faster_exchange(hardware), batch)
        if base.ranks.num_nodes > 1:
            yield "a network twice as fast", (config, _with_faster_network(hardware), batch)
            if base.ranks.stage == 3 and not base.ranks.is_over_node:
                change = "frozen weights divided over each node (distributed.shard_over)"
                yield change, (_with_weights_of_nodes(config), hardware, batch)
    if device.update_gb_per_s is not None and not hardware.shares_host_memory:
        other: Place = "host" if base.update_place.is_on_device else "device"
        yield (
            f"updates on the {other} (schedule.update_on)",
            (_with_updates_on(config, other), hardware, batch),
        )
    if batch.num_micro_batches > 1 and config.schedule.micro_batch is None:
        yield (
            "all micro-batches through a block while it is there (schedule.micro_batch, "
            "placement.activations)",
            (_layer_major(config, hardware, batch), hardware, _as_one(batch)),
        )
    if base.model.frozen is not None and config.schedule.micro_batch is not None:
        more = replace(batch, num_tokens=2 * batch.num_tokens)
        yield "twice as many tokens a step", (config, hardware, more)
        return
    larger = replace(batch, num_tokens=2 * batch.num_tokens)
    yield "micro-batches twice as large", (config, hardware, larger)
    more = replace(batch, num_micro_batches=2 * batch.num_micro_batches)
    yield "twice as many micro-batches a step", (config, hardware, more)


def _with_twice_the_host(config: SwapConfig) -> SwapConfig:
    """Doubles the host budget. A share of the memory, or "auto", grows with the memory."""
    host = config.tiers.host
    if host.capacity.nbytes is None:
        return config
    host = host.model_copy(update={"capacity": Capacity(nbytes=2 * host.capacity.nbytes)})
    return config.model_copy(update={"tiers": config.tiers.model_copy(update={"host": host})})


def _with_faster_exchange(hardware: Hardware) -> Hardware:
    """Doubles the rates from device to device and from host to host."""
    host, device, rates = hardware.host, hardware.device, hardware.rates()
    device = device.model_copy(
        update={
            "gather_gb_per_s": None
            if device.gather_gb_per_s is None
            else 2 * device.gather_gb_per_s
        }
    )
    host = host.model_copy(update={"sockets_gb_per_s": 2 * rates.sockets / 1e9})
    return hardware.model_copy(update={"host": host, "device": device})


def _with_faster_network(hardware: Hardware) -> Hardware:
    host = hardware.host
    assert host.network_gb_per_s is not None
    host = host.model_copy(update={"network_gb_per_s": 2 * host.network_gb_per_s})
    return hardware.model_copy(update={"host": host})


def _with_weights_of_nodes(config: SwapConfig) -> SwapConfig:
    distributed = config.distributed.model_copy(update={"shard_over": "node"})
    return config.model_copy(update={"distributed": distributed})


def _with_updates_on(config: SwapConfig, place: Place) -> SwapConfig:
    schedule = config.schedule.model_copy(update={"update_on": place})
    return config.model_copy(update={"schedule": schedule})


def _layer_major(config: SwapConfig, hardware: Hardware, batch: Batch) -> SwapConfig:
    """Changes to layer-major order. Saved inputs go to the host, and to drives that there are."""
    tiers = ("host",) if hardware.nvme is None else ("host", "nvme")
    tiers = ("device",) if hardware.shares_host_memory else tiers
    count = max(batch.num_tokens // batch.sequence_length, 1)
    return config.model_copy(
        update={
            "schedule": config.schedule.model_copy(update={"micro_batch": count}),
            "placement": config.placement.model_copy(update={"activations": tiers}),
        }
    )


def _as_one(batch: Batch) -> Batch:
    return replace(
        batch,
        num_tokens=batch.num_tokens * batch.num_micro_batches,
        num_micro_batches=1,
        recomputes=True,
    )


def _with_another_drive(nvme: Nvme) -> Nvme:
    grown = (nvme.drives + 1) / nvme.drives
    return nvme.model_copy(
        update={
            "drives": nvme.drives + 1,
            "capacity": int(nvme.capacity * grown),
            "read_gb_per_s": nvme.read_gb_per_s * grown,
            "write_gb_per_s": nvme.write_gb_per_s * grown,
            "mixed_gb_per_s": None if nvme.mixed_gb_per_s is None else nvme.mixed_gb_per_s * grown,
            "endurance": None if nvme.endurance is None else int(nvme.endurance * grown),
        }
    )
