"""Updates in the backward while drives fail and processes die: nothing is lost, nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.run.commit import thaw_removed
from infinity.errors import InfinityError, StorageError
from infinity.streaming.updates.pending_beside import PendingBeside
from infinity.streaming.updates.updater import Updater
from infinity.testing.simulated_device import SimulatedDevice
from tests.parity.test_early_updates import (
    Clip,
    Run,
    config_of,
    drives,  # noqa: F401  (a fixture of every test)
    loss_of,
    make,
    plain_run,
    steps,
)
from tests.support.exhaustive import sampled
from tests.support.forked import run_script

from .harness import EIO, ENOSPC, assert_nothing_leaked, settle, trapped

EXPECTED_STEPS = 7
BEFORE = 4  # Steps after which early updates are the rule.


def unclipped(_: int) -> float | None:
    return None


def reference(clip: Clip = unclipped) -> list[torch.Tensor]:
    return plain_run(lambda run: steps(run, EXPECTED_STEPS, clip))[EXPECTED_STEPS:]


def ladder(part: int) -> list[int]:
    """The first rungs, and a part of the others: they fail in the middle of the same loop."""
    return [*range(1, 8), *range(8 + 9 * part, 120, 18)]


PARTS = sampled(range(2), lambda part: part == 0)


@pytest.fixture(params=sampled(["host", "worker"], "worker".__eq__))
def options(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Who updates early: the thread that trains, or a worker beside a device."""
    return lambda: {} if request.param == "host" else {"device": SimulatedDevice()}


def run_of(model: nn.Module) -> Run:
    return Run(model, infinity.AdamW(model, lr=1e-2), is_plain=False)


def values_of(run: Run) -> dict[str, torch.Tensor]:
    try:
        return run.values()
    except StorageError:  # One read fails; a look at the values may have asked for it.
        return run.values()


def go_on(run: Run, clip: Clip = unclipped) -> bool:
    """The steps that are left; the first one again if a read failed in it. Returns whether none
    did."""
    is_whole, first = True, BEFORE
    while first < EXPECTED_STEPS:
        try:
            steps(run, 1, clip, start=first)
        except StorageError as error:
            assert error.errno == EIO
            is_whole = False
            run.optimizer.zero_grad()
        first = run.optimizer.step_of(next(iter(run.optimizer._params.values())))
    return is_whole


def told_failures_of_writes(
    config: dict[str, Any],
    options: Callable[[], dict[str, Any]],
    code: int,
    part: int,
    clip: Clip = unclipped,
) -> int:
    """Fails the 1st, 2nd, ... write of two steps, until none fails. Returns how many failed; each
    has to be told by the end of the two steps."""
    failures = 0
    for rung in ladder(part):
        with trapped(make(), config, **options()) as (engine, trap):
            run = run_of(engine.model)
            steps(run, BEFORE, clip)
            engine.flush()
            trap.set("write", rung, code)
            with pytest.raises(InfinityError) as caught:
                for step in (BEFORE, BEFORE + 1):
                    steps(run, 1, clip, start=step)
                    engine.flush()
                assert trap.error is None, "a failed write was forgotten"
                raise StorageError(0, operation="none", path="", offset_nbytes=0, nbytes=0)
            if trap.error is None:
                break
            failures += 1
            cause = caught.value if isinstance(caught.value, StorageError) else None
            cause = cause or caught.value.__cause__
            assert isinstance(cause, StorageError) and cause.errno == code
            del caught
            settle(engine)
    return failures


@pytest.mark.parametrize("part", PARTS)
def test_each_read_that_fails_around_early_updates_is_told_or_made_again(
    swap_directory: Path, options: Callable[[], dict[str, Any]], part: int
) -> None:
    expected, failures, swallowed = reference(), 0, 0
    for rung in ladder(part):
        model = make()
        with trapped(model, config_of(swap_directory), **options()) as (engine, trap):
            run = run_of(model)
            steps(run, BEFORE)
            engine.flush()
            trap.set("read", rung, EIO)
            try:
                is_told = not go_on(run)
                actual = values_of(run)
            except InfinityError as torn:  # Between two chunks, after the step had decided.
                assert "halfway" in str(torn) and torn.__cause__ is not None
                failures += 1
                continue
            if trap.error is None:
                break
            failures += 1
            swallowed += not is_told
            assert_nothing_leaked(engine)
            for plain, ours in zip(expected, actual.values(), strict=True):
                assert torch.equal(plain, ours)
    assert failures > 6 and swallowed, "reads of early updates failed, too"


@pytest.mark.parametrize("code", sampled([EIO, ENOSPC], ENOSPC.__eq__))
@pytest.mark.parametrize("part", PARTS)
def test_no_write_that_fails_around_early_updates_is_forgotten(
    swap_directory: Path, code: int, options: Callable[[], dict[str, Any]], part: int
) -> None:
    assert told_failures_of_writes(config_of(swap_directory), options, code, part) > 10


KILLED = """
import os, signal, sys
from pathlib import Path
import infinity
from infinity.streaming.updates import unit_update
from tests.parity.test_early_updates import Run, config_of, idle_drives, make, steps

directory, die_at, num_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
section = {"directory": str(directory / "c"), "durability": "step", "keep": 1}
config = config_of(directory / "swap", checkpoint=section)
model = infinity.offload(make(), config)
run = Run(model, infinity.AdamW(model, lr=1e-2), is_plain=False)
first = 0
newest = sorted((directory / "swap" / "commits").glob("step-*")) if die_at == 0 else []
if newest:
    first = infinity.checkpoint.load(newest[-1], model, run.optimizer).step
real, updated = unit_update.ChunkUpdates.try_next, 0

def mortal(self, update, then, keep=None):
    def counted(error):
        global updated
        updated += 1
        if die_at and updated == die_at:
            print("early", updated, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        then(error)

    return real(self, update, counted, keep)

unit_update.ChunkUpdates.try_next = mortal
idle = idle_drives()
idle.__enter__()
for step in range(first, num_steps):
    steps(run, 1, start=step)
    infinity.checkpoint.commit(model, run.optimizer, step=step + 1)
print("first", first)
for name, value in run.values().items():
    print(name, value.double().sum().item().hex(), value.double().square().sum().item().hex())
"""


@pytest.mark.parametrize("die_at", [1, 7, 12])
def test_a_run_that_is_killed_in_an_early_update_goes_on_from_the_last_commit(
    tmp_path: Path, die_at: int
) -> None:
    killed = run_script(KILLED, tmp_path, die_at, EXPECTED_STEPS)
    assert killed.returncode < 0 and killed.stdout == f"early {die_at}\n", killed.stderr
    resumed = run_script(KILLED, tmp_path, 0, EXPECTED_STEPS)
    assert resumed.returncode == 0, resumed.stderr
    first, *lines = resumed.stdout.splitlines()
    assert int(first.split()[1]) >= 1, "it went on from a commit"
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(EXPECTED_STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lines == [
        f"{name} {value.double().sum().item().hex()} {value.double().square().sum().item().hex()}"
        for name, value in model.state_dict().items()
    ]


def both_sides(
    body: Callable[[Run], list[torch.Tensor]], config: dict[str, Any], options: dict[str, Any]
) -> dict[str, float]:
    """Runs `body` with plain PyTorch and offloaded; all values are the same. Returns counters."""
    expected = plain_run(body)
    model = infinity.offload(make(), config, **options)
    run = run_of(model)
    actual = [*body(run), *run.values().values()]
    counters = infinity.engine_of(model).counters.snapshot()
    infinity.close(model)
    assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
    return counters


def test_checkpoints_that_go_meanwhile_leave_the_old_state(
    swap_directory: Path, options: Callable[[], dict[str, Any]]
) -> None:
    """A thread that copies a checkpoint ends, and releases what removed checkpoints have held."""

    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, BEFORE)

        def release(_: torch.Tensor) -> None:
            if not run.is_plain:
                volume = infinity.engine_of(run.model).store.volume
                assert volume is not None and volume.frozen, "nothing was updated so far"
                thaw_removed(volume)

        def watch(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            output.register_hook(release)

        if not run.is_plain:  # All are updated early, those before the hook and those after it.
            infinity.engine_of(run.model).updater._early.policy.share = 1.0
        hook = run.model.get_submodule("blocks.1").register_forward_hook(watch)
        loss_of(run.model, BEFORE).backward()
        hook.remove()
        run.optimizer.param_groups[0]["lr"] = 1e-3  # Every early update is taken back.
        run.step()
        return [*losses, *steps(run, 2, start=BEFORE + 1)]

    counters = both_sides(body, config_of(swap_directory), options())
    assert counters["early_updates_undone"]


def test_a_step_whose_older_updates_fail_has_decided_nothing(
    swap_directory: Path, options: Callable[[], dict[str, Any]]
) -> None:
    """Units that the forward did not use still await the update of the step before."""
    failed = []
    real = Updater.bring_up_to_date

    def fail_once(updater: Updater, unit: int, **named: Any) -> None:
        if updater.is_pending(unit) and not failed:
            failed.append(unit)
            raise StorageError(EIO, operation="read", path="")
        real(updater, unit, **named)

    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, BEFORE)
        run.model.skipped = {1, 2, 3}
        loss_of(run.model, BEFORE).backward()
        if not run.is_plain:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Updater, "bring_up_to_date", fail_once)
                with pytest.raises(StorageError):
                    run.optimizer.step()
        run.step()
        run.model.skipped = set()
        return [*losses, *steps(run, 2, start=BEFORE + 1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingBeside, "turn_of", lambda *_: None)  # No worker makes pending updates.
        assert both_sides(body, config_of(swap_directory), options())["early_updates_kept"]
    assert failed, "no unit waited for its update"


def test_a_checkpoint_leaves_the_generation_of_updates_in_the_backward(
    swap_directory: Path, tmp_path: Path
) -> None:
    """Without `[checkpoint]` no generation is for links: the one of early updates is not either."""
    with trapped(make(), config_of(swap_directory)) as (engine, _):
        run = run_of(engine.model)
        steps(run, BEFORE)
        infinity.checkpoint.save(tmp_path / "checkpoints", engine.model, run.optimizer)
        assert engine.store.volume is not None and not engine.store.volume.frozen
        before = engine.counters.snapshot()["early_updates_kept"]
        steps(run, 3, start=BEFORE)
        assert engine.counters.snapshot()["early_updates_kept"] > before
