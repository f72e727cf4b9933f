"""The Triton kernel of the update has the bits of the native one: in the interpreter, and by the
instructions that it is compiled to."""

from __future__ import annotations

from collections import Counter

import numpy
import pytest
import torch

from infinity.fused import choice
from infinity.ops import on_device
from infinity.ops.exact import to_fp32
from infinity.ops.optimizers import update_
from infinity.ops.rules import AdamSettings, AdamWSettings, LionSettings, Settings, SGDSettings
from infinity.ops.span import StateSpan
from tests.fused.compiled import float_operations
from tests.fused.conftest import forget
from tests.fused.variants import Variants
from tests.ops.state import RANGES, assert_same_bits, clone, make_span

COMMON = {"lr": 3e-3, "weight_decay": 0.01}
RECIPES: tuple[Settings, ...] = (
    AdamWSettings(**COMMON, beta1=0.9, beta2=0.999, eps=1e-8, step=1),
    AdamWSettings(**COMMON, beta1=0.0, beta2=0.95, eps=0.0, step=7),  # From the farther end.
    AdamSettings(**COMMON, beta1=0.9, beta2=0.999, eps=1e-8, step=1000),
    AdamSettings(lr=1e-3, weight_decay=0.0, beta1=0.3, beta2=0.5, eps=1e-8, step=2),
    SGDSettings(**COMMON, momentum=0.0, dampening=0.0, nesterov=False, step=1),
    SGDSettings(lr=0.1, weight_decay=0.0, momentum=0.9, dampening=0.1, nesterov=False, step=2),
    SGDSettings(**COMMON, momentum=0.9, dampening=0.0, nesterov=True, step=1),
    SGDSettings(**COMMON, momentum=0.9, dampening=0.0, nesterov=True, step=2),
    LionSettings(**COMMON, beta1=0.9, beta2=0.99, step=3),
)
names = [f"{recipe.rule}-{index}" for index, recipe in enumerate(RECIPES)]


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_the_kernel_has_the_bits_of_the_native_one(interpreter: None, recipe: Settings) -> None:
    for seed, values in enumerate(RANGES):
        for is_split in (False, True):
            gradient_dtype = torch.bfloat16 if is_split else torch.float32
            # A tail of every length, one program and two.
            for numel in (3, 8, 15, 1024 + 13):
                native = make_span(
                    numel, seed, recipe, values=values, is_split=is_split,
                    gradient_dtype=gradient_dtype,
                )  # fmt: skip
                fused = clone(native)
                grad_scale = to_fp32(0.3)
                on_device.fused_span_(fused, recipe, grad_scale)
                update_([native], recipe, grad_scale=grad_scale)
                assert_same_bits(fused, native)


def test_formats_of_weight_and_gradient_are_independent(interpreter: None) -> None:
    for is_split, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        native = make_span(77, 3, RECIPES[0], is_split=is_split, gradient_dtype=dtype)
        fused = clone(native)
        on_device.fused_span_(fused, RECIPES[0], 1.0)
        update_([native], RECIPES[0])
        assert_same_bits(fused, native)


# Those of the rules in csrc/update/rules; where body and tail differ, both are computed.
MOMENTS = Counter({"fma.rn": 3, "mul.rn": 4, "sqrt.rn": 1, "div.rn": 2, "sub.rn": 1, "add.rn": 2})
MOMENTS += Counter({"sub.rn": 1, "add.rn": 1})  # Both coefficients of the farther end.
EXPECTED: dict[str, Counter[str]] = {
    "adam": MOMENTS + Counter({"fma.rn": 1, "mul.rn": 1}),
    "sgd": Counter({"fma.rn": 2}),
    "momentum_sgd": Counter({"fma.rn": 5, "mul.rn": 2}),
    "lion": Counter({"fma.rn": 2, "mul.rn": 3, "sub.rn": 1}),
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_exactly_the_fused_products_of_the_rule_are_fused(compiler: None, rule: str) -> None:
    from infinity.fused import update_kernels

    num_states = {"adam": 2, "sgd": 0}.get(rule, 1)
    floats = ("gradients", "states0", "states1")
    types = {
        "weights": "*i16", "residuals": "*i16", "numel": "i64", "grad_scale": "fp32",
        **dict.fromkeys(floats, "*fp32"), **{f"c{index}": "fp32" for index in range(8)},
    }  # fmt: skip
    constants = {
        "rule": rule, "num_states": num_states, "is_split": True, "is_gradient_bf16": False,
        "program_numel": 128,  # One element for each thread.
    }  # fmt: skip
    found = float_operations(update_kernels.update, types, constants)
    scaled = EXPECTED[rule] + Counter({"mul.rn": 1})  # The gradient.
    arithmetic = {
        name: count
        for name, count in found.items()
        if name.split(".")[0] in ("fma", "mul", "sqrt", "div", "sub", "add", "mad", "rcp")
    }
    assert arithmetic == {f"{name}.f32": count for name, count in scaled.items()}
    assert not [name for name in found if "ftz" in name or "approx" in name or "full" in name]


# -- The choice ----------------------------------------------------------------------------------


def test_a_kernel_that_passes_its_trial_is_used(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "explain_no_triton", lambda device: "")
    monkeypatch.setattr(on_device, "trials", choice.Trials())
    cpu = torch.device("cpu")
    for recipe, is_split in ((RECIPES[0], True), (RECIPES[6], False)):
        assert on_device.explain_refusal(recipe, cpu, torch.float32, is_split=is_split) == ""


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[4], RECIPES[8]], ids=lambda r: r.rule)
def test_a_trial_compiles_what_later_updates_run(
    recipe: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    launched = Variants("infinity.fused.update_kernels", monkeypatch, forget)
    cpu = torch.device("cpu")
    for is_split, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        launched.found.clear()
        with numpy.errstate(all="ignore"):
            assert on_device.has_host_bits(recipe, cpu, dtype, is_split=is_split)
            tried = set(launched.found)
            assert len(tried) == 1
            for numel, start in ((1, 0), (1, 3), (16, 0), (48, 4), (33, 1)):
                span = make_span(start + numel, 0, recipe, is_split=is_split, gradient_dtype=dtype)
                behind = StateSpan(
                    span.weight[start:],
                    span.gradient[start:],
                    tuple(each[start:] for each in span.states if isinstance(each, torch.Tensor)),
                    None if span.residual is None else span.residual[start:],
                )
                on_device.fused_span_(behind, recipe, 0.5)
        assert launched.found == tried
    forget()


def test_a_kernel_with_other_bits_fails_its_trial(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "explain_no_triton", lambda device: "")
    monkeypatch.setattr(on_device, "trials", choice.Trials())
    native = on_device.fused_span_

    def rounded_otherwise(span: StateSpan, recipe: Settings, grad_scale: float) -> None:
        native(span, recipe, grad_scale)
        span.states[-1].view(torch.int32)[5] += 1

    monkeypatch.setattr(on_device, "fused_span_", rounded_otherwise)
    cpu = torch.device("cpu")
    assert "its bits" in on_device.explain_refusal(RECIPES[0], cpu, torch.float32, is_split=True)
