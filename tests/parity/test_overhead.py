"""The engine's own work for each unit, counted in calls of Python functions: no clock, no noise."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.testing import SimulatedDevice

PACKAGE = str(Path(infinity.__file__).parent)
DOUBLES = str(Path(PACKAGE, "testing"))
TENSORS_PER_UNIT = 12
WIDTH = 64  # As in real models, tensors of a unit lie one behind the other, without padding.
# Of one step: forward, backward, optimizer.step(), zero_grad() and the update. Lower it with the
# number that a change reaches: 345 now.
MOST_CALLS_PER_UNIT = 345


class Block(nn.Module):
    """Twelve parameters: four linear layers and two norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.query(h) * self.key(h)
        return x + self.down(self.up(self.mlp_norm(x)).relu())


class Model(nn.Module):
    def __init__(self, num_blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Chain(nn.Sequential):
    """Small units, far more of them than the device has space for."""

    def __init__(self, num_units: int) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(num_units)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Loose(nn.Module):
    """One unit of small parameters, which functions outside of their module use."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(4) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return x.square().mean()


def calls_of_a_step(
    model: nn.Module, width: int, device: SimulatedDevice | None = None
) -> Counter[str]:
    """Calls of the package's own functions in one step of training, by function."""
    torch.manual_seed(0)
    kinds = ("parameters", "master", "moments", "gradients")
    config = {
        "tiers": {"device": {"kind": "cpu", "capacity": "4KiB"}, "host": {"capacity": "128MiB"}},
        "placement": dict.fromkeys(kinds, "host"),
    }
    infinity.offload(model, config, device=device)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(2, width)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def look() -> None:
        for gain in model.gains:
            gain.data.mul_(optimizer.state[gain]["exp_avg"].max() + 1)
        with infinity.gather(model, modify=True):
            assert all(gain.data.any() for gain in model.gains)

    for _ in range(3):  # The order of uses is learned, the update runs from the second on.
        step()
    calls = counted(step)
    if isinstance(model, Loose):  # Its units are its parameters.
        calls = counted(lambda: (step(), look()), {"call", "c_call"})
    infinity.engine_of(model).close()
    return calls


def counted(run: Callable[[], Any], events: Collection[str] = ("call",)) -> Counter[str]:
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event in events and path.startswith(PACKAGE) and not path.startswith(DOUBLES):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_unit_costs_few_calls_of_python_functions_in_a_model_of_any_size() -> None:
    few, more, many = (calls_of_a_step(Model(count), WIDTH) for count in (8, 24, 40))
    per_unit = (more.total() - few.total()) / 16
    top = ", ".join(f"{name} {count / 24:.1f}" for name, count in more.most_common(12))
    assert per_unit <= MOST_CALLS_PER_UNIT, f"{per_unit:.0f} calls per unit; most often: {top}"
    # No step goes through all units for each unit.
    assert abs((many.total() - more.total()) / 16 - per_unit) <= 0.02 * per_unit


@pytest.mark.parametrize("model", [Chain, Loose])
def test_a_use_costs_as_much_among_180_units_as_among_60(model: Any) -> None:
    """With uses and gradients of each, and on a device that has space for forty."""
    device = SimulatedDevice if model is Chain else lambda delay_s: None
    few, many = (calls_of_a_step(model(count), 4, device(delay_s=0)) for count in (60, 180))
    grown = {name: (few[name] / 60, many[name] / 180) for name in many}
    most = sorted(grown, key=lambda name: grown[name][0] - grown[name][1])[:8]
    assert many.total() / 180 <= 1.1 * few.total() / 60, {name: grown[name] for name in most}


def test_calls_are_counted() -> None:
    few = calls_of_a_step(Model(2), WIDTH)
    assert few["uses.UnitUses.enter"] >= 4  # Two units, forward and backward.
    assert few["grads.ParamGrads._take"] == 2 * TENSORS_PER_UNIT
