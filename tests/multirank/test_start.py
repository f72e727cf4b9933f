"""The start of ranks in a program of its own: one that is late, one that does not come, one that
dies, and what the program prints last."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

import infinity
from infinity.distributed import group
from infinity.distributed.wire import transport
from infinity.distributed.wire.connecting import Meeting
from infinity.engine import build as building

from .models import batch, loss_of
from .processes import Ranks
from .work import Case, build

VICTIM = 1


def _offload(timeout_s: int = 600) -> Any:
    config = {"tiers": {"host": {"capacity": "32MiB"}}, "distributed": {"timeout_s": timeout_s}}
    return infinity.offload(build(Case()), config)


def _compile_late(rank: int, timeout_s: int, before: str, late_s: float) -> bool:
    """Rank VICTIM takes longer than a process may say nothing, before the ranks meet, or later."""
    transport.SILENCE_S = 2.0
    lay_out = building.lay_out

    def late(*arguments: Any) -> Any:
        if rank == VICTIM and before == "the layout":
            time.sleep(late_s)
        return lay_out(*arguments)

    building.lay_out = late  # type: ignore[assignment]
    dist.barrier()  # No other rank is late.
    if rank == VICTIM and before == "the meeting":
        time.sleep(late_s)
    infinity.close(_offload(timeout_s))
    return True


@pytest.mark.parametrize("before", ["the meeting", "the layout"])
def test_a_rank_that_compiles_for_long_is_waited_for(before: str) -> None:
    with Ranks(2, _compile_late, 600, before, 4.0) as ranks:
        assert ranks.outcomes({0, 1}) == {0: (True, None), 1: (True, None)}


@pytest.mark.parametrize(
    ("before", "said"), [("the meeting", "has not come within 1 s"), ("the layout", "is alive and")]
)
def test_a_rank_that_does_not_come_in_time_is_named(before: str, said: str) -> None:
    with Ranks(3, _compile_late, 1, before, 600.0) as ranks:
        for _, (message, _) in ranks.outcomes({0, 2}).values():
            assert message.startswith(f"RankError: rank {VICTIM} ") and said in message, message
            assert "distributed.timeout_s" in message


def _die_unconnected(rank: int) -> None:
    if rank == VICTIM:  # The others have its address.
        group.PeerTransport = _killed  # type: ignore[assignment, misc]
    if rank == 0:  # It is slow: it fails before it accepts, and leaves word of that later.
        connect = group._connect
        group.PeerTransport._accept = lambda *unused: None  # type: ignore[method-assign]

        def slow(*arguments: Any) -> Any:
            try:
                return connect(*arguments)
            except infinity.errors.RankError:
                time.sleep(1.0)
                raise

        group._connect = slow
    if rank == 2:  # It comes when rank 0 is about to end for want of rank VICTIM.
        gather = Meeting.all_gather

        def late(self: Any, what: str, *more: Any) -> Any:
            found = gather(self, what, *more)
            time.sleep(0.5 * (what == "peers"))
            return found

        Meeting.all_gather = late  # type: ignore[method-assign]
    _offload()


def _killed(*unused: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _print_last(rank: int) -> str:
    """Rank VICTIM dies while another one waits for it in gloo. Returns what that one's interpreter
    would print last."""
    printed: list[str] = []
    sys.excepthook = lambda kind, error, trace: printed.append(f"{kind.__name__}: {error}")
    _offload()
    if rank == VICTIM:
        time.sleep(0.5)
        _killed()
    try:
        dist.barrier()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return printed[-1]


def test_the_last_error_of_a_program_that_waits_in_gloo_names_the_rank() -> None:
    with Ranks(3, _print_last) as ranks:
        for message, error in ranks.outcomes({0, 2}).values():
            assert error is None and message.startswith(f"RankError: rank {VICTIM} "), message


def test_a_rank_that_dies_between_the_meeting_and_its_links_is_named() -> None:
    with Ranks(3, _die_unconnected) as ranks:
        for _, (message, _) in ranks.outcomes({0, 2}).values():
            assert message.startswith(f"RankError: rank {VICTIM} "), message


def _end_with_shared_inputs(rank: int, number: int) -> None:
    """Ranks that compute each layer together. Rank VICTIM ends before the second step."""
    own = dist.new_group([rank], use_local_synchronization=True)
    config = {"tiers": {"host": {"capacity": "32MiB"}}, "distributed": {"timeout_s": 5}}
    model = infinity.offload(
        build(Case()), config, group=own, model_parallel_group=dist.group.WORLD
    )
    for step in range(2):
        if rank == VICTIM and step == 1:
            os.kill(os.getpid(), number)
        infinity.forward_backward(model, lambda x: loss_of(model, x), [batch(step, model.width)])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_has_a_part_of_the_layer_inputs_is_named_when_it_ends(number: int) -> None:
    with Ranks(3, _end_with_shared_inputs, number) as ranks:
        for _, (message, _) in ranks.outcomes({0, 2}).values():
            assert message.startswith(f"RankError: rank {VICTIM} "), message
