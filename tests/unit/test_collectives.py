"""What ranks do at once: nobody waits for ever, whoever does not come."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.distributed.collective import issuing
from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.issuing import Issuer, Proposal
from infinity.distributed.collective.order import AgreedLog, LogEntry, Verb
from infinity.distributed.collective.process_groups import DeviceGroups
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters


class Silent:
    """A transport to ranks that send nothing, and that receive nothing."""

    rank = 0
    is_broken = False

    def __init__(self, count: int) -> None:
        self.count = count
        self.told: list[bytes] = []

    def check(self) -> None:
        pass

    def tell(self, rank: int, content: bytes) -> None:
        self.told.append(content)

    def abort(self, cause: str) -> None:
        pass


def make(count: int) -> Collectives:
    transport: Any = Silent(count)
    collectives = Collectives(transport, DeviceGroups(None, None), Counters(), lambda: None)
    collectives.open()
    return collectives


def test_close_withdraws_proposals_that_no_other_rank_made() -> None:
    collectives = make(2)
    propose = collectives.propose((1, 0, 0), lambda: None)
    closing = threading.Thread(target=collectives.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and propose.is_cancelled


def test_close_gives_up_a_trial_that_no_abort_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator, and another rank is gone."""
    monkeypatch.setattr(issuing, "_GIVE_UP_S", 0.5)
    transport: Any = Silent(2)
    collectives = Collectives(transport, DeviceGroups(None, None), Counters(), lambda: None)
    is_tried, never = threading.Event(), threading.Event()

    def act() -> list[Any]:
        is_tried.set()
        never.wait(600)
        return []

    def check() -> None:
        if transport.is_broken:
            raise RankError(1, "rank 1 is gone")

    transport.check = check
    collectives.try_first(act)
    opening = threading.Thread(target=lambda: failures.append(error_of(collectives.open)))
    failures: list[BaseException | None] = []
    opening.start()
    assert is_tried.wait(60)
    transport.is_broken = True
    opening.join(60)
    assert isinstance(failures[0], RankError)
    closing = threading.Thread(target=collectives.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    never.set()


def error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except InfinityError as error:
        return error
    return None


def test_a_thread_that_cannot_begin_or_ask_ends_all_operations() -> None:
    """A training thread may wait in one of them."""

    def fail() -> None:
        raise RankError(1, "rank 1 is gone")

    for cause in ("begin", "watch"):
        transport: Any = Silent(1)
        groups = DeviceGroups(None, None)
        begin = fail if cause == "begin" else lambda: None
        collectives = Collectives(transport, groups, Counters(), begin)
        if cause == "watch":
            collectives._issuer._watch = fail  # type: ignore[method-assign]
        with pytest.raises(InfinityError, match="rank 1 is gone"):
            collectives.open()
        assert groups.is_aborted


def test_a_failing_operation_raises_on_the_only_rank() -> None:
    def fail() -> None:
        raise OSError("of the test")

    collectives = make(1)
    with pytest.raises(InfinityError, match="of the test"):
        collectives.settle(collectives.propose((0, 0, 0), fail))
    collectives.close()


def test_a_rank_plays_the_log_of_what_it_and_others_wanted_in_the_step_before() -> None:
    collectives = make(1)
    issued: list[str] = []
    collectives.stand_in(0, lambda key, size: issued.append(f"stand-in {key[1]} {size}"))  # type: ignore[arg-type, return-value]

    def step(proposed: list[int], others: bytes | None = None) -> bytes:
        issued.clear()
        for unit in proposed:
            collectives.propose(
                (0, unit, 0),
                lambda unit=unit: issued.append(f"own {unit}"),  # type: ignore[misc]
                size=9,
            )
        collectives.end_step()
        decision = collectives.decision()
        collectives.sync_weights([decision, decision if others is None else others])
        return decision

    step([3])
    step([0, 1])
    assert not collectives.is_in_lockstep, "the first steps are not like the others"
    step([0, 1, 2])
    assert collectives.is_in_lockstep
    step([0, 2, 7])  # 7 is not in the log.
    assert issued == ["own 0", "stand-in 1 9", "own 2"]
    step([])  # Without a batch.
    assert issued == [f"stand-in {unit} 9" for unit in (0, 1, 2, 7)]
    step([0, 2, 7])
    assert issued == ["own 0", "stand-in 1 9", "own 2", "own 7"]
    step([0, 2, 7])
    decision = step([0])
    assert issued == ["own 0"] + [f"stand-in {unit} 9" for unit in (2, 7)], "1 was of no use"
    assert collectives.is_in_lockstep
    digest = decision[:8]
    step([0, 2, 7], others=decision.replace(digest, b"another."))
    assert not collectives.is_in_lockstep
    collectives.close()


def test_ranks_that_propose_in_vain_pause_for_some_steps() -> None:
    """Three other ranks use nothing that this one uses, and nobody else asks for anything."""
    collectives = make(4)
    is_on = []
    for _ in range(14):
        is_on.append(collectives.is_on)
        if collectives.is_on:
            proposal = collectives.propose((0, 7, 0), lambda: None)
            for rank in range(1, 4):
                collectives.on_message(rank, done(len([on for on in is_on if on]) - 1))
            assert not collectives.settle(proposal)
        collectives.end_step()
        own = collectives.decision()
        collectives.sync_weights([own] + [own[:8] + bytes(4) if own else own] * 3)
    assert is_on == [True] * 3 + [False] + [True] + [False] * 2 + [True] + [False] * 4 + [
        True,
        False,
    ]
    collectives.close()


@pytest.mark.parametrize("log_step", [4, 5])
def test_an_operation_of_an_earlier_log_asks_no_rank_to_play_this_one(log_step: int) -> None:
    transport: Any = Silent(2)
    collectives = Collectives(transport, DeviceGroups(None, None), Counters(), lambda: None)
    collectives._order.log, collectives._order.log_step = AgreedLog([LogEntry((0, 1, 0))]), 5
    assert collectives._hurry(log_step) == (log_step == 5)
    assert [content[0] for content in transport.told] == [Verb.PLAY] * (log_step == 5)


def test_ranks_are_hurried_while_an_operation_of_the_log_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(issuing, "PATIENCE_S", 0.01)
    is_over, is_hurried, hurried = threading.Event(), threading.Event(), list[int]()

    def hurry(log_step: int) -> bool:
        hurried.append(log_step)
        is_hurried.set()
        return True

    transport: Any = Silent(2)
    slow: Any = SimpleNamespace(done=is_over.is_set)
    changed = threading.Condition()
    issuer = Issuer(transport, DeviceGroups(None, None), changed, lambda: None, hurry)
    with changed:
        issuer.put(Proposal((0, 1, 0), lambda: slow), 5)
    issuer.start()
    assert is_hurried.wait(60)
    is_over.set()
    issuer.close()
    assert set(hurried) == {5} and issuer.num_left == 0


def done(step: int) -> bytes:
    """The control message of a rank that proposes nothing more in a step."""
    return struct.pack("<BxxxIIIQ", Verb.DONE, step, 0, 0, 0)
