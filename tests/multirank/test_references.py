"""DistributedDataParallel and `fully_shard` (FSDP2) as references, and what ranks send and keep."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.sizes import PAGE_NBYTES
from infinity.state.partition import STAGES
from infinity.state.units import STATE_GRANULE
from tests.support.exhaustive import sampled

from .models import WideBlocks, loss_of
from .processes import run_ranks
from .work import (
    LR,
    NVME,
    Case,
    build,
    counted_in_a_step,
    micro_batches,
    offload_case,
    read_weights,
    train_all,
)

STEPS = 3


def _train_plain(model: nn.Module, optimizer: Any, rank: int, case: Case) -> list[float]:
    losses = []
    for step in range(case.steps):
        batches = list(micro_batches(case, rank, step))
        for index, (x, skip) in enumerate(batches):
            is_last = index == len(batches) - 1
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = is_last  # What no_sync does.
            loss = loss_of(model, x, skip)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _beside_ddp(rank: int, cases: list[Case]) -> list[tuple[bool, bool]]:
    """Whether losses and weights are those of DDP, by case."""
    from torch.nn.parallel import DistributedDataParallel

    from .work import train

    same = []
    for case in cases:
        plain = DistributedDataParallel(build(case))
        optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
        losses = _train_plain(plain, optimizer, rank, case)
        found = train(rank, case)
        weights = dict(plain.module.named_parameters())
        same.append(
            (
                found.losses == losses,
                all(torch.equal(weights[n], w) for n, w in found.weights.items()),
            )
        )
    return same


def test_two_ranks_have_the_bits_of_ddp() -> None:
    cases = [Case(stage) for stage in STAGES] + [Case(1, accumulation=2)]
    for answers in run_ranks(2, _beside_ddp, cases):
        assert answers == [(True, True)] * len(cases)


def _one_step_with_large_eps(rank: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from torch.distributed.fsdp import fully_shard

    case = Case(stage, steps=1)
    sharded = build(case)
    # fully_shard refuses to mix frozen and trainable parameters in a group.
    for module in (*sharded.blocks, sharded.frozen, sharded.head):
        fully_shard(module)
    fully_shard(sharded)
    ours = offload_case(case, None)  # type: ignore[arg-type]
    options: dict[str, Any] = {"lr": LR, "eps": 1.0, "weight_decay": 0.0}
    [(x, _)] = micro_batches(case, rank, 0)
    optimizers = (
        torch.optim.AdamW(sharded.parameters(), **options),
        infinity.AdamW(ours, **options),
    )
    for model, optimizer in zip((sharded, ours), optimizers, strict=True):
        loss_of(model, x).backward()
        optimizer.step()
    found = read_weights(ours)
    infinity.engine_of(ours).close()
    return found, {n: p.full_tensor().detach() for n, p in sharded.named_parameters()}


@pytest.mark.parametrize("count", sampled([2, 3], (3).__eq__))
def test_a_step_is_that_of_fully_shard_within_the_order_of_the_sum(count: int) -> None:
    """With eps = 1 a step moves a weight by lr * g / (|g| + 1), which changes by at most lr times
    what g changes by. Sums of `count` fp32 numbers in two orders differ by at most 2 (count - 1)
    2^-24 times the sum of their sizes, here below 1 each; the update itself is rounded a few times.
    """
    for found, wanted in run_ranks(count, _one_step_with_large_eps, 3):
        for name, weight in wanted.items():
            bound = LR * (2 * (count - 1) + 8) * 2.0**-24 + 2 * weight.abs().max() * 2.0**-24
            assert (found[name] - weight).abs().max() <= bound, name


def _volume(rank: int, cases: list[Case]) -> list[tuple[float, float]]:
    """(given, got) in a step, by case."""
    found = []
    for case in cases:
        model = offload_case(case, Path(tempfile.gettempdir(), "swap"))
        names = ("ranks_reduced_nbytes", "ranks_gathered_nbytes")
        given, got = counted_in_a_step(model, rank, case, names).values()
        found.append((given, got))
        infinity.engine_of(model).close()
    return found


ROOMY, TIGHT = "192MiB", "48MiB"
# Passes over P (N - 1) / N: how often gradients are given, and the most that weights are got.
VOLUMES = [
    *((Case(stage, model="wide", capacity=ROOMY), 1, 1) for stage in STAGES),
    (Case(2, model="wide", capacity=ROOMY, accumulation=3), 3, 1),
    (Case(2, model="wide", capacity=ROOMY, reduce_dtype="bfloat16"), 0.5, 1),
    (Case(3, NVME, model="wide", capacity=TIGHT, accumulation=3), 3, 6),
    # What is outside of blocks, a twelfth of it, is got for each micro-batch.
    (Case(3, NVME, model="wide", capacity="60MiB", accumulation=3, layer_major=True), 1, 2.2),
    (Case(2, model="wide", capacity=ROOMY, simulated=True, exchange="collective"), 1, 1),
]


def test_volume_is_that_of_data_parallel_and_half_more_in_stage_3() -> None:
    """Plain data parallel sends 2 (N - 1) / N of the gradients' bytes, half of it sums and half of
    it results; here a rank sends gradients and receives weights. Stage 3 receives weights once a
    step when there is space to keep them from the forward for the backward, and twice when there is
    none."""
    count, cases = 3, [case for case, _, _ in VOLUMES]
    runs = run_ranks(count, _volume, cases)
    numel = sum(p.numel() for p in WideBlocks().parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in WideBlocks().parameters() if not p.requires_grad)
    for index, (case, times_given, times_got) in enumerate(VOLUMES):
        given, got = (sum(run[index][which] for run in runs) for which in (0, 1))
        once = (count - 1) * 4 * numel  # Of all ranks together.
        assert given == times_given * once, case
        # Padding between tensors, and frozen weights.
        padded = (count - 1) * 4 * (numel + 7 * STATE_GRANULE)
        padded += (count - 1) * (4 * frozen + PAGE_NBYTES) * (case.stage == 3)
        assert got <= times_got * padded, case
        assert got >= once if times_got == 1 else got > 1.3 * once, case


@pytest.mark.parametrize("count", sampled([1, 2, 3, 4], (1, 3).__contains__))
def test_memory_falls_with_ranks_as_in_the_zero_paper(count: int) -> None:
    """Of P fp32 parameters: 4P are parameters, 4P gradients, 8P moments, here without a master.
    Stage 1 sums gradients apart from those of the rank, which costs 4P / N more."""
    cases = [Case(stage, steps=1, model="wide", capacity="160MiB") for stage in STAGES]
    runs = run_ranks(count, train_all, cases)
    numel = sum(p.numel() for p in WideBlocks().parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in WideBlocks().parameters() if not p.requires_grad)
    # In bytes of P: what every rank has, and what is divided.
    formulas = {1: (8, 12), 2: (4, 12), 3: (0, 16)} if count > 1 else dict.fromkeys(STAGES, (16, 0))
    units = 5
    slack = units * 4 * (STATE_GRANULE * 4 + 2 * PAGE_NBYTES)  # Whole granules and pages of each.
    for index, case in enumerate(cases):
        every, divided = formulas[case.stage]
        for run in runs:
            found = sum(sum(tiers.values()) for tiers in run[index].placed.values())
            wanted = numel * (every + divided / count)
            wanted += 4 * frozen / (count if case.stage == 3 else 1)
            assert wanted - slack <= found <= wanted + slack, (case, found, wanted)
