"""`parameter.data = value` in a forward, which autograd and version counters do not see."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import CapacityError, InfinityError
from infinity.testing.simulated_device import SimulatedDevice

from .harness import (
    Named,
    OffloadedSide,
    PlainSide,
    Plan,
    Side,
    differences,
    offloaded,
    swap_config,
)
from .test_library import compare, finish

PLAN = Plan(lr=3e-2, weight_decay=0.1)


class Normed(nn.Module):
    """Brings its own weight to length one before it uses it, and its child's within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm(dim=1, keepdim=True)
        with torch.no_grad():
            self.scale.data = self.scale.data.clamp(0.9, 1.0)
        self.child.weight.data = self.child.weight.clamp(-0.2, 0.2)
        return self.child(x @ self.weight.t() * self.scale)


class Written(Normed):
    """Does the same in place: through `.data`, and through a numpy array in a method of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))
        self.bound()
        return self.child(x @ self.weight.t() * self.scale)

    def bound(self) -> None:
        values = self.scale.detach().numpy()
        values.clip(0.9, 1.0, out=values)


def written() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Written(), nn.Tanh(), nn.ModuleList([Written()])[0], nn.Linear(8, 4))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Normed(), nn.Tanh(), nn.ModuleList([Normed()])[0], nn.Linear(8, 4))


def train(side: Side) -> Named:
    seen: Named = {}
    optimizer = side.optimizer(side.model.parameters(), PLAN)
    for step in range(4):
        x = torch.linspace(-1, 1, 24).view(3, 8) + step
        loss = side.model(x).pow(2).mean()
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        seen.update({f"{step} {name}": g for name, g in side.gradients().items()})
        optimizer.step()
        optimizer.zero_grad()
        side.settled()
    return finish(side, seen)


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_a_parameter_whose_data_is_replaced_in_a_forward_learns_on(
    placement: str, swap_directory: Path
) -> None:
    compare(train, build, swap_directory, placement=placement)


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_a_write_through_data_in_a_forward_is_kept(placement: str, swap_directory: Path) -> None:
    """In the smallest budget, where the written unit is evicted before anybody reads it again."""
    small: dict[str, Any] = {"placement": placement, "update_chunk": "8KiB"}
    with pytest.raises(CapacityError) as refused:
        infinity.offload(written(), swap_config(swap_directory, host_nbytes="32KiB", **small))
    least = small | {"host_nbytes": refused.value.needed_nbytes}
    compare(train, written, swap_directory, **least)


def test_replaced_data_reaches_the_tiers_from_a_device_with_its_own_memory(
    swap_directory: Path,
) -> None:
    expected = train(PlainSide(build()))
    with offloaded(build(), swap_config(swap_directory), device=SimulatedDevice()) as model:
        came = train(OffloadedSide(model))
    assert not differences(expected, came)


def test_the_master_follows_replaced_data(swap_directory: Path) -> None:
    config = swap_config(swap_directory, compute="bfloat16")
    with offloaded(build(), config) as model:
        model(torch.ones(2, 8, dtype=torch.bfloat16))
        engine = infinity.engine_of(model)
        for name in ("0.weight", "0.child.weight"):
            wide = engine.read_parameter(name, master=True)
            assert torch.equal(wide.bfloat16(), engine.read_parameter(name))
        assert engine.read_parameter("0.child.weight").abs().max() <= 0.2


@pytest.mark.parametrize(
    "value",
    [lambda m: m.weight.data[:4], lambda m: m.weight.data.double(), lambda m: m.other.data],
    ids=["shape", "dtype", "shared"],
)
def test_data_that_cannot_be_taken_over_is_refused_by_name(
    value: Callable[[Any], Tensor], swap_directory: Path
) -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.other = nn.Parameter(torch.randn(8, 8))
            self.is_on = True

        def forward(self, x: Tensor) -> Tensor:
            if self.is_on:
                self.weight.data = value(self)
            return x + self.weight.sum() + self.other.sum()

    model = nn.Sequential(nn.Linear(8, 8), Replaces())
    before = model[1].weight.detach().clone()
    with offloaded(model, swap_config(swap_directory)) as model:
        with pytest.raises(InfinityError, match=r"1\.weight.*replaced by"):
            model(torch.ones(8))
        gc.collect()  # The graph that was made meanwhile.
        assert torch.equal(infinity.engine_of(model).read_parameter("1.weight"), before)
        model[1].is_on = False
        model(torch.ones(8)).sum().backward()


def test_data_that_is_replaced_after_its_use_is_refused(tmp_path: Path) -> None:
    """The backward needs the old value, whose memory the new one takes."""

    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.weight.data = self.weight.data * 0.5
            return out

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            self.inner.weight.data = self.inner.weight.data * 0.5
            return out

    x = torch.ones(2, 4, requires_grad=True)
    with (
        offloaded(nn.Sequential(Late(4, 4)), swap_config(tmp_path / "1")) as model,
        pytest.raises(InfinityError, match=r"0\.weight.*replaced after"),
    ):
        model(x)
    with offloaded(nn.Sequential(Outside()), swap_config(tmp_path / "2")) as model:
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
