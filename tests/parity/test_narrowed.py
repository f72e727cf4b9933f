"""A float32 model that `precision.compute` narrows is the one that from_pretrained gives in
bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import infinity
from tests.support.offloading import small_tiers

IDS = torch.arange(3, 19).reshape(2, 8)


def m2m100() -> Any:
    return transformers.M2M100ForConditionalGeneration(
        transformers.M2M100Config(
            vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
            decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def openai_gpt() -> Any:
    config = transformers.OpenAIGPTConfig(
        vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32
    )
    return transformers.OpenAIGPTLMHeadModel(config)


def dots1() -> Any:
    """Its router's correction is kept in float32 by name, its rotary frequencies by construction."""
    return transformers.Dots1ForCausalLM(
        transformers.Dots1Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
            n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
            first_k_dense_replace=1,
        )
    )  # fmt: skip


def swap(directory: Path) -> dict[str, Any]:
    return {
        "tiers": small_tiers(directory / "swap", "32MiB"),
        "precision": {"compute": "bfloat16"},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [m2m100, openai_gpt, dots1])
def test_parameters_and_buffers_have_the_dtypes_of_from_pretrained(
    make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Built in float32 and narrowed, or built in bfloat16."""
    saved = make()
    with torch.no_grad():
        for name, buffer in saved.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_()
    saved.save_pretrained(tmp_path / "model")
    plain = type(saved).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    with infinity.init_empty_weights():
        model = type(saved)._from_config(saved.config, dtype=dtype).train()
    infinity.offload(model, swap(tmp_path), weights=tmp_path / "model")
    try:
        for one, other in ((plain.named_parameters(), model.named_parameters()),
                           (plain.named_buffers(), model.named_buffers())):  # fmt: skip
            assert {n: t.dtype for n, t in one} == {n: t.dtype for n, t in other}
        losses = []
        for each in (plain, model):
            torch.manual_seed(0)
            losses.append(each(input_ids=IDS, labels=IDS).loss)
        assert torch.equal(*losses)
    finally:
        infinity.engine_of(model).close()


def test_a_mixture_of_dtypes_is_left_as_it_is(tmp_path: Path) -> None:
    """A frozen gate of float32 in a bfloat16 model is not narrowed."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 16, dtype=torch.bfloat16)
            self.gate = nn.Linear(16, 1).requires_grad_(False)
            self.register_buffer("scale", torch.full((1,), 0.3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.gate(self.body(x).float()) * self.scale).sum()

    model, x = Gated(), torch.randn(2, 16, dtype=torch.bfloat16)
    expected = model(x)
    infinity.offload(model, swap(tmp_path))
    try:
        assert model.gate.weight.dtype is model.scale.dtype is torch.float32
        assert torch.equal(model(x), expected)
    finally:
        infinity.engine_of(model).close()


def test_another_model_is_narrowed_as_module_to_does(tmp_path: Path) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("positions", torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + self.positions).sum()

    model = Biased()
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.offload(model, swap(tmp_path))
    try:
        plain = Biased()
        plain.load_state_dict(state)
        assert torch.equal(plain.bfloat16()(x), model(x))
    finally:
        infinity.engine_of(model).close()
