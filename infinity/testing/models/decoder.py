"""Tiny models in the shape of the main job: blocks of equal layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from infinity.testing.models.base import ROWS, WIDTH, TinyModel, noise


class Mlp(TinyModel):
    """Linear layers and activations in one `nn.Sequential`; `layers` blocks of WIDTH."""

    def __init__(self, width: int = WIDTH, layers: int = 3) -> None:
        super().__init__()
        self.width = width
        blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                  for _ in range(layers)]  # fmt: skip
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 3)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, ROWS, self.width)}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class DecoderBlock(nn.Module):
    """One pre-norm attention block with a gated MLP, as in Llama, written with plain operations."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyDecoder(TinyModel):
    """A causal language model with embedding and head tied: the shape of the main job.

    `forward(ids, labels=None)`: ids and labels int64 (rows, length); returns the mean cross entropy
    of the next token when labels are given, else logits (rows, length, vocab).
    """

    def __init__(
        self, width: int = 32, layers: int = 3, heads: int = 4, vocab: int = 64, length: int = 32
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def inputs(self, seed: int) -> dict[str, Any]:
        source = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocab, (2, 12), generator=source)
        return {"ids": ids, "labels": ids}

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
