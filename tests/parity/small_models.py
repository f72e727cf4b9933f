"""Tiny transformers, their files, and a loop over one batch of words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NUM_TOKENS = 64
IDS = torch.arange(24).view(2, 12)


def llama(is_tied: bool = False, num_layers: int = 2) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
            num_attention_heads=2, vocab_size=NUM_TOKENS, tie_word_embeddings=is_tied,
        )
    )  # fmt: skip


def base_at(path: Path, make: Callable[[], Any]) -> Path:
    """Writes a model whose parameters all have values of their own."""
    torch.manual_seed(5)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return path


def train(model: Any, optimizer: Any, steps: int = 2) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def values(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_adamw(model: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True)
