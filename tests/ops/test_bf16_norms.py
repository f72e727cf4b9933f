"""Norms of bf16 numbers have the bits of torch's norms of the same numbers in fp32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from infinity.ops import norms as bf16_norms
from infinity.ops.norms import has_norm_of_bf16, norm_of_bf16


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_this_torch_and_processor_are_known() -> None:
    assert has_norm_of_bf16()


@example(numel=1, first=1, seed=0, scale=1e-20)
@given(
    numel=st.integers(0, 5000), first=st.integers(0, 9), seed=st.integers(0, 2**20),
    scale=st.sampled_from([1.0, 1e-3, 1e-20, 1e15]),
)  # fmt: skip
def test_the_bits_are_those_of_the_widened_numbers(
    numel: int, first: int, seed: int, scale: float
) -> None:
    """At any address of an element, with squares that underflow and that overflow."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(first + numel, generator=generator) * scale).to(torch.bfloat16)[first:]
    assert same_bits(norm_of_bf16(values), torch.linalg.vector_norm(values.float()))


@pytest.mark.parametrize("shape", [(3_000_001,), (1000, 1003), (64, 7, 129)])
def test_large_tensors_of_any_shape_and_order(shape: tuple[int, ...]) -> None:
    """torch goes through memory in order, whatever the strides."""
    values = torch.randn(shape).to(torch.bfloat16)
    flat = values.flatten()
    assert same_bits(norm_of_bf16(flat), torch.linalg.vector_norm(values.float()))
    if len(shape) == 2:
        assert same_bits(norm_of_bf16(flat), torch.linalg.vector_norm(values.float().t()))


def test_numbers_that_are_not_finite() -> None:
    for odd in (float("inf"), float("-inf"), float("nan")):
        for place in (0, 40, 99):
            values = torch.ones(100, dtype=torch.bfloat16)
            values[place] = odd
            found, expected = norm_of_bf16(values), torch.linalg.vector_norm(values.float())
            assert torch.equal(found.isnan(), expected.isnan())
            assert found.isnan() or same_bits(found, expected)


def test_a_torch_with_other_bits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda values: real(values.double()).float())
    assert bf16_norms._variant.__wrapped__() is None
