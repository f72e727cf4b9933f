"""What ranks do at once: nobody waits for ever, whoever does not come."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.distributed.collectives import Collectives
from infinity.distributed.coordinator import Verb
from infinity.distributed.unshard import DeviceUnshard
from infinity.errors import InfinityError
from infinity.observe import Counters
from infinity.tiers.device import FINISHED


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
    collectives = Collectives(transport, None, torch.device("cpu"), Counters())
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


def test_a_proposal_is_sent_when_the_drive_is_done_and_others_pass_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device would wait inside the operation for the slowest drive of all ranks."""
    collectives, is_read, issued = make(1, monkeypatch), threading.Event(), []
    exchange: Any = SimpleNamespace(
        take=lambda region: None,
        gather=lambda region, local, ranges: issued.append(region) or (FINISHED, FINISHED),
    )
    pending: Any = SimpleNamespace(await_update=lambda shard: None, is_pending=lambda shard: False)
    partition: Any = SimpleNamespace(full_units=[0, 1], shards=[[], []])
    store: Any = SimpleNamespace(partition=partition, pending=pending)
    unshard = DeviceUnshard(store, collectives=collectives, exchange=exchange, counters=Counters())
    reading: Any = SimpleNamespace(wait=is_read.wait, done=is_read.is_set)
    regions: Any = ["late", "early", "withdrawn"]
    late = unshard.begin(0, regions[0], torch.empty(0), reading)
    early = unshard.begin(1, regions[1], torch.empty(0), None)
    assert early.settle(is_patient=False) and issued == ["early"]
    is_read.set()
    assert late.settle() and issued == ["early", "late"]
    collectives.close()


def test_a_proposal_that_waits_for_a_drive_is_withdrawn_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Verb] = []
    collectives, is_read = make(2, monkeypatch), threading.Event()
    send = collectives._send_message
    monkeypatch.setattr(
        collectives, "_send_message", lambda verb, key: (told.append(verb), send(verb, key))
    )
    proposal = collectives.propose((0, 0, 0), lambda: None, is_read.wait)
    assert told == [] and not collectives.settle(proposal, is_patient=False)
    assert told == [Verb.PROPOSE, Verb.WITHDRAW]
    again = collectives.propose((0, 0, 0), lambda: None, is_read.wait)
    is_read.set()
    while Verb.PROPOSE not in told[2:]:
        time.sleep(0.001)
    collectives.close()
    assert again.is_cancelled and told.count(Verb.PROPOSE) == 2


def test_a_failing_operation_raises_on_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("of the test")

    collectives = make(1, monkeypatch)
    with pytest.raises(InfinityError, match="of the test"):
        collectives.settle(collectives.propose((0, 0, 0), fail))
    collectives.close()
