"""A checkpoint that ranks load in lockstep: no rank gets a shard of the weights before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infinity

from .models import batch, loss_of
from .processes import run_ranks
from .work import LR, Case, offload_case, read_weights

STEPS = 5


def _load(rank: int, directory: str, exchange: str) -> tuple[bool, list[float], dict[str, Tensor]]:
    """Rank 0 fetches ahead of the forward behind the load, and rank 1 does not."""
    case = Case(3, model="deep", simulated=True, exchange=exchange)
    model = offload_case(case, Path("unused"))
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    saved = Path(directory) / exchange

    def step(number: int) -> float:
        loss = loss_of(model, batch(10 * number + rank, model.width))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for number in range(STEPS):
        if number == 1:
            infinity.checkpoint.save(saved, model, optimizer)
        if number == STEPS - 1 and rank == 1:
            engine.weight_cache.prefetch_anew = lambda: None  # type: ignore[method-assign]
        step(number)
    ranks: Any = engine.ranks
    has_log = exchange == "one_sided" or ranks._collectives.is_in_lockstep
    infinity.checkpoint.load(saved, model, optimizer)
    losses = [step(number) for number in range(2)]
    found = read_weights(model)
    engine.close()
    return has_log, losses, found


def test_a_load_in_lockstep_leaves_no_rank_an_old_shard(tmp_path: Path) -> None:
    wanted, found = (
        run_ranks(2, _load, str(tmp_path), exchange) for exchange in ("one_sided", "collective")
    )
    for (_, losses, weights), (has_log, their_losses, their_weights) in zip(
        wanted, found, strict=True
    ):
        assert has_log
        assert their_losses == losses
        assert [n for n in weights if not torch.equal(their_weights[n], weights[n])] == []
