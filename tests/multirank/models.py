"""Models whose ranks take different ways, and batches that depend on the rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH = 48  # Blocks of a few state granules, so that shards cut through tensors.


class Blocks(nn.Module):
    """Residual blocks, a head, and a frozen scale. `skip`: blocks that this call leaves out, as
    LayerDrop does."""

    width = WIDTH
    num_blocks = 3

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(self.num_blocks)
        )
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, skip: Iterable[int] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = x + block(x)
        return self.head(torch.tanh(self.frozen(x)))


class EmptyBlocks(Blocks):
    """A trained parameter has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.head.empty = nn.Parameter(torch.empty(0, self.width))


class WideBlocks(Blocks):
    """Large enough that what is rounded up to pages and granules does not count."""

    width = 384


class DeepBlocks(Blocks):
    """Enough blocks that a rank which leaves out every second one still uses several."""

    num_blocks = 6


class Experts(nn.Module):
    """A mixture of experts: which of them run depends on the batch. One never runs."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, skip: Iterable[int] = ()) -> Tensor:
        gate = self.router(x).softmax(-1)
        best, chosen = gate.max(-1)
        out = x
        for index in sorted(set(chosen.tolist()) - set(skip)):
            rows = (chosen == index).nonzero()[:, 0]
            update = self.experts[index](x[rows]) * best[rows, None]
            out = out.index_add(0, rows, update.to(out.dtype))
        return self.head(out)


def batch(seed: int, width: int) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor, skip: Iterable[int] = ()) -> Tensor:
    return model(x, skip).float().square().mean()
