"""The place of every code and scale of a unit's moments, whatever the tensors and the chunks
are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.state.moments_8bit import GRANULE_NUMEL, kind_nbytes, states_within
from infinity.state.units import (
    STATE_GRANULE,
    MomentFormat,
    Moments,
    StateKind,
    TensorFacts,
    chunk_unit,
    layout_unit,
)

sizes = st.lists(
    st.one_of(
        st.integers(0, 3000),
        st.integers(-600, 600).map(lambda n: GRANULE_NUMEL + n),
        st.just(2 * GRANULE_NUMEL + 5),
    ),
    min_size=1,
    max_size=4,
)


def test_a_whole_granule_wastes_nothing() -> None:
    assert kind_nbytes(GRANULE_NUMEL) == GRANULE_NUMEL + 4 * num_scales(GRANULE_NUMEL)
    assert kind_nbytes(1) == kind_nbytes(PAGE_NBYTES) == 2 * PAGE_NBYTES
    assert kind_nbytes(0) == 0


@given(numels=sizes, chunk_mib=st.integers(1, 3))
@settings(max_examples=60)
def test_chunks_cover_every_code_and_scale_once(numels: list[int], chunk_mib: int) -> None:
    facts = [
        TensorFacts(f"t{i}", (numel,), (1,), torch.bfloat16, True) for i, numel in enumerate(numels)
    ]
    unit = layout_unit(0, "unit", facts, Moments(format=MomentFormat.EIGHT_BIT))
    assert unit.state_numel % STATE_GRANULE == 0
    owners = torch.zeros(unit.nbytes(StateKind.EXP_AVG), dtype=torch.uint8)
    stop = stop_nbytes = 0
    for chunk in chunk_unit(unit, chunk_mib * MIB):
        assert chunk.start == stop and chunk.start % GRANULE_NUMEL == 0
        stop = chunk.stop
        for kind in (
            StateKind.EXP_AVG,
            StateKind.EXP_AVG_SQ,
            StateKind.MASTER,
            StateKind.GRADIENTS,
        ):
            assert chunk.offset_nbytes(kind) % PAGE_NBYTES == 0
            assert chunk.nbytes(kind) % PAGE_NBYTES == 0
        offset_nbytes, nbytes = (
            chunk.offset_nbytes(StateKind.EXP_AVG),
            chunk.nbytes(StateKind.EXP_AVG),
        )
        assert offset_nbytes == stop_nbytes, "one sequential extent"
        stop_nbytes += nbytes
        memory = owners[offset_nbytes : offset_nbytes + nbytes]
        for part in chunk.slices:
            start = part.state_start - chunk.start
            end = start + part.stop - part.start
            covered = start
            for first, state in states_within(memory, chunk.stop - chunk.start, start, end):
                assert first == covered and (first - start + part.start) % BLOCK_NUMEL == 0
                covered += state.numel()
                assert state.scales.numel() == num_scales(state.numel())
                state.codes.add_(1)
                state.scales.view(torch.uint8).add_(1)
            assert covered == end
    assert (stop, stop_nbytes) == (unit.state_numel, owners.numel())
    assert (owners <= 1).all(), "a code or a scale has two owners"
    wanted = sum(numel + 4 * num_scales(numel) for numel in numels)
    assert owners.sum(dtype=torch.int64) == wanted
    padding = 3 * PAGE_NBYTES + len(numels) * BLOCK_NUMEL + STATE_GRANULE
    assert owners.numel() <= wanted + padding + 4 * len(numels)
