"""A Trainer that is killed at every effect on files of one checkpoint; started by test_trainer_kills.py
in a process of its own, which forks a child for each life."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

import infinity
from infinity.integrations.hf import prepare_trainer
from tests.checkpoint.kill_loop import die_at, fork

from .test_hf import Tokens, arguments, make_model, swap

STEPS, KILLED_AT, LIMIT = 5, 3, 2


def train(directory: Path, effect: int, resume: bool, log: str) -> None:
    (directory / "tier").mkdir(exist_ok=True)
    shutil.rmtree(directory / "tier" / "swap", ignore_errors=True)
    config = swap(directory / "tier") | {"checkpoint": {"keep": 2}}
    model = infinity.offload(make_model(), config)
    args = arguments(
        directory / "out", max_steps=STEPS, save_strategy="steps", save_steps=1,
        save_total_limit=LIMIT, eval_strategy="steps", eval_steps=1, gradient_accumulation_steps=1,
        load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    data = Tokens(40, 1), Tokens(6, 2)
    trainer = Trainer(model=model, args=args, train_dataset=data[0], eval_dataset=data[1])
    prepare_trainer(trainer)
    save = trainer._save_checkpoint

    def killed(*arguments: Any) -> None:
        if trainer.state.global_step == KILLED_AT and effect:
            die_at(effect)
        save(*arguments)
        if trainer.state.global_step == KILLED_AT and effect:
            os._exit(7)  # It has had fewer effects.

    trainer._save_checkpoint = killed
    trainer.train(resume_from_checkpoint=resume or None)
    losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    best = trainer.state.best_model_checkpoint
    (directory / log).write_text(json.dumps([losses, os.path.relpath(best, directory / "out")]))
    infinity.close(model)


def life(*work: Any) -> int:
    """The status of a child that trains."""
    _, status = os.waitpid(fork(train, *work), 0)
    return status


def main(directory: Path, first: int, every: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    whole = directory / "whole"
    whole.mkdir()
    assert life(whole, 0, False, "log") == 0
    expected = json.loads((whole / "log").read_text())
    names = sorted(os.listdir(whole / "out" / f"checkpoint-{STEPS}"))
    report: dict[str, Any] = {"kills": 0, "newest": [], "expected": expected, "leftovers": 0}
    for effect in range(first, 10**6, every):
        place = directory / str(effect)
        place.mkdir()
        status = life(place, effect, False, "none")
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 7
            break
        report["kills"] += 1
        newest = Path(str(get_last_checkpoint(place / "out")))
        for path in (place / "out").glob("checkpoint-*"):
            assert sorted(os.listdir(path)) == names, (effect, path)
            found = infinity.checkpoint.inspect(path / "infinity", verify=True)
            assert found[0].is_intact, (effect, path, found[0].faults)
        report["newest"].append(newest.name)
        report["leftovers"] += any(name[0] == "." for name in os.listdir(place / "out"))
        if effect % 5 == first % 5:
            assert life(place, 0, True, "log") == 0
            assert json.loads((place / "log").read_text()) == expected, effect
            assert not [name for name in os.listdir(place / "out") if name[0] == "."], effect
            assert len(list((place / "out").glob("checkpoint-*"))) <= LIMIT + 1
        shutil.rmtree(place)
    return report
