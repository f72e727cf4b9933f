"""Waiting for norms that are computed beside the thread that trains."""

from __future__ import annotations

import threading
import time

import torch

import infinity
from infinity.state.units import TensorSpec
from infinity.streaming.gradients.tensors import CompleteSums, TensorGradient
from tests.support.two_sides import Side


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
    engine, deadline_s = infinity.engine_of(run.model), time.monotonic() + 60
    with engine._lock:
        engine.gradients.finish_copies()
    while not all(map(is_over, tasks_of(run))):
        assert time.monotonic() < deadline_s, "nobody computes the norms"
        time.sleep(1e-3)
