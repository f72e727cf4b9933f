"""Lion over tensors in memory, by the readable reference: torch has none to compare with."""

from __future__ import annotations

from typing import Any

import torch

from infinity.ops.optimizers import reference_span_
from infinity.ops.rules import LionSettings
from infinity.ops.span import StateSpan


class PlainLion(torch.optim.Optimizer):
    """Lion over tensors in memory, by the readable reference."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state["step"] = state.get("step", 0) + 1
                beta1, beta2 = group["betas"]
                settings = LionSettings(
                    lr=float(group["lr"]),
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    step=state["step"],
                )
                arrays = (parameter.view(-1), parameter.grad.view(-1), (state["exp_avg"].view(-1),))
                reference_span_(StateSpan(*arrays), settings, 1.0)
