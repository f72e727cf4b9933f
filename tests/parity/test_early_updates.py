"""Updates in the backward: whatever the step decides, the bits are those of plain PyTorch.

The model is small, its state rests on NVMe or on the host, and a look at `early_updates_kept` and
`early_updates_undone` says which of the two ways was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import infinity
from infinity.state.units import Chunk
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.updater import Updater
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.exhaustive import in_turn, sampled
from tests.support.two_sides import (
    BLOCKS,
    Body,
    Model,
    Parent,
    Side,
    Tied,
    compare,
    idle_drives,
    layer_major_steps,
    loss_of,
    make,
    offloaded,
    plain_run,
    same_bits,
    steps,
)

UP = "blocks.3.up.weight"
# What rests on the host, and whether a device computes.
PLACES: dict[str, tuple[tuple[str, ...], bool]] = {
    "nothing": ((), False),
    "weights": (("parameters",), False),
    "moments beside a device": (("moments",), True),
    "all beside a device": (("parameters", "master", "moments"), True),
}


@pytest.fixture(autouse=True)
def drives() -> Iterator[None]:
    with idle_drives():
        yield


def run_at(place: str, directory: Path, kind: type[Model] = Model, **changes: Any) -> Side:
    on_host, has_device = PLACES[place]
    changes["placement"] = dict.fromkeys(on_host, "host") | changes.get("placement", {})
    device = SimulatedDevice() if has_device else None
    return offloaded(directory, device=device, model=make(kind), **changes)


# -- What comes between the backward and the next one -----------------------------------------------


def at_another_rate(run: Side) -> list[torch.Tensor]:
    losses = []
    for number in range(5):
        loss = loss_of(run.model, number)
        loss.backward()
        losses.append(loss.detach().clone())
        run.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        run.step()
    return losses


def with_a_schedule(run: Side) -> list[torch.Tensor]:
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.8)
    losses = []
    for number in range(5):
        losses += steps(run, 1, start=number)
        schedule.step()
    return losses


def accumulated(run: Side) -> list[torch.Tensor]:
    for step in range(5):
        for number in range(3):
            (loss_of(run.model, 3 * step + number) / 3).backward()
        run.step()
    return []


def then(event: Callable[[Side], list[torch.Tensor]]) -> Body:
    """Three steps, and a fourth backward that `event` follows; three more steps."""

    def body(run: Side) -> list[torch.Tensor]:
        losses = steps(run, 3)
        run.backward(7)
        return [*losses, *event(run), *steps(run, 3, start=20)]

    return body


def step(run: Side) -> list[torch.Tensor]:
    run.step()
    return []


def another_backward(run: Side) -> list[torch.Tensor]:
    run.backward(8)
    return step(run)


def looks(run: Side) -> list[torch.Tensor]:
    seen = [run.weight(UP), run.gradient(UP)]
    with torch.no_grad():
        seen.append(loss_of(run.model, 9))
    return [*seen, *step(run)]


def looks_at_moments(run: Side) -> list[torch.Tensor]:
    state = run.optimizer.state[run.model.get_parameter(UP)]
    return [state["exp_avg"].clone(), state["exp_avg_sq"].clone(), *step(run)]


def changes_gradients(run: Side) -> list[torch.Tensor]:
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    return step(run)


def leaves_the_step_out(run: Side) -> list[torch.Tensor]:
    run.optimizer.zero_grad()
    return []


class Case(NamedTuple):
    """Whether early updates must have been kept, and undone; None: they may."""

    body: Body
    kept: bool | None
    undone: bool
    kind: type[Model] = Model
    gradients: str = "host"


def at_times(*clipped: int, count: int) -> Body:
    return lambda run: steps(run, count, lambda number: 1e-3 if number in clipped else 1e6)


CASES = {
    "as expected": Case(lambda run: steps(run, 6), True, False),
    "gradients on nvme": Case(lambda run: steps(run, 6), True, False, gradients="nvme"),
    "tied": Case(lambda run: steps(run, 6), True, False, Tied),
    "tied, gradients on nvme": Case(lambda run: steps(run, 6), True, False, Tied, "nvme"),
    "a norm that is never reached": Case(at_times(count=6), True, False),
    # Then updates are left to the forward.
    "every step clipped": Case(at_times(*range(6), count=6), False, False),
    "one step clipped": Case(at_times(4, count=9), True, True),
    # Of a module around the blocks: no write of weights delays their use in the backward.
    "a parent's weights": Case(at_times(5, 8, count=10), True, True, Parent),
    "a parent's, on nvme": Case(at_times(5, 8, count=10), True, True, Parent, "nvme"),
    "another rate at the step": Case(at_another_rate, None, True),
    "a schedule after the step": Case(with_a_schedule, True, False),
    # They are complete after the last.
    "several backwards": Case(accumulated, True, False),
    "layer by layer": Case(layer_major_steps, True, False),
    "one more backward": Case(then(another_backward), True, True),
    # Who looks before the step sees the old weights and the last step's moments.
    "looks": Case(then(looks), True, True),
    "looks at moments": Case(then(looks_at_moments), True, True),
    "changed gradients": Case(then(changes_gradients), True, True),
    "a step left out": Case(then(leaves_the_step_out), True, True),
}


def is_sampled(case: tuple[str, str]) -> bool:
    """Each case in one place, in turn; the first one everywhere."""
    at, place = list(CASES).index(case[0]), list(PLACES).index(case[1])
    return at == 0 or place == at % len(PLACES)


@pytest.mark.parametrize(("name", "place"), sampled(product(CASES, PLACES), is_sampled))
def test_updates_in_the_backward_have_the_bits_of_plain_pytorch(
    swap_directory: Path, name: str, place: str
) -> None:
    body, kept, undone, kind, gradients = CASES[name]
    run = run_at(place, swap_directory, kind, gradients=gradients)
    counters = compare(body, run, kind)
    assert bool(counters.get("early_updates_undone")) is undone, counters
    assert kept is None or bool(counters.get("early_updates_kept")) is kept, counters


@pytest.mark.parametrize("place", ["nothing", "all beside a device"])
def test_a_step_that_is_left_out_costs_the_next_no_early_update(
    swap_directory: Path, place: str
) -> None:
    run = run_at(place, swap_directory)
    counters = infinity.engine_of(run.model).counters

    def kept(numbers: range) -> float:
        before = counters.snapshot()["early_updates_kept"]
        steps(run, len(numbers), start=numbers.start)
        return counters.snapshot()["early_updates_kept"] - before

    policy_of(run).adapts = False
    steps(run, 3)
    usual = kept(range(3, 6))
    run.backward(7)
    run.optimizer.zero_grad()
    assert kept(range(8, 11)) == usual > 0
    infinity.close(run.model)


@pytest.mark.parametrize(("verify", "place"), in_turn([True, False], [*PLACES][1:3]))
def test_a_checkpoint_between_backward_and_step_has_the_old_state(
    swap_directory: Path, tmp_path: Path, verify: bool, place: str
) -> None:
    directory = tmp_path / "checkpoints"
    run = run_at(place, swap_directory, io={"verify": verify}, checkpoint={"keep": 2})
    steps(run, 3)
    before = run.values()
    run.backward(7)
    infinity.checkpoint.save(directory, run.model, run.optimizer, step=3)
    run.step()
    steps(run, 2, start=20)
    infinity.checkpoint.load(directory, run.model, run.optimizer)
    assert same_bits([*before.values()], [*run.values().values()])
    infinity.close(run.model)


def policy_of(run: Side) -> Any:
    updater = infinity.engine_of(run.model).updater
    assert isinstance(updater, Updater)
    return updater._turns.policy


@pytest.mark.parametrize("place", ["nothing", "all beside a device"])
def test_smallest_share_and_largest_share_have_the_same_bits(
    swap_directory: Path, place: str
) -> None:
    def at(share: float) -> list[torch.Tensor]:
        run = run_at(place, swap_directory)
        losses = []
        for number in range(5):
            policy_of(run).share = share
            losses += steps(run, 1, start=number)
        values = [*losses, *run.values().values()]
        infinity.close(run.model)
        return values

    expected = plain_run(lambda run: steps(run, 5))
    assert all(same_bits(expected, at(share)) for share in (0.0, 0.3, 1.0))


def test_state_of_units_that_the_backward_updates_is_read_in_the_forward(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drives have their part of the traffic in both passes, also of a unit's own update."""
    reads: list[str] = []
    read = StagingRing._start

    def note_read(ring: StagingRing, chunk: Chunk) -> Any:
        reads.append(chunk.unit.name)
        return read(ring, chunk)

    monkeypatch.setattr(StagingRing, "_start", note_read)

    def body(run: Side) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for number in range(6):
            if not run.is_plain:
                policy_of(run).share = 1.0
            loss = loss_of(run.model, number)
            before = reads.copy()
            reads.clear()
            loss.backward()
            if not run.is_plain and number > 2:
                # No backward gets to the embedding: a forward updates it, and it is read later.
                assert len(set(before)) == BLOCKS + 1 and {*reads} <= {"embedding"}
            reads.clear()
            losses.append(loss.detach())
            run.step()
        return losses

    counters = compare(body, run_at("nothing", swap_directory))
    assert counters["early_updates_kept"] and not counters.get("early_updates_undone")


@pytest.mark.parametrize(("has_device", "on_host"), in_turn([False, True], [("parameters",), ()]))
def test_kept_and_undone_updates_of_moments_of_eight_bits_have_the_bits_of_updates_at_the_step(
    swap_directory: Path, on_host: tuple[str, ...], has_device: bool
) -> None:
    """Their spare generation belongs to early updates alone."""
    placement = dict.fromkeys(on_host, "host")

    def trained(updates: str) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Losses, weights and moments after nine steps, and the engine's counters."""
        run = offloaded(
            swap_directory, device=SimulatedDevice() if has_device else None, placement=placement,
            tiers={"host": {"capacity": "32MiB", "huge_pages": False}},
            precision={"moments": "8bit"}, schedule={"updates": updates, "update_chunk": "16MiB"},
        )  # fmt: skip
        found = [*at_times(4, count=9)(run), *run.values().values()]
        for parameter in run.model.parameters():
            state = run.optimizer.state[parameter]
            found += [torch.as_tensor(value).clone() for value in state.values()]
        counters = infinity.engine_of(run.model).counters.snapshot()
        infinity.close(run.model)
        return found, counters

    expected, at_step = trained("at_step")
    found, counted = trained("both_passes")
    assert same_bits(expected, found)
    assert not at_step.get("early_updates_kept")
    assert counted["early_updates_kept"] and counted["early_updates_undone"], counted
