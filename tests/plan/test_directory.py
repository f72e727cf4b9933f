"""A downloaded directory: its bytes as they lie, and the answer that a user gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig
from typer.testing import CliRunner

from infinity.config import SwapConfig
from infinity.errors import ConfigError, CorruptionError
from infinity.plan.directory import read_directory
from infinity.simulate.job import batch_of
from infinity.tools.cli import app
from infinity.tools.plan.subject import frozen_directory_of, planned_model
from tests.decode.test_checkpoints import PUBLISHED
from tests.support.commands import plan_in_numbers
from tests.support.quantized import read_headers, tiny_causal_lm, write_quantized

RUNNER = CliRunner()
HIDDEN, FFN, EXPERT_FFN, EXPERTS, VOCAB = 256, 512, 128, 4, 300
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "intermediate_size": FFN, "moe_intermediate_size": EXPERT_FFN, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def fp8(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A matrix and its scales, as DeepSeek-V3 has them."""
    blocks = -(-rows // 128), -(-columns // 128)
    return {
        f"{name}.weight": torch.zeros(rows, columns).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": torch.zeros(blocks),
    }


def mlp(name: str, width: int) -> dict[str, torch.Tensor]:
    inward = {k: v for each in ("gate", "up") for k, v in fp8(f"{name}.{each}_proj", width, HIDDEN).items()}  # fmt: skip
    return inward | fp8(f"{name}.down_proj", HIDDEN, width)


def block(layer: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a block beside the experts, and the experts."""
    name = f"model.layers.{layer}"
    rest = {f"{name}.{each}.weight": torch.zeros(HIDDEN, dtype=torch.bfloat16)
            for each in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
    for each, rows, columns in (
        ("q_a_proj", 64, HIDDEN), ("q_b_proj", 192, 64), ("kv_a_proj_with_mqa", 48, HIDDEN),
        ("kv_b_proj", 256, 32), ("o_proj", HIDDEN, 128),
    ):  # fmt: skip
        rest |= fp8(f"{name}.self_attn.{each}", rows, columns)
    for each, length in (("q_a_layernorm", 64), ("kv_a_layernorm", 32)):
        rest[f"{name}.self_attn.{each}.weight"] = torch.zeros(length, dtype=torch.bfloat16)
    if layer == 0:
        return rest | mlp(f"{name}.mlp", FFN), {}
    rest[f"{name}.mlp.gate.weight"] = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    rest |= mlp(f"{name}.mlp.shared_experts", EXPERT_FFN)
    experts: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        experts |= mlp(f"{name}.mlp.experts.{expert}", EXPERT_FFN)
    return rest, experts


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three shards with an index; a third layer is the module for multi-token prediction."""
    (first, _), (second, experts), (third, _) = block(0), block(1), block(2)
    table = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
    shards = [
        first | {"model.embed_tokens.weight": table},
        second | experts,
        third | {"lm_head.weight": table, "model.norm.weight": table[0].clone()},
    ]
    weight_map = {}
    for index, tensors in enumerate(shards):
        name = f"model-{index + 1:05}-of-00003.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_bytes_are_those_of_the_headers(directory: Path) -> None:
    found = read_directory(directory)
    (rest, experts), (rest_1, experts_1) = (
        [found.stored.part(layer, of_experts=of_experts) for of_experts in (False, True)]
        for layer in range(2)
    )
    assert (experts.nbytes, rest.nbytes) == (0, size(block(0)[0]))
    assert (rest_1.nbytes, experts_1.nbytes) == tuple(map(size, block(1)))
    assert experts_1.is_encoded and rest_1.is_encoded and found.stored.is_quantised
    table_nbytes = 2 * VOCAB * HIDDEN
    assert found.stored.part("embedding").nbytes == table_nbytes
    assert found.stored.part("head").nbytes == table_nbytes
    assert found.stored.part("norm").nbytes == 2 * HIDDEN
    assert found.stored.unused_nbytes == size(block(2)[0]), "the third layer is not read"
    assert found.stored.formats.startswith("fp8; ")
    assert found.num_drives == 1 and len(found.files) == 3


TOLD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(("method", "is_tied"), [("reward", False), ("classify", True)])
def test_a_model_that_scores_sequences_is_planned_with_its_own_head_alone(
    method: str, is_tied: bool, tmp_path: Path
) -> None:
    """In place of that of the language, which no pass reads; PEFT trains it in full. Also where
    --model names the directory or a file of shapes."""
    tiny_causal_lm("llama", tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")
    labels = ["a", "b", "c"] if method == "classify" else []
    config = SwapConfig.load({
        "model": {"path": str(tmp_path / "base")}, "adapter": {"rank": 4, "targets": "q_proj"},
        "data": {"paths": ["data.jsonl"]},
        "train": {"steps": 1, "batch_size": 1, "method": method, "labels": labels},
    })  # fmt: skip
    directory = frozen_directory_of(config, None, is_scored=False)
    assert directory is not None
    found, _ = planned_model(config, directory, None, None, None)
    named = frozen_directory_of(config, read_directory(tmp_path / "base"), is_scored=False)
    assert named is not None and named.shape == directory.shape
    told = "".join(f"{k} = {json.dumps(v)}\n" for k, v in TOLD.items())
    (tmp_path / "shapes.toml").write_text(f'name = "shapes"\n[config]\n{told}')
    shapes, _ = planned_model(config, None, str(tmp_path / "shapes.toml"), None, None)
    shape = LlamaConfig(**TOLD, num_labels=max(len(labels), 1))
    of_name: Any = AutoModelForSequenceClassification.from_config(shape)
    assert (shapes.num_params, shapes.hooked_modules[-1].trained_params) == (
        of_name.num_parameters(), of_name.score.weight.numel()
    )  # fmt: skip
    plain: Any = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=max(len(labels), 1)
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
    trained = get_peft_model(plain, lora).num_parameters(only_trainable=True)
    assert found.frozen is not None and found.frozen.trained_params == trained
    last = found.hooked_modules[-1]
    assert (last.trained_params, last.frozen_params) == (plain.score.weight.numel(), 0)
    table_nbytes = plain.get_input_embeddings().weight.nbytes
    assert directory.stored.unused_nbytes == (0 if is_tied else table_nbytes)
    batch = batch_of(config)  # A record of preferences has two sequences.
    assert batch.num_tokens == (2 if method == "reward" else 1) * batch.sequence_length


def test_the_answer_stands_first(directory: Path) -> None:
    arguments = ["--model", str(directory), "--hardware", "rtx4090-1nvme", "--examples", "1k"]
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Yes: LoRA of rank 16 (")
    assert "tokens/s)" in lines[1] and "2,048,000 tokens of data take" in lines[2]
    found = plan_in_numbers(*arguments)
    said, model = found["answer"], found["model"]
    assert said["fits"] and " ".join(said["text"].split()) == " ".join(" ".join(lines[:3]).split())
    assert said["data"]["num_steps"] == -(-2_048_000 // found["batch"]["tokens_per_step"])
    assert model["stored_nbytes"] == read_directory(directory).stored.nbytes
    assert model["adapter"]["rank"] == 16, "codes cannot be trained: an adapter is taken"
    assert plan_in_numbers(*arguments, "--lora", "4")["model"]["adapter"]["rank"] == 4
    # One directory is on one drive, whatever the machine has; --drives says otherwise.
    fast = "--hardware", "1xh200-4nvme"
    assert plan_in_numbers("--model", str(directory), *fast)["answer"]["checkpoint_drives"] == 1
    spread = plan_in_numbers("--model", str(directory), *fast, "--drives", "4")
    assert spread["answer"]["checkpoint_drives"] == 4


def test_a_file_with_an_adapter_plans_its_directory(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text(
        f"""
        schema = 1
        tiers.host.capacity = "64MiB"
        data = {{paths = ["python-stdlib"], sequence_length = 32}}
        train = {{steps = 4, batch_size = 4}}
        adapter = {{rank = 2, experts = true}}
        model.path = "{directory}"
        schedule.micro_batch = 1
        precision.compute = "bfloat16"
        """
    )
    found = plan_in_numbers(str(file), "--hardware", "rtx4090-1nvme")
    assert found["model"]["adapter"]["experts"] and found["batch"]["tokens_per_step"] == 128
    assert found["model"]["stored_nbytes"] == read_directory(directory).stored.nbytes


# Its writer here leaves linear attention as it is, and no list of left-out modules says so.
UNSAID = ("qwen3.5-moe", "modelopt-nvfp4")


@pytest.mark.parametrize(
    ("architecture", "layout"), [case[:2] for case in PUBLISHED if case[:2] != UNSAID]
)
def test_a_quantised_directory_has_the_same_bytes_before_it_is_downloaded(
    architecture: str, layout: str, tmp_path: Path
) -> None:
    """With files, every byte of them has a place. Scales of Qwen's and DeepSeek-V4's FP8
    have two bytes and one, which config.json does not say; those formats are refused that only files can count."""
    write_quantized(tiny_causal_lm(architecture), tmp_path / "base", layout)
    there = read_directory(tmp_path / "base").stored
    places = read_headers(tmp_path / "base")
    assert there.nbytes + there.unused_nbytes == sum(place[4] for place in places.values())
    for file in (tmp_path / "base").glob("*.safetensors"):
        file.unlink()
    index = json.dumps({"weight_map": dict.fromkeys(places, "1.safetensors")})
    (tmp_path / "base/model.safetensors.index.json").write_text(index)
    if layout in ("hqq", "llm-int8"):
        with pytest.raises(ConfigError, match="are counted in its files"):
            read_directory(tmp_path / "base")
        return
    stored = read_directory(tmp_path / "base").stored
    keys = [key for key, part in there.parts.items() if part.nbytes and key[0] != "unused"]
    sizes = [
        {key: one.part(key[0], of_experts=key[1]).nbytes for key in keys} for one in (there, stored)
    ]
    if layout in ("fp8-bf16-scales", "fp4-experts"):
        assert there.nbytes < stored.nbytes < 1.001 * there.nbytes
    else:
        assert sizes[0] == sizes[1], stored.formats
        assert there.nbytes == stored.nbytes


def test_this_machine_reads_the_files_for_its_rate(directory: Path) -> None:
    found = plan_in_numbers("--model", str(directory), "--tokens", "64", "--sequence", "32")
    assert found["hardware"]["nvme"]["checkpoint_read_gb_per_s"] > 0
    assert found["answer"]["fits"] and found["answer"]["other_drives"] is None


def test_what_a_directory_lacks_is_named(directory: Path, tmp_path: Path) -> None:
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptionError, match="names 3 shards, and 1 .*model-00002-of-00003"):
        read_directory(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"download model.safetensors.index.json"):
        read_directory(directory)
    (directory / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"download model.safetensors.index.json"):
        read_directory(directory)
    (directory / "model-00003-of-00003.safetensors").rename(directory / "gptq-4bit.safetensors")
    with pytest.raises(ConfigError, match=r"'gptq-4bit.safetensors'; rename it to model"):
        read_directory(directory)
    for keys, words in (
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIG | keys))
        with pytest.raises(ConfigError, match=f"cannot be used.*{words}"):
            read_directory(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match="expected the directory of a downloaded model"):
        read_directory(directory)


def test_a_format_without_a_codec_is_refused_as_training_refuses_it(directory: Path) -> None:
    table = {**CONFIG, "quantization_config": {"quant_method": "exl3", "bits": 4.0}}
    (directory / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="quant_method='exl3'; codecs exist for fp8.*is 'model"):
        read_directory(directory)


def test_a_truncated_file_is_named(directory: Path) -> None:
    file = directory / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptionError, match="model-00001-of-00003.safetensors"):
        read_directory(directory)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "kimi-k2", "--drives", "1"], "add --lora RANK"),
        (["--model", "kimi-k2", "--lora", "8", "--examples", "5", "--data-tokens", "5"], "leave one"),
        (["--model", "kimi-k2", "--lora", "8", "--data-tokens", "many"], "--data-tokens 'many'"),
        (["--model", "kimi-k2", "--set", "adapter.targets=k_proj"], "kv_b_proj"),
        (["--model", "qwen3-30b-a3b", "--lora", "8", "--hardware", "rtx4090-desktop",
          "--set", "tiers.host.capacity=10MB"], "tiers.host.capacity"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    result = RUNNER.invoke(app, ["plan", *arguments, "--hardware", "rtx4090-1nvme"])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
