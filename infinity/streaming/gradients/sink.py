"""The interface of gradients to modules, engine and updates, of one rank or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Protocol

import torch

from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.tensors import CompleteSums

Lend = Callable[[int], bool]


class GradientSink(Protocol):
    """Takes the gradients of the model's units, and keeps them until the step and after it.

    Local: `GradientStore`. Over ranks: `distributed.sums.reduce.DistributedGradients`. Called
    under the engine's lock.
    """

    norms: CompleteSums  # Has the norms of complete sums computed.
    # Units with sums in bf16: `NarrowSums`. A further gradient of a tensor widens them: an early
    # update with them is taken back before.
    narrow_units: Set[int] = frozenset()

    def add(self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor) -> None:
        """Adds one gradient to the sum: any floating dtype, the parameter's shape, any device."""

    def put(
        self, unit: Unit, spec: TensorSpec, value: torch.Tensor, *, is_other: bool = False
    ) -> None:
        """Makes `value` the sum; see `GradientStore.put`."""

    def forget(self, spec: TensorSpec) -> None:
        """Drops the gradient of a tensor, if it has one."""

    def zero(self, unit: Unit, spec: TensorSpec) -> None:
        """Fills the gradient with zeros, if the tensor has one: `zero_grad(set_to_none=False)`."""

    def stamp(self, spec: TensorSpec) -> tuple[int, int] | None:
        """Returns (number of the gradient, number of its changes); None without a gradient."""

    # The course of a step.
    def begin_accumulating(self) -> None:
        """Begins the sums of several micro-batches.

        Raises CapacityError, before anything is added, if their memory does not suffice.
        """
        return

    def end_accumulating(self) -> None:
        """Ends those sums: each one is where it rests, or a failure ended it."""
        return

    def sum_on_device(self, units: Iterable[Unit], lend: Lend | None = None) -> int:
        """Announces several gradients for each tensor of these units, until `write_out`.

        `lend`: the units are outside of blocks. `lend(nbytes)` lends device memory for the sums of
        one of them, fp32, if there is enough. Without it they are summed where they rest. Returns
        the bytes that were not lent.
        """

    def take_in(self) -> None:
        """Adds the parts that other ranks have sent so far to the sums of this rank."""
        return

    def write_out(self, unit: Unit) -> None:
        """Starts the write of a unit's gradients to where they rest. Does not wait."""

    def next_wait(self) -> Callable[[], None] | None:
        """At the end of a backward: returns the wait for the next gradient that leaves the device.
        The wait needs no lock, so that updates go on. None: all have come. Over ranks: None."""
        return None

    def write_out_all(self) -> None:
        """Ends a backward: starts the writes of all gradients."""

    # Clipping. A factor of a gradient waits until somebody reads or changes the gradient; an update
    # applies the factor as it reads the sum.
    def note_scaled(self, spec: TensorSpec, factor: float) -> None:
        """Multiplies a gradient, which is there and waits for no factor, by an fp32 value."""

    def is_scaled(self, unit: Unit) -> bool:
        """Whether a gradient of the unit waits for a factor."""

    def apply_scales(self, unit: Unit) -> None:
        """Applies the factors that gradients of the unit wait for. No update reads them."""

    def factors(self, specs: Iterable[TensorSpec]) -> dict[TensorSpec, float]:
        """Returns the factors that some of these gradients wait for; over ranks, of the gradients
        of which this rank has a part."""

    # Memory.
    def prepare_step(self) -> None:
        """Makes every gradient complete for `optimizer.step()`. Does not wait for writes; blocks
        stay lent."""

    def settle(self) -> None:
        """Waits until every gradient is where it rests. No block is lent then, but over ranks those
        that updates read."""

    # Looking.
    def has(self, spec: TensorSpec) -> bool:
        """Whether the tensor has a gradient; over ranks: of any rank."""

    def expect_norms(self, tensors: Iterable[tuple[Unit, TensorSpec]]) -> None:
        """Starts measuring gradients whose norms are asked for next. Over ranks does nothing."""
        del tensors

    def norm(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """Returns the 2-norm of a gradient: an fp32 scalar on the host.

        The bits do not depend on where the gradient rests.
        """

    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """Returns a copy of a gradient: fp32, the shape of the parameter, on the host."""
