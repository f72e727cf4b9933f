"""A tiny configuration of every model type of transformers that generates text."""

from __future__ import annotations

import re
from typing import Any

# The types of transformers' tables, by their automatic classes.
TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
_VOCABULARY = 512
# Sizes by the names of keys; larger ones become these.
_SIZES = {
    r"(.*_)?vocab_size(_.*)?|n_vocab|vocab": _VOCABULARY,
    r"n_layers?|num_blocks|n_block|depth|.*_?layers": 2,
    r"n_heads?|(.*_)?(num_|attention_)heads|.*_attention_heads": 4,
    r"n_kv_heads|.*num_kv_heads|.*key_value_heads|num_query_groups": 2,
    r"hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|hidden_dim|word_embed_proj_dim": 32,
    r"(.*_)?intermediate_(size.*|dim)|(.*_)?ffn_dim|n_inner|d_ff|ffn_hidden_size|dff|mlp_dim": 48,
    r"head_dim|attention_head_dim|v_head_dim|d_kv": 8,
    r"n(um)?_(routed_|local_)?experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|experts_per_token": 2,
    r".*_lora_rank": 16,
    r"n_group|topk_group": 1,
    r"rotary_dim": 4,
    r"qk_nope_head_dim|qk_rope_head_dim|index_head_dim": 8,
}
# Keys that the rules do not know, by type: as sizes have to go together.
_LATENT = {"num_key_value_heads": 4, "head_dim": 8, "v_head_dim": 8}
_SECTION = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v3"), _LATENT),
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    **dict.fromkeys(("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25"), _LATENT),
    **dict.fromkeys(("minicpm3", "mistral4", "youtu"), _LATENT),
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl"), _SECTION),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _SECTION),
}  # fmt: skip


def model_types() -> list[str]:
    """All types of the tables."""
    from transformers.models.auto import modeling_auto

    return sorted({kind for table in TABLES for kind in getattr(modeling_auto, table)})


def tiny_config(model_type: str) -> Any:
    """Raises what transformers raises where the sizes do not go together."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    _shrink(config)
    text = config.get_text_config()
    for key, value in KEYS.get(model_type, {}).items():
        setattr(text, key, value)
    return config


def _shrink(config: Any) -> None:
    from transformers import PretrainedConfig

    values = vars(config)
    depths = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    depth = next((values[key] for key in depths if isinstance(values.get(key), int)), 0)
    for key, value in list(values.items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value)
        elif isinstance(value, list) and len(value) == depth > 2:
            values[key] = [value[0], value[-1]]  # One for each layer.
        elif type(value) is not int:
            continue
        elif key.endswith("_token_id"):
            setattr(config, key, value if value < _VOCABULARY else value % 400 + 100)
        elif value > 0:
            size = next((n for name, n in _SIZES.items() if re.fullmatch(name, key)), value)
            setattr(config, key, min(value, size))
