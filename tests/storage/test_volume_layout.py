"""Striping is a pure function: its properties, on random sizes and paths."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from infinity.errors import CapacityError, ConfigError
from infinity.sizes import GIB, MIB, PAGE_NBYTES, align_up
from infinity.storage.volume_layout import Extent, PathSpace, slice_extents, stripe

pages = st.integers(0, 200).map(lambda count: count * PAGE_NBYTES)
spaces = st.lists(
    st.builds(
        PathSpace,
        start_nbytes=pages,
        space_nbytes=st.integers(0, 400 * PAGE_NBYTES),
        weight=st.floats(0.25, 8),
    ),
    min_size=1,
    max_size=3,
)
sizes = st.lists(st.integers(0, 60 * PAGE_NBYTES), max_size=12)
stripes = st.integers(1, 16).map(lambda count: count * PAGE_NBYTES)


def fits(sizes_nbytes: list[int], spaces: list[PathSpace]) -> bool:
    need = sum(align_up(nbytes, PAGE_NBYTES) for nbytes in sizes_nbytes)
    return need <= sum(space.space_nbytes // PAGE_NBYTES * PAGE_NBYTES for space in spaces)


@given(sizes=sizes, spaces=spaces, stripe_nbytes=stripes)
def test_extents_cover_each_buffer_and_no_byte_twice(
    sizes: list[int], spaces: list[PathSpace], stripe_nbytes: int
) -> None:
    """Aligned, disjoint, inside the space of their path, and as long as the sizes rounded up."""
    assume(fits(sizes, spaces))
    striped = stripe(sizes, spaces, stripe_nbytes=stripe_nbytes)
    assert [sum(extent.nbytes for extent in extents) for extents in striped] == [
        align_up(nbytes, PAGE_NBYTES) for nbytes in sizes
    ]
    extents = sorted(
        (extent for extents in striped for extent in extents),
        key=lambda extent: (extent.path_index, extent.offset_nbytes),
    )
    for extent in extents:
        space = spaces[extent.path_index]
        assert extent.nbytes > 0
        assert extent.nbytes % PAGE_NBYTES == extent.offset_nbytes % PAGE_NBYTES == 0
        assert extent.offset_nbytes >= space.start_nbytes
        end_nbytes = extent.offset_nbytes + extent.nbytes
        assert end_nbytes <= space.start_nbytes + space.space_nbytes
    for left, right in itertools.pairwise(extents):
        if left.path_index == right.path_index:
            assert left.offset_nbytes + left.nbytes <= right.offset_nbytes


@given(sizes=sizes, spaces=spaces, stripe_nbytes=stripes)
def test_too_little_space_is_refused_and_enough_never_is(
    sizes: list[int], spaces: list[PathSpace], stripe_nbytes: int
) -> None:
    if fits(sizes, spaces):
        stripe(sizes, spaces, stripe_nbytes=stripe_nbytes)
    else:
        with pytest.raises(CapacityError, match="path 0"):
            stripe(sizes, spaces, stripe_nbytes=stripe_nbytes)


@given(
    num_stripes=st.integers(1, 200),
    weights=st.lists(st.floats(0.25, 8), min_size=2, max_size=3),
    lead=st.integers(0, 50),
)
def test_every_buffer_is_striped_in_proportion_to_the_weights(
    num_stripes: int, weights: list[float], lead: int
) -> None:
    """Within two stripes of its proportion, whatever was laid out before."""
    spaces = [PathSpace(0, GIB, weight) for weight in weights]
    _, extents = stripe([lead * MIB, num_stripes * MIB], spaces, stripe_nbytes=MIB)
    for index, weight in enumerate(weights):
        nbytes = sum(extent.nbytes for extent in extents if extent.path_index == index)
        fair_nbytes = num_stripes * MIB * weight / sum(weights)
        assert abs(nbytes - fair_nbytes) <= 2 * MIB


def test_one_path_gives_one_extent_per_buffer() -> None:
    spaces = [PathSpace(4096, GIB)]
    assert stripe([5, 64 * MIB], spaces, stripe_nbytes=4 * MIB) == [
        (Extent(0, 4096, 4096),),
        (Extent(0, 8192, 64 * MIB),),
    ]


def test_buffer_below_one_stripe_stays_on_one_path() -> None:
    spaces = [PathSpace(0, GIB), PathSpace(0, GIB)]
    striped = stripe([MIB] * 8, spaces, stripe_nbytes=4 * MIB)
    assert all(len(extents) == 1 for extents in striped)
    assert {extent.path_index for extents in striped for extent in extents} == {0, 1}


def test_full_path_leaves_the_rest_to_the_others() -> None:
    spaces = [PathSpace(0, MIB), PathSpace(0, GIB)]
    (extents,) = stripe([16 * MIB], spaces, stripe_nbytes=4 * MIB)
    assert sum(extent.nbytes for extent in extents if extent.path_index == 0) == MIB


def test_path_without_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights must be positive"):
        stripe([1], [PathSpace(0, 1, 0)], stripe_nbytes=MIB)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    low=st.integers(0, 54),
    length=st.integers(0, 54),
)
def test_slices_of_extents_are_what_slices_of_bytes_are(
    lengths: list[int], low: int, length: int
) -> None:
    extents = [Extent(index, index * 1000, nbytes) for index, nbytes in enumerate(lengths)]
    bytes_of = [(e.path_index, e.offset_nbytes + i) for e in extents for i in range(e.nbytes)]
    assume(low + length <= len(bytes_of))
    found = slice_extents(extents, offset_nbytes=low, nbytes=length)
    expected = bytes_of[low : low + length]
    assert [(e.path_index, e.offset_nbytes + i) for e, _ in found for i in range(e.nbytes)] == (
        expected
    )
    assert [at for _, at in found] == [
        sum(e.nbytes for e, _ in found[:i]) for i in range(len(found))
    ]


def test_slice_outside_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the buffer of 10 bytes"):
        slice_extents([Extent(0, 0, 10)], offset_nbytes=5, nbytes=6)
