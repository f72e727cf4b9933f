"""MLPs that compute the tokens of a long sequence a slice at a time.

An MLP widens each token several times, and a backward holds all of these values. Of a slice only
the input is kept; the backward repeats its forward.

Source: Bekman et al., "Arctic Long Sequence Training" (2025), TiledMLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError, UnsupportedError
from infinity.modules.reading.configuration import mlps_of

_TOLERANCE = 2.0**-4  # Of the largest value: rounding is less, and other tokens change more.

Forward = Callable[[torch.Tensor], torch.Tensor]


def slice_mlps(model: nn.Module, num_tokens: int) -> None:
    """Makes every MLP of `model` compute at most `num_tokens` tokens at a time, in forward and
    backward. Call it before `infinity.offload`.

    Results agree to rounding: products of fewer rows may round otherwise, and dropout in an MLP
    draws other numbers. The backward computes the forward of an MLP once more. Routed experts stay
    as they are. Raises ConfigError for a model without an MLP. The first sequence that is cut
    raises UnsupportedError if the MLP mixes tokens.
    """
    if num_tokens < 1:
        raise ConfigError(f"slice_mlps: expected at least one token; got {num_tokens}")
    found = mlps_of(model)
    if not found:
        raise without_mlps(type(model).__name__)
    for name in (name for name, mlp in found.items() if "forward" in mlp.__dict__):
        raise UnsupportedError(
            f"{name}: its forward is replaced, perhaps by slices; make slices first, and once"
        )
    for name, mlp in found.items():
        mlp.forward = partial(_in_slices, mlp.forward, num_tokens, partial(_check, mlp, name))


def without_mlps(name: str) -> ConfigError:
    """Returns the error for a model that has nothing to slice."""
    return ConfigError(
        f"train.mlp_tokens (infinity.slice_mlps): {name} has no MLP that is a module, as "
        "`LlamaMLP` is; leave it out"
    )


def _in_slices(
    forward: Forward,
    num_tokens: int,
    check: Callable[[Forward, torch.Tensor], None],
    *inputs: torch.Tensor,
    **options: torch.Tensor,
) -> torch.Tensor:
    (hidden,) = (*inputs, *options.values())
    *size, width = hidden.shape
    if math.prod(size) <= num_tokens:
        return forward(hidden)
    # As one sequence: slices are contiguous, as a forward may expect.
    rows = hidden.reshape(*(1,) * (len(size) - 1), -1, width)
    check(forward, rows.narrow(-2, 0, 2))
    parts = rows.split(num_tokens, dim=-2)
    if torch.is_grad_enabled():
        outputs = [checkpoint(forward, part, use_reentrant=False) for part in parts]
    else:
        outputs = [forward(part) for part in parts]
    return torch.cat(outputs, dim=-2).reshape(*size, -1)


_checked = set[type[nn.Module]]()


def _check(mlp: nn.Module, name: str, forward: Forward, two: torch.Tensor) -> None:
    """Raises UnsupportedError unless two tokens give together what each gives alone."""
    if type(mlp) in _checked:
        return
    dropouts = [m for m in mlp.modules() if isinstance(m, nn.Dropout) and m.training]
    for module in dropouts:
        module.training = False
    with torch.no_grad():
        together, alone = forward(two), torch.cat([*map(forward, two.split(1, -2))], dim=-2)
    for module in dropouts:
        module.training = True
    if (together - alone).abs().max() > _TOLERANCE * alone.abs().max():
        raise UnsupportedError(
            f"{name}: tokens of a {type(mlp).__name__} depend on each other, so it cannot compute "
            "them in slices; leave out train.mlp_tokens (infinity.slice_mlps)"
        )
    _checked.add(type(mlp))
