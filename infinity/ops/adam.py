"""Adam: weight decay is added to the gradient. The arithmetic of `torch.optim.Adam(fused=True)` on
x86-64; everything said in `adamw.py` holds here too.

Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from infinity.ops.adamw import moment_coefficients, moment_step
from infinity.ops.exact import fma, to_fp32


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of one step of one parameter group. `step` counts from 1."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    rule: ClassVar[str] = "adam"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def coefficients(self) -> tuple[float, ...]:
        """See `Settings.coefficients`."""
        unused_decay = 1.0
        return (self.weight_decay, unused_decay, *moment_coefficients(self))

    def reference(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        is_tail: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `Settings.reference`."""
        weight_decay, _, *common = map(to_fp32, self.coefficients())
        if weight_decay != 0:
            gradient = fma(weight, weight_decay, gradient)
        return moment_step(weight, gradient, states, common, is_tail=is_tail)
