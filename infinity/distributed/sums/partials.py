"""Partial gradients that wait to be summed: in memory up to a budget, beyond it on the drives.

A rank knows neither when other ranks send gradients nor how far one of them is behind, so the
waiting bytes have no bound of their own. This file bounds them. A partial gradient that does not
fit the budget is written to scratch space on the drives while it is received, through one block,
and read back when it is summed; its bytes are the same. Without a drive the sender waits until the
owner has freed memory by summing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.distributed.wire.channel import Fill
from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.storage.protocol import Priority
from infinity.storage.scratch_space import Scratch, ScratchSpace
from infinity.storage.volume import Volume
from infinity.tiers.host import Block, HostPool

# A live rank sums, or sends, within this time.
PATIENCE_S = 60.0
_LOOK_S = 0.02  # Between two looks for space.

_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wire_code(dtype: torch.dtype, number: int) -> int:
    """Returns dtype and number of a contribution as one number for a message."""
    return number * len(_WIRE_DTYPES) + _WIRE_DTYPES.index(dtype)


def from_wire_code(code: int) -> tuple[torch.dtype, int]:
    """Returns dtype and number of a contribution: the inverse of `wire_code`."""
    number, index = divmod(code, len(_WIRE_DTYPES))
    return _WIRE_DTYPES[index], number


@dataclass(eq=False, slots=True)
class PartialGradient:
    """A flat part of a gradient. Created and ended by `PartialGradients`."""

    dtype: torch.dtype
    numel: int
    is_mean: bool  # Divided by the number of ranks already.
    values: torch.Tensor | None = None  # None: on the drives.
    scratch: Scratch | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the part."""
        return self.numel * self.dtype.itemsize

    @property
    def kept_nbytes(self) -> int:
        """The bytes of the budget that it takes."""
        return 0 if self.values is None else self.nbytes


class PartialGradients:
    """Memory and scratch space for partial gradients. Thread-safe.

    `window` is a block of the host tier that this object owns; None without `volume`.
    """

    def __init__(
        self,
        budget_nbytes: int,
        *,
        host: HostPool,
        volume: Volume | None,
        window: Block | None,
        counters: Counters,
    ) -> None:
        self.budget_nbytes = budget_nbytes
        self._host = host
        self._volume = volume
        self._window = window
        self._counters = counters
        self._scratch = ScratchSpace(volume) if volume is not None else None
        self._changed = threading.Condition()  # Guards the two below.
        self.kept_nbytes = 0  # In memory.
        self._high_water_nbytes = 0
        self._moving = threading.Lock()  # Of the window.

    # -- In ----------------------------------------------------------------------------------------

    def receive(
        self, dtype: torch.dtype, nbytes: int, fill: Fill, *, window: Block
    ) -> PartialGradient:
        """Returns a partial gradient of the bytes that `fill` receives, in parts of any size.

        `window` belongs to the caller. Waits for space if there is no drive. Raises CapacityError
        if none becomes free, and the errors of `fill`.
        """
        partial = PartialGradient(dtype, nbytes // dtype.itemsize, is_mean=False)
        if self._await_space(nbytes, lambda: None):
            content = bytearray(nbytes)
            try:
                fill(memoryview(content))
            except BaseException:
                self._release(nbytes)
                raise
            partial.values = torch.frombuffer(content, dtype=dtype)
        else:
            partial.scratch = self._spill(nbytes, fill, window)
        return partial

    def put(
        self, values: torch.Tensor, *, is_mean: bool = False, meanwhile: Callable[[], None]
    ) -> PartialGradient:
        """Returns a partial gradient that takes over a flat host tensor.

        Waits for space if there is no drive, and calls `meanwhile` again and again, which frees
        some. Raises CapacityError if none becomes free, and the errors of `meanwhile`.
        """
        partial = PartialGradient(values.dtype, values.numel(), is_mean=is_mean)
        if self._await_space(partial.nbytes, meanwhile):
            partial.values = values
        else:
            self._spill_values(partial, values)
        return partial

    def merge(self, parts: Sequence[PartialGradient], total: torch.Tensor) -> PartialGradient:
        """Ends partial gradients that were read, and returns one with their sum, a mean."""
        partial = PartialGradient(total.dtype, total.numel(), is_mean=True)
        released_nbytes = sum(part.kept_nbytes for part in parts)
        for part in parts:
            self._end(part)
        # Without a drive it stays in memory: it takes no more than its parts did.
        must = self._volume is None
        if self._reserve(partial.nbytes, released_nbytes=released_nbytes, must=must):
            partial.values = total
        else:
            self._spill_values(partial, total)
        return partial

    # -- Out ---------------------------------------------------------------------------------------

    def read(self, partial: PartialGradient) -> torch.Tensor:
        """Returns the values: flat, on the host; the own memory of the partial gradient if it has
        any."""
        if partial.values is not None:
            return partial.values
        values = torch.empty(partial.numel, dtype=partial.dtype, device="cpu")
        content = values.view(torch.uint8)
        assert self._volume is not None and self._window is not None
        assert partial.scratch is not None
        with self._moving:
            for start, part_nbytes in _parts(partial.nbytes, self._window):
                self._volume.read(
                    partial.scratch.extents,
                    offset_nbytes=start,
                    nbytes=align_up(part_nbytes, PAGE_NBYTES),
                    address=self._window.address,
                    priority=Priority.BACKWARD,
                    label="gradients of other ranks",
                ).wait()
                content[start : start + part_nbytes] = self._host.tensor(
                    self._window, nbytes=part_nbytes
                )
        return values

    def drop(self, partial: PartialGradient) -> None:
        """Ends a partial gradient."""
        kept_nbytes = partial.kept_nbytes
        self._end(partial)
        self._release(kept_nbytes)

    # -- Budget ------------------------------------------------------------------------------------

    def _await_space(self, nbytes: int, meanwhile: Callable[[], None]) -> bool:
        """Takes `nbytes` of the budget. Returns False if they have to go to the drives; without a
        drive waits for space."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._reserve(nbytes):
            if self._volume is not None:
                return False
            meanwhile()
            with self._changed:
                self._changed.wait(_LOOK_S)
            if time.monotonic() > deadline_s:
                raise self._no_space(nbytes)
        return True

    def _reserve(self, nbytes: int, *, released_nbytes: int = 0, must: bool = False) -> bool:
        """Takes `nbytes` of the budget after `released_nbytes` are back. Returns whether it had
        them.
        """
        with self._changed:
            self.kept_nbytes -= released_nbytes
            # INV-4: partial gradients keep to their budget.
            is_there = must or self.kept_nbytes + nbytes <= self.budget_nbytes
            if is_there:
                self.kept_nbytes += nbytes
                self._high_water_nbytes = max(self._high_water_nbytes, self.kept_nbytes)
                self._counters.set("ranks_reduce_buffer_high_water_nbytes", self._high_water_nbytes)
            if released_nbytes:
                self._changed.notify_all()
            return is_there

    def _no_space(self, nbytes: int) -> CapacityError:
        """Returns the error of a partial gradient that waited for space in vain."""
        return CapacityError(
            "host",
            needed_nbytes=nbytes,
            available_nbytes=max(0, self.budget_nbytes - self.kept_nbytes),
            key="distributed.reduce_buffer",
            remedy="raise distributed.reduce_buffer, or place gradients on nvme, where gradients "
            "that do not fit can wait",
            detail=f"gradients that other ranks sent have waited {PATIENCE_S:.0f} s for a rank "
            "that is behind",
        )

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self.kept_nbytes -= nbytes
            self._changed.notify_all()

    def _end(self, partial: PartialGradient) -> None:
        """Frees the memory and scratch space of a partial gradient. The caller returns its bytes to
        the budget.
        """
        partial.values = None
        if partial.scratch is not None:
            assert self._scratch is not None
            self._scratch.give_back(partial.scratch)
            partial.scratch = None

    # -- Drives ------------------------------------------------------------------------------------

    def _spill_values(self, partial: PartialGradient, values: torch.Tensor) -> None:
        content, at = values.view(torch.uint8), 0

        def fill(memory: memoryview) -> None:
            nonlocal at
            torch.frombuffer(memory, dtype=torch.uint8).copy_(content[at : at + memory.nbytes])
            at += memory.nbytes

        assert self._window is not None
        with self._moving:
            partial.scratch = self._spill(partial.nbytes, fill, self._window)

    def _spill(self, nbytes: int, fill: Fill, window: Block) -> Scratch:
        """Writes the bytes of `fill` to scratch space, one window at a time."""
        assert self._volume is not None and self._scratch is not None
        scratch = self._scratch.take(nbytes)
        memory = self._host.tensor(window).numpy().data
        try:
            for start, part_nbytes in _parts(nbytes, window):
                fill(memory[:part_nbytes])
                self._volume.write(
                    scratch.extents,
                    offset_nbytes=start,
                    nbytes=align_up(part_nbytes, PAGE_NBYTES),
                    address=window.address,
                    priority=Priority.WRITE_BACK,
                ).wait()
        except BaseException:
            self._scratch.give_back(scratch)
            raise
        self._counters.add("ranks_reduce_buffer_spilled_nbytes", nbytes)
        return scratch


def _parts(nbytes: int, window: Block) -> list[tuple[int, int]]:
    """Yields (start, length) of the parts that pass through the window."""
    return [
        (start, min(window.nbytes, nbytes - start)) for start in range(0, nbytes, window.nbytes)
    ]
