"""Random spans of every format and range of values, and comparisons of their bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from infinity.ops.dynamic_8bit import BLOCK_NUMEL, State8Bit, encode_, num_scales
from infinity.ops.exact import split
from infinity.ops.optimizers import reference_span_
from infinity.ops.rules import AdamSettings, AdamWSettings, LionSettings, Settings, SGDSettings
from infinity.ops.span import StateSpan, check_spans

RANGES = ("ordinary", "wide", "any bits")


def random_fp32(numel: int, source: torch.Generator, values: str) -> Tensor:
    """`wide` spans the exponents, denormals included; `any bits` has infinities and NaNs too."""
    if values == "any bits":
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=source)
        return bits.to(torch.int32).view(torch.float32)
    numbers = torch.randn(numel, generator=source)
    if values == "wide":
        numbers *= 10.0 ** torch.randint(-44, 10, (numel,), generator=source)
        numbers[torch.rand(numel, generator=source) < 0.05] = 0.0
        numbers[torch.rand(numel, generator=source) < 0.05] *= -0.0
    return numbers


def reference_update_(
    spans: Sequence[StateSpan], settings: Settings, *, grad_scale: float = 1.0
) -> None:
    """`update_` by the readable reference."""
    check_spans(spans, settings.state_names)
    for span in spans:
        reference_span_(span, settings, grad_scale)


def make_span(
    numel: int,
    seed: int,
    settings: Settings,
    *,
    values: str = "ordinary",
    is_split: bool = False,
    gradient_dtype: torch.dtype = torch.float32,
    is_8bit: bool = False,
) -> StateSpan:
    source = torch.Generator().manual_seed(seed)
    weight, gradient = (random_fp32(numel, source, values) for _ in range(2))
    states: tuple = tuple(random_fp32(numel, source, values) for _ in settings.state_names)
    if len(states) == 2 and values != "any bits":
        states[1].abs_()
    residual = None
    if is_split:
        weight, residual = split(weight)
    if is_8bit:
        states = tuple(map(to_8bit, states, settings.state_names))
    return StateSpan(weight, gradient.to(gradient_dtype), states, residual)


def to_8bit(numbers: Tensor, name: str) -> State8Bit:
    count = numbers.numel()
    state = State8Bit(torch.zeros(count, dtype=torch.uint8), torch.zeros(num_scales(count)))
    encode_(state, numbers, name)
    return state


def arrays(span: StateSpan) -> list[Tensor]:
    each = [span.weight, span.gradient]
    for state in span.states:
        each += [state.codes, state.scales] if isinstance(state, State8Bit) else [state]
    return each if span.residual is None else [*each, span.residual]


def clone(span: StateSpan) -> StateSpan:
    return part(span, 0, span.weight.numel(), copy=True)


def part(span: StateSpan, start: int, stop: int, *, copy: bool = False) -> StateSpan:
    def cut(array: Tensor) -> Tensor:
        return array[start:stop].clone() if copy else array[start:stop]

    def cut_state(state: Tensor | State8Bit) -> Tensor | State8Bit:
        if not isinstance(state, State8Bit):
            return cut(state)
        scales = state.scales[start // BLOCK_NUMEL : num_scales(stop)]
        return State8Bit(cut(state.codes), scales.clone() if copy else scales)

    residual = None if span.residual is None else cut(span.residual)
    states = tuple(cut_state(each) for each in span.states)
    return StateSpan(cut(span.weight), cut(span.gradient), states, residual)


def bits(array: Tensor) -> Tensor:
    """As integers. Which of the NaNs it is depends on the order of operands: one stands for all."""
    if not array.is_floating_point():
        return array
    canonical = torch.where(torch.isnan(array), torch.full_like(array, float("nan")), array)
    return canonical.view(torch.int32 if array.dtype is torch.float32 else torch.int16)


def assert_same_bits(ours: StateSpan, theirs: StateSpan) -> None:
    for name, a, b in zip(
        ("weight", "gradient", *(f"state or residual {i}" for i in range(5))),
        arrays(ours),
        arrays(theirs),
        strict=False,
    ):
        differs = (bits(a) != bits(b)).nonzero().flatten().tolist()
        assert not differs, f"{name} of {a.numel()} differs at {differs[:8]}"


_rates = st.sampled_from([0.0, 1e-5, 3.7e-4, 0.1, 0.7])
_decays = st.sampled_from([0.0, 0.01, 0.1, 0.3])
_steps = st.sampled_from([1, 2, 3, 10, 1000, 123_456])
_betas = st.sampled_from([0.0, 0.123, 0.3, 0.5, 0.9, 0.99])
_betas2 = st.sampled_from([0.0, 0.5, 0.95, 0.999, 0.9999999])
_eps = st.sampled_from([0.0, 1e-8, 1e-5])

adamws = st.builds(
    AdamWSettings, lr=_rates, beta1=_betas, beta2=_betas2, eps=_eps, weight_decay=_decays,
    step=_steps,
)  # fmt: skip
adams = st.builds(
    AdamSettings, lr=_rates, beta1=_betas, beta2=_betas2, eps=_eps, weight_decay=_decays,
    step=_steps,
)  # fmt: skip
sgds = st.builds(
    SGDSettings, lr=_rates, momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.1]), weight_decay=_decays, nesterov=st.booleans(),
    step=_steps,
)  # fmt: skip
lions = st.builds(
    LionSettings, lr=_rates, beta1=_betas, beta2=_betas, weight_decay=_decays, step=_steps
)
