"""Squares summed on the GPU have the bits of those summed on the host."""

from __future__ import annotations

import pytest
import torch

from infinity.ops.norms import SQUARES_NUMEL, sum_squares


@pytest.mark.parametrize("numel", [1, SQUARES_NUMEL, 5_000_003])
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e18])
def test_sums_of_squares_on_the_gpu_have_the_bits_of_the_host(numel: int, scale: float) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    found = sum_squares(values.cuda())
    assert found.is_cuda
    assert torch.equal(found.cpu(), sum_squares(values))
