"""Norms of sums over ranks are taken in the backward, while the sums are in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.streaming.gradients.tensors import THREAD_NAME
from tests.support.exhaustive import sampled

from .models import loss_of
from .processes import run_ranks
from .work import (
    NVME,
    Case,
    expected,
    make_optimizer,
    micro_batches,
    offload_case,
    train_model,
)

PATIENCE_S = 120.0
CASE = Case(3, NVME, steps=4, max_norm=0.05)


class Watch:
    """Counts what is measured of sums, inside of `optimizer.step()` and before it, and notes on
    which threads."""

    def __init__(self, engine: Any) -> None:
        self.owned = engine.gradients.owned
        self.is_in_step, self.before, self.inside = False, 0, 0
        self.threads: set[str] = set()
        self._measure, self.owned.norms.measure = self.owned.norms.measure, self._counted

    def _counted(self, *arguments: Any) -> torch.Tensor:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        self.inside += self.is_in_step
        self.before += not self.is_in_step
        return self._measure(*arguments)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.is_in_step = True
        yield
        self.is_in_step = False

    def count(self) -> tuple[int, int]:
        counts = self.before, self.inside
        self.before = self.inside = 0
        self.threads.clear()
        return counts


def _await_sums(engine: Any) -> None:
    """Lets the gradients of all ranks come."""
    dist.barrier()
    gradients, deadline_s = engine.gradients, time.monotonic() + PATIENCE_S
    tensors = list(gradients.sums._owned)
    while not all(gradients.sums.progress.is_sum_complete(tensor) for tensor in tensors):
        assert time.monotonic() < deadline_s
        with engine._lock:
            gradients._take_buckets()
            gradients.take_in()
        time.sleep(0.001)
    with engine._lock:
        gradients.owned.finish_copies()
    tasks = [known.task for known in gradients.owned._tensors.values() if known.task is not None]
    while not all(task._future.done() for task in tasks):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    dist.barrier()


def _train(rank: int, case: Case) -> tuple[list[float], list[tuple[int, int]], list[int], int]:
    """Returns norms, what was measured before and in each step, the meetings for norms alone in each
    step, and the sums of this rank."""
    model = offload_case(case, Path("swap"))
    optimizer = make_optimizer(model, case, max_grad_norm=case.max_norm)
    engine = infinity.engine_of(model)
    watch = Watch(engine)
    norms, counts, meetings, tags = [], [], [], []
    gather = engine.ranks.transport.all_gather

    def counted(tag: str, *arguments: Any, **named: Any) -> list[bytes]:
        tags.append(tag)
        return gather(tag, *arguments, **named)

    engine.ranks.transport.all_gather = counted
    for step in range(case.steps):
        for each, skip in micro_batches(case, rank, step):
            loss_of(model, each, skip).backward()
        if step:  # The first one shows how many gradients to expect.
            _await_sums(engine)
            # Where the device is the host, its cores are busy.
            assert watch.threads == ({THREAD_NAME} if case.simulated else {""})
        with watch.step():
            optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
        counts.append(watch.count())
        meetings.append(tags.count("gradient norms"))
        tags.clear()
    num_sums = len(engine.gradients.sums._owned)
    infinity.close(model)
    return norms, counts, meetings, num_sums


@pytest.mark.parametrize(
    ("count", "case"),
    sampled(
        [
            (2, CASE),
            (3, replace(CASE, accumulation=3)),
            (2, replace(CASE, placement={}, stage=2)),
            (2, replace(CASE, stage=2, accumulation=2)),
            (2, replace(CASE, simulated=True, exchange="collective")),
            (2, replace(CASE, simulated=True)),
            (3, replace(CASE, simulated=True, exchange="collective", placement={}, accumulation=2)),
        ],
        lambda job: job[0] == 3 or job[1].stage == 2,
    ),
    ids=str,
)
def test_a_step_finds_the_norms_of_sums_that_were_complete_before_it(
    count: int, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = expected(case, count)
    for rank, found in enumerate(run_ranks(count, _train, case)):
        norms, counts, meetings, num_sums = found
        assert norms == pytest.approx(wanted[rank].norms, rel=1e-6)
        assert counts[0] == (0, num_sums), "nothing is known of the first sums"
        assert meetings == [1] + [0] * (case.steps - 1), "later steps tell norms as they begin"
        for before, inside in counts[1:]:
            assert (before >= num_sums, inside) == (True, 0), counts


def _changes_its_mind(rank: int, case: Case, is_early: bool) -> list[float]:
    """Contributions come after their sums were complete, and are left out."""
    model = offload_case(case, Path("swap"))
    optimizer = make_optimizer(model, case, max_grad_norm=case.max_norm)
    engine = infinity.engine_of(model)
    if not is_early:
        engine.gradients.owned.note_complete = lambda *_: None
    norms = []
    for step, num_backwards in enumerate((1, 1, 2, 2, 1, 0, 1)):
        batches = list(micro_batches(replace(case, accumulation=2), rank, step))
        for number in range(num_backwards):
            if number <= rank or step % 2:  # Of rank 0 one alone in some steps.
                loss_of(model, *batches[number]).backward()
            if step and (num_backwards, number) == (2, 0):
                with engine._lock:
                    engine.gradients.take_in()
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(-1.0 if optimizer.grad_norm is None else optimizer.grad_norm.item())
    infinity.close(model)
    return norms


def test_a_norm_that_was_taken_too_early_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for placement in (NVME, {}):
        case = replace(CASE, placement=placement)
        early = run_ranks(2, _changes_its_mind, case, True)
        late = run_ranks(2, _changes_its_mind, case, False)
        assert early == late


def _without_a_copy(rank: int, case: Case) -> list[float]:
    """Sums that rest on the device are measured there."""
    model = offload_case(case, Path("swap"))
    owned = infinity.engine_of(model).gradients.owned
    owned.view = lambda *_: pytest.fail("a sum was copied to the host")
    run = train_model(model, rank, case)
    infinity.close(model)
    return run.norms


@pytest.mark.parametrize("exchange", ["auto", "collective"])
def test_sums_on_devices_are_measured_there(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    placement = {"gradients": "device", "parameters": "device"}
    case = replace(CASE, placement=placement, simulated=True, exchange=exchange)
    for found, wanted in zip(run_ranks(2, _without_a_copy, case), expected(case, 2), strict=True):
        assert found == pytest.approx(wanted.norms, rel=1e-6)
