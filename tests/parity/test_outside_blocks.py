"""In `infinity.forward_backward` gradients outside of blocks are summed on the device, too, and
leave it once, with the bits of plain accumulation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.streaming.gradients.leaving import LeavingGradients
from infinity.streaming.gradients.tensors import CompleteSums
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.two_sides import BLOCKS, Model, Side, Tied, loss_of, make, offloaded, plain_run

GRADIENT_NBYTES = 4 * sum(parameter.numel() for parameter in Model().parameters())
OUTSIDE_NBYTES = 4 * sum(
    Model().get_parameter(f"{n}.weight").numel() for n in ("embedding", "head")
)
NUM_STEPS = 3


def steps(run: Side, num_micro_batches: int) -> list[torch.Tensor]:
    for step in range(NUM_STEPS):
        numbers = [10 * step + number for number in range(num_micro_batches)]
        if run.is_plain:
            run.backward(*numbers)
        else:
            model = run.model  # The loss does not reach `run`, whose step the test counts.
            infinity.forward_backward(model, lambda seed, m=model: loss_of(m, seed), numbers)
        run.step(0.5)
    return []


def plain_steps(num_micro_batches: int) -> list[torch.Tensor]:
    return plain_run(lambda run: steps(run, num_micro_batches))


def offloaded_steps(
    kind: type[Model], directory: Path, num_micro_batches: int, **changes: Any
) -> tuple[list[torch.Tensor], int, list[int]]:
    """Weights, the most bytes of weights on the device while gradients leave it, and the bytes of
    the sums that were copied or added to, in each step."""
    device = SimulatedDevice(5, delay_s=1e-4)
    run = offloaded(directory, device=device, model=make(kind), **changes)
    left_nbytes, attached_nbytes = list[int](), [0]
    start, add, sent = LeavingGradients.start, LeavingGradients.add, [0]

    def counting(leaving: LeavingGradients, unit: Any, spec: Any, flat: Any, place: Any) -> None:
        sent[0] += place.nbytes
        attached_nbytes.append(device.attached_nbytes)
        start(leaving, unit, spec, flat, place)

    def counting_host(
        leaving: LeavingGradients, unit: Any, spec: Any, flat: Any, place: Any
    ) -> None:
        sent[0] += place.nbytes
        add(leaving, unit, spec, flat, place)

    step = run.step

    def counted_step(max_norm: float | None = None) -> None:
        left_nbytes.append(sent[0])
        sent[0] = 0
        step(max_norm)

    run.step = counted_step  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeavingGradients, "start", counting)
        patch.setattr(LeavingGradients, "add", counting_host)
        steps(run, num_micro_batches)
    weights = list(run.values().values())
    infinity.close(run.model)
    return weights, max(attached_nbytes), left_nbytes


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("count", [2, 4])
def test_gradients_outside_of_blocks_leave_the_device_once(
    count: int, gradients: str, swap_directory: Path
) -> None:
    actual, _, left_nbytes = offloaded_steps(Model, swap_directory, count, gradients=gradients)
    assert all(map(torch.equal, plain_steps(count), actual))
    assert left_nbytes == [GRADIENT_NBYTES] * NUM_STEPS


def test_a_tied_head_waits_on_the_device_for_the_embedding(swap_directory: Path) -> None:
    """From the second step on: of the first nobody knows that more gradients come."""
    reference = steps_in_order(Tied, 3)
    actual, _, left_nbytes = offloaded_steps(Tied, swap_directory, 3)
    assert all(map(torch.equal, reference, actual))
    assert left_nbytes[1:] == [GRADIENT_NBYTES - OUTSIDE_NBYTES // 2] * (NUM_STEPS - 1)


def steps_in_order(kind: type[Model], count: int) -> list[torch.Tensor]:
    """The steps with the engine where device and host are one: sums of tied weights have the
    order of the schedule."""
    model = infinity.offload(make(kind), {"tiers": {"device": {"kind": "cpu"}}})
    run = Side(model, infinity.AdamW(model, lr=1e-2))
    steps(run, count)
    weights = list(run.values().values())
    infinity.close(model)
    return weights


BLOCK_NBYTES = 4 * sum(parameter.numel() for parameter in Model().blocks[0].parameters())


@pytest.mark.parametrize("has_space", [True, False])
def test_sums_take_their_memory_of_the_window_for_weights(
    has_space: bool, swap_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without space for them beside two blocks they are added on the host, and the log says so."""
    caplog.set_level(logging.INFO, "infinity")
    window_nbytes = 2 * BLOCK_NBYTES + (16 << 10) + OUTSIDE_NBYTES * has_space
    tiers = {"device": {"kind": "cpu", "capacity": window_nbytes}}
    actual, most_attached_nbytes, left_nbytes = offloaded_steps(
        Model, swap_directory, 3, tiers=tiers
    )
    assert all(map(torch.equal, plain_steps(3), actual))
    assert most_attached_nbytes <= window_nbytes - OUTSIDE_NBYTES * has_space
    more_nbytes = 0 if has_space else 2 * OUTSIDE_NBYTES
    assert left_nbytes == [GRADIENT_NBYTES + more_nbytes] * NUM_STEPS
    said = [record.message for record in caplog.records if "no space for sums" in record.message]
    assert len(said) == (not has_space)


def test_a_window_that_holds_all_weights_gives_up_some_for_the_sums(swap_directory: Path) -> None:
    window_nbytes = BLOCKS * BLOCK_NBYTES + OUTSIDE_NBYTES + (4 << 10)
    tiers = {"device": {"kind": "cpu", "capacity": window_nbytes}}
    actual, most_attached_nbytes, left_nbytes = offloaded_steps(
        Model, swap_directory, 2, tiers=tiers
    )
    assert all(map(torch.equal, plain_steps(2), actual))
    assert left_nbytes == [GRADIENT_NBYTES] * NUM_STEPS
    assert most_attached_nbytes <= window_nbytes - OUTSIDE_NBYTES


def test_a_norm_is_of_all_gradients_that_were_counted(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without space on the device. No addition is made before it must be, so the last gradient of a
    sum is counted while others are added."""
    monkeypatch.setattr(LeavingGradients, "end_there", lambda *_, **__: None)
    monkeypatch.setattr(LeavingGradients, "add_next", lambda _: None)
    note_there, note, coming = LeavingGradients._end_oldest, CompleteSums.note, list[Any]()

    def ending(leaving: LeavingGradients) -> None:
        coming[:] = [each.spec for each in list(leaving.gradients)[1:]]
        note_there(leaving)

    def checked(norms: CompleteSums, spec: Any, known: Any, flat: torch.Tensor) -> None:
        assert spec not in coming, "the sum will change"
        note(norms, spec, known, flat)

    monkeypatch.setattr(LeavingGradients, "_end_oldest", ending)
    monkeypatch.setattr(CompleteSums, "note", checked)
    tiers = {"device": {"kind": "cpu", "capacity": 2 * BLOCK_NBYTES + (16 << 10)}}
    actual, _, _ = offloaded_steps(Model, swap_directory, 3, tiers=tiers)
    assert all(map(torch.equal, plain_steps(3), actual))
