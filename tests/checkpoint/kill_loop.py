"""A run that is killed again and again: started by test_kills.py in a process of its own.

The process imports torch once and forks a child for every life of the run, so that a life costs
little more than its training. A life goes on from the newest checkpoint and is killed by SIGKILL:
every other one from outside, a random time after a few steps, the others by themselves at the nth
effect on files.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.safetensors_format import tensor_bytes
from infinity.checkpoint.state_directory import list_checkpoints
from tests.checkpoint.harness import run

STEPS = 100
EVERY = 2
EFFECTS = ("pwrite", "write", "fsync", "rename", "replace", "unlink", "rmdir")


def begin(directory: Path) -> None:
    """The state before the first step: what a life goes on from that finds no checkpoint."""
    with run("bf16", directory / "swap") as each:
        each.save(directory / "begin")


def live(directory: Path, life: int, die_at_effect: int) -> None:
    """To the last step, unless it is killed. Placement and mode differ from life to life."""
    options: dict[str, Any] = [
        {},
        {"placement": "host", "host_nbytes": "16MiB"},
        {"updates": "at_step", "prefetch": False},
    ][life % 3]
    checkpoints = directory / "checkpoints"
    with run("bf16", directory / "swap", seed=life, **options) as each:
        newest = checkpoints if list_checkpoints(checkpoints) else directory / "begin"
        first = each.load(newest).step
        die_at(die_at_effect)
        for step in range(first, STEPS):
            outcome = each.step(step)
            with (directory / "outcomes").open("a") as log:
                log.write(json.dumps([step, *outcome]) + "\n")
            if (step + 1) % EVERY == 0:
                each.save(checkpoints, keep=2)
        digest = hashlib.sha256()
        for value in each.state().values():
            digest.update(tensor_bytes(value.contiguous()))
        (directory / "final").write_text(digest.hexdigest())


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


def await_steps(directory: Path, count: int) -> None:
    """Until so many more steps were taken than now."""
    log = directory / "outcomes"

    def taken() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    goal = taken() + count
    while taken() < goal:
        time.sleep(0.002)


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


def main(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    _, status = os.waitpid(fork(begin, directory), 0)
    assert status == 0
    drawn = random.Random(seed)
    checkpoints = directory / "checkpoints"
    report: dict[str, Any] = {"killed": 0, "in_checkpoint": 0, "lives": 0}
    while not (directory / "final").exists():
        life = report["lives"]
        is_last = report["killed"] == kills
        by_itself = life % 2 == 1 and not is_last
        child = fork(live, directory, life, drawn.randint(1, 200) if by_itself else 0)
        if not by_itself and not is_last:
            await_steps(directory, drawn.randint(0, 5))
            time.sleep(drawn.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        report["lives"] += 1
        report["killed"] += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"life {life} failed"
        if checkpoints.exists():
            report["in_checkpoint"] += any(name[0] == "." for name in os.listdir(checkpoints))
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
