"""A device as the engine sees it: one small adapter, and the guarantees of every implementation.

A *region* is the permanent identity of one unit's weights on the device: the tensors made over it
live as long as the model, while the memory behind them comes and goes. That is what keeps views
which autograd saved in the forward valid in the backward (`F.linear` saves `weight.t()`).

Note [Ordering]
  `attach` only starts bringing bytes in. Compute may use the region after `Copy.order()`, which on
  a stream device makes the compute stream wait and returns at once, and elsewhere blocks.
  `Copy.wait()` blocks the calling thread until the source may be reused. A use ends with
  `end_use`, as soon as its last operation has been *issued*; the adapter orders after it what a
  later `detach` gives up. A use may be of several streams (branches of a module that run beside one
  another): each is ordered after the copy, is named by `begin_use`, and is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from infinity.observe import Counters
from infinity.tiers.host import Block, HostPool


class Copy:
    """One transfer between host and device; this one was over before it began."""

    def done(self) -> bool:
        """Whether the transfer is over. Never blocks."""
        return True

    def order(self) -> None:
        """Everything computed from now on, in the stream that is current, comes after the copy:
        it sees the copied bytes, and may reuse the device memory they were copied from. Nothing is
        said of the host's side."""

    def wait(self) -> None:
        """Blocks until the transfer is over: the source may be overwritten, the target read."""

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        """(0, nbytes, begun_ns, over_ns) of a copy that is over and was traced, else nothing."""
        return ()


FINISHED = Copy()


def tensor_over(
    storage: torch.UntypedStorage,
    offset_nbytes: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A tensor at a byte offset of a storage. `offset_nbytes` is a multiple of the item size."""
    assert offset_nbytes % dtype.itemsize == 0
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset_nbytes // dtype.itemsize, tuple(shape), tuple(stride))


class Region:
    """Device bytes of one unit; this one is always attached, over memory that never leaves.

    `is_attached`: whether memory stands behind the tensors. `has_block_memory`: whether the memory
    of an attached region is that of its block, and no copy. `content`: the bytes as one uint8
    tensor, shape (nbytes,); they are there while the region has memory.
    """

    has_block_memory = False

    def __init__(self, memory: torch.Tensor, *, is_attached: bool = True) -> None:
        self.nbytes = memory.numel()
        self.is_attached = is_attached
        self.storage = memory.untyped_storage()
        with torch.inference_mode(False):  # Else only inference could write to it.
            self.content = tensor_over(self.storage, 0, (self.nbytes,), (1,), torch.uint8)

    def tensor(
        self, offset_nbytes: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over the region; every call shares one storage."""
        return tensor_over(self.storage, offset_nbytes, shape, stride, dtype)


POISON_VARIABLE = "INFINITY_POISON"
POISON_BYTE = 0xFF  # All ones is a NaN in every IEEE format.


class ResizedRegion(Region):
    """A region whose storage is resized between 0 and `nbytes`.

    A tensor that still points there has no memory then: on CUDA its use is an illegal address,
    reported by a later call, after which no call of the process succeeds. With the environment
    variable INFINITY_POISON=1 the memory stays and is filled with NaN instead, which shows in the
    losses and names no innocent call. That takes the memory of all weights: for a small model.

    On a device with streams: `name` is that of the unit, for messages, `uses` the last use that
    each stream made of the region since it was attached, and `streams` those that use it now.
    """

    def __init__(self, nbytes: int, device: torch.device, name: str = "") -> None:
        # Sized once at birth so that tensors of full shape may be made over it, then emptied.
        # The view of all bytes is made there, once: to make one is a write for CUDA's sanitizer.
        super().__init__(torch.empty(nbytes, dtype=torch.uint8, device=device), is_attached=False)
        self.name = name
        self.uses: dict[Any, Any] = {}
        self.streams: set[Any] = set()
        self._is_poisoned = os.environ.get(POISON_VARIABLE, "0") not in ("", "0")
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        self.storage.resize_(nbytes)

    def _fill(self, byte: int) -> None:
        self.content.fill_(byte)

    def take_memory(self) -> None:
        """Gives the region its memory; the content is undefined."""
        if self.storage.nbytes() != self.nbytes:
            self._resize(self.nbytes)
        self.is_attached = True

    def drop_memory(self) -> None:
        """Frees the memory, or poisons it."""
        if self._is_poisoned:
            self._fill(POISON_BYTE)
        else:
            self._resize(0)
        self.is_attached = False

    @override
    def tensor(
        self, offset_nbytes: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        size_nbytes = self.storage.nbytes()
        if size_nbytes == 0:
            # `set_` grows a storage that is too small, so lend it its size while we look.
            self._resize(self.nbytes)
        view = super().tensor(offset_nbytes, shape, stride, dtype)
        if size_nbytes == 0:
            self._resize(0)
        return view


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the weights of a region are made of stored bytes on the device.

    `memory`: the number of the device memory that the bytes come to. `fill` writes to the region's
    tensors, given the bytes: uint8, shape (nbytes,).
    """

    nbytes: int
    memory: int
    fill: Callable[[torch.Tensor], None]


class DeviceAdapter:
    """The only thing above the tiers that knows what the device is.

    What only a device with memory of its own does is a method that does nothing here.
    """

    name: str
    torch_device: torch.device
    # True when compute reads host memory itself, so that nothing has to be copied.
    shares_host_memory: bool
    # True when its own memory is taken from the host's all the same, so that budgets share one.
    is_integrated: bool = False

    def open(self, host: HostPool, counters: Counters) -> None:
        """Receives the arena and the counters, before any other call: for an adapter that the
        caller of `infinity.offload` has made."""

    def reserve(self, nbytes: int, name: str = "") -> Region:
        """A region without memory. `name`: of the unit, for messages."""
        raise NotImplementedError

    def attach(self, region: Region, block: Block) -> Copy:
        """Starts bringing the block's bytes in. The block stays lent until `Copy.wait` or,
        where memory is shared, until `detach`."""
        raise NotImplementedError

    def attach_decoded(self, region: Region, block: Block | None, decoding: Decoding) -> Copy:
        """Starts filling the region with the weights that are made of the block's bytes, beside
        copies that are asked for later; None: of the bytes that were staged last in the memory of
        `decoding`. For devices with memory of their own. The block stays lent until `Copy.wait`."""
        raise NotImplementedError

    def prepare_decoding(self, nbytes: int, count: int) -> None:
        """Takes device memory for stored bytes: `count` times `nbytes`, those of the largest
        block."""

    def stage(self, block: Block, memory: int) -> Copy:
        """Starts copying the stored bytes of a block to a memory for them, behind its last use. The
        block stays lent until `Copy.wait`."""
        raise NotImplementedError

    def current_stream(self) -> Hashable | None:
        """The stream that is current in this thread; None for a device without streams."""
        return None

    def issued(self) -> Copy:
        """Returns what is over when the device has done what was issued so far on the current
        stream."""
        return FINISHED

    def begin_use(self, region: Region) -> None:
        """Records that the current stream uses the region until the last `end_use`. Called once for
        each stream."""

    def end_use(self, region: Region, *, is_last: bool = True) -> None:
        """Records the end of a use: the region is free after the operations issued so far on this
        thread's stream and on those of `begin_use`. `is_last`: no other use of it is left."""

    def bring_back(self, region: Region, block: Block) -> Copy:
        """Starts copying the region's bytes to a block, the one that it was attached from or
        another. The host may read them after `Copy.wait` and, if memory is shared, `detach`."""
        raise NotImplementedError

    def detach(self, region: Region) -> None:
        """Takes the memory away, ordered after the uses that have ended. A copy into the region may
        be under way: it still reads the block."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed device memory that stays: uint8, shape (nbytes,)."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in host memory."""
        del tensor
        return True

    def copy(self, source: torch.Tensor, target: torch.Tensor, behind: Copy = FINISHED) -> Copy:
        """Starts copying between a host and a device tensor of one shape and dtype, behind the work
        of the current stream and behind another copy. The device tensor may be dropped at once; the
        host's lives until `Copy.wait`."""
        behind.wait()
        target.copy_(source)
        return FINISHED

    @property
    def begin_thread(self) -> Callable[[], None]:
        """The first call of a thread of the engine that looks at copies or starts some. The thread
        keeps the function, which refers to nothing else of the engine."""
        return lambda: None

    def give_back_memory(self) -> None:
        """Returns cached memory that nothing uses to the driver."""

    def synchronize(self) -> None:
        """Blocks until the device has nothing left to do."""

    def close(self) -> None:
        """Waits for all copies and releases the device memory."""
