"""A directory has the parameters of its class in transformers, whatever its keys are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.plan.directory import read_directory
from infinity.plan.model import model_for

# The class, the module of a text model in it ("" for all), and keys beside the defaults.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "", {}),
    "mistral": ("MistralForCausalLM", "", {}),
    "gpt2": ("GPT2LMHeadModel", "", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", "", {}),
    "phi3": ("Phi3ForCausalLM", "", {}),
    "olmo3": ("Olmo3ForCausalLM", "", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", "", {}),
    "mixtral": ("MixtralForCausalLM", "", {}),
    "gpt_oss": ("GptOssForCausalLM", "", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "", {}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", "", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "", {}),
    "longcat_flash": ("LongcatFlashForCausalLM", "", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "", {}),
    "nemotron_h": ("NemotronHForCausalLM", "", {}),
    "granitemoe": ("GraniteMoeForCausalLM", "", {}),
    "kimi_linear": ("KimiLinearForCausalLM", "", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "visual", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "visual", {}),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "vision_tower mm_projector", {}),
    "minimax_m3_vl": (
        "MiniMaxM3SparseForConditionalGeneration", "vision_tower multi_modal_projector", {},
    ),
    "llama4": ("Llama4ForConditionalGeneration", "vision_model multi_modal_projector", {}),
    "gemma3": ("Gemma3ForConditionalGeneration", "vision_tower multi_modal_projector", {}),
    "mistral3": ("Mistral3ForConditionalGeneration", "vision_tower multi_modal_projector", {}),
}  # fmt: skip


def directory_of(path: Path, table: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(table))
    return path


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_directory_has_the_parameters_of_its_class(model_type: str, tmp_path: Path) -> None:
    name, beside, keys = FAMILIES[model_type]
    table = {"model_type": model_type, "architectures": [name], **keys}
    found = read_directory(directory_of(tmp_path, table))
    with torch.device("meta"):
        model = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **keys))
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    text = {name: n for name, n in numels.items() if not set(beside.split()) & {*name.split(".")}}
    assert found.shape.num_params == sum(text.values())
    assert found.stored.nbytes == 2 * found.shape.num_params
    blocks = found.shape.blocks
    assert all(0 < b.experts_per_token <= b.num_experts for b in blocks if b.num_experts)
    assert any(weight.is_linear for block in blocks for weight in block.weights)


@pytest.mark.parametrize(
    ("table", "params", "stored"),
    [
        # ERNIE-4.5-300B-A47B and Llama-4-Maverick-17B-128E by their config.json.
        ({"model_type": "ernie4_5_moe", "hidden_size": 8192, "intermediate_size": 28672,
          "num_hidden_layers": 54, "num_attention_heads": 64, "num_key_value_heads": 8,
          "moe_num_experts": 64, "moe_k": 8, "moe_intermediate_size": 3584, "moe_layer_start_index": 3,
          "moe_layer_end_index": 53, "moe_num_shared_experts": 0, "vocab_size": 103424,
          "tie_word_embeddings": False}, 300e9, 600e9),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 128,
          "interleave_moe_layer_step": 2}}, 400e9, 801e9),
    ],
    ids=["ERNIE-4.5-300B", "Llama-4-Maverick"],
)  # fmt: skip
def test_published_sizes(
    table: dict[str, Any], params: float, stored: float, tmp_path: Path
) -> None:
    found = read_directory(directory_of(tmp_path, table))
    assert found.shape.has_experts
    assert found.shape.num_params == pytest.approx(params, rel=0.01)
    assert found.stored.nbytes == pytest.approx(stored, rel=0.01)


def test_heads_may_differ_by_layer(tmp_path: Path) -> None:
    table = {"model_type": "dots3_note", "architectures": ["Dots3NoteForCausalLM"]}
    blocks = read_directory(directory_of(tmp_path, table)).shape.blocks
    assert blocks and all(block.attention_width > 0 for block in blocks)


def test_a_size_that_the_class_does_not_read_is_refused(tmp_path: Path) -> None:
    table = {"model_type": "llama", "num_hidden_layers": 2, "max_window_layers": 7,
             "num_nextn_predict_layers": 1}  # fmt: skip
    assert len(read_directory(directory_of(tmp_path, table)).shape.blocks) == 2
    with pytest.raises(ConfigError, match="num_extra_experts is a size that llama"):
        read_directory(directory_of(tmp_path, table | {"num_extra_experts": 8}))


def test_files_of_another_size_than_the_class_are_refused(tmp_path: Path) -> None:
    directory_of(tmp_path, {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64})
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the shape \(8,\), the model expects \(11008, 64\)"):
        read_directory(tmp_path)


def test_a_model_type_that_transformers_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        read_directory(directory_of(tmp_path, {"model_type": "kimi_k9"}))
    with pytest.raises(ConfigError, match="no class that generates text for 'clip'"):
        read_directory(directory_of(tmp_path, {"model_type": "clip"}))
    omni = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniForConditionalGeneration"]}
    with pytest.raises(ConfigError, match="Qwen2_5Omni.* is no model of tokens alone"):
        read_directory(directory_of(tmp_path, omni))


def test_a_tower_is_planned_with_images_alone(tmp_path: Path) -> None:
    table = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    found = read_directory(directory_of(tmp_path, table))
    tower = found.stored.part("tower").nbytes
    assert tower == 2 * sum(weight.numel for weight in found.shape.tower) > 0
    config = SwapConfig.load({"tiers": {"host": {"capacity": "1GiB"}}, "adapter": {"rank": 2}})
    read = {
        has_images: sum(
            tensor.stored_nbytes
            for group in model_for(config, found.shape, found.stored, has_images=has_images).groups
            for tensor in group.tensors
        )
        for has_images in (False, True)
    }
    assert read[False] == found.stored.nbytes
    assert 0 <= read[False] + tower - read[True] < found.shape.tower_depth
