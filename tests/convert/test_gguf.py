"""`infinity convert` of GGUF files: the values of transformers' own reader, in blocks as they are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mistral3Config

import infinity
from infinity.checkpoint.huggingface.import_weights import weight_source
from infinity.codecs.affine import AffineGroups
from infinity.codecs.records import RECORDS
from infinity.errors import ConfigError, CorruptionError
from infinity.tools.convert.gguf import plan_gguf
from infinity.tools.convert.rewrite import write_directory
from tests.parity.in_place import Base, adapted, config_of, over, train
from tests.support.bits import assert_same
from tests.support.commands import run_command
from tests.support.quantized import write_decoded

WIDTH, VOCABULARY = 256, 96
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
# By the name of the architecture in GGUF: the model_type, and sizes of its own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", EXPERTS),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}


def written(
    path: Path, architecture: str, kind_of: Any, num_files: int = 1, *, is_scaled: bool = False
) -> list[Path]:
    """Writes a GGUF file, or a split, of a seeded model, as llama.cpp's converter lays it out."""
    model_type, sizes = MODELS[architecture]
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if name.endswith("experts.gate_up_proj"):
            layer, values = name.split(".")[2], tensor.numpy()
            for half, part in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                _add(tensors, f"blk.{layer}.ffn_{half}_exps.weight", part, kind_of)
            continue
        base, _, suffix = name.rpartition(".")
        if name.endswith("experts.down_proj"):
            base, suffix = name, "weight"
        values = tensor.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = (
                values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            )
        if architecture == "gpt2" and base.rpartition(".c_")[1]:  # A Conv1D.
            values = values.T
        if architecture == "gemma2" and "norm" in name:
            values = values + 1
        _add(tensors, f"{names.get_name(base)}.{suffix}", values, kind_of)
    if is_scaled:
        tensors["rope_freqs.weight"] = np.ones(32, dtype=np.float32), "F32"
    paths = [path] if num_files == 1 else [
        path.with_name(f"{path.stem}-{i + 1:05}-of-{num_files:05}.gguf") for i in range(num_files)
    ]  # fmt: skip
    shares = np.array_split(np.array(list(tensors)), num_files)
    for file, share in zip(paths, shares, strict=True):
        writer = gguf.GGUFWriter(file, architecture)
        if file == paths[0]:
            _describe(writer, config)
            if is_scaled:
                writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
                writer.add_sliding_window(0)  # None.
        for name in share:
            data, kind = tensors[str(name)]
            raw = GGMLQuantizationType[kind]
            writer.add_tensor(str(name), data, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _add(tensors: dict[str, Any], name: str, values: np.ndarray[Any, Any], kind_of: Any) -> None:
    kind = kind_of(name) if values.ndim > 1 and "ffn_gate_inp" not in name else "F32"
    if kind in ("F32", "F16"):
        tensors[name] = values.astype(np.float32 if kind == "F32" else np.float16), kind
    elif kind.endswith("_K") or kind.startswith("IQ"):
        tensors[name] = _any_blocks(values.shape, kind), kind
    else:
        tensors[name] = gguf.quantize(values, GGMLQuantizationType[kind]), kind


def _any_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray[Any, Any]:
    """Blocks that gguf does not write: any codes, with scales of the size of weights."""
    record = RECORDS[kind].record
    source = np.random.default_rng(len(shape) + shape[0])
    blocks = source.integers(0, 256, (*shape[:-1], shape[-1] // record.numel, record.nbytes))
    blocks = blocks.astype(np.uint8)
    for at in (record.scale, record.minimum):
        if at >= 0:
            halves = source.normal(0, 1e-3, (*blocks.shape[:-1], 1)).astype(np.float16)
            blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _describe(writer: Any, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if config.model_type != "qwen2" else 64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    tokens = ["t", "0", "t0", *(f"t{index}" for index in range(3, VOCABULARY - 2)), "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (VOCABULARY - 2) + [3, 3])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(VOCABULARY - 2)
    writer.add_eos_token_id(VOCABULARY - 1)


def converted(file: Path, out: Path) -> list[str]:
    said: list[str] = []
    write_directory(plan_gguf(file, said.append), out)
    return said


def decoded(directory: Path) -> dict[str, torch.Tensor]:
    source = weight_source(directory)
    found = {}
    for name in source.names():
        encoded = source.encoded(name)
        parts = [source.read_stored(part).reshape(-1).view(torch.uint8) for part in encoded.names]
        found[name] = torch.empty(encoded.shape)
        encoded.codec.decode(parts, encoded.shape, found[name])
    source.close()
    first = ".0.up_proj.weight"
    for layer in [name.removesuffix(first) for name in found if name.endswith(first)]:
        gate, up, down = (
            torch.stack([found.pop(f"{layer}.{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{layer}.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.down_proj": down}
    return found


def expected_of(file: Path) -> dict[str, torch.Tensor]:
    beside = file.parent / "config.json"
    config = {"config": AutoConfig.from_pretrained(file.parent)} if beside.exists() else {}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **config
    )
    return dict(model.state_dict())


def put_config_beside(directory: Path, architecture: str) -> None:
    model_type, sizes = MODELS[architecture]
    AutoConfig.for_model(model_type, **{**SIZES, **sizes}).save_pretrained(directory)


def mixed(name: str) -> str:
    """As llama.cpp's mixtures: other types for what matters more."""
    if "ffn_up_exps" in name:
        return "Q5_K"
    return "Q6_K" if "ffn_down" in name or "attn_v" in name else "Q4_K"


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "gpt2"])
def test_values_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", architecture, mixed)
    if architecture.startswith("qwen3"):  # transformers takes some of its sizes for granted.
        with pytest.raises(ConfigError, match=r"put the config\.json of the original model beside"):
            plan_gguf(file, print)
        put_config_beside(tmp_path, architecture)
        beside = tmp_path / "config.json"
        told = beside.read_text()
        beside.write_text(told.replace('"head_dim": 64', '"head_dim": 32'))
        with pytest.raises(ConfigError, match=f"is {beside} that of the original model?"):
            plan_gguf(file, print)
        beside.write_text(told)
    assert converted(file, tmp_path / "out") == []
    found, expected = decoded(tmp_path / "out"), expected_of(file)
    tied = expected.keys() - found.keys()
    assert tied <= {"lm_head.weight"}
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name
    source = weight_source(tmp_path / "out")
    kinds = {type(source.encoded(name).codec) for name in source.names() if "proj" in name}
    assert kinds - {AffineGroups} == set() or architecture == "qwen2"  # Whose biases are numbers.


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_an_adapter_over_blocks_has_the_bits_of_one_over_their_values(
    architecture: str, tmp_path: Path
) -> None:
    (file,) = written(tmp_path / "tiny.gguf", architecture, mixed)
    put_config_beside(tmp_path, architecture)
    converted(file, tmp_path / "out")
    base = Base.at(tmp_path / "out")
    write_decoded(base.quantized, tmp_path / "decoded")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.bfloat16)
    model = infinity.factored_experts(adapted(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    expected = train(model, optimizer, steps=range(2))
    with over(base, config_of(tmp_path)) as (model, engine):
        assert any(unit.stored is not None for unit in engine.store.units)
        seen = train(model, infinity.AdamW(model, lr=1e-2), steps=range(2))
    assert_same(expected, seen, is_ordered=False)


def test_a_mixtral_has_the_name_of_a_llama_and_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(MODELS, "llama", ("mixtral", sizes))
    (file,) = written(tmp_path / "tiny.gguf", "llama", mixed)
    with pytest.raises(ConfigError, match=r"put the config\.json of the original model beside"):
        plan_gguf(file, print)
    put_config_beside(tmp_path, "llama")
    assert converted(file, tmp_path / "out") == []
    found = decoded(tmp_path / "out")
    stored = {one.name: one for one in gguf.GGUFReader(file).tensors}
    for layer, (part, name) in itertools.product(
        range(2), {"w1": "gate", "w2": "down", "w3": "up"}.items()
    ):
        experts = stored[f"blk.{layer}.ffn_{name}_exps.weight"]
        values = torch.from_numpy(gguf.dequantize(experts.data, experts.tensor_type))
        for expert in range(4):
            place = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
            assert torch.equal(found.pop(place), values[expert]), place
    q_proj = found["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(q_proj, torch.zeros_like(q_proj))


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_scale_of_attention_that_a_file_lacks_is_that_of_llama_cpp(
    architecture: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, scalar in ((layers, WIDTH // 2), (2, 64)):
        model_type = {"gemma2": "gemma2", "gemma3": "gemma3_text"}[architecture]
        sizes = {"num_hidden_layers": count, "num_attention_heads": 2, "tie_word_embeddings": True}
        monkeypatch.setitem(MODELS, architecture, (model_type, sizes))
        (file,) = written(tmp_path / "tiny.gguf", architecture, lambda _: "F16")
        converted(file, tmp_path / str(count))
        config = json.loads((tmp_path / str(count) / "config.json").read_text())
        assert config["query_pre_attn_scalar"] == scalar


def test_numbers_that_transformers_turns_are_turned(tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "gpt2", lambda _: "F16")
    put_config_beside(tmp_path, "gpt2")
    converted(file, tmp_path / "out")
    found, expected = decoded(tmp_path / "out"), expected_of(file)
    assert all(torch.equal(values, expected[name]) for name, values in found.items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "F16"])
def test_every_type_is_moved_to_the_bit(kind: str, tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "llama", lambda _: kind)
    converted(file, tmp_path / "out")
    found, expected = decoded(tmp_path / "out"), expected_of(file)
    assert all(torch.equal(values, expected[name]) for name, values in found.items())


def test_a_split_is_one_model(tmp_path: Path) -> None:
    (whole,) = written(tmp_path / "whole.gguf", "qwen3", mixed)
    put_config_beside(tmp_path, "qwen3")
    converted(whole, tmp_path / "of-one")
    first, *_ = written(tmp_path / "parts.gguf", "qwen3", mixed, num_files=3)
    converted(first, tmp_path / "of-three")
    assert len(list((tmp_path / "of-three").glob("*.safetensors"))) == 3
    one, three = decoded(tmp_path / "of-one"), decoded(tmp_path / "of-three")
    assert one.keys() == three.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)
    first.with_name("parts-00002-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match="parts-00002-of-00003"):
        plan_gguf(first, print)


def test_the_tokenizer_is_that_of_the_file_or_the_one_beside_it(tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "llama", mixed)
    converted(file, tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert own.convert_ids_to_tokens([3, VOCABULARY - 1]) == ["t3", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({"other": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "notes.txt").write_text("stays")
    converted(file, tmp_path / "second")
    assert (tmp_path / "second/tokenizer.json").read_text() == (
        tmp_path / "tokenizer.json"
    ).read_text()
    assert not (tmp_path / "second/notes.txt").exists()


def test_what_the_described_model_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "llama", ("llama", {"attention_bias": True}))
    (file,) = written(tmp_path / "tiny.gguf", "llama", mixed, is_scaled=True)
    (line,) = converted(file, tmp_path / "out")
    assert "'llama.rope.scaling.type', 'blk.0.attn_k.bias'" in line
    assert "and 5 more" in line and "put the config.json" in line and "window" not in line
    put_config_beside(tmp_path, "llama")
    assert converted(file, tmp_path / "second") == []


def test_names_are_those_of_the_architecture_and_a_config_of_images_gives_its_text(
    tmp_path: Path,
) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "llama", mixed)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')  # Some have that alone.
    assert converted(file, tmp_path / "out") == []
    expected, text = decoded(tmp_path / "out"), AutoConfig.for_model("mistral", **SIZES)
    for config in (text, Mistral3Config(text_config=text.to_dict())):
        config.save_pretrained(tmp_path)
        assert converted(file, tmp_path / config.model_type) == []
        found = decoded(tmp_path / config.model_type)
        assert all(torch.equal(values, found[name]) for name, values in expected.items())
        told = AutoConfig.from_pretrained(tmp_path / config.model_type)
        assert (told.model_type, str(told.dtype)) == ("mistral", "torch.bfloat16")


def test_an_architecture_that_transformers_does_not_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "gemma", ("gemma", {"tie_word_embeddings": True}))
    (file,) = written(tmp_path / "tiny.gguf", "gemma", mixed)
    put_config_beside(tmp_path, "gemma")
    with pytest.raises(ConfigError, match="does not read 'gemma' from GGUF"):
        plan_gguf(file, print)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_types_without_a_codec_become_the_numbers_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    kind_of = lambda name: "TQ2_0" if "ffn" in name or "attn_q" in name else "Q4_K"  # noqa: E731
    (file,) = written(tmp_path / "tiny.gguf", architecture, kind_of)
    put_config_beside(tmp_path, architecture)
    (line,) = converted(file, tmp_path / "out")
    assert "model.layers.0.mlp." in line and "become bfloat16: there is no codec for" in line
    found, expected = decoded(tmp_path / "out"), expected_of(file)
    for name, values in found.items():
        is_router = name.endswith("mlp.gate.weight")
        is_wide = "q_proj" in name or (".mlp." in name and not is_router)
        want = expected[name].bfloat16().float() if is_wide else expected[name]
        assert torch.equal(values, want), name


def test_types_that_nobody_decodes_are_refused_by_name(tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "llama", lambda _: "MXFP4")
    with pytest.raises(ConfigError, match=r"MXFP4, for which there is no codec; .*Q4_K"):
        plan_gguf(file, print)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "llama", mixed)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises((CorruptionError, ConfigError), match=r"tiny\.gguf"):
        plan_gguf(file, print)
    with pytest.raises(ConfigError, match="no file"):
        plan_gguf(tmp_path / "none.gguf", print)


def test_the_command_makes_a_directory_and_a_gguf_path_names_the_command(tmp_path: Path) -> None:
    (file,) = written(tmp_path / "tiny.gguf", "llama", mixed)
    done = run_command("convert", file, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["shards"] == ["model.safetensors"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    for refused in (
        run_command("new", file, "--data", tmp_path / "data.jsonl"),
        run_command("new", tmp_path, "--data", tmp_path / "data.jsonl"),
        run_command("generate", tmp_path, "t0"),
        run_command("convert", tmp_path, "-o", tmp_path / "third"),
    ):
        assert refused.exit_code != 0 and f"infinity convert {file} -o" in refused.output
    merged = run_command("merge", tmp_path / "out", tmp_path / "none", "-o", tmp_path / "merged")
    assert merged.exit_code != 0
