"""What the worker reads and has changed, while others want its memory or meet an error there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.engine import Engine
from infinity.errors import DeviceError, StorageError
from infinity.storage.protocol import Priority, Transfer
from infinity.streaming.updates import unit_update
from infinity.streaming.weights.state import WeightState
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.host import HostPool
from infinity.tiers.streams import StreamCopy
from tests.support.two_sides import Side, compare, loss_of, offloaded, same_bits, steps

from . import test_narrow_sums as narrow
from .test_update_worker import WORKER, beside, early_of, let_worker_finish, updater_of

HELD_S = 1.0  # Long beside a pass.


class HeldUpdates:
    """Holds the worker in its first update of a chunk, until `go_on` or for `HELD_S`."""

    def __init__(self) -> None:
        self.is_held, self._goes_on = threading.Event(), threading.Event()
        self._real = unit_update.update_chunk
        self.wanted: Callable[[Any], bool] = lambda _: True

    def update(self, staged: Any, *arguments: Any) -> None:
        is_worker = threading.current_thread().name == WORKER
        if is_worker and not self.is_held.is_set() and self.wanted(staged):
            self.is_held.set()
            self._goes_on.wait(HELD_S)
        self._real(staged, *arguments)

    def go_on(self) -> None:
        self._goes_on.set()


@contextmanager
def held_updates() -> Iterator[HeldUpdates]:
    held = HeldUpdates()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_update, "update_chunk", held.update)
        yield held
        held.go_on()


def overwrite_free_memory(pool: HostPool) -> None:
    blocks, nbytes = [], 1 << 20
    while nbytes >= 4096:
        block = pool.try_allocate(nbytes, "of others")
        if block is None:
            nbytes //= 2
        else:
            pool.tensor(block).fill_(255)
            blocks.append(block)
    for block in blocks:
        pool.free(block)


def take_memory_of_sums(engine: Engine, held: HeldUpdates) -> None:
    assert held.is_held.wait(60), "the worker has updated nothing"
    with engine._lock:
        while engine.gradients.reclaim():
            pass
        overwrite_free_memory(engine.pool)
    held.go_on()


def test_a_sum_that_an_early_update_reads_keeps_its_memory(swap_directory: Path) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        seen = steps(run, 3)
        loss = loss_of(run.model, 3)
        if run.is_plain:
            loss.backward()
        else:
            early_of(run).policy.share = 1.0
            with held_updates() as held:
                loss.backward()
                take_memory_of_sums(infinity.engine_of(run.model), held)
        run.step()
        return seen

    compare(body, beside(swap_directory, gradients="nvme"))


def test_a_sum_that_a_pending_update_reads_keeps_its_memory(swap_directory: Path) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        seen = steps(run, 3)
        if not run.is_plain:
            engine, pending = infinity.engine_of(run.model), updater_of(run)._turns.pending
            block: nn.Module = run.model.blocks[1]
            with held_updates() as held:
                held.wanted = lambda staged: staged.chunk.unit.name.startswith("blocks.3")
                hook = block.register_forward_pre_hook(lambda *_: take_memory_of_sums(engine, held))
                assert pending
                seen.append(loss_of(run.model, 3))
                hook.remove()
            seen[-1].backward()
        else:
            seen.append(loss_of(run.model, 3))
            seen[-1].backward()
        seen[-1] = seen[-1].detach().clone()
        run.step()
        return seen

    compare(body, beside(swap_directory, gradients="nvme", schedule={"updates": "deferred"}))


class FailsOnce(Transfer):
    """A transfer that is over and whose first wait tells an error."""

    def __init__(self) -> None:
        self.has_told = False

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if not self.has_told:
            self.has_told = True
            raise StorageError(5, operation="read", path="p", offset_nbytes=0, nbytes=4096)


@pytest.mark.parametrize("failing", ["read", "write"])
def test_the_old_state_counts_though_new_weights_meet_an_error(
    swap_directory: Path, failing: str
) -> None:
    """A look takes an early update back while its new weights are read again, or written."""

    def body(run: Side) -> list[torch.Tensor]:
        seen = steps(run, 3)
        if not run.is_plain:
            early_of(run).policy.share = 1.0  # It may have found that there is no time.
        run.backward(3)
        if run.is_plain:
            seen.append(run.weight("blocks.3.up.weight"))
        else:
            let_worker_finish(run)
            seen.append(look_among_errors(run))
        run.step(1e-3)
        return [*seen, *steps(run, 1, start=4)]

    def look_among_errors(run: Side) -> torch.Tensor:
        engine, early = infinity.engine_of(run.model), early_of(run)
        [unit] = [u for u in engine.store.units if u.name.startswith("blocks.3")]
        assert early._early[unit.index].is_done
        with engine._lock:
            weights, moves = engine.weight_cache.weights[unit.index], engine.weight_cache._moves
            if weights.block is not None:
                moves.evict(weights)
            if weights.state is WeightState.ATTACHED:
                moves.detach(weights)
            moves.start_read(weights, moves.require(weights), Priority.STATE)
            assert weights.reading is not None
            weights.reading.wait()
            if failing == "read":
                weights.reading = FailsOnce()
            else:
                moves.finish_read(weights)
                weights.writing = FailsOnce()
        if failing == "write":
            with pytest.raises(StorageError):
                run.weight("blocks.3.up.weight")
        return run.weight("blocks.3.up.weight")

    assert compare(body, beside(swap_directory))["early_updates_undone"] > 0


def twice_a_step(run: Side) -> list[torch.Tensor]:
    for number in range(3):
        run.backward(10 * number, 10 * number + 1)
        run.step()
    return []


def test_a_copy_that_fails_in_the_worker_is_met_by_who_needs_the_sum(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No addition is lost: the thread that trains waits for the copy again."""
    real, failures = StreamCopy.wait, 0

    def wait(copy: StreamCopy) -> None:
        nonlocal failures
        if threading.current_thread().name == WORKER:
            failures += 1
            raise DeviceError("a copy has failed", ())
        real(copy)

    monkeypatch.setattr(StreamCopy, "wait", wait)
    compare(twice_a_step, beside(swap_directory, schedule={"updates": "at_step"}))
    assert failures


@pytest.mark.parametrize("updates", ["at_step", "deferred", "both_passes"])
def test_a_step_whose_gradients_did_not_come_changes_nothing(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    run = beside(swap_directory, schedule={"updates": updates})
    twice_a_step(run)
    before = run.values()
    real, is_broken = StreamCopy.wait, False

    def wait(copy: StreamCopy) -> None:
        if is_broken:
            raise DeviceError("a copy has failed", ())
        real(copy)

    monkeypatch.setattr(StreamCopy, "wait", wait)
    is_broken = True
    with pytest.raises(DeviceError):
        run.backward(7, 7)
        run.step()
    is_broken = False
    assert same_bits([*before.values()], [*run.values().values()])
    infinity.close(run.model)


def test_a_look_at_narrow_sums_leaves_them_to_the_worker(tmp_path: Path) -> None:
    """A gradient of another unit waits for its clip factor meanwhile."""
    looks: list[bool] = []

    def body(run: narrow.Run, number: int) -> None:
        if number < narrow.STEPS - 1:
            narrow.plain(run, number)
            return
        engine = infinity.engine_of(run.model)
        scaled, read = engine.store.units[0], engine.store.units[1]
        early_of(run).policy.share = 1.0  # It may have found that there is no time.
        with held_updates() as held:
            held.wanted = lambda staged: staged.chunk.unit is read
            run.backward(number)
            looks.append(held.is_held.wait(60))
            with engine._lock:
                engine.gradients.note_scaled(next(iter(scaled.trainable())), 1.0)
            run.look("blocks.1.up.weight")
            held.go_on()
        run.step()

    wide, _ = narrow.trained(body, tmp_path, is_narrow=False)
    found, _ = narrow.trained(body, tmp_path, is_narrow=True)
    narrow.assert_same(wide, found)
    assert all(looks)


def test_a_gradient_that_comes_without_a_use_waits_for_the_pending_update(
    swap_directory: Path,
) -> None:
    """A graph over a gathered weight, whose backward runs after the step."""

    def body(run: Side) -> list[torch.Tensor]:
        seen = steps(run, 2)
        weight = run.model.blocks[0].up.weight
        if run.is_plain:
            outside = weight.sum()
        else:
            with infinity.gather(run.model.blocks[0]):
                outside = run.model.blocks[0].up.weight.sum()
        run.backward(2)
        run.step()
        outside.backward()
        seen.append(run.gradient("blocks.0.up.weight"))
        run.step()
        return [*seen, *steps(run, 1, start=3)]

    for device in (None, SimulatedDevice(1)):
        schedule = {"updates": "deferred"}
        compare(body, offloaded(swap_directory, device=device, schedule=schedule))
