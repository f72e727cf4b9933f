"""Rows times a weight each, in a narrower dtype than the product's: one pass instead of three."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override


def weighted(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `(rows * weights).to(dtype)`, with its bits and those of its gradients.

    rows: [rows, width]. weights: [rows, 1].
    """
    if torch.result_type(rows, weights) == dtype:
        return rows * weights
    product: torch.Tensor = _Weighted.apply(rows, weights, dtype)  # type: ignore[no-untyped-call]
    return product


class _Weighted(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return torch.mul(rows, weights, out=torch.empty_like(rows, dtype=dtype))

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = ctx.needs_input_grad[0] or None, ctx.needs_input_grad[1] or None
        if of_rows:
            of_rows = torch.mul(gradient, weights, out=torch.empty_like(rows))
        if of_weights:
            wide = gradient.to(torch.result_type(rows, weights))
            of_weights = (wide * rows).sum(-1, keepdim=True).to(weights.dtype)
        return of_rows, of_weights, None
