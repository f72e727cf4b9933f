"""Where every piece of training state rests, and moving ranges of it through host blocks.

The store knows nothing of time: what to move and when is the schedule's business. A piece rests in
exactly one home. Reads bring a range of a piece into a host block, writes take it back; a piece
whose home the host can address itself is reached by `resting`, without a copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.observe import Counters, Lane
from infinity.state.placement import Placement
from infinity.state.units import Piece, Unit
from infinity.storage.engine import Priority, Ticket
from infinity.storage.volume import Extent, Volume
from infinity.tiers.device import FINISHED, DeviceAdapter
from infinity.tiers.host import Block, HostTier


class Transfer(Protocol):
    """A range on its way. `wait` raises what went wrong, every time it is asked."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HostHome:
    """Rests in the arena."""

    block: Block


@dataclass(frozen=True, slots=True)
class NvmeHome:
    """Rests in extents of the volume."""

    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class DeviceHome:
    """Rests in device memory: uint8, shape (nbytes,)."""

    memory: torch.Tensor


Home = HostHome | NvmeHome | DeviceHome


def rewritten_nbytes(unit: Unit, piece: Piece) -> int | None:
    """The head of a piece that every step rewrites and a commit keeps; None where it keeps copies:
    of gradients, of which there are seldom any between steps, and of moments of eight bits."""
    if piece is Piece.GRADIENTS or unit.is_8bit(piece):
        return None
    return unit.trainable_nbytes if piece is Piece.PARAMETERS else unit.nbytes(piece)


def show(
    counters: Counters, volume: Volume, ticket: Ticket, lane: Lane, what: str, asked_ns: int
) -> None:
    """Lets a trace know of a transfer of the volume, if there is one."""
    if counters.tracer.is_on:
        counters.tracer.watch(ticket, lambda file: f"{lane} {volume.path_of(file)}", what, asked_ns)


class StateStore:
    """The homes of all pieces. Owns the blocks, extents and device memory they rest in."""

    def __init__(
        self,
        units: Sequence[Unit],
        placement: Placement,
        *,
        host: HostTier,
        volume: Volume | None,
        device: DeviceAdapter,
        counters: Counters,
    ) -> None:
        self.units = tuple(units)
        self._host = host
        self._volume = volume
        self._device = device
        self._counters = counters
        self._homes: dict[tuple[int, Piece], Home] = {}
        self._settle(placement)

    def _settle(self, placement: Placement) -> None:
        """Takes the space of every piece. Fresh pieces read as zeros on every tier."""
        on_nvme: list[tuple[Unit, Piece]] = []
        for (index, piece), tier in placement.tiers.items():
            unit = self.units[index]
            nbytes = unit.nbytes(piece)
            if tier == "nvme":
                on_nvme.append((unit, piece))
            elif tier == "device":
                self._homes[index, piece] = DeviceHome(self._device.allocate(nbytes))
            else:
                block = self._host.allocate(nbytes, f"{piece.value} of {unit.name}")
                assert block is not None, "the placement fitted the budget, so the arena has room"
                self._host.tensor(block).zero_()
                self._homes[index, piece] = HostHome(block)
        if on_nvme:
            assert self._volume is not None
            extents = self._volume.reserve(
                [unit.nbytes(piece) for unit, piece in on_nvme],
                spared_nbytes=[rewritten_nbytes(unit, piece) for unit, piece in on_nvme],
            )
            for (unit, piece), taken in zip(on_nvme, extents, strict=True):
                self._homes[unit.index, piece] = NvmeHome(tuple(taken))

    @property
    def volume(self) -> Volume | None:
        """Where the pieces on NVMe are; None when there are none."""
        return self._volume

    def home(self, unit: Unit, piece: Piece) -> Home | None:
        """Where the piece rests; None when the unit has no such piece."""
        return self._homes.get((unit.index, piece))

    def resting(self, unit: Unit, piece: Piece) -> torch.Tensor | None:
        """The resting bytes themselves, uint8 (nbytes,), where the host can address them."""
        home = self._homes.get((unit.index, piece))
        if isinstance(home, HostHome):
            return self._host.tensor(home.block)
        if isinstance(home, DeviceHome) and self._device.shares_host_memory:
            return home.memory
        return None

    def read(
        self,
        unit: Unit,
        piece: Piece,
        block: Block,
        *,
        priority: Priority,
        offset_nbytes: int = 0,
        nbytes: int | None = None,
    ) -> Transfer:
        """Starts bringing a range of the piece to the start of `block`. Whole pages only."""
        home = self._homes[unit.index, piece]
        length = unit.nbytes(piece) - offset_nbytes if nbytes is None else nbytes
        if isinstance(home, NvmeHome):
            assert self._volume is not None
            self._counters.add("nvme_read_nbytes", length)
            asked_ns = time.monotonic_ns()
            what = f"{piece.value} of {unit.name}"
            ticket = self._volume.read(
                home.extents,
                offset_nbytes=offset_nbytes,
                nbytes=length,
                address=block.address,
                priority=priority,
                label=what,
            )
            show(self._counters, self._volume, ticket, Lane.READS, what, asked_ns)
            return ticket
        return self._copy(
            home, offset_nbytes, self._host.tensor(block, nbytes=length), inward=False
        )

    def write(
        self,
        unit: Unit,
        piece: Piece,
        block: Block,
        *,
        offset_nbytes: int = 0,
        nbytes: int | None = None,
    ) -> Transfer:
        """Starts writing the start of `block` to a range of the piece. Whole pages only.

        The block must stay lent and unchanged until the transfer is done.
        """
        home = self._homes[unit.index, piece]
        length = unit.nbytes(piece) - offset_nbytes if nbytes is None else nbytes
        if isinstance(home, NvmeHome):
            assert self._volume is not None
            assert not block.is_mapped_away
            self._counters.add("nvme_write_nbytes", length)
            asked_ns = time.monotonic_ns()
            ticket = self._volume.write(
                home.extents,
                offset_nbytes=offset_nbytes,
                nbytes=length,
                address=block.address,
                priority=Priority.WRITE_BACK,
            )
            what = f"{piece.value} of {unit.name}"
            show(self._counters, self._volume, ticket, Lane.WRITES, what, asked_ns)
            return ticket
        return self._copy(home, offset_nbytes, self._host.tensor(block, nbytes=length), inward=True)

    def _copy(
        self, home: Home, offset_nbytes: int, host: torch.Tensor, *, inward: bool
    ) -> Transfer:
        """Between a host range and a home that is not on NVMe."""
        if isinstance(home, HostHome):
            rest = self._host.tensor(home.block, offset_nbytes, host.numel())
            _ = rest.copy_(host) if inward else host.copy_(rest)
            return FINISHED
        assert isinstance(home, DeviceHome)
        rest = home.memory[offset_nbytes : offset_nbytes + host.numel()]
        return self._device.copy(host, rest) if inward else self._device.copy(rest, host)

    def placed(self) -> Mapping[tuple[int, Piece], Home]:
        return self._homes
