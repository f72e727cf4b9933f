"""One product for all experts of a tile.

`products` is the computation of transformers' `grouped_mm` (`integrations/moe.py`) over rows that
are ordered by expert already. It knows of a class what transformers' decorator notes of it.

Note [One result]
  A row's product does not depend on the rows of other experts or micro-batches where a trial has
  shown that of the device (`ops/experts.py`). There the rows of several micro-batches share
  a product. Elsewhere each micro-batch has its own.
  Sums over rows (gradients of adapters) are one group for each expert and micro-batch, so they have
  the bits of a micro-batch by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from infinity.modules.tiling.peft_experts import Adaptation
from infinity.ops.experts import Pairs

_ALIGNMENT_NBYTES = 16  # Of the rows of the matrices of a grouped product.


def explain_no_groups(tile: Any) -> str:
    """Returns why the experts of a tile have no grouped product, "" if they have."""
    if not isinstance(getattr(tile, "has_post_expert_norm", None), bool):
        return f"transformers knows no grouped product of {type(tile).__name__}"
    for name, matrices in tile.matrices.items():
        sizes = [size * matrices.element_size() for size in matrices.shape[1:]]
        if matrices.dim() != 3 or any(nbytes % _ALIGNMENT_NBYTES for nbytes in sizes):
            return f"the {name} of {type(tile).__name__} has rows of no multiple of 16 bytes"
    return ""


class Groups(NamedTuple):
    """The experts of a product. first: of the tile. num_joined: how often each expert is there."""

    pairs: Pairs
    experts: slice
    first: int
    num_joined: int


def products(
    tile: Any, adaptations: Mapping[str, Adaptation], rows: torch.Tensor, groups: Groups
) -> torch.Tensor:
    """Returns what experts give for their rows, before routing weights: [rows, width]."""
    pairs, experts, first, num_joined = groups
    within = slice((experts.start - first) // num_joined, (experts.stop - first) // num_joined)
    ends = pairs.ends_of(experts)
    ends_of_experts = ends[num_joined - 1 :: num_joined].contiguous()

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight: Any = tile._parameters[name][within]
        if (adaptation := adaptations.get(name)) is not None:
            base = weight
            weight = adaptation.of(lambda: base).of_groups(ends)
        if not tile.is_transposed:
            weight = weight.transpose(-2, -1)
        out = functional.grouped_mm(rows.to(weight.dtype), weight, offs=ends_of_experts)
        return out.add_(bias_of(name)) if tile.has_bias else out

    def bias_of(name: str) -> torch.Tensor:
        name = f"{name}_bias"
        bias = tile._parameters[name][within]
        numbers = pairs.numbers_of(experts)
        if (adaptation := adaptations.get(name)) is None:
            chosen: torch.Tensor = bias[numbers // num_joined]
            return chosen
        sums: torch.Tensor = adaptation.of(lambda: bias.repeat_interleave(num_joined, 0))
        return sums[numbers]

    out = linear(rows, "gate_up_proj" if tile.has_gate else "up_proj")
    out = linear(tile._apply_gate(out) if tile.has_gate else tile.act_fn(out), "down_proj")
    normed: torch.Tensor = tile.post_expert_norm(out) if tile.has_post_expert_norm else out
    return normed
