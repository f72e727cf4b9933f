"""A swap directory as other processes see it: locked by a living one, free after a dead one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import SwapLockedError
from tests.support.bits import assert_same
from tests.support.forked import Script, wait_until

from .harness import (
    mlp,
    offload,
    offloaded_steps,
    plain_steps,
    swap_config,
    swap_files,
)

TRAINING = """
import sys, torch
from tests.fault.harness import *

torch.set_num_threads(1)
model = mlp()
engine = offload(model, swap_config(Path(sys.argv[1]), host_nbytes="512KiB"))
optimizer = optimizer_of(model)
step = 0
while True:
    offloaded_step(model, optimizer, step)
    step += 1
    print(step, flush=True)
"""


@pytest.fixture
def training(swap_directory: Path) -> Iterator[Script]:
    """A process that trains, until it is killed, and has made its first steps."""
    process = Script(TRAINING, swap_directory)
    try:
        wait_until(lambda: "3\n" in process.stdout.read_text(), process)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_training_leaves_a_directory_that_can_be_used_again(
    training: Script, swap_directory: Path
) -> None:
    with pytest.raises(SwapLockedError) as refused:
        offload(mlp(), swap_config(swap_directory))
    assert refused.value.pid == training.pid and str(training.pid) in str(refused.value)
    (left,) = swap_files(swap_directory)

    training.send_signal(signal.SIGKILL)
    training.wait()
    foreign = swap_directory / "notes.txt"
    foreign.write_text("mine")
    model = mlp()
    with offload(model, swap_config(swap_directory)):
        assert left not in swap_files(swap_directory), "what a dead process left is removed"
        assert_same(plain_steps(mlp(), 2), offloaded_steps(model, 2))
    assert swap_files(swap_directory) == ["notes.txt"]
    assert foreign.read_text() == "mine"


def test_two_models_in_one_process_need_directories_of_their_own(swap_directory: Path) -> None:
    with offload(mlp(), swap_config(swap_directory)):
        with pytest.raises(SwapLockedError) as refused:
            offload(mlp(), swap_config(swap_directory))
        assert refused.value.pid == os.getpid()
    with offload(mlp(), swap_config(swap_directory)):
        pass
