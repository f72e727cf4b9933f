"""The Triton kernel of the mean over ranks has the bits of torch's operations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from infinity.fused.mean import mean_
from infinity.ops import mean
from tests.fused.compiled import float_operations


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_the_bits_of_the_tree(
    interpreter: None, count: int, dtype: torch.dtype
) -> None:
    assert mean.has_bits(count, dtype, torch.device("cpu"))


def test_a_trial_has_every_form_that_triton_compiles_apart() -> None:
    """Of each number: a multiple of 16, another one, and 1 of the elements that are read."""
    forms = {
        ("1" if numel == 1 else numel % 16 == 0, stride % 16 == 0) for numel, stride in mean._TRIALS
    }
    assert forms == {(numel, stride) for numel in ("1", True, False) for stride in (True, False)}


def test_another_order_of_the_sum_is_noticed(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_rows(out: torch.Tensor, rows: torch.Tensor) -> None:
        mean_(out, rows.flip(0))

    monkeypatch.setattr(mean.fused, "mean_", reversed_rows)
    assert not mean.has_bits(3, torch.float32, torch.device("cpu"))


def test_the_kernel_adds_and_scales_and_fuses_nothing(compiler: None) -> None:
    from infinity.fused import mean_kernels

    types = {"out": "*fp32", "rows": "*i32", "numel": "i64", "stride": "i64", "scale": "fp32"}
    constants = {"count": 6, "form": "F32", "program_numel": 128}
    found = float_operations(mean_kernels.mean, types, constants)
    assert found == Counter({"mul.rn.f32": 6, "add.rn.f32": 5})
