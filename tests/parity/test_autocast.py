"""Copies of weights that autocast keeps: as long as gradients depend on them, and no longer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.offloading import offloaded, swap_config

LAYERS, WIDTH = 4, 16


class Casts(TorchDispatchMode):
    """Counts casts of weights to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and kwargs["dtype"] is torch.bfloat16
        self.count += is_cast and args[0].shape == (WIDTH, WIDTH)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_gradients", [False, True], ids=["without", "with"])
def test_a_second_forward_casts_again_if_and_only_if_there_are_no_gradients(
    swap_directory: Path, has_gradients: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(3, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    with offloaded(model, swap_config(swap_directory)) as model:
        with torch.set_grad_enabled(has_gradients), torch.autocast("cpu", torch.bfloat16):
            first = model(x)
            with Casts() as casts:
                second = model(x)
        assert casts.count == (0 if has_gradients else LAYERS)
        assert torch.equal(first, expected) and torch.equal(second, expected)


class Twice(nn.Module):
    """Two uses of one weight, with a part without gradients between them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(self, x)


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first = model.head(x)
    with torch.no_grad():
        between = model.other(x)
    return (first * model.head(x + between)).sum()


def gradients_of(model: nn.Module, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # The order of uses is known in the second one.
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(model, x)
        loss.backward()
    return [p.grad.clone() for p in model.head.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("call", [nn.Module.__call__, twice], ids=["model", "parts"])
def test_a_part_without_gradients_leaves_the_copies_of_those_around_it(
    swap_directory: Path, call: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model = Twice()
    expected = gradients_of(copy.deepcopy(model), call)
    with offloaded(model, swap_config(swap_directory)) as model:
        actual = gradients_of(model, call)
        assert all(map(torch.equal, actual, expected))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model.head(torch.ones(1, WIDTH))
            with Casts() as casts:
                model.head(torch.ones(1, WIDTH))
        assert casts.count == 1  # After the backward there is nothing to keep.
