"""What ranks do at once: nobody waits for ever, whoever does not come."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from infinity.distributed.collectives import Collectives
from infinity.distributed.device_group import DeviceGroups
from infinity.errors import InfinityError
from infinity.observe import Counters


class Silent:
    """A transport to ranks that send nothing, and that receive nothing."""

    rank = 0
    is_broken = False

    def __init__(self, count: int) -> None:
        self.count = count

    def check(self) -> None:
        pass

    def tell(self, rank: int, content: bytes) -> None:
        pass

    def abort(self, cause: str) -> None:
        pass


def make(count: int, monkeypatch: pytest.MonkeyPatch) -> Collectives:
    transport: Any = Silent(count)
    collectives = Collectives(transport, DeviceGroups(None, None), torch.device("cpu"), Counters())
    monkeypatch.setattr(collectives, "_try", lambda: None)
    collectives.open()
    return collectives


def test_close_withdraws_proposals_that_no_other_rank_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives = make(2, monkeypatch)
    propose = collectives.propose((1, 0, 0), lambda: None)
    closing = threading.Thread(target=collectives.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and propose.is_cancelled


def test_a_failing_operation_raises_on_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("of the test")

    collectives = make(1, monkeypatch)
    with pytest.raises(InfinityError, match="of the test"):
        collectives.settle(collectives.propose((0, 0, 0), fail))
    collectives.close()


def test_ranks_are_in_lockstep_only_while_all_of_them_have_one_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives = make(1, monkeypatch)
    issued: list[str] = []
    collectives.stand_in(0, lambda key: issued.append(f"stand-in {key[1]}"))  # type: ignore[arg-type, return-value]

    def step(proposed: list[int], others: bytes | None = None) -> bytes:
        for unit in proposed:
            collectives.propose((0, unit, 0), lambda unit=unit: issued.append(f"own {unit}"))  # type: ignore[misc]
        collectives.end_step()
        decision = collectives.decision()
        collectives.sync_weights([decision, decision if others is None else others])
        return decision

    step([3])
    step([0, 1])
    assert not collectives.is_in_lockstep, "the first steps are not like the others"
    step([0, 1, 2, 4])
    assert collectives.is_in_lockstep
    issued.clear()
    decision = step([0, 2, 4, 7])  # 7 is not in the log: this rank alone needs it.
    assert issued == ["own 0", "stand-in 1", "own 2", "own 4"]
    assert not collectives.is_in_lockstep, "the log lacks what a rank needs"
    step([0, 1, 2, 4])
    assert collectives.is_in_lockstep
    step([0, 2, 4, 7])
    assert collectives.is_in_lockstep, "not for one step"
    step([0, 2, 4, 7])
    assert not collectives.is_in_lockstep
    step([0, 1])
    assert collectives.is_in_lockstep
    decision = step([0, 1])
    assert collectives.is_in_lockstep
    step([0, 1], others=decision[:1] + b"another.")
    assert not collectives.is_in_lockstep
    collectives.close()
