"""Shards that wait for other ranks free their space where nothing else can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infinity.distributed.unshard import UnshardedWeights
from infinity.observe import Counters
from infinity.state.store import NvmeLocation
from infinity.storage.protocol import Priority
from infinity.streaming.parameters import WeightCache
from infinity.streaming.weight_state import WeightState
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block
from infinity.tiers.ranges import Range


class Stub:
    """Store, pool, device, ranks: every request is done at once. Units 0 and 1 are unsharded,
    2 and 3 are this rank's shards of them."""

    units = tuple(
        SimpleNamespace(index=i, name=str(i), weight_nbytes=4, stored=None, nbytes=lambda kind: 4)
        for i in range(4)
    )
    shares_host_memory = False
    is_on = True
    arrival = departure = FINISHED

    def __init__(self) -> None:
        self.num_lent = 0
        self.patience: list[bool] = []

    def home(self, unit: Any, kind: Any) -> NvmeLocation:
        return NvmeLocation(())

    def require(self, nbytes: int, label: str, *, at_top: bool = False) -> object:
        self.num_lent += 1
        return Block(Range(self.num_lent << 20, nbytes), nbytes, self.num_lent << 20, label)

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


def test_a_shard_that_waits_for_other_ranks_frees_its_space() -> None:
    stub: Any = Stub()
    weight_cache = WeightCache(
        stub,
        pool=stub,
        device=stub,
        counters=Counters(),
        window_nbytes=1 << 20,
        device_window_nbytes=None,
        source=UnshardedWeights(stub, 2, is_outdated_by_step=False),
    )
    for _ in range(2):
        weight_cache.begin_pass("train")
        for unit in (0, 1):
            weight_cache.acquire(unit, Priority.FORWARD)
            weight_cache.release(unit)
        for unit in range(4):
            weight_cache.discard(unit)
    assert stub.num_lent == 0
    weight_cache.begin_pass("train")
    weight_cache.acquire(0, Priority.FORWARD)
    assert weight_cache.weights[1].state is WeightState.ARRIVING and stub.num_lent == 2
    assert weight_cache.reclaim(4) and weight_cache.reclaim(4)
    assert stub.num_lent == 0 and not stub.patience[-1]
    assert not weight_cache.reclaim(4)
