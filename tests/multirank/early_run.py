"""One rank's training whose early updates are made when a test lets them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity.distributed.shard_updates import ShardUpdates
from infinity.engine.engine import Engine
from infinity.streaming.updates.unit_update import UnitUpdate

from .models import batch, loss_of
from .work import LR, Case, Run, offload_case, one_step, read_weights

PATIENCE_S = 120.0


class EarlyStep(NamedTuple):
    """One step of a rank. `units`: those of which an early update had begun or was queued when the
    step decided. `num_kept`, `num_undone`: early updates that it has kept, and taken back."""

    units: frozenset[int]
    num_kept: float
    num_undone: float


class RankUpdates:
    """Early updates of one rank, made when a test lets them. `shards`: what chooses them; None where
    the engine makes none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        shards: Any = getattr(engine.updater, "deferred", None)
        self.shards = shards if shards is not None and shards.policy._nbytes else None

    def plan_all(self) -> None:
        """The next backward is to update every unit that it can."""
        self.shards.policy._num_wanted_steps = 0
        self.shards.policy.share = 1.0

    def await_early(self, *, is_complete: bool = True, but: Set[int] = frozenset()) -> None:
        """Lets the parts of all ranks come, and the updates that may begin be made. `but`: units
        whose sums lack a rank."""
        dist.barrier()
        if self.shards is not None:
            self.begin_early(within_s=PATIENCE_S if is_complete else 0.3, but=but)
            assert not (is_complete and self.shards._left.keys() - but)
            while self.shards._pending._early:
                self.shards._pending.check()
                time.sleep(0.001)
        dist.barrier()

    def begin_early(self, *, within_s: float, but: Set[int] = frozenset()) -> None:
        """Begins the updates whose parts come within this time, and waits for all but those of some
        units. Waits for no rank."""
        deadline_s = time.monotonic() + within_s
        while self.shards._left.keys() - but and time.monotonic() < deadline_s:
            with self.engine._lock:
                self._take_in()
                self.engine.updater.advance()
            time.sleep(0.001)

    def _take_in(self) -> None:
        """Takes in what the next gradient would, or the step."""
        gradients: Any = self.engine.gradients
        gradients.take_in()
        gradients._take_buckets()
        gradients.owned._take_in_copies()

    def counts(self) -> tuple[float, float]:
        counters = self.engine.counters.snapshot()
        return counters.get("early_updates_kept", 0), counters.get("early_updates_undone", 0)


def counted_updates() -> list[int]:
    """Counts the updates after a step that threads of this process make from now on."""
    updated, update = [0], ShardUpdates._update

    def counted(self: ShardUpdates, unit_update: UnitUpdate) -> None:
        update(self, unit_update)
        updated[0] += 1

    ShardUpdates._update = counted  # type: ignore[method-assign]
    return updated


class EarlyRun(RankUpdates):
    """One rank's training. `names` has the values that were seen, `early` the early updates that an
    event has kept and undone."""

    def __init__(self, rank: int, case: Case, directory: Path, **options: Any) -> None:
        self.rank, self.case = rank, case
        self.model = offload_case(case, directory / f"swap-{case.updates}", **options)
        super().__init__(infinity.engine_of(self.model))
        half = [list(self.model.blocks.parameters()), list(self.model.head.parameters())]
        self.optimizer = infinity.AdamW([{"params": params} for params in half], lr=LR)
        assert (self.shards is not None) == (case.updates == "both_passes")
        self.seed = 0
        self.values: dict[str, Any] = {}
        self.early: dict[str, tuple[float, float]] = {}

    def batch(self) -> Tensor:
        self.seed += 10
        return batch(self.seed + self.rank, self.model.width).to(getattr(torch, self.case.compute))

    def backward(self, skip: tuple[int, ...] = ()) -> None:
        loss_of(self.model, self.batch(), skip).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ready(self) -> None:
        """Two plain steps, after which every unit is updated early if it can be."""
        for _ in range(2):
            self.backward()
            self.step()
        if self.shards is not None:
            self.plan_all()

    def train(self, *, first: int = 0, but: Set[int] = frozenset()) -> tuple[Run, list[EarlyStep]]:
        """Trains as `train_model`. Steps from `first` on let early updates be made before they
        decide, see `await_early`; the result has these steps."""
        run, steps, units = Run(), list[EarlyStep](), set[int]()

        def before_step(*unused: Any) -> None:
            self.await_early(but=but)
            units.update(self.shards._early if self.shards is not None else ())

        self.optimizer.max_grad_norm = self.case.max_norm
        for step in range(self.case.steps):
            if step == first:
                self.optimizer.register_step_pre_hook(before_step)
            if step >= first and self.shards is not None:
                self.plan_all()
            before = self.counts()
            run.losses += one_step(self.model, self.optimizer, self.rank, self.case, step)
            if step >= first:
                kept, undone = (now - then for now, then in zip(self.counts(), before, strict=True))
                steps.append(EarlyStep(frozenset(units), kept, undone))
                units.clear()
        run.weights, run.counters = read_weights(self.model), self.engine.counters.snapshot()
        infinity.close(self.model)
        return run, steps

    @contextmanager
    def event(self, name: str, *, ends: bool = True) -> Iterator[None]:
        """Runs its block between a backward that has updated shards early and the step."""
        self.ready()
        self.backward()
        before = self.counts()
        self.await_early()
        yield
        if ends:
            self.step()
        self.values[name] = read_weights(self.model)
        self.early[name] = tuple(
            now - then for now, then in zip(self.counts(), before, strict=True)
        )
