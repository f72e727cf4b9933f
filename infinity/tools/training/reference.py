"""The model before training, with which "dpo" compares where all weights are trained.

An adapter needs no second model: TRL keeps the adapter's first values beside it. Where all weights
are trained, the reference is a frozen model of its own, with an engine of its own. Its weights rest
in the files of `model.path` and take next to no swap space. Policy and reference get half
of the host budget and of the device budget each.
"""

from __future__ import annotations

from typing import Any

import infinity
from infinity.config import SwapConfig
from infinity.config.values import Capacity
from infinity.errors import ConfigError
from infinity.tools.training.model import ModelPlan, build_model


def build_reference(plan: ModelPlan, config: SwapConfig) -> Any:
    """Returns the reference on meta, or None where the run needs no model of its own for it.

    Raises ConfigError for random weights, which no file holds.
    """
    assert config.train is not None
    if config.train.method != "dpo" or config.adapter is not None:
        return None
    if plan.path is None:
        raise ConfigError(
            'train.method: "dpo" prefers against the weights of model.path; got [model.config], '
            "whose weights are random"
        )
    model = build_model(plan, config)
    model.requires_grad_(False)
    model._is_accelerate_prepared = True  # Trainer does not move it.
    return model.eval()


def share_budgets(config: SwapConfig) -> tuple[SwapConfig, SwapConfig]:
    """Returns the configurations of policy and reference."""
    tiers = config.tiers
    host = tiers.host.model_copy(update={"capacity": _half(tiers.host.capacity)})
    device = tiers.device.model_copy(update={"capacity": _half(tiers.device.capacity)})
    halved = tiers.model_copy(update={"host": host, "device": device})
    drives = [
        drive.model_copy(update={"path": drive.path.with_name(f"{drive.path.name}-reference")})
        for drive in tiers.nvme
    ]
    apart = halved.model_copy(update={"nvme": type(tiers.nvme)(drives)})
    policy = config.model_copy(update={"tiers": halved})
    return policy, config.model_copy(update={"tiers": apart})


def place_reference(model: Any, plan: ModelPlan, config: SwapConfig) -> Any:
    """Leaves the reference's weights in their files. Returns its engine, which the caller closes.

    config: the second of `share_budgets`
    """
    assert config.model is not None
    infinity.offload(model, config, weights=plan.path, ignore=config.model.ignore)
    return infinity.engine_of(model)


def _half(capacity: Capacity) -> Capacity:
    if capacity.nbytes is not None:
        return Capacity(nbytes=capacity.nbytes // 2)
    # "auto" takes half of what is free, so the second engine takes half of what the first leaves.
    return capacity if capacity.percent is None else Capacity(percent=capacity.percent / 2)
