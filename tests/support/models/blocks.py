"""Blocks and decoders, and the dtypes, shapes and gradients that their parameters may have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH = 16
ROWS = 6


def noise(seed: int, *shape: int) -> Tensor:
    """Returns values of the normal distribution; a pure function of `seed` and the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TinyModel(nn.Module):
    """The base of every tiny model; defines the arguments of a call."""

    def inputs(self, seed: int) -> dict[str, Any]:
        """Returns the keyword arguments of one forward; a pure function of `seed`."""
        return {"x": noise(seed, ROWS, WIDTH)}


# -- Blocks of equal layers: the shape of the main job ---------------------------------------------


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


# -- Unusual shapes, dtypes and memory layouts, and random draws -----------------------------------


class OddShapes(TinyModel):
    """Scalar, empty, one-element and prime-sized parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.one = nn.Parameter(torch.randn(1))
        self.prime = nn.Parameter(torch.randn(17, 13))
        self.linear = nn.Linear(WIDTH, 13)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.empty]) * self.scalar + self.one
        return self.linear(x) @ self.prime.t()


class Layouts(TinyModel):
    """Parameters that are not contiguous: transposed, channels_last, a frozen slice of something
    larger. None has gaps, which `infinity.offload` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, 12).t())
        self.sliced = nn.Parameter(torch.randn(2, 12, WIDTH)[1].t(), requires_grad=False)
        conv: Any = nn.Conv2d(3, 8, 3)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.permuted = nn.Parameter(torch.randn(2, 8, WIDTH).permute(2, 0, 1))

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, ROWS, WIDTH), "image": noise(seed, 2, 3, 8, 8)}

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        y = F.linear(x, self.transposed) @ self.sliced.t()
        features = self.conv(image).mean((2, 3))
        return torch.einsum("rw,wbc,bc->r", torch.tanh(y), self.permuted, features)


class MixedDtypes(TinyModel):
    """Parameters of several dtypes in one model; a float64 and an integer table never train."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.brain = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.codes = nn.Parameter(torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8),
                                  requires_grad=False)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.single(x))
        x = torch.tanh(self.brain(x.bfloat16()))
        x = torch.tanh(self.wide(x.double()))
        return x.float() @ (self.codes.float() / 8)


class Autocast(TinyModel):
    """A model that enters autocast itself: casts of weights are cached inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for linear in self.linears:
                x = torch.tanh(linear(x))
            return self.linears[0](x).float()  # the same weight again: from the cache


class Dropout(TinyModel):
    """Dropout between blocks: the draws must come in the same order as without offload."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# -- Gradients that are absent, zero, or not wanted ------------------------------------------------


class Unused(TinyModel):
    """Parameters that no forward ever reads: their gradient stays None and they never change."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.never_called = nn.Linear(WIDTH, WIDTH)
        self.never_read = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Conditional(TinyModel):
    """A branch taken on some batches only: None gradient in one step, a gradient in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, ROWS, WIDTH), "branch": seed % 3}

    def forward(self, x: Tensor, branch: int) -> Tensor:
        x = torch.tanh(self.always(x))
        if branch:
            x = self.sometimes[branch](x) * self.gate
        return x


class ZeroGradient(TinyModel):
    """A gradient of zeros is not an absent one: weight decay acts on the first, not on the
    second."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.multiplied_by_zero = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + 0.0 * self.multiplied_by_zero(x)


class Frozen(TinyModel):
    """Frozen parts in every position: the stem, a block in the middle, a bias, a whole tower."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].bias.requires_grad_(False)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.tower.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            side = self.tower(x)
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x + side + self.tower(x))
