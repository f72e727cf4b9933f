"""Tiny models with nested structure, unusual outputs and calls, and functions of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.testing.models.base import ROWS, WIDTH, TinyModel


class NestedLists(TinyModel):
    """Lists of lists, dictionaries and sequences of modules; several repeated block lists."""

    def __init__(self) -> None:
        super().__init__()

        def row() -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        self.grid = nn.ModuleList(row() for _ in range(3))
        self.heads = nn.ModuleDict({
            "left": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            "right": nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]),
        })  # fmt: skip
        self.more = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        grid: Any = self.grid
        for row in grid:
            x = torch.tanh(sum(cell(x) for cell in row))
        left = self.heads["left"](x)
        right: Any = self.heads["right"]
        for layer in right:
            x = layer(x)
        return self.more(x + left)


@dataclass
class Scored:
    """An output type that is no tensor, tuple or mapping."""

    score: Tensor
    detail: dict[str, Any]


class Pair(NamedTuple):
    """Two outputs, of which the second may be absent."""

    first: Tensor
    second: Tensor | None


class StructuredOutputs(TinyModel):
    """Blocks that pass dataclasses, named tuples, nested mappings, None and numbers to each
    other."""

    class Producer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.gain = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Scored:
            y = self.linear(x)
            return Scored(
                y * self.gain, {"raw": [y, {"half": y[:, :8]}], "name": "y", "none": None}
            )

    class Consumer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, scored: Scored) -> Pair:
            y = self.linear(scored.score) + scored.detail["raw"][0]
            return Pair(y + scored.detail["raw"][1]["half"].mean(), None)

    def __init__(self) -> None:
        super().__init__()
        self.producers = nn.ModuleList(self.Producer() for _ in range(2))
        self.consumers = nn.ModuleList(self.Consumer() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        for producer, consumer in zip(self.producers, self.consumers, strict=True):
            x = torch.tanh(consumer(producer(x)).first)
        return {"out": {"x": x}, "steps": 2, "pair": Pair(x.mean(), None)}


class KeywordTensors(TinyModel):
    """Blocks that are called with keyword tensors only, one of them nested in a dictionary."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(WIDTH, WIDTH)
            self.right = nn.Linear(WIDTH, WIDTH)

        def forward(self, *, hidden: Tensor, extra: dict[str, Tensor]) -> Tensor:
            return torch.tanh(self.left(hidden) + self.right(extra["context"]))

    def __init__(self) -> None:
        super().__init__()
        self.context = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        context = self.context(x)
        for block in self.blocks:
            x = block(hidden=x, extra={"context": context})
        return x


class PassesThrough(TinyModel):
    """Blocks that return one of their inputs unchanged beside the result (T5's position bias)."""

    class Block(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.bias = nn.Parameter(torch.randn(ROWS, WIDTH)) if first else None

        def forward(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            if shared is None:
                assert self.bias is not None
                shared = self.bias * 1.0
            return torch.tanh(self.linear(x) + shared), shared, x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(index == 0) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shared: Tensor | None = None
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, shared, before = block(x, shared)
            total = total + before
        return x + total


class InPlace(TinyModel):
    """Operations in place on module outputs, on views of them, and by the next module."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.linears[0](x))
        x = self.linears[1](x)
        x.add_(1.0).mul_(0.5)
        x[:, 0] = 0.0
        x = self.linears[2](x)
        x[:, :4].mul_(2.0)
        return x.add_(x.detach())


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scale * (x @ weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return ctx.scale * (grad @ weight), ctx.scale * (grad.t() @ x), None


class CustomFunction(TinyModel):
    """A custom autograd function that saves the weight itself and reads it in its backward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(_ScaledLinear.apply(x, self.weight, 0.5))  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InnerGradient(TinyModel):
    """Takes a gradient inside its forward and differentiates through it (forces, penalties)."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return self.head(force)


class Checkpointed(TinyModel):
    """Blocks under non-reentrant checkpointing, one checkpoint around several, one nested."""

    class Block(nn.Module):
        def __init__(self, nested: bool) -> None:
            super().__init__()
            self.nested = nested
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)
            self.dropout = nn.Dropout(0.2)

        def inner(self, x: Tensor) -> Tensor:
            return self.dropout(torch.tanh(self.second(x)))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            if self.nested:
                return checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(nested=index == 1) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = x + checkpoint(block, x, use_reentrant=False)
        rest = nn.Sequential(*self.blocks[2:])
        return checkpoint(rest, x, use_reentrant=False)
