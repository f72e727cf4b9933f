"""Training over ranks gives the bits of plain PyTorch: stages, placements, ways through the model.

The reference adds up, in one process and in the order that is promised, what each rank would have
sent. `DistributedDataParallel` and `fully_shard` are compared with it separately.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import infinity
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.state.partition import STAGES
from infinity.streaming.gradients.leaving import LeavingGradients
from tests.support.exhaustive import sampled

from .models import batch, loss_of
from .processes import run_ranks
from .work import (
    LR,
    MIXED,
    MODELS,
    NVME,
    Case,
    assert_same_run,
    expected,
    offload_case,
    read_weights,
    train,
    train_all,
)

PLACEMENTS = ({}, NVME, MIXED)
GRID = [Case(stage, placement) for stage in STAGES for placement in PLACEMENTS]
# What else may differ between ranks.
OTHERS = [
    Case(2, compute="bfloat16"),
    Case(3, NVME, compute="bfloat16"),
    *(Case(stage, skips=True, steps=4) for stage in STAGES),
    *(Case(stage, NVME, model="experts", steps=4) for stage in STAGES),
    *(Case(stage, accumulation=3, skips=True) for stage in STAGES),
    # Nearly all that waits to be summed waits on the drive.
    Case(1, NVME, reduce_buffer=4096, steps=2),
    Case(3, NVME, reduce_buffer=4096, accumulation=2, steps=2),
    Case(2, layer_major=True, accumulation=3, steps=2),
    Case(3, MIXED, layer_major=True, accumulation=3, simulated=True),
    Case(1, reduce_dtype="bfloat16", accumulation=2, steps=2),
    Case(3, reduce_dtype="bfloat16", simulated=True, steps=2),
    Case(3, lazy_ranks=(1,)),
    *(Case(s, optimizer=name) for s, name in enumerate(("adam", "momentum", "lion"), 1)),
    Case(3, NVME, optimizer="momentum", compute="bfloat16", lazy_ranks=(0,)),
    Case(3, NVME, optimizer="sgd", skips=True),
    Case(1, model="experts", lazy_ranks=(0,)),
    # Every rank decides for itself where it updates.
    Case(3, simulated=True, update_on=("host", "device")),
    Case(3, dict.fromkeys(NVME, "device"), simulated=True, update_on=("device", "host"), steps=2),
    Case(2, MIXED, simulated=True, update_on=("device", "host", "auto")),
    Case(2, {"gradients": "device", "moments": "device"}, simulated=True, skips=True),
    Case(3, budgets="rank", capacity="16MiB"),
]
# Between devices: where ranks run alike, and where offers are called off.
BETWEEN_DEVICES = [
    dataclasses.replace(case, simulated=True, exchange="collective")
    for case in (
        Case(1, dict.fromkeys(("parameters", "gradients"), "device"), compute="bfloat16"),
        Case(1, MIXED | {"gradients": "device"}, accumulation=2, skips=True),
        Case(2, MIXED),
        Case(3),
        Case(3, NVME, compute="bfloat16"),
        Case(3, MIXED, layer_major=True, accumulation=3, steps=2),
        Case(3, reduce_dtype="bfloat16", accumulation=2, steps=2),
        Case(2, skips=True, steps=4),
        Case(3, accumulation=3, skips=True),
        Case(3, NVME, model="experts", steps=4),
        Case(3, lazy_ranks=(1,)),
    )
]


def _depends_on_count(case: Case) -> bool:
    return not case.placement and case.optimizer == "adamw" and case.budgets == "node"


WITHOUT_DRIVES = [case for case in OTHERS if not case.placement]
OF_COUNT = [case for case in OTHERS if _depends_on_count(case)]
KEPT_OF_FOUR = OF_COUNT[1::2]
# Three ranks or four run every case; `make exhaustive` has each with both, and two, which other tests
# have. Of the grid three ranks have each stage and placement once, and four each in another pair.
CASES = {
    "3": [GRID[0], GRID[4], GRID[8]],
    "3-others": [case for case in OTHERS if case not in KEPT_OF_FOUR],
    "3-between-devices": BETWEEN_DEVICES,
    "4": [GRID[2], GRID[3], GRID[7], *KEPT_OF_FOUR],
    "2": [GRID[0], GRID[4], GRID[8], *WITHOUT_DRIVES],
    "3-rest": [GRID[1], GRID[2], GRID[3], GRID[5], GRID[6], GRID[7], *KEPT_OF_FOUR],
    "4-rest": OF_COUNT[::2],
}
KEPT = ("3", "3-others", "3-between-devices", "4")


@pytest.mark.parametrize("job", sampled(CASES, KEPT.__contains__))
def test_ranks_have_the_bits_of_a_sum_in_rank_order(job: str) -> None:
    """Two, three and four ranks run each stage and each placement once. Four ranks leave out
    optimizers, which see one shard and no rank, and the budgets of a node's ranks."""
    count, cases = int(job[0]), CASES[job]
    assert {case.stage for case in cases} == set(STAGES)
    if "-" not in job:
        assert all(any(case.placement == each for case in cases) for each in PLACEMENTS)
    for case, runs in zip(
        cases, zip(*run_ranks(count, train_all, cases), strict=True), strict=True
    ):
        for rank, (found, wanted) in enumerate(zip(runs, expected(case, count), strict=True)):
            assert_same_run(found, wanted, f"rank {rank} of {count}, {case}")
            if case.reduce_buffer != "auto":
                assert found.counters["ranks_reduce_buffer_high_water_nbytes"] <= case.reduce_buffer
                assert found.counters["ranks_reduce_buffer_spilled_nbytes"] > case.reduce_buffer
            assert (found.counters.get("ranks_collectives", 0) > 0) == (case in BETWEEN_DEVICES)


def test_ranks_that_see_one_batch_have_the_bits_of_one_rank() -> None:
    """Halving and adding twice is exact. The shards split blocks of moments with one scale, tiles,
    and pages of weights on a device, which each rank reads beside what others write there."""
    cases = [
        Case(1, moments="8bit", compute="bfloat16", is_shared=True),
        Case(3, NVME, moments="8bit", compute="bfloat16", is_shared=True),
        Case(2, MIXED, moments="8bit", tile=1 << 20, model="wide", is_shared=True, steps=2),
        Case(3, tile=1 << 20, model="wide", is_shared=True, steps=2),
        Case(1, {"parameters": "device"}, moments="8bit", simulated=True, is_shared=True, steps=2),
    ]
    [alone] = run_ranks(1, train_all, cases)
    for count, first in ((2, 0), (4, -1)):
        for runs in run_ranks(count, train_all, cases[first:]):
            for case, found, wanted in zip(cases[first:], runs, alone[first:], strict=True):
                assert_same_run(found, wanted, str(case))


def test_one_rank_is_as_without_ranks() -> None:
    case = Case(3, steps=2)
    [[found]] = run_ranks(1, train_all, [case])
    [wanted] = expected(case, 1)
    assert_same_run(found, wanted, "one rank")
    assert not any(name.startswith("ranks_") for name in found.counters)


def test_the_norm_does_not_depend_on_ranks_and_clips() -> None:
    """Within the rounding of a norm summed in fp32: one part in 2^24 for every halving of the
    number of elements, here fewer than 2^16, twice (squares and their sum)."""
    case = Case(3, max_norm=0.1, steps=1)
    of_stage = []
    for stage in STAGES:
        [first, second] = run_ranks(2, train_all, [Case(stage, max_norm=0.1, steps=1)])
        assert first[0].norms == second[0].norms
        of_stage.append(first[0])
    assert of_stage[0].norms == of_stage[1].norms == of_stage[2].norms
    wanted = expected(case, 2)[0]
    [norm], [reference] = of_stage[2].norms, wanted.norms
    assert reference > case.max_norm, "the clip does nothing"
    assert abs(norm - reference) <= 2 * 16 * 2.0**-24 * reference
    for name, weight in wanted.weights.items():
        # One step of Adam moves by lr whatever the scale; the clip reaches it through eps alone.
        assert torch.allclose(of_stage[2].weights[name], weight, atol=1e-6), name


def _goes_its_own_way(rank: int, exchange: str) -> tuple[dict[str, torch.Tensor], float]:
    """One rank is out of batches and waits in a barrier of the program's own; another evaluates
    between steps while this one trains on; weights are read by one rank alone, and set by all."""
    import torch.distributed as dist

    from infinity.distributed.collective import issuing

    issuing.PATIENCE_S = 0.3
    case = Case(3, steps=4, exchange=exchange, simulated=True)
    width = MODELS[case.model].width
    model = offload_case(case, Path())
    optimizer = infinity.AdamW(model, lr=LR)
    transport = infinity.engine_of(model).ranks.transport
    is_waited_for, await_backwards = [], transport.await_backwards
    transport.await_backwards = lambda *a, **k: (
        is_waited_for.append(await_backwards(*a, **k)) or True
    )
    for micro in range(1 + 3 * (rank == 0)):  # One has offered what the other never does.
        loss_of(model, batch(rank + micro, width), (rank,)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(is_waited_for), "who is in the step already is waited for"
    for step in range(case.steps):
        for micro in range(1 + (rank == 0)):
            loss_of(model, batch(10 * step + rank + micro, width)).backward()
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 1:
            with torch.no_grad():
                model(batch(5, width))
            with infinity.gather(model):
                assert torch.isfinite(model.head.weight).all()
        if step == 2:
            with infinity.gather(model.head, modify=True), torch.no_grad():
                model.head.weight.mul_(0.5)
    found = read_weights(model)
    cancelled = infinity.engine_of(model).counters.snapshot().get("ranks_cancelled", 0)
    infinity.engine_of(model).close()
    return found, cancelled


def test_ranks_that_wait_elsewhere_do_not_hang_and_have_the_same_bits() -> None:
    wanted = run_ranks(2, _goes_its_own_way, "one_sided")
    found = run_ranks(2, _goes_its_own_way, "collective")
    assert found[0][1] > 0, "no offer was called off"
    for (weights, _), (reference, _) in zip(found, wanted, strict=True):
        assert weights.keys() == reference.keys()
        assert all(torch.equal(weights[name], reference[name]) for name in weights)


def _sums_sent_by_hosts(rank: int, case: Case) -> int:
    """How often a host sends a sum of micro-batches, or adds to one, in a step."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((DistributedGradients, "_give"), (LeavingGradients, "add")):
            patch.setattr(owner, name, lambda *args, name=name, **_: calls.append(name))
        train(rank, case)
    return len(calls)


@pytest.mark.parametrize("stage", [2, 3])
def test_devices_exchange_the_sums_outside_of_blocks_too(stage: int) -> None:
    case = Case(
        stage, layer_major=True, accumulation=3, steps=2, simulated=True, exchange="collective"
    )
    assert run_ranks(2, _sums_sent_by_hosts, case) == [0, 0]
