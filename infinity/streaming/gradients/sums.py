"""One unit's sum of gradients: where it is, and what may happen to it next.

A unit's sum is, at any moment, in one of these states:

  state      host block                      next
  AT_REST    none                            ON_HOST (added to, or looked at)
  ON_HOST    lent; gradients are added here, DUE (the backward has left the unit), WRITING,
             and may stay when complete      AT_REST (nobody needs the sum any more)
  DUE        lent; the last gradients are    WRITING (they have come), ON_HOST (one more comes)
             still coming from the device
  WRITING    lent; being written, or written ON_HOST (needed again: the write is waited for),
             since                           AT_REST (the block is reclaimed)

Only a sum that rests on NVMe, or that rests nowhere, leaves AT_REST: a sum that rests on the host
or on a device is made in its place. Before any of this, gradients of several micro-batches may be
summed on the device (`device_sums.py`): they leave it for the place on the host in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import torch
from typing_extensions import override

from infinity.errors import UnsupportedError
from infinity.state.store import DeviceLocation, StateStore, Transfer
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, TensorSpec, Unit
from infinity.streaming.gradients.memory import flat_of, shaped
from infinity.streaming.gradients.norm_tasks import NormTask
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_WIDENED_NUMEL = 1 << 20  # Elements that are widened at a time.


def refuse_sparse(spec: TensorSpec, gradient: torch.Tensor) -> None:
    """Raises UnsupportedError for a gradient that is not dense."""
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} has layout {gradient.layout}; expected a dense "
            "one. Build the embedding with sparse=False"
        )


class SumState(Enum):
    """The place of one unit's sum of gradients; `UnitGradients` has the table."""

    AT_REST = auto()
    ON_HOST = auto()
    DUE = auto()
    WRITING = auto()


@dataclass(eq=False, slots=True)
class TensorGradient:
    """The facts about one parameter's gradient."""

    is_present: bool = False
    # Of the present sum, see `CompleteSums.measure`; None: unknown. While `task` computes it, the
    # task reads the sum: Note [Who reads a sum].
    norm: torch.Tensor | None = None
    task: NormTask | None = None
    is_due: bool = False  # The norm will be needed, and no further gradient is expected.
    # What is read of the sum is its product with this fp32 value, which no reader has applied yet.
    scale: float | None = None
    number: int = 0  # Which gradient of the parameter, counted from the first.
    num_changes: int = 0
    # Gradients in the present sum, and in the last one; whether norms of them were needed.
    num_added: int = 0
    num_expected: int = 0
    is_norm_needed: bool = False
    was_norm_needed: bool = False

    @property
    def stamp(self) -> tuple[int, int]:
        """Another one for each content."""
        return self.number, self.num_changes

    def note_added(self, *, counts: bool) -> None:
        """A gradient is about to be added to the sum. `counts`: see `CompleteSums`."""
        self.num_changes += 1
        self.norm = None
        if self.task is not None:
            self.end_task()
        self.num_added += 1
        is_like_last = counts and self.num_added == self.num_expected
        self.is_due = is_like_last and self.was_norm_needed

    def note_scaled(self, scale: float) -> None:
        """The gradient is the product of the sum with `scale` from now on."""
        assert self.is_present and self.scale is None
        self.num_changes += 1
        self.norm = None
        self.end_task()
        self.scale = scale

    def apply_scale(self, flat: torch.Tensor) -> None:
        """Multiplies the sum, fp32 (numel,), by its scale, if it has one. Nobody reads the sum."""
        if self.scale is not None:
            self.end_task()
            self.norm = None
            flat.mul_(self.scale)
            self.scale = None

    def finish_task(self) -> None:
        """Takes the norm from the task that computes it, if there is one. Waits, or computes it.
        Raises what the task has raised; the norm is unknown then."""
        if self.task is not None:
            task, self.task = self.task, None
            self.norm = task.result()

    def finished_norm(self) -> torch.Tensor:
        """Returns the norm, which is known or on its way; see `finish_task`."""
        self.finish_task()
        assert self.norm is not None
        return self.norm

    def end_task(self) -> None:
        """Nobody reads the sum any more, and its norm is not needed. Waits for who does."""
        if self.task is not None:
            self.task.end()
            self.task = None

    def forget(self) -> None:
        """The parameter has no gradient; the next one is another."""
        if self.task is not None:
            self.end_task()
        if self.num_added:
            self.num_expected, self.num_added = self.num_added, 0
            self.was_norm_needed, self.is_norm_needed = self.is_norm_needed, False
        self.is_present, self.norm, self.scale = False, None, None
        self.is_due = False
        self.number += 1


@dataclass(eq=False, slots=True)
class UnitGradients:
    """One unit's sum on its way. Written by `GradientStore` alone."""

    unit: Unit
    # Where the unit's gradients rest: fp32 (state_numel,) that the host can add to, or a device's.
    on_host: torch.Tensor | None = None
    on_device: torch.Tensor | None = None
    state: SumState = SumState.AT_REST
    block: Block | None = None
    array: torch.Tensor | None = None  # The block: fp32 (state_numel,).
    # The gradients, while they are kept in bf16 in the second half of `on_host`: (state_numel,).
    narrow: torch.Tensor | None = None
    writing: Transfer | None = None  # While WRITING.
    _places: dict[TensorSpec, torch.Tensor] = field(default_factory=dict)  # Of the array.

    def known_place(self, spec: TensorSpec) -> torch.Tensor | None:
        """Returns the result of `place` if it is known and the host may add to it at once."""
        is_open = self.on_host is not None or self.state is SumState.ON_HOST
        return self._places.get(spec) if is_open else None

    def place(self, spec: TensorSpec, array: torch.Tensor) -> torch.Tensor:
        """Returns the sum of one tensor in the parameter's shape and strides. `array`: `on_host` or
        the block's; its views are kept as long as it, because every gradient asks for one."""
        place = self._places.get(spec)
        if place is None:
            place = self._places[spec] = shaped(flat_of(array, spec), spec)
        return place

    def narrow_form(self) -> torch.Tensor:
        """Returns the memory of `narrow`. A widening of it in order overwrites what is widened."""
        assert self.on_host is not None
        return self.on_host.view(torch.bfloat16)[self.on_host.numel() :]

    def widen(self) -> None:
        """Writes the gradients of `narrow` to `on_host`, over them. Nobody reads them."""
        assert self.on_host is not None and self.narrow is not None
        sources, targets = (array.split(_WIDENED_NUMEL) for array in (self.narrow, self.on_host))
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.float())  # A copy first: at the end they overlap.

    def lend(self, block: Block, array: torch.Tensor) -> None:
        """AT_REST -> ON_HOST; the array has the sum."""
        assert self.state is SumState.AT_REST
        self.block, self.array, self.state = block, array, SumState.ON_HOST

    def await_more(self) -> None:
        """DUE -> ON_HOST; another state stays."""
        if self.state is SumState.DUE:
            self.state = SumState.ON_HOST

    def make_due(self) -> None:
        """ON_HOST -> DUE."""
        assert self.state in (SumState.ON_HOST, SumState.DUE)
        self.state = SumState.DUE

    def begin_write(self, writing: Transfer) -> None:
        """ON_HOST -> WRITING."""
        assert self.state is SumState.ON_HOST
        self.writing, self.state = writing, SumState.WRITING

    def end_write(self) -> None:
        """WRITING -> ON_HOST; the write is over."""
        assert self.state is SumState.WRITING
        self.writing, self.state = None, SumState.ON_HOST

    def give_up_block(self) -> Block:
        """Any state with a block -> AT_REST. The block is the caller's from now on."""
        block = self.block
        assert block is not None
        self._places.clear()
        self.block = self.array = self.writing = None
        self.state = SumState.AT_REST
        return block


def has_any(tensors: Mapping[TensorSpec, TensorGradient], unit: Unit) -> bool:
    """Whether a tensor of the unit has a gradient."""
    return any(tensors[spec].is_present for spec in unit.trainable())


def sums_of(unit: Unit, store: StateStore) -> UnitGradients:
    """Returns a unit's sum at rest, where the store has it."""
    on_host = store.host_view(unit, StateKind.GRADIENTS)
    location = store.location(unit, StateKind.GRADIENTS)
    return UnitGradients(
        unit,
        None if on_host is None else on_host.view(torch.float32),
        location.memory.view(torch.float32) if isinstance(location, DeviceLocation) else None,
    )


class SumBlocks(Protocol):
    """Host blocks that gradients of a unit are summed in: fp32 (state_numel,).

    `to_come_nbytes`: blocks that were taken in the last step and not yet in this one.
    `spare_nbytes`: returns the free memory that nobody needs; None: sums are written at once.
    """

    to_come_nbytes: int
    spare_nbytes: Callable[[], int] | None = None

    def take(self, unit: Unit) -> Block:
        """Returns a host block for the fp32 sums of a unit. Raises CapacityError."""

    def give_back(self, block: Block) -> None:
        """Frees a block from `take`."""

    def end_step(self) -> None:
        """The next step is expected to take the blocks that this one has taken."""


class PooledSumBlocks(SumBlocks):
    """Takes each block from the pool when it is needed."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.to_come_nbytes = 0
        self._expected: dict[int, int] = {}  # Bytes by unit, not yet taken in this step.
        self._taken: dict[int, int] = {}

    @override
    def take(self, unit: Unit) -> Block:
        nbytes = unit.state_numel * STATE_ITEM_NBYTES  # Also of a unit with no home for them.
        block = self._pool.require(nbytes, f"gradients of {unit.name}")
        self._taken[unit.index] = nbytes
        self.to_come_nbytes -= self._expected.pop(unit.index, 0)
        return block

    @override
    def give_back(self, block: Block) -> None:
        self._pool.free(block)

    @override
    def end_step(self) -> None:
        self._expected, self._taken = self._taken, {}
        self.to_come_nbytes = sum(self._expected.values())
