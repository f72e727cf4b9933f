"""Storage engines around another one: they fail, delay or corrupt requests."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from infinity.errors import StorageError
from infinity.storage.protocol import (
    FileStats,
    Operation,
    Priority,
    Segment,
    StorageEngine,
    Ticket,
    WrappedTicket,
)


class WrappedEngine(StorageEngine):
    """Passes every call on, and knows the path of every file."""

    def __init__(self, engine: StorageEngine, name: str) -> None:
        self._engine = engine
        self._paths: dict[int, str] = {}
        self.name = f"{name}({engine.name})"

    @override
    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        file = self._engine.open(path, direct=direct, read_only=read_only)
        self._paths[file] = path
        return file

    @override
    def close_file(self, file: int) -> None:
        self._engine.close_file(file)

    @override
    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        return self._engine.submit(operation, segments, priority)

    @override
    def sync(self, file: int) -> None:
        self._engine.sync(file)

    @override
    def drain(self) -> None:
        self._engine.drain()

    @override
    def stats(self) -> Sequence[FileStats]:
        return self._engine.stats()

    @override
    def close(self) -> None:
        self._engine.close()


# -- Faults ----------------------------------------------------------------------------------------
#
# The engine is deterministic: operations are counted from 1 in the order of submission, and each
# fault names its operation. Without faults it behaves like the wrapped engine.


FaultyOperation = Literal["read", "write", "open", "sync", "any"]


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of the `nth` operation of a kind, counted from 1.

    `errno` fails the operation before any byte moves. `delay_s` completes it later. `corrupt` flips
    one bit of a read or of the bytes that a write stores. `nbytes_before_failure` of a failing read
    or write are moved before the error, as with a device that fails half-way.
    """

    nth: int
    operation: FaultyOperation = "any"
    errno: int = 0
    delay_s: float = 0.0
    corrupt: bool = False
    nbytes_before_failure: int = 0

    def hits(self, operation: str, *, nth_of_kind: int, nth_of_all: int) -> bool:
        """Whether the fault is this operation's: the nth of its kind, and the nth of all."""
        if self.operation == "any":
            return self.nth == nth_of_all
        return self.operation == operation and self.nth == nth_of_kind


class FaultyEngine(WrappedEngine):
    """Wraps `engine` and is its only user. Closing it closes the wrapped engine.

    `num_operations` counts opens, reads, writes and syncs so far. A fault ladder ends if it is
    lower than the rung.
    """

    def __init__(self, engine: StorageEngine, faults: Sequence[Fault] = ()) -> None:
        super().__init__(engine, "faulty")
        self._faults = tuple(faults)
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._unsettled: list[_FaultyTicket] = []

    @property
    def num_operations(self) -> int:
        """The number of opens, reads, writes and syncs so far."""
        with self._lock:
            return sum(self._counts.values())

    @override
    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        fault = self._next_fault("open")
        if fault is not None and fault.errno:
            raise StorageError(fault.errno, operation="open", path=path)
        return super().open(path, direct=direct, read_only=read_only)

    @override
    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        fault = self._next_fault(operation)
        if fault is None:
            return self._engine.submit(operation, segments, priority)
        ticket = self._submit_with(fault, operation, segments, priority)
        with self._lock:
            self._unsettled = [ticket for ticket in self._unsettled if not ticket.done()]
            self._unsettled.append(ticket)
        return ticket

    @override
    def sync(self, file: int) -> None:
        fault = self._next_fault("sync")
        if fault is not None:
            time.sleep(fault.delay_s)
            if fault.errno:
                raise StorageError(fault.errno, operation="sync", path=self._path_of(file))
        self._engine.sync(file)

    @override
    def drain(self) -> None:
        self._engine.drain()
        with self._lock:
            unsettled, self._unsettled = self._unsettled, []
        for ticket in unsettled:
            ticket.settle()

    @override
    def close(self) -> None:
        self.drain()
        self._engine.close()

    def _next_fault(self, operation: str) -> Fault | None:
        with self._lock:
            self._counts[operation] = self._counts.get(operation, 0) + 1
            nth_of_kind, nth_of_all = self._counts[operation], sum(self._counts.values())
        for fault in self._faults:
            if fault.hits(operation, nth_of_kind=nth_of_kind, nth_of_all=nth_of_all):
                return fault
        return None

    def _submit_with(
        self, fault: Fault, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> _FaultyTicket:
        ready_at = time.monotonic() + fault.delay_s
        if fault.errno:
            first = segments[0] if segments else Segment(-1, 0, 0, 0)
            error = StorageError(
                fault.errno,
                operation=operation,
                path=self._path_of(first.file),
                offset_nbytes=first.offset_nbytes,
                nbytes=first.nbytes,
            )
            moved = _head(segments, fault.nbytes_before_failure)
            inner = self._engine.submit(operation, moved, priority)
            return _FaultyTicket(inner, ready_at=ready_at, error=error)
        if not fault.corrupt:
            return _FaultyTicket(
                self._engine.submit(operation, segments, priority), ready_at=ready_at
            )
        if operation == "read":
            inner = self._engine.submit(operation, segments, priority)
            return _FaultyTicket(inner, ready_at=ready_at, on_done=lambda: _flip_bit(segments))
        copies = [_FaultyCopy(segment) for segment in segments]
        swapped = [copy.segment for copy in copies]
        _flip_bit(swapped)
        inner = self._engine.submit(operation, swapped, priority)
        return _FaultyTicket(inner, ready_at=ready_at, keep_alive=copies)

    def _path_of(self, file: int) -> str:
        return self._paths.get(file, f"file {file}")


class _FaultyTicket(WrappedTicket):
    """Done when the wrapped ticket is done and the delay is over; then fails, if a fault says
    so."""

    def __init__(
        self,
        inner: Ticket,
        *,
        ready_at: float,
        error: StorageError | None = None,
        on_done: Callable[[], None] | None = None,
        keep_alive: object = None,
    ) -> None:
        super().__init__(inner)
        self._ready_at = ready_at
        self._error = error
        self._on_done = on_done
        self._keep_alive = keep_alive
        self._lock = threading.Lock()

    @override
    def done(self) -> bool:
        if time.monotonic() < self._ready_at or not self._inner.done():
            return False
        self._finish()
        return True

    @override
    def wait(self) -> None:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        self._inner.wait()
        self._finish()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Waits until it is done; keeps the error for wait()."""
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        self.done()

    def _finish(self) -> None:
        with self._lock:
            effect, self._on_done = self._on_done, None
            self._keep_alive = None
        if effect is not None:
            effect()


class _FaultyCopy:
    """Private memory with the bytes of a segment, so that the caller's memory does not change."""

    def __init__(self, segment: Segment) -> None:
        self._memory = mmap.mmap(-1, max(1, segment.nbytes))  # Page-aligned.
        self._memory.write(ctypes.string_at(segment.address, segment.nbytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.segment = Segment(segment.file, segment.offset_nbytes, address, segment.nbytes)


def _flip_bit(segments: Sequence[Segment]) -> None:
    for segment in segments:
        if segment.nbytes:
            byte = ctypes.c_ubyte.from_address(segment.address + segment.nbytes // 2)
            byte.value ^= 1
            return


def _head(segments: Sequence[Segment], nbytes: int) -> list[Segment]:
    """Returns the first `nbytes` of a request."""
    head = []
    for segment in segments:
        taken_nbytes = min(nbytes, segment.nbytes)
        if taken_nbytes:
            head.append(Segment(segment.file, segment.offset_nbytes, segment.address, taken_nbytes))
        nbytes -= taken_nbytes
    return head
