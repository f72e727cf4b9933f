"""The Triton kernels of sums: the mean of ranks' gradients, and experts' rows per token.

The mean is one pass, in the order of distributed/sums/ordered_sum.py; every product and sum is
rounded: its launch forbids to contract them.
"""

import triton
import triton.language as tl

from infinity.fused.number_kernels import rounded, store_rounded, widened

# Nothing is compiled apart for these: a trial compiles what every later launch runs.
_ARRAYS = ("out", "rows", "numel", "stride")


@triton.jit
def _tree(
    rows, offset, mask, stride, scale, first: tl.constexpr, count: tl.constexpr, form: tl.constexpr
):
    """The sum of `count` scaled rows from `first` on: neighbours first, then pairs of pairs."""
    if count == 1:
        at = rows + tl.cast(first, tl.int64) * stride + offset
        total = widened(tl.load(at, mask=mask, other=0).to(tl.int32), form) * scale
    else:
        # The largest power of two below `count`.
        half: tl.constexpr = (
            64 if count > 64 else 32 if count > 32 else 16 if count > 16
            else 8 if count > 8 else 4 if count > 4 else 2 if count > 2 else 1
        )  # fmt: skip
        total = _tree(rows, offset, mask, stride, scale, first, half, form)
        total += _tree(rows, offset, mask, stride, scale, first + half, count - half, form)
    return total


@triton.jit(do_not_specialize=_ARRAYS, do_not_specialize_on_alignment=_ARRAYS)
def mean(
    out, rows, numel: tl.int64, stride: tl.int64, scale,
    count: tl.constexpr, form: tl.constexpr, program_numel: tl.constexpr,
):  # fmt: skip
    """out: fp32, `numel` elements. rows: bits (int32 or int16), `count` rows of `stride` elements.
    `form`: F32 or BF16. scale: 1 / count."""
    offset = tl.program_id(0).to(tl.int64) * program_numel + tl.arange(0, program_numel)
    mask = offset < numel
    tl.store(out + offset, _tree(rows, offset, mask, stride, scale, 0, count, form), mask=mask)


@triton.jit
def add_rows(
    out, rows, by_token, ends, width,
    form: tl.constexpr, is_last_first: tl.constexpr, program_numel: tl.constexpr,
):  # fmt: skip
    """Adds experts' rows per token: a program for a token and some columns. out, rows: bits (int32
    or int16) of numbers of `form`, rows of `width` numbers."""
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
