"""PEFT's adapters on packed experts (`target_parameters`), computed as factors.

PEFT wraps the module of experts once per adapted parameter, one wrapper in the other. While the
module runs, a wrapper replaces its parameter by `weight + scaling * left @ right` over all experts.
Here the module gets an `AdaptedWeight` instead, and the tiles of experts get their parts of the
factors. Names, shapes and files of the adapter stay PEFT's: `lora_A.weight` is [rank * experts,
in], `lora_B.weight` is [out, rank * experts], with the expert's number varying slowest in the first
and fastest in the second (peft 0.21, `tuners/lora/layer.py`, `ParamWrapper`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.modules.tiling.expert_factors import AdaptedWeight
from infinity.modules.tiling.layers import Tiled

_INSTEAD_OF = "_activate_lora"  # PEFT's method that replaces the parameter by the sum.


class Adaptation(NamedTuple):
    """The effect of an adapter on a parameter with one row per expert.

    `tensors` have one row per expert, too. `shown` makes what a module uses in the place of the
    weight, from a function that returns the weight and from rows of the tensors.
    """

    tensors: tuple[torch.Tensor, ...]
    shown: Callable[..., Any]

    def of(self, weight_of: Callable[[], torch.Tensor]) -> Any:
        """Returns what a module uses in the place of the weight."""
        return self.shown(weight_of, *self.tensors)


def _sum(weight_of: Callable[[], torch.Tensor], delta: torch.Tensor) -> torch.Tensor:
    return weight_of() + delta  # A small parameter, such as the experts' biases.


class _Active(threading.local):
    """Active adaptations by tiled module and attribute. Micro-batches in one block run in several
    threads, each with the adapters of its own forward."""

    def __init__(self) -> None:
        self.of_module: dict[int, dict[str, Adaptation]] = {}


_active = _Active()


def adaptations_of(module: nn.Module) -> Mapping[str, Adaptation]:
    """Returns the adaptations of a tiled module's parameters in the running forward."""
    return _active.of_module.get(id(module), {})


def factor_adapters(model: nn.Module) -> list[nn.Module]:
    """Makes PEFT's wrappers of packed experts use factors; returns the wrappers that changed."""
    wrappers = [
        module
        for module in model.modules()
        if hasattr(type(module), _INSTEAD_OF)
        and hasattr(module, "parameter_name")
        and _INSTEAD_OF not in module.__dict__
    ]
    for wrapper in wrappers:
        wrapper.__dict__[_INSTEAD_OF] = partial(_activated, wrapper)
    return wrappers


def merge_adapters(wrappers: list[nn.Module]) -> None:
    """Undoes `factor_adapters`: the wrappers add their adapters up again."""
    for wrapper in wrappers:
        wrapper.__dict__.pop(_INSTEAD_OF, None)


@contextmanager
def _activated(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """Runs the wrapped module with these adapters."""
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    module, attribute = wrapper.get_base_layer(), wrapper.parameter_name
    if not adapters:
        yield
    elif isinstance(module, Tiled):
        shown = _active.of_module.setdefault(id(module), {})
        shown[attribute] = _adaptation(wrapper, adapters)
        try:
            yield
        finally:
            del shown[attribute]
            if not shown:
                _active.of_module.pop(id(module), None)
    elif wrapper.num_experts == 1:  # One matrix, not one per expert.
        with getattr(type(wrapper), _INSTEAD_OF)(wrapper, active_adapters):
            yield
    else:
        adaptation = _adaptation(wrapper, adapters)
        # The attribute hides the parameter, which may have no bytes before the module runs.
        module.__dict__[attribute] = adaptation.of(lambda: module._parameters[attribute])
        try:
            yield
        finally:
            del module.__dict__[attribute]


def _adaptation(wrapper: Any, adapters: list[str]) -> Adaptation:
    if wrapper.num_experts == 1:
        deltas = [wrapper.get_delta_weight(name) for name in adapters]
        return Adaptation((sum(deltas[1:], start=deltas[0]),), _sum)
    factors = [_factors(wrapper, name) for name in adapters]
    left, right, scaling = factors[0]
    if len(factors) > 1:
        left = torch.cat([factor * scale for factor, _, scale in factors], dim=-1)
        right, scaling = torch.cat([factor for _, factor, _ in factors], dim=-2), 1.0
    factored = partial(AdaptedWeight, scaling=float(scaling))
    return Adaptation((_dense(left), _dense(right)), factored)


def _factors(wrapper: Any, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns (left, right, scaling) whose product is what the adapter adds to the experts, as
    `ParamWrapper.get_delta_factors` does from PEFT 0.21 on."""
    by_a, by_b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    right = by_a.reshape(wrapper.num_experts, -1, by_a.shape[-1])
    left = by_b.reshape(by_b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    if not wrapper._did_swap_in_out_features:  # Experts of (in, out).
        left, right = right.transpose(-2, -1), left.transpose(-2, -1)
    dtype = wrapper.get_param().dtype
    return left.to(dtype), right.to(dtype), wrapper.scaling[name]


def _dense(factor: torch.Tensor) -> torch.Tensor:
    """Returns a factor whose matrices BLAS reads in place. PEFT's lora_B keeps the elements of one
    expert apart, so it is copied once for all experts."""
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()
