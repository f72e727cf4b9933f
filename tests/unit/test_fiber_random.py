"""The generators of the micro-batches of a step, on a device with a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.modules.accumulate.fiber import Random
from infinity.modules.accumulate.proof import Proof
from infinity.modules.accumulate.reachable import Reachable, is_alike


class _Device:
    """A device whose generator `torch.manual_seed` seeds, as that of CUDA."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self.generator.set_state(state)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    device, seed_host = _Device(), torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        device.generator.manual_seed(seed)
        return seed_host(seed)

    monkeypatch.setattr(torch, "manual_seed", manual_seed)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    return device


def _step(generators: Random, count: int, draw: Callable[[int], Any]) -> list[Any]:
    """What the micro-batches of a step draw. Each keeps its state, as in `LayerMajorSchedule`."""
    fresh, drawn, pairs = generators.fresh(count), [], []
    for number, state in enumerate(fresh):
        generators.set(state)
        drawn.append(draw(number))
        pairs.append((generators.state(), state))
    generators.end(pairs)
    return drawn


def test_dropout_of_a_device_differs_from_step_to_step(device: _Device) -> None:
    """It draws from the device's generator alone: the host's, which orders the data, stays."""
    torch.manual_seed(3)
    host = torch.get_rng_state()
    generators = Random(torch.device("cuda", 0))

    def draw(number: int) -> int:
        return int(torch.randint(2**62, (), generator=device.generator))

    drawn = [number for _ in range(3) for number in _step(generators, 4, draw)]
    assert len(set(drawn)) == 12
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(3)
    assert [number for _ in range(3) for number in _step(generators, 4, draw)] == drawn


def test_states_of_both_generators_continue_a_run(device: _Device) -> None:
    torch.manual_seed(3)
    generators = Random(torch.device("cuda", 0))

    def draw(number: int) -> int:
        return int(torch.randint(2**62, (), generator=device.generator))

    _step(generators, 3, draw)
    saved = generators.state()
    expected = _step(generators, 3, draw)
    torch.manual_seed(9)
    generators.set(saved)
    assert _step(generators, 3, draw) == expected


def test_a_later_micro_batch_alone_may_draw(device: _Device) -> None:
    torch.manual_seed(3)
    generators = Random(torch.device("cuda", 0))

    def draw(number: int) -> int:
        return number and int(torch.randint(2**62, (), generator=device.generator))

    assert _step(generators, 2, draw) != _step(generators, 2, draw)


def test_a_host_alone_draws_as_before() -> None:
    """Of each micro-batch after the first the seed is the next number of the host's generator."""
    torch.manual_seed(3)
    drawn = _step(Random(torch.device("cpu")), 3, lambda number: float(torch.rand(())))
    torch.manual_seed(3)
    seeds = [int(torch.randint(2**62, ())) for _ in range(2)]
    expected = []
    for seed in (3, *seeds):
        torch.manual_seed(seed)
        expected.append(float(torch.rand(())))
    assert drawn == expected


@given(st.lists(st.sampled_from(["normal", "uniform", "seed", "back", "kept"])))
def test_the_state_of_python_says_what_was_drawn_and_is_put_back_whole(steps: list[str]) -> None:
    """A normal number is drawn with a second one; the state differs where Python's own does."""
    generators = Random(torch.device("cpu"))
    drawn: dict[str, Callable[[], Any]] = {
        "normal": partial(random.gauss, 0, 1),
        "uniform": random.random,
    }
    drawn["seed"] = partial(random.seed, 3)
    kept = generators.state()[0], random.getstate()
    for step in steps:
        if step == "back":
            generators.set([kept[0], *generators.state()[1:]])
            assert random.getstate() == kept[1]
        elif step == "kept":
            kept = generators.state()[0], random.getstate()
        else:
            drawn[step]()
        assert is_alike(generators.state()[0], kept[0]) is (random.getstate() == kept[1])


@pytest.mark.parametrize("is_other", [False, True])
def test_the_words_of_python_are_copied_where_they_are_known(
    is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(random.Random):
        pass

    own = Other(3) if is_other else random.Random(3)
    monkeypatch.setattr(random, "getstate", own.getstate)
    monkeypatch.setattr(random, "setstate", own.setstate)
    generators = Random(torch.device("cpu"))
    state = generators.state()
    assert isinstance(state[0][0], bytes) is not is_other
    drawn = own.gauss(0, 1)
    generators.set(state)
    assert own.gauss(0, 1) == drawn


@given(st.lists(st.sampled_from(["normal", "uniform", "back", "seed", "kept", "other"])))
def test_the_state_of_numpy_is_what_numpy_says_after_any_draws(steps: list[str]) -> None:
    """A normal number is drawn with a second one, which is kept beside the generator's words."""
    generators, kept = Random(torch.device("cpu")), numpy.random.get_state()
    for step in steps:
        if step == "normal":
            numpy.random.normal()
        elif step == "uniform":
            numpy.random.random()
        elif step == "seed":
            numpy.random.seed(3)
        elif step == "kept":
            generators.set([*generators.state()[:1], kept, *generators.state()[2:]])
            assert is_alike(numpy.random.get_state(), kept)
        elif step == "back":
            numpy.random.set_state(kept)
            assert is_alike(generators.fresh(1)[0][1], kept)
        elif step == "other":
            kept = generators.state()[1]
        assert is_alike(generators.state()[1], numpy.random.get_state())


@pytest.mark.parametrize("held", [lambda t: t, lambda t: {"a": t}, lambda t: [3, (t,)]])
def test_no_look_compares_the_values_of_tensors_on_a_device(held: Callable[[Any], Any]) -> None:
    """It would wait for the device. A meta tensor stands for one there: it has no values."""
    block = _Block()
    there, other = (torch.ones((), device="meta") for _ in range(2))
    assert is_alike(held(there), held(there))
    block.seen = held(there)
    changed = Reachable([("block", block)], Proof()).watch()
    assert not changed()
    for new in (other, torch.ones(())):
        assert not is_alike(held(new), held(there))
        block.seen = held(new)
        assert "block.seen" in [cell.what() for cell in changed()]


class _Block(torch.nn.Module):
    seen: Any = None


def test_a_program_may_give_numpy_another_generator() -> None:
    before = vars(numpy.random)["get_bit_generator"]()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        generators = Random(torch.device("cpu"))
        first, drawn = generators.fresh(2)[0], numpy.random.random()
        generators.set(first)
        assert drawn == numpy.random.random()
    finally:
        numpy.random.set_bit_generator(before)
