"""State on the host whose homes rotate: no bit depends on where it lies, nor on who wants memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.exhaustive import in_turn
from tests.support.two_sides import Side, compare, idle_drives, make, offloaded, same_bits, steps

from .test_update_worker import ALL_ON_HOST, beside, early_of, let_worker_finish
from .test_worker_memory import overwrite_free_memory


def early_steps(run: Side, numbers: range) -> None:
    for number in numbers:
        run.backward(number)
        let_worker_finish(run)
        run.step()


def homes_away(run: Side) -> int:
    return len(early_of(run)._undecided._away)


def want_memory(run: Side) -> None:
    engine = infinity.engine_of(run.model)
    with engine._lock:
        if not early_of(run)._early:  # Chunks of pending units may be on their way.
            engine.updater.apply_pending()
        while engine.pool._reclaim(1):
            pass
        overwrite_free_memory(engine.pool)


@pytest.mark.parametrize("moments", ["host", "nvme"])
def test_homes_move_with_updates_and_return_when_memory_is_short(
    swap_directory: Path, moments: str
) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        early_steps(run, range(6))
        if not run.is_plain:
            assert homes_away(run)
            want_memory(run)
            assert not homes_away(run)
        early_steps(run, range(6, 9))
        run.backward(9)
        let_worker_finish(run)
        if not run.is_plain:
            assert homes_away(run)
            want_memory(run)  # It takes early updates back.
        run.step()
        return []

    counters = compare(body, beside(swap_directory, placement=ALL_ON_HOST | {"moments": moments}))
    assert counters["early_updates_kept"] and counters["early_updates_undone"]


def test_memory_of_early_updates_is_free_in_steps_without_them(swap_directory: Path) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        early_steps(run, range(6))
        before = 0 if run.is_plain else homes_away(run)
        losses = steps(run, 3, lambda _: 1e-3, 6)
        if not run.is_plain:
            assert before and not homes_away(run)
            assert not any(early_of(run)._undecided._idle.values())
        return losses

    compare(body, beside(swap_directory, placement=ALL_ON_HOST))


LEFT = next(name for name, _ in make().blocks[1].named_parameters())
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "8bit": {"moments": "8bit"},
    "full master": {},
}


@pytest.mark.parametrize(("form", "is_beside"), in_turn(FORMATS, [True, False]))
def test_every_form_of_state_has_the_bits_of_updates_after_the_decision(
    swap_directory: Path, form: str, is_beside: bool
) -> None:
    """A parameter that gets no gradient any more is left as it is: its bytes move along."""
    found = {}
    for updates in ("deferred", "both_passes"):
        moments = "host" if is_beside else "nvme"
        dtype = torch.float16 if form == "full master" else torch.bfloat16
        start = beside if is_beside else offloaded
        (swap_directory / updates).mkdir(parents=True)
        run = start(
            swap_directory / updates, model=make().to(dtype), schedule={"updates": updates},
            placement=ALL_ON_HOST | {"moments": moments}, precision=FORMATS[form],
        )  # fmt: skip
        with idle_drives():
            steps(run, 3)
            for number in range(3, 9):
                run.model.blocks[1].get_parameter(LEFT).requires_grad_(number < 5)
                run.backward(number)
                run.step()
        found[updates] = list(run.values().values())
        kept = infinity.engine_of(run.model).counters.snapshot().get("early_updates_kept", 0)
        assert bool(kept) == (updates == "both_passes")
        infinity.close(run.model)
    assert same_bits(found["deferred"], found["both_passes"])
