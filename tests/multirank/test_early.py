"""Updates in the backward, over ranks: whatever comes before the step decides, all values are those
of updates after the step, and every rank sees old weights until then."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity.errors import StorageError
from infinity.state.store import LocalStore
from infinity.state.undecided import _LABEL as OLD_STATE
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate
from infinity.tiers.spare import SpareMemory
from tests.support.exhaustive import sampled

from .early_run import PATIENCE_S, EarlyRun
from .processes import Ranks, run_ranks
from .work import (
    LR,
    NVME,
    Case,
    assert_same_run,
    expected,
    read_weights,
    train_all,
)

STATE = dict.fromkeys(("parameters", "master", "moments"), "nvme")
ROOMY = "96MiB"
# All state on the host, and several chunks of it in a shard.
BESIDE = Case(3, simulated=True, exchange="one_sided", capacity=ROOMY, update_chunk="8KiB")


def _events(rank: int, case: Case, directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that may come between a backward and the step."""
    has_drive = "nvme" in case.placement.values()
    checkpoint = {"keep": 1} if has_drive else None  # Has its own generation.
    run = EarlyRun(rank, case, Path(directory), checkpoint=checkpoint)
    model, optimizer = run.model, run.optimizer
    with run.event("a plain step"):
        pass
    with run.event("clipping"):
        optimizer.max_grad_norm = 0.05
    optimizer.max_grad_norm = 1e6
    with run.event("a norm that clips nothing"):
        pass
    optimizer.max_grad_norm = None
    with run.event("a part that is clipped"):
        optimizer.clip_grad_norm_(0.01, parameters=model.head.parameters())
    with run.event("a call that clips nothing"):
        optimizer.clip_grad_norm_(1e6)
    with run.event("another rate"):
        optimizer.param_groups[0]["lr"] = LR / 3
    with run.event("a second backward of one rank"):
        if rank == 0:
            run.backward()
        run.await_early(is_complete=False)
    with run.event("an evaluation on one rank"):
        if rank == 0:
            with torch.no_grad():
                run.values["output"] = model(run.batch())
            run.values["old weights"] = read_weights(model)
    with run.event("a look at state on one rank"):
        if rank == 0:
            run.values["old moment"] = optimizer.state[model.head.weight]["exp_avg"].clone()
            run.values["old master"] = run.engine.read_parameter("blocks.1.0.weight", master=True)
    with run.event("no step", ends=False):
        optimizer.zero_grad()
    with run.event("a checkpoint and no step", ends=False):
        optimizer.zero_grad()
        infinity.checkpoint.save(f"{directory}/saved-{case.updates}", model, optimizer)
    with run.event("gradients of two backwards, no step", ends=False):
        pass
    run.backward()
    run.step()
    with (
        run.event("weights that are set"),
        infinity.gather(model.head, modify=True),
        torch.no_grad(),
    ):
        model.head.weight.mul_(0.5)
    with run.event("all state at rest on one rank"):
        if rank == 0:
            run.engine.flush()
    with run.event("a need for memory"):
        while run.engine.pool._reclaim(1 << 20):
            pass
    run.ready()
    run.backward(skip=(1,) if rank else ())  # Rank 1 leaves a block out.
    run.await_early(is_complete=False)
    run.step()
    run.ready()
    run.values["last"] = read_weights(model)
    run.backward()
    run.await_early()
    infinity.close(model)
    return run.values, run.early


@pytest.mark.parametrize(
    ("count", "case"),
    sampled(
        [
            (2, Case(3, NVME, compute="bfloat16", capacity=ROOMY)),
            (3, Case(3, STATE | {"gradients": "host"}, capacity=ROOMY)),
            (2, replace(BESIDE, compute="bfloat16")),
            (2, replace(BESIDE, placement={"parameters": "nvme"}, compute="bfloat16")),
            (2, Case(3, {"master": "nvme", "moments": "nvme"}, compute="bfloat16", capacity=ROOMY)),
        ],
        lambda job: job[0] == 3 or not job[1].placement,
    ),
    ids=["nvme", "gradients-on-host", "host", "state-on-host", "weights-on-host"],
)
def test_whatever_comes_before_the_step_has_the_values_of_updates_after_it(
    count: int, case: Case, tmp_path: Path
) -> None:
    wanted = run_ranks(count, _events, replace(case, updates="deferred"), str(tmp_path))
    found = run_ranks(count, _events, replace(case, updates="both_passes"), str(tmp_path))
    is_on_host = any(case.placement.get(kind, "host") == "host" for kind in STATE)
    kept, undone = dict.fromkeys(found[0][1], 0.0), dict.fromkeys(found[0][1], 0.0)
    for (values, early), (other, _) in zip(found, wanted, strict=True):
        assert values.keys() == other.keys()
        for name in values:
            _assert_equal(values[name], other[name], name)
        for name, (num_kept, num_undone) in early.items():
            kept[name], undone[name] = kept[name] + num_kept, undone[name] + num_undone
    all_kept = {
        "a plain step", "a norm that clips nothing", "a call that clips nothing",
        "an evaluation on one rank",
    }  # fmt: skip
    for name in kept:
        if name in all_kept:
            assert kept[name] and not undone[name], name
        elif name == "a look at state on one rank":
            assert kept[name], name
        elif name == "a part that is clipped":
            assert kept[name] and undone[name], name
        elif name == "a need for memory":
            # What is made gives memory back where it has some.
            assert bool(undone[name]) == is_on_host, name
        elif name == "gradients of two backwards, no step":
            assert not undone[name], name
        else:
            assert undone[name], name
    assert kept["all state at rest on one rank"], "the other ranks have kept theirs"


def _assert_equal(found: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            _assert_equal(found[name], value, f"{what}: {name}")
    else:
        assert torch.equal(found, wanted), what


@contextmanager
def _patched(owner: Any, name: str, around: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, around(getattr(owner, name)))
        yield


def _slowly(update: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*arguments: Any) -> Any:
        time.sleep(0.03)
        return update(*arguments)

    return slowly


def _failing(write: Callable[..., Any]) -> Callable[..., Any]:
    def failing(store: LocalStore, *arguments: Any, **options: Any) -> Any:
        if options.get("undecided") is not None:
            raise StorageError(5, operation="write", path="", offset_nbytes=0, nbytes=0)
        return write(store, *arguments, **options)

    return failing


def _under_way(rank: int, case: Case) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """The step decides while an early update runs."""
    run = EarlyRun(rank, case, Path(tempfile.gettempdir()))
    with _patched(ChunkUpdates, "_update", _slowly):
        for _ in range(3):
            run.ready()
            run.backward()
            while run.shards._left:
                with run.engine._lock:
                    run.engine.gradients.take_in()
                    run.engine.updater.advance()
            assert run.shards._pending._early, "an update runs, and others wait for it"
            run.step()
    found = read_weights(run.model), run.counts()
    run.engine.flush()
    while run.engine.pool._reclaim(1):
        pass
    assert OLD_STATE not in run.engine.pool.lent()
    infinity.close(run.model)
    return found


def _half_made(rank: int, case: Case) -> dict[str, Any]:
    """Rank 0 looks at all state, and rank 1 takes an update back, after the first of its chunks."""
    run, goes_on = EarlyRun(rank, case, Path(tempfile.gettempdir())), threading.Event()

    def stopping(update: Callable[..., Any]) -> Callable[..., Any]:
        def stop(chunks: ChunkUpdates, of_unit: UnitUpdate, *arguments: Any) -> Any:
            assert of_unit.num_done != 1 or goes_on.wait(PATIENCE_S)
            return update(chunks, of_unit, *arguments)

        return stop

    run.ready()
    run.engine.updater.apply_pending()
    with _patched(ChunkUpdates, "_update", stopping if run.shards else lambda update: update):
        run.backward()
        dist.barrier()
        if run.shards is not None:
            run.begin_early(within_s=PATIENCE_S)
            while not any(each.num_done == 1 for each in run.shards._early.values()):
                time.sleep(0.001)
        dist.barrier()
        found: dict[str, Any] = {}
        if rank == 0:
            goes_on.set()
            for name, parameter in run.model.named_parameters():
                if parameter.requires_grad:
                    found[f"master of {name}"] = run.engine.read_parameter(name, master=True)
                    found[f"moments of {name}"] = {
                        moment: run.optimizer.state[parameter][moment].clone()
                        for moment in ("exp_avg", "exp_avg_sq")
                    }
        dist.barrier()
        threading.Timer(0.2, goes_on.set).start()  # In the middle of `flush`.
        run.engine.flush()
        run.step()
    found["weights"] = read_weights(run.model)
    infinity.close(run.model)
    return found


@pytest.mark.parametrize(
    "placement", sampled([{}, {"moments": "nvme"}], bool), ids=["host", "mixed"]
)
def test_an_update_that_is_half_made_is_seen_by_nobody(placement: dict[str, str]) -> None:
    case = replace(BESIDE, placement=placement, compute="bfloat16")
    wanted, found = (
        run_ranks(2, _half_made, replace(case, updates=updates))
        for updates in ("deferred", "both_passes")
    )
    for on_rank, other in zip(found, wanted, strict=True):
        assert on_rank.keys() == other.keys()
        _assert_equal(on_rank, other, "half made")


def _cannot_write(rank: int, case: Case) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """No early update of rank 1 finds space for its writes, or for its old state on the host."""
    if rank and not case.placement:
        SpareMemory.unclaimed_nbytes = 0  # type: ignore[method-assign, assignment]
    run = EarlyRun(rank, case, Path(tempfile.gettempdir()))
    with _patched(LocalStore, "write", _failing if rank else lambda write: write):
        for number in range(3):
            with run.event(str(number)):
                pass
    kept, undone = (sum(of_event) for of_event in zip(*run.early.values(), strict=True))
    found = read_weights(run.model), (kept, undone)
    infinity.close(run.model)
    return found


def _plainly(rank: int, case: Case) -> tuple[dict[str, Tensor], tuple[float, float]]:
    run = EarlyRun(rank, case, Path(tempfile.gettempdir()))
    for _ in range(9):
        run.backward()
        run.step()
    found = read_weights(run.model), run.counts()
    infinity.close(run.model)
    return found


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            Case(3, NVME, capacity=ROOMY),
            replace(BESIDE, compute="bfloat16"),
            replace(BESIDE, placement={"moments": "nvme"}, compute="bfloat16"),
        ],
        lambda case: case.placement,
    ),
    ids=["nvme", "host", "mixed"],
)
def test_a_step_keeps_an_update_that_is_under_way_and_makes_one_that_failed(case: Case) -> None:
    case = replace(case, updates="both_passes")
    wanted = run_ranks(2, _plainly, replace(case, updates="deferred"))
    under_way, failed = run_ranks(2, _under_way, case), run_ranks(2, _cannot_write, case)
    for found in (under_way, failed):
        for (weights, _), (other, _) in zip(found, wanted, strict=True):
            _assert_equal(weights, other, "weights")
    assert all(kept and not undone for _, (kept, undone) in under_way)
    assert [bool(kept) for _, (kept, _) in failed] == [True, False]
    assert not any(undone for _, (_, undone) in failed)


def test_updates_in_the_backward_have_the_bits_of_plain_torch() -> None:
    case = Case(3, NVME, updates="both_passes", capacity=ROOMY, steps=6)
    cases = [
        replace(case, accumulation=2, skips=True, lazy_ranks=(1,)),
        replace(case, model="experts", compute="bfloat16", optimizer="lion"),
        replace(case, layer_major=True, accumulation=2),
        replace(case, simulated=True, exchange="collective"),
        replace(BESIDE, updates="both_passes", steps=6, compute="bfloat16", accumulation=2),
        replace(BESIDE, updates="both_passes", steps=6, max_norm=0.5, exchange="collective"),
        replace(BESIDE, updates="both_passes", steps=6, model="experts", optimizer="adam"),
    ]
    for rank, runs in enumerate(run_ranks(2, train_all, cases)):
        for each, found in zip(cases, runs, strict=True):
            assert_same_run(found, expected(each, 2)[rank], f"rank {rank}, {each}")


def _dies(rank: int, directory: str, case: Case, how: str) -> None:
    """Commits after each step; in an early update rank 1 dies, or its drive fails."""
    run = EarlyRun(rank, case, Path(directory), checkpoint={"durability": "step", "keep": 1})
    for _ in range(3):
        run.ready()
        run.backward()
        run.await_early()
        run.step()
        infinity.checkpoint.commit(run.model, run.optimizer)
    assert run.counts()[0] > 0

    def die(write: Callable[..., Any]) -> Callable[..., Any]:
        def dying(store: LocalStore, *arguments: Any, **options: Any) -> Any:
            if options.get("undecided") is not None:
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                run.engine.store.volume._write_failures.note(
                    StorageError(5, operation="write", path="", offset_nbytes=0, nbytes=0)
                )
            return write(store, *arguments, **options)

        return dying

    with _patched(LocalStore, "write", die if rank else lambda write: write):
        for _ in range(20):
            run.plan_all()
            run.backward()
            run.begin_early(within_s=1.0)
            run.step()


def _goes_on(rank: int, directory: str, case: Case, num_steps: int) -> dict[str, Tensor]:
    """So many steps, or those that are left after the last commit."""
    commits = f"{directory}/swap-both_passes/commits"
    resume = commits if os.path.exists(commits) else None
    section = {"durability": "step", "keep": 1}
    run = EarlyRun(rank, case, Path(directory), checkpoint=section, resume=resume)
    first = 0
    if resume is not None:
        first = infinity.checkpoint.load(resume, run.model, run.optimizer).step
        assert first == 9
    run.seed = 10 * first
    for _ in range(first, num_steps):
        run.backward()
        run.step()
    found = read_weights(run.model)
    infinity.close(run.model)
    return found


@pytest.mark.parametrize(
    ("how", "case"),
    sampled(
        [
            ("dies", Case(3, NVME, capacity=ROOMY)),
            ("fails", Case(3, NVME, capacity=ROOMY)),
            ("fails", replace(BESIDE, placement={"moments": "nvme"}, compute="bfloat16")),
        ],
        lambda job: job != ("fails", Case(3, NVME, capacity=ROOMY)),
    ),
    ids=["dies", "fails", "fails-mixed"],
)
def test_a_rank_that_ends_in_an_early_update_leaves_the_last_commit(
    how: str, case: Case, tmp_path: Path
) -> None:
    case = replace(case, updates="both_passes")
    with Ranks(2, _dies, str(tmp_path), case, how) as ranks:
        outcomes = ranks.outcomes({0} if how == "dies" else {0, 1})
    assert outcomes[0][1][0].startswith("RankError: rank 1 "), outcomes[0]
    if how == "fails":
        assert "StorageError" in outcomes[1][1][1], outcomes[1]
    found = run_ranks(2, _goes_on, str(tmp_path), case, 12)
    (tmp_path / "new").mkdir()
    wanted = run_ranks(2, _goes_on, str(tmp_path / "new"), case, 12)
    for rank in range(2):
        _assert_equal(found[rank], wanted[rank], "weights")
