"""What a step asks of a partition at every unit is computed once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from infinity.state.partition import STAGES, partition
from infinity.state.units import Unit

from .strategies import units


@given(units(), st.integers(1, 5), st.sampled_from(STAGES))
def test_the_lists_of_a_rank_are_made_once(laid_out: list[Unit], count: int, stage: int) -> None:
    of_first = partition(laid_out, rank=0, count=count, stage=stage)
    for rank in range(count):
        found = replace(of_first, rank=rank)
        assert found.local == tuple(shards[rank] for shards in found.shards)
        assert found.local is found.local and found.units is found.units
        assert found.units == (*found.full_units, *(shard.unit for shard in found.local))
        assert rank in found.node
