"""A rank that ends, however it ends, ends the others soon, and the errors of all of them name
it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.distributed.wire import failures, transport
from infinity.distributed.wire.channel import Channel
from infinity.distributed.wire.node_memory import BounceBuffer
from infinity.errors import InfinityError, NonFiniteError, RankError
from tests.support.exhaustive import sampled

from .models import loss_of
from .processes import Ranks, run_ranks
from .work import LR, Case, build, micro_batches, offload_case, train_model

VICTIM = 1
TIME_LIMIT_S = 240.0  # Of a wait that ends by itself there are 600.


def _write_time(note: str) -> None:
    """Several threads may die at once: the file is there with all of its content."""
    own = Path(f"{note}-{threading.get_ident()}")
    own.write_text(str(time.monotonic()))  # One clock for all processes of a machine.
    own.replace(note)


def _killed(signal_number: int, note: str) -> None:
    _write_time(note)
    os.kill(os.getpid(), signal_number)
    time.sleep(600)  # A stopped process goes on from here, should it be continued.


def _die_in(
    rank: int,
    phase: str,
    signal_number: int | None,
    silence_s: float | None,
    exchange: str,
    note: str,
) -> None:
    """Trains until rank VICTIM dies in `phase` of the second step, in lockstep of the fourth."""
    if silence_s is not None:
        transport.HEARTBEAT_S, transport.SILENCE_S = silence_s / 4, silence_s
    if signal_number is None:
        failures.CAUSE_S = TIME_LIMIT_S  # Its word is on its way, however late it is read.
    death_step = 3 if exchange == "lockstep" else 1  # Ranks play a log from the third step on.
    exchange = exchange.replace("lockstep", "collective")
    case = Case(
        2 if phase == "step" else 3, steps=50, exchange=exchange,
        simulated=exchange == "collective", capacity="96MiB",  # Enough for updates after the step.
    )  # fmt: skip
    model = offload_case(case, None)  # type: ignore[arg-type]
    engine = infinity.engine_of(model)

    def die(*unused: Any) -> None:
        if signal_number is None:
            _write_time(note)
            raise MemoryError("of the test")
        _killed(signal_number, note)

    optimizer = infinity.AdamW(model, lr=LR)
    for step in range(case.steps):
        if rank == VICTIM and step == death_step:
            assert death_step == 1 or engine.ranks._collectives.is_in_lockstep  # type: ignore[union-attr]
            if phase == "forward":
                model.blocks[1].register_forward_pre_hook(die)
            elif phase == "backward":
                model.blocks[1].register_full_backward_hook(die)
            elif phase == "step":
                engine.updater.local._turns._chunks._update = die  # type: ignore[attr-defined]
            elif phase == "lend":  # Another rank reads, or will read, this rank's memory.
                BounceBuffer.lend = die  # type: ignore[method-assign]
            elif phase == "take":  # Another rank waits until this rank has read its memory.
                Channel._next_range = die  # type: ignore[method-assign]
            elif phase == "update":
                engine.updater.deferred._chunks._update = die  # type: ignore[attr-defined]
            else:
                die()
        for x, skip in micro_batches(case, rank, step):
            loss_of(model, x, skip).backward()
        optimizer.step()
        optimizer.zero_grad()


def _deaths(
    directory: Path,
    phase: str,
    signal_number: int | None,
    *,
    silence_s: float | None = None,
    exchange: str = "one_sided",
) -> list[str]:
    """The errors of the other ranks, soon after the death."""
    others, note = {0, 2}, directory / "death"
    with Ranks(3, _die_in, phase, signal_number, silence_s, exchange, str(note)) as ranks:
        outcomes = ranks.outcomes(others)
        assert time.monotonic() - float(note.read_text()) < TIME_LIMIT_S
    return [outcomes[rank][1][0] for rank in sorted(others)]


# Moments of which another way of exchange is in `make test`.
AGAIN = [("forward", "one_sided"), ("backward", "collective"), ("update", "collective"),
         ("between", "collective")]  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "exchange"),
    sampled(
        [
            ("forward", "one_sided"),
            ("forward", "collective"),
            ("backward", "collective"),
            ("step", "one_sided"),
            ("lend", "one_sided"),
            ("take", "one_sided"),
            ("update", "one_sided"),
            ("update", "collective"),
            ("between", "collective"),
            ("backward", "lockstep"),
            ("between", "lockstep"),
        ],
        lambda moment: moment not in AGAIN,
    ),
)
def test_a_killed_rank_is_named_by_all_others(phase: str, exchange: str, tmp_path: Path) -> None:
    for message in _deaths(tmp_path, phase, signal.SIGKILL, exchange=exchange):
        assert message.startswith(f"RankError: rank {VICTIM} "), message
        assert "killed or has crashed" in message


def _catch_in(rank: int, phase: str, note: str) -> None:
    """Rank VICTIM fails in the second step, catches the error, and lives on without a step."""
    case = Case(2, capacity="96MiB", max_norm=1e-2)
    model = offload_case(case, None)  # type: ignore[arg-type]
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    optimizer.max_grad_norm = case.max_norm
    gradients: Any = engine.gradients

    def fail(*unused: Any, **named: Any) -> None:
        _write_time(note)
        raise MemoryError("of the test")

    for step in range(5):
        try:
            if rank == VICTIM and step == 1:
                store = gradients if phase == "prepare_step" else gradients.owned
                setattr(store, phase, fail)
            for x, skip in micro_batches(case, rank, step):
                loss_of(model, x, skip).backward()
            optimizer.step()
        except MemoryError:
            time.sleep(600)
        optimizer.zero_grad()


@pytest.mark.parametrize("phase", ["add", "norm", "prepare_step"])
def test_an_exception_that_a_rank_catches_is_reported_by_all_others(
    phase: str, tmp_path: Path
) -> None:
    others, note = {0, 2}, tmp_path / "failure"
    with Ranks(3, _catch_in, phase, str(note)) as ranks:
        outcomes = ranks.outcomes(others)
        assert time.monotonic() - float(note.read_text()) < TIME_LIMIT_S
    for _, (message, _) in outcomes.values():
        assert message.startswith(f"RankError: rank {VICTIM} "), message
        assert "MemoryError: of the test" in message


@pytest.mark.parametrize("phase", ["backward", "update"])
def test_an_exception_on_one_rank_is_reported_by_all_others(phase: str, tmp_path: Path) -> None:
    for message in _deaths(tmp_path, phase, None):
        assert message.startswith(f"RankError: rank {VICTIM} "), message
        assert "MemoryError: of the test" in message


@pytest.mark.parametrize(
    ("phase", "exchange"),
    sampled(
        [("forward", "collective"), ("forward", "lockstep"), ("take", "one_sided")],
        lambda moment: moment[1] != "collective",
    ),
)
def test_a_rank_that_is_stuck_is_named_by_all_others(
    phase: str, exchange: str, tmp_path: Path
) -> None:
    deaths = _deaths(tmp_path, phase, signal.SIGSTOP, silence_s=8.0, exchange=exchange)
    for message in deaths:
        assert message.startswith(f"RankError: rank {VICTIM} "), message
        assert "said nothing" in message


def _misuse(rank: int) -> dict[str, str]:
    """Errors that all ranks, or those that receive word of it, raise; by what was done."""
    found: dict[str, str] = {}

    def note(what: str, kinds: type[BaseException], function: Any) -> None:
        try:
            function()
        except kinds as error:
            found[what] = f"{type(error).__name__}: {error}"

    case = Case(2)
    model = offload_case(case, None)  # type: ignore[arg-type]
    optimizer = infinity.AdamW(model, lr=LR, max_grad_norm=1.0, error_if_nonfinite=True)
    before = {n: infinity.engine_of(model).read_parameter(n) for n in ("head.weight",)}
    [(x, _)] = micro_batches(Case(2, steps=1), rank, 0)
    (loss_of(model, x) * (float("inf") if rank == 1 else 1.0)).backward()
    note("not finite", NonFiniteError, optimizer.step)
    after = infinity.engine_of(model).read_parameter("head.weight")
    assert torch.equal(before["head.weight"], after), "a step that was refused changed a weight"
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
    note("read a gradient", InfinityError, lambda: model.head.weight.grad.norm())
    note("save", InfinityError, lambda: infinity.checkpoint.save("/nowhere", model, optimizer))
    note("export", InfinityError, lambda: infinity.checkpoint.export_dcp(model, "/proc"))
    if rank == 0:
        optimizer.zero_grad()
    note("zero_grad on one rank", RankError, optimizer.step)
    infinity.engine_of(model).close()

    torch.manual_seed(rank)
    note("other weights", InfinityError, lambda: infinity.offload(_unlike(rank), _config()))
    unlike = _config() | {"distributed": {"exchange": ("one_sided", "collective")[rank]}}
    note("other exchange", InfinityError, lambda: infinity.offload(build(case), unlike))

    model = offload_case(case, None)  # type: ignore[arg-type]
    optimizer = infinity.AdamW(model, lr=LR)
    if rank == 0:
        infinity.engine_of(model).close()
    else:
        note("too few steps", InfinityError, optimizer.step)
        infinity.engine_of(model).close()
    return found


def _unlike(rank: int) -> Any:
    model = build(Case())
    with torch.no_grad():
        model.head.weight.add_(rank)
    return model


def _config() -> dict[str, Any]:
    return {"tiers": {"host": {"capacity": "32MiB"}}}


def test_misuse_is_named_and_does_not_hang() -> None:
    first, second = run_ranks(2, _misuse)
    for found in (first, second):
        assert found["not finite"].startswith("NonFiniteError")
        assert "divided over 2 ranks" in found["read a gradient"]
        assert "call optimizer.step() and optimizer.zero_grad() before" in found["save"]
        assert "ConfigError: /proc is not empty" in found["export"]
        assert "call zero_grad() on all ranks alike" in found["zero_grad on one rank"]
        assert "Build the same model on every rank" in found["other weights"]
    assert "rank 1 would exchange otherwise" in first["other exchange"]
    assert "computes on host memory" in second["other exchange"]
    assert (
        "rank 0" in second["too few steps"] and "has closed its engine" in second["too few steps"]
    )


def test_a_rank_that_fails_before_training_does_not_leave_others_waiting() -> None:
    with Ranks(2, _too_small) as ranks:
        outcomes = ranks.outcomes({0, 1})
    assert outcomes[1][1][0].startswith("CapacityError")
    assert outcomes[0][1] is not None


def _too_small(rank: int) -> None:
    capacity = "64KiB" if rank else "32MiB"
    model = infinity.offload(build(Case()), {"tiers": {"host": {"capacity": capacity}}})
    train_model(model, rank, Case())
