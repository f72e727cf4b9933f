"""What a directory has beside the model's weights, and weights that are no numbers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

import infinity
from infinity.checkpoint import weight_source
from infinity.errors import ConfigError


def small() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip


def saved(directory: Path, kind: type = LlamaForCausalLM) -> Path:
    torch.manual_seed(3)
    kind(small()).save_pretrained(directory)
    return directory


def change(directory: Path, edit: Any) -> None:
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def offload(model: Any, tmp_path: Path, weights: Any, **options: Any) -> Any:
    config = {"tiers": {"nvme": [{"path": str(tmp_path / "swap")}], "host": {"capacity": "16MiB"}}}
    return infinity.offload(model, config, weights=weights, **options)


def test_a_format_without_a_codec_is_refused_by_its_name(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    plain = json.loads(file.read_text())
    for key, method in (("quantization_config", "exl3"), ("compression_config", "aqlm")):
        for table in (plain | {key: {"quant_method": method}},
                      plain | {"text_config": {key: {"quant_method": method}}}):  # fmt: skip
            file.write_text(json.dumps(table))
            with pytest.raises(ConfigError, match=f"quantized with quant_method='{method}'"):
                offload(LlamaForCausalLM(small()), tmp_path, tmp_path / "model")
    assert not (tmp_path / "swap").exists()
    file.write_text(json.dumps(plain))
    declared = {"quantization": {"quant_algo": "W4A8_AWQ"}}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(declared))
    with pytest.raises(ConfigError, match="by modelopt as 'W4A8_AWQ'"):
        offload(LlamaForCausalLM(small()), tmp_path, tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "fault"),
    [("[]", "expected a table"), ('{"a": ', "not valid JSON"), ("[" * 100_000, "nested too deeply"),
     ('{"a": "\\ud800"}', "surrogate"), (b"\xff\xfe", "UTF-8")],
)  # fmt: skip
def test_a_malformed_config_json_is_refused_by_name(
    content: str | bytes, fault: str, tmp_path: Path
) -> None:
    saved(tmp_path / "model")
    text = content.encode() if isinstance(content, str) else content
    (tmp_path / "model" / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=f"config.json cannot be read: .*{fault}"):
        weight_source(tmp_path / "model").plan(LlamaForCausalLM(small()))


def test_a_config_json_with_infinity_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    table = json.loads(file.read_text()) | {"time_step_limit": [0.0, float("inf")]}
    file.write_text(json.dumps(table))
    assert weight_source(tmp_path / "model").plan(LlamaForCausalLM(small())).missing == []


@pytest.mark.parametrize(
    ("dtype", "says"),
    [(torch.float8_e4m3fn, "float8_e4m3fn"), (torch.int8, "int8"), (torch.uint8, "uint8"),
     (torch.int32, "int32")],
)  # fmt: skip
def test_codes_are_not_read_as_numbers(dtype: torch.dtype, says: str, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    change(tmp_path / "model", lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ConfigError, match=f"{name}' is torch.{says}.*codes"):
        offload(LlamaForCausalLM(small()), tmp_path, tmp_path / "model")


def test_codes_from_a_function_are_not_read_as_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="'0.weight' of the model is torch.float32"):
        offload(model, tmp_path, lambda name: torch.ones(4, 4).to(torch.float8_e5m2))


def test_a_tensor_that_nobody_asked_for_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    change(tmp_path / "model", lambda t: t.update({scale: torch.ones(1, 1)}))
    with pytest.raises(ConfigError, match=f"no place for: '{scale}'.*ignore="):
        offload(LlamaForCausalLM(small()), tmp_path, tmp_path / "model")
    plan = weight_source(tmp_path / "model").plan(LlamaForCausalLM(small()), ignore=["*_scale_inv"])
    assert plan.unexpected == []
    # Outside of what both have in common, but of a module that the model has.
    change(tmp_path / "model", lambda t: t.update({"lm_head.weight_scale": t.pop(scale)}))
    with pytest.raises(ConfigError, match="lm_head.weight_scale"):
        weight_source(tmp_path / "model").plan(LlamaForCausalLM(small()))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_the_class_has_not_is_left_out_if_it_is_zero(
    value: float, tmp_path: Path
) -> None:
    """AutoGPTQ writes a bias of zeros for each layer."""
    saved(tmp_path / "model")
    bias = "model.layers.0.mlp.up_proj.bias"
    change(tmp_path / "model", lambda t: t.update({bias: torch.full((32,), value)}))
    source = weight_source(tmp_path / "model")
    if value:
        with pytest.raises(ConfigError, match=f"no place for: '{bias}'"):
            source.plan(LlamaForCausalLM(small()))
    else:
        assert source.plan(LlamaForCausalLM(small())).unexpected == []


def test_import_accepts_names_that_transformers_ignores(tmp_path: Path) -> None:
    """Tied weights stored twice, buffers that older versions saved, layers of a class's own list."""
    saved(tmp_path / "model")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.rotary_emb.original_inv_freq"] = torch.ones(4)
        tensors["model.layers.2.mtp.weight"] = torch.ones(4).to(torch.float8_e4m3fn)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    class Predicting(LlamaForCausalLM):
        _keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # noqa: RUF012

    change(tmp_path / "model", edit)
    config = small()
    config.tie_word_embeddings = True
    assert weight_source(tmp_path / "model").plan(Predicting(config)).unexpected == []


def test_a_base_takes_the_checkpoint_of_a_model_with_a_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "model")
    plain = LlamaModel.from_pretrained(tmp_path / "model")
    model = LlamaModel(small())
    with caplog.at_level(logging.WARNING):
        offload(model, tmp_path, tmp_path / "model")
    assert "'lm_head.weight'" in caplog.text and "not used by LlamaModel" in caplog.text
    try:
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name).detach()), name
    finally:
        infinity.engine_of(model).close()


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("kept_nbytes", [0, 64 << 10])
def test_a_new_head_over_a_pretrained_base_is_drawn_from_the_seed(
    kept_nbytes: int, with_adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """As from_pretrained draws it, whether `init` leaves it on meta or keeps it."""
    monkeypatch.setattr("infinity.modules.reading.empty_weights._KEPT_NBYTES", kept_nbytes)
    saved(tmp_path / "model")

    def adapted(model: Any) -> Any:
        if not with_adapter:
            return model
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS"))

    torch.manual_seed(7)
    plain = LlamaForSequenceClassification.from_pretrained(tmp_path / "model")
    with infinity.init_empty_weights():
        model = LlamaForSequenceClassification(small())
    plain, model = adapted(plain), adapted(model)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        offload(model, tmp_path, tmp_path / "model", seed=7)
    try:
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name).detach()), name
    finally:
        infinity.engine_of(model).close()
    assert "'score.weight' of LlamaForSequenceClassification are not in" in caplog.text
    assert "the values are new, or an adapter's" in caplog.text


def test_import_refuses_a_checkpoint_of_this_class_with_missing_names(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    change(tmp_path / "model", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lacks 'lm_head\.weight'"):
        weight_source(tmp_path / "model").plan(LlamaForCausalLM(small()))
    saved(tmp_path / "model")
    change(tmp_path / "model", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"lacks 'model\.norm\.weight'"):
        weight_source(tmp_path / "model").plan(LlamaForSequenceClassification(small()))


def test_a_class_whose_ties_were_saved_under_the_names_of_another_is_told_of_that(
    tmp_path: Path,
) -> None:
    """The decoder of BART has no table of its own: transformers itself would draw a new one."""
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "model")
    assert not weight_source(tmp_path / "model").plan(model).missing
    said = "'model.decoder.embed_tokens.weight' .* is of 'BartForConditionalGeneration', which may"
    with pytest.raises(ConfigError, match=said):
        weight_source(tmp_path / "model").plan(transformers.BartForCausalLM(config))


def test_a_head_of_bert_may_be_new_and_another_be_left(tmp_path: Path) -> None:
    def bert(kind: str) -> Any:
        return getattr(transformers, kind)(
            transformers.BertConfig(
                vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=16,
            )
        )  # fmt: skip

    bert("BertForPreTraining").save_pretrained(tmp_path / "model")
    plan = weight_source(tmp_path / "model").plan(bert("BertForSequenceClassification"))
    assert plan.missing == ["classifier.weight", "classifier.bias"]
    assert all(name.startswith("cls.") for name in plan.unexpected)
