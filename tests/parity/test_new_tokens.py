"""`resize_token_embeddings` of a model that `infinity.init_empty_weights` built, before `offload`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

import infinity
from infinity.checkpoint import weight_source
from infinity.errors import ConfigError
from infinity.modules.reading import empty_weights
from tests.support.bits import assert_same
from tests.support.exhaustive import in_turn
from tests.support.offloading import offloaded, swap_config

from .small_models import NUM_TOKENS, base_at, llama, plain_adamw, train, values


def gpt2(is_tied: bool) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=1, n_head=2, n_positions=32, vocab_size=NUM_TOKENS, attn_pdrop=0.0,
            embd_pdrop=0.0, resid_pdrop=0.0, tie_word_embeddings=is_tied,
        )
    )  # fmt: skip


def bert(is_tied: bool) -> Any:
    """Its head has a bias, with one number for a token."""
    return BertForMaskedLM(
        BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
            vocab_size=NUM_TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama tied": lambda: llama(True),
    "gpt2": lambda: gpt2(False),
    "gpt2 tied": lambda: gpt2(True),
    "bert": lambda: bert(True),
}


@pytest.fixture(params=["kept", "left out"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether `init_empty_weights` keeps the values of constructors, as of small parameters."""
    if request.param == "left out":
        monkeypatch.setattr(empty_weights, "_KEPT_NBYTES", 0)
    return str(request.param)


def with_values(make: Callable[[], Any], base: Path) -> Any:
    """Returns a model whose embedding and head alone have values."""
    with infinity.init_empty_weights():
        model = make()
    head = model.get_output_embeddings()
    wanted = {id(p) for p in (model.get_input_embeddings().weight, head.weight, head.bias)}
    source = weight_source(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in wanted:
                parameter.copy_(source.read(name))
    return model


def resized(model: Any, num_tokens: int, mean_resizing: bool) -> Any:
    torch.manual_seed(4)
    model.resize_token_embeddings(num_tokens, mean_resizing=mean_resizing)
    return model


@pytest.mark.parametrize(
    ("kind", "way"),
    in_turn(MODELS, [(tokens, mean) for mean in (False, True)
                     for tokens in (NUM_TOKENS + 5, NUM_TOKENS - 4)]),
)  # fmt: skip
def test_a_resized_model_trains_as_one_that_was_resized_in_memory(
    kind: str, way: tuple[int, bool], size: str, tmp_path: Path
) -> None:
    num_tokens, mean_resizing = way
    base = tmp_path / "base"
    base_at(base, MODELS[kind])
    plain = resized(type(MODELS[kind]()).from_pretrained(base), num_tokens, mean_resizing)
    model = resized(with_values(MODELS[kind], base), num_tokens, mean_resizing)
    with offloaded(model, swap_config(tmp_path / "swap"), weights=base):
        assert_same(values(plain), values(model))
        expected = train(plain, plain_adamw(plain))
        assert train(model, infinity.AdamW(model, lr=1e-2)) == expected
        assert_same(values(plain), values(model))


def test_a_resized_model_with_an_adapter_is_resumed_and_exported(size: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base_at(base, MODELS["llama"])

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
        )
        return peft.get_peft_model(resized(model, NUM_TOKENS + 5, True), config)

    plain = adapted(LlamaForCausalLM.from_pretrained(base))
    optimizer = plain_adamw(plain)
    expected = train(plain, optimizer) + train(plain, optimizer)
    losses = []
    for part in ("first", "second"):
        model = adapted(with_values(MODELS["llama"], base))
        with offloaded(model, swap_config(tmp_path / part), weights=base):
            ours = infinity.AdamW(model, lr=1e-2)
            if part == "second":
                infinity.checkpoint.load(tmp_path / "saved", model, ours)
            losses += train(model, ours)
            infinity.checkpoint.save(tmp_path / "saved", model, ours)
            model.save_pretrained(tmp_path / "adapter")
    assert losses == expected
    fresh = resized(LlamaForCausalLM.from_pretrained(base), NUM_TOKENS + 5, True)
    assert_same(
        values(plain),
        values(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter", is_trainable=True)),
    )


@pytest.mark.parametrize("mean_resizing", [False, True])
def test_a_resize_without_values_is_refused_with_the_way(
    mean_resizing: bool, size: str, tmp_path: Path
) -> None:
    """Small weights have values, of the constructor, so these are refused by `offload`."""
    base = tmp_path / "base"
    base_at(base, MODELS["llama"])
    with infinity.init_empty_weights():
        model = MODELS["llama"]()
    with (
        pytest.raises(ConfigError, match=r"weight\.copy_\(infinity\.checkpoint\.weight_source"),
        offloaded(resized(model, 70, mean_resizing), swap_config(tmp_path / "swap"), weights=base),
    ):
        pass


def test_another_size_than_that_of_the_directory_is_refused_where_nothing_was_resized(
    tmp_path: Path,
) -> None:
    """All values are in memory, and none was given to a model that was built without."""
    base = tmp_path / "base"
    base_at(base, MODELS["llama"])
    model = resized(llama(False), 70, False)
    with (
        pytest.raises(ConfigError, match="another size or architecture"),
        offloaded(model, swap_config(tmp_path / "swap"), weights=base),
    ):
        pass
