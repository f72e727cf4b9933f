"""AdamW over flat fp32 buffers.

The arithmetic is that of `torch._fused_adamw_`, the kernel behind `torch.optim.AdamW(fused=True)`,
on x86-64, so that an offloaded update has the same bits. That kernel works on vectors of 8 elements
from the start of a tensor and on the last numel % 8 one by one; compiled with contraction, it
rounds exp_avg_sq differently in the two. Hence `is_tail`, and hence a tensor may be cut where a
vector starts: at any multiple of 16 elements, to be safe with torch's own threads too.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from infinity.ops.exact import fma, one_minus_product, sqrt, to_fp32
from infinity.ops.native import apply_rule
from infinity.ops.span import StateSpan, check_spans
from infinity.private.torch import fused_adamw_


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Settings of one step of one parameter group. `step` counts from 1."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    rule: ClassVar[str] = "adamw"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def coefficients(self) -> tuple[float, ...]:
        """See `Settings.coefficients`."""
        decay = one_minus_product(float(self.lr), self.weight_decay)
        return (decay, *moment_coefficients(self))

    def reference(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        is_tail: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `Settings.reference`."""
        decay, *common = map(to_fp32, self.coefficients())
        return moment_step(weight * decay, gradient, states, common, is_tail=is_tail)


class MomentSettings(Protocol):
    """Settings that AdamW and Adam have in common."""

    @property
    def lr(self) -> float | torch.Tensor:
        """The learning rate."""

    @property
    def beta1(self) -> float:
        """The decay of the first moment."""

    @property
    def beta2(self) -> float:
        """The decay of the second moment."""

    @property
    def eps(self) -> float:
        """The term that is added to the root of the second moment."""

    @property
    def step(self) -> int:
        """The number of this step, from 1."""


def moment_coefficients(settings: MomentSettings) -> tuple[float, ...]:
    """Returns the coefficients of AdamW and Adam, in fp64.

    (1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2^step), eps, lr / (1 - beta1^step)).
    """
    return (
        1 - settings.beta1,
        settings.beta2,
        1 - settings.beta2,
        math.sqrt(1 - settings.beta2**settings.step),
        settings.eps,
        float(settings.lr) / (1 - settings.beta1**settings.step),
    )


def moment_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    coefficients: Sequence[float],
    *,
    is_tail: bool,
) -> tuple[torch.Tensor, ...]:
    """New weight, exp_avg and exp_avg_sq. `coefficients` are moment_coefficients in fp32."""
    lerp_weight, beta2, square_weight, correction2_sqrt, eps, step_size = coefficients
    exp_avg, exp_avg_sq = states
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
    return weight + (exp_avg * -step_size) / denominator, exp_avg, exp_avg_sq


def adamw_(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    settings: AdamWSettings,
) -> None:
    """One step in place. Every tensor is fp32 and flat; the i-th of each list have one shape.

    `gradients` is read only. All lists belong to one parameter group at one step count. The bits
    are those of this torch's fused kernel; `optimizers.update_` does more, with the same bits.
    """
    if weights[0].device.type == "cpu" and has_torch_bits():
        spans = [
            StateSpan(weight, gradient, (exp_avg, exp_avg_sq))
            for weight, gradient, exp_avg, exp_avg_sq in zip(
                weights, gradients, exp_avgs, exp_avg_sqs, strict=True
            )
        ]
        check_spans(spans, settings.state_names)
        apply_rule(settings.rule, spans, settings.coefficients(), grad_scale=1.0, threads=None)
    else:
        torch_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, settings)


def torch_adamw_(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    settings: AdamWSettings,
) -> None:
    """`adamw_` by torch's own kernel, on any device."""
    step = torch.tensor(float(settings.step), device=weights[0].device)
    fused_adamw_(
        list(weights),
        list(gradients),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step] * len(weights),
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )


@functools.cache
def has_torch_bits() -> bool:
    """Returns whether the CPU kernel of this torch rounds as the native one, by comparing them.

    Another processor, compiler or release may contract other sums. An fp32 update must have the
    bits of the torch that it stands in for, so where they differ torch's kernel is used.
    """
    source = torch.Generator().manual_seed(0)
    numel = 16 * 64 + 15  # Vectors of any width and a tail of any length.
    for beta1, weight_decay in ((0.9, 0.01), (0.25, 0.0)):
        settings = AdamWSettings(
            lr=3e-3, beta1=beta1, beta2=0.98, eps=1e-8, weight_decay=weight_decay, step=3
        )
        ours = torch.randn(4, numel, generator=source)
        ours[3] = ours[3].square()
        torchs = ours.clone()
        weight, gradient, exp_avg, exp_avg_sq = ours
        apply_rule(
            settings.rule,
            [StateSpan(weight, gradient, (exp_avg, exp_avg_sq))],
            settings.coefficients(),
            grad_scale=1.0,
            threads=1,
        )
        weights, gradients, exp_avgs, exp_avg_sqs = ([row] for row in torchs)
        torch_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, settings)
        if not torch.equal(ours, torchs):
            return False
    return True
