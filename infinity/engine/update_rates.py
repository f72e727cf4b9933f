"""`schedule.update_on = "auto"`: measures this machine once and decides where updates run.

Measured are the stages of an update: the host kernel, the device kernel and the link in both
directions, each for a tenth of a second after one round that is not counted. The state has the
model's own format and lies in the arena in chunks, like that of the updater; it is larger than the
caches. The drives are not measured: `infinity tune` has written their rates into the file, or they
are left out. All ranks of a node measure at about the same time, as they will update at the same
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from infinity.config.machine import last_cache_nbytes
from infinity.engine.lay_out import RunPlan
from infinity.ops.on_device import update_span_
from infinity.ops.optimizers import step_
from infinity.ops.rules import AdamWSettings
from infinity.ops.span import StateSpan
from infinity.simulate.job import Batch, batch_of, make_job, touched_nbytes, tuned_gb_per_s
from infinity.simulate.order import Use
from infinity.simulate.spec import Rates, drive_rates
from infinity.simulate.update_device import UpdateDevice, choose, settled
from infinity.sizes import MIB, align_down
from infinity.state.units import STATE_GRANULE, STATE_ITEM_NBYTES, Unit
from infinity.streaming.updates import chunk_update
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool

_LEAST_TIMED_NBYTES = 256 * MIB
_TIMED_CACHES = 4  # Last-level caches. One may hold 300 MiB, and answers twice as fast as memory.
_MOST_S = 0.1
# Bytes of an element: weight and residual, gradient, two moments.
_ITEM_NBYTES = 4 * STATE_ITEM_NBYTES
_TOUCHED_NBYTES = 28  # All bytes are read; all but the gradient are written.
# The rule is not known yet. Rules differ by less than machines do.
_SETTINGS = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=2)
_LONG_ENOUGH_S = 5e-3


def place_updates(plan: RunPlan, device: DeviceAdapter, host: HostPool) -> UpdateDevice:
    """Decides where this rank's updates run.

    Called while nothing else is allocated from the host tier.
    """
    config, num_sharing = plan.config, plan.num_sharing
    updated = [unit for unit in plan.own_units if unit.has_state]
    place = settled(
        config.schedule.update_on,
        config.precision.moments,
        shares_host_memory=device.shares_host_memory,
        update_nbytes=sum(map(touched_nbytes, updated)),
    )
    if place is not None:
        return place
    largest = max(updated, key=lambda unit: unit.state_numel)
    drives = {}
    if config.tiers.nvme and (tuned := tuned_gb_per_s(config.tiers.nvme)) is not None:
        drives = drive_rates(*tuned, num_sharing)
    rates = time_updates(device, host, largest, plan.budgets.chunk_nbytes, drives=drives)
    if rates is None:
        return UpdateDevice("host", "the device would not give its bits, or memory is short")
    batch = batch_of(config)
    uses = list(_uses(updated, batch))
    if any(use.forward_flops for use in uses):
        dtype = getattr(torch, config.precision.compute_dtype)
        rates = replace(rates, flops=time_products(device, dtype))
    return choose(make_job(config, plan.budgets, updated, uses, batch), rates)


def _uses(units: Sequence[Unit], batch: Batch) -> Iterator[Use]:
    """Yields one use of every unit with its least computation: products of its matrices with all
    tokens. Stacks of experts count nothing, because the part that a token uses is unknown here.
    Shards of ranks are no matrices, and nothing else is computed during their update."""
    for index, unit in enumerate(units):
        numel = sum(tensor.numel for tensor in unit.tensors if len(tensor.facts.shape) == 2)
        yield Use((index,), 2.0 * numel * batch.num_tokens, block=index)


def time_updates(
    device: DeviceAdapter,
    host: HostPool,
    unit: Unit,
    chunk_nbytes: int,
    *,
    drives: dict[str, float],
) -> Rates | None:
    """Returns None if the device would not give the host's bits, or if host memory is too small."""
    free_nbytes = host.free_nbytes // 2
    most_numel = align_down(free_nbytes // _ITEM_NBYTES, STATE_GRANULE)
    numel = min(chunk_nbytes // STATE_ITEM_NBYTES, unit.state_numel, most_numel)
    chunk_nbytes = _ITEM_NBYTES * max(numel, STATE_GRANULE)
    timed_nbytes = max(_LEAST_TIMED_NBYTES, _TIMED_CACHES * last_cache_nbytes())
    num_chunks = max(1, min(timed_nbytes, free_nbytes) // chunk_nbytes)
    block = host.allocate(num_chunks * chunk_nbytes, "state to time updates with")
    if block is None:
        return None
    try:
        memory = host.tensor(block).zero_()
        spans = [_span(chunk, unit.has_residual) for chunk in memory.split(chunk_nbytes)]
        if not chunk_update.can_update_on_device(spans, _SETTINGS):
            return None
        slice_nbytes = min(chunk_nbytes, _ITEM_NBYTES * chunk_update.SLICE_NUMEL)
        there = torch.zeros(slice_nbytes, dtype=torch.uint8, device=device.torch_device)
        span_there = _span(there, unit.has_residual)
        slices = [part for part in memory.split(slice_nbytes) if part.numel() == slice_nbytes]

        def update_here(turn: int) -> None:
            step_([spans[turn % len(spans)]], _SETTINGS)

        def update_there(turn: int) -> None:
            update_span_(span_there, _SETTINGS, 1.0)
            device.synchronize()

        def bring(turn: int) -> None:
            device.copy(slices[turn % len(slices)], there).wait()

        def bring_back(turn: int) -> None:
            device.copy(there, slices[turn % len(slices)]).wait()

        touched_nbytes, slice_touched_nbytes = (
            nbytes // _ITEM_NBYTES * _TOUCHED_NBYTES for nbytes in (chunk_nbytes, slice_nbytes)
        )
        with torch.no_grad():
            return Rates(
                flops=float("inf"),
                host=float("inf"),
                update=_rate(touched_nbytes, update_here),
                device_update=_rate(slice_touched_nbytes, update_there),
                h2d=_rate(slice_nbytes, bring),
                d2h=_rate(slice_nbytes, bring_back),
                **drives,
            )
    finally:
        host.free(block)


def time_products(device: DeviceAdapter, dtype: torch.dtype) -> float:
    """Returns the FLOPs per second of matrix products on the device. Larger products are faster."""
    for side in (1024, 2048, 4096, 8192):
        matrix = torch.ones(side, side, dtype=dtype, device=device.torch_device)
        for _ in range(2):  # The first round is not counted.
            start_s = time.perf_counter()
            matrix @ matrix
            device.synchronize()
            spent_s = time.perf_counter() - start_s
        if spent_s >= _LONG_ENOUGH_S:
            break
    return 2 * side**3 / spent_s


def _span(memory: torch.Tensor, is_split: bool) -> StateSpan:
    """Returns uint8 memory as the state of as many elements as fit."""
    weight, gradient, *states = memory.view(4, -1)
    residual = None
    if is_split:
        weight, residual = weight.view(2, -1)
        residual = residual.view(torch.int16)
    return StateSpan(
        weight.view(torch.bfloat16 if is_split else torch.float32),
        gradient.view(torch.float32),
        tuple(state.view(torch.float32) for state in states),
        residual,
    )


def _rate(nbytes: int, work: Callable[[int], None]) -> float:
    """Returns the bytes per second of `work(turn)`, which processes `nbytes` per turn."""
    work(0)
    on_tile, start_s = 0, time.perf_counter()
    while True:
        on_tile += 1
        work(on_tile)
        spent_s = time.perf_counter() - start_s
        if spent_s >= _MOST_S:
            return on_tile * nbytes / spent_s
