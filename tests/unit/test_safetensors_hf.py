"""Hugging Face checkpoints in and out, compared with from_pretrained and save_pretrained."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.checkpoint import export_safetensors, weight_source
from infinity.checkpoint.huggingface import export_weights
from infinity.errors import ConfigError, CorruptionError, StorageError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": 64},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 8, "head_dim": 8},
    "olmoe": EXPERTS,
    "gpt_neox": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
}


def make_config(model_type: str):
    extra = ARCHITECTURES[model_type]
    return AutoConfig.for_model(model_type, **(extra if model_type == "gpt2" else SMALL | extra))


def make_model(model_type: str) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make_config(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # Zeros and ones would hide a mix-up.
            parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def make_empty(model_type: str) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config(model_type), dtype=torch.float32)


def collect(directory: Path, model: torch.nn.Module, **options) -> dict[str, torch.Tensor]:
    written: dict[str, torch.Tensor] = {}

    def write(name: str, tensor: torch.Tensor) -> None:
        assert name not in written, f"{name} was written twice"
        written[name] = tensor

    weight_source(directory).plan(model, **options).load(write)
    return written


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(24).reshape(2, 12)).logits


@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_import_gives_the_weights_of_from_pretrained(tmp_path, model_type, max_shard_size):
    model = make_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)

    written = collect(tmp_path, make_empty(model_type))

    expected = dict(model.named_parameters())
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("max_shard_nbytes", [1 << 30, 10_000])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_export_loads_with_transformers_alone(tmp_path, model_type, max_shard_nbytes):
    model = make_model(model_type)
    files = export_safetensors(model, tmp_path, max_shard_nbytes=max_shard_nbytes)

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert (len(files) > 1) == (max_shard_nbytes < 1 << 30)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_export_has_the_names_that_save_pretrained_gives(tmp_path, model_type):
    model = make_model(model_type)
    export_safetensors(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")

    ours, theirs = (
        safetensors.torch.load_file(tmp_path / side / "model.safetensors")
        for side in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_experts_are_packed_one_target_at_a_time(tmp_path, monkeypatch):
    """Peak of an import is one packed tensor and its sources, not the layer and not the model."""
    model = make_model("mixtral")
    model.save_pretrained(tmp_path)
    source = weight_source(tmp_path)
    plan = source.plan(make_empty("mixtral"))

    for group in plan.groups:
        experts = {name.split(".experts.")[0] for name in group.source_names}
        assert len(experts) == 1, "a group never spans layers"
    assert max(len(group.sources) for group in plan.groups) == 3 * 2


def test_base_model_checkpoint_feeds_a_model_with_a_head(tmp_path):
    model = make_model("gpt2")
    model.transformer.save_pretrained(tmp_path)

    written = collect(tmp_path, make_empty("gpt2"))

    assert written.keys() == dict(model.named_parameters()).keys()
    assert torch.equal(written["transformer.wte.weight"], model.transformer.wte.weight)


def test_tensors_keep_the_dtype_of_the_file(tmp_path):
    """The fp32 master must get the file's value, not one that went through bf16."""
    make_model("llama").save_pretrained(tmp_path)

    written = collect(tmp_path, make_empty("llama").to(torch.bfloat16))

    assert {tensor.dtype for tensor in written.values()} == {torch.float32}


def test_persistent_buffers_travel_both_ways(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("scale", torch.full((3,), value))
            self.register_buffer("scratch", torch.full((3,), value), persistent=False)

    export_safetensors(Model(7.0), tmp_path)
    model = Model(0.0)
    written = collect(tmp_path, model)

    assert written.keys() == {"linear.weight", "linear.bias"}
    assert model.scale.tolist() == [7.0] * 3 and model.scratch.tolist() == [0.0] * 3


def test_tied_weight_stored_twice_is_taken_once_when_equal(tmp_path):
    model = make_model("gpt2")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    safetensors.torch.save_file(tensors, file)

    assert collect(tmp_path, make_empty("gpt2")).keys() == dict(model.named_parameters()).keys()

    tensors["lm_head.weight"] += 1
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        collect(tmp_path, make_empty("gpt2"))


def test_peft_model_takes_the_checkpoint_of_the_model_it_wraps(tmp_path):
    import peft

    model = make_model("llama")
    model.save_pretrained(tmp_path)
    wrapped = peft.get_peft_model(
        make_model("llama"),
        peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"]),
    )

    written = collect(tmp_path, wrapped)

    q_proj = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(written[q_proj], model.model.layers[0].self_attn.q_proj.weight)
    assert not any("lora_" in name for name in written)
    copies = [name for name in written if "lm_head" in name]
    assert len(copies) == 2, "the frozen module and its trainable copy"
    assert all(torch.equal(written[name], model.lm_head.weight) for name in copies)


def never(name: str, tensor: torch.Tensor) -> None:
    raise AssertionError(f"{name} was written although the checkpoint is bad")


def test_missing_tensor_is_refused_before_anything_is_written(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, file)

    with pytest.raises(ConfigError, match=r"lacks 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        weight_source(tmp_path).plan(make_empty("llama")).load(never)
    plan = weight_source(tmp_path).plan(make_empty("llama"), strict=False)
    assert plan.missing == ["model.layers.1.mlp.up_proj.weight"]


def test_wrong_shape_names_file_tensor_and_both_shapes(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    config = make_config("llama")
    config.intermediate_size = 48
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor .*\(.*32.*\).*\(.*48.*\)"):
        weight_source(tmp_path).plan(model).load(never)


def test_missing_expert_is_refused_by_shape(tmp_path):
    make_model("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    removed = next(name for name in tensors if ".experts.1." in name)
    del tensors[removed]
    safetensors.torch.save_file(tensors, file)

    with pytest.raises(ConfigError, match="experts"):
        weight_source(tmp_path).plan(make_empty("mixtral")).load(never)


def sharded(tmp_path: Path) -> tuple[Path, dict]:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


@pytest.mark.parametrize("folder", ["", "snapshots/0a1b"])
def test_shards_of_an_interrupted_download_are_named(tmp_path, folder):
    directory = tmp_path / folder
    _, content = sharded(directory)
    shards = sorted(set(content["weight_map"].values()))
    for shard in shards[:2]:
        (directory / shard).unlink()
    begun = tmp_path / ("blobs" if folder else ".cache/huggingface/download")
    begun.mkdir(parents=True)
    (begun / "0f.incomplete").write_bytes(b"a part")

    with pytest.raises(CorruptionError, match=rf"{shards[0]}.*{shards[1]}.*; 1 downloads were int"):
        weight_source(directory)


def test_weights_in_another_layout_are_not_read_and_said_once(tmp_path, caplog):
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / "original").mkdir()
    for name in ("consolidated.safetensors", "original/consolidated.00.pth", "model-q4.gguf"):
        (tmp_path / name).write_bytes(b"of another program")
    for _ in range(2):
        weight_source(tmp_path)
    (said,) = caplog.messages
    assert "'consolidated.safetensors', 'model-q4.gguf', 'original/consolidated.00.pth'" in said


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("consolidated.safetensors", "convert_mistral_weights_to_hf.py .* or download model"),
        ("original/consolidated.00.pth", "convert_llama_weights_to_hf.py"),
        ("consolidated.00.pth", "convert_llama_weights_to_hf.py"),
        ("pytorch_model-00001-of-00002.bin", "`infinity convert .* -o DIR`"),
        ("model-q4.gguf", "`infinity convert .*/model-q4.gguf -o DIR`"),
        ("model-00001-of-00002.safetensors", "download model.safetensors.index.json"),
    ],
)
def test_another_layout_alone_is_refused_with_what_makes_a_directory_of_it(tmp_path, name, remedy):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"of another program")

    with pytest.raises(ConfigError, match=rf"but '{name}'.*{remedy}"):
        weight_source(tmp_path)


def test_index_that_names_the_wrong_file_is_refused(tmp_path):
    index, content = sharded(tmp_path)
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"]["model.norm.weight"] = next(
        file for file in files if file != content["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(content))

    with pytest.raises(CorruptionError, match=r"'model\.norm\.weight' is in this file, but"):
        weight_source(tmp_path)


def test_index_may_not_point_outside_the_directory(tmp_path):
    index, content = sharded(tmp_path)
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))

    with pytest.raises(CorruptionError, match="no file name"):
        weight_source(tmp_path)


def test_directory_without_weights_is_refused_with_its_content(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"notes\.txt"):
        weight_source(tmp_path)


def test_export_replaces_an_earlier_one_and_nothing_else(tmp_path):
    model = make_model("llama")
    (tmp_path / "notes.txt").write_text("mine")
    export_safetensors(model, tmp_path, max_shard_nbytes=10_000)
    export_safetensors(model, tmp_path)

    weights = sorted(entry.name for entry in tmp_path.iterdir() if "model" in entry.name)
    assert weights == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))

    def read(name: str) -> torch.Tensor:
        with pytest.raises(ConfigError, match="another export is being written there"):
            export_safetensors(make_model("llama"), tmp_path)
        return model.get_parameter(name)

    export_safetensors(model, tmp_path, read=read)


@pytest.mark.parametrize("max_shard_nbytes", [5_000, 1 << 30])
def test_an_export_that_ends_between_texts_and_weights_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_shard_nbytes: int
) -> None:
    """A killed one leaves nothing that loads; one that fails leaves the earlier export."""
    earlier = make_model("llama")
    export_safetensors(earlier, tmp_path, max_shard_nbytes=max_shard_nbytes)
    text = (tmp_path / "config.json").read_text()
    later = make_model("llama")
    later.config.hidden_act = "gelu"
    replace_files = export_weights.replace_files

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.EACCES, "no permission")

    monkeypatch.setattr(export_weights, "replace_files", fail)
    with pytest.raises(StorageError, match="Permission denied"):
        export_safetensors(later, tmp_path, max_shard_nbytes=max_shard_nbytes)
    assert (tmp_path / "config.json").read_text() == text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, earlier.lm_head.weight)
    assert not list(tmp_path.glob(".*partial*"))

    child = os.fork()
    if child == 0:

        def die(*args: Any, **options: Any) -> None:
            replace_files(*args, **options)
            os._exit(9)

        export_weights.replace_files = die
        try:
            export_safetensors(later, tmp_path, max_shard_nbytes=max_shard_nbytes)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with pytest.raises(OSError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_export_without_space_is_refused_before_a_file_is_made(tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr("os.statvfs", lambda path: Full)
    with pytest.raises(StorageError, match=r"needs .* KiB, the file system has 4\.0 KiB"):
        export_safetensors(make_model("llama"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_masters_are_exported_in_fp32(model_type: str, tmp_path: Path) -> None:
    """What a bf16 model is rounded from, through transformers' own conversions of names."""
    reference = make_model(model_type)
    reference.save_pretrained(tmp_path / "original")
    with infinity.init_empty_weights():
        model = AutoModelForCausalLM.from_config(make_config(model_type), dtype=torch.bfloat16)
    config = {"tiers": {"host": {"capacity": "64MiB"}}, "precision": {"compute": "bfloat16"}}
    infinity.offload(model, config, weights=tmp_path / "original")
    export_safetensors(model, tmp_path / "wide", master=True)
    export_safetensors(model, tmp_path / "narrow")
    infinity.engine_of(model).close()
    assert model.config.dtype is torch.bfloat16, "the model's own configuration stays as it was"
    wide, narrow = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("wide", "narrow")
    )
    assert narrow.dtype is torch.bfloat16
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name
