"""The mean of ranks' gradients on a device: by the Triton kernel, or by torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.fused import mean as fused
from infinity.fused.choice import Trials

trials = Trials()
_TRIAL_NUMEL = 8192 + 5


def mean_of(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean over ranks, fp32, summed by the tree of distributed/ordered_sum.py."""
    level = [row.float().mul_(1.0 / len(rows)) for row in rows]
    while len(level) > 1:
        pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
        level = [pair[0].add_(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def write_mean(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `mean_of` the first elements of each row to `out`, on the stream that is current.

    out: fp32, (n,). rows: of any float dtype, (count, at least n), contiguous. The first call per
    device, dtype and count compiles and tries the kernel, which takes seconds: see `prepare`.
    """
    if out.device.type == "cuda" and not explain_refusal(len(rows), rows.dtype, out.device):
        fused.mean_(out, rows)
    elif out.numel():
        out.copy_(mean_of([row[: out.numel()] for row in rows]))


def prepare(count: int, device: torch.device) -> None:
    """Compiles and tries the kernels for means of `count` rows on a CUDA device."""
    for dtype in fused.FORMS if device.type == "cuda" else ():
        explain_refusal(count, dtype, device)


def explain_refusal(count: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why torch operations take such a mean, "" if the Triton kernel does."""
    if dtype not in fused.FORMS or count > fused.MOST_ROWS:
        return f"the kernel is not for {count} rows of {dtype}"
    return trials.explain_refusal(
        "the mean over ranks", (count, dtype), device, lambda: has_bits(count, dtype, device)
    )


def has_bits(count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether means of random numbers of all magnitudes are those of torch operations."""
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    rows = torch.randn(count, _TRIAL_NUMEL, generator=source)
    rows *= 10.0 ** torch.randint(-44, 30, rows.shape, generator=source)
    there = rows.to(dtype).to(device)
    found = torch.empty(_TRIAL_NUMEL - 3, device=device)
    fused.mean_(found, there)
    wanted = mean_of([row[: found.numel()] for row in there])
    return torch.equal(found.view(torch.int32), wanted.view(torch.int32))
