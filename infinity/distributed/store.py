"""The state of a rank that owns shards: its own state, and full weights from all ranks.

For the weight cache, a full unit with sharded weights is on a remote tier: a read fetches its
shards from all ranks, and a write stores this rank's shard. Shards are requested one-sidedly. That
is safe without a lock: a shard changes only while no rank reads it (design/0005). A read of a shard
that awaits the update of the last step waits for the update (`pending.py`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from infinity.distributed.kept_shards import KeptShards
from infinity.distributed.pending import PendingShards
from infinity.distributed.sums.partials import PartialGradient, PartialGradients
from infinity.distributed.wire.channel import Fill
from infinity.distributed.wire.protocol import RemoteRequest
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.private.torch import TensorBase
from infinity.sizes import KIB, MIB, PAGE_NBYTES, align_down, align_up
from infinity.state.partition import Partition, Shard, ShardSegment
from infinity.state.store import DeviceLocation, LocalStore, StateRange, StateStore
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import PageDigests
from infinity.storage.daemon_threads import DaemonThreads
from infinity.storage.generations import UndecidedContent
from infinity.storage.protocol import Priority, Transfer
from infinity.tiers.host import Block, HostPool

# Shards that rest on a drive are served through a block of this size, one for each rank;
SERVING_NBYTES = MIB
# gradients that the reduce buffer has no space for pass a smaller one, one for each rank.
TAKING_NBYTES = 256 * KIB
_WINDOW_NBYTES = SERVING_NBYTES // 2  # One is read while the other one is used.
_CODES = tuple(StateKind)


def serving_nbytes(partition: Partition) -> int:
    """Returns the host bytes that serving keeps: two blocks for each rank."""
    return (SERVING_NBYTES + TAKING_NBYTES) * partition.count


class MultiTransfer(Transfer):
    """The transfers of full weights from all ranks. `wait` returns when none writes any more."""

    def __init__(self, jobs: Sequence[RemoteRequest]) -> None:
        self._jobs = jobs

    @override
    def done(self) -> bool:
        return all(job.done() for job in self._jobs)

    @override
    def wait(self) -> None:
        first: BaseException | None = None
        for job in self._jobs:
            try:
                job.wait()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


class DistributedStore(StateStore):
    """The state of this rank's units, and the way to the weights of full units.

    `local` has this rank's state, which rests in `host` and `volume`; `partition.units` are its
    units. A `StateStore` that reads a sharded unit from all ranks. The training thread reads and
    writes full units, the threads of `transport` serve.
    """

    def __init__(
        self,
        local: LocalStore,
        partition: Partition,
        transport: PeerTransport,
        *,
        host: HostPool,
        counters: Counters,
        reduce_buffer_nbytes: int,
        begin_thread: Callable[[], None],
    ) -> None:
        """`begin_thread`: see `DeviceAdapter.begin_thread`."""
        super().__init__(local.resting)  # Units: the full ones, then this rank's shards.
        self.begin_thread = begin_thread
        self.local = local
        self.partition = partition
        self.transport = transport
        self._host = host
        self._counters = counters
        # By rank: each belongs to one thread.
        ranks = range(partition.count)
        self._reading = [self._windows(f"serving rank {r}") for r in ranks]
        self._taking = [self._allocate(TAKING_NBYTES, f"gradients of rank {r}") for r in ranks]
        self.partials = PartialGradients(
            reduce_buffer_nbytes,
            host=host,
            volume=local.volume,
            window=self._taking[partition.rank],
            counters=counters,
        )
        self.pending = PendingShards()
        self.kept = KeptShards(host)
        self._own = DaemonThreads(1, "infinity-own-shard", begin_thread)
        # Units whose shard was written past the weight cache, which may keep an older copy.
        self.rewritten: set[int] = set()
        self.is_filling = True  # Until all ranks have written their first values.

    def _allocate(self, nbytes: int, what: str) -> Block:
        block = self._host.allocate(nbytes, what)
        assert block is not None, "the budget has space for serving"
        return block

    def _windows(self, what: str) -> list[Block]:
        block = self._allocate(SERVING_NBYTES, what)
        starts = range(0, SERVING_NBYTES, _WINDOW_NBYTES)
        return [self._host.carve(block, start, _WINDOW_NBYTES) for start in starts]

    def close(self) -> None:
        """Waits for transfers of the own shard and ends their thread."""
        self._own.close()

    # -- Full units --------------------------------------------------------------------------------

    def is_sharded(self, unit: Unit, kind: StateKind) -> bool:
        """Whether the state kind of a full unit is divided over ranks."""
        return kind is StateKind.PARAMETERS and self.partition.is_gathered(unit.index)

    @override
    def _read(self, at: StateRange, block: Block, priority: Priority) -> Transfer:
        """All shards of a unit are read."""
        if self.is_sharded(at.unit, at.kind):
            assert at.offset_nbytes == 0
            full = self._host.tensor(block, nbytes=at.unit.weight_nbytes)
            return self.gather_weights(at.unit.index, full, is_local_present=False)
        read = partial(
            self.local.read, at.unit, at.kind, block,
            priority=priority, offset_nbytes=at.offset_nbytes, nbytes=at.nbytes,
        )  # fmt: skip
        is_kept = at.kind is StateKind.PARAMETERS and self.kept.has(at.unit.index)
        if self.pending.is_pending(at.unit.index) or is_kept:
            sink = self._host.tensor(block, nbytes=at.nbytes)
            return self._in_own_thread(self._read_updated, at, sink, read)
        return read()

    @override
    def _write(
        self,
        at: StateRange,
        block: Block,
        priority: Priority,
        undecided: UndecidedContent | None,
        digests: PageDigests | None,
    ) -> Transfer:
        """This rank writes its shard of a sharded unit."""
        assert undecided is None, "the thread of updates writes to the local store"
        index = at.unit.index
        if self.is_sharded(at.unit, at.kind):
            assert at.offset_nbytes == 0
            self.rewritten.add(index)
            full = self._host.tensor(block, nbytes=at.unit.weight_nbytes)
            return self._in_own_thread(self._keep_local, index, full)
        if at.kind is StateKind.PARAMETERS:
            self.kept.forget(index)
        return self.local.write(
            at.unit, at.kind, block, offset_nbytes=at.offset_nbytes, nbytes=at.nbytes,
            priority=priority, digests=digests,
        )  # fmt: skip

    def gather_weights(self, index: int, full: torch.Tensor, *, is_local_present: bool) -> Transfer:
        """Starts to fetch the sharded weights of a unit to their places in `full`.

        full: uint8, host, shape (weight_nbytes,)
        is_local_present: this rank's shard is in `full` already

        While first values come, owners write shards in their own time, and this rank needs only its
        own part of what it writes. The other parts are NaN (in bits, all ones).
        """
        jobs: list[RemoteRequest] = []
        sources = self.partition.sources(index)
        if self.is_filling:
            full.fill_(0xFF)
            sources = (self.partition.local[index],)
        for shard in sources:
            segments = self._served(shard, StateKind.PARAMETERS)
            sinks = [
                full[segment.full_offset_nbytes : segment.full_offset_nbytes + segment.nbytes]
                for segment in segments
            ]
            if not segments:
                continue
            if shard.rank != self.partition.rank:
                views = [_memory_of(sink) for sink in sinks]
                self.count_elsewhere(shard.rank, sum(view.nbytes for view in views))
                jobs.append(
                    self.transport.get(shard.rank, index, _CODES.index(StateKind.PARAMETERS), views)
                )
            elif not is_local_present:
                jobs.append(self._in_own_thread(self._bring_local, index, segments, sinks))
        return MultiTransfer(jobs)

    def count_elsewhere(self, rank: int, nbytes: int) -> None:
        """Counts weights that this rank receives of `rank`, if that is on another node."""
        if rank not in self.partition.node:
            self._counters.add("ranks_gathered_between_nodes_nbytes", nbytes)

    def read_served(self, index: int, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Returns a copy of what this rank serves of a unit's weights: uint8, host, each segment at
        its place in the shard. `allocate` gives its memory, from a number of bytes."""
        shard = self.partition.shards[index][self.partition.rank]
        segments = self._served(shard, StateKind.PARAMETERS)
        nbytes = max((s.shard_offset_nbytes + s.nbytes for s in segments), default=0)
        local = allocate(nbytes)
        sinks = [local[s.shard_offset_nbytes : s.shard_offset_nbytes + s.nbytes] for s in segments]
        self._in_own_thread(self._bring_local, index, segments, sinks).wait()
        return local

    def gather_state(self, index: int, state_kind: StateKind) -> torch.Tensor:
        """Returns a copy of one state kind of a full unit, from all ranks: shape (state_numel,)."""
        unit = self.partition.full_units[index]
        dtype = unit.dtype(state_kind)
        assert dtype is not None and state_kind is not StateKind.PARAMETERS
        full = torch.zeros(unit.state_numel, dtype=dtype, device="cpu")
        shards = [shard for shard in self.partition.shards[index] if shard.stop > shard.start]
        MultiTransfer(
            [
                self.get_state(shard, state_kind, full[shard.start : shard.stop].view(torch.uint8))
                for shard in shards
            ]
        ).wait()
        return full

    def get_state(self, shard: Shard, state_kind: StateKind, sink: torch.Tensor) -> RemoteRequest:
        """Starts to fetch one state kind of any rank's shard, as it rests there, into `sink`.

        sink: uint8, host, shape (shard.unit.nbytes(state_kind),), not empty
        """
        if shard.rank == self.partition.rank:
            segments = [ShardSegment(0, 0, sink.numel())]
            return self._in_own_thread(self._copy_state, shard, state_kind, segments, [sink])
        index = shard.unit.index - len(self.partition.full_units)
        return self.transport.get(shard.rank, index, _CODES.index(state_kind), [_memory_of(sink)])

    # -- Gradients ---------------------------------------------------------------------------------

    def receive(
        self, dtype: torch.dtype, nbytes: int, receive: Fill, *, giver: int
    ) -> PartialGradient:
        """Receives a partial gradient from another rank.

        Runs in the thread that serves that rank, which has a block of its own.
        """
        return self.partials.receive(dtype, nbytes, receive, window=self._taking[giver])

    # -- This rank's shard -------------------------------------------------------------------------

    def serve(self, unit: int, state_kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        """The bytes of this rank's shard of a unit, for another rank; see `protocol.Service`."""
        shard, kind = self.partition.shards[unit][self.partition.rank], _CODES[state_kind]
        segments = self._served(shard, kind)
        return sum(segment.nbytes for segment in segments), self._parts(shard, kind, segments, to)

    def _served(self, shard: Shard, state_kind: StateKind) -> Sequence[ShardSegment]:
        if state_kind is StateKind.PARAMETERS:
            return self.partition.served(shard)
        nbytes = shard.unit.nbytes(state_kind)
        return [ShardSegment(0, 0, nbytes)] if nbytes else []

    def _read_updated(
        self, at: StateRange, sink: torch.Tensor, read: Callable[[], Transfer]
    ) -> None:
        shard = at.unit.index
        self.pending.await_update(shard)
        end_nbytes = at.offset_nbytes + at.nbytes
        if at.kind is StateKind.PARAMETERS:
            with self.kept.lent(shard, is_own=True) as kept:
                if kept is not None and end_nbytes <= kept.numel():
                    sink.copy_(kept[at.offset_nbytes : end_nbytes])
                    return
        read().wait()

    def _parts(
        self, shard: Shard, state_kind: StateKind, segments: Iterable[ShardSegment], reader: int
    ) -> Iterator[memoryview]:
        """Yields the bytes of `segments` in parts. A part is valid until the next one. Of parts
        that rest on a drive, one is read while the one before it is used. State on the host is its
        own part, and so are weights that are kept."""
        self.pending.await_update(shard.unit.index)
        unit, is_full = shard.unit, False
        if state_kind is StateKind.PARAMETERS and not self.partition.shards_parameters:
            unit, is_full = (
                self.partition.full_units[unit.index - len(self.partition.full_units)],
                True,
            )
        starts = [s.full_offset_nbytes if is_full else s.shard_offset_nbytes for s in segments]
        ranges = [(at, at + s.nbytes) for at, s in zip(starts, segments, strict=True)]
        host_view = self.host_view(unit, state_kind)
        if host_view is not None:
            yield from (_memory_of(host_view[start:stop]) for start, stop in ranges)
            return
        if state_kind is StateKind.PARAMETERS:
            with self.kept.lent(unit.index, is_own=reader == self.partition.rank) as kept:
                if kept is not None and all(stop <= kept.numel() for _, stop in ranges):
                    yield from (_memory_of(kept[start:stop]) for start, stop in ranges)
                    return
        windows = self._reading[reader]
        reads: deque[Transfer] = deque()
        # A drive reads pages. On a device the bytes beside a part may be on their way there.
        is_on_device = isinstance(self.location(unit, state_kind), DeviceLocation)
        page_nbytes = 1 if is_on_device else PAGE_NBYTES
        parts = [part for start, stop in ranges for part in _windows_of(start, stop)]
        pages = [(align_down(low, page_nbytes), align_up(high, page_nbytes)) for low, high in parts]
        try:
            for index, (start, stop) in enumerate(parts):
                while len(reads) < min(len(windows), len(parts) - index):
                    ahead = index + len(reads)
                    low, high = pages[ahead]
                    read = self.local.read(
                        unit, state_kind, windows[ahead % len(windows)], priority=Priority.FORWARD,
                        offset_nbytes=low, nbytes=high - low,
                    )  # fmt: skip
                    reads.append(read)
                reads[0].wait()
                reads.popleft()
                low, _ = pages[index]
                window = self._host.tensor(windows[index % len(windows)])
                yield _memory_of(window[start - low : stop - low])
        finally:
            for read in reads:  # The windows are used again.
                with contextlib.suppress(StorageError):
                    read.wait()

    def _bring_local(
        self, index: int, segments: Sequence[ShardSegment], sinks: Sequence[torch.Tensor]
    ) -> None:
        self._copy_state(
            self.partition.shards[index][self.partition.rank], StateKind.PARAMETERS, segments, sinks
        )

    def _copy_state(
        self,
        shard: Shard,
        state_kind: StateKind,
        segments: Sequence[ShardSegment],
        sinks: Sequence[torch.Tensor],
    ) -> None:
        for segment, sink in zip(segments, sinks, strict=True):
            done = 0
            for part in self._parts(shard, state_kind, [segment], self.partition.rank):
                sink[done : done + part.nbytes].copy_(torch.frombuffer(part, dtype=torch.uint8))
                done += part.nbytes

    def _keep_local(self, index: int, full: torch.Tensor) -> None:
        """Writes this rank's part of full weights to where the part rests."""
        shard = self.partition.shards[index][self.partition.rank]
        self.pending.await_update(shard.unit.index)
        self.pending.note_change(shard.unit.index)
        self.kept.forget(shard.unit.index)
        try:
            self._write_part(shard, full)
        finally:
            self.pending.note_change(shard.unit.index)

    def _write_part(self, shard: Shard, full: torch.Tensor) -> None:
        host_view = self.host_view(shard.unit, StateKind.PARAMETERS)
        block = self._reading[self.partition.rank][0]
        for segment in shard.segments:
            start = segment.full_offset_nbytes
            source = full[start : start + segment.nbytes]
            if host_view is not None:
                place = segment.shard_offset_nbytes
                host_view[place : place + segment.nbytes].copy_(source)
                continue
            for done in range(0, segment.nbytes, _WINDOW_NBYTES):
                part = source[done : done + _WINDOW_NBYTES]
                self._host.tensor(block)[: part.numel()].copy_(part)
                self.local.write(
                    shard.unit,
                    StateKind.PARAMETERS,
                    block,
                    offset_nbytes=segment.shard_offset_nbytes + done,
                    nbytes=align_up(part.numel(), PAGE_NBYTES),
                ).wait()

    def take_rewritten(self, index: int) -> bool:
        """Whether this rank's shard of a unit was written past the weight cache since the last
        call.

        If so, a copy in the cache is out of date.
        """
        is_outdated = index in self.rewritten
        self.rewritten.discard(index)
        return is_outdated

    def _in_own_thread(self, function: Callable[..., None], *arguments: Any) -> RemoteRequest:
        return RemoteRequest(self._own.submit(function, *arguments))


def _windows_of(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of the range from `start` to `stop` whose pages fit a window, in order."""
    while start < stop:
        until = min(stop, align_down(start, PAGE_NBYTES) + _WINDOW_NBYTES)
        yield start, until
        start = until


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a host tensor. `tensor.numpy()` may be observed, by
    `modules/handles/patches.py`, and a thread that serves other ranks must not wait for the
    engine's lock there."""
    memory: memoryview = TensorBase.numpy(tensor).data
    return memory
