"""Host <-> device, one way and both at once, and NVMe -> host -> device end to end.

Written against `DeviceAdapter`, so that it is tested without a GPU; measured only on a device with
memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from typing_extensions import override

from infinity.sizes import MIB, format_nbytes
from infinity.storage.arena import Arena
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tools.bench import pattern
from infinity.tools.bench.lab import Lab
from infinity.tools.bench.measure import Contender, ContenderGroup, Measurement, Result, clock
from infinity.tools.bench.nvme import DriveSet
from infinity.tools.bench.scratch import STILL_SEED
from infinity.tools.bench.transfer import EngineTransfer, FileSet, plan_moves, prepare

_REQUEST_NBYTES = 64 * MIB


class ArenaToDevice(Contender):
    """`nbytes` in chunks between arena and device: "in", "out", or half each at once ("both")."""

    def __init__(self, device: DeviceAdapter, arena: Arena, direction: str, nbytes: int) -> None:
        self.name = f"infinity {direction}"
        self._device = device
        self._direction = direction
        self._arena = arena
        self._nbytes = nbytes
        self._host = torch.frombuffer(arena.memory(0, nbytes), dtype=torch.uint8)
        self._there = device.allocate(nbytes)

    @override
    def run(self) -> Measurement:
        half_nbytes = {"in": self._nbytes, "out": 0, "both": self._nbytes // 2}[self._direction]
        # [0, half) is copied to the device, [half, end) from the device, which gets it first.
        pattern.fill(self._arena.memory(0, self._nbytes), offset_nbytes=0, seed=STILL_SEED)
        self._there.zero_()
        self._copy(half_nbytes, self._nbytes, inward=True)
        self._host[half_nbytes:].zero_()
        self._device.synchronize()

        def transfer() -> None:
            chunks_in = self._chunks(0, half_nbytes)
            chunks_out = self._chunks(half_nbytes, self._nbytes)
            copies = []
            for index in range(max(len(chunks_in), len(chunks_out))):
                for chunks, inward in ((chunks_in, True), (chunks_out, False)):
                    if index < len(chunks):
                        copies.append(self._start(*chunks[index], inward=inward))
            for copy in copies:
                copy.wait()

        seconds, cpu_s = clock(transfer)
        return Measurement(self._nbytes, seconds, cpu_s, ok=self._compare(half_nbytes))

    def _compare(self, half_nbytes: int) -> bool:
        self._host[:half_nbytes].zero_()
        self._copy(0, half_nbytes, inward=False)
        memory = self._arena.memory(0, self._nbytes)
        return pattern.matches(memory, offset_nbytes=0, seed=STILL_SEED)

    def _copy(self, low: int, high: int, *, inward: bool) -> None:
        for copy in [self._start(*chunk, inward=inward) for chunk in self._chunks(low, high)]:
            copy.wait()

    def _start(self, low: int, high: int, *, inward: bool) -> Copy:
        here, there = self._host[low:high], self._there[low:high]
        return self._device.copy(here, there) if inward else self._device.copy(there, here)

    @staticmethod
    def _chunks(low: int, high: int) -> list[tuple[int, int]]:
        return [(at, min(at + _REQUEST_NBYTES, high)) for at in range(low, high, _REQUEST_NBYTES)]


class PinnedCopy(Contender):
    """The ceiling: one copy of torch's own pinned memory, in one operation per direction."""

    def __init__(self, torch_device: torch.device, direction: str, nbytes: int) -> None:
        self.name = f"pinned {direction}"
        self._device = torch_device
        in_nbytes = {"in": nbytes, "out": 0, "both": nbytes // 2}[direction]
        is_cuda = torch_device.type == "cuda"
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        there = torch.zeros(nbytes, dtype=torch.uint8, device=torch_device)
        self._pairs = [
            (host[:in_nbytes], there[:in_nbytes]),
            (there[in_nbytes:], host[in_nbytes:]),
        ]
        self._streams = [torch.cuda.Stream(torch_device) if is_cuda else None for _ in range(2)]
        self._nbytes = nbytes

    @override
    def run(self) -> Measurement:
        def transfer() -> None:
            for (source, target), stream in zip(self._pairs, self._streams, strict=True):
                if stream is None:
                    target.copy_(source)
                    continue
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Measurement(self._nbytes, *clock(transfer))


class NvmeToDevice(Contender):
    """NVMe -> arena -> device: the copy of each extent to the device starts when its read ends."""

    name = "infinity nvme to device"

    def __init__(self, device: DeviceAdapter, files: FileSet, nbytes: int, extent_nbytes: int):
        self._device = device
        self._files = files
        self._nbytes = nbytes
        self._moves = plan_moves("read", nbytes=nbytes, extent_nbytes=extent_nbytes)
        self._host = torch.frombuffer(files.arena.memory(0, nbytes), dtype=torch.uint8)
        self._there = device.allocate(nbytes)

    @override
    def run(self) -> Measurement:
        prepare(self._files, self._moves, STILL_SEED)
        self._there.zero_()
        self._device.synchronize()

        def transfer() -> None:
            tickets = [self._files.submit(move) for move in self._moves]
            copies = []
            for move, ticket in zip(self._moves, tickets, strict=True):
                ticket.wait()
                part = slice(move.offset_nbytes, move.offset_nbytes + move.nbytes)
                copies.append(self._device.copy(self._host[part], self._there[part]))
            for copy in copies:
                copy.wait()

        seconds, cpu_s = clock(transfer)
        self._host.zero_()
        self._device.copy(self._there, self._host).wait()
        memory = self._files.arena.memory(0, self._nbytes)
        ok = pattern.matches(memory, offset_nbytes=0, seed=STILL_SEED)
        return Measurement(self._nbytes, seconds, cpu_s, ok=ok)


def copies(lab: Lab, device: DeviceAdapter) -> Iterator[Result]:
    """Both directions one by one, then at once."""
    nbytes = lab.effort.nbytes
    for direction in ("in", "out", "both"):
        words = {"in": "host to device", "out": "device to host", "both": "both ways at once"}
        group = ContenderGroup(
            "device copy",
            f"{words[direction]}, {format_nbytes(nbytes)}",
            [ArenaToDevice(device, lab.arena, direction, nbytes)],
            [PinnedCopy(device.torch_device, direction, nbytes)],
            {"operation": direction},
        )
        yield lab.measure(group, lab.effort.rounds)


def pipeline(drives: DriveSet, device: DeviceAdapter, extent_nbytes: int) -> Iterator[Result]:
    """The complete path beside the drive alone: the device should add no cost."""
    lab = drives.lab
    nbytes = lab.effort.nbytes
    with lab.engine() as engine:
        files = FileSet(engine, drives.scratch, lab.arena)
        ceiling: Contender = EngineTransfer(
            "drive to host alone", files, "read", nbytes=nbytes, extent_nbytes=extent_nbytes
        )
        group = ContenderGroup(
            "nvme to device",
            f"{format_nbytes(nbytes)} in {format_nbytes(extent_nbytes)}, {drives.name}",
            [NvmeToDevice(device, files, nbytes, extent_nbytes)],
            [ceiling],
            drives.labels("read", extent_nbytes=extent_nbytes),
            drives.note,
        )
        yield lab.measure(group, lab.effort.rounds)
