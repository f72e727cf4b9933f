"""On a CUDA device: experts as grouped products, with no bit that depends on who shares them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.test_grouped_experts import assert_equal, bf16, both_directions, calls_of, run

from infinity.modules.tiling import experts_call
from infinity.ops import experts as token_sums
from infinity.ops.experts import are_rows_apart
from tests.support.bits import same_bits

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="grouped products of Hopper",
    ),
]

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("shape", [(7168, 4096), (2048, 7168), (7168, 16), (16, 4096), (64, 192)])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("is_trained", [True, False])
def test_rows_of_grouped_products_depend_on_no_others(
    shape: tuple[int, int], is_transposed: bool, is_trained: bool
) -> None:
    options = {"is_transposed": is_transposed, "is_trained": is_trained}
    assert are_rows_apart(shape, torch.bfloat16, CUDA, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_last_first", [False, True])
def test_sums_are_a_kernel_with_the_bits_of_the_loop(
    dtype: torch.dtype, is_last_first: bool
) -> None:
    experts = [torch.randperm(300, device=CUDA)[:count] for count in (70, 0, 200, 3, 300)]
    rows = [torch.randn(len(tokens), 1000, device=CUDA).to(dtype) for tokens in experts]
    found, wanted = (torch.ones(301, 1000, dtype=dtype, device=CUDA) for _ in range(2))
    for tokens, part in list(zip(experts, rows, strict=True))[:: -1 if is_last_first else 1]:
        wanted.index_add_(0, tokens, part)
    every = torch.cat(experts), torch.cat(rows)
    token_sums.add_rows_(found, *every, is_last_first=is_last_first)
    assert same_bits(found, wanted)
    assert token_sums.explain_refusal(found) == ""


def test_calls_together_have_the_bits_of_each_alone() -> None:
    calls = calls_of(8, 5, "grouped", "cuda")
    alone = [both_directions([call]) for call in calls]
    together = both_directions(calls)
    # Outputs first, then the two gradients of each call.
    outs, gradients = together[:5], together[5:]
    for number, (out, *both) in enumerate(alone):
        assert same_bits(out, outs[number])
        assert all(map(same_bits, both, gradients[2 * number : 2 * number + 2]))


def test_each_direction_waits_for_the_device_once() -> None:
    """To know the rows of each expert, for any number of micro-batches and experts."""
    for num_experts, count in ((8, 2), (32, 8)):
        calls = calls_of(num_experts, count, "grouped", "cuda")
        both_directions(calls)  # Trials.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                both_directions(calls)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [str(wait.message) for wait in waits if "synchronizing" in str(wait.message)]
        assert len(found) == 2, found


def test_launches_do_not_grow_with_the_number_of_experts() -> None:
    counts = {}
    for num_experts in (8, 64):
        calls = calls_of(num_experts, 1, "grouped", "cuda")
        both_directions(calls)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            both_directions(calls)
            torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        counts[num_experts] = len(events)
    assert abs(counts[64] - counts[8]) <= 8, counts  # Sorts have passes by size.


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_no_bit_depends_on_tiles_or_on_micro_batches_that_share_a_product(
    kind: str, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "auto" is one product for all experts here: the model has transformers' default."""
    options: dict[str, Any] = {
        "schedule": {"experts": "auto"}, "tiers": {"device": {"kind": "cuda"}},
    }  # fmt: skip
    together = [run(bf16(kind), swap_directory, kind, n, **options) for n in (1, 3)]
    monkeypatch.setattr(experts_call, "are_rows_apart", lambda *_, **__: False)
    alone = run(bf16(kind), swap_directory, kind, 2, **options)
    for found in together:
        assert_equal(found, alone)
