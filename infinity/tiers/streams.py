"""Compute on a device with streams: a bounded window of weights, copies beside the computation.

`StreamDevice` orders operations on the streams of a runtime (`Streams`): CUDA's (`tiers/cuda.py`),
or that of the simulated device, which reports operations without an order.

Note [Streams]
  Five streams: the current stream, which computes; `in` for copies of regions host -> device;
  `in-behind` for copies of other memory there, which wait for the computation so far, and would
  hold up weights on `in`; `out` for copies device -> host; `decode`, which makes weights of stored
  bytes. Two more, `link` and `sums`, carry the exchange between the devices of ranks
  (distributed/collective/exchange.py). A stream waits for another one by an event. The host waits
  for a stream only in `Copy.wait`.

  * Memory of regions is allocated and freed on `in`, so it passes from region to region, and never
    to or from activations: the memory reserved for weights does not grow with time. `decode` fills
    it behind `in`, as a use that `detach` waits for. The allocator reuses freed memory for later
    work of the stream that freed it; `detach` therefore makes `in` wait for the last uses of the
    region. The end of a use is recorded by `end_use`, not by `detach`. So a copy into the memory of
    an earlier unit does not wait for the unit that computes now, and runs beside its computation.
  * A region is used after `Copy.order`, by which the stream that is current waits for the copy.
    Branches of a module may run on streams of their own. In a forward the model's own waits order
    them; a backward may begin with a node of any of them, so each stream of a node that is reached
    waits for the copy, and the end of the use is noted for all.
  * Other device memory (gradients, activations, what rests there) belongs to the stream that was
    current when its copy was asked for. The copy waits for what that stream has to do until then,
    and keeps the tensor until that stream waits for the copy (`order`), or until the host has seen
    that the copy is done. So memory is freed without `record_stream`, which would keep it until the
    host polls.

Note [Backward]
  Autograd runs a node, its hooks included, in a thread of its own with the stream of the node's
  forward as the current one, and makes the caller's stream wait for all of them at the end
  (torch/csrc/autograd/engine.cpp, "Streaming backwards"). So in a backward, too, the current stream
  is the one that computes.

Note [Errors of a device]
  A kernel that reads memory that is gone fails after the call that has issued it, and a later call,
  which is not to blame, raises the error. So the error names the units whose weights left the
  device last.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from typing_extensions import override

from infinity.errors import DeviceError
from infinity.observe import Counters, Track
from infinity.tiers.device import (
    FINISHED,
    POISON_VARIABLE,
    Copy,
    Decoding,
    DeviceAdapter,
    Region,
    ResizedRegion,
)
from infinity.tiers.host import Block, HostPool

_MOST_RELEASED = 5  # Names in one message.


# -- The runtime -----------------------------------------------------------------------------------


class Event(Protocol):
    """The part of `torch.Event` that is used."""

    def record(self, stream: Any) -> None:
        """Puts the event behind the work issued on the stream so far."""

    def query(self) -> bool:
        """Whether the work before the event is over."""

    def synchronize(self) -> None:
        """Blocks until the work before the event is over."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this event to `later`; both are timed and over."""


class Stream(Protocol):
    """The part of `torch.Stream` that is used: hashable; two objects of one stream are equal."""

    def wait_event(self, event: Any) -> None:
        """Orders all later work of the stream after the event; returns at once."""


class Streams(Protocol):
    """The runtime of one device."""

    device: torch.device

    def new_stream(self, name: str) -> Stream:
        """Returns a stream of its own for transfers. `name`: for messages."""

    def new_event(self, *, is_timed: bool = False) -> Event:
        """Returns an event; with `is_timed` for `elapsed_time`."""

    def current(self) -> Stream:
        """The calling thread's."""

    def copy(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Issues a copy between host and device on the stream; returns at once."""

    def run(
        self,
        stream: Any,
        work: Callable[[], None],
        used: Sequence[ResizedRegion],
        made: ResizedRegion | None = None,
    ) -> None:
        """Issues on the stream all that `work` issues, which works in the memory of `used` and
        fills that of `made`."""

    def empty_region(self, stream: Any, nbytes: int, name: str = "") -> ResizedRegion:
        """A region that takes its memory on the stream. `name`: of the unit, for messages."""

    def begin_thread(self) -> None:
        """Makes the device that of the calling thread."""

    def empty_cache(self) -> None:
        """Gives memory that the allocator keeps for one stream back, for all."""

    def synchronize(self) -> None:
        """Blocks until nothing is left to do, on any stream."""


def event_behind(streams: Streams, stream: Stream) -> Event:
    """Returns an event behind the work issued on the stream so far."""
    event = streams.new_event()
    event.record(stream)
    return event


# -- Faults ----------------------------------------------------------------------------------------


class DeviceFaults:
    """The units that left one device last. Any thread."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._released: deque[str] = deque(maxlen=_MOST_RELEASED)
        self._has_failed = False  # What leaves from then on is not to blame.

    def note_released(self, unit: str) -> None:
        """Records that the weights of a unit have left."""
        if not self._has_failed:
            self._released.append(unit)

    def explained(self, error: Exception) -> DeviceError:
        """Returns the error of the package for one of the device."""
        self._has_failed = True
        released = tuple(dict.fromkeys(reversed(self._released.copy())))
        what = (str(error).splitlines() or [type(error).__name__])[0]
        names = ", ".join(map(repr, released)) or "none"
        message = (
            f"the device ({self._device}) reports an error of work that was issued before: {what}. "
            "After most errors no further call succeeds: end the process, and start again from a "
            "checkpoint. An illegal memory access is often a view of a weight that is used after "
            f"the weight has left; units that left last, the latest first: {names}. To find the "
            f"view, run a small model with the environment variable {POISON_VARIABLE}=1: the view "
            "reads as NaN there, and no call fails"
        )
        return DeviceError(message, released)


_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def reporting_faults(
    method: Callable[Concatenate[Any, _Arguments], _Answer],
) -> Callable[Concatenate[Any, _Arguments], _Answer]:
    """Makes a method of an object with `faults` raise DeviceError for an error of its device, which
    is the cause."""

    def reporting(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        try:
            return method(self, *args, **kwargs)
        except torch.AcceleratorError as error:
            raise self.faults.explained(error) from error

    functools.update_wrapper(reporting, method)
    return reporting


# -- The device ------------------------------------------------------------------------------------


class StreamCopy(Copy):
    """A copy on one of the transfer streams, known by the event behind it."""

    def __init__(
        self,
        device: StreamDevice,
        event: Event,
        *,
        owner: Stream | None,
        keep: object,
        begun: tuple[_DeviceClock, Event, int] | None = None,
    ) -> None:
        self._streams = device.streams
        self._event = event
        self.faults = device.faults
        self._owner = owner  # The stream that the memory of what is kept goes back to.
        self._keep: object = keep  # Tensors on the device.
        self._begun = begun  # If it is traced: the clock, the beginning, the bytes.

    @override
    @reporting_faults
    def done(self) -> bool:
        return self._event.query()

    @override
    @reporting_faults
    def order(self) -> None:
        current = self._streams.current()
        current.wait_event(self._event)
        if self._owner is not None and self._owner != current:
            self._owner.wait_event(self._event)
        self._keep = None

    @reporting_faults
    def order_stream(self, stream: Stream) -> None:
        """Orders all later work of `stream` after the copy."""
        stream.wait_event(self._event)

    @override
    @reporting_faults
    def wait(self) -> None:
        self._event.synchronize()
        self._keep = None

    def release_memory(self) -> None:
        """Drops the memory that the copy kept alive. The copy is over."""
        self._keep = None

    @override
    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        if self._begun is None or not self.done():
            return []
        clock, begun, nbytes = self._begun
        return [(0, nbytes, clock.ns_of(begun), clock.ns_of(self._event))]


class _Staging:
    """Device memory for stored bytes. Its users issue their work one behind the other, on any
    streams and in any thread."""

    def __init__(self, streams: Streams, memory: ResizedRegion) -> None:
        memory.take_memory()
        self._streams = streams
        self._memory = memory
        self._lock = threading.Lock()
        self._used: list[Event] = []  # By the last user, on each of its streams.

    @contextmanager
    def using(self, *streams: Stream) -> Iterator[ResizedRegion]:
        """See `StreamDevice.using_staging`."""
        with self._lock:
            for event in self._used:
                streams[0].wait_event(event)
            try:
                yield self._memory
            finally:  # A part of the work may have been issued.
                self._used = [event_behind(self._streams, stream) for stream in streams]


_CLOCK_NS = 60 * 10**9


class _DeviceClock:
    """Times of events on the host's clock.

    CUDA gives the time between two events in ms as fp32: the resolution is 4 us a minute after the
    origin, and 4 ms after ten hours. So the clock is for events of its first minute.
    """

    def __init__(self, streams: Streams) -> None:
        self._origin = streams.new_event(is_timed=True)
        self._origin.record(streams.current())
        self._origin.synchronize()
        self._origin_ns = time.monotonic_ns()

    @property
    def is_old(self) -> bool:
        """Whether further events need another clock."""
        return time.monotonic_ns() - self._origin_ns > _CLOCK_NS

    def ns_of(self, event: Event) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(event) * 1e6)


class StreamDevice(DeviceAdapter):
    """The device tier on a device with streams. Autograd threads may call it; the engine's lock
    orders them. `copy` is also called without it, by threads that serve other ranks."""

    shares_host_memory = False

    def __init__(self, name: str, host: HostPool, counters: Counters, streams: Streams) -> None:
        self.name = name
        self.host = host
        self.counters = counters
        self.torch_device = streams.device
        self.streams = streams
        self.faults = DeviceFaults(name)
        self._in = streams.new_stream("in")
        self._in_behind = streams.new_stream("in-behind")
        self._out = streams.new_stream("out")
        self._decoder: Stream | None = None
        self._clock: _DeviceClock | None = None  # Made when a trace needs one: that waits once.
        self._staging: list[_Staging] = []
        self._copying = threading.RLock()
        # Copies without another owner: the tensors that they keep live until they are done.
        self._under_way: deque[StreamCopy] = deque()

    # -- Regions -----------------------------------------------------------------------------------

    @override
    @reporting_faults
    def reserve(self, nbytes: int, name: str = "") -> Region:
        return self.streams.empty_region(self._in, nbytes, name)

    @reporting_faults
    def take(self, region: Region) -> None:
        """Gives the region its memory, which is ordered on the stream of `bring`."""
        assert isinstance(region, ResizedRegion) and not region.is_attached and not region.uses
        region.take_memory()

    @contextmanager
    def _taking(self, region: Region) -> Iterator[ResizedRegion]:
        """Gives the region its memory for work that is issued to fill it. Where that fails, such as
        without memory for the arithmetic, the region is detached, and the next use tries again."""
        self.take(region)
        assert isinstance(region, ResizedRegion)
        try:
            yield region
        except BaseException:
            self.detach(region)
            raise

    @override
    @reporting_faults
    def attach(self, region: Region, block: Block) -> Copy:
        with self._taking(region) as memory:
            on_host = self.host.tensor(block, nbytes=region.nbytes)
            return self._issue(self._in, on_host, memory.content)

    @override
    @reporting_faults
    def attach_decoded(self, region: Region, block: Block | None, decoding: Decoding) -> Copy:
        streams = [self.decoder] if block is None else [self._in, self.decoder]
        with self._taking(region), self.using_staging(decoding.memory, *streams) as staging:
            if block is not None:
                self._issue(self._in, self.host.tensor(block), staging.content[: block.nbytes])
            return self.decode(region, staging, decoding, self._in)

    @override
    @reporting_faults
    def stage(self, block: Block, memory: int) -> Copy:
        with self.using_staging(memory, self._in) as staging:
            return self._issue(self._in, self.host.tensor(block), staging.content[: block.nbytes])

    def decode(
        self, region: Region, staging: ResizedRegion, decoding: Decoding, behind: Stream
    ) -> StreamCopy:
        """Issues on `decoder` the decoding of what is in `using_staging` into a region, behind the
        work that `behind` has so far."""
        assert isinstance(region, ResizedRegion)
        stream, stored = self.decoder, staging.content[: decoding.nbytes]
        stream.wait_event(event_behind(self.streams, behind))
        try:
            self.streams.run(stream, lambda: decoding.fill(stored), used=[staging], made=region)
        finally:  # A part of the work may have been issued.
            self.note_use(region, stream)
        return self.watch_link(stream, None)

    @property
    def decoder(self) -> Stream:
        """The stream that decodes; from `prepare_decoding` on."""
        assert self._decoder is not None, "no stored bytes were foreseen"
        return self._decoder

    @override
    @reporting_faults
    def prepare_decoding(self, nbytes: int, count: int) -> None:
        self._decoder = self.streams.new_stream("decode")
        memories = [self.streams.empty_region(self._in, nbytes) for _ in range(count)]
        self._staging = [_Staging(self.streams, memory) for memory in memories]

    def using_staging(self, memory: int, *streams: Stream) -> AbstractContextManager[ResizedRegion]:
        """Lends a memory of `prepare_decoding` for work that is issued on the first stream, behind
        the work of the last user, and on others, which wait for the first. Any thread."""
        return self._staging[memory].using(*streams)

    @override
    @reporting_faults
    def issued(self) -> Copy:
        return self.watch_link(self.streams.current(), None)

    @override
    def current_stream(self) -> Any:  # A `Stream`, which hashes as torch's and every object do.
        return self.streams.current()

    @override
    def begin_use(self, region: Region) -> None:
        if isinstance(region, ResizedRegion):
            region.streams.add(self.streams.current())

    @override
    @reporting_faults
    def end_use(self, region: Region, *, is_last: bool = True) -> None:
        if isinstance(region, ResizedRegion):
            for stream in {*region.streams, self.streams.current()}:
                self.note_use(region, stream)
            if is_last:
                region.streams.clear()

    @reporting_faults
    def note_use(self, region: ResizedRegion, stream: Stream) -> None:
        """Records that the work issued so far is the stream's last use of the region for now."""
        region.uses[stream] = event_behind(self.streams, stream)

    @override
    @reporting_faults
    def bring_back(self, region: Region, block: Block) -> Copy:
        assert isinstance(region, ResizedRegion) and region.is_attached
        self.end_use(region)
        for event in region.uses.values():
            self._out.wait_event(event)
        on_host = self.host.tensor(block, nbytes=region.nbytes)
        copy = self._issue(self._out, on_host, region.content)
        self.note_use(region, self._out)
        return copy

    @override
    @reporting_faults
    def detach(self, region: Region) -> None:
        assert isinstance(region, ResizedRegion) and region.is_attached
        for event in region.uses.values():
            # INV-2: copies in wait for the last uses of this memory.
            self._in.wait_event(event)
        region.uses.clear()
        region.drop_memory()
        if region.name:
            self.faults.note_released(region.name)

    # -- Other memory ------------------------------------------------------------------------------

    @override
    @reporting_faults
    def allocate(self, nbytes: int) -> torch.Tensor:
        return super().allocate(nbytes)

    @override
    @reporting_faults
    def copy(self, source: torch.Tensor, target: torch.Tensor, behind: Copy = FINISHED) -> Copy:
        inward = self.is_on_host(source)
        stream, on_host, on_device = (
            (self._in_behind, source, target) if inward else (self._out, target, source)
        )
        owner = self.streams.current()
        with self._copying:
            stream.wait_event(event_behind(self.streams, owner))
            if isinstance(behind, StreamCopy):
                behind.order_stream(stream)
            if inward:  # The memory may be that of a region.
                stream.wait_event(event_behind(self.streams, self._in))
            copy = self._issue(stream, on_host.detach(), on_device.detach(), owner)
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft().release_memory()
            self._under_way.append(copy)
        return copy

    # -- Between the devices of several ranks: see distributed/collective/exchange.py --------------

    @reporting_faults
    def bring(self, on_host: torch.Tensor, on_device: torch.Tensor) -> StreamCopy:
        """Issues a copy to memory whose earlier uses `inward_waits` has ordered."""
        return self._issue(self._in, on_host, on_device)

    @reporting_faults
    def inward_waits(self, event: Event) -> None:
        """Orders all later copies of regions to the device after the event."""
        self._in.wait_event(event)

    @reporting_faults
    def inward_event(self) -> Event:
        """Returns an event behind the copies of regions to the device issued so far."""
        return event_behind(self.streams, self._in)

    @reporting_faults
    def watch_link(self, link: Stream, keep: object, *, owner: Stream | None = None) -> StreamCopy:
        """Returns a copy that is done when a stream has run the operations issued so far. `keep`:
        tensors whose memory belongs to `owner`."""
        event = event_behind(self.streams, link)
        return StreamCopy(self, event, owner=owner, keep=keep)

    @override
    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device != self.torch_device

    def _issue(
        self,
        stream: Stream,
        on_host: torch.Tensor,
        on_device: torch.Tensor,
        owner: Stream | None = None,
    ) -> StreamCopy:
        assert on_host.dtype == on_device.dtype  # A conversion would need memory of its own.
        inward = stream is not self._out
        nbytes = on_host.numel() * on_host.element_size()
        asked_ns = time.monotonic_ns()
        begun = self._begin_trace(stream, nbytes)
        source, target = (on_host, on_device) if inward else (on_device, on_host)
        self.streams.copy(stream, source, target)
        event = self.streams.new_event(is_timed=begun is not None)
        event.record(stream)
        copy = StreamCopy(self, event, owner=owner, keep=on_device, begun=begun)
        self.counters.add("device_in_nbytes" if inward else "device_out_nbytes", nbytes)
        track = Track.COPIES_IN if inward else Track.COPIES_OUT
        self.counters.tracer.watch(copy, lambda _: track, "copy", asked_ns)
        return copy

    def _begin_trace(self, stream: Stream, nbytes: int) -> tuple[_DeviceClock, Event, int] | None:
        """Records the beginning of a copy on the stream while a trace is written."""
        if not self.counters.tracer.is_on:
            return None
        if self._clock is None or self._clock.is_old:
            self._clock = _DeviceClock(self.streams)
        event = self.streams.new_event(is_timed=True)
        event.record(stream)
        return self._clock, event, nbytes

    # -- The end -----------------------------------------------------------------------------------

    @property
    @override
    def begin_thread(self) -> Callable[[], None]:
        return self.streams.begin_thread

    @override
    @reporting_faults
    def give_back_memory(self) -> None:
        self.streams.empty_cache()

    @override
    @reporting_faults
    def synchronize(self) -> None:
        self.streams.synchronize()

    @override
    def close(self) -> None:
        try:
            self.synchronize()
        finally:
            self._under_way.clear()
