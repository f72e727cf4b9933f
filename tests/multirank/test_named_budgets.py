"""The budget that a refusal names works for every rank, however the weights come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.errors import CapacityError
from tests.integrations.test_budgets import Job
from tests.support.exhaustive import sampled

from .processes import run_ranks

COUNT = 2


def train(rank: int, job: Job, capacity: str) -> list[Any]:
    model = job.offloaded(job.config(capacity))
    with infinity.engine_of(model):
        optimizer = infinity.AdamW(model, lr=1e-3)
        for step in range(2):
            job.entry.loss(model, job.entry.batch(2 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model.get_parameter(name).detach().clone() for name, _ in model.named_parameters()]


def work(rank: int, directory: Path, ways: tuple[str, ...], more: dict[str, Any]) -> None:
    for way in ways:
        job = Job("llama", way, directory, schedule={"tile": 0}, **more)

        def run(capacity: str, job: Job = job) -> list[Any]:
            return train(rank, job, capacity)

        with pytest.raises(CapacityError, match="smallest host budget that works") as refused:
            run("64KiB")
        named: list[Any] = [None] * COUNT
        dist.all_gather_object(named, refused.value.needed_nbytes)
        needed_nbytes = max(named)
        least, roomy = run(f"{needed_nbytes}B"), run("256MiB")
        assert all(map(torch.equal, least, roomy)), way
        with pytest.raises(CapacityError, match="smallest host budget that works"):
            run(f"{min(named) - 1}B")


@pytest.mark.parametrize(
    ("stage", "budgets", "precision", "ways"),
    sampled(
        [
            (1, "node", {"compute": "float32"}, ("random", "function")),
            (2, "node", {"compute": "bfloat16"}, ("in memory", "adapter")),
            (3, "node", {"moments": "8bit"}, ("random", "files")),
            (3, "rank", {"compute": "float32"}, ("files", "adapter")),
        ],
        lambda case: case[1] == "rank" or case[0] == 2,
    ),
)
def test_the_budget_that_a_refusal_names_trains_on_every_rank(
    stage: int, budgets: str, precision: dict[str, str], ways: tuple[str, ...], tmp_path: Path
) -> None:
    Job("llama", "files", tmp_path).files()
    sharing = {"zero_stage": stage, "budgets": budgets}
    run_ranks(COUNT, work, tmp_path, ways, {"distributed": sharing, "precision": precision})
