"""Reads of updates in the backward fail on one rank: the update is not made, and who needs the bytes
next meets the cause."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity import api
from infinity.distributed.kept_shards import KeptShards
from infinity.distributed.pending import PendingShards
from infinity.engine.build import build
from infinity.errors import InfinityError
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from tests.fault.harness import EIO, Trap
from tests.support.bits import differences
from tests.support.exhaustive import sampled

from .early_run import EarlyRun
from .processes import run_ranks
from .work import NVME, Case, read_weights, read_when_needed

CASE = Case(
    3, NVME, compute="bfloat16", capacity="96MiB", update_chunk="8KiB", updates="both_passes"
)
VICTIM = 1
NUM_RUNGS = 32
COMMITS = {"durability": "step", "keep": 1}


class EarlyTrap(Trap):
    """A trap for reads of early updates alone. If it `stays`, so does the failure: the bytes of that
    read cannot be read any more."""

    def __init__(self, engine: StorageEngine, *, stays: bool) -> None:
        super().__init__(engine)
        self._stays = stays
        self._lost: list[Segment] = []
        self.pending: PendingShards | None = None  # None: no update is early.
        self.flips = False  # The read that fails ends well, with one bit that is wrong.
        self.is_for_ahead = False  # Instead: for reads before anybody needs them.
        self.is_ahead = False  # Such reads are being started.

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        if operation == "read" and any(map(self._is_lost, segments)):
            return self._fail(operation, segments)
        is_of_update = threading.current_thread().name == "infinity-updates"
        are_early = self.pending is not None and self.pending.are_resting
        if is_of_update and (self.is_ahead if self.is_for_ahead else are_early):
            return super().submit(operation, segments, priority)
        return self._engine.submit(operation, segments, priority)

    def _is_lost(self, segment: Segment) -> bool:
        return any(
            segment.file == lost.file
            and segment.offset_nbytes < lost.offset_nbytes + lost.nbytes
            and lost.offset_nbytes < segment.offset_nbytes + segment.nbytes
            for lost in self._lost
        )

    def _fail(self, operation: Operation, segments: Sequence[Segment]) -> Ticket:
        if self._stays:
            self._lost += segments
        failed = super()._fail(operation, segments)
        if not self.flips:
            return failed
        read = self._engine.submit(operation, segments, Priority.STATE)
        read.wait()
        last = segments[-1]
        byte = ctypes.c_ubyte.from_address(last.address + last.nbytes // 2)
        byte.value ^= 1
        return read


class TrappedRun(EarlyRun):
    """An `EarlyRun` on storage with a trap in it."""

    def __init__(self, *arguments: Any, stays: bool = False, **options: Any) -> None:
        traps: list[EarlyTrap] = []

        def wrap(engine: StorageEngine) -> StorageEngine:
            traps.append(EarlyTrap(engine, stays=stays))
            return traps[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "build", partial(build, wrap_storage=wrap))
            super().__init__(*arguments, **options)
        [self.trap] = traps
        self._made: dict[int, bool] = {}
        if self.shards is not None:
            self.trap.pending = self.shards._pending
            end_early = self.shards._pending.end_early

            def end(shard: int, *, is_made: bool) -> bool:
                self._made[shard] = is_made
                return bool(end_early(shard, is_made=is_made))

            self.shards._pending.end_early = end
            updates = self.engine.updater.deferred
            read_expected = updates._read_expected

            def read_ahead() -> None:
                self.trap.is_ahead = True
                read_expected()
                self.trap.is_ahead = False

            updates._read_expected = read_ahead

    def backward_with(self, nth: int) -> dict[int, bool]:
        """The backward of a step in which the `nth` read of early updates fails, on one rank.
        Returns which early updates had begun, by shard, and whether they were made."""
        self.engine.updater.apply_pending()
        self._made.clear()
        if self.shards is not None:
            self.plan_all()
            self.trap.set("read", nth if self.rank == VICTIM else 0, EIO)
        self.backward()
        self.await_early()
        return dict(self._made)


class Rung(NamedTuple):
    """`failed`: what a read was answered with. `made`: see `backward_with`."""

    failed: str | None
    made: dict[int, bool]
    num_kept: float
    num_undone: float


def _reads_fail_once(
    rank: int, case: Case, *, keeps: bool = True, flips: bool = False
) -> tuple[dict[str, Tensor], list[Rung]]:
    """A step for each read of the early updates of a backward, and the same again: which shard is
    updated first is that whose parts come first, so the reads of a shard are others in each step."""
    if not keeps:
        KeptShards.reserve = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    run, rungs = TrappedRun(rank, case, Path(tempfile.gettempdir())), list[Rung]()
    run.trap.flips = flips
    read_when_needed(run.engine)
    run.ready()
    nth = 1
    for _ in range(NUM_RUNGS):
        before = run.counts()
        made = run.backward_with(nth)
        error = run.trap.error
        nth = 1 if error is None else nth + 1
        run.step()
        kept, undone = (now - then for now, then in zip(run.counts(), before, strict=True))
        rungs.append(Rung(None if error is None else str(error), made, kept, undone))
    found = read_weights(run.model)
    infinity.close(run.model)
    return found, rungs


@pytest.mark.parametrize(
    ("keeps", "flips"),
    sampled([(True, False), (False, False), (True, True)], (True, True).__eq__),
    ids=["kept-weights", "weights-on-drives", "a-bit-flips"],
)
def test_an_early_update_whose_read_fails_once_is_made_after_the_step(
    keeps: bool, flips: bool
) -> None:
    """Also if its checksum tells that a page is not what was written."""
    wanted = run_ranks(2, _reads_fail_once, replace(CASE, updates="deferred"))
    found = run_ranks(2, partial(_reads_fail_once, keeps=keeps, flips=flips), CASE)
    for (weights, _), (other, _) in zip(found, wanted, strict=True):
        assert not differences(other, weights)
    (_, healthy), (_, rungs) = found
    for rung in healthy:
        assert rung.failed is None and all(rung.made.values()), rung
    of_failures = [rung for rung in rungs if rung.failed is not None]
    assert 14 < len(of_failures) < NUM_RUNGS, "each read has failed, and then none"
    for rung in rungs:
        num_made = sum(rung.made.values())
        assert len(rung.made) - num_made == (rung.failed is not None), rung
        assert (rung.num_kept, rung.num_undone) == (num_made, 0), rung
    not_made = {
        shard for rung in of_failures for shard, is_made in rung.made.items() if not is_made
    }
    assert not_made == rungs[-1].made.keys(), "reads of every early update have failed"


def _reads_fail_before_more_gradients(
    rank: int, case: Case, skips: bool
) -> tuple[dict[str, Tensor], int]:
    """A failed read, then another sum than the early update was to use: of one more backward, or of
    a step that is left out and made again. Returns the number of early updates that failed."""
    run, num_failed = TrappedRun(rank, case, Path(tempfile.gettempdir())), 0
    read_when_needed(run.engine)
    for nth in range(1, NUM_RUNGS, 2):
        run.ready()
        num_failed += list(run.backward_with(nth).values()).count(False)
        if skips:
            run.optimizer.zero_grad()
        run.backward()
        run.await_early(is_complete=False)
        run.step()
    found = read_weights(run.model)
    infinity.close(run.model)
    return found, num_failed


@pytest.mark.parametrize("skips", sampled([False, True], bool), ids=["one-more", "again"])
def test_an_update_after_a_failed_read_uses_the_gradients_of_its_step(skips: bool) -> None:
    train = partial(_reads_fail_before_more_gradients, skips=skips)
    wanted = run_ranks(2, train, replace(CASE, updates="deferred"))
    found = run_ranks(2, train, CASE)
    assert found[VICTIM][1] > 8, "few early updates have failed"
    for (weights, _), (other, _) in zip(found, wanted, strict=True):
        assert not differences(other, weights)


def _reads_ahead_fail_once(rank: int, case: Case) -> tuple[dict[str, Tensor], list[Rung]]:
    """A step for each read of state before its gradients."""
    run, rungs = TrappedRun(rank, case, Path(tempfile.gettempdir())), list[Rung]()
    run.ready()
    for nth in range(1, NUM_RUNGS + 1, 3):
        run.backward()
        run.await_early()
        before = run.counts()
        fails = rank == VICTIM and run.shards is not None
        run.trap.set("read", nth if fails else 0, EIO)
        run.trap.is_for_ahead = True
        run.step()
        run.engine.store.pending.await_idle()
        error = None if run.trap.error is None else str(run.trap.error)
        run.trap.set("read", 0, EIO)
        run.trap.is_for_ahead = False
        made = run.backward_with(0)
        run.step()
        kept, undone = (now - then for now, then in zip(run.counts(), before, strict=True))
        rungs.append(Rung(error, made, kept, undone))
    found = read_weights(run.model)
    infinity.close(run.model)
    return found, rungs


def test_a_read_before_the_gradients_that_fails_once_is_made_again_by_the_update() -> None:
    wanted = run_ranks(2, _reads_ahead_fail_once, replace(CASE, updates="deferred"))
    found = run_ranks(2, _reads_ahead_fail_once, CASE)
    for (weights, _), (other, _) in zip(found, wanted, strict=True):
        assert not differences(other, weights)
    (_, _), (_, rungs) = found
    assert sum(rung.failed is not None for rung in rungs) > 3, "few reads ahead have failed"
    for rung in rungs:
        assert rung.made and all(rung.made.values()) and not rung.num_undone, rung


class LostBytes(NamedTuple):
    """`error`: what ended the rank. `committed`: weights that the rank had resumed with. The rest is
    as in `Rung`."""

    error: str
    failed: str | None
    made: dict[int, bool]
    committed: dict[str, Tensor]


def _resumed(rank: int, directory: str) -> TrappedRun:
    commits = f"{directory}/swap-{CASE.updates}/commits"
    run = TrappedRun(rank, CASE, Path(directory), stays=True, checkpoint=COMMITS, resume=commits)
    assert infinity.checkpoint.load(commits, run.model, run.optimizer).step == 2
    read_when_needed(run.engine)
    return run


def _lose_bytes(rank: int, directory: str, nth: int) -> LostBytes:
    """Resumes, and loses the bytes of the `nth` read of early updates."""
    run = _resumed(rank, directory)
    committed = read_weights(run.model)
    run.ready()
    made = run.backward_with(nth)
    with pytest.raises(InfinityError) as caught:
        for _ in range(3):
            run.step()
            run.backward()
    failed = None if run.trap.error is None else str(run.trap.error)
    with contextlib.suppress(InfinityError):
        infinity.close(run.model)
    dist.barrier()
    return LostBytes(f"{type(caught.value).__name__}: {caught.value}", failed, made, committed)


def _commit_and_lose(
    rank: int, directory: str, nths: range
) -> tuple[list[dict[str, Tensor]], list[LostBytes]]:
    """Weights at the commit, those two steps later, and the same after the losses."""
    run = EarlyRun(rank, CASE, Path(directory), checkpoint=COMMITS)
    run.ready()
    infinity.checkpoint.commit(run.model, run.optimizer)
    weights = [read_weights(run.model)]
    run.ready()
    weights.append(read_weights(run.model))
    infinity.close(run.model)
    losses = [_lose_bytes(rank, directory, nth) for nth in nths]
    run = _resumed(rank, directory)
    run.seed = 20  # Of two steps.
    run.ready()
    weights.append(read_weights(run.model))
    infinity.close(run.model)
    return weights, losses


def test_bytes_that_early_updates_cannot_read_end_all_ranks_and_leave_the_last_commit(
    tmp_path: Path,
) -> None:
    nths = range(1, 12, 2)
    found = run_ranks(2, _commit_and_lose, str(tmp_path), nths)
    for (committed, later, again), losses in found:
        assert not differences(later, again) and differences(committed, later)
        for loss in losses:
            assert not differences(committed, loss.committed)
    (_, of_other), (_, of_victim) = found
    for other, victim in zip(of_other, of_victim, strict=True):
        assert victim.failed is not None and "[Errno 5] read of " in victim.failed
        assert victim.failed in victim.error and "update during training" in victim.error
        assert victim.failed in other.error and other.error.startswith("RankError: rank 1 ")
        assert list(victim.made.values()).count(False) == 1, "an early update was begun, not made"
        assert other.failed is None and other.made and all(other.made.values())
    assert len({victim.failed for victim in of_victim}) == len(nths), "other bytes each time"
