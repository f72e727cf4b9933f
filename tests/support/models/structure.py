"""Tiny models with nested structure, unusual outputs and calls, functions of their own, and
parameters that several modules read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models.blocks import ROWS, WIDTH, TinyModel


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


# -- Parameters that several modules read ----------------------------------------------------------


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
