"""A swap directory as other processes see it: locked by a living one, free after a dead one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import SwapLockedError

from .harness import (
    assert_same,
    mlp,
    offload,
    offloaded_steps,
    plain_steps,
    swap_config,
    swap_files,
)

ROOT = Path(__file__).parents[2]

TRAINING = """
    import sys, torch
    sys.path.append({root!r})
    from tests.fault.harness import *
    torch.set_num_threads(1)
    model = mlp()
    engine = offload(model, swap_config(Path({swap!r}), host_nbytes="512KiB"))
    optimizer = optimizer_of(model)
    step = 0
    while True:
        offloaded_step(model, optimizer, step)
        step += 1
        print(step, flush=True)
"""


@pytest.fixture
def training(swap_directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that trains, until it is killed, and has made its first steps."""
    script = textwrap.dedent(TRAINING).format(root=str(ROOT), swap=str(swap_directory))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for _ in range(3):
            assert process.stdout.readline().strip().isdigit()
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_killed_training_leaves_a_directory_that_can_be_used_again(
    training: subprocess.Popen[str], swap_directory: Path
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
