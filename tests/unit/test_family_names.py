"""Checkpoints of the families that transformers has: every name and value reaches its parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.checkpoint import weight_source
from tests.support.exhaustive import sampled

# Keys of some families; each gets those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 32,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
GEMMA_3N = {
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.5, 0.0],
}  # fmt: skip
FAMILIES = [
    "afmoe",
    "apertus",
    "arcee",
    "bloom",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "glm4",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "granite",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2",
    "mimo_v2_flash",
    "minimax_m2",
    "mistral",
    "nemotron",
    "nemotron_h",
    "olmo3",
    "phi",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
]
# One for each way in which names or layouts of a checkpoint differ from those of a model.
OFTEN = {
    "bloom", "deepseek_v4", "ernie4_5_moe", "gemma3n_text", "glm_moe_dsa", "gpt_oss", "granitemoe",
    "jamba", "lfm2", "mimo_v2_flash", "minimax_m2", "nemotron_h", "phi3", "phimoe", "qwen3_next",
}  # fmt: skip


@pytest.mark.parametrize("family", sampled(FAMILIES, OFTEN.__contains__))
def test_a_family_has_the_values_of_from_pretrained(family: str, tmp_path: Path) -> None:
    default = AutoConfig.for_model(family)
    known = {*default.to_dict(), *default.attribute_map}
    more = GEMMA_3N if family == "gemma3n_text" else {}
    keys = {key: value for key, value in SMALL.items() if key in known}
    config = AutoConfig.for_model(family, **keys, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # Zeros and ones would hide a mix-up.
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found: dict[str, torch.Tensor] = {}
    weight_source(tmp_path).plan(empty).load(found.__setitem__)
    expected = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
