"""The native update has the bits of its reference and of torch, however it is split and run."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity.config.machine import SIMD_VARIABLE
from infinity.errors import ConfigError, UnsupportedError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.ops.exact import join, split
from infinity.ops.optimizers import (
    apply_rule,
    has_torch_bits,
    update_,
)
from infinity.ops.rules import AdamWSettings, Settings, SGDSettings
from infinity.ops.span import CUT_NUMEL, StateSpan
from tests.ops.state import (
    RANGES,
    adams,
    adamws,
    arrays,
    assert_same_bits,
    bits,
    clone,
    lions,
    make_span,
    part,
    reference_update_,
    sgds,
)
from tests.support.exhaustive import in_turn

ADAMW = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
numels = st.one_of(st.integers(0, 100), st.sampled_from([255, 256, 1003, 4096]))
seeds = st.integers(0, 1 << 20)
all_settings = st.one_of(adamws, adams, sgds, lions)


@given(
    recipe=all_settings,
    numel=numels,
    seed=seeds,
    values=st.sampled_from(RANGES),
    is_split=st.booleans(),
    gradient_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    grad_scale=st.sampled_from([1.0, 0.3, 1e-30, float("inf")]),
    is_8bit=st.booleans(),
)
@settings(max_examples=400)
def test_every_instruction_set_has_the_bits_of_the_reference(
    simd: str,
    recipe: Settings,
    numel: int,
    seed: int,
    values: str,
    is_split: bool,
    gradient_dtype: torch.dtype,
    grad_scale: float,
    is_8bit: bool,
) -> None:
    native = make_span(
        numel, seed, recipe, values=values, is_split=is_split, gradient_dtype=gradient_dtype,
        is_8bit=is_8bit,
    )  # fmt: skip
    reference = clone(native)
    gradient = native.gradient.clone()
    update_([native], recipe, grad_scale=grad_scale)
    reference_update_([reference], recipe, grad_scale=grad_scale)
    assert_same_bits(native, reference)
    assert torch.equal(bits(native.gradient), bits(gradient)), "the gradient is read only"


def torch_update(span: StateSpan, recipe: Settings) -> None:
    """The same step by torch's fused kernels."""
    if isinstance(recipe, SGDSettings):
        torch._fused_sgd_(
            [span.weight], [span.gradient], list(span.states),
            weight_decay=recipe.weight_decay, momentum=recipe.momentum, lr=recipe.lr,
            dampening=recipe.dampening, nesterov=recipe.nesterov, maximize=False,
            is_first_step=recipe.step == 1,
        )  # fmt: skip
        return
    kernel = torch._fused_adamw_ if isinstance(recipe, AdamWSettings) else torch._fused_adam_
    kernel(
        [span.weight], [span.gradient], [span.states[0]], [span.states[1]], [],
        [torch.tensor(float(recipe.step))], lr=recipe.lr, beta1=recipe.beta1, beta2=recipe.beta2,
        weight_decay=recipe.weight_decay, eps=recipe.eps, amsgrad=False, maximize=False,
        grad_scale=None, found_inf=None,
    )  # fmt: skip


@given(
    recipe=st.one_of(adamws, adams, sgds),
    numel=numels,
    seed=seeds,
    values=st.sampled_from(RANGES),
)
@settings(max_examples=500)
def test_fp32_has_the_bits_of_torchs_fused_kernels(
    simd: str, recipe: Settings, numel: int, seed: int, values: str
) -> None:
    assert has_torch_bits(type(recipe)), (
        "this torch rounds otherwise: step_ falls back to it, this test cannot"
    )
    ours = make_span(numel, seed, recipe, values=values)
    torchs = clone(ours)
    update_([ours], recipe)
    torch_update(torchs, recipe)
    assert_same_bits(ours, torchs)


@pytest.mark.parametrize(("step", "beta2"), in_turn([1, 7, 500], [0.95, 0.999]))
def test_a_million_elements_have_the_bits_of_torchs(simd: str, step: int, beta2: float) -> None:
    """Enough roots to find a division that is rounded wrongly once in a hundred thousand."""
    recipe = AdamWSettings(lr=1e-3, beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.01, step=step)
    ours = make_span(1_000_003, step, recipe, values="wide")
    torchs = clone(ours)
    update_([ours], recipe)
    torch_update(torchs, recipe)
    assert_same_bits(ours, torchs)


@given(
    recipe=all_settings,
    numel=st.integers(0, 2000),
    seed=seeds,
    cuts=st.sets(st.integers(0, 25)),
    is_split=st.booleans(),
    together=st.booleans(),
    is_8bit=st.booleans(),
)
@settings(max_examples=100)
def test_cut_anywhere_it_has_the_same_bits(
    simd: str,
    recipe: Settings,
    numel: int,
    seed: int,
    cuts: set[int],
    is_split: bool,
    together: bool,
    is_8bit: bool,
) -> None:
    """Moments of eight bits are cut between blocks."""
    whole = make_span(numel, seed, recipe, is_split=is_split, is_8bit=is_8bit)
    unit = BLOCK_NUMEL if is_8bit else CUT_NUMEL
    pieces = clone(whole)
    update_([whole], recipe)
    edges = sorted({0, numel, *(cut * unit for cut in cuts if cut * unit < numel)})
    parts = [part(pieces, start, stop) for start, stop in pairwise(edges)]
    for group in [parts] if together else [[each] for each in parts]:
        update_(group, recipe)
    assert_same_bits(whole, pieces)


@given(
    recipe=all_settings,
    numel=numels,
    seed=seeds,
    is_split=st.booleans(),
    gradient_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=100)
def test_new_bytes_beside_the_old_have_the_bits_of_an_update_in_place(
    simd: str, recipe: Settings, numel: int, seed: int, is_split: bool, gradient_dtype: torch.dtype
) -> None:
    old = make_span(numel, seed, recipe, is_split=is_split, gradient_dtype=gradient_dtype)
    wanted = clone(old)
    update_([wanted], recipe)
    for update in (update_, reference_update_):
        span = clone(old)
        into = make_span(numel, seed + 1, recipe, is_split=is_split, gradient_dtype=gradient_dtype)
        update([replace(span, into=into)], recipe)
        assert_same_bits(into, replace(wanted, gradient=into.gradient))
        assert_same_bits(span, old)


@pytest.mark.parametrize("is_8bit", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_threads_and_addresses_change_no_bit(simd: str, is_split: bool, is_8bit: bool) -> None:
    whole = make_span(200_007, 5, ADAMW, is_split=is_split, is_8bit=is_8bit)
    threaded, start = clone(whole), 3 * (BLOCK_NUMEL if is_8bit else 1)
    room = make_span(200_007 + start, 6, ADAMW, is_split=is_split, is_8bit=is_8bit)
    shifted = part(room, start, 200_007 + start)
    for target, source in zip(arrays(shifted), arrays(whole), strict=True):
        target.copy_(source)
    update_([whole], ADAMW, threads=1)
    update_([threaded], ADAMW, threads=5)
    update_([shifted], ADAMW, threads=2)
    assert_same_bits(whole, threaded)
    assert_same_bits(whole, shifted)


@given(seed=seeds, numel=numels, recipe=adamws)
@settings(max_examples=100)
def test_split_update_is_join_update_split(seed: int, numel: int, recipe: AdamWSettings) -> None:
    whole = make_span(numel, seed, recipe, is_split=True)
    assert whole.residual is not None
    fp32 = StateSpan(
        join(whole.weight, whole.residual),
        whole.gradient,
        tuple(state.clone() for state in whole.states),
    )
    update_([whole], recipe)
    update_([fp32], recipe)
    weight, residual = split(fp32.weight)
    assert_same_bits(whole, StateSpan(weight, fp32.gradient, fp32.states, residual))


@given(seed=seeds, numel=numels, factor=st.floats(0, 1, width=32))
@settings(max_examples=100)
def test_grad_scale_has_the_bits_of_a_multiplication_before(
    seed: int, numel: int, factor: float
) -> None:
    scaled = make_span(numel, seed, ADAMW, values="wide")
    before = clone(scaled)
    update_([scaled], ADAMW, grad_scale=torch.tensor(factor))
    before.gradient.mul_(torch.tensor(factor))
    update_([before], ADAMW)
    for ours, theirs in zip(
        [scaled.weight, *scaled.states], [before.weight, *before.states], strict=True
    ):
        assert torch.equal(bits(ours), bits(theirs))


def test_a_nan_stays_one_in_the_split_weight(simd: str) -> None:
    """All ones, which a GPU makes, would round to minus zero."""
    span = make_span(100, 1, ADAMW, is_split=True)
    span.gradient.view(torch.int32).fill_(0x7FFFFFFF)
    update_([span], ADAMW)
    assert span.residual is not None
    assert torch.isnan(span.weight).all()
    assert torch.isnan(join(span.weight, span.residual)).all()


def test_flushed_denormals_of_the_caller_change_nothing(simd: str) -> None:
    recipe = AdamWSettings(lr=0.1, beta1=0.9, beta2=0.5, eps=0.0, weight_decay=0.0, step=1)
    plain = make_span(1000, 3, recipe)
    plain.gradient.mul_(1e-39)
    plain.states[0].zero_()
    plain.states[1].zero_()
    flushed = clone(plain)
    update_([plain], recipe)
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals: the test has nothing to show")
    try:
        update_([flushed], recipe)
    finally:
        torch.set_flush_denormal(False)
    assert plain.states[0].abs().max() > 0
    assert_same_bits(plain, flushed)


def test_calls_from_several_threads_take_turns() -> None:
    spans = [make_span(500_000, seed, ADAMW) for seed in range(4)]
    expected = [clone(span) for span in spans]
    for span in expected:
        for _ in range(5):
            update_([span], ADAMW, threads=1)

    def work(span: StateSpan) -> None:
        for _ in range(5):
            update_([span], ADAMW, threads=3)

    callers = [threading.Thread(target=work, args=(span,)) for span in spans]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for ours, theirs in zip(spans, expected, strict=True):
        assert_same_bits(ours, theirs)


def _update_in_child(expected: Tensor, passed: multiprocessing.SimpleQueue) -> None:
    span = make_span(400_000, 9, ADAMW)
    update_([span], ADAMW, threads=3)
    passed.put(torch.equal(span.weight, expected))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    span = make_span(400_000, 9, ADAMW)
    update_([span], ADAMW, threads=3)
    context = multiprocessing.get_context("fork")
    passed = context.SimpleQueue()
    child = context.Process(target=_update_in_child, args=(span.weight, passed))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert passed.get() is True


def test_a_learning_rate_in_a_tensor_is_the_same_learning_rate() -> None:
    common = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
    plain, in_tensor = make_span(100, 1, ADAMW), make_span(100, 1, ADAMW)
    update_([plain], AdamWSettings(lr=0.25, **common))
    update_([in_tensor], AdamWSettings(lr=torch.tensor(0.25), **common))
    assert_same_bits(plain, in_tensor)


def test_nothing_to_do_is_done() -> None:
    update_([], ADAMW)
    update_([make_span(0, 0, ADAMW)], ADAMW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(8, dtype=torch.float64)}, "expected weight to be torch.float32"),
        ({"gradient": torch.zeros(8, dtype=torch.float16)}, "torch.float32 or torch.bfloat16"),
        ({"gradient": torch.zeros(7)}, "expected gradient to have 8 elements, got 7"),
        ({"states": (torch.zeros(8),)}, "expected states exp_avg, exp_avg_sq, got 1"),
        ({"states": (torch.zeros(8), torch.zeros(16)[::2])}, "exp_avg_sq to be contiguous"),
        ({"residual": torch.zeros(8, dtype=torch.int16)}, "expected weight to be torch.bfloat16"),
        ({"weight": torch.zeros(8, device="meta")}, "host memory"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    fields = {
        "weight": torch.zeros(8),
        "gradient": torch.zeros(8),
        "states": (torch.zeros(8), torch.zeros(8)),
        "residual": None,
    }
    with pytest.raises(ConfigError, match=message):
        update_([StateSpan(**(fields | change))], ADAMW)


def test_spans_of_two_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="one format"):
        update_([make_span(8, 1, ADAMW), make_span(8, 1, ADAMW, is_split=True)], ADAMW)


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMD_VARIABLE, "altivec")
    with pytest.raises(UnsupportedError, match="INFINITY_SIMD.*scalar.*'altivec'"):
        update_([make_span(8, 1, ADAMW)], ADAMW)


def test_a_wrong_number_of_coefficients_is_refused() -> None:
    span = make_span(8, 1, ADAMW)
    with pytest.raises(ValueError, match="adam takes 8 coefficients, got 1"):
        apply_rule("adam", [span], [1.0], grad_scale=1.0, threads=1)
