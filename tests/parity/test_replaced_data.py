"""`parameter.data = value` in a forward, which autograd and version counters do not see."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import CapacityError, InfinityError
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, compare, trained


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
    x = torch.linspace(-1, 1, 24).view(3, 8)
    return trained(side, lambda model, step: model(x + step).pow(2).mean(), steps=4, lr=3e-2)


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


def through_capsule(weight: Tensor) -> None:
    torch.from_dlpack(weight.detach()).mul_(0.9)


def through_array(weight: Tensor) -> None:
    array = weight[2:5].detach().numpy()
    array *= 0.9


# Functions outside of the module's class, which its source does not tell of.
RAW_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda w: w.data.mul_(0.9),
    "row": lambda w: w[0].data.zero_(),
    "transposed": lambda w: w.t().data[1].neg_(),
    "other-dtype": lambda w: w.view(torch.int32).data[3].zero_(),
    "slice-assignment": lambda w: w.data.__setitem__(0, 0.5),
    "array": through_array,
    "array-of-data": lambda w: numpy.multiply(
        numpy.asarray(w.data), 0.9, out=numpy.asarray(w.data)
    ),
    "capsule": through_capsule,
    "foreach": lambda w: torch._foreach_mul_([w.data], 0.9),
    "inference": lambda w: torch.inference_mode()(lambda: w.data.mul_(0.9))(),
    "vector": lambda w: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector([w]).detach() * 0.9, [w]
    ),
}


class Calls(nn.Module):
    """A block that calls a function of others on its weight; `keep` gives what is kept of it."""

    def __init__(self, write: Callable[[Tensor], Any], keep: Callable[[Tensor], Any] | None = None):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.write, self.keep, self.kept = write, keep, None

    def forward(self, x: Tensor) -> Tensor:
        if self.keep is not None and self.kept is None:
            self.kept = self.keep(self.lin.weight)
        self.write(self.lin.weight if self.kept is None else self.kept)
        return torch.tanh(self.lin(x)) + x


class Calling(nn.Module):
    def __init__(self, *given: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Calls(*given) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def smallest(build: Callable[[], nn.Module], directory: Path) -> dict[str, Any]:
    """The budget in which a written unit is evicted before anybody reads it again."""
    chunk: dict[str, Any] = {"update_chunk": "8KiB"}
    with pytest.raises(CapacityError) as refused:
        infinity.offload(build(), swap_config(directory, host_nbytes="32KiB", **chunk))
    return chunk | {"host_nbytes": refused.value.needed_nbytes}


@pytest.mark.parametrize("how", RAW_WRITES)
def test_a_write_past_the_version_counter_by_any_function_is_kept(
    how: str, swap_directory: Path
) -> None:
    def build() -> nn.Module:
        return Calling(RAW_WRITES[how])

    compare(train, build, swap_directory, **smallest(build, swap_directory))


@pytest.mark.parametrize(
    "keep", [lambda w: w.data, lambda w: w.data[1], lambda w: w.detach().numpy()[2]]
)
def test_a_kept_tensor_is_written_in_later_forwards(
    keep: Callable[[Tensor], Any], swap_directory: Path
) -> None:
    def halve(kept: Any) -> None:
        kept *= 0.5

    def build() -> nn.Module:
        return Calling(halve, keep)

    compare(train, build, swap_directory, **smallest(build, swap_directory))


def double(kept: Any) -> None:
    with torch.no_grad():
        kept *= 2


@pytest.mark.parametrize(
    ("keep", "write"),
    [
        (lambda w: w.data[1], double),
        (lambda w: w.detach().numpy(), double),
        (lambda w: w, double),
        (lambda w: w, lambda w: double(w.data)),
    ],
    ids=["data", "array", "parameter", "data of the parameter"],
)
def test_a_write_between_two_forwards_through_what_was_kept_is_refused(
    keep: Callable[[Tensor], Any], write: Callable[[Any], Any], swap_directory: Path
) -> None:
    """The memory is the tiers' then: the write would be there or not, as the budget has it."""
    with offloaded(Calling(lambda w: None, keep), swap_config(swap_directory)) as model:
        x = torch.ones(2, 8)
        model(x)
        with pytest.raises(InfinityError, match=r"blocks\.3\.lin\.weight.* kept"):
            write(model.blocks[3].kept)
            model(x)
        before = model.head.weight.detach().clone()
        model.head.weight.data.mul_(2)
        assert torch.equal(model.head.weight, before * 2)


def test_an_access_that_writes_nothing_changes_nothing(swap_directory: Path) -> None:
    """Not even the fp32 value beside a narrow weight, which a change would round."""
    config = swap_config(swap_directory, compute="bfloat16")
    with offloaded(Calling(lambda w: w.data.sum() + w.detach().float().numpy().sum()), config) as m:
        engine = infinity.engine_of(m)
        before = {n: engine.read_parameter(n, master=True) for n in engine.parameter_names()}
        m(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        assert not differences(
            before, {n: engine.read_parameter(n, master=True) for n in engine.parameter_names()}
        )
        assert torch.Tensor.data is torch._C.TensorBase.data  # What the class itself gives.


def test_replaced_data_reaches_the_tiers_from_a_device_with_its_own_memory(
    swap_directory: Path,
) -> None:
    expected = train(Side(build(), is_plain=True))
    with offloaded(build(), swap_config(swap_directory), device=SimulatedDevice()) as model:
        came = train(Side(model))
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
