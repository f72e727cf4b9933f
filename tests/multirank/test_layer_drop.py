"""Ranks that leave out every second block in every step: the bits of plain PyTorch, and one agreed log
from its first step to the last."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import infinity
from infinity.distributed.collective.buckets import SUMMING
from infinity.distributed.collective.order import Key
from infinity.distributed.collective.unshard import DeviceUnshard
from infinity.distributed.pending import PendingShards

from .early_run import EarlyRun, EarlyStep
from .models import DeepBlocks
from .processes import run_ranks
from .test_deferred import slow_updates
from .work import (
    NVME,
    Case,
    Run,
    assert_same_run,
    build,
    dropped_blocks,
    expected,
    make_optimizer,
    offload_case,
    one_step,
    read_weights,
)

COUNT = 3
FIRST_AGREED = 3  # The steps before it make the first log.
# More steps than an entry of no use stays in a log.
ONE_SIDED = Case(3, NVME, "deep", steps=9, drops=2, capacity="144MiB", updates="deferred")
LOCKSTEP = replace(ONE_SIDED, simulated=True, exchange="collective")
BLOCKS = set(range(DeepBlocks.num_blocks))  # The indices of their units, too.
LAST_BLOCK = max(BLOCKS)  # Nobody uses it after the first step.


class LoggedStep(NamedTuple):
    """One step of a rank. `log`: the keys of the log that the rank plays; None without a log.
    num_messages, num_stand_ins: what the step adds to these counters."""

    log: tuple[Key, ...] | None
    num_messages: float
    num_stand_ins: float


class DroppingRun(NamedTuple):
    run: Run
    steps: list[LoggedStep]


# All ranks use blocks 0, 3 and 4.
BOTH_PASSES = replace(ONE_SIDED, steps=FIRST_AGREED + 3, drops=4, updates="both_passes")


def _train(rank: int, cases: list[Case]) -> list[DroppingRun]:
    return [_train_case(rank, case) for case in cases]


def _train_case(rank: int, case: Case) -> DroppingRun:
    model = offload_case(case, Path(tempfile.gettempdir(), "swap"))
    engine, optimizer = infinity.engine_of(model), make_optimizer(model, case)
    ranks: Any = engine.ranks
    run, steps = Run(), list[LoggedStep]()
    names = ("ranks_control_messages", "ranks_stand_ins")
    before = dict.fromkeys(names, 0.0)
    for step in range(case.steps):
        log = None if ranks._collectives is None else ranks._collectives._order.log
        keys = None if log is None else tuple(entry.key for entry in log.entries)
        run.losses += one_step(model, optimizer, rank, case, step)
        now = engine.counters.snapshot()
        steps.append(LoggedStep(keys, *(now.get(name, 0) - before[name] for name in names)))
        before = {name: now.get(name, 0) for name in names}
    run.weights = read_weights(model)
    engine.close()
    return DroppingRun(run, steps)


def test_ranks_that_drop_blocks_in_every_step_have_the_bits_of_plain_torch_and_keep_their_log() -> (
    None
):
    cases = [ONE_SIDED, LOCKSTEP]
    of_ranks = run_ranks(COUNT, _train, cases)
    of_case = [expected(case, COUNT) for case in cases]
    for rank, runs in enumerate(of_ranks):
        for case, wanted, found in zip(cases, of_case, runs, strict=True):
            assert_same_run(found.run, wanted[rank], f"rank {rank}, {case.exchange}")
    lockstep = [found for _, found in of_ranks]
    _assert_last_block_is_of_first_step(lockstep[0].run)
    [log] = {step.log for found in lockstep for step in found.steps[FIRST_AGREED:]}
    assert log is not None, "a step is without a log"
    gathered = {unit for kind, unit, _ in log if kind != SUMMING}
    assert gathered & BLOCKS == BLOCKS - {LAST_BLOCK}, "two ranks of three use every other block"
    assert not {unit for kind, unit, _ in log if kind == SUMMING} & BLOCKS, (
        "no rank waits for these"
    )
    for rank, found in enumerate(lockstep):
        num_dropped = len(set(dropped_blocks(rank, 1, len(BLOCKS))) - {LAST_BLOCK})
        for step in found.steps[FIRST_AGREED:]:
            assert (step.num_messages, step.num_stand_ins) == (0, num_dropped), found.steps


def _assert_last_block_is_of_first_step(run: Run) -> None:
    """A gradient of zeros would decay the weights, and the moments of the first step move them."""
    [after_first, *_] = expected(replace(LOCKSTEP, steps=1), COUNT)
    before = build(LOCKSTEP).state_dict()
    for name in (name for name in before if name.startswith(f"blocks.{LAST_BLOCK}.")):
        assert torch.equal(run.weights[name], after_first.weights[name]), name
        assert not torch.equal(run.weights[name], before[name]), "the first step changes nothing"


class SlowRun(NamedTuple):
    """`num_waits`: gathers of the log that found their shard pending. `num_pending_stand_ins`: those
    of stand-ins."""

    dropping: DroppingRun
    num_waits: int
    num_pending_stand_ins: int


def _train_slowly(rank: int, cases: list[Case]) -> list[SlowRun]:
    """The updates of ranks 1 and 2 last until other ranks need their shards."""
    slow_updates(0.02 * rank)
    waits, pending_stand_ins = list[int](), list[int]()
    await_update, stand_in = PendingShards.await_update, DeviceUnshard._stand_in

    def counting_await(pending: PendingShards, shard: int) -> None:
        if threading.current_thread().name == "infinity-collectives" and pending.is_pending(shard):
            waits.append(shard)
        await_update(pending, shard)

    def counting_stand_in(unshard: DeviceUnshard, key: Key, size: int) -> Any:
        shard = unshard.shard_of(key[1])
        if unshard._store.pending.is_pending(shard):
            pending_stand_ins.append(shard)
        return stand_in(unshard, key, size)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingShards, "await_update", counting_await)
        patch.setattr(DeviceUnshard, "_stand_in", counting_stand_in)
        for case in cases:
            waits.clear()
            pending_stand_ins.clear()
            run = _train_case(rank, case)
            found.append(SlowRun(run, len(waits), len(pending_stand_ins)))
    return found


def test_gathers_of_the_log_have_no_bytes_of_before_an_update() -> None:
    """With shards on the host, whose memory an update changes, and on drives. A stand-in gives a
    shard whose update its own rank has no reason to wait for."""
    on_host = replace(LOCKSTEP, placement={}, steps=6)
    cases = [on_host, replace(LOCKSTEP, steps=6)]
    of_ranks = run_ranks(COUNT, _train_slowly, cases)
    of_case = [expected(case, COUNT) for case in cases]
    for rank, runs in enumerate(of_ranks):
        for case, wanted, found in zip(cases, of_case, runs, strict=True):
            assert_same_run(found.dropping.run, wanted[rank], f"rank {rank}, {case}")
            assert all(step.log is not None for step in found.dropping.steps[FIRST_AGREED:])
    for case, *of_case_runs in zip(cases, *of_ranks, strict=True):
        assert sum(found.num_waits for found in of_case_runs), case
        assert sum(found.num_pending_stand_ins for found in of_case_runs), case


def _train_in_both_passes(rank: int, cases: list[Case]) -> list[tuple[Run, list[EarlyStep]]]:
    directory, dropped = Path(tempfile.gettempdir()), BLOCKS - _used_by_all()
    return [
        # Before ranks have a log, they would wait for one that waits for early updates.
        EarlyRun(rank, case, directory).train(first=FIRST_AGREED, but=dropped)
        for case in cases
    ]


def _used_by_all() -> set[int]:
    return BLOCKS.difference(
        *(dropped_blocks(rank, 1, len(BLOCKS), BOTH_PASSES.drops) for rank in range(COUNT))
    )


def test_of_blocks_that_ranks_drop_only_those_that_all_use_are_updated_in_the_backward() -> None:
    """The sum of a block that a rank drops lacks that rank until the step. The first block is left
    at the end of the backward, and updated after it."""
    lockstep = replace(BOTH_PASSES, simulated=True, exchange="collective")
    cases = [BOTH_PASSES, lockstep, replace(lockstep, placement={})]
    of_ranks = run_ranks(COUNT, _train_in_both_passes, cases)
    of_case = [expected(case, COUNT) for case in cases]
    for rank, runs in enumerate(of_ranks):
        for case, wanted, (found, steps) in zip(cases, of_case, runs, strict=True):
            assert_same_run(found, wanted[rank], f"rank {rank}, {case}, {case.exchange}")
            assert len(steps) == case.steps - FIRST_AGREED
            for step in steps:
                assert step.units & BLOCKS == _used_by_all() - {0} == {3, 4}, steps
                assert (step.num_kept, step.num_undone) == (len(step.units), 0), steps
