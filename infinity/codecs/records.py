"""Records of a row that hold codes, scales and minima, as GGUF files have them.

Source of the layouts: ggml-common.h and ggml-quants.c of llama.cpp; docs/formats/quantized.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from infinity.codecs.part import flat_bytes
from infinity.fused.decode import CodeLayout, Field, Record

IQ4_VALUES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
    1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip
_ALL_BITS = 8


def _layout(
    group: int, record: Record, zero: int = 0, *, minima: str = "", values: str = "INT"
) -> CodeLayout:
    bits = record.low[1] + record.high[1]
    return CodeLayout(
        (), values, "F16", (1, group), packing="FIELDS", bits=bits, zeros=zero, minima=minima,
        record=record,
    )  # fmt: skip


# By the name of the type in ggml; of no shape yet.
RECORDS = {
    "Q4_0": _layout(32, Record(32, 18, (2, 4, 16), 0), 8),
    "Q4_1": _layout(32, Record(32, 20, (4, 4, 16), 0, minimum=2), minima="PLUS"),
    "Q5_0": _layout(32, Record(32, 22, (6, 4, 16), 0, (2, 1, 1)), 16),
    "Q5_1": _layout(32, Record(32, 24, (8, 4, 16), 0, (4, 1, 1), 2), minima="PLUS"),
    "Q8_0": _layout(32, Record(32, 34, (2, 8, 32), 0), 128),
    "Q2_K": _layout(
        16, Record(256, 84, (16, 2, 32), 80, minimum=82, factors=("NIBBLES", 0)), minima="MINUS"
    ),
    "Q3_K": _layout(
        16, Record(256, 110, (32, 2, 32), 108, (0, 1, 32), factors=("SIX_SIGNED", 96)), 4
    ),
    "Q4_K": _layout(
        32, Record(256, 144, (16, 4, 32), 0, minimum=2, factors=("SIX_PAIRS", 4)), minima="MINUS"
    ),
    "Q5_K": _layout(
        32, Record(256, 176, (48, 4, 32), 0, (16, 1, 32), 2, ("SIX_PAIRS", 4)), minima="MINUS"
    ),
    "Q6_K": _layout(16, Record(256, 210, (0, 4, 64), 208, (128, 2, 32), -1, ("BYTES", 192)), 32),
    "IQ4_NL": _layout(32, Record(32, 18, (2, 4, 16), 0), values="IQ4"),
    "IQ4_XS": _layout(32, Record(256, 136, (8, 4, 16), 0, factors=("SIX_SPLIT", 2)), values="IQ4"),
}


def without_record(
    layout: CodeLayout, record: Record, stored: torch.Tensor
) -> tuple[CodeLayout, list[torch.Tensor]]:
    """Returns the parts of records as tensors of their own, and the layout that they have then."""
    records = stored.view(-1, record.nbytes)
    codes = _field(records, record.low, record.numel)
    if record.high[1]:
        codes = codes | (_field(records, record.high, record.numel) << record.low[1])
    if record.low[1] != _ALL_BITS:
        codes = codes ^ 0x80  # As signed bytes.
    packing, first = record.factors
    factors, minima = _FACTORS[packing](records[:, first:].int())
    parts = [codes, _half(records, record.scale) * factors.float()]
    if layout.minima:
        parts.append(_half(records, record.minimum) * minima.float())
    apart = replace(layout, packing="BYTES", scale="F32", record=None)
    return apart, [flat_bytes(part) for part in parts]


def _field(blocks: torch.Tensor, field: Field, numel: int) -> torch.Tensor:
    """Returns the codes of a field as uint8, blocks x `numel`."""
    at, bits, run = field
    content = blocks[:, at : at + numel * bits // _ALL_BITS]
    stored = content.view(blocks.shape[0], numel * bits // _ALL_BITS // run, 1, run)
    shifts = torch.arange(0, _ALL_BITS, bits, dtype=torch.uint8, device=blocks.device)
    return ((stored >> shifts.view(1, 1, -1, 1)) & ((1 << bits) - 1)).flatten(1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the fp16 at a byte of each block as fp32, blocks x 1."""
    halves = blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format)  # Aligned.
    return halves.view(torch.float16).float()


# -- Small factors of groups. `stored`: bytes from the first of them on as int32, a row per block.
# Returned are those of scales and of minima, blocks x groups; without minima the same twice.

_Pair = tuple[torch.Tensor, torch.Tensor]


def _no_factors(stored: torch.Tensor) -> _Pair:
    ones = torch.ones_like(stored[:, :1])
    return ones, ones


def _bytes(stored: torch.Tensor) -> _Pair:
    signed = (stored[:, :16] ^ 0x80) - 0x80
    return signed, signed


def _nibbles(stored: torch.Tensor) -> _Pair:
    return stored[:, :16] & 15, stored[:, :16] >> 4


def _six_pairs(stored: torch.Tensor) -> _Pair:
    scales, minima, rest = stored[:, :4], stored[:, 4:8], stored[:, 8:12]
    return (
        torch.cat([scales & 63, (rest & 15) | ((scales >> 2) & 48)], dim=1),
        torch.cat([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], dim=1),
    )


def _six_signed(stored: torch.Tensor) -> _Pair:
    low = torch.cat([stored[:, :8] & 15, stored[:, :8] >> 4], dim=1)
    high = torch.cat([(stored[:, 8:12] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = (low | (high << 4)) - 32
    return scales, scales


def _six_split(stored: torch.Tensor) -> _Pair:
    low = torch.stack([stored[:, 2:6] & 15, stored[:, 2:6] >> 4], dim=-1).flatten(1)
    word = stored[:, :1] | (stored[:, 1:2] << 8)
    high = torch.cat([(word >> (2 * group)) & 3 for group in range(8)], dim=1)
    scales = (low | (high << 4)) - 32
    return scales, scales


_FACTORS = {
    "": _no_factors,
    "BYTES": _bytes,
    "NIBBLES": _nibbles,
    "SIX_PAIRS": _six_pairs,
    "SIX_SIGNED": _six_signed,
    "SIX_SPLIT": _six_split,
}
