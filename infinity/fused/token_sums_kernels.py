"""The Triton kernel that adds experts' rows per token: a program for a token and some columns."""

import triton
import triton.language as tl

from infinity.fused.number_kernels import rounded, store_rounded, widened


@triton.jit
def add_rows(
    out, rows, by_token, ends, width,
    form: tl.constexpr, is_last_first: tl.constexpr, program_numel: tl.constexpr,
):  # fmt: skip
    """out, rows: bits (int32 or int16) of numbers of `form`, rows of `width` numbers."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * program_numel + tl.arange(0, program_numel)
    mask = column < width
    first, end = tl.load(ends + token), tl.load(ends + token + 1)
    if first < end:
        at = out + token * width
        total = widened(tl.load(at + column, mask=mask, other=0).to(tl.int32), form)
        for number in range(first, end):
            place = end - 1 - (number - first) if is_last_first else number
            row = rows + tl.load(by_token + place).to(tl.int64) * width
            bits = tl.load(row + column, mask=mask, other=0).to(tl.int32)
            sum_ = total + widened(bits, form)
            total = widened(rounded(sum_, form), form)
        store_rounded(at, column, total, mask, form)
