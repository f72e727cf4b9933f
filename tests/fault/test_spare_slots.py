"""State that waits in spare memory, and state read for the next step, while drives fail and
processes die: nothing is lost, nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.errors import InfinityError
from infinity.testing.simulated_device import SimulatedDevice
from tests.parity.test_early_updates import config_of, loss_of, make, steps
from tests.support.exhaustive import sampled
from tests.support.forked import run_script

from .harness import EIO, ENOSPC, assert_nothing_leaked, trapped
from .test_early_updates import (
    BEFORE,
    EXPECTED_STEPS,
    PARTS,
    go_on,
    ladder,
    reference,
    run_of,
    told_failures_of_writes,
    values_of,
)

# Who updates: the thread that trains, or a worker beside a device.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "host": dict,
    "worker": lambda: {"device": SimulatedDevice()},
}
# The worker fails in `make test` with early updates (test_early_updates.py).
WHO = sampled(OPTIONS, "host".__eq__)


def clipped(_: int) -> float:
    return 1e-3


def config_here(directory: Path, **changes: Any) -> dict[str, Any]:
    return config_of(directory, schedule={"updates": "deferred"}, **changes)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("who", WHO)
def test_each_read_for_the_next_step_that_fails_is_told_or_made_again(
    swap_directory: Path, who: str, part: int
) -> None:
    expected, failures = reference(clipped), 0
    for rung in ladder(part):
        with trapped(make(), config_here(swap_directory), **OPTIONS[who]()) as (engine, trap):
            run = run_of(engine.model)
            steps(run, BEFORE, clipped)
            engine.flush()
            trap.set("read", rung, EIO)
            try:
                go_on(run, clipped)  # The step in which a read failed is made again.
                actual = values_of(run)
            except InfinityError as torn:  # Between two chunks of a unit.
                assert "halfway" in str(torn) and torn.__cause__ is not None
                failures += 1
                continue
            if trap.error is None:
                break
            failures += 1
            assert engine.counters.snapshot()["chunks_read_in_backward"] > 0
            assert_nothing_leaked(engine)
            assert all(map(torch.equal, expected, actual.values()))
    assert failures > 10


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("code", sampled([EIO, ENOSPC], ENOSPC.__eq__))
@pytest.mark.parametrize("who", WHO)
def test_no_write_of_state_that_waited_is_forgotten_if_it_fails(
    swap_directory: Path, code: int, who: str, part: int
) -> None:
    config = config_here(swap_directory)
    assert told_failures_of_writes(config, OPTIONS[who], code, part, clipped) > 10


KILLED = """
import os, signal, sys
from pathlib import Path
import infinity
from infinity.streaming.updates import staging_ring
from tests.fault.test_spare_slots import clipped, config_here
from tests.parity.test_early_updates import Run, make, steps

directory, die_at, num_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
section = {"directory": str(directory / "c"), "durability": "checkpoint", "keep": 1}
config = config_here(directory / "swap", checkpoint=section)
model = infinity.offload(make(), config)
run = Run(model, infinity.AdamW(model, lr=1e-2), is_plain=False)
first = 0
if die_at == 0 and any((directory / "c").glob("step-*")):
    first = infinity.checkpoint.load(directory / "c", model, run.optimizer).step
real, written = staging_ring.StagingRing.write_back, 0

def mortal(self, staged):
    global written
    real(self, staged)
    written += staged.slot.spare is not None
    if die_at and written == die_at:
        print("spare", written, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

staging_ring.StagingRing.write_back = mortal
for step in range(first, num_steps):
    steps(run, 1, clipped, start=step)
    if step % 2:
        infinity.checkpoint.save(directory / "c", model, run.optimizer, step=step + 1)
print("first", first)
for name, value in run.values().items():
    print(name, value.double().sum().item().hex(), value.double().square().sum().item().hex())
"""


@pytest.mark.parametrize("die_at", [9, 30, 41])
def test_a_run_that_is_killed_while_state_waits_goes_on_from_the_last_checkpoint(
    tmp_path: Path, die_at: int
) -> None:
    killed = run_script(KILLED, tmp_path, die_at, EXPECTED_STEPS)
    assert killed.returncode < 0 and killed.stdout == f"spare {die_at}\n", killed.stderr
    resumed = run_script(KILLED, tmp_path, 0, EXPECTED_STEPS)
    assert resumed.returncode == 0, resumed.stderr
    first, *lines = resumed.stdout.splitlines()
    assert int(first.split()[1]) >= (die_at > 9) * 2, "it went on from a checkpoint"
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(EXPECTED_STEPS):
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipped(step))
        optimizer.step()
        optimizer.zero_grad()
    assert lines == [
        f"{name} {value.double().sum().item().hex()} {value.double().square().sum().item().hex()}"
        for name, value in model.state_dict().items()
    ]
