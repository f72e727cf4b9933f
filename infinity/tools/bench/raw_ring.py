"""The ceiling without an engine: blocks straight into an io_uring, a fixed number in flight.

One thread prepares, submits and reaps: no queue, no priorities, no hand-over between threads. The
memory is registered where the kernel permits, as the engine does.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Sequence

from typing_extensions import override

from infinity.errors import StorageError
from infinity.sizes import GIB
from infinity.storage.protocol import Operation, Segment
from infinity.storage.volume_layout import slice_extents
from infinity.tools.bench.measure import Contender, Measurement, clock
from infinity.tools.bench.transfer import FileSet, TransferMove, compare, next_seed, prepare
from infinity.uring import Raw, RegisteredBuffer, Ring, RingError, SetupFlag


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
