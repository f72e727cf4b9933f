"""A device without a GPU: its own memory, late copies, poisoned releases, checked order.

The device is the real stream device (`tiers/streams.py`) over a runtime whose streams are worker
threads. The caller computes immediately; copies run after a random delay. Two mechanisms make a
forgotten wait fail on a machine without a GPU:

* Bytes. A read before `Copy.order()` returns NaN, and so does a read after `detach`, whose memory
  is filled with NaN. Memory that is not kept during its copy is freed before the copy runs.
* Order. Every stream knows the moment up to which it follows every other stream and the host, from
  events (vector clocks: Mattern, "Virtual time and global states of distributed systems", 1989).
  `UnorderedAccess` is raised, for any timing of the threads, by a copy that does not follow the
  computation of its source, by memory that is reused before its last use has ended, by a block
  that is freed while a copy may still read it, and by a kernel (`SimulatedStreams.kernel`) that
  does not follow the copy of what it reads.

Memory outside regions belongs to the stream that was current when its copy was asked for. Nothing
shows when an allocator hands it on, so it counts as handed on when the engine releases it: its
stream must follow the copy by then, or the host know that the copy is over.

Streams of computation run their tasks at once, in the caller. There may be several: the one of
`computing_on` is current in its thread, as with `torch.cuda.stream`. A stream of transfers holds
`queue_limit` tasks; as with CUDA, submitting one more waits until there is space.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from typing_extensions import override

from infinity.observe import Counters
from infinity.tiers.device import FINISHED, POISON_BYTE, Copy, Region, ResizedRegion
from infinity.tiers.host import Block, HostPool
from infinity.tiers.streams import Event, Stream, StreamDevice, Streams


class UnorderedAccess(AssertionError):
    """Two uses of the same memory without a defined order."""


class _EventOrder:
    """The moments up to which one stream, or the host, follows all others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {}

    def come_after(self, seen: dict[str, int]) -> None:
        for name, moment in seen.items():
            self.seen[name] = max(self.seen.get(name, 0), moment)

    def require(self, other: str, moment: int, what: str) -> None:
        if self.name != other and self.seen.get(other, 0) < moment:
            raise UnorderedAccess(f"{self.name} does not wait for {other}: {what}")


class SimulatedStream(_EventOrder, Stream):
    """One of the transfer streams, or (without a worker) the computing stream, which runs tasks
    immediately."""

    def __init__(self, streams: SimulatedStreams, name: str, *, has_worker: bool) -> None:
        super().__init__(name)
        self.brought: SimulatedMemory | None = None  # The memory of the last copy.
        self._queued: deque[Future[int]] = deque()  # Not known to be over; the oldest first.
        self._streams = streams
        self._worker = StreamWorker(f"simulated-{name}") if has_worker else None

    def submit(self, work: Any) -> Future[int]:
        """Runs `work` after the tasks submitted so far. The result is its end time in
        nanoseconds."""
        with self._streams.noting:
            self.come_after(self._streams.host.seen)
            self.seen[self.name] = self._streams.tick()
            while len(self._queued) >= self._streams.queue_limit:
                self._queued.popleft().exception()  # Waits for the oldest; its error is kept.

        def run() -> int:
            work()
            return time.monotonic_ns()

        if self._worker is not None:
            future = self._worker.submit(run)
            if not self._worker.is_current():
                self._queued.append(future)
            return future
        done: Future[int] = Future()
        done.set_result(run())
        return done

    @override
    def wait_event(self, event: SimulatedEvent) -> None:
        self.submit(event.result)
        with self._streams.noting:
            self.come_after(event.seen)
            if self._worker is None:
                self._streams.raise_failure()
                if event.brought is not None and event.brought.is_attached:
                    event.brought.last_uses[self.name] = self.seen[self.name]  # A use begins.

    def wait_stream(self, other: SimulatedStream) -> None:
        """See `torch.Stream.wait_stream`."""
        event = SimulatedEvent(self._streams)
        event.record(other)
        self.wait_event(event)

    def runs_here(self) -> bool:
        """Whether the calling thread is this stream's worker."""
        return self._worker is not None and self._worker.is_current()

    def close(self) -> None:
        """Ends the worker after the tasks that were issued."""
        if self._worker is not None:
            self._worker.close()


class SimulatedEvent(Event):
    """See `torch.Event`."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self._streams = streams
        self._over: Future[int] | None = None
        self.seen: dict[str, int] = {}
        self.brought: SimulatedMemory | None = None

    @override
    def record(self, stream: SimulatedStream) -> None:
        with self._streams.noting:
            self._over = stream.submit(lambda: None)
            self.seen = dict(stream.seen)
            self.brought = stream.brought

    def result(self) -> int:
        """Waits for the tasks before the event. Returns the time of its end, in nanoseconds."""
        assert self._over is not None, "an event that was not recorded is waited for"
        return self._over.result()

    @override
    def query(self) -> bool:
        self._streams.check_thread()
        assert self._over is not None
        if not self._over.done():  # Asked once: the stream may end between two answers.
            return False
        self.synchronize()
        return True

    @override
    def synchronize(self) -> None:
        self._streams.check_thread()
        self.result()
        with self._streams.noting:
            self._streams.host.come_after(self.seen)
        self._streams.raise_failure()

    @override
    def elapsed_time(self, later: SimulatedEvent) -> float:
        return (later.result() - self.result()) / 1e6


class SimulatedMemory(ResizedRegion):
    """Memory that always exists, so that a wrong read returns poison instead of crashing."""

    def __init__(self, stream: SimulatedStream, nbytes: int, name: str = "") -> None:
        super().__init__(nbytes, torch.device("cpu"), name)
        self.content.fill_(POISON_BYTE)
        self._stream = stream
        self.last_uses: dict[str, int] = {}  # By stream: the moment of its last use.
        self.filled: tuple[str, int] | None = None  # The stream and moment of the last copy in.

    @override
    def _resize(self, nbytes: int) -> None:
        return None

    @override
    def drop_memory(self) -> None:
        for name, moment in self.last_uses.items():
            self._stream.require(name, moment, "the space of a region is given to others")
        self.last_uses.clear()
        self.content.fill_(POISON_BYTE)
        self._stream.submit(lambda: self.content.fill_(POISON_BYTE))  # After late copies, too.
        self.is_attached, self.filled = False, None


class SimulatedStreams(Streams):
    """The runtime: worker threads, and their order. All callers' threads count as the host."""

    device = torch.device("cpu")

    def __init__(self, seed: int, delay_s: float, queue_limit: int = 1024) -> None:
        self._random = random.Random(seed)
        self.queue_limit = queue_limit
        self.num_emptied = 0  # Calls of `empty_cache`.
        self._local = threading.local()
        self._delay_s = delay_s
        self._moments = itertools.count(1)
        self._failure: BaseException | None = None
        self.noting = threading.RLock()  # Guards the record of the order.
        self.host = _EventOrder("the host")
        self.computing = SimulatedStream(self, "compute", has_worker=False)  # The current stream.
        self.transfer: list[SimulatedStream] = []
        self.asked = 0  # The moment up to which the next copy depends on the computing stream.
        self._regions: dict[int, SimulatedMemory] = {}  # By address.
        # Copies whose end the host does not know: (first address, end, stream, moment).
        self.copies: list[tuple[int, int, str, int]] = []

    @override
    def begin_thread(self) -> None:
        self._local.has_begun = True

    def check_thread(self) -> None:
        """Raises in a thread of the engine's that has not begun."""
        name = threading.current_thread().name
        assert not name.startswith("infinity-") or hasattr(self._local, "has_begun"), name

    def tick(self) -> int:
        """Returns the number of the next operation, which orders accesses."""
        return next(self._moments)

    @override
    def new_stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(self, name, has_worker=True)
        self.transfer.append(stream)
        return stream

    @override
    def new_event(self, *, is_timed: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self)

    @override
    def current(self) -> SimulatedStream:
        chosen: SimulatedStream | None = getattr(self._local, "stream", None)
        return chosen or self.computing

    def new_computing(self, name: str) -> SimulatedStream:
        """Another stream of computation."""
        return SimulatedStream(self, name, has_worker=False)

    @contextmanager
    def computing_on(self, stream: SimulatedStream) -> Iterator[None]:
        """Makes the stream current in this thread for the time of a `with` block."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def kernel(self, *operands: torch.Tensor) -> None:
        """Checks and records that a kernel of the current stream works on these tensors. Those that
        are in no region are skipped."""
        stream = self.current()
        with self.noting:
            touched = [
                self._regions.get(operand.untyped_storage().data_ptr()) for operand in operands
            ]
            stream.submit(lambda: None)
            for memory in touched:
                if memory is None:
                    continue
                if memory.filled is not None:
                    stream.require(*memory.filled, "a kernel reads what has not been copied yet")
                memory.last_uses[stream.name] = stream.seen[stream.name]

    @override
    def empty_region(self, stream: SimulatedStream, nbytes: int, name: str = "") -> ResizedRegion:
        memory = SimulatedMemory(stream, nbytes, name)
        if nbytes:
            self._regions[memory.storage.data_ptr()] = memory
        return memory

    @override
    def copy(self, stream: SimulatedStream, source: torch.Tensor, target: torch.Tensor) -> None:
        with self.noting:
            self._copy(stream, source, target)

    def _copy(self, stream: SimulatedStream, source: torch.Tensor, target: torch.Tensor) -> None:
        inward = stream.name != "out"
        on_host, on_device = (source, target) if inward else (target, source)
        region = self._regions.get(on_device.data_ptr())
        uses = {self.current().name: self.asked} if region is None else region.last_uses
        for name, moment in uses.items():
            stream.require(name, moment, "memory is copied that is still in use")
        spans = [(side.data_ptr(), side.data_ptr() + side.nbytes) for side in (source, target)]
        stream.come_after(self.host.seen)
        for start, end in spans:
            for name, moment in self._copies_of(start, end):
                stream.require(name, moment, "one side of a copy is that of another")
        # The memory of a region exists. Other memory is kept by the caller, as the real device
        # needs.
        keep = on_device if region is not None else None
        owner, issued = self.current(), [0]

        def hand_on() -> None:
            # No lock: a thread that collects garbage must not wait for one that waits for it.
            if (
                max(stream_owner.seen.get(stream.name, 0) for stream_owner in (owner, self.host))
                < issued[0]
            ):
                self._failure = self._failure or UnorderedAccess(
                    f"memory goes back to {owner.name}, which does not wait for its copy "
                    f"{stream.name}"
                )

        if region is None:
            weakref.finalize(on_device, hand_on).atexit = False
        seen = weakref.ref(on_device)
        delay_s = self._random.random() * self._delay_s

        def run(keep: torch.Tensor | None = keep) -> None:
            time.sleep(delay_s)
            memory = seen()
            try:
                if memory is None:
                    raise UnorderedAccess(f"memory is gone before it is copied {stream.name}")
                with torch.no_grad():
                    _ = memory.copy_(on_host) if inward else on_host.copy_(memory)
            except BaseException as error:
                self._failure = self._failure or error

        stream.submit(run)
        issued[0] = stream.seen[stream.name]
        stream.brought = region
        if region is not None:
            region.last_uses[stream.name] = stream.seen[stream.name]
            if inward:
                region.filled = stream.name, stream.seen[stream.name]
        self.copies = [copy for copy in self.copies if self.host.seen.get(copy[2], 0) < copy[3]]
        self.copies += [(*span, stream.name, stream.seen[stream.name]) for span in spans]

    @override
    def run(
        self,
        stream: SimulatedStream,
        work: Callable[[], None],
        used: Sequence[ResizedRegion],
        made: ResizedRegion | None = None,
    ) -> None:
        touched = [*used] if made is None else [*used, made]

        def carry_out() -> None:
            time.sleep(delay_s)
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                self._failure = self._failure or error

        with self.noting:
            delay_s = self._random.random() * self._delay_s
            stream.come_after(self.host.seen)
            for memory in touched:
                assert isinstance(memory, SimulatedMemory) and memory.is_attached
                for name, moment in memory.last_uses.items():
                    stream.require(name, moment, "ranks exchange memory that is still in use")
            stream.submit(carry_out)
            for memory in touched:
                assert isinstance(memory, SimulatedMemory)
                memory.last_uses[stream.name] = stream.seen[stream.name]
            stream.brought = made if isinstance(made, SimulatedMemory) else None

    def refuse_free(self, start: int, end: int) -> None:
        """Checks [start, end) before the host frees it."""
        with self.noting:
            for name, moment in self._copies_of(start, end):
                self.host.require(name, moment, "a block that is being copied is freed")

    def _copies_of(self, start: int, end: int) -> Iterator[tuple[str, int]]:
        for first, after, name, moment in self.copies:
            if first < end and start < after:
                yield name, moment

    @override
    def empty_cache(self) -> None:
        self.num_emptied += 1

    @override
    def synchronize(self) -> None:
        for stream in self.transfer:
            if not stream.runs_here():  # A stream does not wait for its own later tasks.
                event = self.new_event()
                event.record(stream)
                event.synchronize()

    def raise_failure(self) -> None:
        """Raises the first unordered access that was found, every time it is called."""
        if self._failure is not None:
            raise self._failure


class SimulatedDevice(StreamDevice):
    """Replaces the CUDA adapter: `infinity.offload(model, config, device=SimulatedDevice(seed))`.

    `delay_s` bounds the random delay of a copy. The engine calls `open` with its host tier.
    """

    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 0, *, delay_s: float = 0.002, queue_limit: int = 1024) -> None:
        self.streams: SimulatedStreams = SimulatedStreams(seed, delay_s, queue_limit)
        self.is_closed = False
        self.attached = 0
        self.attached_high_water = 0
        self.attached_nbytes = 0
        self.attached_high_water_nbytes = 0

    @override
    def open(self, host: HostPool, counters: Counters) -> None:
        """Receives the arena and the counters. Freeing a block that is being copied fails then."""
        super().__init__("simulated", host, counters, self.streams)
        free = host.free

        def checked(block: Block) -> None:
            self.streams.refuse_free(block.address, block.address + block.range.nbytes)
            free(block)

        host.free = checked  # type: ignore[method-assign]

    @override
    def is_on_host(self, tensor: torch.Tensor) -> bool:
        offset_nbytes = tensor.data_ptr() - self.host.arena.address
        return 0 <= offset_nbytes < self.host.capacity_nbytes

    @override
    def take(self, region: Region) -> None:
        self.attached += 1
        self.attached_high_water = max(self.attached_high_water, self.attached)
        self.attached_nbytes += region.nbytes
        self.attached_high_water_nbytes = max(self.attached_high_water_nbytes, self.attached_nbytes)
        super().take(region)

    @override
    def end_use(self, region: Region, *, is_last: bool = True) -> None:
        if isinstance(region, SimulatedMemory):
            region.last_uses[self.streams.current().name] = self.streams.tick()
        super().end_use(region, is_last=is_last)

    @override
    def detach(self, region: Region) -> None:
        super().detach(region)
        self.attached -= 1
        self.attached_nbytes -= region.nbytes

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor, behind: Copy = FINISHED) -> Copy:
        with self._copying:
            self.streams.asked = self.streams.tick()
            return super().copy(source, target, behind)

    @override
    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            try:
                super().close()
            finally:
                for stream in self.streams.transfer:
                    stream.close()


class StreamWorker:
    """A thread that runs one task after the other. The interpreter does not wait for it at exit, so
    a failed run cannot block the exit."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[[], int], Future[int]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], int]) -> Future[int]:
        """Runs `work` after the tasks before it."""
        future: Future[int] = Future()
        if self._thread.is_alive():
            self._work.put((work, future))
        else:  # All submitted tasks have ended.
            future.set_result(work())
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del item, work, future  # References must not live until the next task arrives.

    def close(self) -> None:
        """Waits until all submitted tasks have ended."""
        self._work.put(None)
        if not self.is_current():
            self._thread.join()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread: garbage is collected on any thread."""
        return self._thread is threading.current_thread()
