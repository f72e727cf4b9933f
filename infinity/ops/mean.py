"""The mean of ranks' gradients on a device: by the Triton kernel, or by torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.fused import launches as fused
from infinity.fused.choice import Trials

trials = Trials()
_TRIALS = ((8194, 8197), (8192, 8192))  # Elements that are read, and those of a row.
_PART_NUMEL = 1 << 22  # Torch operations widen so many elements of each row at a time.


def mean_of(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean over ranks, fp32, summed by the tree of distributed/sums/ordered_sum.py."""
    level = [row.float().mul_(1.0 / len(rows)) for row in rows]
    while len(level) > 1:
        pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
        level = [pair[0].add_(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def write_mean(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `mean_of` the first elements of each row to `out`, on the stream that is current.

    out: fp32, (n,). rows: of any float dtype, (count, at least n), contiguous; they may be changed.
    The first call per device, dtype and count compiles and tries the kernel, which takes seconds:
    see `prepare`.
    """
    if out.device.type == "cuda" and not explain_refusal(len(rows), rows.dtype, out.device):
        fused.mean_(out, rows)
        return
    for start in range(0, out.numel(), _PART_NUMEL):
        stop = min(start + _PART_NUMEL, out.numel())
        out[start:stop].copy_(mean_of([row[start:stop] for row in rows]))


def prepare(count: int, device: torch.device) -> None:
    """Compiles and tries the kernels for means of `count` rows on a CUDA device."""
    for dtype in fused.MEAN_DTYPES if device.type == "cuda" else ():
        explain_refusal(count, dtype, device)


def explain_refusal(count: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why torch operations take such a mean, "" if the Triton kernel does."""
    if dtype not in fused.MEAN_DTYPES or count > fused.MOST_ROWS:
        return f"the kernel is not for {count} rows of {dtype}"
    return trials.explain_refusal(
        "the mean over ranks", (count, dtype), device, lambda: has_bits(count, dtype, device)
    )


def has_bits(count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether means of random numbers of all magnitudes are those of torch operations."""
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    for numel, stride in _TRIALS:
        rows = torch.randn(count, stride, generator=source, device="cpu")
        rows *= 10.0 ** torch.randint(-44, 30, rows.shape, generator=source, device="cpu")
        there = rows.to(dtype).to(device)
        found = torch.empty(numel, device=device)
        fused.mean_(found, there)
        wanted = mean_of([row[:numel] for row in there])
        if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
            return False
    return True
