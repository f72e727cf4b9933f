"""Norms of gradients that rest on a device: copied to spare host memory and measured beside the
backward, with the bits of plain PyTorch on the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients import tensors
from infinity.streaming.gradients.resting_norms import RestingNorms
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.gradients.tensors import THREAD_NAME
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.exhaustive import covering, sampled
from tests.support.two_sides import Side, compare, offloaded

from .test_norm_tasks import (
    NUM_TENSORS,
    NUM_THREADS,
    Held,
    let_norms_finish,
    steps,
    tasks_of,
    told_by,
    until,
)

STATE = dict.fromkeys(("parameters", "master", "moments"), "device")


@pytest.fixture(autouse=True)
def some_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "norm_threads", lambda own: NUM_THREADS)


def resting(directory: Path, *, delay_s: float = 0.002, **changes: Any) -> Side:
    changes = {"gradients": "device", "schedule": {"updates": "deferred"}} | changes
    return offloaded(directory, device=SimulatedDevice(delay_s=delay_s), **changes)


def store_of(run: Side) -> GradientStore:
    gradients = infinity.engine_of(run.model).gradients
    assert isinstance(gradients, GradientStore)
    return gradients


def resting_of(run: Side) -> RestingNorms:
    return store_of(run)._resting


def lent_to_norms(run: Side) -> list[str]:
    return [label for label in resting_of(run)._pool.lent() if "measured" in label]


PROPERTIES: dict[str, list[Any]] = {
    "updates": ["at_step", "deferred", "both_passes"],
    "on_device": ["gradients-alone", "all-state"],
    "max_norm": [1e-3, 1e6],
}
CASES = [tuple(case) for case in product(*PROPERTIES.values())]
PAIRS = [tuple(case.values()) for case in covering(PROPERTIES)]


@pytest.mark.parametrize(tuple(PROPERTIES), sampled(CASES, PAIRS.__contains__))
def test_bits_of_plain_pytorch(
    swap_directory: Path, updates: str, on_device: str, max_norm: float
) -> None:
    others = STATE if on_device == "all-state" else {}

    def body(run: Side) -> list[torch.Tensor]:
        for number in range(5):
            # One step has more gradients than the last.
            run.backward(*range(10 * number, 10 * number + 1 + (number == 3)))
            run.step(max_norm)
        return []

    compare(body, resting(swap_directory, placement=others, schedule={"updates": updates}))


def test_the_backward_starts_the_norms_and_threads_compute_them(swap_directory: Path) -> None:
    run = resting(swap_directory)
    steps(run, 2)
    names: list[str] = []
    told_by(run, names)
    held = Held(run)
    run.backward(2)
    until(lambda: len(held.reading) == NUM_THREADS, "no norm is computed")
    norms = resting_of(run)
    assert len(tasks_of(run)) == len(norms._measured) > NUM_THREADS
    # Memory for two units' sums bounds the copies; what has none is due.
    assert len(norms._measured) + len(norms._due) == NUM_TENSORS
    assert norms._due and norms._nbytes <= norms._most_nbytes
    held.release()
    run.step(1e-3)
    assert len(names) == NUM_TENSORS
    infinity.close(run.model)


def test_the_first_step_has_all_of_them_measured_together(swap_directory: Path) -> None:
    run = resting(swap_directory)
    names: list[str] = []
    told_by(run, names)
    run.backward(0)
    assert not tasks_of(run) and not names
    run.step(1e-3)
    assert len(names) == NUM_TENSORS and any(name.startswith(THREAD_NAME) for name in names)
    infinity.close(run.model)


def test_a_step_that_needs_no_norms_copies_nothing(swap_directory: Path) -> None:
    run = resting(swap_directory)
    for number in range(3):
        run.backward(number)
        assert not tasks_of(run) and not resting_of(run)._measured
        run.step()
    infinity.close(run.model)


def test_no_memory_is_lent_after_the_step(swap_directory: Path) -> None:
    run = resting(swap_directory)
    steps(run, 3)
    assert not lent_to_norms(run) and not resting_of(run)._nbytes
    infinity.close(run.model)


def test_who_needs_memory_gets_it_and_the_norms_stay_known(swap_directory: Path) -> None:
    run = resting(swap_directory)
    steps(run, 2)
    run.backward(2)
    engine, store = infinity.engine_of(run.model), store_of(run)
    assert lent_to_norms(run)
    with engine._lock:
        measured = [each.known for each in resting_of(run)._measured]
        while store.reclaim():
            pass
        assert not lent_to_norms(run)
        assert all(known.norm is not None for known in measured)
    run.step(1e-3)
    infinity.close(run.model)


@pytest.mark.parametrize("is_tight", [False, True], ids=["memory-is-lent", "nothing-is-kept"])
def test_without_spare_memory_the_step_measures_them(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, is_tight: bool
) -> None:
    run = resting(swap_directory)
    pool = resting_of(run)._pool
    if is_tight:
        pool.is_tight = True
    else:
        allocate = pool.try_allocate
        monkeypatch.setattr(
            pool,
            "try_allocate",
            lambda nbytes, label, **more: (
                None if "measured" in label else allocate(nbytes, label, **more)
            ),
        )
    compare(lambda run: steps(run, 4), run)


CHANGES: dict[str, Callable[[GradientStore, Unit, TensorSpec], object]] = {
    "forget": lambda gradients, unit, spec: gradients.forget(spec),
    "put": lambda gradients, unit, spec: gradients.put(unit, spec, torch.ones(spec.facts.shape)),
    "zero": lambda gradients, unit, spec: gradients.zero(unit, spec),
    "add": lambda gradients, unit, spec: gradients.add(unit, spec, torch.ones(spec.facts.shape)),
    "clipped": lambda gradients, unit, spec: gradients.note_scaled(spec, 0.5),
}


def check_norm(store: GradientStore, unit: Unit, spec: TensorSpec, name: str) -> None:
    """After a change of CHANGES."""
    if store.has(spec):
        value = store.read(unit, spec)
        assert torch.equal(store.norm(unit, spec), torch.linalg.vector_norm(value))
    else:
        assert name == "forget"


@pytest.mark.parametrize(
    ("name", "delay_s"),
    sampled(product(CHANGES, [0.0, 0.02]), lambda case: not case[1] or case[0] in ("add", "put")),
)
def test_the_norm_is_that_of_the_content_when_the_step_asks(
    swap_directory: Path, name: str, delay_s: float
) -> None:
    run = resting(swap_directory, delay_s=delay_s)
    steps(run, 2)
    run.backward(2)
    engine, store = infinity.engine_of(run.model), store_of(run)
    if not delay_s:
        let_norms_finish(run)
    units = [(unit, spec) for unit in store._store.units for spec in unit.trainable()]
    with engine._lock:
        for unit, spec in units:
            CHANGES[name](store, unit, spec)
        for unit, spec in units:
            check_norm(store, unit, spec, name)
    infinity.close(run.model)


def test_closing_in_the_middle_leaves_nothing(swap_directory: Path) -> None:
    run = resting(swap_directory, delay_s=0.05)
    steps(run, 2)
    run.backward(2)
    assert resting_of(run)._measured
    infinity.close(run.model)


def test_a_failed_copy_reaches_the_step(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resting(swap_directory)
    steps(run, 2)
    device = infinity.engine_of(run.model).device
    copy = device.copy

    class Broken:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def wait(self) -> None:
            self._real.wait()
            raise RuntimeError("the link is down")

    is_first = [True]

    def broken_once(source: torch.Tensor, target: torch.Tensor) -> Any:
        real, is_broken = copy(source, target), is_first[0] and device.is_on_host(target)
        is_first[0] = is_first[0] and not is_broken
        return Broken(real) if is_broken else real

    monkeypatch.setattr(device, "copy", broken_once)
    run.backward(2)
    let_norms_finish(run)
    with pytest.raises(RuntimeError, match="the link is down"):
        run.step(1e-3)
    monkeypatch.undo()
    infinity.close(run.model)


def test_a_sum_that_waited_for_memory_is_copied_behind_the_stream_that_wrote_it(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resting(swap_directory)
    steps(run, 2)
    norms, device = resting_of(run), infinity.engine_of(run.model).device
    assert isinstance(device, SimulatedDevice)
    with monkeypatch.context() as patched:
        patched.setattr(norms._pool, "try_allocate", lambda nbytes, label, **more: None)
        run.backward(2)
    assert norms._due and not norms._measured
    with infinity.engine_of(run.model)._lock:
        with device.streams.computing_on(device.streams.new_computing("side")):
            norms.advance()
            assert not norms._measured
        norms.advance()
        assert norms._measured
    run.step(1e-3)
    infinity.close(run.model)
