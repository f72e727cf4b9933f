"""One unit's weights between their tier and the device: the states, and their writers.

A unit's weights are, at any moment, in one of these states:

  state      host block            device region   next
  ABSENT     none                  empty           READING
  READING    being filled          empty           READY (read done), ABSENT (failed)
  READY      valid                 empty           ATTACHED, STAGED, ABSENT (evicted)
  ARRIVING   none                  being filled,   ATTACHED, STAGED, ABSENT (cancelled)
                                   or empty
  STAGED     valid; none if ranks  empty           ATTACHED, READY, ABSENT (evicted)
             put it together
  ATTACHED   valid, or freed once  valid           READY (detached), ABSENT (detached, evicted)
             copied to a device
             with own memory

The stored bytes of a STAGED unit are on the device, beside its region, and those of an ARRIVING one
with an empty region will be: see decoding.py, Note [Staged ahead].
A unit that rests on the host always has its block; one that rests on the device is always ATTACHED
and has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch

from infinity.state.units import Unit
from infinity.storage.generations import UndecidedContent
from infinity.storage.protocol import Transfer
from infinity.tiers.device import FINISHED, Copy, Decoding, Region
from infinity.tiers.host import Block


class Arrival(Protocol):
    """One unit's weights on their way into its device region."""

    @property
    def arrival(self) -> Copy:
        """Into the region, once settled."""

    @property
    def departure(self) -> Copy:
        """Over when the feeder's bytes are not read any more, once settled."""

    def settle(self, *, is_patient: bool) -> bool:
        """Returns whether the weights will arrive. If not, the region holds nothing.

        Waits for the decision of all ranks, up to a limit; without `is_patient` it does not.
        """


class WeightProvider:
    """The source of a unit's weights. Here: their place at rest, through their host block.

    `DeviceUnshard` (`distributed/collective/unshard.py`) fills a unit's device region from another
    unit, its *feeder*, and from other ranks: `moves.py`, Note [Feeders]. Under the engine's lock.
    """

    # Weights that rest on the host may be changed where the model reads them. Other ranks read them
    # at the block's own address.
    may_change_attached = True

    def __init__(self, *, is_outdated_by_step: bool = False) -> None:
        self.is_outdated_by_step = is_outdated_by_step  # Fetched weights are outdated by a step.

    def feeders(self) -> Mapping[int, int]:
        """Returns units that are never used themselves, and the unit that each one feeds."""
        return {}

    def note_pass(self, *, is_training: bool) -> None:
        """Announces a pass. Without `is_training` nothing may begin."""

    def feeder_of(self, unit: int) -> int | None:
        """The unit that feeds this one; None: these weights come through their host block now."""
        del unit
        return None

    def take_outdated(self, unit: int) -> bool:
        """Whether the feeder was written past the cache since the last call."""
        del unit
        return False

    def begin(
        self,
        unit: int,
        region: Region | None,
        local: torch.Tensor,
        last_write: Callable[[], Transfer],
        decoding: Decoding | None,
    ) -> Arrival:
        """Gives the region its memory, and begins to fill it. `local`: the feeder's bytes, which
        are complete when the transfer of `last_write` is over. `decoding`: of the unit's stored
        bytes, if it has any. Without a region, they go to its memory (`DeviceAdapter.stage`), which
        nobody else uses."""
        raise NotImplementedError


class WeightState(Enum):
    """Residency of one unit's weights; the table is in the docstring of the file."""

    ABSENT = auto()
    READING = auto()
    READY = auto()
    ARRIVING = auto()
    STAGED = auto()
    ATTACHED = auto()


@dataclass(eq=False, slots=True)
class Weights:
    """One unit's weights on their way.

    `WeightMoves` writes the residency (with its `WeightDecoding`: `decoded` and `is_decoding`),
    `WeightCache` writes the uses and the check-outs. No other class writes a field.
    """

    unit: Unit
    region: Region
    rests_on_host: bool
    rests_on_device: bool
    # Residency.
    state: WeightState = WeightState.ABSENT
    block: Block | None = None
    decoded: Block | None = None  # While ATTACHED or checked out, if made from stored bytes here.
    is_decoding: bool = False  # Its blocks stay while space is made for another unit.
    reading: Transfer | None = None
    writing: Transfer | None = None
    arrival: Arrival | None = None  # While ARRIVING.
    feeder: Weights | None = None  # While ARRIVING: the unit it is filled from.
    fills: Weights | None = None  # Of a feeder: the unit that arrives.
    copying: Copy = FINISHED
    dirty_nbytes: int = 0  # The head of the block that is newer than where it rests.
    # Uses and check-outs of callers.
    use_count: int = 0  # Uses in progress: a unit in use is ATTACHED and never evicted.
    is_checked_out: bool = False
    # While checked out, of weights that rest on a device: a host block with parts, at their own
    # offsets.
    host_copy: Block | None = None
    copied_parts: tuple[range, ...] = ()
    undecided: UndecidedContent | None = None  # Of an update that no step has decided.
    awaits_update: bool = False  # These bytes are a step behind: the device must not see them.
    kept_check: Callable[[], None] | None = None  # Raises if they were written since their use.

    @property
    def is_decoded_idle(self) -> bool:
        """Whether the decoded block may be dropped."""
        is_idle = not self.use_count and not self.is_decoding
        return self.decoded is not None and is_idle and self.state is WeightState.ATTACHED

    @property
    def is_quiet(self) -> bool:
        """Whether the unit is not in use, and its host block has the bytes of its tier."""
        is_idle = not self.use_count and not self.is_checked_out and not self.dirty_nbytes
        is_present = self.state in (WeightState.READY, WeightState.ATTACHED)
        is_moved = self.copying.done() and (self.writing is None or self.writing.done())
        return is_idle and is_present and is_moved and self.block is not None

    def check_kept(self) -> None:
        """Calls the check of the unit, once."""
        check, self.kept_check = self.kept_check, None
        if check is not None:
            check()
