"""Blocks of the arena that are lent in parts."""

from __future__ import annotations

import pytest

from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.tiers.host import HostBlocks
from infinity.tiers.pool import HostPool
from infinity.tiers.ranges import Range


def test_a_dissolved_block_is_free_but_for_the_parts_that_stay() -> None:
    arena = Arena(16 * PAGE_NBYTES)
    try:
        host = HostBlocks(arena, Counters())
        below, above = host.allocate(PAGE_NBYTES, "above"), host.allocate(12 * PAGE_NBYTES, "all")
        assert below is not None and above is not None
        start = above.range.offset_nbytes
        parts = [
            host.carve(above, 2 * PAGE_NBYTES, PAGE_NBYTES),
            host.carve(above, 3 * PAGE_NBYTES, 2 * PAGE_NBYTES),
            host.carve(above, 8 * PAGE_NBYTES, 4 * PAGE_NBYTES),
        ]
        host.dissolve(above, parts)
        assert host.free_nbytes == (16 - 1 - 7) * PAGE_NBYTES
        assert host.holes() == [
            Range(0, start + 2 * PAGE_NBYTES),
            Range(start + 5 * PAGE_NBYTES, 3 * PAGE_NBYTES),
        ]
        for part in parts:
            host.free(part)
        host.free(below)
        assert host.holes() == [Range(0, 16 * PAGE_NBYTES)] and not host.lent()
    finally:
        arena.close()


def test_a_refusal_says_the_largest_free_piece() -> None:
    arena = Arena(16 * PAGE_NBYTES)
    try:
        pool = HostPool(HostBlocks(arena, Counters()))
        blocks = [pool.require(4 * PAGE_NBYTES, f"block {number}") for number in range(4)]
        pool.free(blocks[0])
        pool.free(blocks[2])
        with pytest.raises(
            CapacityError, match="32.0 KiB are free in 2 pieces; in use: block"
        ) as it:
            pool.require(5 * PAGE_NBYTES, "weights")
        assert it.value.available_nbytes == 4 * PAGE_NBYTES
    finally:
        arena.close()
