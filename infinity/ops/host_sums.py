"""Sums, products and copies of arrays in host memory, on as many threads as updates.

torch's operations take torch's number of threads, which torchrun sets to 1 for every rank, and
which may be more than the cores that a rank is bound to. Where `threads_here` gives another number,
native kernels with the same bits do the work. torch's number itself is not to be changed for a
while: MKL's number follows it in all threads, and so does that of threads that start then.

Sums of fp32 and bf16 are made by the native kernel with any number of threads: torch takes several
times as long, because it widens the term element by element (`bench/update_kernel.py`).
"""

from __future__ import annotations

import torch

from infinity import _core
from infinity.config.machine import threads_here

LEAST_NBYTES = 1 << 18  # Of the result; less is over before another thread is awake.
_STREAMED_NBYTES = 1 << 23  # Native copies of so many go past the caches, torch's do not.
_IS_BF16 = {torch.float32: False, torch.bfloat16: True}


def add_(total: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Adds `term` to `total`, and returns it: tensors of one shape, of any dtypes and strides."""
    threads = _native_threads(total, term, is_slow_in_torch=term.dtype is torch.bfloat16)
    if threads is None or total.dtype is not torch.float32 or term.dtype not in _IS_BF16:
        return total.add_(term)
    _core.update.add(
        total.data_ptr(), term.data_ptr(), total.numel(),
        is_bf16=_IS_BF16[term.dtype], num_threads=threads,
    )  # fmt: skip
    return total


def multiplied_(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `values` times the factor in fp32: in their own memory if they are fp32.

    values: (numel,), contiguous. The factor is rounded to fp32.
    """
    is_wide = values.dtype is torch.float32
    product = values if is_wide else torch.empty_like(values, dtype=torch.float32)
    threads = _native_threads(product, values)
    if threads is None or values.dtype not in _IS_BF16:
        return (product if is_wide else product.copy_(values)).mul_(factor)
    _multiply(product, values, factor, threads)
    return product


def copy_(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copies `source` to `target`, and returns it: tensors of one shape, of any dtypes and strides,
    which do not overlap."""
    is_large = target.nbytes >= _STREAMED_NBYTES
    threads = _native_threads(target, source, is_slow_in_torch=is_large)
    is_same, is_wider = source.dtype is target.dtype, target.dtype is torch.float32
    if threads is None or not (is_same or (is_wider and source.dtype in _IS_BF16)):
        return target.copy_(source)
    if is_same:
        _core.update.copy(target.data_ptr(), source.data_ptr(), target.nbytes, num_threads=threads)
    else:
        _multiply(target, source, 1.0, threads)
    return target


def copied(source: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a contiguous host tensor."""
    return copy_(torch.empty_like(source), source)


def _multiply(product: torch.Tensor, values: torch.Tensor, factor: float, threads: int) -> None:
    _core.update.multiply(
        product.data_ptr(), values.data_ptr(), factor, values.numel(),
        is_bf16=_IS_BF16[values.dtype], num_threads=threads,
    )  # fmt: skip


def _native_threads(
    result: torch.Tensor, term: torch.Tensor, *, is_slow_in_torch: bool = False
) -> int | None:
    """Returns the threads of a native kernel; None where torch has as many, and is not slow, or as
    these arrays are not for a kernel: small, on a device, or not contiguous."""
    if result.nbytes < LEAST_NBYTES:
        return None
    torch_threads = torch.get_num_threads()
    threads = threads_here(torch_threads)
    is_for_torch = threads == torch_threads and not is_slow_in_torch
    if is_for_torch or not (result.is_cpu and term.is_cpu):
        return None
    is_flat = result.is_contiguous() and term.is_contiguous() and result.shape == term.shape
    return threads if is_flat else None
