"""Parameters of unusual kinds, and what a program does with them, between PyTorch and the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Plan, Side
from .test_library import compare, finish

PLAN = Plan(lr=1e-2, weight_decay=0.1)


# -- requires_grad between forward and backward ----------------------------------------------------


class FreezesItself(nn.Module):
    """Changes requires_grad of its own weight inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.inner(x)
        self.inner.weight.requires_grad_(self.calls != 2)
        return y


def with_blocks() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), FreezesItself())
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([block])[0], nn.Linear(4, 4))


def set_attribute(model: nn.Module, is_trainable: bool) -> None:
    model[1][0].bias.requires_grad = is_trainable


@pytest.mark.parametrize(
    "set_trainable",
    [
        lambda model, is_trainable: model.requires_grad_(is_trainable),
        lambda model, is_trainable: model[1].requires_grad_(is_trainable),
        set_attribute,
        lambda model, is_trainable: None,
    ],
    ids=["model", "block", "attribute", "in the forward"],
)
def test_a_parameter_that_is_frozen_before_the_backward_gets_no_gradient(
    swap_directory: Path, set_trainable: Callable[[nn.Module, bool], None]
) -> None:
    def scenario(side: Side) -> Named:
        seen: Named = {}
        optimizer = side.optimizer(side.model.parameters(), PLAN)
        for step in range(4):
            loss = side.model(torch.linspace(-1, 1, 8).view(2, 4) + step).pow(2).mean()
            if step == 1:  # There is a gradient of the step before, too.
                set_trainable(side.model, False)
            loss.backward()
            seen.update({f"{step} {name}": g for name, g in side.gradients().items()})
            if step != 1:
                optimizer.step()
            if step:
                optimizer.zero_grad()
            set_trainable(side.model, True)
            side.settled()
        return finish(side, seen)

    compare(scenario, with_blocks, swap_directory)


def test_a_frozen_parameter_may_be_trainable_for_a_forward_alone(swap_directory: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with offloaded(model, swap_config(swap_directory)) as model:
        model[0].requires_grad_(True)
        loss = model(torch.ones(2, 4)).sum()
        model[0].requires_grad_(False)
        loss.backward()
        assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
        with infinity.gather(model):  # Gradients that are shown stay as they are.
            loss, before = model(torch.ones(2, 4)).sum(), model[1].weight.grad.clone()
            model[1].weight.requires_grad_(False)
            loss.backward()
            assert torch.equal(model[1].weight.grad, before)
