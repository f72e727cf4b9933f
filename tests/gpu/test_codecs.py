"""Weights decoded on the GPU have the bits of those decoded on the CPU."""

from __future__ import annotations

import pytest
import torch

from infinity.codecs import Codec
from infinity.fused.choice import VARIABLE
from tests.decode.cases import CASES, bits, decoded, name_of, random_parts


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("codec", "shape"), CASES, ids=map(name_of, CASES))
def test_decoding_on_the_gpu_has_the_bits_of_the_cpu(
    codec: Codec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)  # "triton" raises if a kernel cannot be used.
    for offset in (0, 1):
        parts = random_parts(codec, shape, 6, offset)
        block = torch.full((*shape[:-1], shape[-1] + 3), 7.0, dtype=dtype, device="cuda")
        placed = [torch.cat([part.new_zeros(offset), part]).cuda()[offset:] for part in parts]
        codec.decode(placed, shape, block[..., 3:])
        expected = decoded(codec, parts, shape, dtype)
        assert torch.equal(bits(block[..., 3:].cpu()), bits(expected))
        assert (block[..., :3] == 7.0).all()
