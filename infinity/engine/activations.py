"""Layer inputs that wait for the backward, on the tiers that `[placement] activations` names.

A tensor is parked in the forward and taken back in the backward. On the device it stays as it is.
On the host it is copied into a block of the arena; from there it goes on to NVMe, when that is its
tier, and the block is free again as soon as the write is over. What is parked twice is kept once.

Where the device computes on host memory, "host" and "device" are the same memory, and nothing is
copied: outside of the host budget, as any activation is there.

Training thread and the strands that run in its place, one at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.errors import StorageError
from infinity.observe import Counters, Lane
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.store import show
from infinity.storage.engine import Priority, Ticket
from infinity.storage.scratch_space import Scratch, ScratchSpace
from infinity.storage.volume import Volume
from infinity.tiers.device import FINISHED, Copy, DeviceAdapter
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_LABEL = "activations"
# Tensors that computation may run ahead of while they leave the device, which has to keep them.
_MOST_DEPARTING = 2


@dataclass(eq=False, slots=True)
class Parked:
    """One tensor that waits. Written by `Activations` alone."""

    uses: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    kept: torch.Tensor | None = None  # On the device: rests there, or is back.
    block: Block | None = None
    scratch: Scratch | None = None
    copying: Copy = FINISHED
    returning: Copy = FINISHED  # Into `kept`.
    is_bound_for_nvme: bool = False  # Once the copy into the block is over.
    moving: Ticket | None = None  # Between the block and the extents.
    is_reading: bool = False

    @property
    def span_nbytes(self) -> int:
        """Of its block and its extents: whole pages."""
        return align_up(self.nbytes, PAGE_NBYTES)


class Activations:
    """Parks tensors and gives them back."""

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        pool: HostPool,
        device: DeviceAdapter,
        volume: Volume | None,
        counters: Counters,
    ) -> None:
        self._tiers = tuple(tiers)
        self._pool = pool
        self._device = device
        self._volume = volume
        self._scratch = ScratchSpace(volume) if volume is not None else None
        self._counters = counters
        self._known = WeakTensorKeyDictionary()
        self._waiting: dict[Parked, None] = {}  # Insertion-ordered set of what is off the device.
        self._in_use: Parked | None = None
        self._leaving: deque[tuple[Copy, Block]] = deque()  # Being copied to the device.
        self._departing: deque[Copy] = deque()  # Off the device, the last few.

    # -- In ----------------------------------------------------------------------------------------

    def park(self, tensor: torch.Tensor) -> Parked:
        """Keeps the tensor's value until `take` was called as often as `park`. Strided, dense or
        not; on the device. It must not be changed any more. Raises CapacityError when the tiers
        are full, StorageError when a write fails."""
        parked = self._known.get(tensor)
        if parked is not None and parked.uses:
            parked.uses += 1
            return parked
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
        nbytes = tensor.numel() * tensor.dtype.itemsize
        parked = Parked(1, tensor.shape, tuple(stride), tensor.dtype, nbytes)
        self._place(parked, tensor.detach())
        self._known[tensor] = parked
        return parked

    def _place(self, parked: Parked, tensor: torch.Tensor) -> None:
        for tier in self._tiers:
            is_last = tier == self._tiers[-1]
            if (
                tier == "device"
                or parked.nbytes == 0
                or (tier == "host" and self._device.shares_host_memory)
                or tensor.device != self._device.torch_device
            ):
                parked.kept = tensor
                return
            if tier == "host" and self._to_block(parked, tensor, must=is_last):
                return
            if tier == "nvme":
                self._to_block(parked, tensor, must=True)
                parked.is_bound_for_nvme = True
                if parked.copying.done():
                    self._start_write(parked)
                return
        raise AssertionError("the last tier takes what comes or raises")

    def _to_block(self, parked: Parked, tensor: torch.Tensor, *, must: bool) -> bool:
        self._reap()
        take = self._pool.require if must else self._pool.try_allocate
        block = take(parked.span_nbytes, _LABEL)
        if block is None:
            return False
        parked.block = block
        self._waiting[parked] = None
        parked.copying = self._device.copy(self._flat(parked, tensor), self._of_block(parked))
        self._counters.add("activation_out_nbytes", parked.nbytes)
        self._departing.append(parked.copying)
        if len(self._departing) > _MOST_DEPARTING:
            self._departing.popleft().order()  # Its memory on the device is free from here on.
        return True

    def _flat(self, parked: Parked, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in memory order: 1-dimensional."""
        if tuple(tensor.stride()) != parked.stride:
            tensor = tensor.contiguous()
        return tensor.as_strided((tensor.numel(),), (1,))

    def _of_block(self, parked: Parked) -> torch.Tensor:
        assert parked.block is not None
        return self._pool.tensor(parked.block)[: parked.nbytes].view(parked.dtype)

    def _start_write(self, parked: Parked) -> None:
        assert self._volume is not None and self._scratch is not None
        assert parked.block is not None
        parked.is_bound_for_nvme = False
        self._wait_copy(parked, "activations leave the device")
        parked.scratch = self._scratch.take(parked.span_nbytes)
        asked_ns = time.monotonic_ns()
        parked.moving = self._volume.write(
            parked.scratch.extents,
            offset_nbytes=0,
            nbytes=parked.span_nbytes,
            address=parked.block.address,
            priority=Priority.WRITE_BACK,
        )
        show(self._counters, self._volume, parked.moving, Lane.WRITES, _LABEL, asked_ns)

    def _wait_copy(self, parked: Parked, what: str) -> None:
        if not parked.copying.done():
            with self._counters.timed("copy_wait_s", what, (parked.copying,)):
                parked.copying.wait()
        parked.copying.wait()
        parked.copying = FINISHED

    # -- Giving blocks back ------------------------------------------------------------------------

    def _reap(self) -> None:
        """Frees the blocks whose bytes have left, and sends off those that may go. Never waits."""
        while self._leaving and self._leaving[0][0].done():
            self._free_leaving()
        for parked in list(self._waiting):
            if parked.is_bound_for_nvme and parked.copying.done():
                self._start_write(parked)
            elif parked.moving is not None and not parked.is_reading and parked.moving.done():
                self._end_move(parked)

    def _free_leaving(self) -> None:
        copy, block = self._leaving.popleft()
        if not copy.done():
            with self._counters.timed("copy_wait_s", "activations return", (copy,)):
                copy.wait()
        copy.wait()  # Over; lets go of what the copy keeps.
        self._pool.free(block)

    def _end_move(self, parked: Parked) -> None:
        """Waits until the bytes are in the extents, where they were already if this is a read."""
        moving, parked.moving = parked.moving, None
        assert moving is not None
        try:
            with self._counters.timed("write_wait_s", "activations are written", (moving,)):
                moving.wait()
        except StorageError:
            if not parked.is_reading:
                raise
        finally:
            parked.is_reading = False
            self._free_block(parked)

    def _free_block(self, parked: Parked) -> None:
        assert parked.block is not None
        block, parked.block = parked.block, None
        self._pool.free(block)

    def reclaim(self) -> bool:
        """Frees one block that is on its way to the device or to NVMe, may go there, or was read
        ahead. For the pool."""
        if self._leaving:
            self._free_leaving()
            return True
        for parked in sorted(self._waiting, key=lambda each: each.moving is None):
            if parked is self._in_use or parked.block is None:
                continue
            if parked.moving is None:
                if "nvme" not in self._tiers:
                    return False
                self._start_write(parked)
            self._end_move(parked)
            return True
        return False

    # -- Out ---------------------------------------------------------------------------------------

    def fetch(self, parked: Parked) -> None:
        """Starts bringing a tensor back, a tier at a time: from NVMe if there is room to spare,
        from the host when it has come there. Never waits."""
        if parked.kept is not None or not parked.uses:
            return
        if parked.block is None:
            block = self._pool.try_allocate(parked.span_nbytes, _LABEL)
            if block is not None:
                self._start_read(parked, block)
        elif not self._device.shares_host_memory and self._is_on_host(parked):
            self._start_return(parked)

    def _is_on_host(self, parked: Parked) -> bool:
        """Whether the bytes are in the block, and nobody else is at it."""
        has_come = parked.moving is None or (parked.is_reading and parked.moving.done())
        return parked.copying.done() and has_come

    def _start_read(self, parked: Parked, block: Block) -> None:
        assert self._volume is not None and parked.scratch is not None
        parked.block = block
        asked_ns = time.monotonic_ns()
        try:
            parked.moving = self._volume.read(
                parked.scratch.extents,
                offset_nbytes=0,
                nbytes=parked.span_nbytes,
                address=block.address,
                priority=Priority.BACKWARD,
                label=_LABEL,
            )
        except BaseException:
            self._free_block(parked)
            raise
        parked.is_reading = True
        show(self._counters, self._volume, parked.moving, Lane.READS, _LABEL, asked_ns)

    def take(self, parked: Parked) -> torch.Tensor:
        """The tensor, on the device, with the strides it had if it was dense. Ends one use; the
        caller must not change it."""
        assert parked.uses > 0
        if parked.kept is None:
            self._in_use = parked
            try:
                self._start_return(parked)
            finally:
                self._in_use = None
        parked.returning.order()
        tensor = parked.kept
        assert tensor is not None
        parked.uses -= 1
        if parked.uses == 0:
            self._forget(parked)
        return tensor

    def _start_return(self, parked: Parked) -> None:
        """From the host to the device; waits for what is still under way between block and NVMe."""
        if parked.block is None:
            self._start_read(parked, self._pool.require(parked.span_nbytes, _LABEL))
        if parked.is_reading:
            assert parked.moving is not None
            if not parked.moving.done():
                with self._counters.timed("read_wait_s", "activations return", (parked.moving,)):
                    parked.moving.wait()
            parked.moving.wait()  # Over, but it may have failed.
            parked.moving, parked.is_reading = None, False
        self._wait_copy(parked, "activations leave the device")
        tensor = torch.empty_strided(
            parked.shape, parked.stride, dtype=parked.dtype, device=self._device.torch_device
        )
        parked.returning = self._device.copy(self._of_block(parked), self._flat(parked, tensor))
        parked.kept = tensor
        self._counters.add("activation_in_nbytes", parked.nbytes)
        if parked.moving is None:
            assert parked.block is not None
            self._leaving.append((parked.returning, parked.block))
            parked.block, parked.is_bound_for_nvme = None, False
        else:
            parked.returning.wait()  # It is still being written from the block.

    def _forget(self, parked: Parked) -> None:
        parked.kept = None
        self._waiting.pop(parked, None)
        try:
            if parked.moving is not None:
                parked.moving.wait()
        finally:
            parked.moving = None
            if parked.block is not None:
                self._wait_copy(parked, "activations leave the device")
                self._free_block(parked)
            if parked.scratch is not None:
                assert self._scratch is not None
                self._scratch.give_back(parked.scratch)
                parked.scratch = None

    def clear(self) -> None:
        """Forgets everything, whether it was taken or not."""
        self._departing.clear()
        while self._leaving:
            self._free_leaving()
        for parked in list(self._waiting):
            parked.uses = 0
            # A failed write is the volume's to tell: it refuses the next one who asks.
            with contextlib.suppress(StorageError):
                self._forget(parked)
        self._known = WeakTensorKeyDictionary()
