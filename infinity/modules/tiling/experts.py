"""Packed experts that run as tiles of some experts.

transformers keeps the experts of a block as `gate_up_proj` and `down_proj`, one row per expert.
Their module is called with hidden states [tokens, width], indexes of experts [tokens, k] and
routing weights [tokens, k]. A tile is a module of the same class with fewer experts and runs the
forward of that class, whatever the model's `experts_implementation` is. The computation of an
expert is therefore not repeated here. A tile receives the (token, expert) pairs of its own experts,
each as a token with one expert.

Note [Same bits]
  Pairs are ordered by expert, then by a token's choice, then by token, as in the loop over experts
  ("eager"). With "eager", outputs and the gradients of parameters and routing weights have the
  same bits for every size of tiles. The gradient of the hidden states is a sum over the experts of
  a tile, then over tiles; it has the same bits with one expert per tile. Other implementations sum
  over all tokens or all choices at once, and differ by rounding.

Note [Experts without tokens]
  The packed parameter has a gradient for all experts. The gradient of experts without tokens is
  zero, and AdamW decays their weights. A trainable tile without tokens therefore runs, too, with a
  zero gradient. A frozen tile without tokens is not fetched.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from infinity.modules.expert_adapters.peft import Adaptation, adaptations_of
from infinity.modules.tiling.layers import Tiled, tensor_of


class _Adapting(threading.local):
    """The adaptations of the tile that this thread runs, by attribute."""

    def __init__(self) -> None:
        self.of_tile: Mapping[str, Adaptation] = {}


_adapting = _Adapting()


class TiledExperts(Tiled):
    """The forward of every class that `tiled_class` makes."""

    def forward(
        self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        experts, order = indices.t().reshape(-1).sort(stable=True)
        tokens = order % len(indices)
        weights = weights.t().reshape(-1)[order]
        starts = torch.tensor(self.starts, dtype=experts.dtype, device=experts.device)
        ends = torch.searchsorted(experts, starts).tolist()
        out = torch.zeros_like(hidden_states)
        sizes = [stop - start for start, stop in pairwise(self.starts)]
        adapted = {name: each.split(sizes) for name, each in adaptations_of(self).items()}
        for index, (tile, (first, end)) in enumerate(zip(self.tiles, pairwise(ends), strict=True)):
            if first == end and not (torch.is_grad_enabled() and _is_trained(tile)):
                continue
            own = tokens[first:end]
            start = self.starts[index]
            with tile.adapting({name: parts[index] for name, parts in adapted.items()}):  # type: ignore[operator]
                part = tile(
                    hidden_states[own],
                    (experts[first:end] - start).unsqueeze(-1),
                    weights[first:end].unsqueeze(-1),
                )
            out.index_add_(0, own, part.to(out.dtype))
        return out


class ExpertsTile(nn.Module):
    """Some of the experts. Precedes the user's class in the method resolution order."""

    num_experts: int

    @contextmanager
    def adapting(self, adaptations: Mapping[str, Adaptation]) -> Iterator[None]:
        """Runs the forward with adapters on the tile's experts."""
        _adapting.of_tile = adaptations
        try:
            yield
        finally:
            _adapting.of_tile = {}

    @contextmanager
    def _adapted(self) -> Iterator[None]:
        """Shows adapted parameters in the place of the tile's parameters."""
        adaptations = _adapting.of_tile
        for name, each in adaptations.items():
            self.__dict__[name] = each.of(partial(self._parameters.__getitem__, name))
        try:
            yield
        finally:
            for name in adaptations:
                del self.__dict__[name]

    def forward(
        self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if len(hidden_states):
            with self._adapted():
                return super().forward(hidden_states, indices, weights)  # type: ignore[no-any-return]
        own = [parameter for parameter in self._parameters.values() if parameter is not None]
        return _NoTokens.apply(hidden_states, *own)  # type: ignore[no-any-return,no-untyped-call]


class _NoTokens(torch.autograd.Function):
    """An output without rows, whose backward gives zero gradients to the parameters."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.facts = [(each.shape, each.dtype, each.device) for each in parameters]
        return torch.empty_like(hidden_states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_needed else None
            for (shape, dtype, device), is_needed in zip(
                ctx.facts, ctx.needs_input_grad[1:], strict=True
            )
        ]
        return gradient, *zeros


def _is_trained(tile: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in tile.parameters())


def is_packed(module: nn.Module) -> bool:
    """Whether a module declares, as transformers' classes of experts do, that it can hold a part of
    a block's experts."""
    return "_is_expert_parallel" in module.__dict__


def why_not_cut(module: nn.Module) -> str | None:
    """Returns the reason why packed experts cannot run as tiles, or None."""
    kind = type(module).__name__
    own = [each for each in module._parameters.values() if each is not None]
    num_experts = module.__dict__.get("num_experts")
    if any(not each.dim() or each.shape[0] != num_experts for each in own):
        return f"a parameter of its {kind} does not have one row per expert"
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return f"its {kind} has modules with their own state"
    if any(buffer is not None for buffer in module._buffers.values()):
        return f"its {kind} has buffers"
    if len(inspect.signature(type(module).forward).parameters) != 4:
        return (
            f"the forward of its {kind} does not take hidden states, indices of experts and "
            "routing weights"
        )
    return None


def tile_of(module: nn.Module, start: int, stop: int) -> nn.Module:
    """Returns a module of the same class for experts [start, stop). The caller sets its
    parameters."""
    kind: Any = type(module)
    tile = _tile_class(kind).__new__(_tile_class(kind))
    nn.Module.__init__(tile)
    of_every_module = set(tile.__dict__)
    tile.__dict__.update({k: v for k, v in module.__dict__.items() if k not in of_every_module})
    tile._modules.update(module._modules)
    tile._parameters.update(dict.fromkeys(module._parameters))
    tile.num_experts = stop - start  # type: ignore[assignment]
    return tile


@cache
def _tile_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}Tile", (ExpertsTile, kind), {})


@cache
def tiled_class(kind: type[nn.Module], attributes: tuple[str, ...]) -> type[Tiled]:
    """Returns the class of tiled experts of one kind, whose `attributes` are tiled parameters."""
    parameters = {attribute: tensor_of(attribute) for attribute in attributes}
    return type(f"Tiled{kind.__name__}", (TiledExperts, kind), parameters)
