"""Packed experts that run as tiles of some experts.

transformers keeps the experts of a block as `gate_up_proj` and `down_proj`, one row per expert.
Their module is called with hidden states [tokens, width], indexes of experts [tokens, k] and
routing weights [tokens, k]. A tile is a module of the same class with fewer experts. It receives
the (token, expert) pairs of its own experts, each as a token with one expert, and runs the forward
of its class, whatever the model's `experts_implementation` is, or one product for all experts
; `experts_call.py` has that and the order of tiles and sums.

Note [Same bits]
  With the loop over experts ("eager"), all results have the bits of the whole module for every size
  of tiles. Other implementations sum over all tokens or all choices at once, and differ from their
  tiles by rounding.

Note [Experts without tokens]
  The packed parameter has a gradient for all experts. The gradient of experts without tokens is
  zero, and AdamW decays their weights. A trainable tile without tokens therefore has a backward,
  too, with a zero gradient. A frozen tile without tokens is not fetched, with adapters or without.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from infinity.config.schema.engine import ExpertProducts
from infinity.modules.autograd.hooks import HeldByCaller
from infinity.modules.autograd.threads import Modes
from infinity.modules.tiling.expert_adapters import Adaptation, adaptations_of
from infinity.modules.tiling.experts_call import (
    ExpertsCall,
    ExpertsNode,
    Recipe,
    Runner,
    anchored,
    explain_no_groups,
)
from infinity.modules.tiling.layers import Tiled, tensor_of
from infinity.private.torch import DropoutNd

_log = logging.getLogger("infinity")


@cache
def _say(reason: str) -> None:
    _log.info(
        "experts run one micro-batch after the other, by the forward of their class: %s", reason
    )


class TiledExperts(Tiled):
    """The forward of every class that `tiled_class` makes."""

    runner: Runner = Runner()

    @override
    def forward(
        self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        recipes: list[Recipe] = []
        factors: list[torch.Tensor] = []
        for name, adaptation in adaptations_of(self).items():
            recipes.append((name, len(adaptation.tensors), adaptation.shown))
            factors.extend(adaptation.tensors)
        tiles: Any = list(self.tiles)
        anchor = anchored(tiles)
        node = None if anchor is None else anchor.grad_fn
        modes = Modes.now(hidden_states.device)
        call = ExpertsCall(tiles, self.starts, recipes, node, modes)
        out: torch.Tensor = ExpertsNode.apply(  # type: ignore[no-untyped-call]
            call, self.runner, anchor, hidden_states, indices, weights, *factors
        )
        self.runner.note_output(call, out)
        return out


class ExpertsTile(HeldByCaller):
    """Some of the experts. Precedes the user's class in the method resolution order."""

    num_experts: int
    products: ExpertProducts = "auto"  # `schedule.experts`.

    @property
    def matrices(self) -> dict[str, nn.Parameter]:
        """The tile's parameters without biases: [experts, rows, columns] each."""
        own = {name: p for name, p in self._parameters.items() if p is not None}
        return {name: p for name, p in own.items() if not name.endswith("_bias")}

    def is_grouped_on(self, device: torch.device) -> bool:
        """Whether all experts are one product; else the tile runs the forward of its class."""
        is_asked = self.products == "grouped"
        if self.products == "auto" and device.type != "cpu":
            config = self.__dict__.get("config")
            is_asked = getattr(config, "_experts_implementation", None) == "grouped_mm"
        reason = explain_no_groups(self) if is_asked else ""
        if reason:
            _say(reason)
        return is_asked and not reason

    def trained(self) -> list[nn.Parameter]:
        """Returns the tile's own parameters that need a gradient."""
        own = [parameter for parameter in self._parameters.values() if parameter is not None]
        return [parameter for parameter in own if parameter.requires_grad]

    @property
    def is_trained(self) -> bool:
        """Whether a parameter of the tile is trainable."""
        return bool(self.trained())

    @contextmanager
    def adapted(self, adaptations: Mapping[str, Adaptation]) -> Iterator[None]:
        """Shows adapted weights in the place of the tile's parameters."""
        parameters: dict[str, Any] = self._parameters
        for name, adaptation in adaptations.items():
            self.__dict__[name] = adaptation.of(partial(parameters.__getitem__, name))
        try:
            yield
        finally:
            for name in adaptations:
                del self.__dict__[name]


def is_packed(module: nn.Module) -> bool:
    """Whether a module declares, as transformers' classes of experts do, that it can hold a part of
    a block's experts."""
    return "_is_expert_parallel" in module.__dict__


def why_not_cut(module: nn.Module) -> str | None:
    """Returns the reason why packed experts cannot run as tiles, or None."""
    kind = type(module).__name__
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    num_experts = module.__dict__.get("num_experts")
    if any(not parameter.dim() or parameter.shape[0] != num_experts for parameter in own):
        return f"a parameter of its {kind} does not have one row per expert"
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return f"its {kind} has modules with their own state"
    if any(buffer is not None for buffer in module._buffers.values()):
        return f"its {kind} has buffers"
    if any(isinstance(child, DropoutNd) and child.p for child in module.modules()):
        return f"its {kind} draws random numbers"
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
