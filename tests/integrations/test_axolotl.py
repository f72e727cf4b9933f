"""The axolotl plug-in, with a stand-in of axolotl's documented interface."""

from __future__ import annotations

import importlib
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, InfinityError

NAME = "infinity.integrations.axolotl.InfinityPlugin"


class BasePlugin:
    """Has a hook for every call of the manager, each of which does nothing."""

    def pre_lora_load(self, cfg: Any, model: Any) -> None: ...

    def post_lora_load(self, cfg: Any, model: Any) -> None: ...

    def post_train(self, cfg: Any, model: Any) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in as axolotl loads it: by module and class name."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    module, _, name = NAME.rpartition(".")
    return getattr(importlib.import_module(module), name)()


def model() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def trainer_of(module: Any, directory: Path) -> Any:
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    arguments = TrainingArguments(
        str(directory), max_steps=3, per_device_train_batch_size=1, logging_steps=1,
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, save_strategy="no",
        learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model=module, args=arguments, train_dataset=rows)


def test_a_run_through_the_hooks_has_the_losses_of_the_plain_trainer(
    plugin: Any, tmp_path: Path
) -> None:
    plain = losses(trainer_of(model(), tmp_path / "plain"))
    cfg = {
        "infinity_config": {
            "tiers": {"host": {"capacity": "8MiB"}, "nvme": [{"path": str(tmp_path / "swap")}]}
        }
    }
    assert isinstance(plugin, BasePlugin)
    plugin.pre_model_load(cfg)
    given = model()
    plugin.pre_lora_load(cfg, given)
    plugin.post_model_load(cfg, given)
    trainer = trainer_of(given, tmp_path / "offloaded")
    plugin.post_trainer_create(cfg, trainer)
    assert losses(trainer) == plain
    plugin.post_train(cfg, given)
    plugin.post_train_unload(cfg)
    with pytest.raises(InfinityError, match="not offloaded"):
        engine_of(given)
    assert not list((tmp_path / "swap").iterdir())


def test_bf16_asks_for_a_model_in_bfloat16(plugin: Any, tmp_path: Path) -> None:
    tiers = {"host": {"capacity": "8MiB"}, "nvme": [{"path": str(tmp_path / "swap")}]}
    cfg, given = {"infinity_config": {"tiers": tiers}, "bf16": True}, model()
    plugin.pre_model_load(cfg)
    plugin.post_model_load(cfg, given)
    assert {parameter.dtype for parameter in given.parameters()} == {torch.bfloat16}
    trainer = trainer_of(given, tmp_path / "out")
    plugin.post_trainer_create(cfg, trainer)
    assert all(map(math.isfinite, losses(trainer)))
    plugin.post_train_unload(cfg)


@pytest.mark.parametrize("key", ["deepspeed", "fsdp", "load_in_4bit", "fp16"])
def test_keys_that_conflict_are_refused_before_the_model_is_loaded(
    plugin: Any, tmp_path: Path, key: str
) -> None:
    cfg = {"infinity_config": {"tiers": {"host": {"capacity": "8MiB"}}}, key: True}
    with pytest.raises(ConfigError, match=key):
        plugin.pre_model_load(cfg)


def test_a_missing_file_is_named(plugin: Any) -> None:
    with pytest.raises(ConfigError, match="infinity_config"):
        plugin.pre_model_load({})


def test_a_transformers_that_is_too_old_is_refused_before_the_model_is_loaded(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.config.extras.version", lambda name: "5.15.1")
    cfg = {"infinity_config": {"tiers": {"host": {"capacity": "8MiB"}}}}
    with pytest.raises(ConfigError, match=r"needs transformers>=5.16,<6, got 5.15.1"):
        plugin.pre_model_load(cfg)


def test_the_keys_of_the_plug_in_are_a_model_that_axolotl_can_import(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found(infinity_config="swap.toml").infinity_window is None


def test_without_axolotl_the_class_says_so() -> None:
    with pytest.raises(ConfigError, match="needs axolotl"):
        getattr(importlib.import_module("infinity.integrations.axolotl"), "InfinityPlugin")  # noqa: B009
