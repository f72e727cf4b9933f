"""Keeps the locations of all training state, and moves ranges of it through host blocks.

The callers decide what moves and when. A state kind of a unit rests in exactly one location. A read
copies a range into a host block, a write copies it back. `host_view` returns state that the host
can address where it rests, without a copy.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.observe import Counters, Track
from infinity.state.placement import StatePlacement
from infinity.state.stored import StoredWeights
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import PageDigests
from infinity.storage.generations import UndecidedContent
from infinity.storage.protocol import Priority, Ticket, Transfer
from infinity.storage.shards import ShardFiles
from infinity.storage.volume import Extent, Spared, Volume
from infinity.tiers.device import FINISHED, Copy, DeviceAdapter
from infinity.tiers.host import Block, HostPool


# INV-2: the block of a transfer is freed only behind this.
def await_end(transfer: Transfer | None) -> None:
    """Waits until a transfer has ended, and raises nothing: its error was raised elsewhere, or an
    interrupt is on its way. An interrupt does not end the wait."""
    while transfer is not None and not transfer.done():
        try:
            transfer.wait()
        except Exception:
            return
        except BaseException:  # Another Ctrl-C: the first one is being raised.
            continue


@dataclass(frozen=True, slots=True)
class HostLocation:
    """Rests in the arena."""

    block: Block


@dataclass(frozen=True, slots=True)
class NvmeLocation:
    """Rests in extents of the volume."""

    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Rests in device memory: uint8, shape (nbytes,)."""

    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Rests in a checkpoint's own files, which are never written."""

    stored: StoredWeights


StateLocation = HostLocation | NvmeLocation | DeviceLocation | CheckpointLocation

# Fills the bytes of a unit's weights.
FirstValues = Callable[[torch.Tensor], None]


def changing_kinds(unit: Unit) -> list[StateKind]:
    """Returns the state kinds of a unit that an update changes, of those that the unit has."""
    kinds = (StateKind.PARAMETERS, StateKind.MASTER, *unit.moments.kinds)
    return [kind for kind in kinds if unit.nbytes(kind)]


def spared(unit: Unit, kind: StateKind) -> Spared | None:
    """Returns what needs space in spare files of a state kind: the bytes that every step rewrites.

    None for gradients, which seldom exist between steps. Commits have copies of moments of eight
    bits, so early updates alone need their old bytes.
    """
    if kind is StateKind.GRADIENTS:
        return None
    nbytes = unit.trainable_nbytes if kind is StateKind.PARAMETERS else unit.nbytes(kind)
    return Spared(nbytes, is_private=unit.is_8bit(kind))


def show(
    counters: Counters,
    files: Volume | ShardFiles,
    ticket: Ticket,
    track: Track,
    what: str,
    asked_ns: int,
) -> None:
    """Lets a trace know of a transfer of the files, if there is one."""
    if counters.tracer.is_on:
        counters.tracer.watch(ticket, lambda file: f"{track} {files.path_of(file)}", what, asked_ns)


class RestingState:
    """The locations of this process's state. Owns the blocks, extents and device memory of it."""

    def __init__(
        self,
        units: Sequence[Unit],
        placement: StatePlacement,
        *,
        host: HostPool,
        volume: Volume | None,
        device: DeviceAdapter,
        shards: ShardFiles | None = None,
    ) -> None:
        self.units = tuple(units)  # By index.
        self.volume = volume  # With the state on NVMe; None when no state rests there.
        self.shards = shards  # Of units that rest in a checkpoint; None without such units.
        self._host = host
        self._device = device
        self._locations: dict[tuple[int, StateKind], StateLocation] = {}
        # Of blocks that are never mapped away: asked for every gradient.
        self._views: dict[tuple[int, StateKind], torch.Tensor] = {}
        self._lock = threading.Lock()  # Makes a view and `exchange` follow each other.
        self._settle(placement)

    def _settle(self, placement: StatePlacement) -> None:
        """Allocates the space of all state. Fresh state reads as zeros on every tier."""
        on_nvme: list[tuple[Unit, StateKind]] = []
        for (index, kind), tier in placement.tiers.items():
            unit = self.units[index]
            nbytes = unit.nbytes(kind)
            if tier == "checkpoint":
                assert unit.stored is not None
                self._locations[index, kind] = CheckpointLocation(unit.stored)
            elif tier == "nvme":
                on_nvme.append((unit, kind))
            elif tier == "device":
                self._locations[index, kind] = DeviceLocation(self._device.allocate(nbytes))
            else:
                block = self._host.allocate(nbytes, f"{kind.value} of {unit.name}")
                assert block is not None, "the placement fitted the budget, so the arena has space"
                self._host.tensor(block).zero_()
                self._locations[index, kind] = HostLocation(block)
        if on_nvme:
            assert self.volume is not None
            extents = self.volume.reserve(
                [unit.nbytes(kind) for unit, kind in on_nvme],
                spared=[spared(unit, kind) for unit, kind in on_nvme],
            )
            for (unit, kind), taken in zip(on_nvme, extents, strict=True):
                self._locations[unit.index, kind] = NvmeLocation(tuple(taken))

    def location(self, unit: Unit, kind: StateKind) -> StateLocation | None:
        """The location of a state kind of a unit; None when the unit has none of it."""
        return self._locations.get((unit.index, kind))

    def placed(self) -> Mapping[tuple[int, StateKind], StateLocation]:
        """The location of each state kind of each unit, by (index, kind)."""
        return self._locations

    def close(self) -> None:
        """Gives up its views of memory."""
        self._views.clear()

    # INV-7: the location of bytes is known here alone; arithmetic does not depend on it.
    def host_view(self, unit: Unit, kind: StateKind) -> torch.Tensor | None:
        """The resting bytes themselves, uint8 (nbytes,), where the host can address them."""
        view = self._views.get((unit.index, kind))
        if view is not None:
            return view
        location = self._locations.get((unit.index, kind))
        if isinstance(location, HostLocation):
            with self._lock:
                view = self._host.tensor(location.block)
                if kind is not StateKind.PARAMETERS:  # Its pages may stand in a window.
                    self._views[unit.index, kind] = view
            return view
        if isinstance(location, DeviceLocation) and self._device.shares_host_memory:
            return location.memory
        return None

    def exchange(self, unit: Unit, kind: StateKind, block: Block) -> None:
        """Makes the bytes in `block` the state, which rests on the host: the memory of the two
        blocks is exchanged. Views from before are of the old bytes, which `block` has then."""
        location = self._locations[unit.index, kind]
        assert isinstance(location, HostLocation)
        with self._lock:
            self._host.exchange(location.block, block)
            self._views.pop((unit.index, kind), None)


@dataclass(frozen=True, slots=True)
class StateRange:
    """Bytes of one state kind of a unit."""

    unit: Unit
    kind: StateKind
    offset_nbytes: int
    nbytes: int

    @staticmethod
    def of(unit: Unit, kind: StateKind, offset_nbytes: int, nbytes: int | None) -> StateRange:
        """Returns the range from an offset on; without `nbytes` to the end."""
        length = unit.nbytes(kind) - offset_nbytes if nbytes is None else nbytes
        return StateRange(unit, kind, offset_nbytes, length)

    @property
    def what(self) -> str:
        """The range in the words of messages and traces."""
        return f"{self.kind.value} of {self.unit.name}"


class StateStore(ABC):
    """The state of units, wherever it rests.

    Local: `LocalStore`. Over ranks: `distributed.store.DistributedStore`. The training thread reads
    and writes. `location`, `placed`, `host_view`: of `RestingState`.
    """

    def __init__(self, resting: RestingState) -> None:
        self.resting = resting
        self.units, self.volume, self.shards = resting.units, resting.volume, resting.shards
        self.location, self.placed = resting.location, resting.placed
        self.host_view = resting.host_view

    def put_first(self, unit: Unit, fill: FirstValues) -> bool:
        """Gives a unit's weights on NVMe their first values, which are written together with the
        values that follow. Until then a read calls `fill` on the block; `fill` overwrites all of
        it. Returns False, and keeps nothing, where the weights rest elsewhere, and over ranks: a
        rank writes the first values of its shards as they come."""
        del unit, fill
        return False

    def unwritten(self) -> list[Unit]:
        """Returns the units whose first values are not on NVMe yet."""
        return []

    def read(
        self,
        unit: Unit,
        kind: StateKind,
        block: Block,
        *,
        priority: Priority,
        offset_nbytes: int = 0,
        nbytes: int | None = None,
    ) -> Transfer:
        """Starts reading a range of the state into the start of `block`. Whole pages only."""
        return self._read(StateRange.of(unit, kind, offset_nbytes, nbytes), block, priority)

    def write(
        self,
        unit: Unit,
        kind: StateKind,
        block: Block,
        *,
        offset_nbytes: int = 0,
        nbytes: int | None = None,
        priority: Priority = Priority.WRITE_BACK,
        undecided: UndecidedContent | None = None,
        digests: PageDigests | None = None,
    ) -> Transfer:
        """Starts writing the start of `block` to a range of the state. Whole pages only.

        The block must stay lent and unchanged until the transfer is done. Of state on NVMe,
        `undecided` gets what is written, until `Volume.publish`. `digests`: of the bytes, from
        `Volume.digests`.
        """
        at = StateRange.of(unit, kind, offset_nbytes, nbytes)
        return self._write(at, block, priority, undecided, digests)

    @abstractmethod
    def _read(self, at: StateRange, block: Block, priority: Priority) -> Transfer:
        """See `read`."""

    @abstractmethod
    def _write(
        self,
        at: StateRange,
        block: Block,
        priority: Priority,
        undecided: UndecidedContent | None,
        digests: PageDigests | None,
    ) -> Transfer:
        """See `write`."""


class LocalStore(StateStore):
    """Reads and writes the state of this process."""

    def __init__(
        self, resting: RestingState, host: HostPool, device: DeviceAdapter, counters: Counters
    ) -> None:
        super().__init__(resting)
        self._host = host
        self._device = device
        self._counters = counters
        self._first_values: dict[int, FirstValues] = {}  # By unit; until its weights are written.
        # The last copy to memory of the device, and from it: those before it are over when it is.
        self._last: dict[tuple[int, StateKind, bool], Copy] = {}

    @override
    def put_first(self, unit: Unit, fill: FirstValues) -> bool:
        if not isinstance(self.location(unit, StateKind.PARAMETERS), NvmeLocation):
            return False
        self._first_values[unit.index] = fill
        return True

    @override
    def unwritten(self) -> list[Unit]:
        return [self.units[index] for index in self._first_values]

    @override
    def _read(self, at: StateRange, block: Block, priority: Priority) -> Transfer:
        location = self.location(at.unit, at.kind)
        assert location is not None
        if at.kind is StateKind.PARAMETERS and at.unit.index in self._first_values:
            assert at.nbytes == at.unit.weight_nbytes
            self._first_values[at.unit.index](self._host.tensor(block, nbytes=at.nbytes))
            return FINISHED
        if isinstance(location, NvmeLocation):
            assert self.volume is not None
            self._counters.add("nvme_read_nbytes", at.nbytes)
            asked_ns = time.monotonic_ns()
            ticket = self.volume.read(
                location.extents,
                offset_nbytes=at.offset_nbytes,
                nbytes=at.nbytes,
                address=block.address,
                priority=priority,
                label=at.what,
            )
            show(self._counters, self.volume, ticket, Track.READS, at.what, asked_ns)
            return ticket
        if isinstance(location, CheckpointLocation):
            stored = location.stored
            if at.nbytes < stored.nbytes:
                stored = stored.cut(at.offset_nbytes, at.offset_nbytes + at.nbytes)
            return self._read_shards(at.unit, stored, block, priority)
        return self._copy(location, at, block, inward=False)

    def _read_shards(
        self, unit: Unit, stored: StoredWeights, block: Block, priority: Priority
    ) -> Transfer:
        if not stored.runs:  # Of a unit with fewer pages than ranks.
            return FINISHED
        assert self.shards is not None
        self._counters.add("nvme_read_nbytes", stored.nbytes)
        self._counters.add("shard_read_nbytes", stored.nbytes)
        asked_ns = time.monotonic_ns()
        what = f"parameters of {unit.name}"
        ticket = self.shards.read(stored.runs, address=block.address, priority=priority, label=what)
        show(self._counters, self.shards, ticket, Track.READS, what, asked_ns)
        return ticket

    @override
    def _write(
        self,
        at: StateRange,
        block: Block,
        priority: Priority,
        undecided: UndecidedContent | None,
        digests: PageDigests | None,
    ) -> Transfer:
        location = self.location(at.unit, at.kind)
        assert location is not None
        if not isinstance(location, NvmeLocation):
            return self._copy(location, at, block, inward=True)
        assert self.volume is not None
        assert not block.is_mapped_away
        self._counters.add("nvme_write_nbytes", at.nbytes)
        asked_ns = time.monotonic_ns()
        ticket = self.volume.write(
            location.extents,
            offset_nbytes=at.offset_nbytes,
            nbytes=at.nbytes,
            address=block.address,
            priority=priority,
            undecided=undecided,
            digests=digests,
        )
        if at.kind is StateKind.PARAMETERS and at.unit.index in self._first_values:
            assert at.nbytes == at.unit.weight_nbytes
            del self._first_values[at.unit.index]
        show(self._counters, self.volume, ticket, Track.WRITES, at.what, asked_ns)
        return ticket

    def _copy(
        self, location: StateLocation, at: StateRange, block: Block, *, inward: bool
    ) -> Transfer:
        """Copies between a host block and a location that is not on NVMe."""
        host, offset_nbytes = self._host.tensor(block, nbytes=at.nbytes), at.offset_nbytes
        if isinstance(location, HostLocation):
            rest = self._host.tensor(location.block, offset_nbytes, host.numel())
            _ = rest.copy_(host) if inward else host.copy_(rest)
            return FINISHED
        assert isinstance(location, DeviceLocation)
        rest = location.memory[offset_nbytes : offset_nbytes + host.numel()]
        source, target = (host, rest) if inward else (rest, host)
        # INV-13: each direction has a stream of its own, and would overtake the other.
        behind = self._last.get((at.unit.index, at.kind, not inward), FINISHED)
        copy = self._device.copy(source, target, behind=behind)
        self._last[at.unit.index, at.kind, inward] = copy
        return copy
