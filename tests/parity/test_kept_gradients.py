"""Gradients that rest on NVMe stay in free memory until their update: no step waits for their
writes, and no update reads them. No bit changes because of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.state.store import LocalStore
from infinity.state.units import StateKind
from infinity.streaming.gradients import GradientStore
from infinity.streaming.staging_ring import StagingRing

from .test_early_updates import Run, loss_of, plain_run
from .test_spare_slots import CLIPPED, on_a_late_drive

NUM_STEPS = 5


def clipped_steps(run: Run) -> list[torch.Tensor]:
    """Some gradients are kept over the step, so the next backward adds to clipped ones."""
    found = []
    for number in range(NUM_STEPS):
        loss = loss_of(run.model, number)
        loss.backward()
        found.append(loss.detach().clone())
        if number % 2:
            run.step(CLIPPED)
            continue
        if run.is_plain:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIPPED)
        else:
            run.optimizer.max_grad_norm = CLIPPED
        run.optimizer.step()
    return found


@pytest.mark.parametrize("updates", ["deferred", "both_passes", "at_step"])
def test_gradients_in_memory_are_neither_waited_for_at_the_step_nor_read_for_updates(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    expected = plain_run(clipped_steps)
    run, engine, _ = on_a_late_drive(
        swap_directory, gradients="nvme", schedule={"updates": updates},
        tiers={"host": {"capacity": "64MiB", "huge_pages": False}, "nvme": [{"path": str(swap_directory)}]},
    )  # fmt: skip
    waits, reads = [], []
    await_write, read, step = GradientStore._wait_write, LocalStore.read, run.optimizer.step

    def note_wait(store: GradientStore, *arguments: Any) -> None:
        waits.append(arguments)
        await_write(store, *arguments)

    def note_read(store: LocalStore, unit: Any, kind: StateKind, *more: Any, **named: Any) -> Any:
        reads.append(kind)
        return read(store, unit, kind, *more, **named)

    def step_without_waits() -> None:
        before = len(waits)
        step()
        assert len(waits) == before

    monkeypatch.setattr(GradientStore, "_wait_write", note_wait)
    monkeypatch.setattr(LocalStore, "read", note_read)
    monkeypatch.setattr(run.optimizer, "step", step_without_waits)
    actual = [*clipped_steps(run), *run.values().values()]
    engine.close()
    assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
    assert StateKind.GRADIENTS not in reads and len(waits) > 0 and len(reads) > 0


@pytest.mark.parametrize("updates", ["deferred", "both_passes"])
def test_state_that_is_read_a_pass_ahead_leaves_space_for_the_sums_to_come(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    """A sum that stays in memory saves a read; a spare slot only moves one."""
    expected = plain_run(clipped_steps)
    run, engine, drive = on_a_late_drive(
        swap_directory, gradients="nvme", schedule={"updates": updates},
        tiers={"host": {"capacity": "4500KiB", "huge_pages": False}, "nvme": [{"path": str(swap_directory)}]},
    )  # fmt: skip
    drive.is_idle = True
    grow, blocks, to_come = StagingRing._grow, engine.gradients.blocks, 0

    def note_grow(ring: StagingRing, *, is_for_later: bool = False) -> bool:
        nonlocal to_come
        is_grown = grow(ring, is_for_later=is_for_later)
        if is_for_later:
            to_come = max(to_come, blocks.to_come_nbytes)
            assert not is_grown or engine.pool.free_nbytes >= blocks.to_come_nbytes
        return is_grown

    monkeypatch.setattr(StagingRing, "_grow", note_grow)
    actual = [*clipped_steps(run), *run.values().values()]
    engine.close()
    assert to_come > 0
    assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
