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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infinity.errors import StorageError
from infinity.sizes import GIB, MIB, ByteRange, align_down, joined
from infinity.storage.arena import Arena
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.storage.volume_layout import slice_extents
from infinity.tools.bench import pattern
from infinity.tools.bench.measure import Contender, Measurement, clock, quantiles, timed
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
class TransferMove(ByteRange):
    """One extent: `nbytes` at `offset_nbytes` of a region, and at `place_nbytes` of the arena."""

    operation: Operation
    region: RegionName
    offset_nbytes: int
    nbytes: int
    place_nbytes: int


def plan_moves(kind: TransferKind, *, nbytes: int, extent_nbytes: int) -> list[TransferMove]:
    """Returns the extents of one transfer, in order of offset, each at the same place of the arena.

    "mixed" is half reads of the still region's first half and half writes of the busy region's
    second half, alternately. The last extent may be smaller.
    """
    if kind != "mixed":
        region: RegionName = "still" if kind == "read" else "busy"
        return [
            TransferMove(kind, region, at, min(extent_nbytes, nbytes - at), at)
            for at in range(0, nbytes, extent_nbytes)
        ]
    half_nbytes = nbytes // 2
    turns = []
    for at in range(0, half_nbytes, extent_nbytes):
        size_nbytes = min(extent_nbytes, half_nbytes - at)
        behind = half_nbytes + at
        turns.append(TransferMove("read", "still", at, size_nbytes, at))
        turns.append(TransferMove("write", "busy", behind, size_nbytes, behind))
    return turns


class FileSet:
    """The scratch files, opened in one engine; converts moves to segments."""

    def __init__(self, engine: StorageEngine, scratch: BenchDirectory, arena: Arena) -> None:
        self.engine = engine
        self.scratch = scratch
        self.arena = arena
        self._numbers = [
            engine.open(path, direct=is_direct)
            for path, is_direct in zip(scratch.file_paths, scratch.is_direct, strict=True)
        ]

    def submit(self, move: TransferMove, priority: Priority = Priority.STATE) -> Ticket:
        """Queues the move on the engine under test."""
        return self.engine.submit(move.operation, self.segments(move), priority)

    def segments(self, move: TransferMove, numbers: Sequence[int] | None = None) -> list[Segment]:
        """Returns the segments of a move, which may span several paths. `numbers`: of the opened
        files, by default those of the engine."""
        address, files = self.arena.address + move.place_nbytes, numbers or self._numbers
        return [
            Segment(files[extent.path_index], extent.offset_nbytes, address + at, extent.nbytes)
            for extent, at in slice_extents(
                self.scratch.regions[move.region],
                offset_nbytes=move.offset_nbytes,
                nbytes=move.nbytes,
            )
        ]


def moves_transfer(
    name: str, files: FileSet, moves: Sequence[TransferMove], *, in_one_request: bool = False
) -> Contender:
    """Returns `moves` through the engine: a request each, or one request for all of them."""
    # Split before the clock starts: the owner of the extents lays them out.
    requests = [(move.operation, files.segments(move)) for move in moves]
    if in_one_request:
        requests = [(moves[0].operation, [part for _, parts in requests for part in parts])]

    def transfer() -> None:
        submit = files.engine.submit
        tickets = [submit(operation, parts, Priority.STATE) for operation, parts in requests]
        # The last first: one sleep for all, where waiting in order would wake for each.
        for ticket in reversed(tickets):
            ticket.wait()

    return _checked(name, files, moves, transfer)


def _checked(
    name: str, files: FileSet, moves: Sequence[TransferMove], transfer: Callable[[], None]
) -> Contender:
    """Returns a contender whose transfer makes these moves, with a seed of its own each time."""
    seed = STILL_SEED

    def prepared() -> None:
        nonlocal seed
        seed = next_seed()
        prepare(files, moves, seed)

    nbytes = sum(move.nbytes for move in moves)
    return timed(
        name, nbytes, transfer, prepare=prepared, compare=lambda: compare(files, moves, seed)
    )


def engine_transfer(
    name: str, files: FileSet, kind: TransferKind, *, nbytes: int, extent_nbytes: int
) -> Contender:
    """Returns `nbytes` through the engine in the order of the region, `extent_nbytes` a request."""
    moves = plan_moves(kind, nbytes=nbytes, extent_nbytes=extent_nbytes)
    return moves_transfer(name, files, moves)


def engine_latency(
    name: str, files: FileSet, *, extent_nbytes: int, count: int, behind: int = 0
) -> Contender:
    """Returns single demand reads, one at a time; with `behind`, while that many write-backs are
    queued.

    The first shows the cost of a request, the second the effect of priorities. The writes alternate
    over the upper half of region and arena, the reads stay in the lower half.
    """
    nbytes, half_nbytes = extent_nbytes * count, files.scratch.nbytes // 2
    assert nbytes <= half_nbytes
    moves = plan_moves("read", nbytes=nbytes, extent_nbytes=extent_nbytes)
    # So many fit side by side that no two in flight overlap.
    write_nbytes = min(_WRITE_BACK_NBYTES, align_down(half_nbytes // max(behind, 1), MIB))
    writes = [
        TransferMove("write", "busy", at, write_nbytes, at)
        for at in range(half_nbytes, 2 * half_nbytes - write_nbytes + 1, write_nbytes)
    ]

    def run() -> Measurement:
        prepare(files, moves, STILL_SEED)
        queued: deque[Ticket] = deque()
        next_write = itertools.cycle(writes)

        def one(move: TransferMove) -> float:
            while queued and queued[0].done():
                queued.popleft().wait()
            while len(queued) < behind:
                queued.append(files.submit(next(next_write), Priority.WRITE_BACK))
            start_s = time.perf_counter()
            files.submit(move, Priority.FORWARD).wait()
            return time.perf_counter() - start_s

        times_s: list[float] = []
        seconds, cpu_s = clock(lambda: times_s.extend(one(move) for move in moves))
        for ticket in queued:
            ticket.wait()
        ok = compare(files, moves, STILL_SEED)
        return Measurement(nbytes, seconds, cpu_s, ok=ok, latency_s=quantiles(times_s, QUANTILES))

    return Contender(name, run)


def prepare(files: FileSet, moves: Sequence[TransferMove], seed: int) -> None:
    """Memory that proves the transfer: poison where bytes arrive, `seed` where they leave from."""
    for span in _spans(moves):
        memory = files.arena.memory(span.place_nbytes, span.nbytes)
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
        pattern.poison(files.arena.memory(span.place_nbytes, span.nbytes))
    tickets = [files.submit(replace(span, operation="read")) for span in written]
    for ticket in tickets:
        ticket.wait()
    return all(
        pattern.matches(
            files.arena.memory(span.place_nbytes, span.nbytes),
            offset_nbytes=span.offset_nbytes,
            seed=STILL_SEED if span.operation == "read" else seed,
        )
        for span in spans
    )


def _spans(moves: Sequence[TransferMove]) -> Sequence[TransferMove]:
    """Returns the moves in the order of the region; those that are adjacent in it and in memory
    become one."""
    in_order = sorted(moves, key=lambda move: (move.operation, move.offset_nbytes))
    return joined(in_order, lambda move: (move.operation, move.place_nbytes - move.offset_nbytes))


# -- The ceiling without an engine: a raw ring -----------------------------------------------------
#
# One thread prepares, submits and reaps: no queue, no priorities, no hand-over between threads. The
# memory is registered where the kernel permits, as the engine does.


_RingRequest = tuple[Operation, Segment, Raw | RegisteredBuffer]


@contextlib.contextmanager
def raw_ring(
    name: str, files: FileSet, moves: Sequence[TransferMove], *, depth: int
) -> Iterator[Contender]:
    """Gives the moves in their order, each a request to the kernel, `depth` of them in flight."""
    scratch = files.scratch
    fds = []
    with contextlib.ExitStack() as stack:
        for path, is_direct in zip(scratch.file_paths, scratch.is_direct, strict=True):
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
            fds.append(os.open(path, flags))
            stack.callback(os.close, fds[-1])
        try:
            ring = Ring(depth, SetupFlag.SINGLE_ISSUER | SetupFlag.DEFER_TASKRUN)
        except RingError:  # The kernel refuses the flags of the engine.
            ring = Ring(depth)
        stack.enter_context(ring)
        requests = _ring_requests(ring, files, fds, moves)
        yield _checked(name, files, moves, lambda: _run_ring(ring, requests, depth))


def _ring_requests(
    ring: Ring, files: FileSet, fds: Sequence[int], moves: Sequence[TransferMove]
) -> list[_RingRequest]:
    """Returns the requests, and registers the arena's memory with the ring where that is allowed.

    A request is its own token, so that a failure can be reported.
    """
    arena = files.arena
    # Registered in buffers of 1 GiB, the kernel's limit.
    regions = [
        Raw(arena.address + at, min(GIB, arena.capacity_nbytes - at))
        for at in range(0, arena.capacity_nbytes, GIB)
    ]
    buffers: list[RegisteredBuffer] = []
    with contextlib.suppress(RingError):  # The memlock limit: plain buffers then.
        buffers = ring.register_buffers(regions)
    requests: list[_RingRequest] = []
    for move in moves:
        for segment in files.segments(move, fds):
            memory: Raw | RegisteredBuffer = Raw(segment.address, segment.nbytes)
            if buffers:
                index, inside_nbytes = divmod(segment.address - arena.address, GIB)
                memory = buffers[index].part(inside_nbytes, segment.nbytes)
            requests.append((move.operation, segment, memory))
    return requests


def _run_ring(ring: Ring, requests: Sequence[_RingRequest], depth: int) -> None:
    """Raises StorageError for the first block that failed or came back short."""
    waiting = iter(requests)

    def submit(count: int) -> None:
        for request in itertools.islice(waiting, count):
            operation, segment, memory = request
            prepare_one = ring.read if operation == "read" else ring.write
            prepare_one(segment.file, memory, segment.offset_nbytes, token=request)

    submit(depth)
    num_left = len(requests)
    while num_left:
        completions = ring.wait(1)
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
        submit(len(completions))
