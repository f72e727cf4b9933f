"""The pattern sees what a checksum of sums would not: swapped, stale, shifted and torn blocks."""

from __future__ import annotations

import pytest

from infinity.sizes import MIB
from infinity.tools.bench import pattern

NBYTES = 3 * MIB + 64 * 1024


@pytest.fixture
def memory() -> memoryview:
    memory = memoryview(bytearray(NBYTES))
    pattern.fill(memory, offset_nbytes=8 * MIB, seed=3)
    return memory


def holds(memory: memoryview, *, offset_nbytes: int = 8 * MIB, seed: int = 3) -> bool:
    return pattern.matches(memory, offset_nbytes=offset_nbytes, seed=seed)


def test_what_was_filled_matches(memory: memoryview) -> None:
    assert holds(memory)


def test_another_offset_or_seed_does_not(memory: memoryview) -> None:
    assert not holds(memory, offset_nbytes=9 * MIB)
    assert not holds(memory, seed=4)
    assert not holds(memory, seed=2)


@pytest.mark.parametrize("at", [0, 1, MIB - 1, MIB, 2 * MIB + 12345, NBYTES - 1])
def test_one_flipped_bit_is_seen(memory: memoryview, at: int) -> None:
    memory[at] ^= 1
    assert not holds(memory)


def test_two_swapped_chunks_are_seen(memory: memoryview) -> None:
    first = bytes(memory[:MIB])
    memory[:MIB] = memory[MIB : 2 * MIB]
    memory[MIB : 2 * MIB] = first
    assert not holds(memory)


@pytest.mark.parametrize("at", [64 * 1024, MIB - 64 * 1024, MIB - 8])
def test_a_part_of_the_region_is_what_the_whole_has_there(memory: memoryview, at: int) -> None:
    part = memoryview(bytearray(MIB + 64 * 1024))
    pattern.fill(part, offset_nbytes=8 * MIB + at, seed=3)
    assert part == memory[at : at + len(part)]
    assert holds(part, offset_nbytes=8 * MIB + at)
    assert not holds(part, offset_nbytes=8 * MIB + at - 8)


def test_poison_is_no_pattern(memory: memoryview) -> None:
    pattern.poison(memory)
    assert not holds(memory)
