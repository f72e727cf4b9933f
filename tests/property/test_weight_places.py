"""A unit's weights lie where the boxes of its slices say, and a plan decodes each of them there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.codecs import AffineGroups, Codec, FloatBlocks, Plain, mxfp4
from infinity.codecs.on_device import DecodePlan
from infinity.state.stored import StoredSlice, StoredTensor, lay_out_stored
from infinity.state.units import TensorFacts, Unit, layout_unit
from infinity.storage.protocol import FileRange
from tests.decode.cases import bits

CODECS: tuple[Codec, ...] = (
    FloatBlocks((3, 5)), AffineGroups(8), mxfp4(), Plain("BF16"),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float32)
COLUMNS, ROWS = 32, (1, 3, 8)


@st.composite
def stored_parameters(draw: st.DrawFn, name: str, first_nbytes: int) -> tuple[Any, ...]:
    """A parameter of experts, each of one or two matrices, as stored or transposed; its slices, and
    the end of their bytes in a file."""
    codec, rows = draw(st.sampled_from(CODECS)), draw(st.sampled_from(ROWS))
    experts, stacked = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    is_turned = draw(st.booleans())
    slices, at = [], first_nbytes
    for expert in range(experts):
        for part in range(stacked):
            taken = slice(part * rows, (part + 1) * rows)
            box = (
                (expert, slice(0, COLUMNS), taken)
                if is_turned
                else (expert, taken, slice(0, COLUMNS))
            )
            ranges = []
            for stored in codec.parts((rows, COLUMNS)):
                at += draw(st.integers(0, 9))
                ranges.append(FileRange("file", at, stored.nbytes))
                at += stored.nbytes
            axes = (1, 0) if is_turned else (0, 1)
            slices.append(StoredSlice(name, box, axes, (rows, COLUMNS), codec, tuple(ranges)))
    shape = (experts, COLUMNS, stacked * rows) if is_turned else (experts, stacked * rows, COLUMNS)
    stride = torch.empty(shape, device="meta").stride()
    if draw(st.booleans()):  # A parameter whose memory is that of its transpose.
        stride = torch.empty(shape, device="meta").mT.contiguous().mT.stride()
    facts = TensorFacts(name, shape, stride, draw(st.sampled_from(DTYPES)), False)
    return facts, tuple(slices), at


@st.composite
def stored_units(draw: st.DrawFn) -> Unit:
    tensors: dict[str, StoredTensor] = {}
    facts, end = [], 1
    for index in range(draw(st.integers(1, 3))):
        one, slices, end = draw(stored_parameters(f"p{index}", end))
        facts.append(one)
        tensors[one.name] = slices
    return replace(layout_unit(0, "unit", facts), stored=lay_out_stored(tensors))


@given(stored_units(), st.integers(0, 2**31))
def test_a_plan_fills_every_parameter_of_the_unit(unit: Unit, seed: int) -> None:
    assert unit.stored is not None
    source = torch.Generator().manual_seed(seed)
    block = torch.randint(256, (unit.stored.nbytes,), generator=source, dtype=torch.uint8)
    memory = torch.full((unit.weight_nbytes,), 0x55, dtype=torch.uint8)
    DecodePlan(unit.weight_places()).decode(block, memory)
    expected = torch.full((unit.weight_nbytes,), 0x55, dtype=torch.uint8)
    elements = unit.stored.decoded(block, lambda name: unit.spec(name).facts.dtype)
    for (name, stored_slice, _), slice_elements in zip(unit.stored.slices, elements, strict=True):
        spec = unit.spec(name)
        flat = expected[spec.weight_offset_nbytes :][: spec.weight_nbytes].view(spec.facts.dtype)
        parameter = flat.as_strided(spec.facts.shape, spec.facts.stride)
        bits_of(stored_slice.target(parameter)).copy_(bits(slice_elements))
    assert torch.equal(memory, expected)


def bits_of(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.int32 if view.dtype is torch.float32 else torch.int16)
