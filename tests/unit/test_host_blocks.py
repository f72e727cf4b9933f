"""Blocks of the arena that are lent in parts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import Range
from infinity.tiers.spare import Giver


def test_a_dissolved_block_is_free_but_for_the_parts_that_stay() -> None:
    arena = Arena(16 * PAGE_NBYTES)
    try:
        host = HostPool(arena, Counters())
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
        pool = HostPool(arena, Counters())
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


def free_one(pool: HostPool, idle: list[Block], _: int) -> bool:
    if idle:
        pool.free(idle.pop())
        return True
    return False


def test_an_idle_block_below_idle_ones_is_moved_to_the_stack_with_its_bytes() -> None:
    """Small blocks are stacked from the top, large ones from the bottom."""
    for nbytes in (4 * PAGE_NBYTES, 2 * HUGE_PAGE_NBYTES):
        arena = Arena(8 * nbytes)
        try:
            pool = HostPool(arena, Counters(), is_tight=True)
            kept, gone, block = (pool.require(size, "") for size in (nbytes, nbytes // 2, nbytes))
            pool.tensor(block).copy_(torch.arange(nbytes) % 251)
            idle = [gone]
            pool.add_giver(Giver.UPDATES, partial(free_one, pool, idle))
            assert pool.is_stacked(block, [kept, gone], 0)
            assert pool.is_stacked(block, [kept], nbytes // 2)
            assert not pool.is_stacked(block, [kept], nbytes // 2 - 1)
            pool.restack(block)  # By half of its length: the ranges overlap.
            assert pool.is_stacked(block, [kept], 0) and not idle
            assert len(pool.holes()) == 1
            assert torch.equal(pool.tensor(block).long(), torch.arange(nbytes) % 251)
        finally:
            arena.close()
