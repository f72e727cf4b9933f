"""`infinity train` over Llama 4's text model, whose classes lack two names that TRL asks for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig

from . import plain
from .test_adapter import metrics, run, table
from .test_adapter import plain as plain_adapter

__all__ = ["table"]

CONFIG = Llama4TextConfig(
    hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=4,
    interleave_moe_layer_step=1, attention_chunk_size=16, vocab_size=256, bos_token_id=0,
    max_position_embeddings=128, pad_token_id=0, eos_token_id=0,
)  # fmt: skip


def save_base(directory: Path) -> None:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)


def load_named(*arguments: Any, **options: Any) -> Any:
    """Loads a model and adds the names by which TRL finds its backbone and counts its experts."""
    model: Any = load(*arguments, **options)
    model.base_model_prefix, model.config.num_experts = "model", model.config.num_local_experts
    return model


load = AutoModelForCausalLM.from_pretrained


def test_a_run_over_llama_4_has_the_bits_of_trl_and_its_export_loads(tmp_path, table) -> None:
    save_base(tmp_path / "base")
    del table["adapter"]
    run(table)
    expected = load_named(tmp_path / "base").train()
    steps = plain.train(table, expected, tmp_path / "plain")
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    exported: Any = load(tmp_path / "output", dtype="auto")
    for name, parameter in expected.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter), name
    assert '"num_experts"' not in (tmp_path / "output" / "config.json").read_text()


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_over_llama_4_has_the_bits_of_peft(
    tmp_path, table, method, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base(tmp_path / "base")
    table["adapter"]["method"] = method
    run(table)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_named)
    assert metrics(table) == plain_adapter(table)[1]
