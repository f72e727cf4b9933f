"""A rank of `infinity train` that is killed, or stopped, at any call through which ranks wait for
each other: every other rank ends soon and names it, and the run resumes to the same bits."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.exhaustive import sampled
from tests.support.forked import Script

from . import ladder
from .test_train import _table

COUNT = 3
TIME_LIMIT_S = 300.0  # torch's own waits end after 1,800.
TIMEOUT_S = 6  # Of a rank that does not come, and of one that says nothing.
# (call, rank that dies there): at the start, with values, in a step, in an evaluation, in a save.
MOMENTS = [
    ("0", 1),
    ("1 meet: peers", 2),
    ("1 a process group", 0),
    ("1 the model", 1),
    ("1 first values", 2),
    ("2 trainer: all_gather", 0),
    ("2 gather: gradient norms", 1),
    ("12 trainer: all_gather", 2),
    ("1 gather: step-00000002: files", 0),
    ("1 gather: the end of the run", 1),
]
STOPPED = [("1 a process group", 0), ("2 trainer: all_gather", 2), ("2 gather: the loss", 1)]
# The others are in `make exhaustive`.
KEPT = {"1 a process group", "2 trainer: all_gather", "1 gather: step-00000002: files"}


def make(directory: Path) -> None:
    """A run of three steps, each with a checkpoint, and two evaluations."""
    table = _table(directory, "out", 1, checkpoint={"every": 1})
    table["train"]["eval_every"] = 2
    table["distributed"] = {"timeout_s": TIMEOUT_S}
    (directory / "run.json").write_text(json.dumps(table))


def run(
    directory: Path, call: str, victim: int, number: int, *options: str
) -> dict[int, tuple[int, str]]:
    """(exit code, last line of stderr) of each rank but the one that dies, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (directory / "run.json", directory, port)
    ranks = {
        rank: Script(ladder.CODE, *words, rank, COUNT, victim, call, number, *options)
        for rank in range(COUNT)
    }
    found = {}
    try:
        for rank, script in ranks.items():
            if call == "-1" or rank != victim:
                _, errors = script.communicate()
                found[rank] = script.wait(), (errors.strip().splitlines() or [""])[-1]
    finally:
        for script in ranks.values():
            script.kill()
            script.wait()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], int]:
    """The weights of a run in which no rank dies, and how many calls a rank makes."""
    directory = tmp_path_factory.mktemp("whole")
    make(directory)
    assert run(directory, "-1", -1, 0) == dict.fromkeys(range(COUNT), (0, ""))
    calls = (directory / "calls-0").read_text().splitlines()
    return load_file(directory / "out" / "model.safetensors"), len(calls)


def check(directory: Path, call: str, victim: int, number: int, weights: dict[str, Tensor]) -> None:
    directory.mkdir(exist_ok=True)
    make(directory)
    outcomes = run(directory, call, victim, number)
    ended_s = time.monotonic() - float((directory / "death").read_text())
    assert ended_s < TIME_LIMIT_S
    for code, last in outcomes.values():
        assert code == 2 and re.match(rf"error: rank {victim}\b", last), (call, last)
        assert "--resume" in last
    assert run(directory, "-1", -1, 0, "--resume") == dict.fromkeys(range(COUNT), (0, ""))
    found = load_file(directory / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()), call


@pytest.mark.parametrize(("call", "victim"), sampled(MOMENTS, lambda moment: moment[0] in KEPT))
def test_a_rank_that_is_killed_is_named_by_all_others_and_the_run_resumes(
    call: str, victim: int, whole: tuple[dict[str, Tensor], int], tmp_path: Path
) -> None:
    check(tmp_path, call, victim, signal.SIGKILL, whole[0])


@pytest.mark.parametrize(("call", "victim"), sampled(STOPPED, lambda moment: moment[1] == 2))
def test_a_rank_that_is_stuck_is_named_by_all_others_and_the_run_resumes(
    call: str, victim: int, whole: tuple[dict[str, Tensor], int], tmp_path: Path
) -> None:
    check(tmp_path, call, victim, signal.SIGSTOP, whole[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("first", range(8))
def test_a_rank_may_end_at_any_call(
    first: int, number: int, whole: tuple[dict[str, Tensor], int], tmp_path: Path
) -> None:
    weights, num_calls = whole
    for call in range(first, num_calls, 8):
        check(tmp_path / str(call), str(call), call % COUNT, number, weights)
