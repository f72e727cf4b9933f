"""A device without a GPU: its own memory, late copies, poisoned releases.

Copies run on a worker thread after a random delay, so reading before `Copy.order()` sees NaN;
released memory is filled with NaN, so reading after `detach` does too. A wait that the engine
forgot therefore changes a result here, on a machine without a GPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from infinity.observe import Counters, Lane
from infinity.tiers.device import Copy, Region, ResidentRegion, all_of
from infinity.tiers.host import Block, HostTier

_POISON_BYTE = 0xFF  # All ones is a NaN in every IEEE format.


class SimulatedCopy:
    """A copy on the worker thread. `order` has no stream to wait on, so it blocks."""

    def __init__(self, future: Future[tuple[int, int]], nbytes: int) -> None:
        self._future = future  # Gives when the copy began and was over, in nanoseconds.
        self._nbytes = nbytes

    def done(self) -> bool:
        return self._future.done()

    def order(self) -> None:
        self._future.result()

    def wait(self) -> None:
        self._future.result()

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return [(0, self._nbytes, *self._future.result())] if self._future.done() else []


class SimulatedRegion(ResidentRegion):
    """Memory that is always there, so that a wrong read yields poison and not a crash."""

    is_attached = False


class SimulatedDevice:
    """Drop-in for the CUDA adapter: `infinity.offload(model, config,
    device=SimulatedDevice(seed))`.

    `delay_s` bounds the random delay of a copy. The engine calls `open` with its host tier.
    """

    name = "simulated"
    shares_host_memory = False
    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 0, *, delay_s: float = 0.002) -> None:
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="simulated-device")
        self.attached = 0
        self.attached_high_water = 0
        self.attached_nbytes = 0
        self.attached_high_water_nbytes = 0

    def open(self, host: HostTier, counters: Counters) -> None:
        self.host = host
        self.counters = counters

    def reserve(self, nbytes: int) -> Region:
        return SimulatedRegion(torch.full((nbytes,), _POISON_BYTE, dtype=torch.uint8))

    def reserve_resident(self, memory: torch.Tensor) -> Region:
        return ResidentRegion(memory)

    def attach(self, region: Region, block: Block) -> Copy:
        assert isinstance(region, SimulatedRegion) and not region.is_attached
        region.is_attached = True
        self.attached += 1
        self.attached_high_water = max(self.attached_high_water, self.attached)
        self.attached_nbytes += region.nbytes
        self.attached_high_water_nbytes = max(self.attached_high_water_nbytes, self.attached_nbytes)
        source = self.host.tensor(block, nbytes=region.nbytes)
        return self.copy(source, all_of(region))

    def bring_back(self, region: Region, block: Block) -> Copy:
        assert isinstance(region, SimulatedRegion)
        return self.copy(all_of(region), self.host.tensor(block, nbytes=region.nbytes))

    def detach(self, region: Region) -> None:
        assert isinstance(region, SimulatedRegion) and region.is_attached
        region.is_attached = False
        self.attached -= 1
        self.attached_nbytes -= region.nbytes
        # Ordered behind the copies that are still under way, like a free on a stream.
        self._worker.submit(all_of(region).fill_, _POISON_BYTE).result()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        delay_s = self._random.random() * self._delay_s
        nbytes = target.numel() * target.element_size()
        source, target = source.detach(), target.detach()

        def run() -> tuple[int, int]:
            time.sleep(delay_s)
            begun_ns = time.monotonic_ns()
            with torch.no_grad():
                target.copy_(source)
            return begun_ns, time.monotonic_ns()

        outward = self.host.owns(target)
        self.counters.add("device_out_nbytes" if outward else "device_in_nbytes", nbytes)
        asked_ns = time.monotonic_ns()
        copy = SimulatedCopy(self._worker.submit(run), nbytes)
        lane = Lane.COPIES_OUT if outward else Lane.COPIES_IN
        self.counters.tracer.watch(copy, lambda _: lane, "copy", asked_ns)
        return copy

    def synchronize(self) -> None:
        self._worker.submit(lambda: None).result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)
