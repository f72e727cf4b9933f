"""A Trainer's checkpoint has its name when it is whole: whatever fails, pushes or writes beside."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

import infinity
from infinity.integrations.hf import prepare_trainer

from .test_hf import Tokens, arguments, make_model, make_trainer, swap


def prepared(directory: Path, cls: type[Trainer] = Trainer, **options: Any) -> Any:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3} | options
    args = arguments(directory / "out", eval_strategy="no", **options)
    trainer = cls(model=make_model(), args=args, train_dataset=Tokens(40, 1))
    return prepare_trainer(trainer, swap(directory) | {"checkpoint": {"keep": 2}})


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "out"))


class WritesBeside(Trainer):
    """Writes files of its own into its checkpoints, by both paths that it may know."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        there = Path(self._get_output_dir(trial=trial)) / name
        there.mkdir(parents=True, exist_ok=True)
        (there / "before.txt").write_text(name)
        beside = Path(str(self.args.output_dir)) / name
        beside.mkdir(parents=True, exist_ok=True)
        (beside / "beside.txt").write_text(name)
        super()._save_checkpoint(model, trial)
        (there / "after.txt").write_text(name)


def test_what_a_subclass_writes_is_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, WritesBeside)
    trainer.train()
    for step in (1, 2, 3):
        found = set(os.listdir(tmp_path / "out" / f"checkpoint-{step}"))
        assert found >= {"before.txt", "after.txt", "beside.txt", "infinity", "trainer_state.json"}
    assert not [name for name in names(tmp_path) if name[0] == "."]
    infinity.close(trainer.model)


class Fails(Trainer):
    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 2:
            raise OSError(28, "No space left on device")
        super()._save_rng_state(output_dir)


def test_a_checkpoint_that_fails_leaves_none_and_the_one_before_is_the_newest(
    tmp_path: Path,
) -> None:
    trainer = prepared(tmp_path, Fails)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    infinity.close(trainer.model)
    resumed = prepared(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    infinity.close(resumed.model)


def test_leftovers_of_a_killed_run_go_at_the_next_checkpoint_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / "out" / ".checkpoint-7.partial" / "checkpoint-7"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    mine = tmp_path / "out" / ".checkpoint-7.mine"
    mine.mkdir()
    assert get_last_checkpoint(tmp_path / "out") is None
    trainer = prepared(tmp_path, max_steps=1)
    with caplog.at_level(logging.WARNING, "infinity"):
        trainer.train()
    assert names(tmp_path) == [".checkpoint-7.mine", "checkpoint-1"]
    assert [r for r in caplog.records if ".checkpoint-7.partial is removed" in r.message]
    infinity.close(trainer.model)


def test_a_push_takes_a_checkpoint_that_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, list[str]]] = []

    def push(self: Trainer, folder: str) -> None:
        pushed.append((Path(folder).name, sorted(os.listdir(folder))))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_, **__: None)
    trainer = prepared(tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    trainer.train()
    assert [name for name, _ in pushed] == ["checkpoint-1", "checkpoint-2"]
    assert all({"infinity", "trainer_state.json"} <= set(files) for _, files in pushed)
    infinity.close(trainer.model)


def test_rotation_and_the_best_checkpoint_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    found = {}
    for is_plain in (True, False):
        directory = tmp_path / str(is_plain)
        directory.mkdir()
        trainer: Any = make_trainer(
            make_model(), directory / "out", max_steps=6, save_strategy="steps", save_steps=1,
            save_total_limit=2, eval_steps=1, load_best_model_at_end=True, learning_rate=0.3,
            metric_for_best_model="loss",
        )  # fmt: skip
        if not is_plain:
            prepare_trainer(trainer, swap(directory) | {"checkpoint": {"keep": 2}})
        trainer.train()
        best = os.path.relpath(trainer.state.best_model_checkpoint, directory)
        found[is_plain] = names(directory), best
        if not is_plain:
            infinity.close(trainer.model)
    assert found[True] == found[False]


def test_checkpoints_stay_linked_and_are_released_by_rotation(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, max_steps=6, save_total_limit=1)
    trainer.train()
    (state,) = (tmp_path / "out" / "checkpoint-6" / "infinity").iterdir()
    assert (state / "linked.json").exists() and list(state.glob("*.swap"))
    volume = infinity.engine_of(trainer.model).store.volume
    assert volume is not None
    labels = {Path(frozen.label).parent.parent.name for frozen in volume.frozen if frozen.label}
    assert "checkpoint-6" in labels and len(labels) <= 2, labels
    assert infinity.checkpoint.inspect(state, verify=True)[0].is_intact
    infinity.close(trainer.model)
