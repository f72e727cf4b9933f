"""The storage engine as a contender, and a raw ring as its ceiling.

What is timed: from the first submit to the last completion. Outside the clock: before a read the
memory is poisoned, and after it every byte is compared; before a write the memory gets a seed of
its own, and after it the region is read back and compared. Nothing is synced: with direct I/O the
drive has the bytes when a write completes, and fio does not sync either.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from typing_extensions import override

from infinity.errors import StorageError
from infinity.sizes import GIB, MIB, align_down
from infinity.storage.arena import Arena
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.storage.volume_layout import slice_extents
from infinity.tools.bench import pattern
from infinity.tools.bench.measure import Contender, Measurement, clock, quantiles
from infinity.tools.bench.scratch import STILL_SEED, BenchDirectory, RegionName
from infinity.uring import Raw, RegisteredBuffer, Ring, RingError, SetupFlag

TransferKind = Literal["read", "write", "mixed"]

_WRITE_BACK_NBYTES = 16 * MIB
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_seeds = itertools.count(1)


def next_seed() -> int:
    """A seed that no earlier write of this process had."""
    return next(_seeds)


@dataclass(frozen=True, slots=True)
class TransferMove:
    """One extent: `nbytes` at `offset_nbytes` of a region, and at `place_nbytes` of the arena,
    without one at the same offset."""

    operation: Operation
    region: RegionName
    offset_nbytes: int
    nbytes: int
    place_nbytes: int | None = None

    @property
    def place(self) -> int:
        """The offset in the arena; that of the file, unless `place_nbytes` differs."""
        return self.offset_nbytes if self.place_nbytes is None else self.place_nbytes


def plan_moves(kind: TransferKind, *, nbytes: int, extent_nbytes: int) -> list[TransferMove]:
    """Returns the extents of one transfer, in order of offset.

    "mixed" is half reads of the still region's first half and half writes of the busy region's
    second half, alternately. The last extent may be smaller.
    """
    if kind != "mixed":
        region: RegionName = "still" if kind == "read" else "busy"
        return [
            TransferMove(kind, region, at, min(extent_nbytes, nbytes - at))
            for at in range(0, nbytes, extent_nbytes)
        ]
    half_nbytes = nbytes // 2
    turns = []
    for at in range(0, half_nbytes, extent_nbytes):
        size_nbytes = min(extent_nbytes, half_nbytes - at)
        turns.append(TransferMove("read", "still", at, size_nbytes))
        turns.append(TransferMove("write", "busy", half_nbytes + at, size_nbytes))
    return turns


class FileSet:
    """The scratch files, opened in one engine; converts moves to segments."""

    def __init__(self, engine: StorageEngine, scratch: BenchDirectory, arena: Arena) -> None:
        self.engine = engine
        self.scratch = scratch
        self.arena = arena
        self._files = [
            engine.open(path, direct=is_direct)
            for path, is_direct in zip(scratch.file_paths, scratch.is_direct, strict=True)
        ]

    def submit(self, move: TransferMove, priority: Priority = Priority.STATE) -> Ticket:
        """Queues the move on the engine under test."""
        return self.engine.submit(move.operation, self.segments(move), priority)

    def segments(self, move: TransferMove) -> list[Segment]:
        """Returns the segments of a move, which may span several paths."""
        address = self.arena.address + move.place
        return [
            Segment(
                self._files[extent.path_index], extent.offset_nbytes, address + at, extent.nbytes
            )
            for extent, at in slice_extents(
                self.scratch.regions[move.region],
                offset_nbytes=move.offset_nbytes,
                nbytes=move.nbytes,
            )
        ]


class MovesTransfer(Contender):
    """`moves` through the engine: a request each, or one request for all of them."""

    def __init__(
        self,
        name: str,
        files: FileSet,
        moves: Sequence[TransferMove],
        *,
        in_one_request: bool = False,
    ) -> None:
        self.name = name
        self._files = files
        self._nbytes = sum(move.nbytes for move in moves)
        self._moves = moves
        # Split before the clock starts: the owner of the extents lays them out.
        self._requests = [(move.operation, files.segments(move)) for move in moves]
        if in_one_request:
            segments = [segment for _, segments in self._requests for segment in segments]
            self._requests = [(moves[0].operation, segments)]

    @override
    def run(self) -> Measurement:
        seed = next_seed()
        prepare(self._files, self._moves, seed)
        seconds, cpu_s = clock(self._transfer)
        return Measurement(self._nbytes, seconds, cpu_s, ok=compare(self._files, self._moves, seed))

    def _transfer(self) -> None:
        submit = self._files.engine.submit
        tickets = [
            submit(operation, segments, Priority.STATE) for operation, segments in self._requests
        ]
        # The last first: one sleep for all, where waiting in order would wake for each.
        for ticket in reversed(tickets):
            ticket.wait()


class EngineTransfer(MovesTransfer):
    """`nbytes` through the engine in the order of the region, `extent_nbytes` per request."""

    def __init__(
        self, name: str, files: FileSet, kind: TransferKind, *, nbytes: int, extent_nbytes: int
    ) -> None:
        super().__init__(name, files, plan_moves(kind, nbytes=nbytes, extent_nbytes=extent_nbytes))


class EngineLatency(Contender):
    """Single demand reads, one at a time; with `behind`, while that many write-backs are queued.

    The first shows the cost of a request, the second the effect of priorities. The writes alternate
    over the upper half of region and arena, the reads stay in the lower half.
    """

    def __init__(
        self, name: str, files: FileSet, *, extent_nbytes: int, count: int, behind: int = 0
    ) -> None:
        self.name = name
        self._files = files
        self._moves = plan_moves("read", nbytes=extent_nbytes * count, extent_nbytes=extent_nbytes)
        half_nbytes = files.scratch.nbytes // 2
        assert extent_nbytes * count <= half_nbytes
        # So many fit side by side that no two in flight overlap.
        write_nbytes = min(_WRITE_BACK_NBYTES, align_down(half_nbytes // max(behind, 1), MIB))
        self._writes = [
            TransferMove("write", "busy", at, write_nbytes)
            for at in range(half_nbytes, 2 * half_nbytes - write_nbytes + 1, write_nbytes)
        ]
        self._behind = behind

    @override
    def run(self) -> Measurement:
        prepare(self._files, self._moves, STILL_SEED)
        self._queued: deque[Ticket] = deque()
        self._next_write = itertools.cycle(self._writes)
        times_s: list[float] = []
        seconds, cpu_s = clock(lambda: times_s.extend(self._one(move) for move in self._moves))
        for ticket in self._queued:
            ticket.wait()
        ok = compare(self._files, self._moves, STILL_SEED)
        nbytes = sum(move.nbytes for move in self._moves)
        return Measurement(nbytes, seconds, cpu_s, ok=ok, latency_s=quantiles(times_s, QUANTILES))

    def _one(self, move: TransferMove) -> float:
        while self._queued and self._queued[0].done():
            self._queued.popleft().wait()
        while len(self._queued) < self._behind:
            self._queued.append(self._files.submit(next(self._next_write), Priority.WRITE_BACK))
        start_s = time.perf_counter()
        self._files.submit(move, Priority.FORWARD).wait()
        return time.perf_counter() - start_s


def prepare(files: FileSet, moves: Sequence[TransferMove], seed: int) -> None:
    """Memory that proves the transfer: poison where bytes arrive, `seed` where they leave from."""
    for span in _spans(moves):
        memory = files.arena.memory(span.place, span.nbytes)
        if span.operation == "read":
            pattern.poison(memory)
        else:
            pattern.fill(memory, offset_nbytes=span.offset_nbytes, seed=seed)


def compare(files: FileSet, moves: Sequence[TransferMove], seed: int) -> bool:
    """Returns True if memory and files hold the right bytes after the moves.

    Reads written regions back into poisoned memory.
    """
    spans = _spans(moves)
    written = [span for span in spans if span.operation == "write"]
    for span in written:
        pattern.poison(files.arena.memory(span.place, span.nbytes))
    tickets = [files.submit(replace(span, operation="read")) for span in written]
    for ticket in tickets:
        ticket.wait()
    return all(
        pattern.matches(
            files.arena.memory(span.place, span.nbytes),
            offset_nbytes=span.offset_nbytes,
            seed=STILL_SEED if span.operation == "read" else seed,
        )
        for span in spans
    )


def _spans(moves: Sequence[TransferMove]) -> list[TransferMove]:
    """Yields the moves in the order of the region; moves that are adjacent in it and in memory
    become one.
    """
    spans: list[TransferMove] = []
    for move in sorted(moves, key=lambda entry: (entry.operation, entry.offset_nbytes)):
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.operation == move.operation
            and last.offset_nbytes + last.nbytes == move.offset_nbytes
            and last.place + last.nbytes == move.place
        ):
            spans[-1] = replace(last, nbytes=last.nbytes + move.nbytes)
        else:
            spans.append(replace(move, place_nbytes=move.place))
    return spans


# -- The ceiling without an engine: a raw ring -----------------------------------------------------
#
# One thread prepares, submits and reaps: no queue, no priorities, no hand-over between threads. The
# memory is registered where the kernel permits, as the engine does.


class RawRing(Contender):
    """The moves in their order, each a request to the kernel, `depth` of them in flight. A context
    manager."""

    def __init__(
        self, name: str, files: FileSet, moves: Sequence[TransferMove], *, depth: int
    ) -> None:
        self.name = name
        self._files = files
        self._nbytes = sum(move.nbytes for move in moves)
        self._depth = depth
        self._moves = moves
        self._stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RawRing:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the ring and the files."""
        self._stack.close()

    @override
    def run(self) -> Measurement:
        seed = next_seed()
        prepare(self._files, self._moves, seed)
        seconds, cpu_s = clock(self._transfer)
        return Measurement(self._nbytes, seconds, cpu_s, ok=compare(self._files, self._moves, seed))

    def _open(self) -> None:
        scratch, arena = self._files.scratch, self._files.arena
        fds = []
        for path, is_direct in zip(scratch.file_paths, scratch.is_direct, strict=True):
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
            fds.append(os.open(path, flags))
            self._stack.callback(os.close, fds[-1])
        self._ring = self._stack.enter_context(_open_ring(self._depth))
        # Registered in buffers of 1 GiB, the kernel's limit.
        regions = [
            Raw(arena.address + at, min(GIB, arena.capacity_nbytes - at))
            for at in range(0, arena.capacity_nbytes, GIB)
        ]
        buffers: list[RegisteredBuffer] = []
        with contextlib.suppress(RingError):  # The memlock limit: plain buffers then.
            buffers = self._ring.register_buffers(regions)
        # A token names operation and block, so that a failure can be reported.
        self._requests: list[tuple[Operation, Segment, Raw | RegisteredBuffer]] = []
        for move in self._moves:
            for extent, at in slice_extents(
                scratch.regions[move.region], offset_nbytes=move.offset_nbytes, nbytes=move.nbytes
            ):
                start_nbytes = move.place + at
                address = arena.address + start_nbytes
                segment = Segment(
                    fds[extent.path_index], extent.offset_nbytes, address, extent.nbytes
                )
                memory: Raw | RegisteredBuffer = Raw(address, extent.nbytes)
                if buffers:
                    index, inside_nbytes = divmod(start_nbytes, GIB)
                    memory = buffers[index].part(inside_nbytes, extent.nbytes)
                self._requests.append((move.operation, segment, memory))

    def _transfer(self) -> None:
        """Raises StorageError for the first block that failed or came back short."""
        waiting = iter(self._requests)
        for request in itertools.islice(waiting, self._depth):
            self._prepare(request)
        num_left = len(self._requests)
        while num_left:
            completions = self._ring.wait(1)
            num_left -= len(completions)
            for completion in completions:
                operation, segment, _ = completion.token
                if completion.result != segment.nbytes:
                    raise StorageError(
                        completion.errno or errno.EIO,
                        operation=operation,
                        path=os.readlink(f"/proc/self/fd/{segment.file}"),
                        offset_nbytes=segment.offset_nbytes,
                        nbytes=segment.nbytes,
                    )
            for request in itertools.islice(waiting, len(completions)):
                self._prepare(request)

    def _prepare(self, request: tuple[Operation, Segment, Raw | RegisteredBuffer]) -> None:
        operation, segment, memory = request
        prepare_one = self._ring.read if operation == "read" else self._ring.write
        prepare_one(segment.file, memory, segment.offset_nbytes, token=request)


def _open_ring(depth: int) -> Ring:
    """Opens a ring with the flags of the engine, or without them if the kernel refuses them."""
    try:
        return Ring(depth, SetupFlag.SINGLE_ISSUER | SetupFlag.DEFER_TASKRUN)
    except RingError:
        return Ring(depth)
