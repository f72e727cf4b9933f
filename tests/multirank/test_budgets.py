"""Sums of micro-batches in stages 2 and 3: what they need is there, or is refused beforehand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.errors import CapacityError
from tests.support.exhaustive import sampled

from .processes import run_ranks
from .work import (
    MIXED,
    NVME,
    Case,
    Run,
    assert_same_run,
    micro_batches,
    offload_case,
    train,
    train_model,
)

# The least on a rank depends on what the rank owns; with tiles for the asking there would be less.
LAYER_MAJOR = Case(
    3, NVME, model="wide", layer_major=True, accumulation=3, steps=2, budgets="rank", tile=0
)
CASES = [
    LAYER_MAJOR,
    replace(LAYER_MAJOR, stage=2, steps=1, simulated=True, tile=512 << 10),
    replace(LAYER_MAJOR, steps=1, placement=MIXED, simulated=True),
    replace(LAYER_MAJOR, stage=2, placement={"moments": "nvme"}, model="experts"),
]


def smallest_nbytes(case: Case, swap: Path) -> int:
    """As the refusal of less states it."""
    with pytest.raises(CapacityError) as refused:
        offload_case(replace(case, capacity="64KiB"), swap)
    return refused.value.needed_nbytes


def train_in_the_smallest(rank: int, case: Case, swap: Path) -> tuple[Run, Run]:
    """That run, and one with space to spare."""
    told = replace(case, micro_batch=4)
    needed_nbytes = smallest_nbytes(told, swap)
    with pytest.raises(CapacityError, match=f"{needed_nbytes >> 20}"):
        offload_case(replace(told, capacity=needed_nbytes - 4096), swap)
    small = train(rank, replace(told, capacity=needed_nbytes))
    return small, train(rank, case)


def accumulate_untold(rank: int, swap: Path) -> None:
    """The file does not set the number of micro-batches: the budget is enough for a backward of
    each."""
    case = replace(LAYER_MAJOR, capacity=smallest_nbytes(LAYER_MAJOR, swap))
    model = offload_case(case, swap)
    calls: list[Any] = []
    least = smallest_nbytes(replace(LAYER_MAJOR, micro_batch=4), swap)
    with pytest.raises(
        CapacityError, match=rf"micro_batch.* {math.ceil(least / 2**20)}MiB or more"
    ):
        infinity.forward_backward(model, calls.append, micro_batches(case, rank, 0))  # type: ignore[arg-type]
    assert not calls
    train_model(model, rank, replace(case, layer_major=False))
    infinity.engine_of(model).close()


def work(rank: int, swap: Path, cases: list[Case]) -> list[tuple[Run, Run]]:
    accumulate_untold(rank, swap)
    return [train_in_the_smallest(rank, case, swap) for case in cases]


@pytest.mark.parametrize("half", sampled(range(2), (0).__eq__))
def test_the_smallest_budget_accumulates_and_less_is_refused_at_once(
    half: int, tmp_path: Path
) -> None:
    cases = CASES[half::2]
    for rank, runs in enumerate(run_ranks(2, work, tmp_path, cases)):
        for case, (small, roomy) in zip(cases, runs, strict=True):
            assert_same_run(small, roomy, f"rank {rank}, {case}")
