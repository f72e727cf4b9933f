"""Moments of eight bits: the same bits wherever they rest, close to fp32 moments, and few bytes.

The reference is plain PyTorch with the readable update of `infinity/ops`: one span per parameter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.ops.dynamic_8bit import State8Bit, num_scales
from infinity.ops.exact import split
from infinity.ops.optimizers import reference_span_
from infinity.ops.rules import AdamWSettings
from infinity.ops.span import StateSpan
from infinity.state.moments_8bit import GRANULE_NUMEL
from tests.support.bits import same_bits
from tests.support.exhaustive import in_turn, sampled
from tests.support.offloading import offloaded, swap_config

from .harness import Record, Side, run, seed_everything
from .test_placements import (
    MAX_NORM,
    MODELS,
    PLAN,
    WAYS,
    Case,
    check_places,
    config_of,
    device_of,
    groups,
    half_up,
    reference,
    skip_without,
)

EIGHT_BIT = replace(PLAN, steps=4)
LEARNING_STEPS = 12
PRECISION = {"compute": "float32", "moments": "8bit"}


class Moments:
    """What the optimizer keeps of one parameter."""

    def __init__(self, numel: int) -> None:
        self.states = tuple(
            State8Bit(torch.full((numel,), zero, dtype=torch.uint8), torch.zeros(num_scales(numel)))
            for zero in (127, 0)
        )


def plain_8bit(model: str, *, steps: int, is_split: bool = False) -> Record:
    """Plain PyTorch for forward, backward and clipping, then the reference of the update."""
    entry, record = MODELS[model], Record()
    module = entry.build(0)
    wide = {name: p.detach().clone() for name, p in module.named_parameters()}
    if is_split:
        module = module.bfloat16()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(half_up(wide[name]))
    parameters = dict(module.named_parameters())
    residuals = {name: split(value)[1] for name, value in wide.items()}
    moments = {name: Moments(p.numel()) for name, p in parameters.items()}
    named = {id(p): name for name, p in parameters.items()}
    shadows = [nn.Parameter(p.detach().float()) for p in parameters.values()]
    optimizer = torch.optim.AdamW(groups(module), lr=EIGHT_BIT.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    for step in range(steps):
        for shadow in shadows:
            shadow.grad = None
        for micro in range(EIGHT_BIT.accumulation):
            seed = 1000 + step * EIGHT_BIT.accumulation + micro
            seed_everything(seed)
            loss = entry.loss(module, entry.batch(seed)) / EIGHT_BIT.accumulation
            loss.backward()
            record.losses.append(loss.detach().clone())
            for parameter, shadow in zip(parameters.values(), shadows, strict=True):
                assert parameter.grad is not None
                gradient = parameter.grad.float()
                shadow.grad = gradient if shadow.grad is None else shadow.grad + gradient
                parameter.grad = None
        record.norms.append(torch.nn.utils.clip_grad_norm_(shadows, MAX_NORM).clone())
        gradients = dict(zip(parameters, (shadow.grad for shadow in shadows), strict=True))
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            settings = AdamWSettings(
                lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
                weight_decay=group["weight_decay"], step=step + 1,
            )  # fmt: skip
            for parameter in group["params"]:
                name = named[id(parameter)]
                gradient = gradients[name]
                assert gradient is not None
                residual = residuals[name].flatten() if is_split else None
                span = StateSpan(
                    parameter.data.flatten(), gradient.flatten(), moments[name].states, residual
                )
                reference_span_(span, settings, 1.0)
                parameter.data.copy_(span.weight.view(parameter.shape))
                if residual is not None:
                    residuals[name] = residual
        optimizer.step()  # Nothing: no gradient is left. The scheduler wants to see it.
        scheduler.step()
    record.weights = {name: p.detach().clone() for name, p in parameters.items()}
    return record


@cache
def reference_8bit(model: str, is_split: bool) -> Record:
    return plain_8bit(model, steps=EIGHT_BIT.steps, is_split=is_split)


# Every way once, every place of the moments in several of them.
CASES = [
    Case((("parameters", parameters), ("moments", moments), ("gradients", gradients)), way, model)
    for way, (parameters, moments, gradients), model in zip(
        WAYS,
        [
            ("nvme", "nvme", "host"),
            ("nvme", "nvme", "nvme"),
            ("host", "host", "host"),
            ("device", "device", "device"),
            ("nvme", "split", "host"),
            ("host", "nvme", "split"),
            ("device", "host", "nvme"),
            ("split", "device", "host"),
        ]
        * 2,
        ["decoder", "gpt2"] * 8,
        strict=True,
    )
]


def assert_is(expected: Record, found: Record) -> None:
    assert all(map(same_bits, expected.losses, found.losses))
    assert all(map(same_bits, expected.norms, found.norms))
    assert expected.weights.keys() == found.weights.keys()
    for name, weight in expected.weights.items():
        assert same_bits(weight, found.weights[name]), name


# Each of the eight placements with one of the two engines.
@pytest.mark.parametrize("case", sampled(CASES, lambda case: case not in CASES[4:12]), ids=str)
def test_the_bits_are_the_references_on_every_placement(
    case: Case, swap_directory: Path, io_engines: frozenset[str]
) -> None:
    skip_without(case.way.engine, io_engines)
    entry = MODELS[case.model]
    config = config_of(case, swap_directory, precision=PRECISION)
    with offloaded(entry.build(0), config, device=device_of(case)) as model:
        check_places(model, case)
        found = run(entry, Side(model), EIGHT_BIT, groups=groups)
    assert_is(reference_8bit(case.model, False), found)


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_with_a_split_master(placement: str, swap_directory: Path) -> None:
    entry = MODELS["decoder"]
    precision = PRECISION | {"compute": "bfloat16"}
    config = swap_config(swap_directory, placement=placement, precision=precision)
    with offloaded(entry.build(0), config) as model:
        found = run(entry, Side(model), EIGHT_BIT, groups=groups)
    assert_is(reference_8bit("decoder", True), found)


class Large(nn.Module):
    """One unit of several granules, tensors across their ends, and one tensor that is skipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Parameter(torch.randn(GRANULE_NUMEL - 1000))
        self.second = nn.Parameter(torch.randn(GRANULE_NUMEL + 77))
        self.unused = nn.Parameter(torch.randn(1000))
        self.last = nn.Parameter(torch.randn(700))

    def forward(self, x: Tensor) -> Tensor:
        return sum((p * x).square().mean() for p in (self.first, self.second, self.last))


@pytest.mark.parametrize(("placement", "chunk"), in_turn(["nvme", "host"], ["64KiB", "2MiB"]))
def test_units_of_several_granules(placement: str, chunk: str, swap_directory: Path) -> None:
    """Splits at granules, in memory and on drives; what has no gradient keeps its bytes."""
    plain = Large()
    moments = {name: Moments(p.numel()) for name, p in plain.named_parameters()}
    config = swap_config(
        swap_directory, placement=placement, precision=PRECISION, host_nbytes="32MiB",
        update_chunk=chunk,
    )  # fmt: skip
    with offloaded(Large(), config) as model:
        optimizer = infinity.AdamW(model, lr=1e-2, weight_decay=0.1)
        for step in range(1, 4):
            settings = AdamWSettings(
                lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step
            )
            for each in (plain, model):
                each(torch.tensor(float(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    span = StateSpan(parameter.data, parameter.grad, moments[name].states)
                    reference_span_(span, settings, 1.0)
                    parameter.grad = None
        engine = infinity.engine_of(model)
        for name, parameter in plain.named_parameters():
            assert same_bits(parameter.detach(), engine.read_parameter(name)), name


@pytest.mark.parametrize("model", MODELS)
def test_the_losses_follow_those_of_fp32_moments(model: str) -> None:
    """Twelve steps from the same start, each of two losses. A step of Adam is at most about lr long
    (Kingma and Ba, section 2.1), and codes are off by at most 0.7 % of a block's largest moment: the
    curves part slowly, by much less than what training takes off the loss (measured: 1 % of it)."""
    exact = reference(model, LEARNING_STEPS).losses
    approximate = plain_8bit(model, steps=LEARNING_STEPS).losses
    learnt = float(exact[0] - exact[-1])
    apart = max(abs(float(a - b)) for a, b in zip(exact, approximate, strict=True))
    assert learnt > 0.1 * float(exact[0])
    assert 0 < apart < 0.05 * learnt
