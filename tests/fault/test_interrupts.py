"""Ctrl-C at any moment of a step: afterwards the same step gives the bits it would have given."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from infinity.modules.interrupts import uninterrupted
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
def interrupted_after(delay_s: float) -> Iterator[threading.Event]:
    """Sends this process a SIGINT from a timer. Yields whether it has."""
    is_sent = threading.Event()

    def send(*unused: object) -> None:
        is_sent.set()
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, send)
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    try:
        yield is_sent
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_waits_for_the_end() -> None:
    order = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                order.append("inner")
            order.append("outer")
        order.append("never")
    assert order == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_at_random_moments_the_steps_are_the_same(swap_directory: Path) -> None:
    source = random.Random(5)
    expected = plain_steps(mlp(), 25)
    num_interrupts = 0
    with offload(mlp(), swap_config(swap_directory)) as engine:
        model = engine.model
        optimizer = optimizer_of(model)
        for step in range(25):
            try:
                with interrupted_after(source.uniform(0.0002, 0.02)) as is_sent:
                    while not is_sent.is_set():  # However fast the machine is.
                        loss_of(model, step).backward()
                        loss_of(model, step)  # More to interrupt; its graph is dropped.
            except KeyboardInterrupt:
                num_interrupts += 1
            optimizer.zero_grad()
            offloaded_step(model, optimizer, step)
        assert_same(expected, weights_of(model))
    assert num_interrupts >= 20, "one that comes in a finalizer is lost"
    assert torch.isfinite(expected[next(iter(expected))]).all()
