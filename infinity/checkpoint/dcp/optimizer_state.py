"""Converts the state of the optimizer to that of torch.optim, for models that fit in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.checkpoint.reader import full_state
from infinity.engine.registry import engine_of
from infinity.errors import UnsupportedError
from infinity.optimizers.offloaded import OffloadedOptimizer


def optimizer_state_dict(model: nn.Module, optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """Returns a state dict for `load_state_dict` of the torch optimizer with the same name.

    It has settings, step counts and moments. Every moment is a fresh fp32 tensor on the host, in
    shape and strides of its parameter; moments of eight bits are widened. For AdamW the moments
    need twice the fp32 size of the model, outside the host budget. Parameters are numbered as in
    the groups of the optimizer; the plain optimizer needs the same parameters in the same groups.

    All ranks call it. The first rank gets the full state dict, the others an empty dict, like the
    full state dicts of torch: a node has the memory for it once. Raises UnsupportedError for a
    model with tiles, whose parameters differ from those of the plain model, and InfinityError while
    parameters are in use.
    """
    tiled_params = engine_of(model).tiled_params
    if tiled_params:
        raise UnsupportedError(
            f"{next(iter(tiled_params))!r} stands as tiles, which a plain optimizer does not know; "
            "save a checkpoint, load it with schedule.tile as it is now, or train with "
            "schedule.tile = 0"
        )
    moments: dict[str, dict[str, torch.Tensor]] = {}
    with full_state(model, "infinity.checkpoint.optimizer_state_dict") as state:
        if state is None:
            return {}
        for unit in state.full_units:
            for state_kind in unit.moments.kinds:
                if not state.is_kept(unit, state_kind):
                    continue
                for spec in unit.trainable():
                    facts = spec.facts
                    empty = torch.empty_strided(facts.shape, facts.stride)
                    moments.setdefault(spec.name, {})[state_kind.value] = empty
                for part in state.parts(unit, state_kind):
                    full = moments[part.spec.name][state_kind.value].as_strided(
                        (part.spec.numel,), (1,)
                    )
                    values = part.wide(state_kind)
                    full[part.start : part.start + values.numel()] = values
        answer, named = optimizer.state_dict(), optimizer.named_state()
        names = [name for group in named["groups"] for name in group["params"]]
    steps, answer["state"] = answer["state"], {}
    for index, entry in steps.items():
        of_torch = state_of_torch(named, names[index], moments.get(names[index], {}))
        if optimizer.name != "sgd":
            of_torch["step"] = torch.tensor(float(entry["step"]))
        if of_torch:
            answer["state"][index] = of_torch
    for group in answer["param_groups"]:
        for key, value in defaults_of_torch(optimizer.name).items():
            group.setdefault(key, value)
    return answer


def state_of_torch(
    named: dict[str, Any], name: str, moments: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the moments of a parameter that the optimizer of torch has at this step.

    SGD of torch has no momentum buffer before its first step with a momentum.
    """
    is_begun = named.get("name") != "sgd" or name in named["begun"]
    return dict(moments) if is_begun else {}


def defaults_of_torch(name: str) -> dict[str, Any]:
    """Returns the default settings of a parameter group of the torch optimizer with this name."""
    cls: Any = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD
    }.get(name)  # fmt: skip
    if cls is None:
        return {}
    defaults: dict[str, Any] = cls([torch.empty(0)]).state_dict()["param_groups"][0]
    return defaults
