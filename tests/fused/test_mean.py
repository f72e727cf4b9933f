"""The Triton kernel of the mean over ranks has the bits of torch's operations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from infinity.fused.launches import mean_
from infinity.ops import mean
from tests.fused.compiled import float_operations
from tests.fused.conftest import forget
from tests.fused.variants import Variants


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_the_bits_of_the_tree(
    interpreter: None, count: int, dtype: torch.dtype
) -> None:
    assert mean.has_bits(count, dtype, torch.device("cpu"))


def test_a_trial_compiles_what_later_means_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    launched = Variants("infinity.fused.sum_kernels", monkeypatch, forget)
    for dtype in (torch.float32, torch.bfloat16):
        launched.found.clear()
        assert mean.has_bits(3, dtype, torch.device("cpu"))
        tried = set(launched.found)
        assert len(tried) == 1
        for numel, stride, offset in ((1, 1, 0), (1, 16, 3), (16, 16, 1), (33, 48, 4), (5, 7, 0)):
            rows = torch.zeros(offset + 3 * stride, dtype=dtype)[offset:].view(3, stride)
            mean_(torch.zeros(offset + numel)[offset:], rows)
        assert launched.found == tried
    forget()


def test_another_order_of_the_sum_is_noticed(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_rows(out: torch.Tensor, rows: torch.Tensor) -> None:
        mean_(out, rows.flip(0))

    monkeypatch.setattr(mean.fused, "mean_", reversed_rows)
    assert not mean.has_bits(3, torch.float32, torch.device("cpu"))


def test_the_kernel_adds_and_scales_and_fuses_nothing(compiler: None) -> None:
    from infinity.fused import sum_kernels

    types = {"out": "*fp32", "rows": "*i32", "numel": "i64", "stride": "i64", "scale": "fp32"}
    constants = {"count": 6, "form": "F32", "program_numel": 128}
    found = float_operations(sum_kernels.mean, types, constants)
    assert found == Counter({"mul.rn.f32": 6, "add.rn.f32": 5})
