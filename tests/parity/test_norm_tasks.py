"""Norms beside a device: threads of their own compute them, several at a time, without the engine's
lock; the bits are those of plain PyTorch."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config.machine import norm_threads
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients import tensors
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.gradients.tensors import THREAD_NAME, CompleteSums, TensorGradient
from infinity.testing.simulated_device import SimulatedDevice
from tests.support import two_sides
from tests.support.two_sides import Side, compare, config_of, make, offloaded, plain_run, same_bits

PATIENCE_S = 60.0
SHORT_S = 0.05
NUM_THREADS = 3
NUM_TENSORS = len(list(make().parameters()))


@pytest.fixture(autouse=True)
def some_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "norm_threads", lambda own: NUM_THREADS)


def beside(directory: Path, **changes: Any) -> Side:
    changes = {"gradients": "nvme", "schedule": {"updates": "deferred"}} | changes
    return offloaded(directory, device=SimulatedDevice(), **changes)


def steps(run: Side, count: int, start: int = 0) -> list[torch.Tensor]:
    """Steps that need norms."""
    return two_sides.steps(run, count, lambda _: 1e-3, start)


def norm_names() -> set[str]:
    names = (thread.name for thread in threading.enumerate())
    return {name for name in names if name.startswith(THREAD_NAME)}


def until(is_so: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(1e-3)


def norms_of(run: Side) -> CompleteSums:
    return infinity.engine_of(run.model).gradients.norms


def told_by(run: Side, names: list[str]) -> None:
    """Appends the name of the thread that computes each norm."""
    norms = norms_of(run)
    measure = norms.measure

    def told(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        names.append(threading.current_thread().name)
        return measure(flat, spec)

    norms.measure = told


def tasks_of(run: Side) -> list[TensorGradient]:
    """The sums whose norms have a task, which may be over."""
    gradients = infinity.engine_of(run.model).gradients
    return [known for known in gradients._tensors.values() if known.task is not None]


def is_over(known: TensorGradient) -> bool:
    return known.task is None or known.task._future.done()


def let_norms_finish(run: Side) -> None:
    engine = infinity.engine_of(run.model)
    with engine._lock:
        engine.gradients.finish_copies()
    until(lambda: all(map(is_over, tasks_of(run))), "nobody computes the norms")


class Held:
    """Holds the norms of a run inside their computation until `release`."""

    def __init__(self, run: Side) -> None:
        self._norms = norms_of(run)
        self._measure, self._norms.measure = self._norms.measure, self._wait
        self._is_released = threading.Event()
        self.reading: list[torch.Tensor] = []
        self.most_at_once, self.num_computed = 0, 0
        self._count = threading.Lock()

    def _wait(self, flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        with self._count:
            self.reading.append(flat)
            self.num_computed += 1
            self.most_at_once = max(self.most_at_once, len(self.reading))
        assert self._is_released.wait(PATIENCE_S)
        norm = self._measure(flat, spec)
        with self._count:
            self.reading = [other for other in self.reading if other is not flat]
        return norm

    def release(self) -> None:
        self._norms.measure = self._measure
        self._is_released.set()


@pytest.fixture
def run(swap_directory: Path) -> Iterator[Side]:
    run = beside(swap_directory)
    steps(run, 2)
    yield run
    infinity.close(run.model)


def test_a_whole_backward_passes_and_the_lock_is_free_while_norms_are_computed(run: Side) -> None:
    held = Held(run)
    run.backward(2)  # Ends although no norm does.
    until(lambda: len(held.reading) == NUM_THREADS, "no norm is computed")
    lock, taken = infinity.engine_of(run.model)._lock, []

    def look() -> None:
        taken.append(lock.acquire(timeout=60))
        lock.release()

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()
    assert taken == [True]
    held.release()
    run.step(1e-3)


def test_several_tensors_are_measured_at_a_time_each_once(run: Side) -> None:
    held = Held(run)
    run.backward(2)
    until(lambda: len(held.reading) == NUM_THREADS, "one norm at a time")
    assert len(tasks_of(run)) == NUM_TENSORS
    held.release()
    let_norms_finish(run)
    run.step(1e-3)
    assert (held.most_at_once, held.num_computed) == (NUM_THREADS, NUM_TENSORS)


def test_a_norm_that_no_thread_has_begun_is_computed_by_who_needs_it(run: Side) -> None:
    held = Held(run)
    run.backward(2)
    until(lambda: len(held.reading) == NUM_THREADS, "no norm is computed")
    names: list[str] = []
    last = tasks_of(run)[-1]
    assert last.task is not None and not is_over(last)
    measure = held._measure
    last.task._measure = lambda *sum: names.append(threading.current_thread().name) or measure(*sum)
    with infinity.engine_of(run.model)._lock:
        last.finish_task()
    assert last.norm is not None and names == [threading.current_thread().name]
    held.release()
    run.step(1e-3)


def first_sum(run: Side, held: Held) -> tuple[GradientStore, Unit, TensorSpec]:
    """The sum that a thread reads now."""
    gradients = infinity.engine_of(run.model).gradients
    assert isinstance(gradients, GradientStore)
    for unit in gradients._store.units:
        for spec in unit.trainable():
            task = gradients._tensors[spec].task
            if task is not None and any(task._flat is flat for flat in held.reading):
                return gradients, unit, spec
    raise AssertionError("nothing is read")


def reclaim_all(gradients: GradientStore, unit: Unit, spec: TensorSpec) -> None:
    while unit in gradients.in_blocks.units():
        assert gradients.reclaim()


def give_back(gradients: GradientStore, unit: Unit, spec: TensorSpec) -> None:
    sums = gradients._sums[unit.index]
    gradients.in_blocks.start_write(sums)
    assert sums.writing is not None
    sums.writing.wait()
    gradients.give_back(unit)


GIVES_UP: dict[str, Callable[[GradientStore, Unit, TensorSpec], object]] = {
    "reclaim": reclaim_all,
    "give_back": give_back,
    "forget": lambda gradients, unit, spec: gradients.forget(spec),
    "put": lambda gradients, unit, spec: gradients.put(unit, spec, torch.ones(spec.facts.shape)),
    "zero": lambda gradients, unit, spec: gradients.zero(unit, spec),
    "add": lambda gradients, unit, spec: gradients.add(
        unit, spec, torch.ones(spec.facts.shape), is_on_host=True
    ),
    "clipped": lambda gradients, unit, spec: gradients.note_scaled(spec, 0.5),
    "settle": lambda gradients, unit, spec: gradients.settle(),
}


@pytest.mark.parametrize("name", GIVES_UP)
def test_memory_of_a_sum_is_neither_given_away_nor_changed_under_who_reads_it(
    run: Side, name: str
) -> None:
    held = Held(run)
    run.backward(2)
    until(lambda: len(held.reading) == NUM_THREADS, "no norm is computed")
    gradients, unit, spec = first_sum(run, held)
    known, lock = gradients._tensors[spec], infinity.engine_of(run.model)._lock
    flat = next(flat for flat in held.reading if flat is known.task._flat)  # type: ignore[union-attr]
    before, is_ended = flat.clone(), threading.Event()

    def give_up() -> None:
        with lock:
            GIVES_UP[name](gradients, unit, spec)
        is_ended.set()

    giving = threading.Thread(target=give_up, daemon=True)
    giving.start()
    assert not is_ended.wait(SHORT_S), "it did not wait"
    assert torch.equal(flat, before) and unit in gradients.in_blocks.units()
    held.release()
    assert is_ended.wait(PATIENCE_S)
    giving.join()
    assert known.task is None
    keeps = name in ("reclaim", "give_back", "settle")
    assert (known.norm is not None) is keeps, "the norm of another content is not known"
    if keeps:
        assert torch.equal(known.norm, torch.linalg.vector_norm(before))
    run.optimizer.zero_grad()
    steps(run, 1, start=3)


def test_closing_waits_for_who_reads_a_sum(swap_directory: Path) -> None:
    before = norm_names()
    run = beside(swap_directory)
    steps(run, 2)
    held = Held(run)
    run.backward(2)
    until(lambda: len(held.reading) == NUM_THREADS, "no norm is computed")
    closing = threading.Thread(target=infinity.close, args=(run.model,), daemon=True)
    closing.start()
    closing.join(SHORT_S)
    assert closing.is_alive(), "it did not wait"
    held.release()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and norm_names() <= before


def test_a_model_that_is_dropped_ends_its_threads(swap_directory: Path) -> None:
    run = beside(swap_directory)
    steps(run, 3)
    assert norm_names()
    del run
    gc.collect()
    until(lambda: not norm_names(), "the threads go on")


@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
def test_what_a_task_raises_reaches_the_step_and_the_next_look_measures_again(
    swap_directory: Path, gradients: str
) -> None:
    expected = plain_run(lambda run: steps(run, 4))[4:]
    run = beside(swap_directory, gradients=gradients)
    steps(run, 3)
    norms = norms_of(run)
    measure = norms.measure

    def fail(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        raise ZeroDivisionError("a mistake in a norm")

    norms.measure = fail
    run.backward(3)
    let_norms_finish(run)
    norms.measure = measure
    with pytest.raises(ZeroDivisionError, match="a mistake in a norm"):
        run.step(1e-3)
    while True:  # Each norm that has failed is told once.
        try:
            run.step(1e-3)
            break
        except ZeroDivisionError:
            pass
    actual = list(run.values().values())
    infinity.close(run.model)
    assert same_bits(expected, actual)


class Layouts(torch.nn.Module):
    """Parameters of several layouts, one larger than what torch divides over threads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.large = torch.nn.Parameter(torch.randn(300, 1000))
        self.turned = torch.nn.Parameter(torch.randn(700, 200).t())
        self.images = torch.nn.Parameter(
            torch.randn(16, 8, 9, 9).to(memory_format=torch.channels_last)
        )
        self.scalar = torch.nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((p * p * x).sum() for p in self.parameters())  # type: ignore[return-value]


@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_norms_have_the_bits_of_plain_pytorch_for_any_number_of_threads(
    swap_directory: Path, gradients: str, num_threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        plain = Layouts()
        config = config_of(swap_directory, gradients=gradients)
        model = infinity.offload(Layouts(), config, device=SimulatedDevice())
        optimizer = infinity.AdamW(model, lr=0.0, max_grad_norm=1e6)
        found: list[int] = []
        measure = norms_of(Side(model, optimizer)).measure

        def told(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
            found.append(torch.get_num_threads())
            return measure(flat, spec)

        infinity.engine_of(model).gradients.norms.measure = told
        for step in range(3):
            x = torch.tensor(1.0 + step)
            plain.zero_grad()
            plain(x).backward()
            model(x).backward()
            optimizer.step()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e6)
            assert optimizer.grad_norm is not None and torch.equal(optimizer.grad_norm, norm)
            optimizer.zero_grad()
        assert set(found) == {num_threads} and len(found) == 3 * 4
        infinity.close(model)
    finally:
        torch.set_num_threads(before)


def test_the_pool_is_a_part_of_the_threads_that_updates_have() -> None:
    assert [norm_threads(own) for own in (1, 2, 4, 12, 16, 64)] == [1, 1, 2, 6, 8, 8]


@pytest.mark.parametrize(
    "schedule",
    [{"updates": "at_step"}, {"updates": "deferred", "update_on": "device"}],
    ids=["at-the-step", "on-the-device"],
)
def test_norms_are_taken_beside_the_backward_where_nothing_is_updated_there(
    swap_directory: Path, schedule: dict[str, str]
) -> None:
    threads: list[str] = []

    def body(run: Side) -> list[torch.Tensor]:
        if not run.is_plain:
            told_by(run, threads)
        for number in range(4):
            run.backward(number)
            if not run.is_plain:
                let_norms_finish(run)
            run.step(1e-3)
        return []

    compare(body, beside(swap_directory, gradients="host", schedule=schedule))
    assert len(threads) == 4 * NUM_TENSORS
    # The first step does not know what to expect.
    assert all(name.startswith(THREAD_NAME) for name in threads[NUM_TENSORS:])
