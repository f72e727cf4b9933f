"""Shards that wait for other ranks give up their room where nothing else can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infinity.observe import Counters
from infinity.schedule.executor import Executor, State
from infinity.state.store import NvmeHome
from infinity.storage.engine import Priority
from infinity.tiers.device import FINISHED


class Stub:
    """Store, pool, device, ranks: whatever is asked for is done at once. Units 0 and 1 are wholes,
    2 and 3 this rank's shards of them."""

    units = tuple(SimpleNamespace(index=i, name=str(i), weight_nbytes=4) for i in range(4))
    shares_host_memory = False
    is_on = True
    arrival = departure = FINISHED

    def __init__(self) -> None:
        self.num_lent = 0
        self.patience: list[bool] = []

    def home(self, unit: Any, piece: Any) -> NvmeHome:
        return NvmeHome(())

    def require(self, nbytes: int, label: str) -> object:
        self.num_lent += 1
        return object()

    try_allocate = require

    def free(self, block: object) -> None:
        self.num_lent -= 1

    def covers(self, unit: int) -> bool:
        return unit < 2

    def shard_of(self, unit: int) -> int:
        return 2 + unit

    def take_outdated(self, unit: int) -> bool:
        return False

    def begin(self, *unused: Any) -> Stub:
        return self

    def settle(self, *, is_patient: bool) -> bool:
        self.patience.append(is_patient)
        return True

    def read(self, *unused: Any, **priority: Any) -> Any:
        return FINISHED

    def __getattr__(self, name: str) -> Any:
        return lambda *unused, **_: None


def test_a_shard_that_waits_for_other_ranks_gives_up_its_room() -> None:
    stub: Any = Stub()
    executor = Executor(
        stub,
        pool=stub,
        device=stub,
        counters=Counters(),
        window_nbytes=1 << 20,
        device_window_nbytes=None,
        gathering=stub,
    )
    for _ in range(2):
        executor.begin_pass("train")
        for unit in (0, 1):
            executor.hold(unit, Priority.FORWARD)
            executor.release(unit)
        for unit in range(4):
            executor.discard(unit)
    assert stub.num_lent == 0
    executor.begin_pass("train")
    executor.hold(0, Priority.FORWARD)
    assert executor.weights[1].state is State.GATHERING and stub.num_lent == 2
    assert executor.reclaim(4) and executor.reclaim(4)
    assert stub.num_lent == 0 and not stub.patience[-1]
    assert not executor.reclaim(4)
