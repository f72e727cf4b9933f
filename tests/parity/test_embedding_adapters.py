"""Adapters that target embeddings and heads, over a base in memory and over one without memory: they
train with PEFT's bits, are saved, resumed and merged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.modules.reading import empty_weights
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.offloading import offloaded, swap_config

from .small_models import base_at, llama, plain_adamw, train, values

WITH_EMBEDDING = ["q_proj", "embed_tokens"]

ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=WITH_EMBEDDING),
    "lora drawn": lambda: peft.LoraConfig(
        r=4, target_modules=WITH_EMBEDDING, init_lora_weights=False, use_rslora=True
    ),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=WITH_EMBEDDING, use_dora=True),
    "dora and head": lambda: peft.LoraConfig(
        r=4, target_modules=[*WITH_EMBEDDING, "lm_head"], use_dora=True
    ),
    "hira": lambda: peft.HiraConfig(r=4, target_modules=WITH_EMBEDDING),
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5, 7]
    ),
    "tokens alone": lambda: peft.TrainableTokensConfig(
        token_indices=[1, 5], target_modules=["embed_tokens"]
    ),
    "saved modules": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    ),
    "saved and tied": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}


def adapted(model: Any, kind: str) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(model, ADAPTERS[kind]())


def without_memory(is_tied: bool) -> Any:
    with infinity.init_empty_weights():
        return llama(is_tied)


BASES = list(product(["memory", "small", "nothing"], [False, True]))


@pytest.mark.parametrize(
    ("kind", "over", "is_tied"),
    sampled(
        ((kind, *base) for kind in ADAPTERS for base in BASES),
        lambda case: (list(ADAPTERS).index(case[0]) + BASES.index(case[1:])) % len(BASES) == 0,
    ),
)
def test_an_adapter_of_an_embedding_trains_saves_and_merges_as_pefts(
    kind: str, over: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`over`: a base in memory, one whose small weights keep their constructor's values until
    `offload`, or one without memory."""
    base = base_at(tmp_path / "base", lambda: llama(is_tied))
    plain = adapted(LlamaForCausalLM.from_pretrained(base), kind)
    if over == "nothing":
        monkeypatch.setattr(empty_weights, "_KEPT_NBYTES", 0)
    is_in_memory = over == "memory"
    model = LlamaForCausalLM.from_pretrained(base) if is_in_memory else without_memory(is_tied)
    model = adapted(model, kind)
    weights = None if is_in_memory else base
    config = swap_config(tmp_path / "swap")
    config["placement"]["frozen"] = "copy"
    with offloaded(model, config, weights=weights):
        expected = train(plain, plain_adamw(plain))
        assert train(model, infinity.AdamW(model, lr=1e-2)) == expected
        assert_same(values(plain), values(model))
        saved = []
        for side, name in ((plain, "plain"), (model, "ours")):
            side.save_pretrained(tmp_path / name)
            saved.append(load_file(tmp_path / name / "adapter_model.safetensors"))
        assert_same(saved[0], saved[1])
        with infinity.gather(model, modify=True):
            merged = model.merge_and_unload()
        assert_same(values(plain.merge_and_unload()), values(merged))


@pytest.mark.parametrize("kind", ["dora", "tokens", "saved modules"])
def test_a_resumed_adapter_of_an_embedding_goes_on_with_the_same_bits(
    kind: str, tmp_path: Path
) -> None:
    base = base_at(tmp_path / "base", lambda: llama(True))
    plain = adapted(LlamaForCausalLM.from_pretrained(base), kind)
    expected = train(plain, plain_adamw(plain), 4)
    losses = []
    for part in ("first", "second"):
        model = adapted(without_memory(True), kind)
        with offloaded(model, swap_config(tmp_path / part), weights=base):
            optimizer = infinity.AdamW(model, lr=1e-2)
            if part == "second":
                infinity.checkpoint.load(tmp_path / "saved", model, optimizer)
            losses += train(model, optimizer)
            if part == "first":
                infinity.checkpoint.save(tmp_path / "saved", model, optimizer)
            else:
                assert_same(values(plain), values(model))
    assert losses == expected


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("kind", ["lora drawn", "tokens", "saved modules", "saved and tied"])
def test_a_merge_leaves_the_configuration_that_peft_leaves(
    kind: str, is_gathered: bool, tmp_path: Path
) -> None:
    """PEFT compares addresses to find out whether the embeddings are still tied."""
    base = base_at(tmp_path / "base", lambda: llama(True))
    plain = adapted(LlamaForCausalLM.from_pretrained(base), kind)
    model = adapted(LlamaForCausalLM.from_pretrained(base), kind)
    with offloaded(model, swap_config(tmp_path / "swap")):
        train(plain, plain_adamw(plain))
        train(model, infinity.AdamW(model, lr=1e-2))
        plain = plain.merge_and_unload()
        with infinity.gather(model, modify=True) if is_gathered else nullcontext():
            model = model.merge_and_unload()
        assert_same(values(plain), values(model))
        assert model.config.tie_word_embeddings is plain.config.tie_word_embeddings


def test_a_merge_into_weights_that_rest_in_their_files_is_refused(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", llama)
    model = adapted(without_memory(False), "lora drawn")
    with (
        offloaded(model, swap_config(tmp_path / "swap"), weights=base),
        pytest.raises(UnsupportedError, match='placement.frozen = "copy"'),
        infinity.gather(model, modify=True),
    ):
        model.merge_and_unload()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_prompt_of_words_of_a_base_to_come_is_refused_unless_it_is_loaded(
    is_loaded: bool, tmp_path: Path
) -> None:
    """PEFT would take the words' values from what the constructor drew."""
    base = base_at(tmp_path / "base", llama)

    def prompted(model: Any) -> Any:
        return peft.get_peft_model(
            model,
            peft.PromptTuningConfig(
                task_type="CAUSAL_LM", num_virtual_tokens=2, prompt_tuning_init="SAMPLE_VOCAB"
            ),
        )

    plain = prompted(LlamaForCausalLM.from_pretrained(base))
    plain.save_pretrained(tmp_path / "adapter")
    config = swap_config(tmp_path / "swap")
    if is_loaded:
        model = peft.PeftModel.from_pretrained(without_memory(False), tmp_path / "adapter")
        with offloaded(model, config, weights=base):
            assert_same(values(plain), values(model))
    else:
        model = prompted(without_memory(False))
        with (
            pytest.raises(ConfigError, match="PROMPT_TUNING, SAMPLE_VOCAB"),
            offloaded(model, config, weights=base),
        ):
            pass
