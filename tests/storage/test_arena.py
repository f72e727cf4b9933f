"""The arena, and windows through which its pages are seen."""

from __future__ import annotations

import math
import mmap
import os
import random
import resource
import struct
from pathlib import Path

import pytest

from infinity.errors import CapacityError, ConfigError
from infinity.sizes import HUGE_PAGE_NBYTES, KIB, MIB, PAGE_NBYTES, TIB
from infinity.storage.arena import Arena, Window, available_host_nbytes, can_remap, can_share
from infinity.storage.protocol import Priority, Segment

needs_remap = pytest.mark.skipif(
    not can_remap(), reason="this kernel cannot move pages: mremap(MREMAP_DONTUNMAP), Linux 5.7"
)


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def num_faults() -> int:
    """Pages that this process has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def test_arena_is_aligned_zeroed_and_writable() -> None:
    with Arena(3 * MIB + 1) as arena:
        assert arena.capacity_nbytes == 3 * MIB + PAGE_NBYTES
        assert arena.address % HUGE_PAGE_NBYTES == 0
        view = arena.memory(0, arena.capacity_nbytes)
        assert not view.readonly
        assert bytes(view) == bytes(arena.capacity_nbytes)
        view[MIB : MIB + 5] = b"hello"
        assert arena.memory(MIB, 5) == b"hello"


@pytest.mark.skipif(not has_huge_pages(), reason="transparent huge pages are 'never' here")
def test_arena_reports_huge_pages_it_has_and_none_it_was_not_to_have() -> None:
    with Arena(16 * MIB) as huge, Arena(16 * MIB, huge_pages=False) as small:
        assert 0 < huge.huge_page_nbytes <= 16 * MIB, "as many as the kernel has free"
        assert small.huge_page_nbytes == 0


def test_arena_is_populated_at_once() -> None:
    """No page fault is left for later: the first touch of every page is cheap."""
    with Arena(64 * MIB, huge_pages=False) as arena:
        before = num_faults()
        view = arena.memory(0, 64 * MIB)
        for at in range(0, 64 * MIB, PAGE_NBYTES):
            view[at] = 1
        assert num_faults() - before < 1000


@pytest.mark.parametrize("bad", [(-1, 4096), (0, 2 * MIB + 1), (2 * MIB, 1), (0, -1)])
def test_view_outside_the_arena_is_refused(bad: tuple[int, int]) -> None:
    with Arena(2 * MIB) as arena, pytest.raises(ValueError, match="outside"):
        arena.memory(*bad)


def test_arena_larger_than_memory_is_refused_before_it_is_populated() -> None:
    faults, free_nbytes = num_faults(), available_host_nbytes()
    with pytest.raises(CapacityError, match=r"tiers\.host\.capacity") as caught:
        Arena(64 * TIB)
    assert num_faults() - faults < 1000
    assert caught.value.available_nbytes <= max(free_nbytes, available_host_nbytes()) * 1.5


@pytest.mark.parametrize("kind", [Arena, Window])
@pytest.mark.parametrize("capacity_nbytes", [0, -5])
def test_empty_capacity_is_refused(kind: type, capacity_nbytes: int) -> None:
    with pytest.raises(ConfigError):
        kind(capacity_nbytes)


def test_views_keep_the_memory_alive_after_close() -> None:
    arena = Arena(2 * MIB)
    view = arena.memory(0, 2 * MIB)
    arena.close()
    arena.close()
    view[:] = b"x" * (2 * MIB)
    assert view[-1] == ord("x")
    with pytest.raises(ValueError, match="closed"):
        arena.memory(0, 1)


def test_memory_is_given_back_with_the_last_view() -> None:
    arena = Arena(2 * MIB)
    line = f"{arena.address:x}-"
    view = arena.memory(0, MIB)
    arena.close()
    assert line in Path("/proc/self/maps").read_text()
    del view
    assert line not in Path("/proc/self/maps").read_text()


def test_arena_is_kept_out_of_forked_children() -> None:
    with Arena(2 * MIB) as arena:
        line = f"{arena.address:x}-".encode()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            is_there = line in Path("/proc/self/maps").read_bytes()
            os.write(write_end, b"there" if is_there else b"absent")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read_end, 10) == b"absent"
        os.close(read_end)
        os.close(write_end)


def test_a_shared_arena_is_seen_by_who_maps_its_file_and_can_not_be_cut() -> None:
    with Arena(4 * MIB, is_shared=True) as arena:
        assert arena.address % HUGE_PAGE_NBYTES == 0 and arena.descriptor is not None
        assert bytes(arena.memory(0, 4 * MIB)) == bytes(4 * MIB)
        other = mmap.mmap(arena.descriptor, 4 * MIB, prot=mmap.PROT_READ)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.descriptor, 0)
        arena.close_file()
        assert arena.descriptor is None
        arena.memory(MIB, 5)[:] = b"hello"
        assert other[MIB : MIB + 5] == b"hello"
    assert other[MIB : MIB + 5] == b"hello", "also after the arena"


@needs_remap
def test_pages_of_a_shared_arena_are_seen_elsewhere_while_they_are_in_a_window() -> None:
    if not can_share(huge_pages=True):
        pytest.skip("this kernel does not move pages of files, or gives them no huge pages")
    with Arena(8 * MIB, is_shared=True) as arena, Window(4 * MIB) as window:
        assert arena.descriptor is not None
        other = mmap.mmap(arena.descriptor, 8 * MIB, prot=mmap.PROT_READ)
        for start in (0, MIB, 2 * MIB + PAGE_NBYTES):
            data = random.Random(start).randbytes(4 * MIB)
            arena.memory(start, 4 * MIB)[:] = data
            window.map(arena, start, 4 * MIB)
            assert window.memory(0, 4 * MIB) == data
            window.memory(0, 1)[0] = (data[0] + 1) % 256
            assert other[start : start + 4 * MIB] == window.memory(0, 4 * MIB)
            window.unmap(arena, start, 4 * MIB)
            assert set(window.memory(0, 4 * MIB)) == {0xFF}
            assert arena.memory(start, 4 * MIB) == other[start : start + 4 * MIB]


@needs_remap
def test_pages_move_into_the_window_and_back_with_their_bytes() -> None:
    with Arena(8 * MIB) as arena, Window(4 * MIB) as window:
        assert window.address % HUGE_PAGE_NBYTES == 0
        data = random.Random(0).randbytes(4 * MIB)
        arena.memory(2 * MIB, 4 * MIB)[:] = data
        window.map(arena, 2 * MIB, 4 * MIB)
        assert window.memory(0, 4 * MIB) == data
        window.memory(7, 5)[:] = b"hello"
        window.unmap(arena, 2 * MIB, 4 * MIB)
        assert arena.memory(2 * MIB + 7, 5) == b"hello"
        assert arena.memory(2 * MIB + 12, MIB) == data[12 : MIB + 12]


@needs_remap
def test_window_shows_several_ranges_at_once() -> None:
    with Arena(8 * MIB) as arena, Window(8 * MIB) as window:
        for index in range(4):
            arena.memory(index * 2 * MIB, 1)[0] = index + 1
        for index in range(4):  # In reverse order.
            window.map(arena, (3 - index) * 2 * MIB, 2 * MIB, index * 2 * MIB)
        assert [window.memory(index * 2 * MIB, 1)[0] for index in range(4)] == [4, 3, 2, 1]
        for index in range(4):
            window.unmap(arena, (3 - index) * 2 * MIB, 2 * MIB, index * 2 * MIB)
        assert [arena.memory(index * 2 * MIB, 1)[0] for index in range(4)] == [1, 2, 3, 4]


@needs_remap
def test_impossible_moves_are_refused_and_change_nothing() -> None:
    with Arena(8 * MIB) as arena, Window(4 * MIB) as window, Window(4 * MIB) as other:
        arena.memory(0, 5)[:] = b"hello"
        for bad in ((0, 0), (1, PAGE_NBYTES), (0, 8 * MIB), (6 * MIB, 4 * MIB), (16 * MIB, MIB)):
            with pytest.raises(ValueError, match="out of bounds"):
                window.map(arena, *bad)
        with pytest.raises(ValueError, match="not what was mapped"):
            window.unmap(arena, 0, 2 * MIB)
        window.map(arena, 0, 2 * MIB)
        with pytest.raises(ValueError, match="mapped already"):
            other.map(arena, MIB, 2 * MIB)
        with pytest.raises(ValueError, match="mapped already"):
            window.map(arena, 4 * MIB, 2 * MIB, MIB)
        with pytest.raises(ValueError, match="not what was mapped"):
            window.unmap(arena, 0, MIB)
        window.unmap(arena, 0, 2 * MIB)
        assert arena.memory(0, 5) == b"hello"


@needs_remap
@pytest.mark.parametrize("access", ["read the arena", "write the window"])
def test_touching_the_side_without_pages_faults(run_python, access: str) -> None:
    """A stray access is a crash at the culprit, not other bytes somewhere else later."""
    script = """
    import sys
    from infinity.storage.arena import Arena, Window
    arena, window = Arena(4 << 20), Window(4 << 20)
    window.map(arena, 0, 2 << 20)
    if sys.argv[1] == "read the arena":
        arena.memory(0, 1)[0]
    else:
        window.unmap(arena, 0, 2 << 20)
        window.memory(0, 1)[0] = 1
    """
    with pytest.raises(AssertionError) as caught:
        run_python(script, access)
    assert "-11" in str(caught.value)


@needs_remap
@pytest.mark.parametrize("capacity_nbytes", [4096, 2 * MIB, 20 * MIB, 80 * MIB])
def test_released_window_reads_as_nan(capacity_nbytes: int) -> None:
    with Arena(capacity_nbytes) as arena, Window(capacity_nbytes) as window:
        arena.memory(0, capacity_nbytes)[:] = bytes(capacity_nbytes)
        window.map(arena, 0, capacity_nbytes)
        assert window.memory(0, capacity_nbytes) == bytes(capacity_nbytes)
        window.unmap(arena, 0, capacity_nbytes)
        assert window.memory(0, capacity_nbytes) == b"\xff" * capacity_nbytes
        assert math.isnan(window.memory(0, 4).cast("f")[0])
        assert math.isnan(struct.unpack("e", window.memory(0, 2))[0])


@needs_remap
def test_poison_costs_a_mapping_for_eight_mib_and_touches_no_page() -> None:
    """So a unit that comes and goes costs little more than without: a window of 2 TiB asks for more
    mappings than poison may take, and has no access instead."""
    nbytes = 28 * MIB

    def num_mappings_of(window: Window) -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = ([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
        last = window.address + nbytes
        return sum(start < last and window.address < stop for start, stop in ranges)

    for capacity_nbytes, expected in ((nbytes, 4), (2 * TIB, 1)):
        with Arena(nbytes) as arena, Window(capacity_nbytes) as window:
            before = num_faults()
            for _ in range(100):
                window.map(arena, 0, nbytes)
                window.unmap(arena, 0, nbytes)
            assert num_mappings_of(window) == expected
            assert num_faults() - before < 1000


@needs_remap
@pytest.mark.skipif(not has_huge_pages(), reason="transparent huge pages are 'never' here")
def test_moves_of_whole_huge_pages_keep_them_whole() -> None:
    with Arena(16 * MIB) as arena, Window(8 * MIB) as window:
        before_nbytes = arena.huge_page_nbytes
        for cycle in range(50):
            offset = cycle % 4 * 2 * MIB
            window.map(arena, offset, 8 * MIB)
            assert window.memory(0, 1)[0] == 0
            window.unmap(arena, offset, 8 * MIB)
        assert arena.huge_page_nbytes >= before_nbytes > 0


@needs_remap
def test_thousand_remaps_keep_the_number_of_mappings_bounded() -> None:
    """Mappings that were split for a move merge again: the kernel allows about 65000 in all."""
    prng = random.Random(0)
    with Arena(32 * MIB) as arena, Window(32 * MIB) as window:
        before = num_mappings()
        for _ in range(1000):
            nbytes = prng.randrange(1, 512) * PAGE_NBYTES
            arena_offset = prng.randrange(0, 32 * MIB - nbytes, PAGE_NBYTES)
            window_offset = prng.randrange(0, 32 * MIB - nbytes, PAGE_NBYTES)
            window.map(arena, arena_offset, nbytes, window_offset)
            window.unmap(arena, arena_offset, nbytes, window_offset)
        assert num_mappings() <= before + 8


@needs_remap
def test_overlapping_schedules_of_moves_keep_every_page() -> None:
    """Random maps and unmaps with several ranges away at a time; a model says what is where."""
    prng = random.Random(1)
    slot_nbytes, num_slots = 256 * KIB, 32
    with Arena(num_slots * slot_nbytes) as arena, Window(num_slots * slot_nbytes) as window:
        for slot in range(num_slots):
            arena.memory(slot * slot_nbytes, slot_nbytes)[:] = bytes([slot + 1]) * slot_nbytes
        before = num_mappings()
        away: dict[int, int] = {}  # arena slot -> window slot
        for _ in range(600):
            slot = prng.randrange(num_slots)
            if slot in away:
                place = away.pop(slot)
                assert window.memory(place * slot_nbytes, 1)[0] == slot + 1
                window.unmap(arena, slot * slot_nbytes, slot_nbytes, place * slot_nbytes)
            else:
                place = prng.choice([p for p in range(num_slots) if p not in away.values()])
                window.map(arena, slot * slot_nbytes, slot_nbytes, place * slot_nbytes)
                away[slot] = place
        for slot, place in away.items():
            window.unmap(arena, slot * slot_nbytes, slot_nbytes, place * slot_nbytes)
        for slot in range(num_slots):
            assert arena.memory(slot * slot_nbytes, slot_nbytes) == bytes([slot + 1]) * slot_nbytes
        assert num_mappings() <= before + 8


@needs_remap
def test_registered_io_reaches_pages_that_came_back(open_any, native_name, make_file) -> None:
    """The ring pinned the pages once; a trip through a window must not part page and address.

    Method: write marks through the window, bring the pages back, write them to the file from the
    arena; then read other bytes into a range that just came back, and see them in the window.
    """
    nbytes = 4 * MIB
    with Arena(16 * MIB) as arena, Window(nbytes) as window:
        engine = open_any(native_name, arena=arena, block_nbytes=MIB)
        file = engine.open(make_file(nbytes), direct=True)
        for cycle in range(20):
            data = random.Random(cycle).randbytes(nbytes)
            offset = cycle % 3 * 2 * MIB
            window.map(arena, offset, nbytes)
            window.memory(0, nbytes)[:] = data
            window.unmap(arena, offset, nbytes)
            source = Segment(file, 0, arena.address + offset, nbytes)
            engine.submit("write", [source], Priority.WRITE_BACK).wait()
            other = (offset + 8 * MIB) % (12 * MIB)
            window.map(arena, other, nbytes)
            window.unmap(arena, other, nbytes)
            target = Segment(file, 0, arena.address + other, nbytes)
            engine.submit("read", [target], Priority.FORWARD).wait()
            window.map(arena, other, nbytes)
            assert window.memory(0, nbytes) == data
            window.unmap(arena, other, nbytes)
        engine.close()


@needs_remap
def test_ring_refuses_to_register_an_arena_with_a_hole(open_any, make_file) -> None:
    """It would pin the wrong pages. The device then runs without registered buffers, and right."""
    data = random.Random(2).randbytes(MIB)
    with Arena(8 * MIB) as arena, Window(2 * MIB) as window:
        window.map(arena, 0, 2 * MIB)
        engine = open_any("io_uring", arena=arena)
        file = engine.open(make_file(data), direct=True)
        assert not engine._core.lanes()[0]["has_registered_buffers"]
        window.unmap(arena, 0, 2 * MIB)
        engine.submit("read", [Segment(file, 0, arena.address, MIB)], Priority.FORWARD).wait()
        assert arena.memory(0, MIB) == data
        engine.close()


def test_pages_prefer_the_numa_node_that_is_named() -> None:
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel has no NUMA policies")
    for node, word in ((0, "prefer"), (None, "default")):
        with Arena(4 * MIB, numa_node=node) as arena:
            [line] = [
                each for each in maps.read_text().splitlines()
                if each.startswith(f"{arena.address:x} ")
            ]  # fmt: skip
            assert arena.core.prefers_node == (node is not None)
            assert line.split()[1].startswith(word)
    with Arena(4 * MIB, numa_node=1 << 20) as arena:  # No such node: the wish is dropped.
        assert not arena.core.prefers_node
