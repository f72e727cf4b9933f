"""Adapters of embeddings and heads, modules that they replace, and tokens that they train."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from infinity.errors import ConfigError, UnsupportedError
from infinity.tools.training.merge import plan_merge
from tests.support.exhaustive import sampled

from .plain import train as train_plainly
from .test_adapter import SMALL, metrics, run, save_base, table, values_of

__all__ = ["table"]

WEIGHTS = "adapter_model.safetensors"
TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [40, 41, 48]}}
ADAPTERS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding and norms": {
        "target_modules": ["embed_tokens"], "modules_to_save": ["norm", "lm_head"],
    },
    "tokens": TOKENS,
}  # fmt: skip


def save(tmp_path: Path, *, tied: bool = False, **options: Any) -> Path:
    """Writes a base in fp32, and an adapter over it in which every value is random, as PEFT saves
    it: with the weights of an embedding that it adapts. Returns the adapter's directory."""
    torch.manual_seed(11)
    shape = SMALL | {"tie_word_embeddings": tied}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_hidden_layers=2))
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, **options)
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("kind", "tied"),
    sampled(
        product(ADAPTERS, [False, True]),
        lambda case: case[0] == "tokens" or case[1] == (list(ADAPTERS).index(case[0]) % 2 == 0),
    ),
)
def test_a_saved_adapter_goes_on_with_the_bits_of_peft_though_interrupted(
    tmp_path, table, kind, tied
) -> None:
    saved = save(tmp_path, tied=tied, **ADAPTERS[kind])
    table |= {"adapter": {"resume": str(saved)}, "checkpoint": {"every": 2}}
    if tied and kind == "tokens":
        with pytest.raises(ConfigError, match="tied to the head, which TRL's loss does not see"):
            run(table)
        assert not (tmp_path / "swap").exists() and not (tmp_path / "output").exists()
        return
    run(table | {"train": table["train"] | {"steps": 2}})
    run(table, resume=True)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(base, saved, is_trainable=True).train()
    steps = train_plainly(table, expected, tmp_path / "plain")
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    ours, theirs = load_file(tmp_path / "output" / WEIGHTS), values_of(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    described = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 12), "those of the saved adapter"


def test_a_new_adapter_of_the_embedding_is_that_of_peft(tmp_path, table) -> None:
    save(tmp_path, target_modules=["q_proj"])
    table["adapter"] |= {"targets": ["q_proj", "embed_tokens"]}
    run(table)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(5)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"]
    )
    expected = peft.get_peft_model(model, lora).train()
    steps = train_plainly(table, expected, tmp_path / "plain")
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    ours = load_file(tmp_path / "output" / WEIGHTS)
    for name, value in values_of(expected).items():
        assert torch.equal(ours[name], value), name


def test_a_module_that_an_adapter_replaces_is_saved_with_its_buffers(tmp_path, table) -> None:
    """The router of DeepSeek-V3 has a correction in a buffer."""
    base = save_base(tmp_path / "base", "deepseek_v3", torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(r=4, target_modules=["q_a_proj"], modules_to_save=["gate"])
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "saved")
    table["adapter"] = {"resume": str(tmp_path / "saved")}
    run(table)
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("saved", "output"))
    assert before.keys() == after.keys()
    assert any(name.endswith("gate.e_score_correction_bias") for name in after)
    again = AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(again, tmp_path / "output")


def test_an_adapter_of_the_head_is_refused_before_anything_is_made(tmp_path, table) -> None:
    saved = save(tmp_path, target_modules=["q_proj", "lm_head"])
    for adapter in ({"targets": ["lm_head"]}, {"resume": str(saved)}):
        with pytest.raises(ConfigError, match="adapter to `lm_head` is not supported"):
            run(table | {"adapter": adapter})
        assert not (tmp_path / "swap").exists()


def test_an_adapter_with_an_embedding_of_another_base_is_refused_by_name(tmp_path, table) -> None:
    saved = save(tmp_path, target_modules=["q_proj", "embed_tokens"])
    values = load_file(saved / WEIGHTS)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    values[name][200, 3] += 1
    save_file(values, saved / WEIGHTS)
    table["adapter"] = {"resume": str(saved)}
    said = f"'{name}', whose values are not those of 'model.embed_tokens.weight' in .*base"
    with pytest.raises(ConfigError, match=said):
        run(table)
    with pytest.raises(ConfigError, match=said):
        plan_merge(tmp_path / "base", saved)
    values[name] = values[name][1:].clone()
    save_file(values, saved / WEIGHTS)
    with pytest.raises(ConfigError, match=f"has '{name}' beside them"):
        run(table)
    assert not (tmp_path / "swap").exists() and not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"target_modules": ["embed_tokens"]}, "tie_word_embeddings = false"),
        ({"target_modules": ["lm_head"]}, "tie_word_embeddings = false"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "by merge_and_unload"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "by merge_and_unlo"),
    ],
)
def test_a_merge_that_would_change_two_tied_weights_is_refused(tmp_path, options, way) -> None:
    saved = save(tmp_path, tied=True, **options)
    with pytest.raises(UnsupportedError, match=f"one weight with .* it would change both.*{way}"):
        plan_merge(tmp_path / "base", saved)
    assert json.loads((tmp_path / "base" / "config.json").read_text())["tie_word_embeddings"]
