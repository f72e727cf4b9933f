"""Who may take spare host memory, and who gives memory back first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import MIB
from infinity.storage.arena import Arena
from infinity.tiers.host import Block, HostPool
from infinity.tiers.spare import Giver, SpareMemory

nbytes = st.integers(0, 1 << 40)


@given(st.builds(SpareMemory, nbytes, nbytes, nbytes, nbytes, nbytes))
def test_who_takes_what_is_spare_leaves_what_others_need(spare: SpareMemory) -> None:
    free, weights, sums = (
        spare.free_nbytes, spare.weights_to_come_nbytes, spare.sums_to_come_nbytes
    )  # fmt: skip
    given_back = free + spare.spare_slots_nbytes
    assert free - spare.beside_weights_nbytes == weights
    assert free - spare.unclaimed_nbytes == weights + sums
    assert given_back - spare.for_sums_nbytes == weights + spare.ring_to_come_nbytes
    assert spare.unclaimed_nbytes <= spare.beside_weights_nbytes <= free


def _pool(arena: Arena) -> HostPool:
    return HostPool(arena, Counters())


@given(st.permutations(list(Giver)), st.data())
def test_the_pool_asks_the_cheapest_giver_first_and_takes_no_more_than_it_needs(
    registered: Sequence[Giver], data: st.DataObject
) -> None:
    arena = Arena(16 * MIB)
    try:
        pool, held, asked = _pool(arena), dict[Giver, list[Block]](), list[Giver]()

        def give(giver: Giver, wanted_nbytes: int) -> bool:
            asked.append(giver)
            if not held[giver]:
                return False
            pool.free(held[giver].pop())
            return True

        for giver in registered:
            pool.add_giver(giver, partial(give, giver))
        owners = data.draw(st.lists(st.sampled_from(Giver), min_size=8, max_size=8))
        held |= {giver: [] for giver in Giver}
        for giver in owners:
            held[giver].append(pool.require(2 * MIB, giver.name))
        assert pool.spare.free_nbytes == pool.free_nbytes == 0
        asked.clear()
        at_once = [giver for giver in owners if giver.gives_at_once]
        assert (pool.try_allocate(2 * MIB, "ahead") is not None) is bool(at_once)
        assert all(giver.gives_at_once for giver in asked) and asked == sorted(asked)
        for giver in sorted(owners)[bool(at_once) :]:
            before = len(held[giver])
            pool.require(2 * MIB, "now")
            assert len(held[giver]) == before - 1
        with pytest.raises(CapacityError):
            pool.require(2 * MIB, "now")
    finally:
        arena.close()
