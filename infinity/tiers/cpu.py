"""Compute in host memory: pages of the arena are moved under the tensors, no byte is copied.

A region is a reserved range of addresses. Attaching moves the block's pages there (mremap(2),
MREMAP_DONTUNMAP, Linux 5.7), detaching moves them back: 10 us for 28 MiB of huge pages where a
memcpy takes 1400 us, and the bytes exist once. Where the kernel or a sandbox refuses, the bytes are
copied into a resized storage instead.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from infinity.observe import Counters
from infinity.storage.arena import Arena, Window, can_remap
from infinity.tiers.device import FINISHED, Copy, DeviceAdapter, Region, ResizedRegion
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import rounded_nbytes


class WindowRegion(Region):
    """A range of addresses into which arena pages are moved: all pages of a block, because a huge
    page that moves only in part would be split."""

    has_block_memory = True

    def __init__(self, nbytes: int) -> None:
        self._span_nbytes = rounded_nbytes(nbytes)
        self.window = Window(self._span_nbytes)
        raw = (ctypes.c_char * nbytes).from_address(self.window.address)
        super().__init__(torch.frombuffer(raw, dtype=torch.uint8), is_attached=False)
        self.block: Block | None = None

    def map(self, arena: Arena, block: Block) -> None:
        """Moves the pages of the block here."""
        self.window.map(arena, block.range.offset_nbytes, self._span_nbytes)
        self.block, self.is_attached, block.is_mapped_away = block, True, True

    def unmap(self, arena: Arena) -> None:
        """Moves the pages back to their block."""
        block = self.block
        assert block is not None
        self.window.unmap(arena, block.range.offset_nbytes, self._span_nbytes)
        self.block, self.is_attached, block.is_mapped_away = None, False, False


@dataclass
class CpuDevice(DeviceAdapter):
    """The device tier of a machine without a GPU. Training thread only."""

    host: HostPool
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
    def attach(self, region: Region, block: Block) -> Copy:
        assert not region.is_attached
        if isinstance(region, WindowRegion):
            region.map(self.host.arena, block)
        else:
            assert isinstance(region, ResizedRegion)
            region.take_memory()
            region.content.copy_(self.host.tensor(block, nbytes=region.nbytes))
        return FINISHED

    @override
    def bring_back(self, region: Region, block: Block) -> Copy:
        if isinstance(region, ResizedRegion):
            self.host.tensor(block, nbytes=region.nbytes).copy_(region.content)
        else:
            assert isinstance(region, WindowRegion) and region.block is block
        return FINISHED

    @override
    def detach(self, region: Region) -> None:
        assert region.is_attached
        if isinstance(region, WindowRegion):
            region.unmap(self.host.arena)
        else:
            assert isinstance(region, ResizedRegion)
            region.drop_memory()

    @override
    def close(self) -> None:
        # Parameters may outlive the engine; the addresses behind them stay reserved, without
        # memory, so that a late use faults instead of reading something else.
        self._windows.clear()
