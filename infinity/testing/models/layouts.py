"""Tiny models with unusual shapes, dtypes and memory layouts, and with random draws."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from infinity.testing.models.base import ROWS, WIDTH, TinyModel, noise


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
