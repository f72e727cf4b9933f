"""Updates after the step, over ranks: the bits of updates inside the step, whatever comes between a
step and the use of what it changes."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity.distributed.shard_updates import ShardUpdates
from infinity.distributed.wire import failures
from infinity.streaming.updates.unit_update import UnitUpdate
from tests.support.exhaustive import sampled

from .early_run import counted_updates
from .models import batch, loss_of
from .processes import run_ranks
from .work import (
    LR,
    NVME,
    Case,
    assert_same_run,
    expected,
    offload_case,
    one_step,
    read_weights,
    train,
)

AWAY = {"moments": "nvme", "gradients": "nvme"}
ROOMY = "96MiB"
CASES = [
    Case(3, accumulation=2),
    Case(3, NVME, compute="bfloat16", skips=True, capacity=ROOMY),
    Case(3, AWAY, model="experts", steps=4, capacity=ROOMY),
    Case(3, NVME, optimizer="lion", layer_major=True, accumulation=2, capacity=ROOMY),
    Case(3, NVME, simulated=True, exchange="collective", capacity=ROOMY),
    Case(3, simulated=True, exchange="collective", lazy_ranks=(1,)),
]


def slow_updates(seconds: float) -> None:
    """Makes updates last until somebody needs them."""
    update = ShardUpdates._update

    def slowly(self: ShardUpdates, unit_update: UnitUpdate) -> None:
        time.sleep(seconds)
        update(self, unit_update)

    ShardUpdates._update = slowly  # type: ignore[method-assign]


def train_and_count(rank: int, cases: list[Case]) -> list[tuple[Any, int]]:
    """The run of each case, and the number of updates after its steps. Updates of the ranks take
    different times."""
    updated, found = counted_updates(), []
    slow_updates(0.004 * rank)
    for case in cases:
        before = updated[0]
        found.append((train(rank, case), updated[0] - before))
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_updates_after_the_step_have_the_bits_of_plain_torch(count: int) -> None:
    cases = CASES[count - 2 :: 2]  # Each case on two ranks or on three.
    for rank, runs in enumerate(run_ranks(count, train_and_count, cases)):
        for case, (found, num_updates) in zip(cases, runs, strict=True):
            assert_same_run(found, expected(case, count)[rank], f"rank {rank} of {count}, {case}")
            assert num_updates > 0, case


def test_what_cannot_be_updated_beside_training_is_updated_inside_the_step() -> None:
    cases = [
        Case(3, updates="at_step"),
        Case(2),
        Case(3, capacity="7MiB"),  # Too tight.
        Case(3, {"moments": "device"}, simulated=True),
        Case(3, simulated=True, update_on=("device",)),
    ]
    for rank, runs in enumerate(run_ranks(2, train_and_count, cases)):
        for case, (found, num_updates) in zip(cases, runs, strict=True):
            assert_same_run(found, expected(case, 2)[rank], str(case))
            assert num_updates == 0, case


def _looks(rank: int, case: Case) -> dict[str, Any]:
    """Everything that may come between a step and the next forward, with clipping and gradients
    that stay."""
    if case.updates != "at_step":
        slow_updates(0.02 + 0.02 * rank)
    model = offload_case(case, Path("swap-" + str(case.updates)))
    engine = infinity.engine_of(model)
    half = [list(model.blocks.parameters()), list(model.head.parameters())]
    optimizer = infinity.AdamW([{"params": params} for params in half], lr=LR, max_grad_norm=0.05)
    found: dict[str, Any] = {}
    dtype, width = getattr(torch, case.compute), model.width

    def backward(seed: int) -> None:
        loss_of(model, batch(10 * seed + rank, width).to(dtype)).backward()

    def step(seed: int, name: str) -> None:
        backward(seed)
        optimizer.step()
        found[name] = optimizer.grad_norm.item()

    step(0, "first")
    found["weight"] = engine.read_parameter("blocks.0.0.weight")
    found["master"] = engine.read_parameter("blocks.1.0.weight", master=True)
    step(1, "gradients that were clipped stay and are added to")
    optimizer.zero_grad(set_to_none=False)
    step(2, "zeros are added to")
    optimizer.param_groups[1]["lr"] = LR / 3
    found["norm"] = optimizer.clip_grad_norm_(0.05).item()  # Of gradients that updates still read.
    optimizer.zero_grad()
    step(3, "another rate")
    if rank == 0:
        found["moment"] = optimizer.state[model.head.weight]["exp_avg"].clone()
        with torch.no_grad():
            found["output"] = model(batch(7, width).to(dtype))
    optimizer.step()  # No backward: the gradients that stay, once more.
    with infinity.gather(model.head, modify=True), torch.no_grad():
        model.head.weight.mul_(0.5)
    optimizer.zero_grad()
    step(4, "weights that were set")
    model.load_state_dict({name: w / 2 for name, w in read_weights(model).items()})
    optimizer.zero_grad()
    step(5, "weights that were loaded")
    found |= {f"weight of {name}": weight for name, weight in read_weights(model).items()}
    found["masters"] = engine.read_parameter("head.weight", master=True)
    engine.close()
    return found


@pytest.mark.parametrize("placement", sampled([{}, NVME], bool), ids=["host", "nvme"])
def test_looks_and_changes_between_steps_find_updated_state(
    placement: dict[str, str], tmp_path: Path
) -> None:
    case = Case(3, placement, compute="bfloat16", capacity=ROOMY)
    os.chdir(tmp_path)
    wanted = run_ranks(2, _looks, replace(case, updates="at_step"))
    found = run_ranks(2, _looks, case)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            same = (
                torch.equal(one[name], value) if isinstance(value, Tensor) else one[name] == value
            )
            assert same, name


def _one_waits_elsewhere(rank: int, updates: str) -> dict[str, Tensor]:
    """After the step rank 1 waits for the program's own barrier, and rank 0 needs its shards."""
    if rank == 1:
        slow_updates(0.1)
    case = Case(3, updates=updates)
    model = offload_case(case, Path())
    optimizer = infinity.AdamW(model, lr=LR)
    one_step(model, optimizer, rank, case, 0)
    if rank == 0:
        loss_of(model, batch(1, model.width)).backward()
    dist.barrier()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        found = read_weights(model)
        dist.barrier()
    else:
        dist.barrier()
        found = read_weights(model)
    infinity.engine_of(model).close()
    return found


def test_a_rank_that_waits_elsewhere_serves_what_its_updates_change() -> None:
    wanted = run_ranks(2, _one_waits_elsewhere, "at_step")
    for found in run_ranks(2, _one_waits_elsewhere, "deferred"):
        assert all(torch.equal(found[name], weight) for name, weight in wanted[0].items())


def _close_at_once(rank: int) -> dict[str, Tensor]:
    """Rank 1 closes while its updates are pending, and rank 0 reads what they change."""
    if rank == 1:
        slow_updates(0.1)
    case = Case(3)
    model = offload_case(case, Path())
    one_step(model, infinity.AdamW(model, lr=LR), rank, case, 0)
    found = read_weights(model) if rank == 0 else {}
    infinity.engine_of(model).close()
    return found


def test_a_rank_that_closes_makes_its_updates_before() -> None:
    found = run_ranks(2, _close_at_once)[0]
    for name, weight in expected(Case(3, steps=1), 2)[0].weights.items():
        assert torch.equal(found[name], weight), name


def _takes_all_memory(rank: int) -> int:
    """Memory that updates have borrowed comes back when somebody needs it."""
    slow_updates(0.05)
    case = Case(3, NVME, capacity=ROOMY)
    model = offload_case(case, Path(f"swap-{rank}"))
    engine = infinity.engine_of(model)
    one_step(model, infinity.AdamW(model, lr=LR), rank, case, 0)
    assert not engine.store.pending.are_resting
    lent = engine.pool.in_use_nbytes
    while engine.pool._reclaim(1 << 20):
        pass
    assert engine.store.pending.are_resting
    freed = lent - engine.pool.in_use_nbytes
    found = read_weights(model)
    for name, weight in expected(replace(case, steps=1), 2)[0].weights.items():
        assert torch.equal(found[name], weight), name
    engine.close()
    return freed


def test_memory_of_updates_comes_back_when_it_is_needed(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    assert all(freed > 0 for freed in run_ranks(2, _takes_all_memory))


def _dropped(rank: int) -> list[str]:
    """A model that nobody refers to any more, while updates are pending."""
    slow_updates(0.05)
    case = Case(3, NVME, capacity=ROOMY)
    swap = Path("swap")
    model = offload_case(case, swap)
    optimizer = infinity.AdamW(model, lr=LR)
    one_step(model, optimizer, rank, case, 0)
    engine = weakref.ref(infinity.engine_of(model))
    del model, optimizer
    gc.collect()
    assert engine() is None
    failures._await_beside()  # A collection does not wait for the threads that it ends.
    dist.barrier()
    left = [path.name for path in swap.iterdir()]
    return left + [each.name for each in threading.enumerate() if "updates" in each.name]


def test_a_model_that_is_dropped_ends_its_updates_and_leaves_no_file(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    assert run_ranks(2, _dropped) == [[], []]
