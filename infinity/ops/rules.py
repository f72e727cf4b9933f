"""The optimizers there are: the settings of a step, and its arithmetic as a readable reference.

Each has a rule in `csrc/update/rules/` that says the same arithmetic, bit for bit. That of Adam,
AdamW and SGD is the arithmetic of torch's fused kernels (`torch.optim.AdamW(fused=True)`) on
x86-64, so that an offloaded update has the same bits. Those kernels work on vectors of 8 elements
from the start of a tensor and on the last numel % 8 one by one; compiled with contraction, they
round a moment differently in the two. Hence `is_tail`, and hence a tensor may be cut where a vector
starts: at any multiple of 16 elements, to be safe with torch's own threads too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from infinity.ops.exact import fma, one_minus_product, sqrt, to_fp32

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one step of one parameter group. `step` counts from 1."""

    lr: float | torch.Tensor
    weight_decay: float
    step: int

    @property
    def rule(self) -> str:
        """Name of the native rule."""
        raise NotImplementedError

    @property
    def state_names(self) -> tuple[str, ...]:
        """The arrays that a span carries beside weight and gradient; `exp_avg_sq` has no sign."""
        raise NotImplementedError

    def coefficients(self) -> tuple[float, ...]:
        """The numbers of the native rule in its order, fp64, rounded to fp32 when used."""
        raise NotImplementedError

    def reference(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        is_tail: bool,
    ) -> tuple[torch.Tensor, ...]:
        """New weight and new states, from fp32 tensors. `is_tail`: of the last numel % 8."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings(Settings):
    """Adam: weight decay is added to the gradient.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.
    """

    beta1: float
    beta2: float
    eps: float

    rule = "adam"
    state_names = MOMENTS
    is_decoupled: ClassVar[bool] = False

    def coefficients(self) -> tuple[float, ...]:
        """(weight decay, what weights are multiplied by, 1 - beta1, beta2, 1 - beta2,
        sqrt(1 - beta2^step), eps, lr / (1 - beta1^step))."""
        decays = self.weight_decay, 1.0
        if self.is_decoupled:
            decays = 0.0, one_minus_product(float(self.lr), self.weight_decay)
        return (
            *decays,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            math.sqrt(1 - self.beta2**self.step),
            self.eps,
            float(self.lr) / (1 - self.beta1**self.step),
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
        weight_decay, decay, lerp_weight, beta2, square_weight, correction2_sqrt, eps, step_size = (
            map(to_fp32, self.coefficients())
        )
        exp_avg, exp_avg_sq = states
        gradient = _decayed(weight, gradient, weight_decay)
        change = gradient - exp_avg
        if lerp_weight < 0.5:  # Interpolated from the nearer end.
            exp_avg = fma(change, lerp_weight, exp_avg)
        else:
            # Without beta1 this is a zero, whose sign shows in the sign of a zero moment.
            far_weight = -(1 - lerp_weight) if is_tail else lerp_weight - 1
            exp_avg = fma(change, to_fp32(far_weight), gradient)
        part = gradient * square_weight
        if is_tail:
            exp_avg_sq = fma(exp_avg_sq, beta2, part * gradient)
        else:
            exp_avg_sq = fma(gradient, part, exp_avg_sq * beta2)
        # A tensor, because torch divides by a number as it multiplies by its reciprocal.
        divisor = torch.full_like(exp_avg_sq, correction2_sqrt)
        denominator = sqrt(exp_avg_sq) / divisor + eps
        return weight * decay + (exp_avg * -step_size) / denominator, exp_avg, exp_avg_sq


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings(AdamSettings):
    """AdamW: weight decay shrinks the weights.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
    """

    is_decoupled: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDSettings(Settings):
    """Stochastic gradient descent with and without momentum. The first step starts the momentum
    with the gradient. Without momentum there is no state, and SGD with it is a rule of its own.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    2013, in the form that torch.optim.SGD documents.
    """

    momentum: float
    dampening: float
    nesterov: float  # 0 or 1.

    @property
    def rule(self) -> str:
        """See `Settings.rule`."""
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
        flags = float(self.nesterov), float(self.step == 1)
        return (*plain, self.momentum, 1 - self.dampening, *flags)

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
        gradient = _decayed(weight, gradient, weight_decay)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LionSettings(Settings):
    """Lion: steps of one size, in the direction of the sign of an interpolated momentum.

    torch has none to be equal to; the arithmetic is this reference. A direction of zero or NaN
    moves nothing, as `torch.sign` has it; a NaN stays in exp_avg.

    Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
    """

    beta1: float
    beta2: float

    rule = "lion"
    state_names = ("exp_avg",)

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


def _decayed(weight: torch.Tensor, gradient: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """Returns the gradient with weight decay. Without it nothing is added: 0 * infinity would be
    NaN."""
    return fma(weight, weight_decay, gradient) if weight_decay != 0 else gradient
