"""The update in chunks has the bits of the update in one, and those of
torch.optim.AdamW(fused=True)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity.ops.adamw import AdamWSettings, adamw_

CUT = 16  # Elements: where a tensor may be cut.


@dataclass
class State:
    weights: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def clone(self) -> State:
        return State(*(tensor.clone() for tensor in vars(self).values()))

    def part(self, start: int, stop: int) -> State:
        return State(*(tensor[start:stop] for tensor in vars(self).values()))


def make_state(numel: int, seed: int, *, odd_values: bool = False) -> State:
    source = torch.Generator().manual_seed(seed)
    weights, gradients, exp_avg = (torch.randn(numel, generator=source) for _ in range(3))
    gradients *= 10.0 ** torch.randint(-8, 3, (numel,), generator=source)
    exp_avg_sq = torch.rand(numel, generator=source) * gradients.square()
    if odd_values and numel:
        odd = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, 3e38, -3e38])
        places = torch.randint(0, numel, (7,), generator=source)
        gradients[places] = odd
    return State(weights, gradients, exp_avg, exp_avg_sq)


def bits(state: State) -> list[Tensor]:
    return [tensor.view(torch.int32) for tensor in vars(state).values()]


def same_bits(a: State, b: State) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def update(states: list[State], settings: AdamWSettings) -> None:
    adamw_(
        [s.weights for s in states], [s.gradients for s in states], [s.exp_avg for s in states],
        [s.exp_avg_sq for s in states], settings,
    )  # fmt: skip


recipes = st.builds(
    AdamWSettings,
    lr=st.sampled_from([0.0, 1e-5, 1e-3, 0.1]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    eps=st.sampled_from([0.0, 1e-8, 1e-6]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.1]),
    step=st.sampled_from([1, 2, 3, 1000, 123_456]),
)


@given(
    numel=st.integers(0, 400),
    seed=st.integers(0, 1 << 16),
    recipe=recipes,
    cuts=st.sets(st.integers(0, 25)),
    collective_section=st.booleans(),
    odd_values=st.booleans(),
)
@settings(max_examples=200)
def test_cut_anywhere_at_multiples_of_16_it_has_the_same_bits(
    numel: int,
    seed: int,
    recipe: AdamWSettings,
    cuts: set[int],
    collective_section: bool,
    odd_values: bool,
) -> None:
    whole = make_state(numel, seed, odd_values=odd_values)
    kinds = whole.clone()
    gradients = whole.gradients.clone()
    update([whole], recipe)
    edges = sorted({0, numel, *(cut * CUT for cut in cuts if cut * CUT < numel)})
    parts = [kinds.part(a, b) for a, b in pairwise(edges)]
    if collective_section and parts:
        update(parts, recipe)
    else:
        for part in parts:
            update([part], recipe)
    assert same_bits(whole, kinds)
    assert torch.equal(gradients.view(torch.int32), kinds.gradients.view(torch.int32)), "read only"


@given(seed=st.integers(0, 1 << 16), recipe=recipes, numel=st.integers(1, 300))
@settings(max_examples=60)
def test_several_steps_are_those_of_torchs_fused_adamw(
    seed: int, recipe: AdamWSettings, numel: int
) -> None:
    state = make_state(numel, seed)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    parameter = torch.nn.Parameter(state.weights.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps,
        weight_decay=recipe.weight_decay, fused=True,
    )  # fmt: skip
    for step in range(1, 6):
        gradient = make_state(numel, seed + step).gradients
        parameter.grad = gradient.clone()
        optimizer.step()
        state.gradients = gradient
        update([state], AdamWSettings(**{**_fields(recipe), "step": step}))
        assert torch.equal(parameter.detach().view(torch.int32), state.weights.view(torch.int32))
    kept = optimizer.state[parameter]
    assert torch.equal(kept["exp_avg"].view(torch.int32), state.exp_avg.view(torch.int32))
    assert torch.equal(kept["exp_avg_sq"].view(torch.int32), state.exp_avg_sq.view(torch.int32))


def _fields(recipe: AdamWSettings) -> dict[str, float]:
    return {name: getattr(recipe, name) for name in AdamWSettings.__slots__}


@pytest.mark.parametrize("offset", [0, 16, 48])
def test_threads_and_address_do_not_change_a_bit(offset: int) -> None:
    """Large enough to be split among threads, at addresses that are 64-byte aligned or not."""
    recipe = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
    whole = make_state(300_000 + offset, 5).part(offset, 300_000 + offset - 7)
    threaded, unaligned = whole.clone(), make_state(0, 0)
    room = [torch.empty(whole.weights.numel() + 3) for _ in range(4)]
    unaligned = State(*(each[3:] for each in room))
    for target, source in zip(vars(unaligned).values(), vars(whole).values(), strict=True):
        target.copy_(source)
    update([whole], recipe)
    update([unaligned], recipe)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        update([threaded], recipe)
    finally:
        torch.set_num_threads(threads)
    assert same_bits(whole, threaded)
    assert same_bits(whole, unaligned)


def test_a_learning_rate_in_a_tensor_is_the_same_learning_rate() -> None:
    plain, in_tensor = make_state(100, 1), make_state(100, 1)
    common = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
    update([plain], AdamWSettings(lr=0.25, **common))
    update([in_tensor], AdamWSettings(lr=torch.tensor(0.25), **common))
    assert same_bits(plain, in_tensor)
