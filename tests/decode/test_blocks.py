"""Blocks of GGUF decode to the bits of the gguf package, on every instruction set."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from infinity.codecs.affine import ggml
from infinity.codecs.records import RECORDS
from infinity.codecs.rounding import store
from infinity.config.machine import SIMD_VARIABLE
from infinity.errors import ConfigError
from infinity.ops.optimizers import instruction_sets

ROWS = 6


def random_blocks(kind: str, columns: int) -> torch.Tensor:
    """ROWS x bytes: any bits, with scales that are numbers."""
    record = RECORDS[kind].record
    blocks = torch.randint(
        256, (ROWS * columns // record.numel, record.nbytes), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(record.nbytes),
    )  # fmt: skip
    for at in (record.scale, record.minimum):
        if at >= 0:
            halves = torch.randn(len(blocks), 1, generator=torch.Generator().manual_seed(at + 1))
            blocks[:, at : at + 2] = halves.half().view(torch.uint8)
    return blocks.view(ROWS, -1)


def expected_of(kind: str, stored: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(stored.numpy(), GGMLQuantizationType[kind]))


@pytest.mark.parametrize("simd", instruction_sets())
@pytest.mark.parametrize("kind", RECORDS)
def test_a_type_decodes_as_the_gguf_package_does(monkeypatch, kind: str, simd: str) -> None:
    monkeypatch.setenv(SIMD_VARIABLE, simd)
    codec, shape = ggml(kind), (ROWS, 3 * 256)
    stored = random_blocks(kind, shape[1])
    (part,) = codec.parts(shape)
    assert (part.dtype, part.shape) == ("U8", tuple(stored.shape))
    expected = expected_of(kind, stored)
    flat = stored.view(-1)
    assert torch.equal(codec.values([flat], shape), expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = torch.empty(shape, dtype=dtype)
        store(expected, rounded)
        for out in (torch.empty(shape, dtype=dtype), torch.empty(shape[::-1], dtype=dtype).t()):
            codec.decode([flat], shape, out)
            assert torch.equal(out, rounded), (dtype, out.stride())


@pytest.mark.parametrize("kind", RECORDS)
def test_experts_and_rows_decode_alone(kind: str) -> None:
    codec, shape = ggml(kind), (2, ROWS // 2, 256)
    flat = random_blocks(kind, 256).view(-1)
    whole = torch.empty(shape)
    codec.decode([flat], shape, whole)
    ((start, stop),) = codec.rows(shape, 1, 2)
    second = torch.empty((1, *shape[1:]))
    codec.decode([flat[start:stop].clone()], (1, *shape[1:]), second)
    assert torch.equal(second[0], whole[1])


@pytest.mark.parametrize("kind", RECORDS)
def test_any_address_and_a_signed_zero_keep_their_bits(kind: str) -> None:
    codec, shape = ggml(kind), (1, 256)
    flat = random_blocks(kind, 256).view(-1)[: codec.parts(shape)[0].nbytes]
    shifted = torch.cat([flat[:1], flat])[1:]
    out = torch.empty(shape)
    codec.decode([shifted], shape, out)
    expected = expected_of(kind, flat.view(1, -1))
    assert np.array_equal(out.numpy().view(np.int32), expected.numpy().view(np.int32))


def test_columns_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Q4_K of GGUF.*blocks of 256"):
        ggml("Q4_K").parts((4, 128))


def test_blocks_are_not_written() -> None:
    with pytest.raises(ConfigError, match="llama.cpp makes a GGUF file"):
        ggml("Q4_K").encode(torch.zeros(4, 256))
