"""Weights of this rank's shards in host memory that nobody else needs.

A shard that rests on a drive is read by its next update, by its own rank and by every other rank.
Right after an update its weights are in memory. A copy stays there while the memory is free, and
takes the place of these reads.

Note [Copies of shards]
  A copy has the bytes that rest on the drive, or it is not read. An update in the backward, which
  no step has decided, puts its weights beside the copy; `publish` and `drop` follow the decision.
  The lock is held for one MiB at a time, so nobody waits for a whole shard, and the memory of a
  copy may be given back at any moment: who reads or fills it notices before the next MiB. A copy
  that is lent to a reader, which may be another rank, is not given back until the reader has it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.sizes import MIB
from infinity.state.units import Unit
from infinity.tiers.host import Block, HostBlocks
from infinity.tiers.pool import HostPool

_LABEL = "weights of shards that would be read again"
_RANGE_NBYTES = MIB
_PATIENCE_S = 5.0  # A reader copies a shard in less.


@dataclass(eq=False, slots=True)
class _KeptWeights:
    """Memory for the weights of one shard."""

    block: Block
    is_complete: bool = False  # All bytes are there.
    num_readers: int = 0  # To which the memory is lent.


class KeptShards:
    """Copies of shards' weights, by the index of the shard's unit. Thread-safe.

    The training thread gives memory and takes it back, one thread puts weights in, any thread
    reads. A shard has one content at a time for all readers; see `pending.py` for who may read.
    """

    def __init__(self, host: HostBlocks) -> None:
        self._host = host
        self._lock = threading.Condition()  # Guards all that follows.
        self._kept: dict[int, _KeptWeights] = {}  # In the order of the next pass.
        # Of updates that no step has decided; None: no memory was free.
        self._undecided: dict[int, _KeptWeights | None] = {}
        # Shards that this rank has read since their update, the first read first.
        self._used: dict[int, None] = {}
        self._unused: list[_KeptWeights] = []  # To be given back.

    # -- Memory: training thread -------------------------------------------------------------------

    def reserve(self, pool: HostPool, shard: Unit) -> None:
        """The shard's next update is pending, decided from its beginning or since. Takes memory for
        its weights, if some is free."""
        with self._lock:
            if shard.index in self._undecided:
                return
            copy = self._kept.pop(shard.index, None)
            self._used.pop(shard.index, None)
        copy = copy or self._taken(pool, shard)
        if copy is not None:
            with self._lock:
                self._kept[shard.index] = copy

    def reserve_undecided(self, pool: HostPool, shard: Unit) -> None:
        """As `reserve` for an update that no step has decided. What is kept stays readable."""
        copy = self._taken(pool, shard)
        with self._lock:
            self._undecided[shard.index] = copy

    def _taken(self, pool: HostPool, shard: Unit) -> _KeptWeights | None:
        with self._lock:
            unused = [copy for copy in self._unused if not copy.num_readers]
            self._unused = [copy for copy in self._unused if copy.num_readers]
        for copy in unused:
            pool.free(copy.block)
        fresh = pool.try_spare(shard.trainable_nbytes, _LABEL)
        return None if fresh is None else _KeptWeights(fresh)

    def give_back(self, pool: HostPool, *, waits: bool = False) -> bool:
        """Frees one block; with `waits` also one that is lent, when its reader has it, which a
        rank that ends may never tell. Returns whether there was any."""
        with self._lock:
            block = self._least_useful()
            if block is None and waits and self._are_some_lent():
                self._lock.wait_for(lambda: not self._are_some_lent(), timeout=_PATIENCE_S)
                block = self._least_useful()
        if block is None:
            return False
        pool.free(block)
        return True

    def _are_some_lent(self) -> bool:
        return any(copy.num_readers for copy in (*self._kept.values(), *self._unused))

    def _least_useful(self) -> Block | None:
        """Takes out a block: first of those that this rank has read, because a pass comes back to
        the shards that it has read first at its very end; then of the shard that comes last."""
        for copy in self._unused:
            if not copy.num_readers:
                self._unused.remove(copy)
                return copy.block
        for shard in (*self._used, *reversed(self._kept)):
            if not self._kept[shard].num_readers:
                self._used.pop(shard, None)
                return self._kept.pop(shard).block
        for shard, undecided in self._undecided.items():
            if undecided is not None:
                self._undecided[shard] = None
                return undecided.block
        return None

    # -- Content -----------------------------------------------------------------------------------

    def put(self, shard: int, weights: torch.Tensor) -> None:
        """Keeps the weights of a finished update: uint8, host, (trainable_nbytes,). Nobody may read
        the shard, unless the update is undecided."""
        with self._lock:
            is_undecided = shard in self._undecided
            copy = self._undecided[shard] if is_undecided else self._kept.get(shard)
            if copy is None:
                return
            copy.is_complete = False
        for start, stop in _ranges_of(weights.numel()):
            with self._lock:
                if copy is not (self._undecided if is_undecided else self._kept).get(shard):
                    return
                self._memory(copy)[start:stop].copy_(weights[start:stop])
        with self._lock:
            copy.is_complete = True

    def publish(self, shard: int) -> None:
        """The step has decided as the undecided update expected, if there is one."""
        with self._lock:
            if shard not in self._undecided:
                return
            new, old = self._undecided.pop(shard), self._kept.pop(shard, None)
            self._used.pop(shard, None)
            if new is not None and new.is_complete:
                self._kept[shard], new = new, None
            self._unused += [copy for copy in (new, old) if copy is not None]

    def drop(self, shard: int) -> None:
        """Forgets the weights of an undecided update, if there is one."""
        with self._lock:
            copy = self._undecided.pop(shard, None)
            if copy is not None:
                self._unused.append(copy)

    def forget(self, shard: int | None = None) -> None:
        """The weights of the shard, or of all shards, change by other means than an update."""
        with self._lock:
            for copy in self._kept.values() if shard is None else [self._kept.get(shard)]:
                if copy is not None:
                    copy.is_complete = False

    def has(self, shard: int) -> bool:
        """Whether the weights are kept now."""
        with self._lock:
            copy = self._kept.get(shard)
            return copy is not None and copy.is_complete

    def read(
        self, shard: int, start_nbytes: int, sink: torch.Tensor, *, is_own: bool = False
    ) -> bool:
        """Copies a range of the shard's weights to `sink`. `is_own`: for a pass of this rank.

        sink: uint8, host, shape (nbytes,)
        Returns False if they are not kept; what `sink` has is of no use then.
        """
        for start, stop in _ranges_of(sink.numel()):
            with self._lock:
                copy = self._kept.get(shard)
                if copy is None or not copy.is_complete:
                    return False
                memory = self._memory(copy)[start_nbytes + start : start_nbytes + stop]
                if memory.numel() != stop - start:
                    return False
                sink[start:stop].copy_(memory)
        if is_own:
            with self._lock:
                self._note_used(shard)
        return True

    @contextmanager
    def lent(self, shard: int, *, is_own: bool = False) -> Iterator[torch.Tensor | None]:
        """Lends the shard's weights for the block: uint8, host, (trainable_nbytes,), not to be
        changed. None if they are not kept. `is_own`: for a pass of this rank."""
        with self._lock:
            copy = self._kept.get(shard)
            if copy is None or not copy.is_complete:
                copy = None
            else:
                copy.num_readers += 1
        try:
            yield None if copy is None else self._memory(copy)
        finally:
            if copy is not None:
                with self._lock:
                    copy.num_readers -= 1
                    if is_own:
                        self._note_used(shard)
                    self._lock.notify_all()

    def _note_used(self, shard: int) -> None:
        if shard in self._kept:
            self._used.pop(shard, None)
            self._used[shard] = None

    def _memory(self, copy: _KeptWeights) -> torch.Tensor:
        return self._host.tensor(copy.block)


def _ranges_of(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, _RANGE_NBYTES):
        yield start, min(start + _RANGE_NBYTES, nbytes)
