"""Sums of experts' rows per token: by the Triton kernel, or by torch operations."""

from __future__ import annotations

import torch

from infinity.fused import token_sums as fused
from infinity.fused.choice import Trials

trials = Trials()


def add_rows_(
    out: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, *, is_last_first: bool = False
) -> None:
    """Adds rows to the rows `tokens` of `out`, those of one token in their order, or from the last
    one on. The bits are those of an `index_add_` for each expert in turn.

    out: [tokens, width]. rows: [pairs, width], of the dtype of `out`.
    """
    by_token = tokens.argsort(stable=True)
    there = tokens[by_token]
    is_dense = out.is_contiguous() and rows.is_contiguous()
    if out.device.type == "cuda" and is_dense and not explain_refusal(out):
        ends = torch.searchsorted(there, torch.arange(len(out) + 1, device=out.device))
        fused.add_rows_(out, rows, by_token, ends, is_last_first=is_last_first)
    else:
        _add_by_slots_(out, tokens, rows, by_token, there, is_last_first=is_last_first)


def _add_by_slots_(
    out: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    by_token: torch.Tensor,
    there: torch.Tensor,
    *,
    is_last_first: bool,
) -> None:
    """Adds the first row of every token, then the second of those that have two, and so on."""
    number = torch.arange(len(there), device=there.device) - torch.searchsorted(there, there)
    order = by_token[number.argsort(stable=True)]
    slots = order.split(number.bincount().tolist())
    for slot in reversed(slots) if is_last_first else slots:
        out.index_add_(0, tokens[slot], rows[slot])


def explain_refusal(out: torch.Tensor) -> str:
    """Returns why torch operations add to `out`, "" if the Triton kernel does."""
    if out.dtype not in fused.FORMS:
        return f"the kernel is not for {out.dtype}"
    return trials.explain_refusal(
        "sums of experts", out.dtype, out.device, lambda: has_bits(out.dtype, out.device)
    )


def has_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether sums of random numbers of all magnitudes are those of torch operations."""
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    tokens = torch.randint(37, (200,), generator=source).to(device)
    rows = torch.randn(200, 1041, generator=source)
    rows *= 10.0 ** torch.randint(-30, 4, rows.shape, generator=source)
    rows = rows.to(dtype).to(device)
    by_token = tokens.argsort(stable=True)
    there = tokens[by_token]
    ends = torch.searchsorted(there, torch.arange(41, device=device))
    for is_last_first in (False, True):
        found, wanted = (rows[:40] * 1.0 for _ in range(2))
        fused.add_rows_(found, rows, by_token, ends, is_last_first=is_last_first)
        _add_by_slots_(wanted, tokens, rows, by_token, there, is_last_first=is_last_first)
        if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
            return False
    return True
