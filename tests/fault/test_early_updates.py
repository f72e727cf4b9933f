"""Updates in the backward while drives fail and processes die: nothing is lost, nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.run.links import thaw_removed
from infinity.errors import InfinityError, StorageError
from infinity.streaming.updates.turns import UpdateTurns
from infinity.streaming.updates.updater import Updater
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.exhaustive import sampled
from tests.support.forked import run_script
from tests.support.two_sides import (
    Clip,
    Side,
    compare,
    config_of,
    idle_drives,
    make,
    offloaded,
    plain_run,
    same_bits,
    steps,
)

from .harness import EIO, ENOSPC, assert_nothing_leaked, settle, trapped


@pytest.fixture(autouse=True)
def drives() -> Iterator[None]:
    with idle_drives():
        yield


EXPECTED_STEPS = 7
BEFORE = 4  # Steps after which early updates are the rule.


def unclipped(_: int) -> float | None:
    return None


def clipped(_: int) -> float:
    return 1e-3


# When state is on its way: updated in the backward; or in the forward, from where it waits in spare
# memory, and is read for the next step in the backward.
WAYS: dict[str, Clip] = {"both_passes": unclipped, "deferred": clipped}
# Who updates: the thread that trains, or a worker beside a device.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "host": dict,
    "worker": lambda: {"device": SimulatedDevice()},
}
KEPT = {("both_passes", "worker"), ("deferred", "host")}


def ladder(part: int) -> list[int]:
    """The first rungs, and a part of the others: they fail in the middle of the same loop."""
    return [*range(1, 8, 2), *range(8 + 9 * part, 120, 36)]


def config_for(updates: str, directory: Path, **changes: Any) -> dict[str, Any]:
    return config_of(directory, schedule={"updates": updates}, **changes)


def run_of(model: nn.Module) -> Side:
    return Side(model, infinity.AdamW(model, lr=1e-2))


def values_of(run: Side) -> list[torch.Tensor]:
    try:
        return [*run.values().values()]
    except StorageError:  # One read fails; a look at the values may have asked for it.
        return [*run.values().values()]


def go_on(run: Side, clip: Clip) -> bool:
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


CASES = list(product(WAYS, OPTIONS, range(4)))


@pytest.mark.parametrize(
    ("updates", "who", "part"), sampled(CASES, lambda case: case[:2] in KEPT and not case[2])
)
def test_each_read_of_state_on_its_way_that_fails_is_told_or_made_again(
    swap_directory: Path, updates: str, who: str, part: int
) -> None:
    clip, failures, swallowed = WAYS[updates], 0, 0
    expected = plain_run(lambda run: steps(run, EXPECTED_STEPS, clip))[EXPECTED_STEPS:]
    for rung in ladder(part):
        config = config_for(updates, swap_directory)
        with trapped(make(), config, **OPTIONS[who]()) as (engine, trap):
            run = run_of(engine.model)
            steps(run, BEFORE, clip)
            engine.flush()
            trap.set("read", rung, EIO)
            try:
                is_told = not go_on(run, clip)
                actual = values_of(run)
            except (
                InfinityError
            ) as torn:  # Between two chunks of a unit, after the step's decision.
                assert "halfway" in str(torn) and torn.__cause__ is not None
                failures += 1
                continue
            if trap.error is None:
                break
            failures += 1
            swallowed += not is_told
            if updates == "deferred":
                assert engine.counters.snapshot()["chunks_read_in_backward"] > 0
            assert_nothing_leaked(engine)
            assert same_bits(expected, actual)
    assert failures > 4 and (swallowed or updates == "deferred"), "reads in the backward fail, too"


@pytest.mark.parametrize(
    ("updates", "who", "part", "code"),
    sampled(
        [(*case, code) for case in CASES for code in (EIO, ENOSPC)],
        lambda case: case[:2] in KEPT and not case[2] and case[3] == ENOSPC,
    ),
)
def test_no_write_of_state_on_its_way_that_fails_is_forgotten(
    swap_directory: Path, updates: str, who: str, part: int, code: int
) -> None:
    """The 1st, 2nd, ... write of two steps fails; each has to be told by the end of the two."""
    clip, failures = WAYS[updates], 0
    for rung in ladder(part):
        config = config_for(updates, swap_directory)
        with trapped(make(), config, **OPTIONS[who]()) as (engine, trap):
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
    assert failures > 5


KILLED = """
import os, signal, sys
from contextlib import nullcontext
from pathlib import Path
import infinity
from infinity.streaming.updates import staging_ring, unit_update
from tests.fault.test_early_updates import WAYS, config_for, run_of, value_lines
from tests.support.two_sides import idle_drives, make, steps

directory, updates = Path(sys.argv[1]), sys.argv[2]
die_at, num_steps = int(sys.argv[3]), int(sys.argv[4])
commits = updates == "both_passes"
saved = directory / ("swap/commits" if commits else "c")
durability = "step" if commits else "checkpoint"
section = {"directory": str(directory / "c"), "durability": durability, "keep": 1}
model = infinity.offload(make(), config_for(updates, directory / "swap", checkpoint=section))
run, first = run_of(model), 0
if die_at == 0 and any(saved.glob("step-*")):
    first = infinity.checkpoint.load(saved, model, run.optimizer).step
updated = 0

def count(more):
    global updated
    updated += more
    if die_at and updated == die_at:
        print("died at", updated, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if commits:
    try_next = unit_update.ChunkUpdates.try_next
    def mortal(self, update, then):
        return try_next(self, update, lambda error: (count(1), then(error)))
    unit_update.ChunkUpdates.try_next = mortal
else:
    write_back = staging_ring.StagingRing.write_back
    def mortal(self, staged):
        write_back(self, staged)
        count(staged.slot.spare is not None)
    staging_ring.StagingRing.write_back = mortal
with idle_drives() if commits else nullcontext():
    for step in range(first, num_steps):
        steps(run, 1, WAYS[updates], start=step)
        if commits:
            infinity.checkpoint.commit(model, run.optimizer, step=step + 1)
        elif step % 2:
            infinity.checkpoint.save(saved, model, run.optimizer, step=step + 1)
print("first", first)
print(*value_lines(run.values().values()), sep="\\n")
"""


def value_lines(values: Iterable[torch.Tensor]) -> list[str]:
    wide = [value.double() for value in values]
    return [f"{v.sum().item().hex()} {v.square().sum().item().hex()}" for v in wide]


@pytest.mark.parametrize(
    ("updates", "die_at"),
    [*product(["both_passes"], [1, 12]), *product(["deferred"], [9, 41])],
)
def test_a_run_that_is_killed_with_state_on_its_way_goes_on_from_what_was_saved_last(
    tmp_path: Path, updates: str, die_at: int
) -> None:
    killed = run_script(KILLED, tmp_path, updates, die_at, EXPECTED_STEPS)
    assert killed.returncode < 0 and killed.stdout == f"died at {die_at}\n", killed.stderr
    resumed = run_script(KILLED, tmp_path, updates, 0, EXPECTED_STEPS)
    assert resumed.returncode == 0, resumed.stderr
    first, *lines = resumed.stdout.splitlines()
    least = 1 if updates == "both_passes" else (die_at > 9) * 2
    assert int(first.split()[1]) >= least, "it went on from what was saved"
    expected = plain_run(lambda run: steps(run, EXPECTED_STEPS, WAYS[updates]))
    assert lines == value_lines(expected[EXPECTED_STEPS:])


@pytest.mark.parametrize("who", sampled(OPTIONS, "worker".__eq__))
def test_checkpoints_that_go_meanwhile_leave_the_old_state(swap_directory: Path, who: str) -> None:
    """A thread that copies a checkpoint ends, and releases what removed checkpoints have held."""

    def body(run: Side) -> list[torch.Tensor]:
        losses = steps(run, BEFORE)

        def release(_: torch.Tensor) -> None:
            if not run.is_plain:
                engine = infinity.engine_of(run.model)
                assert engine.updater._turns._undecided.contents, "nothing was updated so far"
                thaw_removed(engine.store.volume)

        def watch(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            output.register_hook(release)

        if not run.is_plain:  # All are updated early, those before the hook and those after it.
            infinity.engine_of(run.model).updater._turns.policy.share = 1.0
        hook = run.model.get_submodule("blocks.1").register_forward_hook(watch)
        run.backward(BEFORE)
        hook.remove()
        run.optimizer.param_groups[0]["lr"] = 1e-3  # Every early update is taken back.
        run.step()
        return [*losses, *steps(run, 2, start=BEFORE + 1)]

    run = offloaded(swap_directory, **OPTIONS[who]())
    assert compare(body, run)["early_updates_undone"]


@pytest.mark.parametrize("who", sampled(OPTIONS, "worker".__eq__))
def test_a_step_whose_older_updates_fail_has_decided_nothing(
    swap_directory: Path, who: str
) -> None:
    """Units that the forward did not use still await the update of the step before."""
    failed = []
    real = Updater.bring_up_to_date

    def fail_once(updater: Updater, unit: int, **named: Any) -> None:
        if updater.is_pending(unit) and not failed:
            failed.append(unit)
            raise StorageError(EIO, operation="read", path="")
        real(updater, unit, **named)

    def body(run: Side) -> list[torch.Tensor]:
        losses = steps(run, BEFORE)
        run.model.skipped = {1, 2, 3}
        run.backward(BEFORE)
        if not run.is_plain:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Updater, "bring_up_to_date", fail_once)
                with pytest.raises(StorageError):
                    run.optimizer.step()
        run.step()
        run.model.skipped = set()
        return [*losses, *steps(run, 2, start=BEFORE + 1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateTurns, "_turn_of", lambda *_: None)  # No worker makes pending updates.
        run = offloaded(swap_directory, **OPTIONS[who]())
        assert compare(body, run)["early_updates_kept"]
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
