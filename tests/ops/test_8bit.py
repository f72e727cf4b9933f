"""Eight-bit states: the map, its rounding, and native kernels that have the reference's bits."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.ops.dynamic_8bit import (
    BLOCK_NUMEL,
    SMALLEST_SCALE,
    DynamicMap,
    State8Bit,
    decode,
    dynamic_map,
    encode_,
    num_scales,
)
from infinity.ops.exact import join, split
from infinity.ops.optimizers import step_, update_
from infinity.ops.rules import AdamWSettings, LionSettings, SGDSettings
from infinity.ops.span import StateSpan
from tests.ops.state import (
    adamws,
    assert_same_bits,
    bits,
    clone,
    make_span,
    random_fp32,
    reference_update_,
    to_8bit,
)

ADAMW = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
SIGNED, SQUARES = dynamic_map(True), dynamic_map(False)
seeds = st.integers(0, 1 << 20)
both_maps = pytest.mark.parametrize("used", [SIGNED, SQUARES], ids=["signed", "squares"])

# A step that leaves its one state as it is: codes are decoded and encoded, nothing else.
KEEPS_MOMENTUM = SGDSettings(
    lr=0.0, momentum=1.0, dampening=1.0, weight_decay=0.0, nesterov=False, step=2
)
# One that makes the state the gradient.
TAKES_GRADIENT = LionSettings(lr=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, step=2)


def name_of(used: DynamicMap) -> str:
    return "exp_avg" if used.is_signed else "exp_avg_sq"


# -- The map -------------------------------------------------------------------------------------


def exact_values(used: DynamicMap) -> list[Fraction]:
    """From the definition: the middles of equal parts of each decade, a zero and a one."""
    values = {Fraction(0), Fraction(1)}
    for decade in range(7):
        count = 2 ** (decade if used.is_signed else decade + 1)
        for index in range(count):
            middle = Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * index + 1, 2 * count)
            values.add(middle * Fraction(10) ** (decade - 6))
    if used.is_signed:
        values |= {-value for value in values if value < 1}
    return sorted(values)


@both_maps
def test_the_map_is_the_documented_one(used: DynamicMap) -> None:
    exact = exact_values(used)
    assert len(exact) == 256
    for code, (value, true) in enumerate(zip(used.values.tolist(), exact, strict=True)):
        assert abs(Fraction(value) - true) <= abs(true) * Fraction(1, 2**23), code
    assert used.values[used.zero_code] == 0


@both_maps
@given(number=st.floats(-1, 1, width=32))
@settings(max_examples=400)
def test_a_number_gets_the_nearest_code(used: DynamicMap, number: float) -> None:
    number = number if used.is_signed else abs(number)
    distances = (used.values.double() - number).abs()
    found = used.encode(torch.tensor([number])).long()
    # At the middle between two values it may be either: the function is linear in fp32.
    slack = 1e-6 * abs(number)
    if not used.is_signed and SMALLEST_SCALE <= number < 3e-7:
        assert found == 1, "a square is never rounded to zero: its root divides"
    else:
        assert distances[found] <= distances.min() + slack


@both_maps
def test_encoding_is_monotone_over_every_magnitude(used: DynamicMap) -> None:
    """Every seventeenth fp32 pattern up to 1: each binade, each threshold, denormals."""
    magnitudes = torch.arange(0, 0x3F800001, 9973, dtype=torch.int32).view(torch.float32)
    codes = used.encode(magnitudes).int()
    assert (codes.diff() >= 0).all()
    assert codes[0] == used.zero_code
    assert used.encode(torch.ones(1)).item() == 255


# -- Codes and scales ----------------------------------------------------------------------------


@both_maps
def test_every_code_comes_back(used: DynamicMap) -> None:
    """For scales over all exponents. The largest of a block must be there for the scale to stay."""
    name = name_of(used)
    for exponent in range(-126, 128):
        scale = math.ldexp(1.37, exponent)
        codes = torch.arange(256).roll(1).to(torch.uint8)
        state = State8Bit(codes.clone(), torch.tensor([scale]))
        encode_(state, decode(state, name), name)
        assert torch.equal(state.codes, codes), exponent


def test_every_code_comes_back_through_the_native_kernel(simd: str) -> None:
    for exponent in range(-126, 128):
        codes = torch.arange(256).roll(1).to(torch.uint8)
        state = State8Bit(codes.clone(), torch.tensor([math.ldexp(1.37, exponent)]))
        span = StateSpan(torch.zeros(256), torch.zeros(256), (state,))
        update_([span], KEEPS_MOMENTUM)
        assert torch.equal(state.codes, codes), exponent


def test_values_and_codes_of_the_native_kernel_are_the_references(simd: str) -> None:
    """Every binade below 1 with its edges, in one block each, against the reference."""
    numbers = []
    for exponent in range(-149, 0):
        edges = [math.ldexp(1 + index / 128, exponent) for index in range(128)]
        numbers += [1.0, *edges[:127], -1.0, *(-edge for edge in edges[1:])]
    gradient = torch.tensor(numbers)
    assert gradient.numel() % BLOCK_NUMEL == 0
    native = StateSpan(torch.zeros_like(gradient), gradient, (to_8bit(gradient * 0, "exp_avg"),))
    update_([native], TAKES_GRADIENT)
    assert_state(native.states[0], to_8bit(gradient, "exp_avg"))
    # Squares: with beta2 = 0 and step 1 the second moment is gradient * gradient.
    recipe = AdamWSettings(lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1)
    span = make_span(gradient.numel(), 1, recipe, is_8bit=True)
    span.gradient.copy_(gradient)
    update_([span], recipe)
    assert_state(span.states[1], to_8bit(gradient * gradient, "exp_avg_sq"))


def assert_state(ours: object, theirs: State8Bit) -> None:
    assert isinstance(ours, State8Bit)
    assert ours.codes.tolist() == theirs.codes.tolist()
    assert torch.equal(bits(ours.scales), bits(theirs.scales))


@both_maps
@given(numel=st.integers(1, 600), seed=seeds)
@settings(max_examples=100)
def test_the_error_is_at_most_half_a_step_of_the_map(
    used: DynamicMap, numel: int, seed: int
) -> None:
    """In the largest decade values are 0.9 / 64 apart (squares 0.9 / 128), between it and the one
    below, and at -1, somewhat more."""
    numbers = random_fp32(numel, torch.Generator().manual_seed(seed), "ordinary")
    numbers = numbers if used.is_signed else numbers.square()
    state = to_8bit(numbers, name_of(used))
    error = (decode(state, name_of(used)) - numbers).abs()
    bound = state.scales.repeat_interleave(BLOCK_NUMEL)[:numel] * (
        0.0072 if used.is_signed else 0.0036
    )
    assert (error <= bound).all()


@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
def test_a_value_that_is_not_finite_makes_only_its_block_nan(simd: str, bad: str) -> None:
    numbers = random_fp32(3 * BLOCK_NUMEL + 40, torch.Generator().manual_seed(1), "ordinary")
    numbers[BLOCK_NUMEL + 17] = float(bad)
    span = StateSpan(torch.zeros_like(numbers), numbers, (to_8bit(numbers * 0, "exp_avg"),))
    span.states[0].zero_("exp_avg")
    update_([span], TAKES_GRADIENT)
    assert_state(span.states[0], to_8bit(numbers, "exp_avg"))
    is_nan = torch.isnan(decode(span.states[0], "exp_avg"))
    assert is_nan[BLOCK_NUMEL : 2 * BLOCK_NUMEL].all()
    assert not is_nan[:BLOCK_NUMEL].any() and not is_nan[2 * BLOCK_NUMEL :].any()


def test_zeros_and_what_is_below_a_normal_number_are_zero(simd: str) -> None:
    for largest in (0.0, 1e-45, SMALLEST_SCALE * 0.99):
        numbers = torch.full((300,), largest)
        numbers[::2] *= -1
        span = StateSpan(torch.zeros(300), numbers, (to_8bit(torch.ones(300), "exp_avg"),))
        update_([span], TAKES_GRADIENT)
        state = span.states[0]
        assert isinstance(state, State8Bit)
        assert (state.codes == SIGNED.zero_code).all()
        assert (state.scales == 0).all()
        assert (bits(decode(state, "exp_avg")) == 0).all(), "plus zero"


# -- Updates -------------------------------------------------------------------------------------


@given(numel=st.integers(1, 600), seed=seeds, recipe=adamws, is_split=st.booleans())
@settings(max_examples=100)
def test_the_update_is_decode_fp32_update_encode(
    numel: int, seed: int, recipe: AdamWSettings, is_split: bool
) -> None:
    span = make_span(numel, seed, recipe, is_8bit=True, is_split=is_split)
    wide = tuple(map(decode, span.states, recipe.state_names))
    weight = span.weight.clone() if span.residual is None else join(span.weight, span.residual)
    fp32 = StateSpan(weight, span.gradient, wide)
    update_([span], recipe)
    update_([fp32], recipe)
    residual = None
    if span.residual is not None:
        weight, residual = split(weight)
    states = tuple(map(to_8bit, wide, recipe.state_names))
    assert_same_bits(span, StateSpan(weight, span.gradient, states, residual))


def test_codes_may_start_anywhere_in_memory(simd: str) -> None:
    whole = make_span(1000, 5, ADAMW, is_8bit=True)
    codes = [torch.empty(1003, dtype=torch.uint8)[3:] for _ in whole.states]
    shifted = clone(whole)
    shifted = StateSpan(
        shifted.weight,
        shifted.gradient,
        tuple(
            State8Bit(place.copy_(state.codes), state.scales)
            for place, state in zip(codes, shifted.states, strict=True)
        ),
    )
    update_([whole], ADAMW)
    update_([shifted], ADAMW)
    assert_same_bits(whole, shifted)


def test_step_takes_the_native_update_whatever_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.ops.optimizers.has_torch_bits", lambda kind: False)
    span = make_span(300, 1, ADAMW, is_8bit=True)
    reference = clone(span)
    step_([span], ADAMW)
    reference_update_([reference], ADAMW)
    assert_same_bits(span, reference)


def test_many_steps_stay_close_to_fp32_moments() -> None:
    """A quadratic bowl, 300 steps of AdamW: both come down to where the noise lets them."""
    source = torch.Generator().manual_seed(0)
    start = torch.randn(1024, generator=source)
    losses = {}
    for is_8bit in (False, True):
        weight = start.clone()
        zeros = tuple(torch.zeros(1024) for _ in range(2))
        states = tuple(map(to_8bit, zeros, ADAMW.state_names)) if is_8bit else zeros
        noise = torch.Generator().manual_seed(1)
        for step in range(1, 301):
            gradient = weight + 0.1 * torch.randn(1024, generator=noise)
            recipe = AdamWSettings(
                lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=step
            )
            update_([StateSpan(weight, gradient, states)], recipe)
        losses[is_8bit] = weight.square().mean().item()
    assert losses[False] < 0.05
    assert abs(losses[True] - losses[False]) < 0.01


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (lambda s: (s[0], torch.zeros(300)), "exp_avg_sq to be in 8 bits"),
        (lambda s: (State8Bit(s[0].codes.int(), s[0].scales), s[1]), "codes of exp_avg to be torch.uint8"),
        (lambda s: (State8Bit(s[0].codes, s[0].scales[:1]), s[1]), "scales of exp_avg to have 2"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(states: object, message: str) -> None:
    span = make_span(300, 1, ADAMW, is_8bit=True)
    with pytest.raises(ConfigError, match=message):
        update_([StateSpan(span.weight, span.gradient, states(span.states))], ADAMW)


def test_fp32_and_8_bits_in_one_call_are_refused() -> None:
    with pytest.raises(ConfigError, match="one format"):
        update_([make_span(8, 1, ADAMW), make_span(8, 1, ADAMW, is_8bit=True)], ADAMW)


def test_the_last_block_may_be_short() -> None:
    assert [num_scales(numel) for numel in (0, 1, 256, 257)] == [0, 1, 1, 2]
