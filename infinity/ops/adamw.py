"""AdamW over flat fp32 buffers.

The arithmetic is `torch._fused_adamw_`, the kernel behind `torch.optim.AdamW(fused=True)`, so that
an offloaded update has the same bits. It is elementwise and its vector lanes start at the first
element, so a tensor may be cut anywhere at a multiple of 16 elements without changing a bit.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """What one step of one parameter group uses. `step` counts from 1."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


def adamw_(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    settings: AdamWSettings,
) -> None:
    """One step in place. Every tensor is fp32 and flat; the i-th of each list have one shape.

    `gradients` is read only. All lists belong to one parameter group at one step count.
    """
    step = torch.tensor(float(settings.step), device=weights[0].device)
    torch._fused_adamw_(
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
