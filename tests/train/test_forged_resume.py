"""`infinity train --resume` over a checkpoint whose small state was forged, or cannot be read."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from infinity.config import SwapConfig
from infinity.errors import CorruptionError
from infinity.tools.training import program
from infinity.tools.training.checkpoints import TRAINER_STATE
from tests.support.damaged import replace_file

from .jobs import CONFIG, write_job

RUN = """steps = {}
[checkpoint]
every = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job(tmp_path_factory.mktemp("job"), CONFIG + RUN.format(2))
    train(directory)
    (directory / "job.toml").write_text(CONFIG + RUN.format(4))
    return directory


@pytest.fixture
def job(trained: Path, tmp_path: Path) -> Path:
    """A run of two steps with a checkpoint of each, which may go on to four."""
    return Path(shutil.copytree(trained, tmp_path / "job"))


def train(job: Path, **options: Any) -> None:
    config = SwapConfig.load(job / "job.toml")
    _, code = program.train(config, console=Console(file=io.StringIO()), **options)
    assert code == 0


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        state = state[part]
    state[path[-1]] = value


TRAINER = ("extra", TRAINER_STATE)
CHANGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a step of text": ((*TRAINER, "global_step"), "2"),
    "another step": ((*TRAINER, "global_step"), 1),
    "no trainer": (TRAINER, [1, 2]),
    "a new key": ((*TRAINER, "hp_name"), "x"),
    "an epoch of text": ((*TRAINER, "epoch"), "x"),
    "callbacks of text": ((*TRAINER, "stateful_callbacks"), "x"),
    "a control of text": ((*TRAINER, "stateful_callbacks"), {"TrainerControl": "x"}),
    "a control with a new word": (
        (*TRAINER, "stateful_callbacks"),
        {"TrainerControl": {"args": {"should_x": 1}, "attributes": {}}},
    ),
    "a setting with a number as its key": (("extra", "run"), {1: 2, "train.seed": 0}),
    "a list as the scheduler": (("scheduler",), [1]),
    "a scheduler that counts in text": (("scheduler", "last_epoch"), "2"),
    "no rates of the scheduler": (("scheduler", "base_lrs"), 7),
    "groups of text": (("optimizer", "groups"), "x"),
    "no groups": (("optimizer",), {}),
    "a rate of text": (("optimizer", "groups", 0, "lr"), "0.1"),
    "steps of text": (("optimizer", "steps"), {"transformer.wte.weight": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_small_state_of_other_kinds_is_refused_by_name_before_training(job, kind) -> None:
    newest = job / "output" / "checkpoints" / "step-00000002"
    state = torch.load(newest / "program.pt", weights_only=True)
    changed(state, *CHANGES[kind])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    replace_file(newest, "program.pt", buffer.getvalue())
    before = (job / "output" / "metrics.jsonl").read_bytes()
    older = newest.with_name("step-00000001")
    with pytest.raises(CorruptionError, match=rf"step-00000002.*--resume-from {older}"):
        train(job, resume=True)
    assert (job / "output" / "metrics.jsonl").read_bytes() == before
    assert not list((job / "swap").iterdir())
