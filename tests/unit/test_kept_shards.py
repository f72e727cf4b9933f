"""Memory of kept weights: lent to readers in place, and given back when no reader has it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from infinity.distributed.kept_shards import KeptShards
from infinity.tiers.host import Block


class _Pool:
    """Blocks of separate memory, as many as are wanted."""

    def __init__(self) -> None:
        self.memory: dict[Any, torch.Tensor] = {}
        self.freed: list[Any] = []

    def try_spare(self, nbytes: int, label: str) -> Any:
        block = SimpleNamespace(nbytes=nbytes, number=len(self.memory))
        self.memory[block.number] = torch.zeros(nbytes, dtype=torch.uint8)
        return block

    def free(self, block: Any) -> None:
        self.freed.append(block.number)

    def tensor(self, block: Block) -> torch.Tensor:
        return self.memory[block.number]  # type: ignore[attr-defined]


def _kept(*shards: int) -> tuple[KeptShards, Any]:
    pool: Any = _Pool()
    kept = KeptShards(pool)
    for shard in shards:
        unit: Any = SimpleNamespace(index=shard, trainable_nbytes=64)
        kept.reserve(pool, unit)
        kept.put(shard, torch.full((64,), shard, dtype=torch.uint8))
    return kept, pool


def test_a_copy_that_is_lent_is_given_back_after_all_others_and_when_its_reader_has_it() -> None:
    kept, pool = _kept(1, 2, 3)
    with kept.lent(3) as memory:
        assert memory is not None and memory.tolist() == [3] * 64
        assert kept.give_back(pool) and kept.give_back(pool) and pool.freed == [1, 0]
        assert not kept.give_back(pool), "without a wait"
        given = list[bool]()
        thread = threading.Thread(target=lambda: given.append(kept.give_back(pool, waits=True)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and memory.tolist() == [3] * 64
    thread.join(10.0)
    assert given == [True] and pool.freed == [1, 0, 2]
    with kept.lent(3) as memory:
        assert memory is None


def test_a_copy_that_a_step_replaces_stays_until_its_reader_has_it() -> None:
    kept, pool = _kept(1)
    unit: Any = SimpleNamespace(index=1, trainable_nbytes=64)
    with kept.lent(1) as memory:
        assert memory is not None
        kept.reserve_undecided(pool, unit)
        kept.put(1, torch.full((64,), 9, dtype=torch.uint8))
        kept.publish(1)
        other: Any = SimpleNamespace(index=2, trainable_nbytes=64)
        kept.reserve(pool, other)  # Frees what is not used.
        assert not pool.freed and memory.tolist() == [1] * 64
        with kept.lent(1) as newer:
            assert newer is not None and newer.tolist() == [9] * 64
    kept.reserve_undecided(pool, other)
    assert pool.freed == [0]


def test_weights_that_others_change_are_not_lent() -> None:
    kept, _ = _kept(1)
    kept.forget(1)
    with kept.lent(1) as memory:
        assert memory is None
    with kept.lent(5) as memory:
        assert memory is None
