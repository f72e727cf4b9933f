"""Random parameters and units, small enough that a test can look at every element."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from infinity.state.units import TensorFacts, Unit, layout_unit

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FROZEN_DTYPES = (*TRAINABLE_DTYPES, torch.float64, torch.int8, torch.int64, torch.bool)


@st.composite
def tensor_facts(draw: st.DrawFn, name: str, *, dtypes: Any = None) -> TensorFacts:
    """One parameter: scalars, empty ones and prime sizes too, up to a few pages."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 17, 64, 127]), max_size=2)))
    if draw(st.booleans()):
        shape = (draw(st.integers(0, 3000)),)
    is_trainable = draw(st.booleans())
    allowed = dtypes or (TRAINABLE_DTYPES if is_trainable else FROZEN_DTYPES)
    stride = torch.empty(shape, device="meta").stride()
    return TensorFacts(name, shape, stride, draw(st.sampled_from(allowed)), is_trainable)


@st.composite
def facts_lists(draw: st.DrawFn, *, max_size: int = 6, dtypes: Any = None) -> list[TensorFacts]:
    count = draw(st.integers(0, max_size))
    return [draw(tensor_facts(f"p{index}", dtypes=dtypes)) for index in range(count)]


@st.composite
def units(draw: st.DrawFn, *, max_units: int = 5) -> list[Unit]:
    count = draw(st.integers(1, max_units))
    return [
        layout_unit(index, f"unit{index}", draw(facts_lists(max_size=3))) for index in range(count)
    ]
