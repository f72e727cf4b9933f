"""Shards: every element and every byte has one owner, whatever the number of ranks."""

from __future__ import annotations

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.distributed.sums.norms import NormsOfRanks, roots_of_part
from infinity.distributed.sums.ordered_sum import OrderedReduction
from infinity.sizes import PAGE_NBYTES
from infinity.state.partition import STAGES, Partition, partition
from infinity.state.units import STATE_GRANULE, StateKind, Unit

from .strategies import units

COUNTS = st.integers(1, 5)


def all_ranks(laid_out: list[Unit], count: int, stage: int) -> list[Partition]:
    return [partition(laid_out, rank=r, count=count, stage=stage) for r in range(count)]


@given(laid_out=units(), count=COUNTS, stage=st.sampled_from(STAGES))
@settings(max_examples=100)
def test_every_element_of_state_has_one_owner(laid_out: list[Unit], count: int, stage: int) -> None:
    divided = partition(laid_out, rank=0, count=count, stage=stage)
    for unit, shards in zip(laid_out, divided.shards, strict=True):
        taken = numpy.zeros(unit.state_numel, dtype=int)
        for shard in shards:
            assert shard.start % STATE_GRANULE == 0
            taken[shard.start : shard.stop] += 1
            assert shard.unit.state_numel == shard.stop - shard.start
        assert (taken == 1).all()
        sizes = [shard.stop - shard.start for shard in shards]
        assert max(sizes) - min(sizes) <= STATE_GRANULE, "shares are even"


@given(laid_out=units(), count=COUNTS)
@settings(max_examples=100)
def test_equal_parts_are_in_rank_order_and_unequal_ones_begin_at_another_rank_in_each_unit(
    laid_out: list[Unit], count: int
) -> None:
    divided = partition(laid_out, rank=0, count=count, stage=3)
    for unit, shards in zip(laid_out, divided.shards, strict=True):
        cold_nbytes = unit.weight_nbytes - unit.trainable_nbytes
        totals = unit.state_numel // STATE_GRANULE, cold_nbytes // PAGE_NBYTES
        is_equal = not any(total % count for total in totals)
        first = 0 if is_equal else -unit.index % count
        assert shards[first].start == 0
        assert [shard.start for shard in shards[first:] + shards[:first]] == sorted(
            shard.start for shard in shards
        )


@given(laid_out=units(), count=COUNTS)
@settings(max_examples=100)
def test_every_byte_of_weights_has_one_owner_and_a_place(laid_out: list[Unit], count: int) -> None:
    divided = partition(laid_out, rank=0, count=count, stage=3)
    for unit, shards in zip(laid_out, divided.shards, strict=True):
        taken = numpy.zeros(unit.weight_nbytes, dtype=int)
        for shard in shards:
            place = numpy.zeros(shard.unit.weight_nbytes, dtype=int)
            for segment in shard.segments:
                start = segment.full_offset_nbytes
                taken[start : start + segment.nbytes] += 1
                start = segment.shard_offset_nbytes
                assert start % PAGE_NBYTES == 0
                assert len(place[start : start + segment.nbytes]) == segment.nbytes
                place[start : start + segment.nbytes] += 1
            assert (place <= 1).all()
        used = unit.tensors and unit.weight_nbytes
        assert not used or (taken == 1).all()


@given(laid_out=units(), per_node=st.integers(1, 3), num_nodes=st.integers(2, 3))
@settings(max_examples=100)
def test_each_node_has_all_frozen_weights_once_and_one_node_saves_them(
    laid_out: list[Unit], per_node: int, num_nodes: int
) -> None:
    """Units with trained weights are as those of ranks without nodes."""
    count = per_node * num_nodes
    nodes = [range(count)[node::num_nodes] for node in range(num_nodes)]  # Not in rank order.
    divided = [
        partition(laid_out, rank=rank, count=count, stage=3, nodes=nodes, over_node=True)
        for rank in range(count)
    ]
    over_all = partition(laid_out, rank=0, count=count, stage=3)
    alone = partition(laid_out, rank=0, count=per_node, stage=3)
    for unit in laid_out:
        shards = divided[0].shards[unit.index]
        savers = [r for r in range(count) if divided[r].is_saver(shards[r].unit)]
        if unit.trainable_nbytes:
            assert [s.segments for s in shards] == [s.segments for s in over_all.shards[unit.index]]
            assert savers == list(range(count)) and divided[0].sources(unit.index) == shards
            continue
        parts = [shard.segments for shard in alone.shards[unit.index]]
        for ranks in nodes:
            of_node = divided[ranks[0]].sources(unit.index)
            assert [shard.rank for shard in of_node] == list(ranks)
            assert [shard.segments for shard in of_node] == parts, "as one node alone"
        assert savers == list(nodes[unit.index % num_nodes])


@given(laid_out=units(), count=COUNTS)
@settings(max_examples=100)
def test_a_shard_finds_its_elements_in_state_and_in_weights(
    laid_out: list[Unit], count: int
) -> None:
    """A whole unit is filled with numbers, split by its segments, and read by its shards."""
    divided = partition(laid_out, rank=0, count=count, stage=3)
    shares = divided.shares()
    for unit, shards in zip(divided.full_units, divided.shards, strict=True):
        weights = torch.randint(0, 256, (unit.weight_nbytes,), dtype=torch.uint8)
        state = torch.arange(unit.state_numel)
        for shard in shards:
            mine = torch.zeros(shard.unit.weight_nbytes, dtype=torch.uint8)
            for each in shard.segments:
                mine[each.shard_offset_nbytes : each.shard_offset_nbytes + each.nbytes] = weights[
                    each.full_offset_nbytes : each.full_offset_nbytes + each.nbytes
                ]
            for share in (*shard.shares, *shard.frozen):
                size = share.full.facts.dtype.itemsize
                part, full = share.part, share.full
                start = part.weight_offset_nbytes
                there = full.weight_offset_nbytes + share.start * size
                assert start % size == 0
                assert torch.equal(
                    mine[start : start + part.numel * size],
                    weights[there : there + part.numel * size],
                )
                if share in shard.shares:
                    first = shard.start + part.state_offset
                    assert int(state[first]) == full.state_offset + share.start
        frozen = [share for shard in shards for share in shard.frozen]
        for spec in unit.tensors:
            of_spec = shares.get(spec) or [share for share in frozen if share.full is spec]
            bounds = sorted((share.start, share.stop) for share in of_spec)
            covered = [number for start, stop in bounds for number in range(start, stop)]
            assert covered == list(range(spec.numel))


@given(laid_out=units(), count=COUNTS, stage=st.sampled_from(STAGES))
@settings(max_examples=60)
def test_bytes_at_rest_are_those_of_the_stage(laid_out: list[Unit], count: int, stage: int) -> None:
    divided = all_ranks(laid_out, count, stage)
    kept = {1: {StateKind.PARAMETERS, StateKind.GRADIENTS}, 2: {StateKind.PARAMETERS}, 3: set()}[
        stage
    ]
    for kind in (StateKind.PARAMETERS, StateKind.GRADIENTS, StateKind.EXP_AVG, StateKind.MASTER):
        alone = sum(unit.nbytes(kind) for unit in laid_out)
        full = sum(unit.nbytes(kind) for unit in divided[0].full_units)
        shards = sum(shard.unit.nbytes(kind) for each in divided for shard in each.local)
        assert full == (alone if kind in kept else 0)
        if kind is StateKind.PARAMETERS:
            # A shard ends on a page of its own: at most two pages more for each.
            most = alone + 2 * PAGE_NBYTES * count * len(laid_out)
            assert shards == 0 if kind in kept else alone <= shards <= most or not alone
        else:
            assert shards == alone


@given(laid_out=units(max_units=2), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_norms_do_not_depend_on_the_number_of_ranks(laid_out: list[Unit], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for unit in laid_out:
        for spec in unit.trainable():
            values = torch.randn(spec.numel, generator=generator)
            found = []
            for count in (1, 2, 3, 5):
                shares = partition(laid_out, rank=0, count=count, stage=2).shares()
                norms = NormsOfRanks({spec: shares[spec]})
                for share in shares[spec]:
                    assert not norms.has(0)
                    roots = roots_of_part(values[share.start : share.stop], share)
                    norms.take(share.rank, [0], roots.tobytes())
                found.append(norms.norm(0))
            assert all(torch.equal(found[0], other) for other in found)
            assert torch.allclose(found[0], values.double().norm().float(), rtol=1e-6)


def text_reduce_buffer(count: int) -> OrderedReduction[str]:
    """Sums are written out, with neighbours in the order of ranks: an addition has no sides."""
    return OrderedReduction(count, combine=added, drop=lambda _: None)


def kept(reduce_buffer: OrderedReduction[str]) -> int:
    """How many sums wait."""
    entries = reduce_buffer._tensors.values()
    return sum(len(e.ahead) + sum(map(len, e.nodes.values())) for e in entries)


def added(one: str, other: str) -> str:
    return f"({' + '.join(sorted((one, other), key=lambda text: text.strip('(')))})"


def tree(parts: list[str]) -> str:
    """The sum that is promised, of ranks that gave something; "" of none."""
    while len(parts) > 1:
        pairs = [[p for p in parts[at : at + 2] if p] for at in range(0, len(parts), 2)]
        parts = [added(*pair) if len(pair) == 2 else "".join(pair) for pair in pairs]
    return parts[0]


@given(data=st.data(), count=st.integers(1, 7), is_fresh=st.booleans())
@settings(max_examples=300)
def test_the_reduce_buffer_has_one_sum_whatever_the_timing(
    data: st.DataObject, count: int, is_fresh: bool
) -> None:
    given_by = [data.draw(st.integers(0, 3)) for _ in range(count)]  # Some rank has none.
    expected = "" if is_fresh else "before"
    for number in range(max(given_by)):
        part = tree([f"{r}.{number}" if number < given_by[r] else "" for r in range(count)])
        expected = f"{expected}; {part}" if expected else part
    arrivals = data.draw(
        st.permutations([rank for rank in range(count) for _ in range(given_by[rank])])
    )
    reduce_buffer = text_reduce_buffer(count)
    total = ""
    if not is_fresh:  # A step was made, and its gradient not cleared.
        reduce_buffer.deliver(7, 0, 0, 0, "before")
        [(_, total)] = reduce_buffer.take(all_are_there=True)
    numbers, parts_of_first = [0] * count, 0

    def take(*, all_are_there: bool) -> None:
        nonlocal total, parts_of_first
        for _, content in reduce_buffer.take(all_are_there=all_are_there):
            if not total:
                total = content
            elif is_fresh and (f".{0}" in content):
                total = added(total, content)
            else:
                total = f"{total}; {content}"

    most = 0
    for rank in arrivals:
        reduce_buffer.deliver(7, rank, 0, numbers[rank], f"{rank}.{numbers[rank]}")
        numbers[rank] += 1
        if data.draw(st.booleans()):
            take(all_are_there=False)
            most = max(most, kept(reduce_buffer))
    if max(given_by, default=0) == 1 and min(given_by) == 1 and is_fresh:
        assert most <= max(1, count.bit_length()), "what waits is a path of the tree"
    take(all_are_there=True)
    assert total == expected
    assert kept(reduce_buffer) == 0


def test_forgotten_gradients_are_not_summed_and_early_ones_wait() -> None:
    reduce_buffer = text_reduce_buffer(2)
    reduce_buffer.deliver(0, 0, 0, 0, "old of rank 0")
    reduce_buffer.deliver(0, 1, 1, 0, "new of rank 1, which is ahead")
    assert [content for _, content in reduce_buffer.take(all_are_there=False)] == ["old of rank 0"]
    reduce_buffer.deliver(0, 0, 0, 1, "old, never taken")
    reduce_buffer.forget(0)
    reduce_buffer.deliver(0, 0, 0, 2, "old, late")
    reduce_buffer.deliver(0, 0, 1, 0, "new of rank 0")
    taken = [content for _, content in reduce_buffer.take(all_are_there=False)]
    assert taken == ["(new of rank 0 + new of rank 1, which is ahead)"]
    assert kept(reduce_buffer) == 0
