"""The C++ engines against the kernel seen through the liburing binding: same bytes, same errno.

The binding has no code in common with the engines. The oracle below is the engine's contract
written a second time, as plainly as it can be: one operation at a time, until the range is done.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import StorageError
from infinity.sizes import KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.probe import explain_missing_uring
from infinity.storage.protocol import Priority, Segment, StorageEngine
from infinity.uring import Raw, Ring

BLOCK_NBYTES = 64 * KIB  # Of the engines under test: most operations below are cut.
FILE_NBYTES = 200 * KIB + 777  # Ends inside a sector.
SPAN_NBYTES = 512 * KIB  # Where operations begin: inside the file, and far beyond its end.
MAX_NBYTES = 192 * KIB
ADDRESS_OF_NOBODY = PAGE_NBYTES
PATTERN = bytes(range(251)) * (MAX_NBYTES // 251 + 2)
CONTENT = random.Random(0).randbytes(FILE_NBYTES)

Kind = Literal["buffered", "direct", "sealed", "full", "closed"]


@dataclass(frozen=True)
class Operation:
    """`memory` is an offset into the arena; None is an address that is not mapped."""

    is_write: bool
    offset_nbytes: int
    nbytes: int
    memory: int | None
    fill: int  # Where in PATTERN the bytes of a write begin.

    @property
    def data(self) -> bytes:
        return PATTERN[self.fill : self.fill + self.nbytes]


@dataclass(frozen=True)
class Outcome:
    """`errno` 0, and for a read the bytes that came."""

    errno: int
    data: bytes = b""


def operations(unit: int, offsets: st.SearchStrategy[int]) -> st.SearchStrategy[Operation]:
    """Operations of whole units, at `offsets` units."""
    return st.builds(
        Operation,
        is_write=st.booleans(),
        offset_nbytes=offsets.map(lambda at: at * unit),
        nbytes=st.integers(1, MAX_NBYTES // unit).map(lambda count: count * unit),
        memory=st.integers(0, 64).map(lambda at: at * unit) | st.none(),
        fill=st.integers(0, 250),
    ).map(_with_one_fault)


def _with_one_fault(operation: Operation) -> Operation:
    """An operation without memory is made small enough that an engine does not split it.

    Of two faults, no memory and no such place in the file, the split decides which comes first. And
    what a failed write leaves is nobody's promise: ext4 lets one that starts beyond the end grow
    the file up to its start. Unsplit, both sides make the same failing call.
    """
    if operation.memory is None:
        return replace(operation, nbytes=min(operation.nbytes, BLOCK_NBYTES))
    return operation


def anywhere(unit: int) -> st.SearchStrategy[Operation]:
    return operations(unit, st.integers(0, SPAN_NBYTES // unit) | st.just((1 << 62) // unit))


def list_of(*kinds: st.SearchStrategy[Operation]) -> st.SearchStrategy[list[Operation]]:
    return st.lists(st.one_of(kinds), min_size=1, max_size=12)


BUFFERED = list_of(anywhere(1), anywhere(PAGE_NBYTES))
# The second kind is not aligned, and inside the file: past its end the kernel does not look at
# alignment, while an engine always does.
DIRECT = list_of(
    anywhere(PAGE_NBYTES), operations(1234, st.integers(1, (FILE_NBYTES - MAX_NBYTES) // 1234))
)


class Oracle:
    """Every operation through a raw ring, one at a time, until it is done or refused."""

    def __init__(self, ring: Ring, arena: Arena, fd: int, *, alignment: int) -> None:
        self._ring, self._arena, self._fd, self._alignment = ring, arena, fd, alignment

    def run(self, operation: Operation) -> Outcome:
        address = place(self._arena, operation)
        prepare = self._ring.write if operation.is_write else self._ring.read
        done = num_stalls = 0
        while done < operation.nbytes:
            left = Raw(address + done, operation.nbytes - done)
            prepare(self._fd, left, operation.offset_nbytes + done)
            (completion,) = self._ring.wait(1)
            if completion.errno:
                return Outcome(completion.errno)
            if completion.nbytes == 0:  # The end of the file, or a write that goes nowhere.
                return Outcome(errno.EIO)
            if completion.nbytes < left.nbytes:
                # Direct I/O goes on where it is aligned; twice at one place is the end.
                moved = completion.nbytes // self._alignment * self._alignment
                num_stalls = num_stalls + 1 if moved == 0 else 0
                if num_stalls == 2:
                    return Outcome(errno.EIO)
                done += moved
            else:
                done = operation.nbytes
        return Outcome(0, result_of(self._arena, operation))


class Subject:
    """The same operations through an engine, each in one segment or in several.

    Several go on in the file but not in memory: the segments lie there in reverse order.
    """

    def __init__(self, engine: StorageEngine, arena: Arena, file: int, num_segments: int) -> None:
        self._engine, self._arena, self._file = engine, arena, file
        self._num_segments = num_segments

    def run(self, operation: Operation) -> Outcome:
        address = place(self._arena, operation)
        segments = self._cut(operation, address)
        if operation.is_write and operation.memory is not None:
            for segment in segments:
                at = segment.offset_nbytes - operation.offset_nbytes
                memory = self._memory(segment)
                memory[:] = operation.data[at : at + segment.nbytes]
        try:
            self._engine.submit(
                "write" if operation.is_write else "read", segments, Priority.STATE
            ).wait()
        except StorageError as error:
            assert error.errno is not None
            return Outcome(error.errno)
        assert operation.memory is not None, "an operation without memory cannot succeed"
        if operation.is_write:
            return Outcome(0)
        return Outcome(0, b"".join(bytes(self._memory(segment)) for segment in segments))

    def _cut(self, operation: Operation, address: int) -> list[Segment]:
        unit = PAGE_NBYTES if operation.nbytes % PAGE_NBYTES == 0 else 1
        step = -(-operation.nbytes // unit // self._num_segments) * unit
        ranges = [(at, min(step, operation.nbytes - at)) for at in range(0, operation.nbytes, step)]
        return [
            Segment(
                self._file,
                operation.offset_nbytes + at,
                address + operation.nbytes - at - nbytes,
                nbytes,
            )
            for at, nbytes in ranges
        ]

    def _memory(self, segment: Segment) -> memoryview:
        return self._arena.memory(segment.address - self._arena.address, segment.nbytes)


def place(arena: Arena, operation: Operation) -> int:
    """The address of an operation's memory, with what it is to write, or with noise, in it."""
    if operation.memory is None:
        return ADDRESS_OF_NOBODY
    data = operation.data if operation.is_write else secrets.token_bytes(operation.nbytes)
    arena.memory(operation.memory, operation.nbytes)[:] = data
    return arena.address + operation.memory


def result_of(arena: Arena, operation: Operation) -> bytes:
    assert operation.memory is not None, "an operation without memory cannot succeed"
    return b"" if operation.is_write else bytes(arena.memory(operation.memory, operation.nbytes))


def open_target(kind: Kind, path: Path, stack: ExitStack) -> str:
    """A fresh file of the kind, as a path that can be opened for reading and writing."""
    if kind == "full":
        return "/dev/full"  # Reads as zeros; every write is ENOSPC.
    if kind == "sealed":  # Opens for writing; every write is EPERM.
        fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        stack.callback(os.close, fd)
        os.write(fd, CONTENT)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        return f"/proc/self/fd/{fd}"
    path.write_bytes(CONTENT)
    return str(path)


Compare = Callable[[Kind, list[Operation]], list[Outcome]]


@pytest.fixture(params=["io_uring", "threads", "io_uring in pieces", "threads in pieces"])
def compare(request, arena: Arena, open_any, tmp_path: Path) -> Iterator[Compare]:
    """Runs a list of operations through the engine and the oracle, each on its own file."""
    if (cause := explain_missing_uring()) is not None:
        pytest.skip(f"the oracle needs io_uring, which does not work here: {cause}")
    name, *in_pieces = request.param.split(" ", 1)
    engine: StorageEngine = open_any(name, block_nbytes=BLOCK_NBYTES)
    numbers = itertools.count()

    with Ring(4) as ring, Arena(2 * MIB) as oracle_arena:

        def run(kind: Kind, operations: list[Operation]) -> list[Outcome]:
            with ExitStack() as stack:
                paths = [
                    open_target(kind, tmp_path / f"{next(numbers)}-{side}", stack)
                    for side in ("engine", "oracle")
                ]
                is_direct = kind == "direct"
                file = engine.open(paths[0], direct=is_direct)
                flags = os.O_RDWR | (os.O_DIRECT if is_direct else 0)
                fd = os.open(paths[1], flags)
                alignment = engine._core.alignment_nbytes(file)
                if kind == "closed":
                    engine.close_file(file)
                    os.close(fd)
                subject = Subject(engine, arena, file, num_segments=7 if in_pieces else 1)
                oracle = Oracle(ring, oracle_arena, fd, alignment=alignment)
                outcomes = []
                for operation in operations:
                    expected = oracle.run(operation)
                    got = subject.run(operation)
                    assert got.errno == expected.errno, operation
                    assert got.data == expected.data, operation
                    outcomes.append(got)
                if kind != "closed":
                    engine.close_file(file)
                    os.close(fd)
                if kind in ("buffered", "direct"):
                    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
                    for path in paths:
                        os.unlink(path)
                return outcomes

        yield run


_SETTINGS = settings(max_examples=100)


@_SETTINGS
@given(operations=BUFFERED)
def test_buffered_files_agree(compare: Compare, operations: list[Operation]) -> None:
    compare("buffered", operations)


@_SETTINGS
@given(operations=DIRECT)
def test_direct_files_agree(compare: Compare, operations: list[Operation]) -> None:
    compare("direct", operations)


@_SETTINGS
@given(operations=BUFFERED)
def test_files_that_refuse_writes_agree(compare: Compare, operations: list[Operation]) -> None:
    """The nearest to a read-only descriptor: engines open for reading and writing or not at all."""
    for operation, outcome in zip(operations, compare("sealed", operations), strict=True):
        assert not operation.is_write or outcome.errno != 0


@_SETTINGS
@given(operations=BUFFERED)
def test_full_devices_agree(compare: Compare, operations: list[Operation]) -> None:
    for operation, outcome in zip(operations, compare("full", operations), strict=True):
        assert not operation.is_write or outcome.errno in (errno.ENOSPC, errno.EFAULT)


@settings(_SETTINGS, max_examples=10)
@given(operations=BUFFERED)
def test_closed_files_agree(compare: Compare, operations: list[Operation]) -> None:
    outcomes = compare("closed", operations)
    assert all(outcome.errno == errno.EBADF for outcome in outcomes)


@pytest.mark.parametrize(
    ("kind", "operation", "code"),
    [
        ("buffered", Operation(False, 0, 1, 0, 0), 0),
        ("buffered", Operation(False, FILE_NBYTES - 1, 2, 0, 0), errno.EIO),
        ("buffered", Operation(False, SPAN_NBYTES, 1, 0, 0), errno.EIO),
        ("buffered", Operation(False, 0, MAX_NBYTES, None, 0), errno.EFAULT),
        ("buffered", Operation(True, 1 << 62, 1, 0, 0), errno.EFBIG),
        ("direct", Operation(False, 100, PAGE_NBYTES, 0, 0), errno.EINVAL),
        ("direct", Operation(True, 0, 100, 0, 0), errno.EINVAL),
        ("direct", Operation(False, 200 * KIB, PAGE_NBYTES, 0, 0), errno.EIO),
        ("sealed", Operation(True, 0, 1, 0, 0), errno.EPERM),
        ("full", Operation(True, 0, 1, 0, 0), errno.ENOSPC),
        ("closed", Operation(True, 0, 1, 0, 0), errno.EBADF),
    ],
)
def test_both_raise_the_errno_of_the_kernel(
    compare: Compare, kind: Kind, operation: Operation, code: int
) -> None:
    """Agreement alone would pass if both said nothing: the answers, by name."""
    (outcome,) = compare(kind, [operation])
    assert errno.errorcode.get(outcome.errno) == errno.errorcode.get(code)


def test_a_wrong_engine_is_found(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: an engine that reads one byte beside the place is detected."""
    right = Subject.run

    def beside(self: Subject, operation: Operation) -> Outcome:
        moved = Operation(False, operation.offset_nbytes + 1, operation.nbytes, 0, 0)
        return right(self, moved)

    monkeypatch.setattr(Subject, "run", beside)
    with pytest.raises(AssertionError):
        compare("buffered", [Operation(False, 0, 100, 0, 0)])
