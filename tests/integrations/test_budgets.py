"""The budget that a refusal names works, however the weights come; a byte less is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import infinity
from infinity.errors import CapacityError

IDS = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(1))
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 400,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=400, n_positions=16)
    ),
}


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def on_meta(name: str, config: dict[str, Any]) -> Any:
    with infinity.init_empty_weights(config):
        return MODELS[name]()


def from_files(name: str, config: dict[str, Any], directory: Path) -> Any:
    if not directory.exists():
        MODELS[name]().save_pretrained(directory)
    return infinity.offload(on_meta(name, config), config, weights=directory)


WAYS: dict[str, Callable[[str, dict[str, Any], Path], Any]] = {
    "in memory": lambda name, config, _: infinity.offload(MODELS[name](), config),
    "random": lambda name, config, _: infinity.offload(on_meta(name, config), config),
    "from files": from_files,
    "adapters over meta": lambda name, config, _: infinity.offload(
        adapted(on_meta(name, config)), config
    ),
}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in MODELS for way in WAYS if name == "llama" or way == "random"],
)
def test_the_budget_that_a_refusal_names_trains(
    name: str, way: str, compute: str, tmp_path: Path
) -> None:
    def train(capacity: str) -> None:
        config = {
            "tiers": {
                "host": {"capacity": capacity, "huge_pages": False},
                "nvme": [{"path": str(tmp_path / "swap"), "capacity": "64MiB"}],
            },
            "schedule": {"tile": 0},
            "precision": {"compute": compute},
        }
        torch.manual_seed(0)
        model = WAYS[way](name, config, tmp_path / "files")
        with infinity.engine_of(model):
            optimizer = infinity.AdamW(model, lr=1e-3)
            for _ in range(2):
                model(input_ids=IDS, labels=IDS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(CapacityError, match="smallest host budget that works") as refused:
        train("64KiB")
    needed_nbytes = refused.value.needed_nbytes
    train(f"{needed_nbytes}B")
    train(f"{int(2.4 * needed_nbytes)}B")  # More than the least, and less than is comfortable.
    with pytest.raises(CapacityError, match="smallest host budget that works"):
        train(f"{needed_nbytes - 1}B")
