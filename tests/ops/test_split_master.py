"""The split of an fp32 master is a bijection, in torch and in every native kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinity.config.machine import SIMD_VARIABLE
from infinity.ops.exact import join, split, to_fp32
from infinity.ops.optimizers import apply_rule, instruction_sets
from infinity.ops.span import StateSpan
from tests.support.exhaustive import sampled

NUM_PATTERNS = 1 << 32
CHUNK = 1 << 16  # Patterns, and all that is made of them, stay in the cache of a core.
INFINITY = 0x7F800000


def has_bits_of(found: Tensor, expected: Tensor) -> bool:
    """Compares eight bytes at a time, which takes a quarter of the time of two at a time."""
    return torch.equal(found.view(torch.int64), expected.view(torch.int64))


SAMPLE = range(0, NUM_PATTERNS, 32 * CHUNK)  # Every exponent, and all lower bits.
QUARTER = NUM_PATTERNS // 4
QUARTERS = [range(at * QUARTER, (at + 1) * QUARTER, CHUNK) for at in range(4)]


@pytest.mark.parametrize("starts", sampled([SAMPLE, *QUARTERS], lambda case: case is SAMPLE))
def test_all_patterns_come_back_and_native_kernels_keep_them(
    starts: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each quarter of the 2^32 patterns, so that several processes may run them, or a sample.

    An update that adds minus zero changes no number. A NaN becomes the one that stands for all.

    The widest instruction set, which training uses, sees every pattern. Every other instruction set
    sees every sixteenth chunk of a quarter, and all of the sample.
    """
    first = torch.arange(CHUNK, dtype=torch.int32)
    gradient = torch.full((CHUNK,), -0.0)
    states = (torch.zeros(CHUNK), torch.zeros(CHUNK))
    nan = torch.full((CHUNK,), 0xFFC00000 - 2**32, dtype=torch.int32)
    widest, *others = instruction_sets()
    for chunk, start in enumerate(starts):
        patterns = first + (start if start < 1 << 31 else start - NUM_PATTERNS)
        weight, residual = split(patterns.view(torch.float32))
        assert has_bits_of(join(weight, residual), patterns)
        expected = weight, residual
        # A chunk is all numbers, or infinity and NaNs, or all NaNs.
        if start & 0x7FFFFFFF >= INFINITY:
            kept = torch.where(patterns & 0x7FFFFFFF == INFINITY, patterns, nan)
            expected = split(kept.view(torch.float32))
        seeing = [s for i, s in enumerate(others, 1) if starts is SAMPLE or chunk % 16 == i]
        for simd in (widest, *seeing):
            monkeypatch.setenv(SIMD_VARIABLE, simd)
            span = StateSpan(weight.clone(), gradient, states, residual.clone())
            apply_rule("stream", [span], [0.0], grad_scale=1.0, threads=1)
            assert has_bits_of(span.weight, expected[0]), simd
            assert has_bits_of(span.residual, expected[1]), simd


def test_quarters_are_all_patterns() -> None:
    assert sum(CHUNK * len(starts) for starts in QUARTERS) == NUM_PATTERNS


def test_the_weight_is_the_nearest_bf16_with_halves_away_from_zero() -> None:
    source = torch.Generator().manual_seed(0)
    masters = torch.randn(1_000_000, generator=source)
    masters[::7] *= 1e-39  # Denormals.
    bits = masters.view(torch.int32)
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000  # Ties.
    weight, residual = split(masters)
    is_tie = residual == -(2**15)
    assert is_tie.sum() > 300_000
    assert torch.equal(weight[~is_tie], masters.to(torch.bfloat16)[~is_tie])
    assert (weight[is_tie].float().abs() > masters[is_tie].abs()).all()
    half_step = torch.full_like(residual, 2**15 - 1)
    assert (residual.abs() <= half_step)[~is_tie].all()


def test_shape_and_dtypes() -> None:
    masters = torch.randn(3, 5).t()
    weight, residual = split(masters)
    assert (weight.dtype, residual.dtype) == (torch.bfloat16, torch.int16)
    assert weight.shape == residual.shape == (5, 3)
    assert torch.equal(join(weight, residual), masters)


@given(st.floats())
def test_a_number_is_rounded_as_torch_rounds_it(value: float) -> None:
    expected, found = torch.tensor(value, dtype=torch.float64).float(), to_fp32(value)
    is_same = torch.equal(torch.tensor(found).view(torch.int32), expected.view(torch.int32))
    assert is_same or (math.isnan(value) and math.isnan(found))
