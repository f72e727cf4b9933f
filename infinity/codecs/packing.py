"""Matrices of small numbers in 32-bit words, as the writers of affine groups pack them.

    ROWS     a row's numbers one after the other, lowest bits first; a row begins with a word
    COLUMNS  the same down a column: word w of a row of words holds numbers of the same column
    AWQ      ROWS of four bits, in which word k has columns 8k + (0, 2, 4, 6, 1, 3, 5, 7)
    SIGNED_AWQ    the same of signed numbers; -8 is number 0
    BYTES    signed bytes without words; -128 is number 0
    PAIRS    numbers of four bits one after the other over all rows, highest bits first, in bytes
    PLANES   in bytes, of which the highest bits have the first numbers of all rows, and so on down
    FIELDS   low and high bits at places of records of a row: `Record` in `fused/decode.py`
    FLOATS   of zeros: numbers of the dtype of the scales

Words are little-endian. A number may cross the border of two words.
"""

from __future__ import annotations

from typing import Literal

import torch

Packing = Literal[
    "ROWS", "COLUMNS", "AWQ", "SIGNED_AWQ", "BYTES", "PAIRS", "PLANES", "FIELDS", "FLOATS"
]  # fmt: skip

WORD_BITS = 32
_PLACES_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # Of columns 8k to 8k + 7 in a word.
_COLUMNS_OF_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_SIGN = 0x80
_SIGN_OF_AWQ = 8


def packed_shape(packing: str, bits: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns the shape of the stored tensor of a matrix: of words, or of bytes."""
    if packing == "BYTES":
        return rows, columns
    if packing == "PLANES":
        return rows * bits // 8, columns
    if packing == "COLUMNS":
        return -(-rows * bits // WORD_BITS), columns
    return rows, -(-columns * bits // WORD_BITS)


def unpacked(
    stored: torch.Tensor, packing: str, bits: int, rows: int, columns: int
) -> torch.Tensor:
    """Returns the numbers of flat uint8 bytes: uint8, (rows, columns)."""
    if not rows * columns:
        return stored.new_empty(rows, columns)
    if packing == "BYTES":
        return (stored ^ _SIGN).view(rows, columns)
    if packing == "PLANES":
        planes = [(stored >> shift) & ((1 << bits) - 1) for shift in range(8 - bits, -1, -bits)]
        return torch.cat(planes).view(rows, columns)
    if packing == "PAIRS":
        pairs = torch.stack([stored >> 4, stored & 15], dim=-1)
        return pairs.view(-1)[: rows * columns].view(rows, columns)
    if packing == "COLUMNS":
        shape = packed_shape(packing, bits, rows, columns)
        words = stored.reshape(*shape, 4).transpose(0, 1).reshape(columns, -1)
        return _fields(words, bits, rows).transpose(0, 1)
    fields = _fields(stored.view(rows, -1), bits, columns)
    if packing.endswith("AWQ"):
        places = torch.tensor(_PLACES_OF_AWQ, device=stored.device)
        fields = fields.view(rows, -1, 8).index_select(2, places).view(rows, columns)
    return fields ^ _SIGN_OF_AWQ if packing == "SIGNED_AWQ" else fields


def packed(numbers: torch.Tensor, packing: Packing, bits: int) -> torch.Tensor:
    """Returns the flat uint8 bytes of a uint8 matrix, on the CPU: the inverse of `unpacked`."""
    rows, columns = numbers.shape
    if packing == "BYTES":
        return (numbers ^ _SIGN).reshape(-1)
    if packing == "PLANES":
        content = torch.zeros(rows * columns * bits // 8, dtype=torch.uint8, device="cpu")
        for plane in numbers.reshape(8 // bits, -1):
            content = (content << (bits % 8)) | plane
        return content
    if packing == "SIGNED_AWQ":
        numbers = numbers ^ _SIGN_OF_AWQ
    if packing.endswith("AWQ"):
        order = torch.tensor(_COLUMNS_OF_AWQ, device="cpu")
        numbers = numbers.reshape(rows, -1, 8).index_select(2, order).view(rows, columns)
    if packing == "COLUMNS":
        words = _words(numbers.transpose(0, 1), bits)
        return words.view(columns, -1, 4).transpose(0, 1).reshape(-1)
    return _words(numbers, bits).reshape(-1)


def _fields(rows_of_bytes: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Returns the first `count` fields of every row of bytes."""
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        fields = [(rows_of_bytes >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(fields, dim=-1).view(rows_of_bytes.shape[0], -1)[:, :count]
    first = torch.arange(count, device=rows_of_bytes.device) * bits
    wide = torch.nn.functional.pad(rows_of_bytes, (0, 1)).to(torch.int32)
    pair = wide.index_select(1, first // 8) | wide.index_select(1, first // 8 + 1) << 8
    return ((pair >> (first % 8)) & ((1 << bits) - 1)).to(torch.uint8)


def _words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the bytes of every row of numbers, filled with zeros to full words."""
    rows, columns = numbers.shape
    if 8 % bits == 0:
        full = torch.nn.functional.pad(numbers, (0, -columns % (WORD_BITS // bits)))
        fields = full.reshape(rows, -1, 8 // bits)
        content = fields[..., 0].clone()
        for place in range(1, 8 // bits):
            content |= fields[..., place] << (place * bits)
        return content
    of_bits = torch.stack([(numbers >> bit) & 1 for bit in range(bits)], dim=-1).view(rows, -1)
    of_bits = torch.nn.functional.pad(of_bits, (0, -columns * bits % WORD_BITS))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device="cpu")
    return (of_bits.view(rows, -1, 8) * weights).sum(dim=-1, dtype=torch.uint8)
