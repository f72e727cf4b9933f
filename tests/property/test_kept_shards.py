"""Copies of shards' weights: whatever happens, what is read is what rests on the drive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from infinity.distributed.kept_shards import KeptShards
from infinity.observe import Counters
from infinity.sizes import MIB
from infinity.storage.arena import Arena
from infinity.tiers.device import FINISHED
from infinity.tiers.host import HostPool
from infinity.tiers.spare import Giver

NUM_SHARDS = 4
NBYTES = 2 * MIB
SHARDS = [SimpleNamespace(index=index, trainable_nbytes=NBYTES) for index in range(NUM_SHARDS)]
shards = st.integers(0, NUM_SHARDS - 1)


class KeptShardsMachine(RuleBasedStateMachine):
    """`at_rest` has a byte for each shard, which fills all of it; `undecided` those of updates that
    no step has decided."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(6 * MIB)  # Less than all shards need.
        self.pool = HostPool(self.arena, Counters())
        self.kept = KeptShards(self.pool)
        self.pool.add_giver(Giver.KEPT_SHARDS, lambda _: self.kept.give_back())
        self.at_rest = list(range(NUM_SHARDS))
        self.undecided: dict[int, int] = {}
        self.next_byte = 100

    def teardown(self) -> None:
        while self.kept.give_back():
            pass
        assert self.pool.in_use_nbytes == 0
        self.pool.close()
        self.arena.close()

    def change(self, shard: int) -> int:
        """An update of the copy, if there is memory. Returns the byte of the new weights."""
        self.next_byte = (self.next_byte + 1) % 256
        copy = self.kept.begin_update(shard)
        if copy is not None:
            block, is_current = copy
            memory = self.pool.tensor(block)[:NBYTES]
            assert not is_current or torch.all(memory == self.at_rest[shard])
            memory.fill_(self.next_byte)
            self.kept.end_update(shard, FINISHED)
        return self.next_byte

    @rule(shard=shards)
    def update(self, shard: int) -> None:
        if shard in self.undecided:
            return
        self.kept.reserve(SHARDS[shard])  # type: ignore[arg-type]
        self.at_rest[shard] = self.change(shard)
        self.kept.publish(shard)

    @rule(shard=shards)
    def update_before_the_step(self, shard: int) -> None:
        if shard in self.undecided:
            return
        self.kept.reserve(SHARDS[shard], is_early=True)  # type: ignore[arg-type]
        self.undecided[shard] = self.change(shard)

    @rule(shard=shards, is_early=st.booleans())
    def update_that_fails(self, shard: int, is_early: bool) -> None:
        if shard in self.undecided:
            return
        self.kept.reserve(SHARDS[shard], is_early=is_early)  # type: ignore[arg-type]
        copy = self.kept.begin_update(shard)
        if copy is not None:
            self.pool.tensor(copy[0]).fill_(254)
            self.kept.end_update(shard, None)
        self.kept.drop(shard)

    @precondition(lambda self: self.undecided)
    @rule(data=st.data(), is_kept=st.booleans())
    def decide(self, data: Any, is_kept: bool) -> None:
        shard = data.draw(st.sampled_from(sorted(self.undecided)))
        byte = self.undecided.pop(shard)
        if is_kept:
            self.at_rest[shard] = byte
            self.kept.publish(shard)
        else:
            self.kept.drop(shard)

    @rule(shard=st.none() | shards)
    def change_otherwise(self, shard: int | None) -> None:
        self.kept.forget(shard)
        for index in range(NUM_SHARDS) if shard is None else [shard]:
            self.next_byte = (self.next_byte + 1) % 256
            self.at_rest[index] = self.next_byte

    @rule()
    def give_back(self) -> None:
        self.kept.give_back()

    @rule(nbytes=st.sampled_from([MIB, 3 * MIB, 6 * MIB]))
    def need(self, nbytes: int) -> None:
        with self.lent(nbytes):
            pass

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[None]:
        block = self.pool.require(nbytes, "somebody else's")
        self.pool.tensor(block).fill_(255)
        yield
        self.pool.free(block)

    @rule(shard=shards, own=st.booleans())
    def read(self, shard: int, own: bool) -> None:
        is_kept = self.kept.has(shard)
        with self.kept.lent(shard, is_own=own) as memory:
            assert (memory is not None) == is_kept
            assert memory is None or torch.all(memory == self.at_rest[shard])

    @rule(shard=shards)
    def read_while_others_need_memory(self, shard: int) -> None:
        with self.kept.lent(shard) as memory:
            while self.kept.give_back():
                pass
            assert memory is None or torch.all(memory == self.at_rest[shard])


TestKeptShards = KeptShardsMachine.TestCase
TestKeptShards.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
