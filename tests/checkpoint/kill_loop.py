"""A run that is killed again and again: started by test_kills.py in a process of its own.

The process forks a child for every life of the run, so that a life costs little more than its
training. A life goes on from the newest checkpoint and is killed by SIGKILL: every other one from
outside, a random time after a few steps, the others by themselves at the nth effect on files. None
but the last takes more than its share of the steps, however late its end comes. Checkpoints are
copies, or "linked": then every step is committed as well, and a checkpoint is written at every other
one. "early" is "linked" with updates in the backward, and lives that end by themselves do so behind
the nth chunk of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.checkpoint.huggingface.safetensors_file import tensor_bytes
from infinity.checkpoint.run.directory import list_checkpoints, step_of
from infinity.observe import Counters
from infinity.streaming.updates.policy import EarlyPolicy
from infinity.streaming.updates.turns import UpdateTurns
from infinity.streaming.updates.unit_update import UnitUpdate
from tests.checkpoint.harness import EARLY, durable, run
from tests.checkpoint.test_copy import save
from tests.support.file_systems import seem_elsewhere
from tests.support.two_sides import idle_drives

EVERY = 2
# The most effects, or chunks, behind which a life ends.
EFFECTS_OF_A_SHARE = {"copied": 200, "linked": 60, "early": 12}
EFFECTS = ("pwrite", "write", "fsync", "link", "rename", "replace", "unlink", "rmdir")


def begin(directory: Path) -> None:
    """The state before the first step: what a life goes on from that finds no checkpoint."""
    with run("bf16", directory / "swap") as each:
        each.save(directory / "begin")


def live(
    directory: Path, mode: str, steps: int, life: int, share: int | None, die_at_effect: int
) -> None:
    """`share` steps, and then it waits to be killed; or to the last step. Placement and mode differ
    from life to life."""
    options: dict[str, Any] = [
        {},
        {"placement": "host", "host_nbytes": "16MiB"},
        {"updates": "at_step", "prefetch": False},
    ][life % 3]
    if mode == "early":  # The first life, which is all of a run without kills, defers its updates.
        roomy = {"host_nbytes": "16MiB"}
        options = roomy | (EARLY if life % 4 else {"max_norm": EARLY["max_norm"]})
    checkpoints, swap = directory / "checkpoints", directory / "swap"
    is_linked = mode in ("linked", "early")
    if is_linked:
        options["checkpoint"] = durable(checkpoints, durability="step", keep=2)
    if mode == "linked" and life % 4 >= 2:  # Checkpoints are copied, as to another file system.
        seem_elsewhere(checkpoints)
    places = [swap / "commits", swap / "copying", checkpoints]
    there = sorted((path for place in places for path in list_checkpoints(place)), key=step_of)
    newest = there[-1] if there else directory / "begin"
    before = set((directory / "swap").glob("*.swap"))
    with run("bf16", directory / "swap", seed=life, resume=newest, **options) as each:
        if before & set((directory / "swap").glob("*.swap")):
            with (directory / "adopted").open("a") as log:
                log.write(f"{life}\n")
        first = each.load(newest).step
        assert first >= committed(directory), f"{newest}, after {committed(directory)}"
        if mode == "early":
            die_in_early_update(die_at_effect, directory, infinity.engine_of(each.model).counters)
        else:
            die_at(die_at_effect)
        for step in range(first, steps if share is None else first + share):
            outcome = each.step(step)
            with (directory / "outcomes").open("a") as log:
                log.write(json.dumps([step, *outcome]) + "\n")
            if (step + 1) % EVERY == 0:
                save(each, checkpoints, keep=2)
            elif is_linked:
                each.commit()
            if is_linked or (step + 1) % EVERY == 0:
                note_committed(directory, step + 1)
        if share is not None:
            if die_at_effect:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        digest = hashlib.sha256()
        for value in each.state().values():
            digest.update(tensor_bytes(value.contiguous()))
        (directory / "final").write_text(digest.hexdigest())


def note_committed(directory: Path, step: int) -> None:
    fd = os.open(directory / "committed", os.O_WRONLY | os.O_CREAT)
    try:
        REAL_PWRITE(fd, f"{step:08d}".encode(), 0)
    finally:
        os.close(fd)


def committed(directory: Path) -> int:
    """The last step whose commit or save has returned."""
    path = directory / "committed"
    return int(path.read_text() or 0) if path.exists() else 0


REAL_PWRITE = os.pwrite


def die_at(effect: int) -> None:
    """SIGKILL before the nth effect on files from now; 0 is never."""
    left = effect

    def mortal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in EFFECTS:
        setattr(os, name, mortal(getattr(os, name)))


def die_in_early_update(nth: int, directory: Path, counters: Counters) -> None:
    """SIGKILL behind the nth chunk that an early update has changed; 0 is never. Notes before it how
    many early updates this life has kept."""
    left, real = nth, UpdateTurns._end_chunk

    def mortal(turns: UpdateTurns, update: UnitUpdate, error: BaseException | None) -> None:
        nonlocal left
        left -= update.unit.index not in turns.pending
        if left == 0 and nth:
            with (directory / "in_early_updates").open("a") as log:
                log.write(f"{counters.snapshot().get('early_updates_kept', 0):.0f}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        real(turns, update, error)

    UpdateTurns._end_chunk = mortal  # type: ignore[method-assign]
    idle_drives().__enter__()  # The process ends with it.
    # On a busy machine the policy would leave ever more units to the step, until none is early.
    EarlyPolicy._adapt = lambda *_: None  # type: ignore[method-assign]


def num_steps(directory: Path) -> int:
    """Steps that were taken, in all lives."""
    log = directory / "outcomes"
    return len(log.read_text().splitlines()) if log.exists() else 0


def is_alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def fork(work: Callable[..., None], *arguments: Any) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(directory: Path, mode: str, steps: int, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    _, status = os.waitpid(fork(begin, directory), 0)
    assert status == 0
    drawn = random.Random(seed)
    most = steps // (kills + 1)  # So that there is something left for every life.
    checkpoints = directory / "checkpoints"
    report: dict[str, Any] = {"killed": 0, "in_checkpoint": 0, "lives": 0}
    while not (directory / "final").exists():
        life = report["lives"]
        is_last = report["killed"] == kills
        by_itself = life % 2 == 1 and not is_last
        effect = drawn.randint(1, EFFECTS_OF_A_SHARE[mode]) if by_itself else 0
        goal = num_steps(directory) + drawn.randint(0, most)
        child = fork(live, directory, mode, steps, life, None if is_last else most, effect)
        if not by_itself and not is_last:
            while num_steps(directory) < goal and is_alive(child):
                time.sleep(0.002)
            time.sleep(drawn.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        report["lives"] += 1
        report["killed"] += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"life {life} failed"
        swap = directory / "swap"
        for place in (checkpoints, swap / "commits", swap / "copying"):
            if place.exists():
                report["in_checkpoint"] += any(name[0] == "." for name in os.listdir(place))
    adopted = directory / "adopted"
    report["adopted"] = len(adopted.read_text().splitlines()) if adopted.exists() else 0
    return report
