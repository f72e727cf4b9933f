"""The Triton kernel that adds experts' rows has the bits of torch's operations."""

from __future__ import annotations

import pytest
import torch

from infinity.ops import experts as token_sums
from infinity.ops.experts import add_rows_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_has_the_bits_of_torch_operations(interpreter: None, dtype: torch.dtype) -> None:
    assert token_sums.has_bits(dtype, torch.device("cpu"))


def test_another_order_of_the_sum_is_noticed(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = token_sums.fused.add_rows_

    def reversed_(*args: torch.Tensor, is_last_first: bool) -> None:
        add(*args, is_last_first=not is_last_first)

    monkeypatch.setattr(token_sums.fused, "add_rows_", reversed_)
    assert not token_sums.has_bits(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("is_last_first", [False, True])
def test_sums_are_those_of_a_loop_over_experts(is_last_first: bool) -> None:
    """Pairs come by expert; a token has no expert, one or several."""
    experts = [torch.randperm(20)[:count] for count in (7, 0, 20, 3, 1)]
    rows = [torch.randn(len(each), 33).bfloat16() for each in experts]
    found, wanted = (torch.ones(21, 33).bfloat16() for _ in range(2))
    for tokens, part in list(zip(experts, rows, strict=True))[:: -1 if is_last_first else 1]:
        wanted.index_add_(0, tokens, part)
    add_rows_(found, torch.cat(experts), torch.cat(rows), is_last_first=is_last_first)
    assert torch.equal(found, wanted)
