"""Shards that wait for other ranks free their space where nothing else can."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.distributed.collective.exchange import Buffers, DeviceExchange
from infinity.distributed.collective.unshard import DeviceUnshard
from infinity.errors import RankError
from infinity.observe import Counters
from infinity.state.store import NvmeLocation
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority
from infinity.streaming.inputs.activations import InputMemory
from infinity.streaming.weights.access_order import AccessOrder
from infinity.streaming.weights.cache import WeightCache
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.state import WeightProvider, WeightState
from infinity.testing import SimulatedDevice
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import Range
from infinity.tiers.spare import SpareMemory


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
        self.num_lent, self.spare = 0, SpareMemory(0)
        self.patience: list[bool] = []

    def home(self, unit: Any, kind: Any) -> NvmeLocation:
        return NvmeLocation(())

    def require(self, nbytes: int, label: str, *, at_top: bool = False) -> object:
        self.num_lent += 1
        return Block(Range(self.num_lent << 20, nbytes), nbytes, self.num_lent << 20, label)

    try_allocate = require

    def free(self, block: object) -> None:
        self.num_lent -= 1

    def settle(self, *, is_patient: bool) -> bool:
        self.patience.append(is_patient)
        return True

    def read(self, *unused: Any, **priority: Any) -> Any:
        return FINISHED

    def __getattr__(self, name: str) -> Any:
        return lambda *unused, **_: None


class Fed(WeightProvider):
    """Units 0 and 1 come from their shards and from other ranks."""

    def __init__(self, stub: Any) -> None:
        super().__init__()
        self.stub = stub

    def feeders(self) -> dict[int, int]:
        return {2: 0, 3: 1}

    def feeder_of(self, unit: int) -> int | None:
        return 2 + unit if unit < 2 else None

    def begin(self, *unused: Any) -> Any:
        return self.stub


def test_a_shard_that_waits_for_other_ranks_frees_its_space() -> None:
    stub: Any = Stub()
    budgets: Any = SimpleNamespace(
        window_nbytes=1 << 20, device_window_nbytes=None, held_nbytes=0, decoded_nbytes=0,
        staged_nbytes=0,
    )  # fmt: skip
    weight_cache = WeightCache(
        stub,
        pool=stub,
        device=stub,
        counters=Counters(),
        budgets=budgets,
        inputs=InputMemory(0, 1 << 20),
        source=Fed(stub),
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
    assert weight_cache.space.reclaim(4) and weight_cache.space.reclaim(4)
    assert stub.num_lent == 0 and not stub.patience[-1]
    assert not weight_cache.space.reclaim(4)


@pytest.mark.parametrize(
    ("between_devices", "absent_nbytes", "of_units"), [(True, 2, [1, 1]), (False, 8, [4, 4])]
)
def test_stored_weights_count_once_as_shards_or_as_full_units(
    between_devices: bool, absent_nbytes: int, of_units: list[int]
) -> None:
    """Units 0 and 1 of 4 bytes, and one byte of each of them that this rank reads for all."""
    stub: Any = Stub()
    stub.units = [
        SimpleNamespace(index=i, name=str(i), weight_nbytes=9, tensors=tensors, stored=stored)
        for i, (tensors, stored) in enumerate(
            [(("w",), SimpleNamespace(nbytes=4))] * 2 + [((), SimpleNamespace(nbytes=1))] * 2
        )
    ]
    source = Fed(stub) if between_devices else WeightProvider()
    moves = WeightMoves(stub, stub, stub, Counters(), source, AccessOrder())
    weights = moves.weights
    assert stub.spare.weights_to_come_nbytes == absent_nbytes
    main = [unit.stored.nbytes for unit in stub.units if not moves.is_at_top(unit)]
    assert main == of_units
    for entry in weights:
        moves.start_read(entry, moves.require(entry), Priority.FORWARD)
    assert stub.spare.weights_to_come_nbytes == 0
    for entry in weights:
        moves.finish_read(entry)
        moves.evict(entry)
    assert stub.spare.weights_to_come_nbytes == absent_nbytes


class Refusing:
    """Collectives of a job that has lost a rank."""

    is_on = True

    def stand_in(self, *unused: Any, is_unanimous: bool = False) -> None: ...

    def propose(self, *unused: Any) -> None:
        raise RankError(1, "rank 1 is gone")


def test_a_refused_proposal_gives_back_the_memory_of_the_region() -> None:
    device = SimulatedDevice(0, delay_s=0.0)
    with Arena(64 << 10) as arena:
        device.open(HostPool(arena, Counters()), Counters())
        operations: Any = None
        exchange = DeviceExchange(device, operations, operations, Buffers(2, 512, 512, 512))
        store: Any = SimpleNamespace(
            partition=SimpleNamespace(
                full_units=[SimpleNamespace(stored=None)],
                sources=lambda _: (),
                is_of_node=lambda _: False,
                shards_parameters=True,
            )
        )
        refusing: Any = Refusing()
        unshard = DeviceUnshard(store, collectives=refusing, exchange=exchange, counters=Counters())
        region, local = device.reserve(4096), torch.empty(2048, dtype=torch.uint8)
        for _ in range(2):  # A retry takes the memory again.
            with pytest.raises(RankError, match="rank 1 is gone"):
                unshard.begin(0, region, local, lambda: FINISHED, None)
            assert not region.is_attached
        device.close()


class StandingIn:
    """Collectives that keep the stand-in for gathers, and what it has waited for."""

    def __init__(self) -> None:
        self.awaited: list[int] = []
        self.act: Any = None

    def stand_in(self, kind: int, act: Any, *, is_unanimous: bool = False) -> None:
        if kind == 0:
            self.act = act

    def await_copy(self, copy: int) -> None:
        self.awaited.append(copy)


def test_a_rank_that_only_gives_its_shards_keeps_three_copies_of_them() -> None:
    copies = count()
    exchange: Any = SimpleNamespace(
        host_memory=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        give=lambda *unused, is_of_node: next(copies),
    )
    store: Any = SimpleNamespace(
        partition=SimpleNamespace(
            sources=lambda _: (), is_of_node=lambda _: False, shards_parameters=True
        ),
        read_served=lambda unit, allocate: allocate(512),
    )
    collectives: Any = StandingIn()
    DeviceUnshard(store, collectives=collectives, exchange=exchange, counters=Counters())
    assert [collectives.act((0, unit, 0), 0) for unit in range(5)] == [0, 1, 2, 3, 4]
    assert collectives.awaited == [0, 1]
