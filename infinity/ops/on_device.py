"""The update of a span on a device: by the Triton kernel, or by the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from infinity.fused import launches as fused
from infinity.fused.choice import Trials
from infinity.ops.exact import split, to_fp32
from infinity.ops.optimizers import reference_span_, update_
from infinity.ops.rules import Settings
from infinity.ops.span import StateSpan

trials = Trials()
# Whole programs; a part of one, and a tail.
_TRIALS = (8192, 8192 + 1024 + 5)


def update_span_(span: StateSpan, settings: Settings, grad_scale: float) -> None:
    """One step in place, of arrays on one device, without 8-bit states; the bits of the host's
    native kernel, but for which NaN a NaN is. `grad_scale` is an fp32 value.

    The first call per device, rule and format compiles and tries the kernel, which takes seconds.
    """
    is_fused = is_updated_by_kernel(span, settings)
    (fused_span_ if is_fused else reference_span_)(span, settings, grad_scale)


def is_updated_by_kernel(span: StateSpan, settings: Settings) -> bool:
    """Whether the Triton kernel updates a span, which takes no memory beside it; else the reference
    does, in many operations."""
    device, gradient_dtype = span.weight.device, span.gradient.dtype
    return device.type == "cuda" and not explain_refusal(
        settings, device, gradient_dtype, is_split=span.is_split
    )


def explain_refusal(
    settings: Settings, device: torch.device, gradient_dtype: torch.dtype, *, is_split: bool
) -> str:
    """Returns why the reference updates spans of this format, "" if the Triton kernel does."""
    return trials.explain_refusal(
        f"the update by {settings.rule}",
        (settings.rule, is_split, gradient_dtype),
        device,
        lambda: has_host_bits(settings, device, gradient_dtype, is_split=is_split),
    )


def fused_span_(span: StateSpan, settings: Settings, grad_scale: float) -> None:
    """`update_span_` by the Triton kernel."""
    states = [state for state in span.states if isinstance(state, torch.Tensor)]
    assert len(states) == len(settings.state_names)
    fused.update_span_(
        settings.rule, span.weight, span.residual, span.gradient, states,
        [to_fp32(number) for number in settings.coefficients()], grad_scale=grad_scale,
    )  # fmt: skip


def has_host_bits(
    settings: Settings, device: torch.device, gradient_dtype: torch.dtype, *, is_split: bool
) -> bool:
    """Updates random numbers of all magnitudes, denormals included, on the device and on the host:
    a first step and a later one."""
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    recipe: Any = settings
    for numel, step in itertools.product(_TRIALS, (1, 3)):
        tried = replace(recipe, step=step)
        arrays = torch.randn(2 + len(settings.state_names), numel, generator=source, device="cpu")
        arrays *= 10.0 ** torch.randint(-44, 10, arrays.shape, generator=source, device="cpu")
        arrays[3:].abs_()  # A second moment has no sign.
        arrays[:, ::97] = 0.0
        weight, residual = split(arrays[0]) if is_split else (arrays[0].clone(), None)
        states = tuple(arrays[2:].unbind())
        on_host = StateSpan(weight, arrays[1].to(gradient_dtype), states, residual)
        there = StateSpan(
            weight.to(device, copy=True),
            on_host.gradient.to(device, copy=True),
            tuple(state.to(device, copy=True) for state in states),
            None if residual is None else residual.to(device, copy=True),
        )
        grad_scale = to_fp32(0.7)
        fused_span_(there, tried, grad_scale)
        update_([on_host], tried, grad_scale=grad_scale)
        if not all(map(_are_same, _changed(there), _changed(on_host))):
            return False
    return True


def _changed(span: StateSpan) -> list[torch.Tensor]:
    states = [state for state in span.states if isinstance(state, torch.Tensor)]
    return [span.weight, *states, *([] if span.residual is None else [span.residual])]


def _are_same(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Whether the bits are equal, any NaN for any other."""
    there = there.cpu()
    if here.dtype is torch.int16:
        return torch.equal(there, here)
    bits = torch.int16 if here.dtype is torch.bfloat16 else torch.int32
    is_equal = (there.view(bits) == here.view(bits)) | (there.isnan() & here.isnan())
    return bool(is_equal.all())
