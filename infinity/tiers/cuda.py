"""Compute on a CUDA device: a bounded window of weights, copies on their own streams.

Note [Streams]
  Three streams: the user's compute stream, `in` for host -> device, `out` for device -> host.
  Memory of a region is allocated and freed on the compute stream, so the caching allocator hands
  freed memory only to work that comes later on that stream; the `in` stream waits for the compute
  stream before it writes into it. A copy out waits for the compute stream that made its source,
  and the source is recorded on `out` so that the allocator keeps it until the copy is over.
  The training thread never synchronizes with the device here, except in `Copy.wait`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.errors import UnsupportedError
from infinity.observe import Counters, Lane
from infinity.tiers.device import Copy, Region, ResidentRegion, ResizedRegion, all_of
from infinity.tiers.host import Block, HostTier

# cudaHostRegisterPortable: pinned for every context of the process.
_HOST_REGISTER_PORTABLE = 1


class CudaCopy:
    """A copy on one of the transfer streams, known by the event behind it."""

    def __init__(
        self, event: torch.cuda.Event, keep: object, traced: _TracedCopy | None = None
    ) -> None:
        self._event = event
        self._keep = keep  # Source and target live at least as long as the copy.
        self._traced = traced

    def done(self) -> bool:
        return self._event.query()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()
        self._keep = None

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        if self._traced is None or not self.done():
            return []
        traced = self._traced
        times_ns = (traced.clock.ns_of(event) for event in (traced.begun, self._event))
        return [(0, traced.nbytes, *times_ns)]


class _DeviceClock:
    """Times of events on the host's clock. Resolution about 0.5 us, and the delay of one launch."""

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_ns = time.monotonic_ns()

    def ns_of(self, event: torch.cuda.Event) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(event) * 1e6)


@dataclass(frozen=True, slots=True)
class _TracedCopy:
    """What a trace wants to know of a copy."""

    clock: _DeviceClock
    begun: torch.cuda.Event
    nbytes: int


class CudaDevice:
    """The device tier on one CUDA device. Autograd threads may call it; the engine's lock orders
    them."""

    name = "cuda"
    shares_host_memory = False

    def __init__(self, host: HostTier, counters: Counters, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "tiers.device.kind is 'cuda' but PyTorch sees no CUDA device; "
                "install a CUDA build of torch, or set kind = 'cpu'"
            )
        self.host = host
        self.counters = counters
        self.torch_device = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index
        )
        self._in = torch.cuda.Stream(self.torch_device)
        self._out = torch.cuda.Stream(self.torch_device)
        self._clock: _DeviceClock | None = None  # Made when a trace needs it: it waits once.
        self._register_arena()

    def _register_arena(self) -> None:
        """Pins the arena for CUDA, without which copies are neither asynchronous nor fast."""
        arena = self.host.arena
        code = torch.cuda.cudart().cudaHostRegister(
            arena.address, arena.capacity_nbytes, _HOST_REGISTER_PORTABLE
        )
        if int(code) != 0:
            raise UnsupportedError(
                f"cudaHostRegister of {arena.capacity_nbytes} bytes failed with code {int(code)}; "
                "lower tiers.host.capacity or raise the locked-memory limit (ulimit -l)"
            )

    def reserve(self, nbytes: int) -> Region:
        return ResizedRegion(nbytes, self.torch_device)

    def reserve_resident(self, memory: torch.Tensor) -> Region:
        return ResidentRegion(memory)

    def attach(self, region: Region, block: Block) -> Copy:
        assert isinstance(region, ResizedRegion) and not region.is_attached
        region.storage.resize_(region.nbytes)
        region.is_attached = True
        return self.copy(self.host.tensor(block, nbytes=region.nbytes), all_of(region))

    def bring_back(self, region: Region, block: Block) -> Copy:
        assert isinstance(region, ResizedRegion)
        return self.copy(all_of(region), self.host.tensor(block, nbytes=region.nbytes))

    def detach(self, region: Region) -> None:
        assert isinstance(region, ResizedRegion) and region.is_attached
        region.storage.resize_(0)
        region.is_attached = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        inward = source.device.type == "cpu"
        stream = self._in if inward else self._out
        if source.dtype != target.dtype and not inward:
            source = source.to(target.dtype)  # Convert where it is fast, on the compute stream.
        nbytes = target.numel() * target.element_size()
        asked_ns = time.monotonic_ns()
        traced = self._trace(nbytes)
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            if traced is not None:
                traced.begun.record(stream)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(enable_timing=traced is not None)
            event.record(stream)
        (target if inward else source).record_stream(stream)
        self.counters.add("device_in_nbytes" if inward else "device_out_nbytes", nbytes)
        copy = CudaCopy(event, (source, target), traced)
        lane = Lane.COPIES_IN if inward else Lane.COPIES_OUT
        self.counters.tracer.watch(copy, lambda _: lane, "copy", asked_ns)
        return copy

    def _trace(self, nbytes: int) -> _TracedCopy | None:
        """Events with times for a copy, while somebody traces."""
        if not self.counters.tracer.is_on:
            return None
        self._clock = self._clock or _DeviceClock(self.torch_device)
        return _TracedCopy(self._clock, torch.cuda.Event(enable_timing=True), nbytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.host.arena.address)
