"""Tiny models of which some gradients are absent, zero, or not wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infinity.testing.models.base import ROWS, WIDTH, TinyModel, noise


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
