"""`infinity merge`: base and adapter as a checkpoint, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from infinity.checkpoint.huggingface.import_weights import weight_source
from infinity.checkpoint.huggingface.weight_tensors import read_config
from infinity.codecs import AffineGroups
from infinity.errors import ConfigError, UnsupportedError
from infinity.tools.cli import app
from infinity.tools.convert.rewrite import as_codes, write_directory
from infinity.tools.training.base_identity import (
    IDENTITY_NAME,
    identify,
    is_name_of,
    write_identity,
)
from infinity.tools.training.merge import plan_merge
from tests.support.exhaustive import in_turn, sampled
from tests.support.quantized import tiny_causal_lm, write_decoded, write_quantized

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def adapt(base: Path, directory: Path, **options: Any) -> Any:
    """Saves an adapter whose every value is random; returns the model with it, in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def merged_in_memory(base: Path, adapter: Path, target: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(target)
    return weights(target)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    source = weight_source(directory)
    return {name: source.read(name) for name in source.names()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Vectors, and routers that no adapter changes, keep the dtype that they have in the file;
    transformers widens some of them."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        is_kept = value.dim() < 2 or name.endswith(".gate.weight")
        assert value.dtype is other[name].dtype or is_kept, name
        assert torch.equal(value.float(), other[name].float()), name


def merge(base: Path, adapter: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    write_directory(plan_merge(base, adapter, **options), out)
    return weights(out)


# Names of a base, and what is adapted.
ADAPTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": [*ATTENTION, "down_proj"]}),
    ("llama", {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
    ("llama", {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]}),
    ("deepseek-v3", {"target_modules": MLA, "modules_to_save": ["lm_head", "gate"]}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    # Its class has routers in fp32, and the file in bf16.
    ("ernie-moe", {"target_modules": ATTENTION, "modules_to_save": ["gate"]}),
    ("deepseek-v3", {"target_modules": MLA}),
    ("qwen3-moe", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    ("glm4-moe", {"target_modules": [*ATTENTION, "down_proj"], "target_parameters": EXPERTS}),
    # Packed and transposed, (expert, in, out), in the file and in the model.
    ("gpt-oss", {"target_modules": [], "target_parameters": EXPERTS}),
]


@pytest.mark.parametrize(
    ("number", "dtype"), in_turn(range(len(ADAPTED)), [torch.bfloat16, torch.float32])
)
def test_a_merge_has_the_bits_of_peft(tmp_path, number, dtype) -> None:
    name, options = ADAPTED[number]
    model = tiny_causal_lm(name, dtype=dtype)
    write_quantized(model, tmp_path / "base", "bf16", num_shards=3)
    adapt(tmp_path / "base", tmp_path / "adapter", **options)
    expected = merged_in_memory(tmp_path / "base", tmp_path / "adapter", tmp_path / "expected")
    (tmp_path / "base" / "chat_template.jinja").write_text("the base's")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("that of training")
    got = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "that of training"
    assert_equal(got, expected)
    before = weights(tmp_path / "base")
    assert any(not torch.equal(value, before[key]) for key, value in got.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype is dtype


@pytest.mark.parametrize(
    ("name", "codec"),
    sampled(
        [
            ("deepseek-v3", "fp8"), ("deepseek-v3", "int4"), ("deepseek-v3", "nf4"),
            ("deepseek-v3", "mxfp4-packed"), ("deepseek-v3", "fp4-experts"),
            ("gpt-oss", "mxfp4"), ("glm4-moe", "fp8"), ("glm4-moe", "gptq-order"),
            ("deepseek-v3", "modelopt-nvfp4"),
        ],
        lambda case: case[1] in ("int4", "nf4", "mxfp4") or case[0] == "glm4-moe",
    ),
)  # fmt: skip
def test_a_quantised_base_is_decoded_or_kept(tmp_path, name, codec) -> None:
    write_quantized(tiny_causal_lm(name), tmp_path / "base", codec)
    for file in (tmp_path / "base").glob("*.safetensors"):
        stored = load_file(file)  # compressed-tensors has written shapes of both dtypes.
        longer = {name: t.long() for name, t in stored.items() if name.endswith("_shape")}
        save_file(stored | longer, file, metadata={"format": "pt"})
    write_decoded(tmp_path / "base", tmp_path / "decoded")
    attention = MLA if name == "deepseek-v3" else ATTENTION
    options = {"target_modules": attention, "target_parameters": EXPERTS}
    adapt(tmp_path / "decoded", tmp_path / "adapter", **options)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    expected = merged_in_memory(tmp_path / "decoded", adapter, tmp_path / "expected")
    assert_equal(merge(base, adapter, tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config

    kept = merge(base, adapter, tmp_path / "kept", to="keep")
    before, after = weight_source(base), weight_source(tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text()) == read_config(base)
    assert not (tmp_path / "kept" / "hf_quant_config.json").exists()
    stored = [{n: d for n, (d, _) in of.stored_facts().items()} for of in (before, after)]
    assert stored[0] == stored[1]
    for name in before.names():
        old, new = before.encoded(name), after.encoded(name)
        assert type(new.codec) is type(old.codec) and new.names == old.names
        again = old.codec.encode(expected[name])
        decoded = torch.empty_like(expected[name])
        again.codec.decode(again.parts, old.shape, decoded)
        is_same = torch.equal(expected[name], before.read(name))
        assert torch.equal(kept[name], before.read(name) if is_same else decoded), name


@pytest.mark.parametrize("codec", ["mlx", "hqq"])
def test_a_base_of_another_writer_is_kept_under_its_names(tmp_path, codec) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_quantized(tiny_causal_lm("llama"), base, codec)
    if codec == "mlx":  # mlx-lm has this key, too.
        config = read_config(base)
        config["quantization"] = config["quantization_config"]
        (base / "config.json").write_text(json.dumps(config))
    write_decoded(base, tmp_path / "decoded")
    adapt(tmp_path / "decoded", adapter, target_modules=["q_proj"])
    expected = merged_in_memory(tmp_path / "decoded", adapter, tmp_path / "expected")
    (base / "config.json").write_text(json.dumps(read_config(base) | {"dtype": "float8_e4m3fn"}))
    assert_equal(merge(base, adapter, tmp_path / "out"), expected)
    assert not {"quantization", "quantization_config"} & read_config(tmp_path / "out").keys()
    merge(base, adapter, tmp_path / "kept", to="keep")
    before, after = weight_source(base), weight_source(tmp_path / "kept")
    assert before.stored_facts() == after.stored_facts()
    assert after.encoded("model.layers.0.self_attn.q_proj.weight") == before.encoded(
        "model.layers.0.self_attn.q_proj.weight"
    )


def test_a_layer_that_peft_never_merges_is_refused_before_anything_is_written(tmp_path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_quantized(tiny_causal_lm("llama"), base, "bf16")
    adapt(base, adapter, target_modules=["q_proj"], alora_invocation_tokens=[1, 2])
    with pytest.raises(UnsupportedError, match=r"q_proj.*ALoraLinearVariant cannot be merged"):
        plan_merge(base, adapter)


def test_a_weight_in_long_groups_down_a_column_can_be_kept(tmp_path) -> None:
    codec, weight = AffineGroups(100, "F16", 4, "HQQ_DOWN", True), torch.randn(100, 64)
    planned = as_codes("w", (100, 64), codec, lambda: weight)
    assert planned.make().keys() == {info.name for info in planned.infos}


def test_an_adapter_of_another_base_is_refused_by_name(tmp_path) -> None:
    write_quantized(tiny_causal_lm("llama"), tmp_path / "base", "bf16")
    write_quantized(tiny_causal_lm("deepseek-v3"), tmp_path / "other", "bf16")
    adapt(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="q_proj"):
        plan_merge(tmp_path / "other", tmp_path / "adapter")
    with pytest.raises(ConfigError, match="no adapter_config.json"):
        plan_merge(tmp_path / "base", tmp_path / "base")
    for name, said in (("none", "is no directory"), ("adapter", "has neither model.safetensors")):
        with pytest.raises(ConfigError, match=f"^{tmp_path / name} {said}"):
            plan_merge(tmp_path / name, tmp_path / "adapter")


def test_the_identity_of_a_base_is_that_of_its_values_however_they_are_stored(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_causal_lm("llama")
    write_quantized(model, tmp_path / "base", "bf16")
    adapt(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])
    write_identity(identify(weight_source(tmp_path / "base")), tmp_path / "adapter")
    # Of another name, in one file.
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    again.save_pretrained(tmp_path / "moved")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    plan_merge(tmp_path / "moved", tmp_path / "adapter")
    # Trained further: a kind of module, in every layer.
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.add_(0.1 if name.endswith("v_proj.weight") else 0)
    again.save_pretrained(tmp_path / "further")
    with pytest.raises(ConfigError, match="another base, .*base: .*further has.*other values"):
        plan_merge(tmp_path / "further", tmp_path / "adapter")
    write_quantized(model, tmp_path / "small", "nf4")
    with pytest.raises(ConfigError, match=r"other tensors .*any_base = true"):
        plan_merge(tmp_path / "small", tmp_path / "adapter")
    arguments = ["merge", str(tmp_path / "further"), str(tmp_path / "adapter"), "-o"]
    refused = CliRunner().invoke(app, [*arguments, str(tmp_path / "out")])
    assert refused.exit_code and not (tmp_path / "out").exists()
    done = CliRunner().invoke(app, [*arguments, str(tmp_path / "out"), "--any-base"])
    assert done.exit_code == 0, done.output
    assert not caplog.records
    # Another program's adapter has a name at most.
    (tmp_path / "adapter" / IDENTITY_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="no identity of a base: it has no 'schema'"):
        plan_merge(tmp_path / "base", tmp_path / "adapter")
    (tmp_path / "adapter" / IDENTITY_NAME).unlink()
    plan_merge(tmp_path / "base", tmp_path / "adapter")
    assert not caplog.records
    plan_merge(tmp_path / "further", tmp_path / "adapter")
    assert "base as its base, and is used over" in caplog.text


@pytest.mark.parametrize(
    ("named", "place", "is_same"),
    [
        ("Qwen/Qwen3-32B", "models/qwen3-32b", True),
        ("Qwen/Qwen3-32B", "hub/models--Qwen--Qwen3-32B/snapshots/0f", True),
        ("Qwen/Qwen3-32B", "models/Qwen3-8B", False),
        ("models/x/", "models/x", True),
    ],
)
def test_a_name_of_the_hub_means_the_directory_of_that_name(
    named: str, place: str, is_same: bool
) -> None:
    assert is_name_of(named, Path(place)) is is_same


def test_the_command_writes_a_new_directory_only(tmp_path) -> None:
    write_quantized(tiny_causal_lm("llama"), tmp_path / "base", "bf16")
    of_run = {"infinity-run.json": "{}", "summary.json": "{}", "metrics.jsonl": '{"step": 1}\n'}
    for name, content in (of_run | {"tokenizer.json": "{}"}).items():
        (tmp_path / "base" / name).write_text(content)
    adapt(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])
    arguments = ["merge", str(tmp_path / "base"), str(tmp_path / "adapter"), "-o"]
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [*arguments, str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["nbytes"] == sum(value.nbytes for value in weights(out).values())
    assert (out / "tokenizer.json").exists()
    assert not of_run.keys() & {file.name for file in out.iterdir()}, "the result is of no run"
    again = CliRunner().invoke(app, [*arguments, str(out)])
    assert again.exit_code == 2 and "already exists" in again.stderr
