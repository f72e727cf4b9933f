"""Parameters of an adapter on a model's shapes. Pure.

Source: Hu et al., "LoRA" (2021), section 4.1; Liu et al., "DoRA" (2024), section 4. Layout: PEFT's.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import AdapterConfig
from infinity.config.schema.adapter import ALL_LINEAR, AUTO_TARGETS
from infinity.errors import ConfigError
from infinity.plan.shapes import Linear, ModelShape, linears

_AUTO_PARTS = ("attention", "dense", "shared")


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """Parameters of the adapters of one block: all of them, and those that multiply a token."""

    num_params: int
    active_params: int


def adapter_size(shape: ModelShape, layer: int, adapter: AdapterConfig) -> AdapterSize:
    """Returns the adapter of a block. A block without a target has none."""
    found = linears(shape, layer)
    plain = sum(_params(linear, adapter) for linear in found if _is_target(linear, adapter))
    experts = [linear for linear in found if linear.part == "experts" and adapter.experts]
    routed = sum(linear.count * _params(linear, adapter) for linear in experts)
    per_token = 0
    if experts and shape.moe is not None:
        per_token = routed * shape.moe.experts_per_token // shape.moe.experts
    return AdapterSize(plain + routed, plain + per_token)


def refuse_unknown_targets(shape: ModelShape, adapter: AdapterConfig) -> None:
    """Raises ConfigError for a target that no block has, with the names that there are, and for
    routed experts that the model has not."""
    if adapter.experts and shape.moe is None:
        raise ConfigError(f"adapter.experts: {shape.name} has no routed experts; leave it out")
    if set(adapter.targets) & {AUTO_TARGETS, ALL_LINEAR}:
        return
    found = {linear for layer in range(shape.layers) for linear in linears(shape, layer)}
    names = {linear.module for linear in found if linear.part != "experts"}
    for target in adapter.targets:
        if target.rpartition(".")[2] not in names:
            raise ConfigError(
                f"adapter.targets: {target!r} is no linear layer of {shape.name}; expected some of "
                f"{', '.join(sorted(names))}, or {AUTO_TARGETS!r}"
            )


def _is_target(linear: Linear, adapter: AdapterConfig) -> bool:
    if linear.part == "experts":
        return False
    if AUTO_TARGETS in adapter.targets:
        return linear.part in _AUTO_PARTS
    if ALL_LINEAR in adapter.targets:
        return True
    return any(target.rpartition(".")[2] == linear.module for target in adapter.targets)


def _params(linear: Linear, adapter: AdapterConfig) -> int:
    magnitudes = linear.rows if adapter.method == "dora" else 0
    return adapter.rank * (linear.rows + linear.columns) + magnitudes
