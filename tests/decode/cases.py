"""Codecs with shapes that they can store, and random parts of any bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.codecs import AffineGroups, Codec, FloatBlocks, Plain, TableBlocks, mxfp4, nvfp4

Shape = tuple[int, ...]

CASES: tuple[tuple[Codec, Shape], ...] = (
    (FloatBlocks(), (256, 384)),
    (FloatBlocks(), (576, 200)),  # Ragged: kv_a_proj of DeepSeek-V3 has 576 rows.
    (FloatBlocks(scale="BF16"), (3, 130, 72)),
    (FloatBlocks((128, 128), "F8_E8M0"), (129, 257)),
    (FloatBlocks((1, 0)), (37, 53)),
    (FloatBlocks((1, 0), "F16", product="F16"), (37, 53)),
    (FloatBlocks((0, 0), "BF16"), (37, 53)),
    (AffineGroups(), (48, 96)),
    (AffineGroups(128, "F16"), (5, 256)),
    (AffineGroups(64, "F32"), (2, 7, 64)),
    (AffineGroups(32, bits=8), (33, 96)),
    (AffineGroups(32, "F16", 3), (2, 5, 64)),
    (AffineGroups(16, bits=4, has_zeros=True), (33, 48)),
    (AffineGroups(36, "F32", 2, has_zeros=True, has_order=True), (19, 72)),
    (AffineGroups(53, layout="BYTES", bits=8), (37, 53)),
    (AffineGroups(16, layout="BYTES", bits=8, has_zeros=True), (37, 48)),
    (AffineGroups(32, "F16", 4, "GPTQ", True, True), (40, 96)),
    (AffineGroups(32, "F16", 4, "GPTQ", True, has_order=True), (200, 136)),
    (AffineGroups(48, "BF16", 8, "GPTQ", True, True), (8, 100)),
    (AffineGroups(64, "F32", 2, "GPTQ", True, True, True), (32, 256)),
    (AffineGroups(32, "F16", 4, "AWQ", True), (72, 130)),
    (AffineGroups(64, bits=4, layout="MLX"), (2, 33, 128)),
    (AffineGroups(32, "F16", 3, "MLX"), (5, 96)),
    (AffineGroups(32, "BF16", 8, "METAL"), (35, 96)),
    (AffineGroups(64, "BF16", 4, "HQQ", True), (48, 96)),
    (AffineGroups(32, "F16", 2, "HQQ_DOWN", True), (40, 72)),
    (AffineGroups(53, "F32", 8, "LLM.int8"), (37, 53)),
    (AffineGroups(32, "BF16", 4, "QUARK", True), (40, 96)),
    (AffineGroups(64, "F32", 4, "QUARK_SIGNED", True), (200, 128)),
    (mxfp4(), (33, 96)),
    (mxfp4(is_transposed=True), (3, 64, 40)),
    (mxfp4(is_transposed=True), (96, 33)),
    (nvfp4(), (33, 80)),
    (nvfp4("TIMES"), (3, 5, 48)),
    (FloatBlocks((1, 32), "U8"), (6, 96)),
    (FloatBlocks((0, 1)), (3, 16, 40)),
    (TableBlocks(), (130, 129)),
    (TableBlocks(nested_block=0, stored="F16"), (33, 77)),
    (TableBlocks(128, 64, 0.25, "F32"), (40, 64)),
    (TableBlocks(kind="fp4"), (40, 64)),
)
PLAIN_CASES: tuple[tuple[Codec, Shape], ...] = (
    (Plain("BF16"), (7, 9)),
    (Plain("F32"), (2, 3, 5)),
    (Plain("F16"), (11,)),
)


def name_of(case: tuple[Codec, Shape]) -> str:
    return f"{case[0]}-{'x'.join(map(str, case[1]))}"


def random_parts(codec: Codec, shape: Shape, seed: int, offset: int = 0) -> list[torch.Tensor]:
    """Parts of any bits, each `offset` bytes behind an aligned address."""
    source = torch.Generator().manual_seed(seed)
    parts = []
    for part in codec.parts(shape):
        block = torch.randint(256, (part.nbytes + offset,), generator=source, dtype=torch.uint8)
        parts.append(block[offset:])
    return parts


def bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.contiguous().view(kind)


def decoded(
    codec: Codec, parts: Sequence[torch.Tensor], shape: Shape, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.full(shape, 123.0, dtype=dtype)
    codec.decode(parts, shape, out)
    return out
