"""Gradients on their way from a device to the host.

The first gradient of a sum is copied to its place. A later one is copied to staging blocks, and
added to the place when the copy is over. Copies end in the order in which they were started, and so
do the additions (INV-8).

Note [Out of the device]
  A gradient leaves a device with memory of its own for its place on the host. That is bf16 where
  the update reads it so (`narrow.py`). Else the device widens it to fp32: twice the bytes
  cross the link, and the host's memory, which bounds the updates, moves 4 bytes an element where it
  would move 10. The host does not wait while the backward runs: what is due to be written waits for
  its copies, and the computation waits for those of the unit before the last, whose memory is free
  then. A further gradient of a sum that is on the host passes staging
  blocks, and is added when its copy is over, by the engine's worker or by the next call. Where
  several micro-batches go through one block they are summed on the device first
  (`device_sums.py`), in the same order, and leave it once; outside of blocks, too, where the device
  has memory for the sums.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infinity.errors import InfinityError
from infinity.observe import Counters
from infinity.ops.host_sums import add_
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.staging import GradientStaging, StagingBlock
from infinity.tiers.device import Copy, DeviceAdapter

_WIDENED_NUMEL = 8 << 20  # Elements that the device widens at a time: 32 MiB of fp32.


@dataclass(frozen=True, slots=True)
class _Addition:
    """What follows a copy to a staging block. `staged` and `target`: (numel,) of one part."""

    block: StagingBlock
    staged: torch.Tensor
    target: torch.Tensor  # Fp32.


@dataclass(frozen=True, slots=True)
class LeavingGradient:
    """A gradient, or a part of one, that is copied to its place on the host, or added there."""

    unit: Unit
    spec: TensorSpec
    copy: Copy
    nbytes: int  # Of device memory that is kept until then.
    place: torch.Tensor | None  # Of all of the gradient, (numel,); None: another part follows.
    addition: _Addition | None = None


class LeavingGradients:
    """The copies under way, oldest first. Under the engine's lock.

    `most_kept_nbytes`: device memory that is kept for copies, beside that of the last one. `note`
    is called with each part that is in its place.
    """

    def __init__(
        self,
        device: DeviceAdapter,
        staging: GradientStaging,
        counters: Counters,
        most_kept_nbytes: int,
        note: Callable[[LeavingGradient], None],
    ) -> None:
        self._device = device
        self._staging = staging
        self._counters = counters
        self._note = note
        self.num_additions = 0  # Those that are due.
        self.has_worker = False  # Which calls `add_next`.
        self._most_kept_nbytes = most_kept_nbytes
        self._leaving: deque[LeavingGradient] = deque()  # Not on the host, or not known to be.
        self._awaited: Copy | None = None  # By the end of a backward.
        self._keeping: deque[LeavingGradient] = deque()  # Those whose device memory is kept.

    def __bool__(self) -> bool:
        return bool(self._leaving)

    def start(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient, flat and at most fp32, to its place, (numel,), of its dtype or
        fp32.

        The device widens it, in parts, so that the host's cores and memory, which updates need, do
        not.
        """
        numel = place.numel() if flat.dtype is place.dtype else _WIDENED_NUMEL
        for source, target in zip(flat.split(numel), place.split(numel), strict=True):
            wide = source.to(place.dtype)
            is_last = target.data_ptr() + target.nbytes == place.data_ptr() + place.nbytes
            copy = self._device.copy(wide, target)
            self._keep(LeavingGradient(unit, spec, copy, wide.nbytes, place if is_last else None))

    def add(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient, flat and at most fp32, that is added to its place when it has
        come. Waits for the oldest copies while no staging block is free."""
        numel = self._staging.part_nbytes // flat.dtype.itemsize
        for source, target in zip(flat.split(numel), place.split(numel), strict=True):
            while (block := self._staging.take()) is None:
                self._end(1, "a staging block for gradients is taken")
            staged = block.memory[: source.nbytes].view(flat.dtype)
            is_last = target.data_ptr() + target.nbytes == place.data_ptr() + place.nbytes
            copy = self._device.copy(source, staged)
            self.num_additions += 1
            addition = _Addition(block, staged, target)
            after = place if is_last else None
            self._keep(LeavingGradient(unit, spec, copy, source.nbytes, after, addition))

    def _keep(self, gradient: LeavingGradient) -> None:
        """Lets later kernels wait for the copies whose memory is more than may be kept."""
        self._leaving.append(gradient)
        self._keeping.append(gradient)
        kept_nbytes = sum(kept.nbytes for kept in self._keeping)
        while kept_nbytes > self._most_kept_nbytes and len(self._keeping) > 1:
            oldest = self._keeping.popleft()
            kept_nbytes -= oldest.nbytes
            oldest.copy.order()

    def has(self, spec: TensorSpec) -> bool:
        """Whether a gradient of the tensor is under way."""
        return any(gradient.spec is spec for gradient in self._leaving)

    def units(self) -> list[Unit]:
        """Returns the units of all gradients under way."""
        return [gradient.unit for gradient in self._leaving]

    def end_there(self) -> None:
        """Ends the copies that are over, in order. Never waits. Additions are the worker's, if
        there is one."""
        while self._leaving and not (self.has_worker and self._leaving[0].addition):
            if not self._leaving[0].copy.done():
                return
            self._end_oldest()

    def next_wait(self) -> Callable[[], None] | None:
        """Ends the copies that are over, with their additions. Returns the wait for the next one,
        which needs no lock and is to follow at once; None: no copy is left."""
        while self._leaving:
            copy = self._leaving[0].copy
            if copy is not self._awaited and not copy.done():
                self._awaited = copy  # Over when this is called again.
                return partial(self._wait, copy)
            self._end_oldest()
        return None

    def _wait(self, copy: Copy) -> None:
        with self._counters.timed("copy_wait_s", "gradients leave the device", (copy,)):
            copy.wait()

    def end_all(self) -> None:
        """Waits for all copies; all additions are made."""
        if self._leaving:
            self._end(len(self._leaving), "gradients leave the device")

    def add_next(self) -> Sequence[Copy] | None:
        """Makes an addition that is due. Never waits: returns the copy that the next one needs,
        none if it was made, or None if none is due, or the copy has failed: who needs the sum next
        meets the error."""
        if not self.num_additions:
            return None
        copy = self._leaving[0].copy
        try:
            if not copy.done():
                return (copy,)
            copy.wait()
        except InfinityError:
            return None
        self._end_oldest()
        return ()

    def _end(self, count: int, what: str) -> None:
        copies = [gradient.copy for gradient in itertools.islice(self._leaving, count)]
        with self._counters.timed("copy_wait_s", what, copies):
            for _ in range(count):
                self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = self._leaving.popleft()
        if self._keeping and self._keeping[0] is oldest:
            self._keeping.popleft()
        addition = oldest.addition
        if addition is None:
            oldest.copy.wait()
        else:
            self.num_additions -= 1
            try:
                oldest.copy.wait()
                add_(addition.target, addition.staged)
            finally:
                self._staging.give_back(addition.block)
        self._note(oldest)

    def clear(self) -> None:
        """Forgets all copies."""
        self._leaving.clear()
        self._keeping.clear()
        self.num_additions = 0
