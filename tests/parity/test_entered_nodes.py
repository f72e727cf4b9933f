"""Which nodes of a backward bring a unit into use: those that run, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.modules.autograd.uses import UnitUses
from tests.support.offloading import offloaded, swap_config

WORDS, WIDTH = 16, 8


class Words(nn.Module):
    """Its output is that of the embedding's own node, which is an exit of its forward, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


@contextmanager
def looked_up(directory: Path) -> Iterator[tuple[Words, torch.Tensor, int]]:
    """A model, the output of its embedding, and the embedding's unit."""
    with offloaded(Words(), swap_config(directory)) as model:
        out = model.embedding(torch.arange(4))
        [param] = infinity.engine_of(model).params_of(model.embedding)
        yield model, out, param.unit.index


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The units of each use, in order."""
    units: list[int] = []
    real = UnitUses.enter

    def enter(uses: UnitUses, of_use: list[int], *lent: Any, **options: bool) -> None:
        units.extend(of_use)
        real(uses, of_use, *lent, **options)

    monkeypatch.setattr(UnitUses, "enter", enter)
    return units


def test_the_node_that_a_backward_begins_with_brings_its_unit_into_use(
    swap_directory: Path, entered: list[int]
) -> None:
    """Such a node is in no table of the nodes that a backward is going to run."""
    with looked_up(swap_directory) as (_, out, unit):
        for _ in range(2):  # Also the second time.
            entered.clear()
            out.backward(torch.ones_like(out), retain_graph=True)
            assert entered == [unit]


def test_a_node_whose_gradient_alone_is_asked_for_brings_no_unit_into_use(
    swap_directory: Path, entered: list[int]
) -> None:
    with looked_up(swap_directory) as (model, out, unit):
        entered.clear()
        score = model.head(out).sum()
        torch.autograd.grad(score, [out], retain_graph=True)
        assert unit not in entered
        score.backward()
        assert unit in entered, "it runs in this one"
