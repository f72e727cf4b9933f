"""Updates in the backward on a device with memory of its own: a thread of the engine's makes them.

The bits are those of plain PyTorch whatever the thread has got to when somebody else looks.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError, StorageError
from infinity.streaming.gradients.leaving import LeavingGradients
from infinity.streaming.updates import unit_update
from infinity.streaming.updates.turns import UpdateTurns
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate
from infinity.streaming.updates.updater import Updater
from infinity.streaming.updates.worker import LooseWork
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.device import Copy
from tests.support.exhaustive import sampled
from tests.support.two_sides import (
    Side,
    compare,
    loss_of,
    make,
    offloaded,
    plain_run,
    same_bits,
    steps,
)

WORKER = "infinity-updates"


def beside(directory: Path, seed: int = 0, **changes: Any) -> Side:
    return offloaded(directory, device=SimulatedDevice(seed, delay_s=1e-4), **changes)


def early_of(run: Side) -> UpdateTurns:
    updater = infinity.engine_of(run.model).updater
    assert isinstance(updater, Updater)
    return updater._turns


def let_worker_finish(run: Side) -> None:
    """Waits until the worker has updated every unit whose weights it has."""
    if run.is_plain:
        return
    early, deadline_s = early_of(run), time.monotonic() + 60
    while early._checked_out:
        assert time.monotonic() < deadline_s, "the worker does not go on by itself"
        time.sleep(1e-3)


def workers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == WORKER]


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_the_worker_updates_while_nobody_calls_the_engine(
    swap_directory: Path, gradients: str
) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        for number in range(8):
            run.backward(number)
            let_worker_finish(run)
            run.step()
        return []

    before = set(workers())  # Of engines that failed in other tests, and are not collected yet.
    run = beside(swap_directory, gradients=gradients)
    [worker] = set(workers()) - before
    counters = compare(body, run)
    assert counters["early_updates_kept"] > 0
    assert not counters.get("early_updates_undone")
    assert not worker.is_alive(), "closing ends the thread"


ALL_ON_HOST = dict.fromkeys(("parameters", "master", "moments"), "host")


def test_the_backward_goes_on_while_a_chunk_is_updated(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-26: the arithmetic of a chunk does not hold the engine's lock, which every gradient
    takes."""
    run = beside(swap_directory, placement=ALL_ON_HOST)
    seen = steps(run, 3)
    is_updating, goes_on = threading.Event(), threading.Event()
    was_held_up: list[bool] = []
    real = unit_update.update_chunk

    def slow(*arguments: Any) -> None:
        if threading.current_thread().name == WORKER and not is_updating.is_set():
            is_updating.set()
            was_held_up.append(not goes_on.wait(60))
        real(*arguments)

    loss = loss_of(run.model, 3)  # It needs the weights that the worker updates before it.
    monkeypatch.setattr(unit_update, "update_chunk", slow)
    first: nn.Module = run.model.blocks[0]  # The last in the backward but the embedding.
    hook = first.register_full_backward_hook(lambda *_: is_updating.wait(60) and None)
    loss.backward()
    hook.remove()
    goes_on.set()
    assert is_updating.is_set(), "the worker has updated nothing"
    run.step()
    expected = plain_run(lambda run: steps(run, 4))
    assert same_bits(expected, [*seen, loss.detach(), *run.values().values()])
    assert not any(was_held_up), "gradients waited for the update"
    infinity.close(run.model)


def test_the_newest_unit_is_first_where_all_state_rests_on_the_host(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the backward does not get to is then what the next forward needs last."""
    run = beside(swap_directory, placement=ALL_ON_HOST)
    steps(run, 3)
    early = early_of(run)
    monkeypatch.setattr(UpdateTurns, "turn", lambda early: None)  # The worker does nothing.
    run.backward(3)
    complete = list(early._to_make)
    assert len(complete) > 3 and list(early._in_turn()) == complete[::-1]
    begun = early._to_make[complete[0]]
    begun.is_begun = True
    assert list(early._in_turn()) == [complete[0], *complete[:0:-1]]
    begun.is_begun = False
    run.step()
    infinity.close(run.model)


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_is_interrupted_anywhere_changes_no_bit(
    swap_directory: Path, seed: int
) -> None:
    """Looks, clipping and further backwards come while the worker is somewhere."""
    draw = torch.Generator().manual_seed(seed)

    def body(run: Side) -> list[torch.Tensor]:
        draw.manual_seed(seed)
        seen = steps(run, 3)
        for number in range(3, 12):
            run.backward(number)
            time.sleep(0.004 * float(torch.rand((), generator=draw)))
            event = int(torch.randint(5, (), generator=draw))
            if event == 0:
                seen.append(run.weight("blocks.3.up.weight"))
            elif event == 1:
                run.backward(100 + number)
            elif event == 2:
                with torch.no_grad():
                    seen.append(loss_of(run.model, 200 + number))
            run.step(1e-3 if event == 3 else 1e6)
        return seen

    changes = {"placement": ALL_ON_HOST} if seed % 2 else {}
    compare(body, beside(swap_directory, seed, **changes))


def test_the_lock_is_free_while_the_end_of_a_backward_waits_for_the_device(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last hook has run long before most gradients are on the host."""

    run = offloaded(swap_directory, device=SimulatedDevice(delay_s=2e-3))
    lock, wait, were_free = infinity.engine_of(run.model)._lock, LeavingGradients._wait, []

    def look() -> None:
        were_free.append(lock.acquire(timeout=30))
        lock.release()

    def watched(leaving: LeavingGradients, copy: Copy) -> None:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        wait(leaving, copy)

    monkeypatch.setattr(LeavingGradients, "_wait", watched)
    compare(lambda run: steps(run, 3), run)
    assert were_free and all(were_free)


def test_what_the_worker_raises_reaches_the_thread_that_trains(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, has_failed = beside(swap_directory), threading.Event()
    steps(run, 3)

    def fail(early: UpdateTurns, unit: int) -> bool:
        has_failed.set()
        raise ZeroDivisionError("a mistake in an update")

    monkeypatch.setattr(UpdateTurns, "_advance", fail)
    early_of(run).policy.share = 1.0  # It may have found that there is no time.
    with pytest.raises(ZeroDivisionError, match="a mistake in an update"):
        run.backward(3)
        assert has_failed.wait(60), "the worker does not go on by itself"
        run.step()
    infinity.close(run.model)


def test_a_model_that_is_dropped_ends_its_worker(swap_directory: Path) -> None:
    run = beside(swap_directory)
    steps(run, 3)
    del run
    gc.collect()
    deadline_s = time.monotonic() + 60
    while workers():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# -- Updates that a step has decided ---------------------------------------------------------------

PLACEMENTS = {"nvme": {}, "host": ALL_ON_HOST, "both": {"moments": "nvme", "parameters": "host"}}


def updater_of(run: Side) -> Updater:
    updater = infinity.engine_of(run.model).updater
    assert isinstance(updater, Updater)
    return updater


class Stop(torch.nn.Module):
    """A block whose forward waits for the host: until `is_over`, for a minute at most."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block
        self.is_over: Callable[[], bool] = lambda: True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deadline_s = time.monotonic() + 60
        while not self.is_over():
            assert time.monotonic() < deadline_s, "the worker does not go on by itself"
            time.sleep(1e-3)
        return self.block(x)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_the_worker_updates_the_next_units_while_the_model_waits_in_a_block(
    swap_directory: Path, placement: str, gradients: str
) -> None:
    model = make()
    stop = model.blocks[2] = Stop(model.blocks[2])
    run = beside(
        swap_directory, model=model, gradients=gradients, placement=PLACEMENTS[placement],
        schedule={"updates": "deferred"},
    )  # fmt: skip
    assert len(workers()) == 1
    updater = updater_of(run)
    pending = updater._turns.pending
    following = next(
        unit.index for unit in updater._store.units if unit.name.startswith("blocks.3")
    )

    def body(run: Side) -> list[torch.Tensor]:
        losses = steps(run, 4, lambda _: 1e-3)
        if not run.is_plain:
            stop.is_over = lambda: following not in pending
            loss_of(run.model, 4)
        return losses

    compare(body, run)
    assert not workers()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", sampled(range(2), (0).__eq__))
def test_a_worker_of_pending_updates_that_is_interrupted_anywhere_changes_no_bit(
    swap_directory: Path, seed: int, placement: str
) -> None:
    draw = torch.Generator()

    def body(run: Side) -> list[torch.Tensor]:
        draw.manual_seed(seed)
        seen = []
        for number in range(10):
            seen.append(loss_of(run.model, number))
            seen[-1].backward()
            seen[-1] = seen[-1].detach().clone()
            run.step(1e-3)
            time.sleep(0.004 * float(torch.rand((), generator=draw)))
            event = int(torch.randint(4, (), generator=draw))
            if event == 0:
                seen.append(run.weight("blocks.3.up.weight"))
            elif event == 1:
                with torch.no_grad():
                    seen.append(loss_of(run.model, 200 + number))
            elif event == 2 and not run.is_plain:
                updater = updater_of(run)
                with infinity.engine_of(run.model)._lock:  # As if memory were short.
                    assert updater._worker is not None
                    updater.advance()
                    while updater._turns.reclaim():
                        pass
                assert not updater._ring.is_taken or not updater._ring.travelling
        return seen

    changes = {"schedule": {"updates": "deferred"}, "placement": PLACEMENTS[placement]}
    compare(body, beside(swap_directory, seed, **changes))


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_read_that_fails_in_the_worker_is_met_by_who_needs_the_unit(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    run = beside(swap_directory, schedule={"updates": "deferred"})
    steps(run, 2, lambda _: 1e-3)
    real, has_failed = ChunkUpdates.try_next, threading.Event()

    def fail(self: ChunkUpdates, update: UnitUpdate, *others: Any) -> LooseWork | None:
        if update.is_begun is not is_begun:
            return real(self, update, *others)
        has_failed.set()
        raise StorageError(5, operation="read", path="p", offset_nbytes=0, nbytes=4096)

    monkeypatch.setattr(ChunkUpdates, "try_next", fail)
    if is_begun:
        with pytest.raises(InfinityError, match="halfway"):
            steps(run, 1, lambda _: 1e-3, start=2)
            assert has_failed.wait(60), "the worker does not go on by itself"
            steps(run, 1, lambda _: 1e-3, start=3)
    else:
        steps(run, 3, lambda _: 1e-3, start=2)
        expected = plain_run(lambda run: steps(run, 5, lambda _: 1e-3))[5:]
        assert same_bits(expected, [*run.values().values()])
    assert has_failed.is_set()
    infinity.close(run.model)
