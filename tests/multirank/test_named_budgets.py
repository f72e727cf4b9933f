"""The budget that a refusal names works for every rank, however the weights come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.errors import CapacityError
from tests.integrations.test_budgets import IDS, MODELS, WAYS
from tests.support.exhaustive import sampled
from tests.support.offloading import small_tiers

from .processes import run_ranks

COUNT = 2


def train(rank: int, capacity: str, swap: Path, way: str, sharing: dict[str, Any]) -> list[Any]:
    config = {
        "tiers": small_tiers(swap, capacity),
        "distributed": sharing["distributed"],
        "precision": sharing["precision"],
        "schedule": {"tile": 0},
    }
    torch.manual_seed(0)
    model = WAYS[way]("llama", config, swap.parent / "files")
    with infinity.engine_of(model):
        optimizer = infinity.AdamW(model, lr=1e-3)
        for _ in range(2):
            model(input_ids=IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model.get_parameter(name).detach().clone() for name, _ in model.named_parameters()]


def work(rank: int, directory: Path, ways: tuple[str, ...], sharing: dict[str, Any]) -> None:
    for way in ways:

        def run(capacity: str, way: str = way) -> list[Any]:
            return train(rank, capacity, directory / "swap", way, sharing)

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
            (1, "node", {"compute": "float32"}, ("random", "from a function")),
            (2, "node", {"compute": "bfloat16"}, ("in memory", "adapters over meta")),
            (3, "node", {"moments": "8bit"}, ("random", "from files")),
            (3, "rank", {"compute": "float32"}, ("from files", "adapters over meta")),
        ],
        lambda case: case[1] == "rank" or case[0] == 2,
    ),
)
def test_the_budget_that_a_refusal_names_trains_on_every_rank(
    stage: int, budgets: str, precision: dict[str, str], ways: tuple[str, ...], tmp_path: Path
) -> None:
    MODELS["llama"]().save_pretrained(tmp_path / "files")
    sharing = {
        "distributed": {"zero_stage": stage, "budgets": budgets},
        "precision": precision,
    }
    run_ranks(COUNT, work, tmp_path, ways, sharing)
