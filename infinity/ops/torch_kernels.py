"""The steps of torch's own fused kernels, and whether the native ones have their bits here.

Another processor, compiler or release may contract other sums than the native kernels do. An fp32
update must have the bits of the torch that it stands in for, so where they differ torch's own
kernel is used. torch has no Lion to be equal to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from infinity.ops.adam import AdamSettings
from infinity.ops.adamw import AdamWSettings, has_torch_bits, torch_adamw_
from infinity.ops.native import apply_rule
from infinity.ops.sgd import SGDSettings
from infinity.ops.span import StateSpan
from infinity.private.torch import fused_adam_, fused_sgd_

_Tensors = Sequence[torch.Tensor]
_Settings = AdamWSettings | AdamSettings | SGDSettings
# Both ways of interpolating a moment, and every way of a momentum.
_PROBED: dict[type, tuple[_Settings, ...]] = {
    AdamSettings: tuple(
        AdamSettings(lr=3e-3, beta1=beta1, beta2=0.98, eps=1e-8, weight_decay=decay, step=3)
        for beta1, decay in ((0.9, 0.01), (0.25, 0.0))
    ),
    SGDSettings: tuple(
        SGDSettings(
            lr=3e-3, momentum=momentum, dampening=dampening, weight_decay=0.01,
            nesterov=nesterov, step=3,
        )
        for momentum, dampening, nesterov in ((0.0, 0.0, False), (0.9, 0.1, False), (0.9, 0, True))
    ),
}  # fmt: skip


def is_native(settings: object) -> bool:
    """Returns whether the native rule may replace torch's kernel in an fp32 update."""
    if isinstance(settings, AdamWSettings):
        return has_torch_bits()
    rule: Any = type(settings)
    return rule not in _PROBED or _has_bits(rule)


@functools.cache
def _has_bits(rule: type) -> bool:
    source = torch.Generator().manual_seed(0)
    numel = 16 * 64 + 15  # Vectors of any width and a tail of any length.
    for settings in _PROBED[rule]:
        ours = torch.randn(2 + len(settings.state_names), numel, generator=source)
        ours[-1] = ours[-1].square()  # A second moment has no sign; others do not mind.
        torchs = ours.clone()
        span = StateSpan(ours[0], ours[1], tuple(ours[2:]))
        apply_rule(settings.rule, [span], settings.coefficients(), grad_scale=1.0, threads=1)
        torch_step_([torchs[0]], [torchs[1]], [list(torchs[2:])], settings)
        if not torch.equal(ours, torchs):
            return False
    return True


def torch_step_(
    weights: _Tensors, gradients: _Tensors, states: Sequence[_Tensors], settings: object
) -> None:
    """One step of torch's fused kernel, in place; `states` are those of each weight."""
    by_name = [list(arrays) for arrays in zip(*states, strict=True)]
    if isinstance(settings, AdamWSettings):
        exp_avgs, exp_avg_sqs = by_name
        torch_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, settings)
    elif isinstance(settings, AdamSettings):
        exp_avgs, exp_avg_sqs = by_name
        _torch_adam_(weights, gradients, exp_avgs, exp_avg_sqs, settings)
    else:
        assert isinstance(settings, SGDSettings)
        fused_sgd_(
            list(weights), list(gradients), by_name[0] if by_name else [],
            weight_decay=settings.weight_decay, momentum=settings.momentum, lr=settings.lr,
            dampening=settings.dampening, nesterov=settings.nesterov, maximize=False,
            is_first_step=settings.step == 1,
        )  # fmt: skip


def _torch_adam_(
    weights: _Tensors,
    gradients: _Tensors,
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    settings: AdamSettings,
) -> None:
    step = torch.tensor(float(settings.step), device=weights[0].device)
    fused_adam_(
        list(weights), list(gradients), exp_avgs, exp_avg_sqs, [], [step] * len(weights),
        lr=settings.lr, beta1=settings.beta1, beta2=settings.beta2,
        weight_decay=settings.weight_decay, eps=settings.eps, amsgrad=False, maximize=False,
        grad_scale=None, found_inf=None,
    )  # fmt: skip
