"""Ctrl-C at any moment of a step: afterwards the same step gives the bits it would have given."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.engine import Engine
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.state.units import StateKind
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.testing.faulty_engine import WrappedEngine
from infinity.tiers.host import HostPool
from tests.support.bits import assert_same

from .harness import (
    loss_of,
    mlp,
    offload,
    offloaded_step,
    optimizer_of,
    plain_steps,
    swap_config,
    weights_of,
)


@contextmanager
def interrupted_after(
    delay_s: float, number: signal.Signals = signal.SIGINT
) -> Iterator[threading.Event]:
    """Sends this process a signal from a timer. Yields whether it has."""
    is_sent = threading.Event()

    def send() -> None:
        is_sent.set()
        signal.raise_signal(number)

    timer = threading.Timer(delay_s, send)
    timer.start()
    try:
        yield is_sent
    finally:
        timer.cancel()
        timer.join()


def test_an_interrupt_waits_for_the_end() -> None:
    order = []
    with pytest.raises(KeyboardInterrupt):
        with UNINTERRUPTED:
            with UNINTERRUPTED:
                signal.raise_signal(signal.SIGINT)
                order.append("inner")
            order.append("outer")
        order.append("never")
    assert order == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Stopped(Exception):
    """What a program's own handler of a signal raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_interrupted_at_random_moments_the_steps_are_the_same(
    number: signal.Signals, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*unused: object) -> None:
        raise Stopped

    monkeypatch.setattr(sys, "unraisablehook", lambda found: None)  # Of a finalizer.
    before = signal.signal(number, stop)
    source = random.Random(5)
    expected = plain_steps(mlp(), 25)
    num_interrupts = 0
    with offload(mlp(), swap_config(swap_directory)) as engine:
        model = engine.model
        optimizer = optimizer_of(model)
        for step in range(25):
            try:
                with interrupted_after(source.uniform(0.0002, 0.02), number) as is_sent:
                    while not is_sent.is_set():  # However fast the machine is.
                        loss_of(model, step).backward()
                        loss_of(model, step)  # More to interrupt; its graph is dropped.
            except Stopped:
                num_interrupts += 1
            optimizer.zero_grad()
            offloaded_step(model, optimizer, step)
        signal.signal(number, before)
        assert_same(expected, weights_of(model))
    assert num_interrupts >= 20, "one that comes in a finalizer is lost"
    assert torch.isfinite(expected[next(iter(expected))]).all()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Stopped])
def test_whatever_a_signal_raises_in_a_window_the_next_window_has_its_bits(
    raised: type[BaseException], swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two signals come shortly after each other. Nothing hangs, and no block, attribute
    or handler stays as it was in the window."""
    # A signal may come in a finalizer, where Python drops what it raises. The next one would come in
    # pytest's own report of it.
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))
    source, batches = random.Random(7), [torch.full((2, 96), 0.1 * n) for n in range(1, 4)]
    num_raised = 0

    def stop(*unused: object) -> None:
        raise raised

    with offload(mlp(), swap_config(swap_directory)) as engine:
        model = engine.model

        def window() -> list[torch.Tensor]:
            model.zero_grad()
            infinity.forward_backward(model, lambda x: model(x).square().mean(), batches)
            found = [engine.read_gradient(name) for name in engine.parameter_names()]
            return [gradient for gradient in found if gradient is not None]

        expected = window()
        before = signal.signal(signal.SIGALRM, stop)
        try:
            for _ in range(24):
                try:
                    signal.setitimer(signal.ITIMER_REAL, source.uniform(1e-4, 0.05), 0.003)
                    for _ in range(100):
                        window()
                except raised:
                    num_raised += 1
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except raised:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                assert signal.getsignal(signal.SIGALRM) is stop
                assert all(map(torch.equal, expected, window()))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert num_raised >= 20
    assert set(dropped) <= {raised}


class Late:
    """A ticket of a request that is carried out after a while. Its first wait is interrupted."""

    def __init__(self, submit: Callable[[], Ticket]) -> None:
        self._submit = submit
        self._ended = threading.Event()
        self._is_interrupted = False
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        time.sleep(0.2)
        self._submit().wait()
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return []

    def wait(self) -> None:
        if not self._is_interrupted:
            self._is_interrupted = True
            raise KeyboardInterrupt
        self._ended.wait()


class LateDrive(WrappedEngine):
    """The next request of the `operation` is late."""

    def __init__(self, engine: StorageEngine) -> None:
        super().__init__(engine, "late")
        self.operation = ""
        self.late: Late | None = None

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        real = super().submit
        if operation != self.operation or self.late is not None:
            return real(operation, segments, priority)
        self.late = Late(lambda: real(operation, segments, priority))
        return self.late


def read_pages(engine: Engine) -> None:
    with engine.at_rest("a test") as state:
        unit = next(unit for unit in state.units if unit.state_numel)
        list(state.pages(unit, StateKind.EXP_AVG, 0, unit.nbytes(StateKind.EXP_AVG)))


def read_parts(engine: Engine) -> None:
    with engine.at_rest("a test") as state:
        unit = next(unit for unit in state.units if unit.state_numel)
        list(state.parts(unit, StateKind.EXP_AVG))


def write_parts(engine: Engine) -> None:
    with engine.at_rest("a test") as state:
        unit = next(unit for unit in state.units if unit.state_numel)
        for part in state.parts(unit, StateKind.EXP_AVG, keep=True):
            part.values.zero_()


def change_master(engine: Engine, *, keep: bool) -> None:
    with engine.at_rest("a test") as state:
        unit = next(unit for unit in state.units if unit.state_numel)
        spec = unit.trainable()[0]
        with engine.masters._lent(unit, spec, keep=keep) as flat:  # type: ignore[attr-defined]
            flat.zero_()


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("read", read_pages),
        ("read", read_parts),
        ("write", write_parts),
        ("read", lambda engine: change_master(engine, keep=False)),
        ("write", lambda engine: change_master(engine, keep=True)),
    ],
    ids=["pages", "parts", "parts-kept", "master", "master-kept"],
)
def test_a_block_is_freed_behind_its_transfer(
    swap_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    call: Callable[[Engine], None],
) -> None:
    """The wait for a transfer is interrupted, and the drive goes on to use the block."""
    drives: list[LateDrive] = []

    def wrap(engine: StorageEngine) -> StorageEngine:
        drives.append(LateDrive(engine))
        return drives[-1]

    freed: list[bool] = []
    free = HostPool.free

    def noting(pool: HostPool, block: Any) -> None:
        if drives[0].late is not None:
            freed.append(drives[0].late.done())
        free(pool, block)

    model = mlp().to(torch.bfloat16)
    with offload(model, swap_config(swap_directory), wrap_storage=wrap) as engine:
        monkeypatch.setattr(HostPool, "free", noting)
        drives[0].operation = operation
        with pytest.raises(KeyboardInterrupt):
            call(engine)
        assert freed and all(freed)
