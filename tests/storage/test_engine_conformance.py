"""What every engine promises, whatever it is made of. Turns of requests that wait, and requests that
share a block: io/tests."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import ConfigError, StorageError
from infinity.sizes import GIB, KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.native_engine import NativeEngine, open_engine
from infinity.storage.protocol import Priority, Segment, StorageEngine, Ticket
from tests.support.forked import TIME_LIMIT_S
from tests.support.memory import resident_nbytes

BLOCK_NBYTES = 64 * KIB
Make = Callable[..., str]


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [PAGE_NBYTES, BLOCK_NBYTES, BLOCK_NBYTES + PAGE_NBYTES, 5 * MIB])
def test_bytes_written_are_read_back(
    engine: StorageEngine, arena: Arena, make_file: Make, nbytes: int, direct: bool
) -> None:
    data = random_bytes(nbytes)
    file = engine.open(make_file(nbytes), direct=direct)
    arena.memory(0, nbytes)[:] = data
    engine.submit("write", [Segment(file, 0, arena.address, nbytes)], Priority.WRITE_BACK).wait()
    target = arena.address + 8 * MIB
    engine.submit("read", [Segment(file, 0, target, nbytes)], Priority.FORWARD).wait()
    assert arena.memory(8 * MIB, nbytes) == data


def test_memory_outside_the_arena_works(engine: StorageEngine, make_file: Make) -> None:
    data = random_bytes(MIB, seed=2)
    file = engine.open(make_file(data), direct=True)
    with Arena(MIB) as other:
        engine.submit("read", [Segment(file, 0, other.address, MIB)], Priority.FORWARD).wait()
        assert other.memory(0, MIB) == data


def test_one_request_moves_many_segments_of_many_files(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    """600 segments, shuffled over three files, under one ticket."""
    pages = list(range(600))
    random.Random(3).shuffle(pages)
    contents = [random_bytes(200 * PAGE_NBYTES, seed=index) for index in range(3)]
    files = [
        engine.open(make_file(content, f"file{index}"), direct=True)
        for index, content in enumerate(contents)
    ]
    segments = [
        Segment(
            files[page % 3],
            page // 3 * PAGE_NBYTES,
            arena.address + at * PAGE_NBYTES,
            PAGE_NBYTES,
        )
        for at, page in enumerate(pages)
    ]
    engine.submit("read", segments, Priority.FORWARD).wait()
    for at, page in enumerate(pages):
        expected = contents[page % 3][page // 3 * PAGE_NBYTES :][:PAGE_NBYTES]
        assert arena.memory(at * PAGE_NBYTES, PAGE_NBYTES) == expected


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tail_nbytes", [1, 511, PAGE_NBYTES - 1])
@pytest.mark.parametrize("head_nbytes", [0, PAGE_NBYTES, BLOCK_NBYTES, 3 * BLOCK_NBYTES])
def test_a_read_only_file_is_read_up_to_its_end_in_whole_pages(
    engine: StorageEngine,
    arena: Arena,
    make_file: Make,
    head_nbytes: int,
    tail_nbytes: int,
    direct: bool,
) -> None:
    data = random_bytes(head_nbytes + tail_nbytes, seed=4)
    path = make_file(data)
    os.chmod(path, 0o400)
    file = engine.open(path, direct=direct, read_only=True)
    nbytes = head_nbytes + PAGE_NBYTES
    engine.submit("read", [Segment(file, 0, arena.address, nbytes)], Priority.FORWARD).wait()
    assert arena.memory(0, len(data)) == data


def test_a_read_only_file_is_never_written(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    data = random_bytes(2 * PAGE_NBYTES, seed=5)
    path = make_file(data)
    file = engine.open(path, direct=False, read_only=True)
    with pytest.raises(StorageError, match="opened for reading"):
        engine.submit("write", [Segment(file, 0, arena.address, PAGE_NBYTES)], Priority.STATE)
    with open(path, "rb") as plain:
        assert plain.read() == data


def test_a_read_of_a_read_only_file_that_has_shrunk_is_an_error(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    path = make_file(random_bytes(3 * PAGE_NBYTES + 100, seed=6))
    file = engine.open(path, direct=True, read_only=True)
    os.truncate(path, 2 * PAGE_NBYTES + 50)
    ticket = engine.submit(
        "read", [Segment(file, 0, arena.address, 4 * PAGE_NBYTES)], Priority.FORWARD
    )
    with pytest.raises(StorageError, match=r"end of file|ends inside") as caught:
        ticket.wait()
    assert path in str(caught.value)


def behind_a_queue(attempt: Callable[[int], bool]) -> None:
    """Runs `attempt` with longer and longer queues, until one lasts for what is done behind it: that
    takes longer where the machine is busy. It answers whether its queue did."""
    assert any(attempt(4**turn) for turn in range(5)), "no queue was long enough"


NUM_UNITS = 48


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    rounds=st.lists(st.sets(st.integers(1, NUM_UNITS - 1), max_size=12), min_size=1, max_size=8),
    direct=st.booleans(),
)
def test_random_operations_agree_with_a_model(
    engine: StorageEngine,
    arena: Arena,
    make_file: Make,
    seed: int,
    rounds: list[set[int]],
    direct: bool,
) -> None:
    """A file behaves like a bytearray, with several requests in flight at any time.

    Method: every round cuts the file into disjoint ranges and deals them to four requests, two
    that write and two that read; all are in flight together. Units are pages when direct and an
    odd number of bytes when buffered.
    """
    unit = PAGE_NBYTES if direct else 1237
    prng = random.Random(seed)
    model = bytearray(prng.randbytes(NUM_UNITS * unit))
    file = engine.open(make_file(bytes(model)), direct=direct)
    half = 32 * MIB
    for cuts in rounds:
        edges = [0, *sorted(cuts), NUM_UNITS]
        hands: list[list[Segment]] = [[], [], [], []]
        expected: list[tuple[int, bytes]] = []
        for low, high in itertools.pairwise(edges):
            offset, nbytes = low * unit, (high - low) * unit
            hand = prng.randrange(4)
            is_write = hand < 2
            memory_offset = offset + (half if is_write else 0)
            hands[hand].append(Segment(file, offset, arena.address + memory_offset, nbytes))
            if is_write:
                data = prng.randbytes(nbytes)
                arena.memory(memory_offset, nbytes)[:] = data
                model[offset : offset + nbytes] = data
            else:
                expected.append((offset, bytes(model[offset : offset + nbytes])))
        tickets = [
            engine.submit("write" if hand < 2 else "read", segments, prng.choice(list(Priority)))
            for hand, segments in enumerate(hands)
        ]
        for ticket in tickets:
            ticket.wait()
        for offset, data in expected:
            assert arena.memory(offset, len(data)) == data
    engine.submit("read", [Segment(file, 0, arena.address, len(model))], Priority.STATE).wait()
    assert arena.memory(0, len(model)) == model
    engine.close_file(file)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 3 * BLOCK_NBYTES // PAGE_NBYTES), min_size=1, max_size=120),
    num_requests=st.integers(1, 30),
    has_gaps=st.booleans(),
    direct=st.booleans(),
)
def test_random_segments_find_their_places(
    engine: StorageEngine,
    arena: Arena,
    make_file: Make,
    seed: int,
    lengths: list[int],
    num_requests: int,
    has_gaps: bool,
    direct: bool,
) -> None:
    """Segments of any length, neighbours in the file but not in memory, and the other way round.

    Method: the segments lie side by side in the file, or with gaps, in the order of the list, and
    side by side in memory in a random one. They are dealt to requests at random or in runs, written
    from one half of the arena, read back to the other, and the file is compared as a whole: what no
    segment covers must stay as it was.
    """
    unit = PAGE_NBYTES if direct else 313
    prng = random.Random(seed)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + (length + (prng.randrange(3) if has_gaps else 0)) * unit)
    order = list(range(len(lengths)))
    prng.shuffle(order)
    places, total = [0] * len(lengths), 0
    for index in order:
        places[index] = total
        total += lengths[index] * unit
    model = bytearray(prng.randbytes(offsets[-1]))
    path = make_file(bytes(model))
    file = engine.open(path, direct=direct)
    half = 32 * MIB
    hands: list[list[int]] = [[] for _ in range(num_requests)]
    in_runs = prng.random() < 0.5
    for index in range(len(lengths)):
        hand = index * num_requests // len(lengths) if in_runs else prng.randrange(num_requests)
        hands[hand].append(index)
    data = prng.randbytes(total)
    arena.memory(0, total)[:] = data
    arena.memory(half, total)[:] = bytes(total)
    for operation, start in (("write", arena.address), ("read", arena.address + half)):
        tickets = []
        for hand in hands:
            prng.shuffle(hand)
            segments = [
                Segment(file, offsets[each], start + places[each], lengths[each] * unit)
                for each in hand
            ]
            tickets.append(engine.submit(operation, segments, Priority.STATE))
        for ticket in tickets:
            ticket.wait()
    assert arena.memory(half, total) == data
    for offset, place, length in zip(offsets, places, lengths, strict=False):
        model[offset : offset + length * unit] = data[place : place + length * unit]
    engine.close_file(file)
    with open(path, "rb") as plain:
        assert plain.read() == model


@pytest.mark.parametrize("operation", ["read", "write"])
def test_small_extents_are_large_blocks_or_many_in_flight(
    open_any, native_name: str, arena: Arena, make_file: Make, operation: str
) -> None:
    """256 extents of 64 KiB, scattered in memory. Neighbours in the file go to the drive in whole
    blocks, others one by one, with as many bytes in flight. What that is worth in seconds is the
    drive's business, and measured by `bench/drive_sections.py`."""
    engine = open_any(native_name, block_nbytes=4 * MIB, queue_depth=2, num_threads=4)
    places = [arena.address + at * 64 * KIB for at in range(256)]
    random.Random(0).shuffle(places)
    for distance, num_commands in ((64 * KIB, 4), (128 * KIB, 256)):
        file = engine.open(make_file(32 * MIB, f"data{distance}"), direct=True)
        segments = [
            Segment(file, at * distance, place, 64 * KIB) for at, place in enumerate(places)
        ]
        engine.submit(operation, segments, Priority.STATE).wait()
        (stats,) = [found for found in engine.stats() if found.file == file]
        assert stats.num_reads + stats.num_writes == num_commands
    most = 8 * MIB // (64 * KIB) if native_name == "io_uring" else 4  # A thread has one at a time.
    assert most // 4 <= stats.max_in_flight <= most


def cancel(ticket: Ticket) -> bool:
    """Drops the blocks that were not submitted. Only tickets of the library can."""
    return getattr(ticket, "cancel", bool)()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["read", "write", "cancelled write", "read past the end"]),
            st.integers(0, NUM_UNITS - 1),
            st.integers(0, NUM_UNITS // 3),
            st.sampled_from(list(Priority)),
        ),
        min_size=1,
        max_size=30,
    ),
    direct=st.booleans(),
)
def test_overlapping_operations_keep_their_order(
    engine: StorageEngine,
    arena: Arena,
    make_file: Make,
    seed: int,
    operations: list[tuple[str, int, int, Priority]],
    direct: bool,
) -> None:
    """A file behaves like a bytearray also when requests overlap, whatever their priorities.

    Method: all requests are queued before the first is waited for, each with memory of its own. A
    read is compared with the model of the moment of its submission; a cancelled write makes its
    bytes unknown until they are written again. Lengths may be zero.
    """
    unit = PAGE_NBYTES if direct else 1237
    prng = random.Random(seed)
    size = NUM_UNITS * unit
    model: list[int | None] = list(prng.randbytes(NUM_UNITS))  # One value per unit.
    content = b"".join(bytes([value]) * unit for value in model if value is not None)
    file = engine.open(make_file(content), direct=direct)
    pending = []
    for index, (kind, first, count, priority) in enumerate(operations):
        last = min(first + count, NUM_UNITS)
        low, nbytes = first * unit, (last - first) * unit
        start = index * MIB
        segment = Segment(file, low, arena.address + start, nbytes)
        if kind == "read":
            ticket = engine.submit("read", [segment], priority)
            pending.append((kind, ticket, start, model[first:last]))
        elif kind == "read past the end":
            beyond = Segment(file, size + low, arena.address + start, unit)
            pending.append((kind, engine.submit("read", [beyond], priority), start, []))
        else:
            value = prng.randrange(256)
            arena.memory(start, nbytes)[:] = bytes([value]) * nbytes
            ticket = engine.submit("write", [segment], priority)
            has_dropped = kind == "cancelled write" and cancel(ticket)
            model[first:last] = [None if has_dropped else value] * (last - first)
            pending.append((kind if has_dropped else "write", ticket, start, []))
    for kind, ticket, start, expected in pending:
        if kind in ("cancelled write", "read past the end"):
            with pytest.raises(StorageError) as caught:
                ticket.wait()
            assert caught.value.errno == (
                errno.EIO if kind != "cancelled write" else errno.ECANCELED
            )
            continue
        ticket.wait()
        for at, value in enumerate(expected):
            if value is not None:
                assert arena.memory(start + at * unit, unit) == bytes([value]) * unit
    engine.close_file(file)


def test_cancelled_request_fails_and_its_buffer_is_free(
    open_any, native_name: str, arena: Arena, make_file: Make
) -> None:
    """What is behind a long queue can be dropped; what is finished cannot."""
    engine = open_any(native_name)
    path = make_file(32 * MIB)
    file = engine.open(path, direct=True)
    arena.memory(16 * MIB, MIB)[:] = b"x" * MIB
    offsets = itertools.count(16 * MIB, MIB)

    def attempt(length: int) -> bool:
        offset_nbytes = next(offsets)
        front = engine.submit(
            "read", [Segment(file, 0, arena.address, 16 * MIB)] * length, Priority.FORWARD
        )
        segment = Segment(file, offset_nbytes, arena.address + 16 * MIB, MIB)
        ticket = engine.submit("write", [segment], Priority.WRITE_BACK)
        if not ticket.cancel():
            ticket.wait()
            return False
        assert not ticket.cancel()
        for _ in range(2):
            with pytest.raises(StorageError, match="cancelled") as caught:
                ticket.wait()
        error = caught.value
        assert (error.errno, error.operation, error.path) == (errno.ECANCELED, "write", path)
        assert (error.offset_nbytes, error.nbytes) == (offset_nbytes, MIB)
        assert ticket.done()
        front.wait()
        assert not front.cancel()
        with open(path, "rb") as plain:
            plain.seek(offset_nbytes)
            assert plain.read() == bytes(32 * MIB - offset_nbytes)
        return True

    behind_a_queue(attempt)
    assert sum(lane["num_cancelled"] for lane in engine._core.lanes()) == 1


class _Interrupted(Exception):
    pass


def is_interrupted(work: Callable[[], object]) -> bool:
    """Whether a signal, a moment after it has begun, ended `work` before its own end."""

    def interrupt(*unused: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _Interrupted:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def test_signal_interrupts_the_wait_for_space(open_any, native_name, arena, make_file) -> None:
    engine = open_any(native_name, queue_depth=1, num_threads=1, max_pending=1)
    file = engine.open(make_file(16 * MIB), direct=True)

    def attempt(length: int) -> bool:
        slow = [Segment(file, 0, arena.address, 16 * MIB)] * (20 * length)
        ticket = engine.submit("read", slow, Priority.STATE)
        was_waiting = is_interrupted(lambda: engine.submit("read", slow, Priority.STATE))
        was_waiting &= not ticket.done()
        ticket.cancel()
        engine.drain()
        return was_waiting

    behind_a_queue(attempt)


def test_zero_lengths_move_nothing(engine: StorageEngine, arena: Arena, make_file: Make) -> None:
    data = random_bytes(PAGE_NBYTES, seed=8)
    file = engine.open(make_file(data), direct=True)
    empty = Segment(file, 64 * PAGE_NBYTES, arena.address, 0)  # Beyond the end.
    ticket = engine.submit("read", [empty], Priority.FORWARD)
    assert ticket.done()
    ticket.wait()
    whole = Segment(file, 0, arena.address, PAGE_NBYTES)
    engine.submit("read", [empty, whole, empty], Priority.FORWARD).wait()
    assert arena.memory(0, PAGE_NBYTES) == data
    assert sum(file.read_nbytes for file in engine.stats()) == PAGE_NBYTES


def test_unaligned_heads_and_tails_of_buffered_files(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    data = bytearray(random_bytes(2 * BLOCK_NBYTES + 100, seed=9))
    path = make_file(bytes(data))
    file = engine.open(path, direct=False)
    for offset, nbytes in ((1, 1), (4095, 2), (BLOCK_NBYTES - 3, 7), (5, 2 * BLOCK_NBYTES + 90)):
        arena.memory(3, nbytes)[:] = data[offset : offset + nbytes] = random_bytes(nbytes, offset)
        segment = Segment(file, offset, arena.address + 3, nbytes)
        engine.submit("write", [segment], Priority.STATE).wait()
    engine.submit("read", [Segment(file, 0, arena.address + 7, len(data))], Priority.STATE).wait()
    assert arena.memory(7, len(data)) == data
    with open(path, "rb") as plain:
        assert plain.read() == data


def test_reading_past_the_end_names_the_place(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    path = make_file(MIB + 100)
    file = engine.open(path, direct=True)
    segment = Segment(file, 2 * MIB, arena.address, PAGE_NBYTES)
    ticket = engine.submit("read", [segment], Priority.FORWARD)
    for _ in range(2):  # Every time it is asked.
        with pytest.raises(StorageError, match="end of file") as caught:
            ticket.wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == path == caught.value.path
    assert (caught.value.operation, caught.value.offset_nbytes) == ("read", 2 * MIB)
    assert caught.value.nbytes == PAGE_NBYTES
    assert ticket.done()
    inside = Segment(file, MIB - PAGE_NBYTES, arena.address, 2 * PAGE_NBYTES)
    with pytest.raises(StorageError, match="end"):
        engine.submit("read", [inside], Priority.FORWARD).wait()


def test_bad_address_is_an_error_with_the_kernels_errno(
    engine: StorageEngine, make_file: Make
) -> None:
    file = engine.open(make_file(MIB), direct=True)
    with pytest.raises(StorageError) as caught:
        engine.submit("read", [Segment(file, 0, PAGE_NBYTES, MIB)], Priority.FORWARD).wait()
    assert caught.value.errno == errno.EFAULT


@pytest.mark.parametrize("field", ["offset_nbytes", "address", "nbytes"])
def test_misalignment_is_refused_at_once(
    engine: StorageEngine, arena: Arena, make_file: Make, field: str
) -> None:
    file = engine.open(make_file(MIB), direct=True)
    good = {"file": file, "offset_nbytes": 0, "address": arena.address, "nbytes": PAGE_NBYTES}
    bad = Segment(**{**good, field: good[field] + 1})
    with pytest.raises(StorageError, match="not aligned") as caught:
        engine.submit("read", [bad], Priority.FORWARD)
    assert caught.value.errno == errno.EINVAL


def test_negative_numbers_are_refused_at_once(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    file = engine.open(make_file(MIB), direct=True)
    with pytest.raises(StorageError, match="negative"):
        engine.submit("read", [Segment(file, -PAGE_NBYTES, arena.address, 4096)], Priority.STATE)


def test_unknown_and_closed_files_are_refused(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    file = engine.open(make_file(MIB), direct=True)
    engine.close_file(file)
    for bad in (file, file + 1, -1):
        with pytest.raises(StorageError) as caught:
            engine.submit("read", [Segment(bad, 0, arena.address, 4096)], Priority.FORWARD)
        assert caught.value.errno == errno.EBADF
        for call in (engine.sync, engine.close_file):
            with pytest.raises(StorageError):
                call(bad)


def test_opening_what_is_not_there_names_the_path(engine: StorageEngine, tmp_path) -> None:
    with pytest.raises(StorageError) as caught:
        engine.open(str(tmp_path / "missing"), direct=True)
    assert (caught.value.errno, caught.value.operation) == (errno.ENOENT, "open")
    assert caught.value.path == str(tmp_path / "missing")


def test_file_without_disk_space_fails_with_enospc(open_any, native_name, arena, mount) -> None:
    point = mount("tmpfs", "size=2m")
    path = point / "data"
    path.touch()
    engine = open_any(native_name)
    file = engine.open(str(path), direct=False)
    ticket = engine.submit("write", [Segment(file, 0, arena.address, 4 * MIB)], Priority.STATE)
    with pytest.raises(StorageError) as caught:
        ticket.wait()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.offset_nbytes >= MIB
    engine.drain()


def test_wait_times_out_and_the_request_goes_on(
    open_any, native_name: str, arena: Arena, make_file: Make
) -> None:
    engine = open_any(native_name)
    file = engine.open(make_file(MIB), direct=True)

    def attempt(length: int) -> bool:
        segments = [Segment(file, 0, arena.address, MIB)] * (32 * length)
        ticket = engine.submit("read", segments, Priority.FORWARD)
        try:
            ticket.wait(0)
        except TimeoutError:
            ticket.wait(TIME_LIMIT_S)
            assert ticket.done()
            return True
        return False

    behind_a_queue(attempt)


def test_signal_interrupts_a_wait(engine: StorageEngine, arena: Arena, make_file: Make) -> None:
    file = engine.open(make_file(16 * MIB), direct=True)

    def attempt(length: int) -> bool:
        segments = [Segment(file, 0, arena.address, 16 * MIB)] * (20 * length)
        ticket = engine.submit("read", segments, Priority.FORWARD)
        was_waiting = is_interrupted(ticket.wait) and not ticket.done()
        ticket.wait()
        return was_waiting

    behind_a_queue(attempt)


def test_waiting_lets_other_python_threads_run(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    file = engine.open(make_file(16 * MIB), direct=True)

    def attempt(length: int) -> bool:
        segments = [Segment(file, 0, arena.address, 16 * MIB)] * (10 * length)
        ticket = engine.submit("read", segments, Priority.STATE)
        progress = 0
        waiter = threading.Thread(target=ticket.wait)
        waiter.start()
        while waiter.is_alive():
            progress += 1
        waiter.join()
        return progress > 1000

    behind_a_queue(attempt)


def test_close_waits_for_work_in_flight(open_any, engine_name, arena, make_file) -> None:
    data = random_bytes(16 * MIB, seed=5)
    path = make_file(16 * MIB)
    engine = open_any(engine_name)
    file = engine.open(path, direct=True)
    arena.memory(0, 16 * MIB)[:] = data
    engine.submit("write", [Segment(file, 0, arena.address, 16 * MIB)], Priority.WRITE_BACK)
    engine.close()
    with open(path, "rb") as plain:
        assert plain.read() == data


def test_closed_engine_refuses_work_and_closes_again(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    path = make_file(MIB)
    file = engine.open(path, direct=True)
    engine.close()
    engine.close()
    with pytest.raises(StorageError):
        engine.submit("read", [Segment(file, 0, arena.address, 4096)], Priority.FORWARD)
    with pytest.raises(StorageError):
        engine.open(path, direct=True)


def test_tickets_outlive_their_engine(open_any, engine_name, arena, make_file) -> None:
    engine = open_any(engine_name)
    file = engine.open(make_file(MIB), direct=True)
    good = engine.submit("read", [Segment(file, 0, arena.address, MIB)], Priority.FORWARD)
    bad = engine.submit("read", [Segment(file, 4 * MIB, arena.address, MIB)], Priority.FORWARD)
    engine.close()
    del engine
    good.wait()
    with pytest.raises(StorageError):
        bad.wait()


def test_drain_means_every_ticket_is_done(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    file = engine.open(make_file(MIB), direct=True)
    for _ in range(20):
        tickets = [
            engine.submit("read", [Segment(file, 0, arena.address, MIB)], Priority.FORWARD)
            for _ in range(5)
        ]
        engine.drain()
        assert all(ticket.done() for ticket in tickets)


def settles(count: Callable[[], int], most: int) -> bool:
    """Whether it falls to `most`: a thread that was joined is listed until the kernel has done."""
    deadline_s = time.monotonic() + 60
    while count() > most and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return count() <= most


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def leaks(cycle: Callable[[int], None], count: int, nbytes: int) -> bool:
    """Whether so many cycles take so many bytes, time and again. Once, anything may."""

    def growth_nbytes() -> int:
        before = resident_nbytes()
        cycle(count)
        gc.collect()
        return resident_nbytes() - before

    return all(growth_nbytes() >= nbytes for _ in range(3))


def test_cycles_leak_no_descriptor_and_no_thread(open_any, engine_name, arena, make_file) -> None:
    path = make_file(MIB)

    def cycle() -> None:
        engine = open_any(engine_name)
        file = engine.open(path, direct=True)
        engine.submit("read", [Segment(file, 0, arena.address, MIB)], Priority.FORWARD).wait()
        engine.close()

    cycle()
    before = num_descriptors(), num_threads()
    for _ in range(15):
        cycle()
    assert settles(num_descriptors, before[0]) and settles(num_threads, before[1])


def test_thousands_of_open_and_close_cycles_leak_nothing(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    """Neither a descriptor nor memory: 4000 files, each with a read, in one engine."""
    path = make_file(MIB)

    def cycle(count: int) -> None:
        for _ in range(count):
            file = engine.open(path, direct=True)
            segment = Segment(file, 0, arena.address, PAGE_NBYTES)
            engine.submit("read", [segment], Priority.FORWARD).wait()
            engine.close_file(file)

    cycle(500)
    before = num_descriptors()
    assert not leaks(cycle, 4000, MIB), "4000 forgotten files would be 8 MiB"
    assert num_descriptors() == before
    assert len(engine.stats()) == 1
    for number in range(70):
        os.link(path, other := f"{path}-{number}")
        engine.close_file(engine.open(other, direct=True))
    assert len(engine.stats()) == 65
    assert sum(file.num_reads for file in engine.stats()) % 4000 == 500


def test_thousand_engines_leak_nothing(native_name, open_any, arena, make_file) -> None:
    open_any(native_name)  # Skips where it does not work.
    path = make_file(MIB)

    def cycle(count: int) -> None:
        for _ in range(count):
            engine = open_engine(native_name, arena=None, num_threads=2)
            file = engine.open(path, direct=True)
            segment = Segment(file, 0, arena.address, PAGE_NBYTES)
            engine.submit("read", [segment], Priority.FORWARD).wait()
            engine.close()

    cycle(200)
    before = num_descriptors(), num_threads()
    assert not leaks(cycle, 1000, 2 * MIB)
    assert settles(num_descriptors, before[0]) and settles(num_threads, before[1])


def test_dropping_an_engine_closes_it(native_name, open_any, make_file, arena) -> None:
    open_any(native_name)  # Skips where it does not work.
    before = num_descriptors()
    engine = open_engine(native_name, arena=arena)
    engine.open(make_file(MIB), direct=True)
    del engine
    assert num_descriptors() == before


def test_statistics_count_bytes_blocks_and_errors_by_file(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    first = engine.open(make_file(MIB, "first"), direct=True)
    second = engine.open(make_file(MIB, "second"), direct=True)
    engine.submit("read", [Segment(first, 0, arena.address, MIB)], Priority.FORWARD).wait()
    engine.submit("write", [Segment(second, 0, arena.address, 4096)], Priority.STATE).wait()
    with pytest.raises(StorageError):
        beyond = Segment(second, MIB, arena.address, 4096)
        engine.submit("read", [beyond], Priority.FORWARD).wait()
    by_name = {os.path.basename(file.path): file for file in engine.stats()}
    assert (by_name["first"].read_nbytes, by_name["first"].num_reads) == (MIB, 16)
    assert (by_name["second"].write_nbytes, by_name["second"].num_writes) == (4096, 1)
    assert (by_name["second"].num_errors, by_name["first"].num_errors) == (1, 0)
    assert by_name["second"].read_nbytes == 0 < by_name["first"].busy_s
    assert sum(by_name["first"].read_latency) == 16
    assert sum(by_name["second"].write_latency) == 1
    assert sum(by_name["first"].read_latency[:78]) >= 8, "half of the reads take less than 10 s"
    assert 1 <= by_name["first"].max_in_flight <= 4
    assert 0 < by_name["first"].in_flight_s <= 4 * by_name["first"].busy_s
    (lane,) = getattr(engine, "_engine", engine)._core.lanes()
    assert lane["device"] == os.stat(by_name["first"].path).st_dev
    assert (lane["num_pending"], lane["num_in_flight"]) == (0, 0)
    assert lane["cpu_s"] > 0
    assert sum(lane["queue_wait"]) == 3


def test_arena_is_registered_with_the_ring(open_any, arena, make_file) -> None:
    engine = open_any("io_uring")
    assert isinstance(engine, NativeEngine)
    engine.open(make_file(MIB), direct=True)
    (lane,) = engine._core.lanes()
    assert lane["has_registered_files"]
    if lane["register_buffers_errno"] != errno.ENOMEM:  # A small memlock limit is legal.
        assert lane["has_registered_buffers"]


def test_requests_cross_the_boundary_of_two_registered_buffers(open_any, make_file) -> None:
    """The kernel registers at most 1 GiB at a time, so a larger arena is several buffers."""
    data = random_bytes(4 * MIB, seed=6)
    with Arena(GIB + 4 * MIB) as large:
        engine = open_any("io_uring", arena=large, block_nbytes=MIB)
        file = engine.open(make_file(4 * MIB), direct=True)
        for start in (GIB - 2 * MIB, GIB - PAGE_NBYTES, GIB):
            large.memory(start, 4 * MIB)[:] = data
            segment = Segment(file, 0, large.address + start, 4 * MIB)
            engine.submit("write", [segment], Priority.STATE).wait()
            large.memory(start, 4 * MIB)[:] = bytes(4 * MIB)
            engine.submit("read", [segment], Priority.STATE).wait()
            assert large.memory(start, 4 * MIB) == data
        # Blocks of two pages that lie apart: in one buffer, in the other, and in both.
        ends = (GIB - 64 * PAGE_NBYTES, GIB + 64 * PAGE_NBYTES)
        for places in ((ends[0], ends[0] + MIB // 8), (ends[1], ends[1] + MIB), ends):
            pages = [data[:PAGE_NBYTES], data[PAGE_NBYTES : 2 * PAGE_NBYTES]]
            segments = [
                Segment(file, 2 * MIB + at * PAGE_NBYTES, large.address + place, PAGE_NBYTES)
                for at, place in enumerate(places)
            ]
            for place, page in zip(places, pages, strict=True):
                large.memory(place, PAGE_NBYTES)[:] = page
            engine.submit("write", segments, Priority.STATE).wait()
            for place in places:
                large.memory(place, PAGE_NBYTES)[:] = bytes(PAGE_NBYTES)
            engine.submit("read", segments, Priority.STATE).wait()
            for place, page in zip(places, pages, strict=True):
                assert large.memory(place, PAGE_NBYTES) == page
        assert all(file.num_errors == file.num_retries == 0 for file in engine.stats())
        engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"block_nbytes": 1000},
        {"block_nbytes": 0},
        {"queue_depth": 0},
        {"num_threads": 0},
        {"queue_depth": 1025},
    ],
)
def test_impossible_options_are_refused(arena: Arena, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).replace("_", ".")):
        open_engine("threads", arena=arena, **options)


def test_ticket_knows_when_its_bytes_were_moved_in_each_file(
    engine: StorageEngine, arena: Arena, make_file: Make
) -> None:
    """Stamped on CLOCK_MONOTONIC as blocks complete, not when somebody looks."""
    files = [engine.open(make_file(MIB, name), direct=True) for name in ("a", "b")]
    segments = [Segment(file, 0, arena.address + file * MIB, MIB) for file in files]
    segments.append(Segment(files[0], 0, arena.address + 32 * MIB, 64 * KIB))
    before_ns = time.monotonic_ns()
    ticket = engine.submit("read", segments, Priority.FORWARD)
    ticket.wait()
    after_ns = time.monotonic_ns()
    time.sleep(0.01)
    passages = {file: times for file, *times in ticket.passages()}
    assert {file: nbytes for file, (nbytes, *_) in passages.items()} == {
        files[0]: MIB + 64 * KIB,
        files[1]: MIB,
    }
    for _, issued_ns, completed_ns in passages.values():
        assert before_ns <= issued_ns <= completed_ns <= after_ns


def test_file_that_no_block_reached_has_no_times(open_any, engine_name, arena, make_file) -> None:
    engine = open_any(engine_name)
    file = engine.open(make_file(MIB), direct=True)
    assert list(engine.submit("read", [], Priority.FORWARD).passages()) == []
    failed = engine.submit("read", [Segment(file, 2 * MIB, arena.address, MIB)], Priority.FORWARD)
    with pytest.raises(StorageError):
        failed.wait()
    assert all(completed >= issued for _, _, issued, completed in failed.passages())
