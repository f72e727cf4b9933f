"""State updated on the GPU has the bits of state updated on the host."""

from __future__ import annotations

import pytest
import torch

from infinity.fused.choice import VARIABLE
from infinity.ops.on_device import update_span_
from infinity.ops.optimizers import update_
from infinity.ops.rules import AdamSettings, AdamWSettings, LionSettings, Settings, SGDSettings
from infinity.ops.span import StateSpan
from tests.ops.state import RANGES, assert_same_bits, make_span

COMMON = {"lr": 3e-3, "weight_decay": 0.01}
RECIPES: tuple[Settings, ...] = (
    AdamWSettings(**COMMON, beta1=0.9, beta2=0.999, eps=1e-8, step=7),
    AdamSettings(**COMMON, beta1=0.3, beta2=0.95, eps=0.0, step=2),
    SGDSettings(**COMMON, momentum=0.0, dampening=0.0, nesterov=False, step=1),
    SGDSettings(**COMMON, momentum=0.9, dampening=0.1, nesterov=True, step=2),
    LionSettings(**COMMON, beta1=0.9, beta2=0.99, step=3),
)


def moved(span: StateSpan, device: str) -> StateSpan:
    states = tuple(state.to(device) for state in span.states if isinstance(state, torch.Tensor))
    residual = None if span.residual is None else span.residual.to(device)
    return StateSpan(span.weight.to(device), span.gradient.to(device), states, residual)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.rule for recipe in RECIPES])
def test_updating_on_the_gpu_has_the_bits_of_the_host(
    recipe: Settings, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)  # "triton" raises if a kernel cannot be used.
    for seed, values in enumerate(RANGES):
        for is_split, gradient_dtype in ((True, torch.bfloat16), (False, torch.float32)):
            for numel in (5, 1_000_003):
                native = make_span(
                    numel, seed, recipe, values=values, is_split=is_split,
                    gradient_dtype=gradient_dtype,
                )  # fmt: skip
                there = moved(native, "cuda")
                update_span_(there, recipe, 0.5)
                update_([native], recipe, grad_scale=0.5)
                assert_same_bits(moved(there, "cpu"), native)
