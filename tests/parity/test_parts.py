"""Loops that call parts of a model, and never the model: predicted as others are, same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.streaming.passes import Beginnings
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, finish

WIDTH = 128


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Pair(nn.ModuleDict):
    """No forward of its own."""

    def __init__(self) -> None:
        super().__init__({"query": Encoder(), "text": Encoder(), "head": nn.Linear(WIDTH, 4)})


def pair() -> nn.Module:
    torch.manual_seed(0)
    return Pair()


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1, 24).view(3, 8) + step / 7


def two_encoders(model: Any, step: int) -> None:
    (model["query"](batch(step)) * model["text"](-batch(step))).sum().backward()


def one_encoder_twice(model: Any, step: int) -> None:
    scores = model["text"](batch(step)) @ model["text"](-batch(step)).t()
    model["head"](model["query"](batch(step))).sum().backward(retain_graph=False)
    scores.logsumexp(-1).sum().backward()


def several_micro_batches(model: Any, step: int) -> None:
    for micro in range(3):
        model["head"](model["text"](batch(step + micro))).pow(2).mean().backward()


def looked_at_without_gradients(model: Any, step: int) -> None:
    """As a teacher, or a cache of representations, between two parts of the forward."""
    found = model["query"](batch(step))
    with torch.no_grad():
        other = model["text"](batch(step))
    model["head"](found * other).sum().backward()


def evaluated(model: Any, step: int) -> None:
    with torch.no_grad():
        for index in range(2):
            model["head"](model["query"](batch(step + index)))


LOOPS = [
    two_encoders,
    one_encoder_twice,
    several_micro_batches,
    looked_at_without_gradients,
    evaluated,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_parts_are_fetched_as_predicted(loop: Callable[..., None], swap_directory: Path) -> None:
    """From the second step on no fetch is unforeseen."""

    def scenario(side: Side, unplanned: list[float]) -> Named:
        optimizer = side.adamw()
        for step in range(5):
            loop(side.model, step)
            optimizer.step()
            optimizer.zero_grad()
            if not side.is_plain:
                counters = infinity.engine_of(side.model).counters.snapshot()
                unplanned.append(counters["fetches_unplanned"])
        return finish(side, {})

    expected = scenario(Side(pair(), is_plain=True), [])
    unplanned: list[float] = []
    with offloaded(pair(), swap_config(swap_directory)) as model:
        came = scenario(Side(model), unplanned)
    assert not differences(expected, came)
    assert unplanned[0] > 0 and len(set(unplanned[1:])) == 1, unplanned


def test_a_call_of_the_model_continues_the_pass_of_its_parts(swap_directory: Path) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Linear(8, WIDTH), Encoder(), nn.Linear(WIDTH, 4)
            self.body.stem = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    torch.manual_seed(0)
    with offloaded(Split(), swap_config(swap_directory)) as model:
        engine = infinity.engine_of(model)
        unplanned = []
        for step in range(4):
            model.head(model(model.embed(batch(step)))).sum().backward()
            model.zero_grad()
            unplanned.append(engine.counters.snapshot()["fetches_unplanned"])
    assert unplanned[0] > 0 and unplanned[1] == unplanned[3]


# --- the decision alone -----------------------------------------------------------------------


def begun(words: str) -> str:
    """The uses of a sequence that begin a pass: hooked modules in training (a-z) or without
    gradients (A-Z), "M" and "E" calls of the model, "|" the end of a backward or a step."""
    beginnings, found = Beginnings(), ""
    for word in words.split():
        if word == "|":
            beginnings.end_backward()
            begins = False
        elif word in "ME":
            begins = beginnings.ask_model("train" if word == "M" else "eval")
        else:
            begins = beginnings.ask_hooked("train" if word.islower() else "eval", word.lower())
        found += " *" if begins else " ."
    return found.strip()


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("M | M | | M M", "* . * . . * *"),
        ("a b | | a b | |", "* . . . * . . ."),
        ("a b a b | a b a b |", "* . . . . * . . . ."),
        ("a M b | a M b |", "* . . . * . . ."),
        ("M b | M b |", "* . . * . ."),
        ("M | a M | a M", "* . * . . * ."),
        ("a B c | a B c |", "* * . . * * . ."),
        ("A B A B", "* . * ."),
        ("E H E H", "* * . *"),
        ("a | b a | a", "* . . . . *"),
    ],
)
def test_where_a_pass_begins(words: str, begins: str) -> None:
    assert begun(words) == begins


def test_a_first_part_that_never_comes_again_is_not_waited_for() -> None:
    assert "*" in begun("a | " + "b | " * 20)[2:]


def test_what_a_failed_backward_holds_is_released_when_a_part_is_called_again(
    swap_directory: Path,
) -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError

    with offloaded(pair(), swap_config(swap_directory)) as model:
        hook = model["text"].blocks[2].weight.register_hook(fail)
        with pytest.raises(ValueError):
            model["text"](batch(0)).sum().backward()
        hook.remove()
        in_use = infinity.engine_of(model).weight_cache.in_use
        assert in_use(), "or nothing is tested"
        model["text"](batch(1))
        assert not in_use()
