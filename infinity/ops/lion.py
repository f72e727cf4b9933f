"""Lion: steps of one size, in the direction of the sign of an interpolated momentum.

torch has none to be equal to; the arithmetic is this reference. A direction of zero or NaN moves
nothing, as `torch.sign` has it; a NaN stays in exp_avg.

Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from infinity.ops.exact import fma, one_minus_product, to_fp32


@dataclass(frozen=True, slots=True)
class LionSettings:
    """Settings of one step of one parameter group. `step` counts from 1 and is not looked at."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    weight_decay: float
    step: int

    rule: ClassVar[str] = "lion"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def coefficients(self) -> tuple[float, ...]:
        """See `Settings.coefficients`."""
        lr = float(self.lr)
        decay = one_minus_product(lr, self.weight_decay)
        return (decay, lr, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)

    def reference(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        is_tail: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `Settings.reference`."""
        decay, lr, beta1, gradient_weight1, beta2, gradient_weight2 = map(
            to_fp32, self.coefficients()
        )
        (exp_avg,) = states
        direction = fma(gradient, gradient_weight1, exp_avg * beta1)
        new_exp_avg = fma(gradient, gradient_weight2, exp_avg * beta2)
        return weight * decay - torch.sign(direction) * lr, new_exp_avg
