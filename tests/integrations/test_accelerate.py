"""Several models under one accelerator: offloaded ones, and plain ones beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import infinity
from infinity.engine.registry import is_offloaded
from infinity.errors import ConfigError
from infinity.integrations.hf import prepare_accelerator

from .test_hf import Tokens, make_model, swap

CLIPS = (0.01, 0.5, 0.1)  # Of each of three models; the last is a plain one.


class Together:
    """Three models under one accelerator: two offloaded ones, unless `is_plain`, around a plain one."""

    def __init__(self, directory: Path, *, is_plain: bool, seed: int = 0) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        for index in range(3):
            model = make_model(seed=seed + index)
            if is_plain or index == 1:
                optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
                model, optimizer = self.accelerator.prepare(model, optimizer)
            else:
                (directory / str(index)).mkdir(parents=True)
                infinity.offload(model, swap(directory / str(index)))
                optimizer = infinity.AdamW(model, lr=1e-2)
                model, optimizer = prepare_accelerator(self.accelerator, model, optimizer)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def step(self, number: int) -> list[float]:
        seen = []
        for model, optimizer, max_norm in zip(self.models, self.optimizers, CLIPS, strict=True):
            loss = model(**batch_of(number)).loss
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(model.parameters(), max_norm)
            if number % 2:
                head = self.accelerator.clip_grad_norm_(
                    list(model.parameters())[-2:], max_norm / 2, norm_type=1
                )
                seen.append(float(head))
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), float(norm)]
        return seen

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for model in self.models for p in model.parameters()]

    def close(self) -> None:
        for model in self.models:
            if is_offloaded(model):
                infinity.close(model)


def batch_of(number: int) -> dict[str, torch.Tensor]:
    row = Tokens(8, 1)[number % 8]
    return {name: value[None] for name, value in row.items()}


def test_models_under_one_accelerator_are_clipped_saved_and_loaded_each_for_itself(
    tmp_path: Path,
) -> None:
    runs = {}
    for is_plain in (True, False):
        run = Together(tmp_path / "swap", is_plain=is_plain)
        seen = [run.step(number) for number in range(2)]
        state = str(tmp_path / f"state-{is_plain}")
        run.accelerator.save_state(state)
        ahead = [run.step(number) for number in range(2, 4)]
        run.accelerator.load_state(state)
        again = [run.step(number) for number in range(2, 4)]
        run.close()
        assert again == ahead
        fresh = Together(tmp_path / "fresh", is_plain=is_plain, seed=30)
        fresh.accelerator.load_state(state)
        assert [fresh.step(number) for number in range(2, 4)] == ahead
        fresh.close()
        runs[is_plain] = [*seen, *ahead]
    assert runs[True] == runs[False]
    names = sorted(path.name for path in (tmp_path / "state-False").iterdir() if path.is_dir())
    assert names == ["infinity", "infinity_1"]
    assert len(list((tmp_path / "state-False").glob("*.safetensors"))) == 1, "of the plain model"


def test_a_state_of_fewer_models_is_refused_before_any_is_loaded(tmp_path: Path) -> None:
    run = Together(tmp_path / "swap", is_plain=False)
    run.step(0)
    state = tmp_path / "state"
    run.accelerator.save_state(str(state))
    run.step(1)
    before = run.weights()
    shutil.rmtree(state / "infinity_1")
    with pytest.raises(ConfigError, match="infinity_1"):
        run.accelerator.load_state(str(state))
    assert all(map(torch.equal, before, run.weights())), "nothing was loaded"
    run.close()


def test_a_model_that_is_prepared_after_free_memory_is_the_first_again(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for turn in range(2):
        (tmp_path / str(turn)).mkdir()
        model = infinity.offload(make_model(), swap(tmp_path / str(turn)))
        model, optimizer = prepare_accelerator(accelerator, model, infinity.AdamW(model, lr=1e-2))
        accelerator.backward(model(**batch_of(turn)).loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / f"state-{turn}"))
        accelerator.load_state(str(tmp_path / f"state-{turn}"))
        found = [path.name for path in (tmp_path / f"state-{turn}").iterdir() if path.is_dir()]
        assert found == ["infinity"]
        accelerator.free_memory(model, optimizer)
        infinity.close(model)
