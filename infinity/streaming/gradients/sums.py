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
summed on the device (`leaving.py`): they leave it for the place on the host in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from infinity.errors import UnsupportedError
from infinity.ops.host_sums import LEAST_NBYTES, add_, copy_
from infinity.state.store import DeviceLocation, StateStore
from infinity.state.units import StateKind, TensorSpec, Unit
from infinity.storage.protocol import Transfer
from infinity.tiers.host import Block

_WIDENED_NUMEL = 1 << 20  # Elements that are widened at a time.


def flat_of(array: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements in its unit's array of state."""
    return array[spec.state_offset : spec.state_offset + spec.numel]


def shaped(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns a view of flat memory with shape and stride of the parameter."""
    return flat.as_strided(spec.facts.shape, spec.facts.stride)


def in_memory_order(gradient: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements as they lie in memory when it has the parameter's strides: flat."""
    if gradient.stride() != spec.facts.stride:
        laid_out = torch.empty_strided(
            spec.facts.shape, spec.facts.stride, dtype=gradient.dtype, device=gradient.device
        )
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided((spec.numel,), (1,))


def put(target: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """Copies a gradient to `target`, or adds it if it is not the first one there."""
    if target.nbytes < LEAST_NBYTES:  # torch's, and no call of Python more.
        _ = target.copy_(gradient) if first else target.add_(gradient)
    else:
        _ = copy_(target, gradient) if first else add_(target, gradient)


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
class UnitGradients:
    """One unit's sum on its way. Only its methods write its fields."""

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

    def add(self, spec: TensorSpec, gradient: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Copies a gradient to its place on the host, or adds it if it is not the first one there.
        Returns the place: the parameter's shape and strides. The views are kept as long as the
        array, because every gradient asks for one."""
        place = self._places.get(spec)
        if place is None:
            array = self.array if self.on_host is None else self.on_host
            assert array is not None
            place = self._places[spec] = shaped(flat_of(array, spec), spec)
        if place.nbytes < LEAST_NBYTES:  # As `put`, and no call of Python more.
            _ = place.copy_(gradient) if first else place.add_(gradient)
        else:
            put(place, gradient, first=first)
        return place

    def begin_narrow(self) -> None:
        """The gradients that come are kept in bf16. A widening in order overwrites what is
        widened."""
        assert self.on_host is not None
        self.narrow = self.on_host.view(torch.bfloat16)[self.on_host.numel() :]

    def end_narrow(self, *, widens: bool) -> None:
        """Ends the form in bf16. With `widens` its gradients are written to `on_host`, over them.
        Nobody reads them."""
        if widens:
            assert self.on_host is not None and self.narrow is not None
            narrow, wide = (a.split(_WIDENED_NUMEL) for a in (self.narrow, self.on_host))
            for source, target in zip(narrow, wide, strict=True):
                target.copy_(source.float())  # A copy first: at the end they overlap.
        self.narrow = None

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


def sums_of(unit: Unit, store: StateStore) -> UnitGradients:
    """Returns a unit's sum at rest, where the store has it."""
    on_host = store.host_view(unit, StateKind.GRADIENTS)
    location = store.location(unit, StateKind.GRADIENTS)
    return UnitGradients(
        unit,
        None if on_host is None else on_host.view(torch.float32),
        location.memory.view(torch.float32) if isinstance(location, DeviceLocation) else None,
    )
