"""Updates that no step has decided: they read the old state and write the new beside it.

Note [Copy on write]
  Until `publish` the state of the last step counts. To take an update back is to publish nothing.

    state on NVMe      new bytes go to a spare generation; `publish` changes the maps
    state on the host  new bytes go to a block as large as the home; `bring_home` exchanges them

  A unit that finds no memory, or no generation, is updated in place after the decision.

Note [Homes rotate]
  The block that an exchange leaves with the old bytes is where a later update of any unit writes
  its new ones: a size has as many blocks as homes and a few more. They are kept until memory is
  short, or a step has no early updates. The memory that is given back then is that of the few, not
  a hole among the homes: a home that lies there is copied to the block that goes.

Note [Weights that other ranks read]
  Other ranks read weights of shards at the address of the home, also when a shard's update goes on
  after the decision. There `bring_home` copies the new weights into the home.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from infinity.ops.host_sums import copy_
from infinity.state.store import HostLocation, NvmeLocation, StateStore, changing_kinds
from infinity.state.units import StateKind, Unit
from infinity.storage.generations import UndecidedContent
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import Range
from infinity.tiers.spare import Giver

_LABEL = "state of early updates"


def can_be_undecided(store: StateStore, unit: Unit, *, is_beside: bool) -> bool:
    """Whether the unit can be updated before the step has decided. All that an update of it changes
    rests on NVMe, which has generations, or on the host, where new bytes go beside the old.

    A unit with nothing on NVMe can only beside a device: where the device is the host, nothing
    overlaps. `is_beside`: the device that computes has memory of its own.
    """
    kinds = changing_kinds(unit) if unit.state_numel else []
    return (
        bool(kinds)
        and (is_beside or has_generations(store, unit))
        and all(
            isinstance(store.location(unit, kind), HostLocation | NvmeLocation) for kind in kinds
        )
    )


def has_generations(store: StateStore, unit: Unit) -> bool:
    """Whether some of what an update of the unit changes rests on NVMe."""
    return any(
        isinstance(store.location(unit, kind), NvmeLocation) for kind in changing_kinds(unit)
    )


@dataclass(eq=False, slots=True)
class _Beside:
    """Memory for the new bytes of one unit, by state kind: all of the kind."""

    blocks: dict[StateKind, Block]
    arrays: dict[StateKind, torch.Tensor] = field(default_factory=dict)  # uint8, of the blocks.
    is_filled: bool = False  # It has the bytes that the update leaves as they are.


class UndecidedState:
    """The undecided updates of units of a store.

    The training thread takes and frees memory, under the engine's lock. One thread updates a unit;
    `publish`, `bring_home` and `drop` follow its last write of the unit.

    `leaves_home(unit, kind)`: makes sure that nobody has the address of a home, of a unit that
    nobody uses; returns whether that is so. None: other ranks may read state, see Note [Weights
    that other ranks read].
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        leaves_home: Callable[[Unit, StateKind], bool] | None = None,
    ) -> None:
        self.store = store
        self._pool = pool
        self._leaves_home = leaves_home
        self._beside: dict[int, _Beside] = {}
        # The targets of writes of each undecided unit to NVMe.
        self.contents: dict[int, UndecidedContent] = {}
        self._idle: defaultdict[int, list[Block]] = defaultdict(list)  # By size.
        self._taken: set[Range] = set()  # Memory of the pool, whosever bytes are there.
        self._away: dict[Range, tuple[Unit, StateKind]] = {}  # The homes that lie in it.
        pool.add_giver(Giver.IDLE_HOMES, lambda _: self.give_back())

    @property
    def has_space(self) -> bool:
        """Whether an undecided write has a generation now."""
        volume = self.store.volume
        return volume is not None and volume.can_be_undecided

    # -- Memory ------------------------------------------------------------------------------------

    def reserve(self, unit: Unit) -> bool:
        """Takes memory for what an undecided update of the unit needs on the host. Returns whether
        some was free, or none is needed."""
        kinds = [k for k in changing_kinds(unit) if self._is_on_host(unit, k)]
        if not kinds or unit.index in self._beside:
            return True
        wanted = Counter(unit.nbytes(kind) for kind in kinds)
        missing = [n for n, count in wanted.items() for _ in range(count - len(self._idle[n]))]
        if missing and self._pool.spare.unclaimed_nbytes < sum(missing):
            return False
        for nbytes in missing:
            block = self._pool.try_allocate(nbytes, _LABEL)
            if block is None:
                return False
            self._taken.add(block.range)
            self._put_back([block])
        blocks = {kind: self._idle[unit.nbytes(kind)].pop() for kind in kinds}
        self._beside[unit.index] = _Beside(blocks)
        return True

    def _put_back(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._idle[block.nbytes].append(block)

    def has_memory(self, unit: Unit) -> bool:
        """Whether memory is taken for an update of the unit."""
        return unit.index in self._beside

    def free(self, unit: Unit) -> None:
        """Ends the use of a unit's memory. No update of it is undecided."""
        assert unit.index not in self.contents
        beside = self._beside.pop(unit.index, None)
        if beside is not None:
            self._put_back(beside.blocks.values())

    def give_back(self) -> bool:
        """Frees a block that no update uses, at first one whose memory is the pool's; else after a
        copy of the home that lies there, see Note [Homes rotate]. Returns whether there was one."""
        idle = [block for blocks in self._idle.values() for block in blocks]
        block = min(idle, key=lambda unused: unused.range not in self._taken, default=None)
        if block is None:
            return False
        self._idle[block.nbytes].remove(block)
        if block.range not in self._taken:
            self._return_home(block)
        self._taken.discard(block.range)
        self._pool.free(block)
        return True

    def _return_home(self, block: Block) -> None:
        """Copies a home that lies in memory of the pool to where the block is, and exchanges them,
        if there is one that can be moved."""
        if self._leaves_home is None:
            return
        for unit, kind in self._away.values():
            is_as_large = unit.nbytes(kind) == block.nbytes
            if is_as_large and not self.has_memory(unit) and self._leaves_home(unit, kind):
                home = self._home(unit, kind)
                copy_(self._pool.tensor(block), self._pool.tensor(home))
                self._exchange(unit, kind, block)
                return

    def _exchange(self, unit: Unit, kind: StateKind, block: Block) -> None:
        self.store.resting.exchange(unit, kind, block)
        self._away.pop(block.range, None)
        at = self._home(unit, kind).range
        if at in self._taken:
            self._away[at] = unit, kind

    def _home(self, unit: Unit, kind: StateKind) -> Block:
        location = self.store.location(unit, kind)
        assert isinstance(location, HostLocation)
        return location.block

    # -- Content -----------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> UndecidedContent:
        """Begins an update of a unit that `can_be_undecided` and has its memory. Returns what its
        writes to NVMe go to."""
        beside = self._beside.get(unit.index)
        if beside is not None:
            beside.is_filled = False
            beside.arrays = {k: self._pool.tensor(block) for k, block in beside.blocks.items()}
        content = self.contents[unit.index] = UndecidedContent()
        return content

    def into(self, unit: Unit) -> Mapping[StateKind, torch.Tensor]:
        """Returns where an update of the unit writes new bytes, by state kind: uint8, all of the
        kind. What is not there is updated where it is. Holds from `begin` to `bring_home` or
        `drop`."""
        beside = self._beside.get(unit.index)
        return {} if beside is None else beside.arrays

    def is_filled(self, unit: Unit) -> bool:
        """Whether `fill` has nothing to do."""
        beside = self._beside.get(unit.index)
        return beside is None or beside.is_filled or not beside.arrays

    def fill(
        self,
        unit: Unit,
        written: Callable[[StateKind], Iterable[tuple[int, int]]],
        weights: torch.Tensor,
    ) -> None:
        """Copies what an update leaves as it is to where its new bytes go. `written`: returns the
        ranges of a state kind that the update writes, from and to in bytes, ascending. `weights`:
        the unit's, uint8, checked out."""
        beside = self._beside[unit.index]
        beside.is_filled = True
        for kind, new in beside.arrays.items():
            old = weights if kind is StateKind.PARAMETERS else self.store.host_view(unit, kind)
            assert old is not None
            at = 0
            for start, stop in (*written(kind), (old.numel(), old.numel())):
                if at < start:
                    copy_(new[at:start], old[at:start])
                at = max(at, stop)

    def publish(self, unit: Unit) -> None:
        """Makes what an undecided update has written to NVMe the unit's state, if there is one.
        Nobody reads the unit before `bring_home`."""
        content = self.contents.pop(unit.index, None)
        if content is not None and content.runs:
            assert self.store.volume is not None
            self.store.volume.publish(content)

    def bring_home(self, unit: Unit) -> None:
        """Makes what an update has written beside the host's bytes the unit's state: all of the
        unit is updated, its weights are checked in, and nobody reads it. Its memory stays until
        `free`."""
        assert unit.index not in self.contents
        beside = self._beside.get(unit.index)
        if beside is None or not beside.arrays:
            return
        for kind, block in beside.blocks.items():
            if kind is StateKind.PARAMETERS and self._leaves_home is None:
                home = self.store.host_view(unit, kind)
                assert home is not None
                copy_(home[: unit.trainable_nbytes], beside.arrays[kind][: unit.trainable_nbytes])
                continue
            if self._leaves_home is not None:
                is_left = self._leaves_home(unit, kind)
                assert is_left, f"{kind.value} of {unit.name} is in use"
            self._exchange(unit, kind, block)
        beside.arrays = {}

    def drop(self, unit: Unit) -> None:
        """Takes an undecided update back, if there is one. Its memory stays until `free`."""
        self.contents.pop(unit.index, None)
        beside = self._beside.get(unit.index)
        if beside is not None:
            beside.arrays = {}

    def _is_on_host(self, unit: Unit, kind: StateKind) -> bool:
        return isinstance(self.store.location(unit, kind), HostLocation)
