"""Weights that all ranks set in place: every rank computes from those before the change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.errors import InfinityError
from tests.support.offloading import units_in_use

from .models import Blocks
from .processes import run_ranks
from .work import Case, build, offload_case, read_weights

NAMES = ("blocks.0.0.weight", "blocks.1.0.weight")


def _by_gather(model: Blocks) -> None:
    handles = [parameter for block in model.blocks[:2] for parameter in block.parameters()]
    with infinity.gather(handles, modify=True), torch.no_grad():
        for block in model.blocks[:2]:
            for parameter in block.parameters():
                parameter.div_(parameter.norm())


def _by_handles(model: Any) -> None:
    """Each operation reads the weight that it changes, and one of another unit."""
    first, second = model.blocks[0][0].weight, model.blocks[1][0].weight
    with torch.no_grad():
        first.mul_(second)
        second.mul_(first)


def _set_late(rank: int, how: Callable[[Any], None]) -> dict[str, Tensor]:
    """Rank 1 comes late to the shards of the others."""
    model = offload_case(Case(3), Path("unused"))
    store: Any = infinity.engine_of(model).store
    if rank == 1:
        gather = store.gather_weights

        def late(*arguments: Any, **named: Any) -> Any:
            time.sleep(0.1)
            return gather(*arguments, **named)

        store.gather_weights = late
    how(model)
    found = read_weights(model)
    infinity.close(model)
    return found


@pytest.mark.parametrize("how", [_by_gather, _by_handles])
def test_a_slow_rank_changes_the_weights_that_all_ranks_had(how: Callable[[Any], None]) -> None:
    [wanted] = run_ranks(1, _set_late, how)
    given = dict(build(Case(3)).named_parameters())
    assert not any(torch.equal(wanted[name], given[name]) for name in NAMES)
    for found in run_ranks(2, _set_late, how):
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def _fetch_in_vain(rank: int) -> tuple[str, bool]:
    model = offload_case(Case(3), Path("unused"))
    engine = infinity.engine_of(model)
    before, said, has_run = read_weights(model), "", False
    if rank == 1:
        acquire = engine.weight_cache.acquire

        def refuse(unit: int, *arguments: Any, **named: Any) -> bool:
            if unit == 1:
                raise MemoryError("of the test")
            return acquire(unit, *arguments, **named)

        engine.weight_cache.acquire = refuse  # type: ignore[method-assign]
    try:
        with infinity.gather(model, modify=True):
            has_run = True
    except (MemoryError, InfinityError) as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 1:
        engine.weight_cache.acquire = acquire  # type: ignore[method-assign]
    assert not has_run and not units_in_use(engine)
    after = read_weights(model)
    infinity.close(model)
    return said, all(torch.equal(after[name], before[name]) for name in before)


def test_a_rank_without_memory_for_the_weights_is_an_error_of_all_before_a_change() -> None:
    (other, is_same), (own, is_kept) = run_ranks(2, _fetch_in_vain)
    assert own == "MemoryError: of the test" and is_kept
    assert other.startswith("InfinityError: fetching weights to set failed on rank 1") and is_same
