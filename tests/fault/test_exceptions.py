"""Exceptions that come out of the user's own code, anywhere in a step: no unit stays in use, and
the next step has the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.engine.engine import Engine
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.exhaustive import in_turn
from tests.support.offloading import KINDS, units_in_use

from .harness import (
    Named,
    assert_everything_comes_back,
    assert_nothing_leaked,
    loss_of,
    offload,
    offloaded_step,
    offloaded_steps,
    optimizer_of,
    plain_steps,
    swap_config,
    weights_of,
)


class Boom(Exception):
    """What the user's code raises."""


class _Fuse(torch.autograd.Function):
    """Does nothing, until its backward is set to raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Fragile, place: int) -> Tensor:
        ctx.model, ctx.place = model, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.model.reach("backward", ctx.place)
        return gradient, None, None


class _Block(nn.Module):
    def __init__(self, model: Fragile, place: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64)
        self.place = place
        self.reach = model.reach
        self.fuse = lambda x: _Fuse.apply(x, model, place)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        self.reach("forward", self.place)
        return x + self.second(self.fuse(y))


class Fragile(nn.Module):
    """Four blocks; `explode_at` is the moment at which something raises `error`, or None."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.explode_at: tuple[str, int] | None = None
        self.error: type[BaseException] = Boom
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(_Block(self, place) for place in range(4))
        self.head = nn.Linear(64, 3)

    def reach(self, when: str, place: int) -> None:
        if when == "forward" and torch._C._current_graph_task_id() != -1:
            when = "recomputation"
        if self.explode_at == (when, place):
            raise self.error(f"{when} {place}")

    def inputs(self, seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))}

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            self.reach("between", place)
        return self.head(x)


def fragile(*, recomputes: bool = False) -> Fragile:
    torch.manual_seed(3)
    return Fragile(recomputes=recomputes)


@cache
def reference(steps: int) -> Named:
    return plain_steps(fragile(), steps)


@pytest.fixture(params=["cpu", "simulated"])
def engine(request: pytest.FixtureRequest, swap_directory: Path) -> Iterator[Engine]:
    recomputes = "recomputation" in request.node.name
    device = SimulatedDevice(1, delay_s=1e-4) if request.param == "simulated" else None
    model = fragile(recomputes=recomputes)
    with offload(model, swap_config(swap_directory, host_nbytes="512KiB"), device=device) as engine:
        yield engine


MOMENTS = [
    (when, place)
    for when in ("forward", "between", "backward", "recomputation")
    for place in (0, 2, 3)
]


def goes_on(engine: Engine) -> None:
    model = engine.model
    model.explode_at = None
    assert_same(reference(2), offloaded_steps(model, 2))
    assert_nothing_leaked(engine)
    assert_everything_comes_back(engine)


@pytest.mark.parametrize("moment", MOMENTS, ids="-".join(["{0[0]}", "{0[1]}"]).format)
def test_an_exception_releases_every_unit(moment: tuple[str, int], engine: Engine) -> None:
    model = engine.model
    for _ in range(2):  # The first time nothing is known of the order, the second time it is.
        model.explode_at = moment
        with pytest.raises(Boom, match=f"{moment[0]} {moment[1]}"):
            loss_of(model, 0).backward()
        assert_nothing_leaked(engine)
        assert_everything_comes_back(engine)
        model.explode_at = None
        model.zero_grad()
    goes_on(engine)


@pytest.mark.parametrize(
    ("moment", "error"),
    in_turn(MOMENTS, [KeyboardInterrupt, SystemExit]),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_training_continues_after_an_interrupt(
    moment: tuple[str, int], error: type[BaseException], engine: Engine
) -> None:
    """Hooks do not see exceptions that are no Exception: the next use of the engine cleans up."""
    model = engine.model
    optimizer = optimizer_of(model)
    for step in range(2):
        model.error, model.explode_at = error, moment
        with pytest.raises(error):
            loss_of(model, 0).backward()
        model.explode_at = None
        optimizer.zero_grad()
        offloaded_step(model, optimizer, step)
        assert_nothing_leaked(engine)
    assert_same(reference(2), weights_of(model))
    assert_everything_comes_back(engine)


@pytest.mark.parametrize("moment", [("forward", 2), ("backward", 2)])
def test_every_operation_works_after_an_interrupt(moment: tuple[str, int], engine: Engine) -> None:
    """What is left in the middle of a forward or backward is in nobody's way."""
    model = engine.model
    before = weights_of(model)

    def interrupt() -> None:
        model.error, model.explode_at = KeyboardInterrupt, moment
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0).backward()
        model.explode_at = None

    interrupt()
    assert_same(before, weights_of(model))
    interrupt()
    engine.reset()
    assert_nothing_leaked(engine)
    interrupt()
    for name in engine.parameter_names():
        engine.write_parameter(name, before[name])
    interrupt()
    with infinity.gather(model):
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    interrupt()
    optimizer = optimizer_of(model)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    for step in range(2):
        offloaded_step(model, optimizer, step)
    assert_same(reference(2), weights_of(model))


@pytest.mark.parametrize("moment", [("forward", 1), ("backward", 1)])
def test_closing_right_after_an_interrupt(moment: tuple[str, int], engine: Engine) -> None:
    model = engine.model
    model.error, model.explode_at = KeyboardInterrupt, moment
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 0).backward()
    engine.close()
    engine.close()


def test_a_tensor_hook_that_raises(engine: Engine) -> None:
    model = engine.model

    def explode(gradient: Tensor) -> None:
        raise Boom

    hidden: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda m, a, output: hidden.append(output))
    loss = loss_of(model, 0)
    hidden[0].register_hook(explode)
    handle.remove()
    with pytest.raises(Boom):
        loss.backward()
    assert_nothing_leaked(engine)
    model.zero_grad()
    goes_on(engine)


def test_a_forward_hook_that_raises(engine: Engine) -> None:
    def explode(*unused: object) -> None:
        raise Boom

    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(engine.model.blocks[1], register)(explode)
        with pytest.raises(Boom):
            loss_of(engine.model, 0)
        handle.remove()
        assert_nothing_leaked(engine)
    goes_on(engine)


def test_an_exception_between_forward_and_backward(engine: Engine) -> None:
    """The graph of the loss is dropped; it keeps no unit in use."""
    for _ in range(3):
        loss = loss_of(engine.model, 0)
        assert units_in_use(engine) == []
        del loss
    goes_on(engine)


def test_gradients_of_backwards_that_ended_are_kept(engine: Engine) -> None:
    """Two micro-batches, and between them one whose backward broke off in its last layer."""
    model = engine.model
    plain = fragile()
    loss_of(plain, 0).backward()
    loss_of(model, 0).backward()
    model.explode_at = ("forward", 2)
    with pytest.raises(Boom):
        loss_of(model, 1)
    model.explode_at = None
    loss_of(plain, 2).backward()
    loss_of(model, 2).backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, engine.read_gradient(name))


def test_sums_of_a_broken_backward_stay_as_in_plain_pytorch(engine: Engine) -> None:
    """Gradients of the layers that were passed are there, those of the others are None."""
    model, plain = engine.model, fragile()
    for each in (plain, model):
        each.explode_at = ("backward", 1)
        with pytest.raises(Boom):
            loss_of(each, 0).backward()
    assert_nothing_leaked(engine)
    for name, parameter in plain.named_parameters():
        gradient = engine.read_gradient(name)
        if parameter.grad is None:
            assert gradient is None
        else:
            assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("modify", [False, True])
def test_an_exception_inside_gather(modify: bool, engine: Engine) -> None:
    before = weights_of(engine.model)
    with pytest.raises(Boom), infinity.gather(engine.model.blocks[1], modify=modify):
        raise Boom
    assert_nothing_leaked(engine)
    assert_same(before, weights_of(engine.model))
    goes_on(engine)


def test_a_step_while_parameters_are_gathered_is_refused(engine: Engine) -> None:
    model = engine.model
    optimizer = optimizer_of(model)
    loss_of(model, 0).backward()
    refusal = pytest.raises(infinity.errors.InfinityError, match="gather")
    with infinity.gather(model.blocks[2]), refusal:
        optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    offloaded_step(model, optimizer, 1)
    assert_same(reference(2), weights_of(model))


def test_a_closure_that_raises(engine: Engine) -> None:
    model = engine.model
    optimizer = optimizer_of(model)

    def closure() -> Tensor:
        raise Boom

    with pytest.raises(Boom):
        optimizer.step(closure)
    assert_nothing_leaked(engine)

    def step(number: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss

        return run

    for number in range(2):
        assert torch.isfinite(optimizer.step(step(number)))
    assert_same(reference(2), weights_of(model))


def test_every_placement_survives_an_exception(tmp_path: Path) -> None:
    for place in ("device", "host", "nvme"):
        model = fragile()
        config = swap_config(
            tmp_path / place, placement=dict.fromkeys(KINDS, place), host_nbytes="2MiB"
        )
        with offload(model, config) as engine:
            for moment in (("forward", 1), ("backward", 1)):
                model.explode_at = moment
                with pytest.raises(Boom):
                    loss_of(model, 0).backward()
                assert units_in_use(engine) == []
                model.explode_at = None
                model.zero_grad()
            assert_same(reference(2), offloaded_steps(model, 2))
