"""Stochastic gradient descent with and without momentum. The arithmetic of
`torch.optim.SGD(fused=True)` on x86-64, whose momentum has a tail as AdamW's second moment has (see
`adamw.py`).

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
in the form that torch.optim.SGD documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.ops.exact import fma, to_fp32


@dataclass(frozen=True, slots=True)
class SGDSettings:
    """Settings of one step of one parameter group. `step` counts from 1; the first one starts the
    momentum with the gradient. Without momentum there is no state."""

    lr: float | torch.Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int

    @property
    def rule(self) -> str:
        """See `Settings.rule`: SGD with momentum is a rule of its own."""
        return "momentum_sgd" if self.momentum else "sgd"

    @property
    def state_names(self) -> tuple[str, ...]:
        """See `Settings.state_names`."""
        return ("momentum_buffer",) if self.momentum else ()

    def coefficients(self) -> tuple[float, ...]:
        """See `Settings.coefficients`."""
        plain = (float(self.lr), self.weight_decay)
        if not self.momentum:
            return plain
        return (
            *plain,
            self.momentum,
            1 - self.dampening,
            float(self.nesterov),
            float(self.step == 1),
        )

    def reference(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        is_tail: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `Settings.reference`."""
        lr, weight_decay, *rest = map(to_fp32, self.coefficients())
        if weight_decay != 0:
            gradient = fma(weight, weight_decay, gradient)
        if not self.momentum:
            return (fma(gradient, -lr, weight),)
        momentum, gradient_weight, _, _ = rest
        (velocity,) = states
        if self.step == 1:
            velocity = gradient
        elif is_tail:
            velocity = fma(velocity, momentum, gradient * gradient_weight)
        else:
            velocity = fma(gradient, gradient_weight, velocity * momentum)
        direction = fma(velocity, momentum, gradient) if self.nesterov else velocity
        return fma(direction, -lr, weight), velocity
