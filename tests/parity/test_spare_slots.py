"""State on its way takes host memory that is free: updated state is written later, and the state
of the next step is read in the backward. No bit and no budget changes because of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import SwapConfig
from infinity.engine.build import build
from infinity.engine.engine import Engine
from infinity.errors import CapacityError
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import chunks_of
from infinity.streaming.updates.updater import Updater
from infinity.testing.faulty_engine import WrappedEngine
from tests.support.exhaustive import sampled
from tests.support.two_sides import (
    Side,
    compare,
    config_of,
    loss_of,
    make,
    plain_run,
    same_bits,
    steps,
)

CLIPPED = 1e-3  # Every gradient is longer.


def clipped_steps(run: Side) -> list[torch.Tensor]:
    return steps(run, 4, lambda _: CLIPPED)


class LateWrites(WrappedEngine):
    """A drive that has no time for state: writes seem to be under way until somebody waits for
    them, or `is_idle`."""

    def __init__(self, engine: StorageEngine) -> None:
        super().__init__(engine, "late")
        self.is_idle = False

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        ticket = self._engine.submit(operation, segments, priority)
        return _Late(ticket, self) if operation == "write" else ticket


class _Late:
    def __init__(self, ticket: Ticket, engine: LateWrites) -> None:
        self._ticket, self._engine, self._was_awaited = ticket, engine, False

    def done(self) -> bool:
        return (self._was_awaited or self._engine.is_idle) and self._ticket.done()

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return self._ticket.passages()

    def wait(self) -> None:
        self._ticket.wait()
        self._was_awaited = True


def on_a_late_drive(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    kind: type[LateWrites] = LateWrites,
    **changes: Any,
) -> tuple[Side, Engine, LateWrites]:
    drives: list[LateWrites] = []

    def wrap(engine: StorageEngine) -> StorageEngine:
        drives.append(kind(engine))
        return drives[0]

    model = make().to(dtype)
    config = SwapConfig.load(config_of(directory, **changes))
    engine = build(
        model, config, weights=None, seed=0, units="auto", device=None, wrap_storage=wrap
    )
    run = Side(model, infinity.AdamW(model, lr=1e-2))
    return run, engine, drives[0]


def ring_of(engine: Engine) -> StagingRing:
    updater = engine.updater
    assert isinstance(updater, Updater)
    return updater._ring


@pytest.mark.parametrize("updates", ["deferred", "both_passes"])
@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_state_of_clipped_steps_is_written_and_read_in_the_backward(
    swap_directory: Path, updates: str, gradients: str
) -> None:
    count = 5
    expected = plain_run(lambda run: steps(run, count, lambda _: CLIPPED))
    run, engine, drive = on_a_late_drive(
        swap_directory, gradients=gradients, schedule={"updates": updates}
    )
    actual, most_spare, ring = [], 0, ring_of(engine)
    block = run.model.get_submodule("blocks.2")  # The backward has reached others before.
    block.register_full_backward_pre_hook(lambda *_: setattr(drive, "is_idle", True))
    for number in range(count):
        drive.is_idle = False
        loss = loss_of(run.model, number)
        assert ring._num_spare > 0 or number < 1, "the drive has no time for writes"
        most_spare = max(most_spare, ring._num_spare)
        loss.backward()
        actual.append(loss.detach().clone())
        run.step(CLIPPED)
    counters = engine.counters.snapshot()
    actual += run.values().values()
    engine.flush()
    assert most_spare > 0 and not ring._num_spare, "state at rest takes no memory"
    engine.close()
    assert same_bits(expected, actual)
    assert not counters.get("early_updates_undone")
    # All that the forwards updated was held back, and all of it was read again in the backward.
    assert counters["state_held_back_nbytes"] > 0
    num_chunks = sum(
        len(chunks_of(unit, tuple(unit.trainable()), engine.updater.chunk_nbytes))
        for unit in engine.store.units
    )
    assert counters["chunks_read_in_backward"] >= num_chunks * (count - 2)


def test_a_block_that_others_need_takes_the_memory_of_spare_slots(swap_directory: Path) -> None:
    """Also while each of them is being written, and while state is read ahead into them."""
    run, engine, _ = on_a_late_drive(swap_directory, schedule={"updates": "deferred"})
    ring, pool = ring_of(engine), engine.pool
    steps(run, 3, lambda _: CLIPPED)
    loss = loss_of(run.model, 3)
    assert ring._num_spare > 4
    for then in (lambda: None, loss.backward):
        then()
        held, label = [], "somebody else's"
        while (block := pool.try_allocate(64 << 10, label)) is not None:
            held.append(block)  # No wait: slots that are being written stay.
        spare = ring._num_spare
        held.append(pool.require(64 << 10, label))
        assert spare == 0 or ring._num_spare < spare
        for block in held:
            pool.free(block)
    run.step(CLIPPED)
    expected = plain_run(clipped_steps)[4:]
    assert same_bits(expected, [*run.values().values()])
    engine.close()


def test_weights_that_are_not_cached_yet_count_as_needed(swap_directory: Path) -> None:
    run, engine, _ = on_a_late_drive(swap_directory, schedule={"updates": "deferred"})
    steps(run, 3, lambda _: CLIPPED)
    cache = engine.weight_cache
    absent = sum(w.unit.weight_nbytes for w in cache.weights if w.block is None)
    assert engine.pool.spare.weights_to_come_nbytes == absent
    engine.flush()
    for unit in engine.store.units:
        cache.discard(unit.index)
    assert engine.pool.spare.weights_to_come_nbytes == sum(
        unit.weight_nbytes for unit in engine.store.units
    )
    loss_of(run.model, 3)
    assert engine.pool.free_nbytes >= engine.pool.spare.weights_to_come_nbytes
    engine.close()


@pytest.mark.parametrize("host", ["1500KiB", "2MiB", "3MiB"])
def test_a_host_that_is_full_has_no_spare_slots_and_no_error(
    swap_directory: Path, host: str
) -> None:
    changes = {"tiers": {"host": {"capacity": host}}, "gradients": "nvme"}
    try:
        run, _, _ = on_a_late_drive(swap_directory, **changes)
    except CapacityError as error:
        pytest.fail(f"the budget of this test is too small: {error}")
    compare(clipped_steps, run)


EVENTS: list[Callable[[Side, int, list[torch.Tensor]], None]] = [
    lambda run, number, seen: seen.append(run.weight("blocks.3.up.weight")),
    lambda run, number, seen: seen.append(run.gradient("blocks.1.up.weight")),
    lambda run, number, seen: run.backward(100 + number),
    lambda run, number, seen: write(run, "blocks.2.down.weight", 0.5),
    lambda run, number, seen: scale(run, 3, 0.7),
    lambda run, number, seen: seen.append(look(run, 200 + number)),
    lambda run, number, seen: seen.append(moment(run, "blocks.4.up.weight")),
    lambda run, number, seen: run.optimizer.zero_grad(),
    lambda run, number, seen: None,
]


def write(run: Side, name: str, factor: float) -> None:
    value = run.weight(name) * factor
    if run.is_plain:
        run.model.get_parameter(name).data.copy_(value)
    else:
        infinity.engine_of(run.model).write_parameter(name, value)


def scale(run: Side, block: int, factor: float) -> None:
    module = run.model.get_submodule(f"blocks.{block}.up")
    with torch.no_grad(), nullcontext() if run.is_plain else infinity.gather(module, modify=True):
        module.get_parameter("weight").mul_(factor)


def look(run: Side, number: int) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(run.model, number)


def moment(run: Side, name: str) -> torch.Tensor:
    found = run.optimizer.state[run.model.get_parameter(name)]["exp_avg"]
    assert isinstance(found, torch.Tensor)
    return found.clone()


@pytest.mark.parametrize("seed", range(4))
def test_whoever_looks_or_changes_anything_at_any_time_sees_what_plain_pytorch_has(
    swap_directory: Path, seed: int
) -> None:
    run, _, drive = on_a_late_drive(
        swap_directory,
        gradients=("host", "nvme")[seed % 2],
        schedule={"updates": ("deferred", "both_passes")[seed // 2]},
    )
    drive.is_idle = seed % 2 == 0
    counters = compare(lambda run: eventful_steps(run, seed), run)
    assert counters["chunks_read_in_backward"] > 0


def eventful_steps(run: Side, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    seen = steps(run, 2, lambda _: CLIPPED)
    for number in range(2, 14):
        run.backward(number)
        EVENTS[int(torch.randint(len(EVENTS), (), generator=draw))](run, number, seen)
        is_clipped = int(torch.randint(4, (), generator=draw))
        run.step(CLIPPED if is_clipped else 1e6)
        if not int(torch.randint(3, (), generator=draw)):
            seen.append(run.weight("blocks.0.up.weight"))
    return seen


@pytest.mark.parametrize("seed", sampled(range(3), (0).__eq__))
def test_masters_that_change_with_their_weights_are_read_again(
    swap_directory: Path, seed: int
) -> None:
    """bfloat16: a weight that is set has a new residual, which may have been read ahead."""
    found = []
    for updates in ("at_step", "deferred", "both_passes"):
        run, engine, drive = on_a_late_drive(
            swap_directory, torch.bfloat16, schedule={"updates": updates}
        )
        drive.is_idle = True
        found.append([*eventful_steps(run, seed), *run.values().values()])
        engine.close()
    for actual in found[1:]:
        assert same_bits(found[0], actual)


class BusyWithState(LateWrites):
    """A drive that has no time for writes behind everything else, but for other requests."""

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        ticket = super().submit(operation, segments, priority)
        if isinstance(ticket, _Late) and priority is not Priority.WRITE_BACK:
            return ticket._ticket
        return ticket


def test_no_use_of_weights_waits_behind_updated_state(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward begins with the units that the forward has updated last."""
    expected = plain_run(clipped_steps)
    run, engine, _ = on_a_late_drive(
        swap_directory, kind=BusyWithState, schedule={"updates": "deferred"}
    )
    actual, ring = steps(run, 3, lambda _: CLIPPED), ring_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(_Late, "wait", lambda *_: pytest.fail("waits for an idle drive"))
        loss = loss_of(run.model, 3)
        loss.backward()
        run.step(CLIPPED)
        assert ring._num_spare > 0 and ring.held_back_nbytes() > 0
    actual += [loss.detach(), *run.values().values()]
    engine.close()
    assert same_bits(expected, actual)
