"""Weights of this rank's shards in host memory that nobody else needs.

A shard that rests on a drive is read by its next update, by its own rank and by every other rank.
Memory that is free keeps its weights: the update changes them there, they are written from there,
and nobody reads them from the drive.

Note [Copies of shards]
  A copy that is CURRENT has the bytes that rest on the drive, as last decided. Readers get the
  memory itself. An update in the backward, which no step has decided, changes the copy in place,
  too: from its beginning until the decision readers go to the drive, where the new bytes lie beside
  the old ones (`UndecidedContent`). No pass needs the shard then, because the sum of its
  gradients was complete. An update that is dropped leaves memory without content.

  A copy that a reader has, which may be another rank, or that an update changes, or from which a
  write is under way, is not given back. An update waits a moment for readers, then finds no memory
  in the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch

from infinity.errors import StorageError
from infinity.state.units import Unit
from infinity.storage.protocol import Transfer
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block, HostPool

_LABEL = "weights of shards that would be read again"
_PATIENCE_S = 5.0  # A reader copies a shard in less.
# Another rank may have the bytes, and its gradient have come, before it says that it has them.
_UPDATE_PATIENCE_S = 0.2


class _Content(Enum):
    NONE = auto()
    CURRENT = auto()
    UNDECIDED = auto()  # Of an early update.


@dataclass(eq=False, slots=True)
class _KeptCopy:
    """Memory for the weights of one shard: uint8, (trainable_nbytes,)."""

    block: Block
    memory: torch.Tensor
    content: _Content = _Content.NONE
    num_readers: int = 0  # To which the memory is lent.
    is_changing: bool = False  # An update has it.
    write: Transfer = FINISHED  # From the memory.


class KeptShards:
    """Copies of shards' weights, by the index of the shard's unit. Thread-safe.

    The training thread gives memory and takes it back, one thread updates, any thread reads. A
    shard has one content at a time for all readers; see `pending.py` for who may read.
    """

    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._lock = threading.Condition()  # Guards all that follows.
        self._copies: dict[int, _KeptCopy] = {}  # In the order of the next pass.
        self._early: set[int] = set()  # Shards with an update that no step has decided.
        # Shards that this rank has read since their update, the first read first.
        self._used: dict[int, None] = {}

    # -- Memory: training thread -------------------------------------------------------------------

    def reserve(self, shard: Unit, *, is_early: bool = False) -> None:
        """An update of the shard is to come. Takes memory for its weights if some is free, unless
        there is some. `is_early`: no step has decided the update, until `publish` or `drop`; else
        it is pending, decided from its beginning or since."""
        with self._lock:
            if is_early:
                self._early.add(shard.index)
            elif shard.index not in self._early:
                self._to_the_end(shard.index)
            if shard.index in self._copies:
                return
        block = self._host.try_spare(shard.trainable_nbytes, _LABEL)
        if block is not None:
            memory = self._host.tensor(block)[: shard.trainable_nbytes]
            with self._lock:
                self._copies[shard.index] = _KeptCopy(block, memory)

    def give_back(self, *, waits: bool = False) -> bool:
        """Frees one block; with `waits` also one that a reader has, which a rank that ends may
        never give up, or a write. Returns whether there was any."""
        with self._lock:
            copy = self._take_least_useful()
            if copy is None and waits:
                self._lock.wait_for(self._is_none_lent, timeout=_PATIENCE_S)
                copy = self._take_least_useful(with_writes=True)
        if copy is None:
            return False
        with contextlib.suppress(StorageError):  # The thread of updates waits for it, too.
            copy.write.wait()
        self._host.free(copy.block)
        return True

    def _is_lent(self, shard: int) -> bool:
        copy = self._copies.get(shard)
        return copy is not None and copy.num_readers > 0

    def _is_none_lent(self) -> bool:
        return not any(map(self._is_lent, self._copies))

    def _take_least_useful(self, *, with_writes: bool = False) -> _KeptCopy | None:
        """Takes out a copy: first of those that this rank has read, because a pass comes back to
        the shards that it has read first at its very end; then of the shard that comes last; at
        last of those with an early update."""
        late = [shard for shard in reversed(self._copies) if shard not in self._early]
        for shard in (*self._used, *late, *self._early):
            copy = self._copies.get(shard)
            if copy is None or copy.num_readers or copy.is_changing:
                continue
            if with_writes or copy.write.done():
                self._used.pop(shard, None)
                return self._copies.pop(shard)
        return None

    # -- Updates: their thread ---------------------------------------------------------------------

    def begin_update(self, shard: int) -> tuple[Block, bool] | None:
        """Lends memory for the weights that an update reads and changes, until `end_update`, and
        says whether it has the weights that the update reads; None if there is none, or a reader
        keeps it for long. Nobody may begin to read the shard, unless the update is early. Raises
        StorageError if the last write has failed."""
        with self._lock:
            self._lock.wait_for(lambda: not self._is_lent(shard), timeout=_UPDATE_PATIENCE_S)
            copy = self._copies.get(shard)
            if copy is None or copy.num_readers:
                return None
            copy.is_changing = True
            is_current, copy.content = copy.content is _Content.CURRENT, _Content.NONE
        try:
            copy.write.wait()
        except BaseException:
            self.end_update(shard, None)
            raise
        return copy.block, is_current

    def end_update(self, shard: int, write: Transfer | None) -> None:
        """Ends `begin_update`. `write`: of the new weights, from the memory; None: the content is
        of no use."""
        with self._lock:
            copy = self._copies[shard]
            copy.is_changing = False
            if write is not None:
                copy.write = write
                is_early = shard in self._early
                copy.content = _Content.UNDECIDED if is_early else _Content.CURRENT

    # -- Content -----------------------------------------------------------------------------------

    def publish(self, shard: int) -> None:
        """The step has decided as the early update expected, if there is one."""
        with self._lock:
            if shard not in self._early:
                return
            self._early.discard(shard)
            self._to_the_end(shard)
            copy = self._copies.get(shard)
            if copy is not None:
                is_new = copy.content is _Content.UNDECIDED
                copy.content = _Content.CURRENT if is_new else _Content.NONE

    def drop(self, shard: int) -> None:
        """Forgets the weights of an early update, if there is one. The update has ended."""
        with self._lock:
            self._early.discard(shard)
            copy = self._copies.get(shard)
            if copy is not None and copy.content is _Content.UNDECIDED:
                copy.content = _Content.NONE

    def forget(self, shard: int | None = None) -> None:
        """The weights of the shard, or of all shards, change by other means than an update of their
        copy."""
        with self._lock:
            for copy in self._copies.values() if shard is None else [self._copies.get(shard)]:
                if copy is not None:
                    copy.content = _Content.NONE

    def has(self, shard: int) -> bool:
        """Whether the weights are kept now."""
        with self._lock:
            copy = self._copies.get(shard)
            return copy is not None and copy.content is _Content.CURRENT

    @contextlib.contextmanager
    def lent(self, shard: int, *, is_own: bool = False) -> Iterator[torch.Tensor | None]:
        """Lends the shard's weights for the block: uint8, host, (trainable_nbytes,), not to be
        changed. None if they are not kept. `is_own`: for a pass of this rank."""
        with self._lock:
            copy = self._copies.get(shard)
            if copy is None or copy.content is not _Content.CURRENT:
                copy = None
            else:
                copy.num_readers += 1
        try:
            yield None if copy is None else copy.memory
        finally:
            if copy is not None:
                with self._lock:
                    copy.num_readers -= 1
                    if is_own:
                        self._used.pop(shard, None)
                        self._used[shard] = None
                    self._lock.notify_all()

    def _to_the_end(self, shard: int) -> None:
        """The next pass comes back to the shard after those that were updated before it."""
        self._used.pop(shard, None)
        copy = self._copies.pop(shard, None)
        if copy is not None:
            self._copies[shard] = copy
