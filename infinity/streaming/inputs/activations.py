"""Layer inputs that are saved for the backward, on the tiers that `[placement] activations` names.

A tensor is saved in the forward and restored in the backward. On the device tier it stays as it is.
On the host tier it is copied to a block of the arena. On the NVMe tier the block is written to the
drives, and is free again when the write is over. A tensor that is saved twice is kept once.

If the device computes in host memory, "host" and "device" are the same memory, and nothing is
copied: saved inputs are outside of the host budget, as other activations are.

For the training thread and the fibers that run in its place, one at a time.

Note [Inputs before kept weights]
  A byte of an input that goes to the drives is written and read again. A byte of weights that are
  not kept between a forward and its backward is read once more, and drives read faster than they
  write. So inputs take the place of weights that are only kept, as far as enough memory is left to
  fetch weights ahead in (`Budgets.inputs_nbytes`).

  Reads ahead regard it. In a forward they leave the space that inputs will take: a unit that was
  read for later would go for the next input, and be read again. In a backward they wait for memory
  that inputs leave, but for units that are needed next: weights that go for a unit that is needed
  late are read again in the next forward.

Note [Tensors that wait]
  A tensor that waits while something else computes may have other owners: variables of the waiting
  code, and views. So the memory is freed in the tensor's storage (`UntypedStorage.resize_`, as FSDP
  does with parameters), and is allocated in the same storage again: every owner sees the same
  bytes. No code may touch the tensor, or a view of it, in between.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.errors import StorageError
from infinity.observe import Counters, Track
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.store import show
from infinity.storage.protocol import Priority, Ticket
from infinity.storage.scratch_space import Scratch, ScratchSpace
from infinity.storage.volume import Volume
from infinity.tiers.device import FINISHED, Copy, DeviceAdapter
from infinity.tiers.host import Block, HostPool
from infinity.tiers.spare import Giver

_LABEL = "activations"
# Tensors that computation may run ahead of while they leave the device, which has to keep them.
_MOST_DEPARTING = 2


class InputMemory:
    """Bytes of inputs in host memory. Written by `ActivationStore` alone; `WeightCache` asks how
    far it may read ahead. Called under the engine's lock.

    `most_nbytes` may come from kept weights; `beside_nbytes` are for weights alone.
    """

    def __init__(self, most_nbytes: int, beside_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._beside_nbytes = beside_nbytes
        self._nbytes = 0
        self._highest_nbytes = 0  # Of this accumulation so far.
        self._expected_nbytes = 0  # The highest of the last one.
        self.are_returning = False  # The backward has begun, and not all have returned.

    def may_take(self, nbytes: int) -> bool:
        """Whether weights that are only kept give way to an input of so many bytes."""
        return self._nbytes + nbytes <= self._most_nbytes

    def take(self, nbytes: int) -> None:
        """An input got memory."""
        self._nbytes += nbytes
        self._highest_nbytes = max(self._highest_nbytes, self._nbytes)

    def leave(self, nbytes: int, *, returns: bool = False) -> None:
        """The memory of an input is free, or will soon be; with `returns` it is on the device."""
        self._nbytes -= nbytes
        self.are_returning = self._nbytes > 0 and (returns or self.are_returning)

    def end(self) -> None:
        """An accumulation is over: the next one is expected to be like it."""
        assert not self._nbytes
        self._expected_nbytes, self._highest_nbytes = self._highest_nbytes, 0

    def window_nbytes(self, window_nbytes: int) -> int:
        """Returns the part of the window for reads ahead that inputs leave."""
        held_nbytes = self._nbytes
        if held_nbytes and not self.are_returning:
            held_nbytes = max(held_nbytes, self._expected_nbytes)
        return min(
            window_nbytes,
            self._most_nbytes + self._beside_nbytes - min(held_nbytes, self._most_nbytes),
        )


@dataclass(eq=False, slots=True)
class SavedInput:
    """One tensor that waits. Written by `ActivationStore` alone."""

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
    is_counted: bool = False  # Counted in `InputMemory`.

    @property
    def span_nbytes(self) -> int:
        """The bytes of its block and of its extents: full pages."""
        return align_up(self.nbytes, PAGE_NBYTES)


class InputStore(Protocol):
    """Layer inputs between the forward and the backward: on a tier, or in parts over ranks."""

    def save(self, tensor: torch.Tensor) -> Any:
        """Takes a copy of the tensor; returns what `fetch` and `restore` take."""

    def fetch(self, saved: Any) -> None:
        """Starts to fetch the saved tensor."""

    def restore(self, saved: Any) -> torch.Tensor:
        """The tensor, on the device; the store forgets it."""

    def clear(self) -> None:
        """Forgets everything."""


class ActivationStore:
    """Saves tensors and restores them.

    `inputs`: what inputs have of the host, and how much of it weights give up that are only kept.
    `free_kept(nbytes)` frees a block of them, or returns False.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        pool: HostPool,
        device: DeviceAdapter,
        volume: Volume | None,
        counters: Counters,
        inputs: InputMemory,
        free_kept: Callable[[int], bool],
    ) -> None:
        self._tiers = tuple(tiers)
        self._pool = pool
        self._inputs = inputs
        self._free_kept = free_kept
        self._device = device
        self._volume = volume
        self._scratch = ScratchSpace(volume) if volume is not None else None
        self._counters = counters
        self._known = WeakTensorKeyDictionary()
        self._waiting: dict[
            SavedInput, None
        ] = {}  # The tensors off the device, in order of insertion.
        self._in_use: SavedInput | None = None
        self._leaving: deque[tuple[Copy, Block]] = deque()  # Being copied to the device.
        self._departing: deque[Copy] = deque()  # Off the device, the last few.
        pool.add_giver(Giver.MOVING_INPUTS, lambda _: self.reclaim())
        pool.add_giver(Giver.INPUTS, lambda _: self.spill())

    @property
    def keeps_all(self) -> bool:
        """Whether every tensor stays on the device."""
        first = self._tiers[0]
        return first == "device" or (first == "host" and self._device.shares_host_memory)

    # -- In ----------------------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor) -> SavedInput:
        """Keeps the tensor's value until `take` was called as often as `save`. Strided, dense or
        not; on the device. It must not be changed any more. Raises CapacityError when the tiers
        are full, StorageError when a write fails."""
        saved: SavedInput | None = self._known.get(tensor)
        if saved is not None and saved.uses:
            saved.uses += 1
            return saved
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
        nbytes = tensor.numel() * tensor.dtype.itemsize
        saved = SavedInput(1, tensor.shape, tuple(stride), tensor.dtype, nbytes)
        self._place(saved, tensor.detach())
        self._known[tensor] = saved
        return saved

    def _place(self, saved: SavedInput, tensor: torch.Tensor) -> None:
        for tier in self._tiers:
            is_last = tier == self._tiers[-1]
            if (
                tier == "device"
                or saved.nbytes == 0
                or (tier == "host" and self._device.shares_host_memory)
                or tensor.device != self._device.torch_device
            ):
                saved.kept = tensor
                return
            self._reap()
            if tier == "nvme":
                saved.block = self._pool.require(saved.span_nbytes, _LABEL)
                self._copy_out(saved, tensor)
                saved.is_bound_for_nvme = True
                if saved.copying.done():
                    self._start_write(saved)
                return
            if is_last:
                self._hold(saved, self._pool.require(saved.span_nbytes, _LABEL))
            elif not self._try_block(saved):
                continue
            self._copy_out(saved, tensor)
            return
        raise AssertionError("the last tier takes what comes or raises")

    def _copy_out(self, saved: SavedInput, tensor: torch.Tensor) -> None:
        """Starts the copy to the block."""
        self._waiting[saved] = None
        saved.copying = self._device.copy(self._flat(saved, tensor), self._of_block(saved))
        self._counters.add("activation_out_nbytes", saved.nbytes)
        self._departing.append(saved.copying)
        if len(self._departing) > _MOST_DEPARTING:
            self._departing.popleft().order()  # Its memory on the device is free from here on.

    def _try_block(self, saved: SavedInput) -> bool:
        """Takes a block that is free, or that weights give up."""
        nbytes = saved.span_nbytes
        is_allowed = not self._pool.is_tight and self._inputs.may_take(nbytes)
        while (block := self._pool.try_allocate(nbytes, _LABEL)) is None:
            if not is_allowed or not self._free_kept(nbytes):
                return False
        self._hold(saved, block)
        return True

    def _hold(self, saved: SavedInput, block: Block) -> None:
        saved.block, saved.is_counted = block, True
        self._inputs.take(saved.span_nbytes)

    def _leave(self, saved: SavedInput, *, returns: bool = False) -> None:
        """The block will soon be free."""
        if saved.is_counted:
            saved.is_counted = False
            self._inputs.leave(saved.span_nbytes, returns=returns)

    def _flat(self, saved: SavedInput, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in memory order: 1-dimensional."""
        if tuple(tensor.stride()) != saved.stride:
            tensor = tensor.contiguous()
        return tensor.as_strided((tensor.numel(),), (1,))

    def _of_block(self, saved: SavedInput) -> torch.Tensor:
        assert saved.block is not None
        return self._pool.tensor(saved.block)[: saved.nbytes].view(saved.dtype)

    def _start_write(self, saved: SavedInput) -> None:
        assert self._scratch is not None
        saved.is_bound_for_nvme = False
        self._leave(saved)
        self._wait_copy(saved, "activations leave the device")
        saved.scratch = self._scratch.take(saved.span_nbytes)
        self._start_move(saved, is_read=False)

    def _start_move(self, saved: SavedInput, *, is_read: bool) -> None:
        """Starts a transfer between the block and the extents."""
        assert self._volume is not None and saved.scratch is not None and saved.block is not None
        place = saved.scratch.extents
        span: dict[str, Any] = {
            "offset_nbytes": 0, "nbytes": saved.span_nbytes, "address": saved.block.address
        }  # fmt: skip
        asked_ns = time.monotonic_ns()
        if is_read:
            priority, track, counter = Priority.BACKWARD, Track.READS, "nvme_read_nbytes"
            saved.moving = self._volume.read(place, **span, priority=priority, label=_LABEL)
        else:
            priority, track, counter = Priority.WRITE_BACK, Track.WRITES, "nvme_write_nbytes"
            saved.moving = self._volume.write(place, **span, priority=priority)
        self._counters.add(counter, saved.span_nbytes)
        show(self._counters, self._volume, saved.moving, track, _LABEL, asked_ns)

    def _wait_copy(self, saved: SavedInput, what: str) -> None:
        if not saved.copying.done():
            with self._counters.timed("copy_wait_s", what, (saved.copying,)):
                saved.copying.wait()
        saved.copying.wait()
        saved.copying = FINISHED

    # -- Freeing blocks ----------------------------------------------------------------------------

    def _reap(self) -> None:
        """Frees blocks whose write is done, and starts writes of blocks that are bound for NVMe.
        Never waits.
        """
        self._free_left()
        for saved in list(self._waiting):
            if saved.is_bound_for_nvme and saved.copying.done():
                self._start_write(saved)
            elif saved.moving is not None and not saved.is_reading and saved.moving.done():
                self._end_move(saved)

    def _free_left(self) -> None:
        while self._leaving and self._leaving[0][0].done():
            self._free_leaving()

    def _free_leaving(self) -> None:
        copy, block = self._leaving.popleft()
        if not copy.done():
            with self._counters.timed("copy_wait_s", "activations return", (copy,)):
                copy.wait()
        copy.wait()  # Over; drops the memory that the copy keeps.
        self._pool.free(block)

    def _end_move(self, saved: SavedInput) -> None:
        """Waits until the bytes are in the extents, where they were already if this is a read."""
        moving, saved.moving = saved.moving, None
        assert moving is not None
        try:
            with self._counters.timed("write_wait_s", "activations are written", (moving,)):
                moving.wait()
        except StorageError:
            if not saved.is_reading:
                raise
        finally:
            saved.is_reading = False
            self._free_block(saved)

    def _free_block(self, saved: SavedInput) -> None:
        assert saved.block is not None
        block, saved.block = saved.block, None
        self._leave(saved)
        self._pool.free(block)

    def reclaim(self) -> bool:
        """Frees one block that is on its way to the device or to NVMe, or was read ahead. For the
        pool."""
        if self._leaving:
            self._free_leaving()
            return True
        for saved in self._waiting:
            if saved is not self._in_use and (saved.moving or saved.is_bound_for_nvme):
                if saved.moving is None:
                    self._start_write(saved)
                self._end_move(saved)
                return True
        return False

    def spill(self) -> bool:
        """Frees one block whose bytes may rest on NVMe, after it is written. For the pool."""
        for saved in self._waiting if "nvme" in self._tiers else ():
            if saved is not self._in_use and saved.block is not None and saved.moving is None:
                self._start_write(saved)
                self._end_move(saved)
                return True
        return False

    # -- Out ---------------------------------------------------------------------------------------

    def fetch(self, saved: SavedInput) -> None:
        """Starts to move a tensor one tier nearer to the device. Waits for nothing but weights that
        give up their block.

        From NVMe if there is space to spare, from the host if the tensor is there.
        """
        if saved.kept is not None or not saved.uses:
            return
        if saved.block is None:
            if self._try_block(saved):
                self._start_read(saved)
        elif not self._device.shares_host_memory and self._is_on_host(saved):
            self._start_return(saved)

    def _is_on_host(self, saved: SavedInput) -> bool:
        """Whether the bytes are in the block and no transfer uses it."""
        has_come = saved.moving is None or (saved.is_reading and saved.moving.done())
        return saved.copying.done() and has_come

    def _start_read(self, saved: SavedInput) -> None:
        try:
            self._start_move(saved, is_read=True)
        except BaseException:
            self._free_block(saved)
            raise
        saved.is_reading = True

    def restore(self, saved: SavedInput) -> torch.Tensor:
        """The tensor, on the device, with the strides it had if it was dense. Ends one use; the
        caller must not change it."""
        assert saved.uses > 0
        self._free_left()  # Weights are read ahead into the space.
        if saved.kept is None:
            self._in_use = saved
            try:
                self._start_return(saved)
            finally:
                self._in_use = None
        saved.returning.order()
        tensor = saved.kept
        assert tensor is not None
        saved.uses -= 1
        if saved.uses == 0:
            self._forget(saved)
        return tensor

    def _start_return(self, saved: SavedInput) -> None:
        """Starts the copy from the host to the device. Waits for a transfer between block and
        NVMe."""
        if saved.block is None:
            saved.block = self._pool.require(saved.span_nbytes, _LABEL)
            self._start_read(saved)
        if saved.is_reading:
            assert saved.moving is not None
            if not saved.moving.done():
                with self._counters.timed("read_wait_s", "activations return", (saved.moving,)):
                    saved.moving.wait()
            saved.moving.wait()  # Over, but it may have failed.
            saved.moving, saved.is_reading = None, False
        self._wait_copy(saved, "activations leave the device")
        tensor = torch.empty_strided(
            saved.shape, saved.stride, dtype=saved.dtype, device=self._device.torch_device
        )
        saved.returning = self._device.copy(self._of_block(saved), self._flat(saved, tensor))
        saved.kept = tensor
        self._counters.add("activation_in_nbytes", saved.nbytes)
        if saved.moving is None:
            assert saved.block is not None
            self._leaving.append((saved.returning, saved.block))
            saved.block, saved.is_bound_for_nvme = None, False
            self._leave(saved, returns=True)
        else:
            saved.returning.wait()  # It is still being written from the block.

    def _forget(self, saved: SavedInput) -> None:
        saved.kept = None
        self._waiting.pop(saved, None)
        try:
            if saved.moving is not None:
                saved.moving.wait()
        finally:
            saved.moving = None
            if saved.block is not None:
                self._wait_copy(saved, "activations leave the device")
                self._free_block(saved)
            if saved.scratch is not None:
                assert self._scratch is not None
                self._scratch.give_back(saved.scratch)
                saved.scratch = None

    def clear(self) -> None:
        """Forgets everything, whether it was taken or not."""
        self._departing.clear()
        while self._leaving:
            self._free_leaving()
        for saved in list(self._waiting):
            saved.uses = 0
            # The volume reports a failed write: it refuses every later call.
            with contextlib.suppress(StorageError):
                self._forget(saved)
        self._inputs.end()
        self._known = WeakTensorKeyDictionary()


class WaitingMemory:
    """Moves the content of tensors to a tier while they wait. Owns the store.

    If the store leaves a tensor on the device, nothing happens. One thread at a time.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._away: dict[StorageWeakRef, tuple[torch.UntypedStorage, SavedInput]] = {}

    @property
    def keeps_all(self) -> bool:
        """Whether every tensor stays on the device."""
        return self._store.keeps_all

    def put_away(self, tensor: torch.Tensor) -> None:
        """Moves the content of the tensor's storage to a tier.

        Raises CapacityError if the tiers are full, StorageError if a write fails.
        """
        storage, place = tensor.untyped_storage(), place_of(tensor)
        if self.keeps_all or place in self._away:
            return
        if not storage.nbytes() or not storage.resizable():
            return
        saved = self._store.save(_content_of(storage))
        if saved.kept is not None:
            self._store.restore(saved)
            return
        saved.copying.order()  # Its memory on the device is free from here on.
        self._away[place] = storage, saved
        storage.resize_(0)

    def fetch(self, tensor: torch.Tensor) -> None:
        """Starts to read the content. Never waits."""
        away = self._away.get(place_of(tensor))
        if away is not None:
            self._store.fetch(away[1])

    def bring_back(self, tensor: torch.Tensor) -> None:
        """Ends `put_away`. Raises CapacityError, StorageError."""
        away = self._away.pop(place_of(tensor), None)
        if away is not None:
            storage, saved = away
            content = self._store.restore(saved)
            storage.resize_(saved.nbytes)
            _content_of(storage).copy_(content)

    def clear(self) -> None:
        """Ends every `put_away`. The content is lost: the waiting code will not run again."""
        for storage, saved in self._away.values():
            storage.resize_(saved.nbytes)
        self._away.clear()
        self._store.clear()


def place_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Returns a key of the tensor's storage, which its views share."""
    return StorageWeakRef(tensor.untyped_storage())


def _content_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns all bytes of a storage: uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
