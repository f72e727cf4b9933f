"""The layout of a unit: every element has one place, and chunks cover each element once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import UnsupportedError
from infinity.sizes import PAGE_NBYTES
from infinity.state.units import (
    STATE_ALIGNMENT,
    TENSOR_ALIGNMENT_NBYTES,
    StateKind,
    TensorFacts,
    Unit,
    chunk_unit,
    layout_unit,
)

from .strategies import facts_lists, tensor_facts

STATE_KINDS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ, StateKind.GRADIENTS)


@given(facts=facts_lists())
@settings(max_examples=150)
def test_every_byte_of_the_weights_belongs_to_one_tensor_at_most(facts: list[TensorFacts]) -> None:
    unit = layout_unit(0, "unit", facts)
    owner: list[str | None] = [None] * unit.weight_nbytes
    for spec in unit.tensors:
        assert spec.weight_offset_nbytes % TENSOR_ALIGNMENT_NBYTES == 0
        place = slice(spec.weight_offset_nbytes, spec.weight_offset_nbytes + spec.weight_nbytes)
        assert len(owner[place]) == spec.weight_nbytes, "the piece is too short"
        assert not any(owner[place]), f"{spec.name} overlaps {owner[place]}"
        owner[place] = [spec.name] * spec.weight_nbytes
        is_head = spec.facts.is_trainable
        assert all(
            (byte < unit.trainable_nbytes) == is_head for byte in range(place.start, place.stop)
        )
    assert unit.weight_nbytes % PAGE_NBYTES == 0 and unit.trainable_nbytes % PAGE_NBYTES == 0
    last = max((i for i, name in enumerate(owner) if name), default=-1)
    waste = sum(name is None for name in owner)
    assert waste < TENSOR_ALIGNMENT_NBYTES * len(facts) + 2 * PAGE_NBYTES
    assert unit.weight_nbytes - last <= 2 * PAGE_NBYTES


@given(facts=facts_lists())
@settings(max_examples=150)
def test_order_and_facts_are_kept(facts: list[TensorFacts]) -> None:
    unit = layout_unit(7, "name", facts)
    assert (unit.index, unit.name) == (7, "name")
    trainable = [each for each in facts if each.is_trainable]
    frozen = [each for each in facts if not each.is_trainable]
    assert [spec.facts for spec in unit.tensors] == trainable + frozen
    assert [spec.facts for spec in unit.trainable()] == trainable
    assert all(spec.numel == torch.Size(spec.facts.shape).numel() for spec in unit.tensors)
    dtypes = {each.dtype for each in trainable}
    narrow = torch.int16 if torch.bfloat16 in dtypes else None
    assert unit.master_dtype is (torch.float32 if torch.float16 in dtypes else narrow)


@given(facts=facts_lists())
@settings(max_examples=150)
def test_every_state_element_belongs_to_one_trainable_tensor_at_most(
    facts: list[TensorFacts],
) -> None:
    unit = layout_unit(0, "unit", facts)
    taken = torch.zeros(unit.state_numel, dtype=torch.int32)
    for spec in unit.tensors:
        if not spec.facts.is_trainable:
            assert spec.state_offset == -1
            continue
        assert spec.state_offset % STATE_ALIGNMENT == 0
        part = taken[spec.state_offset : spec.state_offset + spec.numel]
        assert part.numel() == spec.numel
        part += 1
    assert bool((taken <= 1).all())
    for kind in STATE_KINDS:
        assert unit.nbytes(kind) == 4 * unit.state_numel
        assert unit.nbytes(kind) % PAGE_NBYTES == 0
    item_nbytes = 0 if unit.master_dtype is None else unit.master_dtype.itemsize
    assert unit.nbytes(StateKind.MASTER) == item_nbytes * unit.state_numel
    assert unit.nbytes(StateKind.MASTER) % PAGE_NBYTES == 0
    assert unit.nbytes(StateKind.PARAMETERS) == unit.weight_nbytes


@given(facts=facts_lists(), chunk_pages=st.integers(1, 8))
@settings(max_examples=150)
def test_chunks_cover_every_element_once_in_order(
    facts: list[TensorFacts], chunk_pages: int
) -> None:
    unit = layout_unit(0, "unit", facts)
    covered = torch.zeros(unit.state_numel, dtype=torch.int32)
    stop = 0
    for chunk in chunk_unit(unit, 2 * chunk_pages * PAGE_NBYTES):
        assert chunk.unit is unit
        assert chunk.start == stop, "a gap or an overlap"
        stop = chunk.stop
        assert 0 < chunk.nbytes(StateKind.EXP_AVG) <= 2 * chunk_pages * PAGE_NBYTES
        for kind in (StateKind.EXP_AVG, StateKind.MASTER, StateKind.GRADIENTS):
            assert chunk.offset_nbytes(kind) % PAGE_NBYTES == 0
            assert chunk.nbytes(kind) % PAGE_NBYTES == 0
        for part in chunk.slices:
            assert 0 <= part.start < part.stop <= part.tensor.numel
            assert chunk.start <= part.state_start
            assert part.state_start + part.stop - part.start <= chunk.stop
            assert part.state_start == part.tensor.state_offset + part.start
            # A cut inside a tensor leaves vector lanes as they are.
            assert part.start % STATE_ALIGNMENT == 0
            assert part.stop == part.tensor.numel or part.stop % STATE_ALIGNMENT == 0
            covered[part.state_start : part.state_start + part.stop - part.start] += 1
    assert stop == unit.state_numel
    wanted = torch.zeros_like(covered)
    for spec in unit.trainable():
        wanted[spec.state_offset : spec.state_offset + spec.numel] = 1
    assert torch.equal(covered, wanted)


@given(facts=facts_lists(), bad=tensor_facts("bad", dtypes=(torch.float64, torch.int32)))
@settings(max_examples=50)
def test_a_trainable_dtype_without_fp32_state_is_refused_by_name(
    facts: list[TensorFacts], bad: TensorFacts
) -> None:
    if not bad.is_trainable:
        assert _names(layout_unit(0, "unit", [*facts, bad]))[-1] == "bad"
        return
    with pytest.raises(UnsupportedError, match=r"'bad' is trainable and torch\.(float64|int32)"):
        layout_unit(0, "unit", [*facts, bad])


def _names(unit: Unit) -> list[str]:
    return [spec.name for spec in unit.tensors]
