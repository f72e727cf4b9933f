"""State of shards is read before their gradients are there, and sums of gradients stay in memory:
whatever changes the state in between, or takes the memory, the bits are those of updates in the
step."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity.state.store import LocalStore
from infinity.state.units import StateKind, Unit
from infinity.streaming.gradients.blocks import SumsInBlocks
from tests.support.bits import differences

from .early_run import RankUpdates
from .processes import run_ranks
from .work import LR, NVME, Case, offload_case, one_step, read_weights, train_through_changes

CASE = Case(3, NVME, model="wide", compute="bfloat16", capacity="192MiB", updates="both_passes")
STATE = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


def _all_early(engine: Any) -> None:
    """Has every unit that can be updated early updated so."""
    updates = RankUpdates(engine)
    if updates.shards is not None:
        updates.plan_all()


def _read_ahead(engine: Any) -> set[int]:
    """The shards of which state is read before their gradients, when there is nothing else to do."""
    if engine.updater.deferred is None:
        return set()
    engine.store.pending.await_idle()
    return {unit for unit, _ in engine.updater.deferred._ring._started}


def _changed_in_between(rank: int, directory: str, updates: str) -> tuple[list[Any], list[int]]:
    """Weights after each event, and how many shards' state was read ahead at that event."""
    # Commits have no space for gradients beside them on this drive.
    case = replace(CASE, placement=NVME | {"gradients": "host"}, updates=updates)
    model = offload_case(case, Path(directory, f"swap-{updates}"), checkpoint={"keep": 1})
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    ahead = list[int]()

    def train(step: int) -> None:
        one_step(model, optimizer, rank, case, step)
        _all_early(engine)
        ahead.append(len(_read_ahead(engine)))

    found = train_through_changes(model, optimizer, train, Path(directory, f"saved-{updates}"))
    infinity.close(model)
    return found, ahead


def test_whatever_changes_state_that_was_read_ahead_the_update_uses_what_rests(
    tmp_path: Path,
) -> None:
    kept, wanted = (
        run_ranks(2, _changed_in_between, str(tmp_path), updates)
        for updates in ("both_passes", "at_step")
    )
    for (on_rank, ahead), (other, none) in zip(kept, wanted, strict=True):
        assert min(*ahead[3:5], ahead[6]) > 0 and not any(none)
        for weights, same in zip(on_rank, other, strict=True):
            assert not differences(weights, same)


class _Traffic:
    """Counts the transfers of this rank's shards by state kind."""

    def __init__(self) -> None:
        self.read, self.written = Counter[StateKind](), Counter[StateKind]()
        self._lock = threading.Lock()
        for name, counts in (("read", self.read), ("write", self.written)):
            setattr(LocalStore, name, self._counted(getattr(LocalStore, name), counts))

    def _counted(self, call: Any, counts: Counter[StateKind]) -> Any:
        def counted(store: LocalStore, unit: Unit, kind: StateKind, *rest: Any, **more: Any) -> Any:
            with self._lock:
                counts[kind] += 1
            return call(store, unit, kind, *rest, **more)

        return counted

    def forget(self) -> None:
        self.read.clear()
        self.written.clear()


class _Counted(NamedTuple):
    """Of the steps from the third on: reads and writes of gradients, reads of other state."""

    weights: dict[str, Tensor]
    read: int
    written: int
    state: int


def _train_counted(rank: int, case: Case, swap: str, traffic: _Traffic) -> _Counted:
    model = offload_case(case, Path(tempfile.gettempdir(), swap))
    optimizer = infinity.AdamW(model, lr=LR, max_grad_norm=case.max_norm)
    engine: Any = infinity.engine_of(model)
    for step in range(4):
        _all_early(engine)
        one_step(model, optimizer, rank, case, step)
        engine.store.pending.await_idle()
        if step == 1:
            traffic.forget()
        dist.barrier()
    state = sum(traffic.read[kind] for kind in STATE)
    read, written = traffic.read[StateKind.GRADIENTS], traffic.written[StateKind.GRADIENTS]
    found = read_weights(model)
    infinity.close(model)
    return _Counted(found, read, written, state)


def _train_each_way(rank: int, cases: list[Case]) -> list[tuple[_Counted, _Counted]]:
    """Of each case: with the memory that it has, and with sums that are written at once."""
    traffic, swaps, found = _Traffic(), map(str, itertools.count()), list[Any]()
    for case in cases:
        kept = _train_counted(rank, case, next(swaps), traffic)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SumsInBlocks, "may_stay", lambda _: False)
            found.append((kept, _train_counted(rank, case, next(swaps), traffic)))
    return found


def test_sums_that_have_memory_are_neither_written_nor_read() -> None:
    """Elsewhere they go to the drive. The bits are the same."""
    ample = [CASE, replace(CASE, accumulation=2), replace(CASE, max_norm=0.01)]
    short = replace(CASE, capacity="28MiB")
    for on_rank in run_ranks(2, _train_each_way, [*ample, short]):
        for case, (kept, written) in zip([*ample, short], on_rank, strict=True):
            assert (kept.written > 0) == (case is short) and kept.state > 0
            assert case is short or not kept.read
            assert written.written > 0
            assert not differences(kept.weights, written.weights)
