"""Measures the device of this machine: its memory, the links to it, and updates there.

Written against `DeviceAdapter`, so that it is tested without a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from infinity.engine.update_rates import time_updates
from infinity.observe import Counters
from infinity.plan.hardware import Device
from infinity.plan.model import PlannedModel
from infinity.sizes import MIB
from infinity.storage.arena import Arena
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostBlocks
from infinity.tools.bench.device import ArenaToDevice

_COPY_NBYTES = 64 * MIB
_CHUNK_NBYTES = 16 * MIB  # Of fp32, as the updater's.


def measure_cuda(arena: Arena, model: PlannedModel, flops: float) -> Device:
    """Measures the current CUDA device; `flops` per second are known. The arena is pinned for it,
    and is at least 64 MiB."""
    from infinity.tiers.cuda import CudaDevice

    counters = Counters()
    host = HostBlocks(arena, counters)
    device = CudaDevice(host, counters)
    try:
        free_nbytes, _ = torch.cuda.mem_get_info()
        return measure_device(device, host, model, flops, free_nbytes)
    finally:
        device.close()


def measure_device(
    device: DeviceAdapter,
    host: HostBlocks,
    model: PlannedModel,
    flops: float,
    memory_nbytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Device:
    """Returns the device with `flops` per second and `memory_nbytes` free. A device that does not
    give the host's bits gets no rate of updates."""
    into, out = (
        ArenaToDevice(device, host.arena, direction, _COPY_NBYTES).run().gb_per_s
        for direction in ("in", "out")
    )
    trained = [unit for unit in model.units if unit.has_state]
    rates = None
    if trained:
        largest = max(trained, key=lambda unit: unit.state_numel)
        rates = time_updates(device, host, largest, _CHUNK_NBYTES, drives={}, clock=clock)
    update = math.inf if rates is None else rates.device_update
    return Device(
        count=1,
        tflops=flops / 1e12,
        memory=memory_nbytes,
        h2d_gb_per_s=into,
        d2h_gb_per_s=out,
        update_gb_per_s=update / 1e9 if math.isfinite(update) else None,
    )
