"""Collectives in the agreed order of an earlier step: no messages, and bits that do not depend on who
takes part with what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.distributed.collective import issuing
from infinity.errors import InfinityError
from tests.support.exhaustive import sampled

from .models import batch, loss_of
from .processes import run_ranks
from .work import LR, MIXED, MODELS, Case, offload_case, read_weights

NAMES = ("ranks_control_messages", "ranks_collectives", "ranks_stand_ins", "ranks_cancelled")
# One word a step, done by all ranks; weights are set behind "set", and read by one behind "read".
PROGRAM = [
    "alike",
    "alike",
    "alike",
    "alike",
    "skip",
    "idle",
    "evaluate",
    "read",
    "pause",
    "alike",
    "twice",
    "set",
    "alike",
    "barrier",
    "alike",
]
FIRST_AGREED = 3
WAITING = ("pause", "barrier")  # Other ranks ask rank 1 to play the log.


def _train(
    rank: int, stage: int, never: tuple[int, ...], exchange: str
) -> tuple[list[dict[str, float]], Any, list[bool]]:
    """Rank 1 leaves what every rank else does, as the words of PROGRAM say. It uses the blocks
    `never` in no step."""
    case = Case(stage, MIXED if stage == 2 else {}, simulated=True, exchange=exchange)
    width, odd = MODELS[case.model].width, rank == 1
    model = offload_case(case, Path("unused"))
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    ranks: Any = engine.ranks
    counted, is_agreed = [], []
    before = dict.fromkeys(NAMES, 0.0)
    for step, word in enumerate(PROGRAM):
        issuing.PATIENCE_S = 0.3 if word in WAITING else 10.0
        if ranks._collectives is not None:
            is_agreed.append(ranks._collectives.is_in_lockstep)
        if word == "evaluate" and odd:
            with torch.no_grad():
                model(batch(5, width))
        for micro in range(2 if word == "twice" and odd else 0 if word == "idle" and odd else 1):
            skipped = ((0, 2) if word == "skip" else never) if odd else ()
            loss = loss_of(model, batch(10 * step + rank + micro, width), skipped)
            if word == "pause" and odd:
                time.sleep(1.5)
            if word == "barrier" and odd:  # The others are in theirs when they need nothing more.
                dist.barrier()
            loss.backward()
            if word == "barrier" and not odd:
                dist.barrier()
            if word == "evaluate" and odd:
                with torch.no_grad():
                    model(batch(6, width))
        optimizer.step()
        optimizer.zero_grad()
        if word == "read" and odd:
            with infinity.gather(model):
                assert torch.isfinite(model.head.weight).all()
        if word == "set":
            with infinity.gather(model.head, modify=True), torch.no_grad():
                model.head.weight.mul_(0.5)
        now = engine.counters.snapshot()
        counted.append({name: now.get(name, 0) - before[name] for name in NAMES})
        before = {name: now.get(name, 0) for name in NAMES}
    found = read_weights(model)
    engine.close()
    return counted, found, is_agreed


@pytest.mark.parametrize(
    ("count", "stage", "never"),
    sampled([(2, 3, ()), (4, 2, ()), (3, 3, (1,))], lambda case: case[0] == 3),
)
def test_ranks_in_lockstep_send_nothing_and_have_the_bits_of_one_sided_ranks(
    count: int, stage: int, never: tuple[int, ...]
) -> None:
    wanted = run_ranks(count, _train, stage, never, "one_sided")
    for rank, (found, reference) in enumerate(
        zip(run_ranks(count, _train, stage, never, "collective"), wanted, strict=True)
    ):
        counted, weights, is_agreed = found
        steps = list(zip(PROGRAM, counted, is_agreed, strict=True))
        agreed = steps[FIRST_AGREED:]
        assert all(is_so for _, _, is_so in agreed), steps
        for _, numbers, _ in (agreed[0], agreed[-1]):
            assert numbers["ranks_collectives"] > 0, steps
            assert numbers["ranks_stand_ins"] > 0 or not (never and rank == 1), steps
        for word, numbers, _ in agreed:
            assert numbers["ranks_control_messages"] == 0 or word in WAITING, (word, steps)
            if rank == 1:  # It takes part with what it skips.
                has_stood_in = word in ("skip", "idle", *WAITING)
                assert numbers["ranks_stand_ins"] > 0 or not has_stood_in, (word, steps)
        assert weights.keys() == reference[1].keys()
        differing = [name for name in weights if not torch.equal(weights[name], reference[1][name])]
        assert not differing, steps


def _clip(rank: int, stage: int, by_call: bool) -> tuple[list[dict[str, float]], Any]:
    """Clipped steps, alike on all ranks: what was counted in each, and the weights."""
    model = offload_case(Case(stage, simulated=True, exchange="collective"), Path("unused"))
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    optimizer.max_grad_norm = 1e-2
    counted = []
    for step in range(FIRST_AGREED + 4):
        before = engine.counters.snapshot()
        loss_of(model, batch(10 * step + rank, model.width)).backward()
        if by_call:
            optimizer.clip_grad_norm_(1e-2)
        optimizer.step()
        optimizer.zero_grad()
        now = engine.counters.snapshot()
        counted.append({name: now.get(name, 0) - before.get(name, 0) for name in NAMES})
    found = read_weights(model)
    engine.close()
    return counted, found


@pytest.mark.parametrize("stage", sampled([2, 3], (3).__eq__))
def test_a_look_at_the_norm_before_the_step_costs_ranks_in_lockstep_no_operation(
    stage: int,
) -> None:
    wanted, found = (run_ranks(2, _clip, stage, by_call) for by_call in (False, True))
    for (steps, weights), (expected, reference) in zip(found, wanted, strict=True):
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
        assert steps[FIRST_AGREED:] == expected[FIRST_AGREED:]
        assert steps[-1]["ranks_collectives"] > 0 and not steps[-1]["ranks_stand_ins"]


def _closes_within_a_step(rank: int, exchange: str) -> tuple[float, str, float, int]:
    """Rank 1 closes behind its forward. The others run their backward, and come to the step. Returns
    the loss, what the step says, the messages of this rank until it closes, and the entries of the
    log that it has not issued in the end."""
    case = Case(3, simulated=True, exchange=exchange)
    model = offload_case(case, Path("unused"))
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    for step in range(FIRST_AGREED + 1):
        loss_of(model, batch(10 * step + rank, model.width)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks: Any = engine.ranks
    log = None if exchange == "one_sided" else ranks._collectives._order.log
    assert exchange == "one_sided" or log is not None
    before, said = engine.counters.snapshot(), ""
    loss = loss_of(model, batch(7 + rank, model.width))
    if rank != 1:
        loss.backward()
        try:
            optimizer.step()
        except InfinityError as error:
            said = str(error)
    after = engine.counters.snapshot()
    engine.close()
    name = "ranks_control_messages"
    num_left = 0 if log is None else len(log.entries) - log.head
    return loss.item(), said, after.get(name, 0) - before.get(name, 0), num_left


def test_a_rank_that_closes_within_a_step_plays_the_log_to_its_end() -> None:
    """So the others finish their backward without asking it, and the step names it."""
    wanted = run_ranks(3, _closes_within_a_step, "one_sided")
    found = run_ranks(3, _closes_within_a_step, "collective")
    for rank, (loss, said, num_messages, num_left) in enumerate(found):
        assert loss == wanted[rank][0]
        assert num_left == 0, rank
        if rank != 1:
            assert num_messages == 0, "a rank has waited and asked for the log"
            assert "rank 1 (" in said and "has closed its engine" in said
