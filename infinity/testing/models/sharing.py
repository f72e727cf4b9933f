"""Tiny models in which several modules read one parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from infinity.testing.models.base import ROWS, WIDTH, TinyModel


class UsedTwice(TinyModel):
    """One module called twice, and its weight once more by hand (transposed)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.other(x))
        x = torch.tanh(self.shared(x))
        return x @ self.shared.weight.t()


class TiedAcross(TinyModel):
    """One Parameter object under three names in different modules, one of them a list entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].weight = self.first.weight
        self.last.weight = self.first.weight
        self.last.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


class ParentReads(TinyModel):
    """The parent reads its children's parameters itself; one child is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(WIDTH, WIDTH)
        self.stored = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.factors = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.randn(WIDTH), "bias": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.stored.weight, self.stored.bias)
        x = self.called(x) + self.called.bias
        for factor in self.factors:
            x = torch.tanh(x * factor)
        return x * self.scale * self.named["gain"] + self.named["bias"]


class _Latents(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.latents = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self) -> Any:
        match self.kind:
            case "itself":
                return self.latents
            case "view":
                return self.latents[1:].unsqueeze(0)
            case "expand":
                return self.latents.expand(ROWS, -1, -1)
            case "dict":
                return {"latents": self.latents, "count": 4}
        raise AssertionError(self.kind)


class ReturnsParameter(TinyModel):
    """Modules that return their parameter, a view of it, or a mapping holding it (Perceiver,
    ViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = _Latents("itself")
        self.view = _Latents("view")
        self.expand = _Latents("expand")
        self.dict = _Latents("dict")
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latents = torch.cat([self.itself(), self.view()[0], self.dict()["latents"]])
        attended = torch.softmax(x @ latents.t(), dim=-1) @ latents
        expanded = self.expand()
        # the model itself returns a view of a parameter: a regulariser reads it outside
        return self.mix(attended) + expanded.mean(1), self.itself()[:2]


class CalledSideways(TinyModel):
    """Submodules entered by `forward` and by another method, so that their own hooks do not run."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.gain = nn.Parameter(torch.randn(WIDTH))

        def project(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.gain

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.project(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        second: Any = self.blocks[1]
        x = second.project(x)
        x = self.blocks[2].forward(x)
        return self.plain.forward(x)


class Recursive(TinyModel):
    """A module that calls itself, as tree networks do: its pre-forward runs while it is running."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.depth = depth
        self.down = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        depth = self.depth if depth is None else depth
        if depth == 0:
            return x
        return self.up(torch.tanh(self(torch.tanh(self.down(x)), depth=depth - 1)))
