"""The fault ladder: in each part of a training step the first, second, ... read or write fails,
until the part succeeds. Whatever fails is reported with its place, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.engine import Engine
from infinity.errors import StorageError
from infinity.testing.faulty_engine import Fault, FaultyEngine
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled

from .harness import (
    EIO,
    ENOSPC,
    FAULTS,
    Named,
    assert_describes,
    assert_everything_comes_back,
    assert_nothing_leaked,
    assert_poisoned,
    loss_of,
    mlp,
    offload,
    offloaded_step,
    optimizer_of,
    plain_steps,
    swap_config,
    swap_files,
    trapped,
    weights_of,
)

MOST_RUNGS = 400


def faults(code: int) -> list[Any]:
    """A read that fails, and a write that fails with this code; `make exhaustive` has both codes."""
    return sampled(FAULTS, lambda fault: fault in (("read", EIO), ("write", code)))


def faults_of_updates(read: str, write: str, code: int) -> list[Any]:
    """The same with each way to update: `read` is that in which reads fail, `write` that in which
    writes fail; `make exhaustive` has all."""
    cases = [(*fault, updates) for updates in ("at_step", "deferred") for fault in FAULTS]
    return sampled(cases, lambda case: case in (("read", EIO, read), ("write", code, write)))


@cache
def reference(steps: int) -> Named:
    return plain_steps(mlp(), steps)


def rungs() -> Iterator[int]:
    """The first rungs one by one, then some of the others: they fail in the middle of the same
    loop."""
    yield from range(1, 9)
    yield from range(9, MOST_RUNGS, 11)


# -- offload() -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "code"), [("any", EIO), ("write", ENOSPC), ("open", EIO)], ids=str
)
def test_a_failed_offload_leaves_the_model_as_it_was(
    operation: str, code: int, swap_directory: Path
) -> None:
    model = mlp()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    expected = loss_of(model, 1).detach()
    failures = 0
    for rung in range(1, MOST_RUNGS):
        try:
            engine = offload(
                model,
                swap_config(swap_directory),
                wrap_storage=lambda inner, rung=rung: FaultyEngine(
                    inner, [Fault(rung, operation, errno=code)]
                ),
            )
        except StorageError as error:
            failures += 1
            assert error.errno == code
            assert Path(error.path).parent == swap_directory
        else:
            with engine:
                assert type(next(model.parameters())) is not nn.Parameter
            assert swap_files(swap_directory) == []
            break
        assert swap_files(swap_directory) == []
        assert {name: id(p) for name, p in model.named_parameters()} == {
            name: id(p) for name, p in before.items()
        }
        assert_same(values, {name: p.detach() for name, p in model.named_parameters()})
        assert torch.equal(loss_of(model, 1).detach(), expected)
        assert not any(
            hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)
        )
    assert failures >= (1 if operation == "open" else 4)


# -- The parts of a step ---------------------------------------------------------------------------


def climb(
    swap_directory: Path,
    operation: str,
    code: int,
    prepare: Callable[[nn.Module], Callable[[], object]],
    examine: Callable[[nn.Module, Engine, int], None],
    updates: str = "deferred",
) -> int:
    """Runs the part that `prepare` returns with each operation failing in turn.

    `examine(model, engine, rung)` is called after a failed read. Returns how many rungs failed.
    """
    failures = 0
    for rung in rungs():
        model = mlp()
        with trapped(model, swap_config(swap_directory, host_nbytes="512KiB", updates=updates)) as (
            engine,
            trap,
        ):
            part = prepare(model)
            trap.set(operation, rung, code)
            raised = None
            try:
                part()
                if trap.error is not None and operation == "write":
                    engine.flush()
            except StorageError as error:
                raised = error
            if trap.error is None:
                assert raised is None
                return failures
            failures += 1
            if raised is None:
                assert operation == "read", "a failed write was forgotten"
                continue  # Read ahead, and never needed.
            assert_describes(raised, operation=operation, code=code, directory=swap_directory)
            del raised
            assert_nothing_leaked(engine)
            if operation == "read":
                examine(model, engine, rung)
            else:
                assert_poisoned(engine, lambda m=model: loss_of(m, 9).backward(), code)
                assert_nothing_leaked(engine)
    raise AssertionError(f"{MOST_RUNGS} rungs and still failing")


def step_again(model: nn.Module, engine: Engine, rung: int) -> None:
    """The step from its start, and one more: the bits of plain PyTorch."""
    assert_everything_comes_back(engine)
    optimizer = optimizer_of(model)
    optimizer.zero_grad()
    for step in range(2):
        offloaded_step(model, optimizer, step)
    assert_same(reference(2), weights_of(model))
    assert_everything_comes_back(engine)


@pytest.mark.parametrize(("operation", "code"), faults(EIO), ids=str)
def test_forward(operation: str, code: int, swap_directory: Path) -> None:
    def prepare(model: nn.Module) -> Callable[[], object]:
        return lambda: loss_of(model, 0)

    failures = climb(swap_directory, operation, code, prepare, step_again)
    assert failures >= (2 if operation == "read" else 0)


@pytest.mark.parametrize(("operation", "code"), faults(ENOSPC), ids=str)
def test_backward(operation: str, code: int, swap_directory: Path) -> None:
    def prepare(model: nn.Module) -> Callable[[], object]:
        return loss_of(model, 0).backward

    failures = climb(swap_directory, operation, code, prepare, step_again)
    assert failures >= 2


@pytest.mark.parametrize(("operation", "code"), faults(EIO), ids=str)
def test_second_backward(operation: str, code: int, swap_directory: Path) -> None:
    """Gradients that rest already are read back and added to."""

    def prepare(model: nn.Module) -> Callable[[], object]:
        loss_of(model, 5).backward()
        return loss_of(model, 0).backward

    failures = climb(swap_directory, operation, code, prepare, step_again)
    assert failures >= 2


@pytest.mark.parametrize(
    ("operation", "code", "updates"),
    faults_of_updates("at_step", "deferred", ENOSPC),
    ids=str,
)
def test_step(operation: str, code: int, updates: str, swap_directory: Path) -> None:
    """A step that is carried out at once happens or does not; one that was only decided is made up
    for later."""
    optimizers = {}

    def prepare(model: nn.Module) -> Callable[[], object]:
        loss_of(model, 0).backward()
        optimizers.clear()
        optimizers[model] = optimizer_of(model)
        if updates == "at_step":
            return optimizers[model].step
        optimizers[model].step()
        return infinity.engine_of(model).flush

    def examine(model: nn.Module, engine: Engine, rung: int) -> None:
        assert_everything_comes_back(engine)
        if rung == 1:  # Nothing has been changed yet.
            optimizer = optimizers[model]
            if updates == "at_step":
                optimizer.step()
            optimizer.zero_grad()
            offloaded_step(model, optimizer, 1)
            assert_same(reference(2), weights_of(model))

    failures = climb(swap_directory, operation, code, prepare, examine, updates)
    assert failures >= (12 if operation == "read" else 10)


@pytest.mark.parametrize(
    ("operation", "code", "updates"),
    faults_of_updates("deferred", "at_step", ENOSPC),
    ids=str,
)
def test_the_second_step_as_a_whole(
    operation: str, code: int, updates: str, swap_directory: Path
) -> None:
    """Forward, backward and step with everything known ahead, so that reads run ahead."""
    optimizers = {}

    def prepare(model: nn.Module) -> Callable[[], object]:
        optimizers.clear()
        optimizers[model] = optimizer_of(model)
        offloaded_step(model, optimizers[model], 0)
        return lambda: offloaded_step(model, optimizers[model], 1)

    def examine(model: nn.Module, engine: Engine, rung: int) -> None:
        assert_everything_comes_back(engine)
        if rung == 1:
            optimizers[model].zero_grad()
            offloaded_step(model, optimizers[model], 1)
            assert_same(reference(2), weights_of(model))

    failures = climb(swap_directory, operation, code, prepare, examine, updates)
    assert failures >= (12 if operation == "read" else 10)


@pytest.mark.parametrize(("operation", "code"), faults(ENOSPC), ids=str)
def test_reading_and_writing_from_outside(operation: str, code: int, swap_directory: Path) -> None:
    def prepare(model: nn.Module) -> Callable[[], object]:
        from infinity import engine_of

        engine = engine_of(model)
        values = {name: engine.read_parameter(name) for name in engine.parameter_names()}

        def write_all() -> None:
            for name, value in values.items():
                engine.write_parameter(name, value)
            engine.flush()
            weights_of(model)

        return write_all

    failures = climb(swap_directory, operation, code, prepare, step_again)
    assert failures >= 1
