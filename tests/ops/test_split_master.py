"""The split of an fp32 master is a bijection, in torch and in every native kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infinity.ops.native import SIMD_VARIABLE, apply_rule, instruction_sets
from infinity.ops.span import StateSpan
from infinity.ops.split_master import join, split

NUM_PATTERNS = 1 << 32
CHUNK = 1 << 18  # Small enough to stay in the cache.


def all_patterns() -> Iterator[Tensor]:
    """Every fp32 bit pattern once, as int32."""
    first = torch.arange(CHUNK, dtype=torch.int32)
    for start in range(0, NUM_PATTERNS, CHUNK):
        yield first + (start if start < 1 << 31 else start - NUM_PATTERNS)


def test_all_patterns_come_back_and_native_kernels_keep_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An update that adds minus zero changes no number. A NaN becomes the one that stands for all.

    The widest instruction set, which is used, sees all; others every sixteenth chunk, which has every
    exponent and all lower bits.
    """
    gradient = torch.full((CHUNK,), -0.0)
    states = (torch.zeros(CHUNK), torch.zeros(CHUNK))
    nan = torch.full((CHUNK,), 0xFFC00000 - 2**32, dtype=torch.int32)
    num_seen = 0
    for chunk, patterns in enumerate(all_patterns()):
        weight, residual = split(patterns.view(torch.float32))
        assert torch.equal(join(weight, residual).view(torch.int32), patterns)
        num_seen += patterns.numel()
        expected = weight, residual
        # A chunk is all numbers or, above infinity (0x7F800000), all NaNs but for that first one.
        if int(patterns[-1] & 0x7FFFFFFF) > 0x7F800000:
            kept = torch.where(patterns & 0x7FFFFFFF == 0x7F800000, patterns, nan)
            expected = split(kept.view(torch.float32))
        for number, simd in enumerate(instruction_sets()):
            if number and chunk % 16 != number:
                continue
            monkeypatch.setenv(SIMD_VARIABLE, simd)
            span = StateSpan(weight.clone(), gradient, states, residual.clone())
            apply_rule("stream", [span], [0.0], grad_scale=1.0, threads=1)
            assert torch.equal(span.weight.view(torch.int16), expected[0].view(torch.int16)), simd
            assert torch.equal(span.residual, expected[1]), simd
    assert num_seen == NUM_PATTERNS


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
