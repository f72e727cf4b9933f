"""Ranks that update their shards at different times: in the step, after it, and in the backward."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.distributed.shard_updates import ShardUpdates
from infinity.distributed.step import DistributedUpdater

from .early_run import EarlyRun, EarlyStep
from .processes import run_ranks
from .work import NVME, Case, Run, assert_same_run, expected

IN_STEP, AFTER, EARLY = "apply", "_update", "_update_early"
# What updates of each setting are made by.
MADE_BY = {"at_step": {IN_STEP}, "deferred": {AFTER}, "both_passes": {AFTER, EARLY}}
FIRST_EARLY = 3  # Ranks between devices have a log, the others expect what comes.
ON_DRIVES = Case(3, NVME, steps=6, capacity="96MiB")
BESIDE = replace(ON_DRIVES, placement={}, simulated=True, compute="bfloat16")


def _count_calls() -> Counter[str]:
    """Counts what makes updates, by name."""
    counted: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def wrapper(*arguments: Any) -> Any:
            counted[name] += 1
            return call(*arguments)

        setattr(owner, name, wrapper)

    counting(DistributedUpdater, IN_STEP)
    counting(ShardUpdates, AFTER)
    counting(ShardUpdates, EARLY)
    return counted


def _updates_of(rank: int, number: int) -> str:
    """The setting of a rank in a case, another one on each rank and in each case."""
    return tuple(MADE_BY)[(rank + number) % len(MADE_BY)]


def _train(rank: int, cases: list[Case]) -> list[tuple[Run, list[EarlyStep], Counter[str]]]:
    counted, found = _count_calls(), []
    for number, case in enumerate(cases):
        counted.clear()
        of_rank = replace(case, updates=_updates_of(rank, number))
        run, steps = EarlyRun(rank, of_rank, Path(tempfile.gettempdir())).train(first=FIRST_EARLY)
        found.append((run, steps, counted.copy()))
    return found


def test_ranks_that_update_at_different_times_have_the_bits_of_plain_torch() -> None:
    cases = [
        ON_DRIVES,
        replace(BESIDE, exchange="one_sided", accumulation=2),
        replace(BESIDE, exchange="collective"),
        replace(BESIDE, exchange="collective", placement={"moments": "nvme"}),
    ]
    of_ranks = run_ranks(len(MADE_BY), _train, cases)
    for number, case in enumerate(cases):
        wanted = expected(case, len(MADE_BY))
        for rank, runs in enumerate(of_ranks):
            run, steps, counted = runs[number]
            updates = _updates_of(rank, number)
            what = f"{updates}, {case}, {case.exchange}"
            assert_same_run(run, wanted[rank], what)
            assert counted.keys() == MADE_BY[updates], what
            assert len(steps) == case.steps - FIRST_EARLY
            for step in steps:
                assert bool(step.units) == (updates == "both_passes"), what
                assert (step.num_kept, step.num_undone) == (len(step.units), 0), what
