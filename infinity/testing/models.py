"""Tiny models for tests, benches and examples: each shows one way in which real code uses
parameters.

The models are plain PyTorch, without transformers and without the engine. No class needs arguments,
each is deterministic under `torch.manual_seed` before construction, and each `forward` takes
keyword tensors and returns a value from which a loss can be made. `inputs(seed)` of each class
returns the keyword arguments of one call. The docstring of a class names its habit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
ROWS = 6


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TinyModel(nn.Module):
    """Base of the models below; defines the arguments of a call."""

    def inputs(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of one forward; a pure function of `seed`."""
        return {"x": _noise(seed, ROWS, WIDTH)}


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
        return {"x": _noise(seed, ROWS, self.width)}

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


# --- one parameter, several readers -----------------------------------------------------------


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
        self.pieces = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.randn(WIDTH), "bias": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.stored.weight, self.stored.bias)
        x = self.called(x) + self.called.bias
        for piece in self.pieces:
            x = torch.tanh(x * piece)
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


# --- gradients that are absent ----------------------------------------------------------------


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
        return {"x": _noise(seed, ROWS, WIDTH), "branch": seed % 3}

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


# --- structure --------------------------------------------------------------------------------


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


# --- torch's own modules with habits ----------------------------------------------------------


class ConvNet(TinyModel):
    """Convolutions, batch norm with running statistics, group norm, in channels_last."""

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.ConvTranspose2d(8, 8, 2, stride=2), nn.BatchNorm2d(8, affine=False),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": _noise(seed, 2, 3, 8, 8)}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Recurrent(TinyModel):
    """nn.LSTM and nn.GRU: they keep a private flat list of their parameters, and packed inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": _noise(seed, ROWS, 5, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 5, 4, 3, 2, 1][: x.shape[0]])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        _, hidden = self.gru(padded)
        return self.head(self.cell(hidden[0])[0])


class Attention(TinyModel):
    """nn.MultiheadAttention and nn.TransformerEncoder, whose inference fast path reads the
    parameters of grandchildren without calling them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=8, vdim=8,
                                           add_bias_kv=True)  # fmt: skip
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": _noise(seed, 2, 5, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        crossed, _ = self.cross(x, memory[..., :8], memory[..., 8:])
        return self.decoder(crossed, memory)


class Parametrized(TinyModel):
    """Weights computed from other parameters: weight norm of both kinds, spectral norm, own."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).t()

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.own = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(self.own, "weight", self.Symmetric())
        self.fixed = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(self.fixed, "bias", nn.Softplus())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.normed(x))
        x = torch.tanh(self.spectral(x))
        with nn.utils.parametrize.cached():
            x = torch.tanh(self.own(x)) + self.own(x)
        return self.fixed(x)


class HookedWeightNorm(TinyModel):
    """The older `nn.utils.weight_norm`: a forward pre-hook of the module reads the parameters."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.conv = nn.utils.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), dim=2)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": _noise(seed, 2, WIDTH, 5)}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).transpose(1, 2))


class Embeddings(TinyModel):
    """Embedding tables with padding, a bag with weights, and a table read by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(20, WIDTH, mode="sum")
        self.classes = nn.Parameter(torch.randn(20, WIDTH))

    def inputs(self, seed: int) -> dict[str, Any]:
        source = torch.Generator().manual_seed(seed)
        return {"ids": torch.randint(0, 20, (ROWS, 4), generator=source)}

    def forward(self, ids: Tensor) -> Tensor:
        weights = torch.ones(ids.shape)
        x = self.table(ids).mean(1) + self.bag(ids, per_sample_weights=weights)
        return x @ self.classes.t() + self.classes[ids[:, 0]].sum(1, keepdim=True)


# --- shapes, dtypes and layouts ---------------------------------------------------------------


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
    """Parameters that are not contiguous: transposed, channels_last, a slice of something larger.

    The slice is frozen: torch's fused AdamW takes a parameter with gaps for a dense one and updates
    the wrong elements (seen in 2.13 on CPU), so there is nothing to compare with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, 12).t())
        self.sliced = nn.Parameter(torch.randn(WIDTH, 24)[:, ::2], requires_grad=False)
        conv: Any = nn.Conv2d(3, 8, 3)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.permuted = nn.Parameter(torch.randn(2, 8, WIDTH).permute(2, 0, 1))

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": _noise(seed, ROWS, WIDTH), "image": _noise(seed, 2, 3, 8, 8)}

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


ALL: dict[str, type[TinyModel]] = {
    cls.__name__: cls
    for cls in (
        Mlp, TinyDecoder, UsedTwice, TiedAcross, ParentReads, ReturnsParameter, CalledSideways,
        Recursive, Unused, Conditional, ZeroGradient, Frozen, NestedLists, StructuredOutputs,
        KeywordTensors, PassesThrough, InPlace, CustomFunction, InnerGradient, Checkpointed,
        ConvNet, Recurrent, Attention, Parametrized, HookedWeightNorm, Embeddings, OddShapes,
        Layouts, MixedDtypes, Autocast, Dropout,
    )
}  # fmt: skip
"""Every tiny model by name; a test that wants "any module" runs over this table."""
