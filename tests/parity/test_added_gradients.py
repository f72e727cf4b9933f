"""Several backward passes in a step beside a device: gradients are added to sums on the host while
the next ones are computed. No backward waits for a copy, and no bit changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.streaming.gradients.leaving import GradientStaging, LeavingGradients
from infinity.streaming.gradients.store import GradientStore
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.streams import StreamCopy
from tests.support.two_sides import Side, compare, offloaded

NUM_STEPS, NUM_BACKWARDS = 3, 3


def accumulating(run: Side) -> list[torch.Tensor]:
    for step in range(NUM_STEPS):
        for number in range(NUM_BACKWARDS):
            run.backward(10 * step + number)
        if step == 1:  # A look in between waits for all that is due.
            run.backward(7)
        run.step(0.5)
    return []


def late(directory: Path, **changes: Any) -> Side:
    return offloaded(directory, device=SimulatedDevice(5, delay_s=1e-3), **changes)


def limited_to(num_more: int, are_refused: list[bool] | None = None) -> Any:
    """`GradientStaging.take` of so many blocks beside the first two; notes which calls got none."""
    take = GradientStaging.take

    def limited(staging: GradientStaging) -> Any:
        staging._most_more = num_more
        block = take(staging)
        if are_refused is not None:
            are_refused.append(block is None)
        return block

    return limited


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_no_gradient_is_waited_for_while_a_staging_block_is_free(
    gradients: str, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies by the piece, of which there are more than two; the worker makes additions."""
    monkeypatch.setattr("infinity.streaming.gradients.leaving.STAGED_NBYTES", 16 << 10)
    taking, waits, added = threading.local(), [], []
    add, wait, end = GradientStore.add, StreamCopy.wait, LeavingGradients._end_oldest

    def note_add(store: GradientStore, *arguments: Any, **named: Any) -> None:
        taking.is_on = True
        add(store, *arguments, **named)
        taking.is_on = False

    def note_wait(copy: StreamCopy) -> None:
        if getattr(taking, "is_on", False) and not copy.done():
            waits.append(copy)
        wait(copy)

    def note_end(leaving: LeavingGradients) -> None:
        if leaving.gradients[0].block is not None:
            added.append(threading.current_thread().name)
        end(leaving)

    monkeypatch.setattr(GradientStaging, "take", limited_to(1000))
    monkeypatch.setattr(GradientStore, "add", note_add)
    monkeypatch.setattr(StreamCopy, "wait", note_wait)
    monkeypatch.setattr(LeavingGradients, "_end_oldest", note_end)
    compare(accumulating, late(swap_directory, gradients=gradients))
    assert not waits and len(added) > 100 and "infinity-updates" in added


def test_two_staging_blocks_suffice(swap_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.streaming.gradients.leaving.STAGED_NBYTES", 16 << 10)
    are_refused: list[bool] = []
    monkeypatch.setattr(GradientStaging, "take", limited_to(0, are_refused))
    compare(accumulating, late(swap_directory))
    assert any(are_refused) and not all(are_refused)


def test_gradients_that_are_dropped_meanwhile_leave_nothing(swap_directory: Path) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        run.backward(0, 1)
        run.optimizer.zero_grad()
        run.backward(2, 3)
        seen = [run.gradient("blocks.1.up.weight"), run.gradient("embedding.weight")]
        run.step(0.5)
        return seen

    compare(body, late(swap_directory))
