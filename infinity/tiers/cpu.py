"""Compute in host memory: pages of the arena are moved under the tensors, no byte is copied.

A region is a reserved range of addresses. Attaching moves the block's pages there (mremap(2),
MREMAP_DONTUNMAP, Linux 5.7), detaching moves them back: 10 us for 28 MiB of huge pages where a
memcpy takes 1400 us, and the bytes exist once. Where the kernel or a sandbox refuses, the bytes are
copied into a resized storage instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from infinity.observe import Counters
from infinity.storage.arena import Window, can_remap
from infinity.tiers.device import (
    FINISHED,
    Copy,
    Decoding,
    DeviceAdapter,
    Region,
    ResidentRegion,
    ResizedRegion,
    all_of,
    tensor_over,
)
from infinity.tiers.host import Block, HostBlocks
from infinity.tiers.ranges import rounded_nbytes


class WindowRegion:
    """A range of addresses into which arena pages are moved."""

    has_block_memory = True

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.window = Window(rounded_nbytes(nbytes))
        raw = (ctypes.c_char * nbytes).from_address(self.window.address)
        self._storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
        self.block: Block | None = None

    @property
    def is_attached(self) -> bool:
        """See `Region.is_attached`."""
        return self.block is not None

    def tensor(
        self, offset_nbytes: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Region.tensor`."""
        return tensor_over(self._storage, offset_nbytes, shape, stride, dtype)


@dataclass
class CpuDevice(DeviceAdapter):
    """The device tier of a machine without a GPU. Training thread only."""

    host: HostBlocks
    counters: Counters
    name: str = "cpu"
    shares_host_memory: bool = True
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._can_remap = can_remap()
        self._windows: list[Window] = []

    @override
    def reserve(self, nbytes: int, name: str = "") -> Region:
        if not self._can_remap or nbytes == 0:
            return ResizedRegion(nbytes, self.torch_device)
        region = WindowRegion(nbytes)
        self._windows.append(region.window)
        return region

    @override
    def reserve_resident(self, memory: torch.Tensor) -> Region:
        return ResidentRegion(memory)

    @override
    def attach(self, region: Region, block: Block) -> Copy:
        assert not region.is_attached
        if isinstance(region, WindowRegion):
            region.window.map(self.host.arena, block.range.offset_nbytes, _span_nbytes(region))
            region.block = block
            block.is_mapped_away = True
        else:
            assert isinstance(region, ResizedRegion)
            region.take_memory()
            all_of(region).copy_(self.host.tensor(block, nbytes=region.nbytes))
        return FINISHED

    @override
    def attach_decoded(self, region: Region, block: Block, decoding: Decoding) -> Copy:
        raise AssertionError("what is decoded on the host is decoded into a host block")

    @override
    def prepare_decoding(self, nbytes: int, count: int) -> None:
        return None

    @override
    def stage(self, block: Block, memory: int) -> Copy:
        raise AssertionError("what is decoded on the host is decoded into a host block")

    @override
    def attach_staged(self, region: Region, decoding: Decoding) -> Copy:
        raise AssertionError("what is decoded on the host is decoded into a host block")

    @override
    def current_stream(self) -> None:
        return None

    @override
    def issued(self) -> Copy:
        return FINISHED

    @override
    def begin_use(self, region: Region) -> None:
        return None

    @override
    def end_use(self, region: Region, *, is_last: bool = True) -> None:
        return None

    @override
    def bring_back(self, region: Region, block: Block) -> Copy:
        if isinstance(region, ResizedRegion):
            self.host.tensor(block, nbytes=region.nbytes).copy_(all_of(region))
        else:
            assert isinstance(region, WindowRegion) and region.block is block
        return FINISHED

    @override
    def detach(self, region: Region) -> None:
        assert region.is_attached
        if isinstance(region, WindowRegion):
            block = region.block
            assert block is not None
            region.window.unmap(self.host.arena, block.range.offset_nbytes, _span_nbytes(region))
            region.block = None
            block.is_mapped_away = False
        else:
            assert isinstance(region, ResizedRegion)
            region.drop_memory()

    @override
    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    @override
    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return True

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        target.copy_(source)
        return FINISHED

    @property
    @override
    def begin_thread(self) -> Callable[[], None]:
        return _do_nothing

    @override
    def give_back_memory(self) -> None:
        return None

    @override
    def synchronize(self) -> None:
        return None

    @override
    def close(self) -> None:
        # Parameters may outlive the engine; the addresses behind them stay reserved, without
        # memory, so that a late use faults instead of reading something else.
        self._windows.clear()


def _span_nbytes(region: WindowRegion) -> int:
    """All the pages of the block: a huge page that moves only in part would be split."""
    return rounded_nbytes(region.nbytes)


def _do_nothing() -> None:
    return None
