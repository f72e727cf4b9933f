"""The learning-rate schedule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.training.learning_rate import lr_ratio


def curve(steps: int, **options) -> list[float]:
    options = {"schedule": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0} | options
    return [lr_ratio(step, steps=steps, **options) for step in range(steps)]


def test_warmup_starts_above_zero_and_ends_at_the_peak():
    assert curve(5, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_the_floor_with_the_last_step():
    assert curve(4, warmup_steps=1) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert curve(3, min_lr_ratio=0.5) == pytest.approx([1, 0.75, 0.5])


def test_cosine_is_half_way_down_in_the_middle():
    assert curve(5, schedule="cosine")[2] == pytest.approx(0.5)


def test_constant_stays_at_the_peak():
    assert curve(4, schedule="constant", min_lr_ratio=0.1) == [1.0] * 4


def test_steps_after_the_end_keep_the_floor():
    """A caller that asks one step further, as LambdaLR does, gets no negative rate."""
    options = {"steps": 4, "schedule": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0}
    assert lr_ratio(9, **options) == 0.0


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    floor=st.floats(0, 1),
)
def test_ratio_rises_through_the_warmup_and_never_after(steps, warmup, schedule, floor):
    warmup_steps = int(steps * warmup)
    ratios = curve(steps, warmup_steps=warmup_steps, schedule=schedule, min_lr_ratio=floor)

    assert all(0 <= ratio <= 1 for ratio in ratios)
    rising, falling = ratios[:warmup_steps], ratios[max(warmup_steps - 1, 0) :]
    assert all(a <= b for a, b in itertools.pairwise(rising))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    assert min(falling) >= floor - 1e-12 or warmup_steps == steps
