"""Clipping to a norm: gradients of offloaded models, and of plain parameters beside them.

Norm and gradients have the bits of `torch.nn.utils.clip_grad_norm_`. A gradient of an offloaded
model is not written: its factor waits until somebody reads the gradient, and the update of the step
multiplies as it reads (`GradientSink.note_scaled`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.engine.registry import owner_of, owner_of_tile
from infinity.errors import NonFiniteError, UnsupportedError
from infinity.modules.autograd.param import OffloadedParam
from infinity.modules.tiling.split import tiles_of


@dataclass(frozen=True, slots=True)
class Measured:
    """Parameters that have a gradient, in the order of the call, which may name one twice, and the
    norms of their gradients. `norm`: that of all of them, an fp32 scalar on the host."""

    params: Sequence[OffloadedParam | torch.Tensor]
    owners: Sequence[Engine | None]  # Of `params`; None: a plain tensor.
    norms: Sequence[torch.Tensor]
    norm: torch.Tensor
    norm_type: float

    def check(self, step: int) -> None:
        """Raises NonFiniteError, with the first parameter whose norm is not finite."""
        if not torch.isfinite(self.norm):
            names = (getattr(param, "name", None) for param in self.params)
            culprits = [n for n, norm in zip(names, self.norms, strict=True) if not norm.isfinite()]
            raise NonFiniteError("the gradient norm", step=step, unit=next(iter(culprits), None))

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """Multiplies the gradients by the factor that brings `norm` to `max_norm` at most."""
        factor = torch.clamp(max_norm / (self.norm + 1e-6), max=1.0)
        for param in self.params:
            if isinstance(param, torch.Tensor) and param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))
        for engine, params in by_engine(self.params, self.owners).items():
            engine.scale_gradients(params, float(factor))


@torch.no_grad()
def measured(parameters: Iterable[Any], norm_type: float = 2.0) -> Measured:
    """Returns the norms of the gradients of these parameters. Over ranks `norm_type` is 2, and
    gradients are sums over ranks."""
    tiles = [tile for parameter in parameters for tile in tiles_of(parameter)]
    owners = [owner_of_tile(tile) for tile in tiles]
    params = {
        engine: iter(engine.params_of(own)) for engine, own in by_engine(tiles, owners).items()
    }
    items = [
        tile if owner is None else next(params[owner])
        for tile, owner in zip(tiles, owners, strict=True)
    ]
    norms: dict[int, torch.Tensor] = {
        id(item): torch.linalg.vector_norm(item.grad, norm_type).cpu()
        for item in items
        if isinstance(item, torch.Tensor) and item.grad is not None
    }
    for engine, own in by_engine(items, owners).items():
        norms |= _norms_of(engine, list(dict.fromkeys(own)), norm_type)
    there = [pair for pair in zip(items, owners, strict=True) if id(pair[0]) in norms]
    in_order = [norms[id(item)] for item, _ in there]
    total = torch.tensor(0.0, device="cpu")
    if in_order:
        total = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
    return Measured([p for p, _ in there], [o for _, o in there], in_order, total, norm_type)


def by_engine(items: Iterable[Any], owners: Iterable[Engine | None]) -> dict[Engine, list[Any]]:
    """Returns the items of each engine, in order; `owners` has the engine of each item, or None."""
    found: dict[Engine, list[Any]] = {}
    for item, owner in zip(items, owners, strict=True):
        if owner is not None:
            found.setdefault(owner, []).append(item)
    return found


def _norms_of(
    engine: Engine, params: list[OffloadedParam], norm_type: float
) -> dict[int, torch.Tensor]:
    engine.refuse_closed("gradient norms")
    if norm_type == 2:
        by_name = engine.gradient_norms(params)
        return {id(param): by_name[param.name] for param in params if param.name in by_name}
    gradients = ((param, engine.read_gradient(param.name)) for param in params)
    return {
        id(param): torch.linalg.vector_norm(gradient, norm_type)
        for param, gradient in gradients
        if gradient is not None
    }


def engines_of(tensors: Iterable[Any]) -> list[Engine]:
    """Returns the engines of these handles or compute parameters, each once."""
    owners = map(owner_of, tensors)
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[Any],
    max_norm: float | None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`: clips the gradients of these parameters, of any models, and
    returns their norm before that: an fp32 scalar on the host. None as `max_norm` clips nothing.

    `error_if_nonfinite`: raises NonFiniteError before a gradient changes; the default is the option
    of the parameters' optimizers. With several ranks, all of them make the call, after their last
    backward of the step, and the norm is the 2-norm: else UnsupportedError.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    tiles = [tile for parameter in chosen for tile in tiles_of(parameter)]
    divided = [engine for engine in engines_of(tiles) if engine.num_ranks > 1]
    if divided and norm_type != 2:
        raise UnsupportedError(
            f"over ranks the norm of gradients is the 2-norm, got norm_type={norm_type}; leave "
            "norm_type out"
        )
    for engine in divided:
        engine.begin_step(makes_step=False)  # Else this rank has its own gradients only.
    found = measured(tiles, norm_type)
    of_params = (getattr(param, "optimizer", None) for param in found.params)
    optimizers = list(dict.fromkeys(known() for known in of_params if known is not None))
    optimizers = [optimizer for optimizer in optimizers if optimizer is not None]
    if error_if_nonfinite is None:
        error_if_nonfinite = any(optimizer.error_if_nonfinite for optimizer in optimizers)
    if error_if_nonfinite:
        found.check(step=max((optimizer.next_step for optimizer in optimizers), default=1))
    if max_norm is not None:
        found.clip(float(max_norm))
    for optimizer in optimizers:
        optimizer.note_measured(found, is_clipped=max_norm is not None)
    return found.norm
