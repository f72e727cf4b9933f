"""Shapes: published parameter counts, and the same units as the engine makes of a real model."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import ConfigError
from infinity.plan.hardware import load_hardware
from infinity.plan.model import load_model, model_of_shape
from infinity.plan.shapes import scaled_gpt


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        # Of ZeRO-Infinity's table; 12 layers hidden^2 and the embedding.
        ("gpt-10b", 10.07e9 + 0.21e9, None),
        ("gpt-50b", 50e9, None),
        ("gpt-100b", 101e9, None),
        ("gpt-500b", 506e9, None),
        ("gpt-1t", 1.008e12, None),
        # Of the models' own reports.
        ("llama-3-70b", 70.55e9, None),
        ("llama-3-405b", 405.9e9, None),
        ("deepseek-v3", 671e9, 37e9),
        ("kimi-k2", 1.03e12, 32e9),
        ("kimi-k2-int4", 1.03e12, 32e9),
        ("gpt-oss-120b", 116.83e9, 5.13e9),
        ("qwen3-235b", 235.1e9, 22e9),
        ("qwen3-coder-480b", 480.2e9, 35e9),
        ("glm-4.6", 355e9, 32e9),
        ("kimi-k3", 2.8e12, 104e9),
        ("qwen3.8-2.4t", 2.42e12, 95e9),
    ],
)
def test_published_sizes(name: str, params: float, active: float | None) -> None:
    model = load_model(name, torch.bfloat16)
    assert model.num_params == pytest.approx(params, rel=0.01)
    if active is not None:
        assert model.active_params == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("params", [1e8, 7e9, 1e11, 1e12])
def test_scaled_shapes_have_about_what_was_asked(params: float) -> None:
    model = model_of_shape(scaled_gpt(int(params)), torch.bfloat16)
    embedding = model.units[0].tensors[0].numel
    assert model.num_params - embedding == pytest.approx(params, rel=0.06)


def test_flops_of_a_dense_model_are_two_a_parameter_and_token() -> None:
    model = load_model("llama-3-70b", torch.bfloat16)
    flops = sum(hooked.forward_flops(1000, 1) for hooked in model.hooked_modules)
    assert flops == pytest.approx(2 * 1000 * 69.5e9, rel=0.01)  # The embedding multiplies nothing.


def test_attention_grows_with_the_sequence() -> None:
    model = load_model("llama-3-70b", torch.bfloat16)
    short, long = (
        sum(hooked.forward_flops(8192, length) for hooked in model.hooked_modules)
        for length in (1, 8192)
    )
    # Causal: scores and mixing, 2 * hidden values each token and half of the positions.
    assert long - short == pytest.approx(2 * 8192 * 80 * 2 * 8192 * 8191 / 2)


@pytest.mark.parametrize("load", [load_hardware, lambda name: load_model(name, torch.float32)])
def test_the_error_for_an_unknown_model_lists_the_known_ones(load: object) -> None:
    with pytest.raises(ConfigError, match="one of "):
        load("gpt-9")  # type: ignore[operator]
