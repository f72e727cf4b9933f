"""Gradients that rest on NVMe stay in free memory until their update: they are neither written nor
read. Their memory is that of whoever needs it more. No bit changes because of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.engine import Engine
from infinity.state.store import LocalStore
from infinity.state.units import StateKind
from infinity.streaming.updates.staging_ring import StagingRing
from tests.support.two_sides import Side, compare, loss_of, plain_run, same_bits

from .test_spare_slots import CLIPPED, LateWrites, on_a_late_drive

NUM_STEPS = 5


def clipped_steps(run: Side) -> list[torch.Tensor]:
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


def offloaded_run(directory: Path, capacity: str, updates: str) -> tuple[Side, Engine, LateWrites]:
    return on_a_late_drive(
        directory, gradients="nvme", schedule={"updates": updates},
        tiers={"host": {"capacity": capacity, "huge_pages": False}, "nvme": [{"path": str(directory)}]},
    )  # fmt: skip


class Moved:
    """Counts transfers of gradients by the drive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reads = self.num_writes = 0
        read, write = LocalStore.read, LocalStore.write

        def note_read(store: Any, unit: Any, kind: StateKind, *more: Any, **named: Any) -> Any:
            self.num_reads += kind is StateKind.GRADIENTS
            return read(store, unit, kind, *more, **named)

        def note_write(store: Any, unit: Any, kind: StateKind, *more: Any, **named: Any) -> Any:
            self.num_writes += kind is StateKind.GRADIENTS
            return write(store, unit, kind, *more, **named)

        monkeypatch.setattr(LocalStore, "read", note_read)
        monkeypatch.setattr(LocalStore, "write", note_write)


@pytest.mark.parametrize("updates", ["deferred", "both_passes", "at_step"])
def test_gradients_in_memory_are_neither_written_nor_read(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    expected = plain_run(clipped_steps)
    run, engine, _ = offloaded_run(swap_directory, "64MiB", updates)
    moved = Moved(monkeypatch)
    losses = clipped_steps(run)
    assert moved.num_reads == moved.num_writes == 0
    actual = [*losses, *run.values().values()]  # A look at all weights has everything at rest.
    engine.close()
    assert same_bits(expected, actual)


@pytest.mark.parametrize("updates", ["deferred", "both_passes", "at_step"])
def test_gradients_are_written_as_far_as_memory_does_not_hold_them(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    expected = plain_run(clipped_steps)
    moved, counts = Moved(monkeypatch), []
    for capacity in ("1300KiB", "1900KiB", "2500KiB", "64MiB"):
        run, engine, _ = offloaded_run(swap_directory, capacity, updates)
        before = moved.num_writes
        losses = clipped_steps(run)
        counts.append(moved.num_writes - before)
        actual = [*losses, *run.values().values()]
        engine.close()
        assert same_bits(expected, actual), capacity
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0, counts
    assert any(counts[0] > count > 0 for count in counts), counts


def test_no_sum_is_written_while_all_have_memory_and_one_is_if_others_need_a_byte(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_nbytes = [0, -1, 0]

    def backwards(run: Side) -> list[torch.Tensor]:
        found = []
        for number in range(4):
            loss = loss_of(run.model, number)
            loss.backward()
            found.append(loss.detach().clone())
            if not run.is_plain and spare_nbytes:
                counts.append(moved.num_writes)
                engine.gradients.in_blocks._blocks.spare_nbytes = partial(int, spare_nbytes.pop(0))
        run.step(CLIPPED)
        return found

    counts: list[int] = []
    run, engine, _ = offloaded_run(swap_directory, "64MiB", "deferred")
    moved = Moved(monkeypatch)
    compare(backwards, run)
    assert counts == [0, 0, 1] and moved.num_writes == 1


@pytest.mark.parametrize("updates", ["deferred", "both_passes"])
def test_a_forgotten_gradient_is_written_before_its_memory_goes_if_an_update_awaits_it(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    def steps(run: Side) -> list[torch.Tensor]:
        found = []
        for number in range(NUM_STEPS):
            loss = loss_of(run.model, number)
            loss.backward()
            found.append(loss.detach().clone())
            run.step(CLIPPED)
            if not run.is_plain:
                take_all(infinity.engine_of(run.model))
        return found

    def take_all(engine: Engine) -> None:
        """As somebody who needs all memory."""
        pending = [unit for unit in engine.gradients.in_blocks.units() if is_pending(unit.index)]
        before = moved.num_writes
        while engine.gradients.reclaim(waits=False):
            pass
        assert engine.gradients.in_blocks.units() == pending and moved.num_writes == before
        while engine.gradients.reclaim():
            pass
        assert moved.num_writes == before + len(pending) > before

    run, engine, _ = offloaded_run(swap_directory, "64MiB", updates)
    is_pending, moved = engine.updater.is_pending, Moved(monkeypatch)
    compare(steps, run)
    assert moved.num_reads > 0


def test_memory_of_forgotten_gradients_is_for_who_asks(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`try_allocate` waits for nothing and takes nothing that somebody needs."""
    run, engine, _ = offloaded_run(swap_directory, "64MiB", "at_step")
    moved = Moved(monkeypatch)
    run.backward(0)
    held = engine.gradients.in_blocks.units()
    run.step()
    assert engine.gradients.in_blocks.units() == held and held
    blocks = []
    while (block := engine.pool.try_allocate(64 << 10, "somebody")) is not None:
        blocks.append(block)
    assert not engine.gradients.in_blocks.units()
    assert moved.num_reads == moved.num_writes == 0
    for block in blocks:
        engine.pool.free(block)
    engine.close()


@pytest.mark.parametrize("updates", ["deferred", "both_passes"])
def test_state_that_is_read_a_pass_ahead_leaves_space_for_the_sums_to_come(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    """A sum that stays in memory saves a read; a spare slot only moves one."""
    run, engine, drive = offloaded_run(swap_directory, "4500KiB", updates)
    drive.is_idle = True
    grow, spare, to_come = StagingRing._grow, engine.pool.spare, 0.0

    def note_grow(ring: StagingRing, *, is_for_later: bool = False) -> bool:
        nonlocal to_come
        is_grown = grow(ring, is_for_later=is_for_later)
        if is_for_later:
            to_come = max(to_come, spare.sums_to_come_nbytes)
            assert not is_grown or engine.pool.free_nbytes >= spare.sums_to_come_nbytes
        return is_grown

    monkeypatch.setattr(StagingRing, "_grow", note_grow)
    compare(clipped_steps, run)
    assert to_come > 0
