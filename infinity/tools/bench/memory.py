"""Memory: copies inside the arena, the optimizer's pass over its state, host <-> device one way and
both at once, and NVMe -> host -> device end to end.

On the host every byte on the memory bus counts: read bytes and written bytes. The sections of the
device are written against `DeviceAdapter`, so that they are tested without a GPU, and measured only
on a device with memory of its own.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from infinity.ops.optimizers import step_
from infinity.ops.rules import AdamWSettings
from infinity.ops.span import StateSpan
from infinity.sizes import MIB, PAGE_NBYTES, align_down, format_nbytes
from infinity.storage.arena import Arena
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tools.bench import pattern
from infinity.tools.bench.measure import Comparison, Contender, Lab, timed
from infinity.tools.bench.nvme import DriveSet
from infinity.tools.bench.scratch import STILL_SEED
from infinity.tools.bench.transfer import FileSet, engine_transfer, plan_moves, prepare

_SETTINGS = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
_TILE_NBYTES = 64 * PAGE_NBYTES
# Streams a large power of two apart use the same sets of the caches and the same banks of the
# memory: four streams exactly 256 MiB apart were seen to run at a sixth. So the distance is never
# the half or the quarter of the arena, but this much less.
_GAP_NBYTES = 2 * MIB
_REQUEST_NBYTES = 64 * MIB


def host_copies(lab: Lab) -> Iterator[Comparison]:
    """One half of the arena into the other, as the tiers do when bytes move inside the host."""
    nbytes = _half_nbytes(lab.arena)
    source, target = (_tensor(lab.arena, at, nbytes) for at in (0, nbytes + _GAP_NBYTES))
    subject = timed(
        "tensor copy", 2 * nbytes, lambda: target.copy_(source), prepare=target.zero_,
        compare=lambda: torch.equal(source, target),
    )  # fmt: skip
    ceiling = streaming_copy(lab.arena, nbytes, torch.get_num_threads())
    yield _measure(lab, "host copy", subject, [ceiling])


def optimizer(lab: Lab) -> Iterator[Comparison]:
    """A step over state that fills the arena."""
    values = _tensor(lab.arena, 0, lab.arena.capacity_nbytes).view(torch.float32)
    ceilings = [
        timed(  # The ceiling of an update in place: each line is read and written back, once.
            "scaling in place", 2 * values.nbytes, lambda: values.mul_(0.5),
            # Old bytes of the arena may be denormal numbers, which multiply slowly.
            prepare=lambda: values.fill_(1.0),
        ),
        streaming_copy(lab.arena, _half_nbytes(lab.arena), torch.get_num_threads()),
    ]  # fmt: skip
    yield _measure(lab, "optimizer", optimizer_pass(lab.arena), ceilings)


def _measure(
    lab: Lab, section: str, subject: Contender, ceilings: Sequence[Contender]
) -> Comparison:
    size = format_nbytes(lab.arena.capacity_nbytes)
    case = f"{size} of arena, {torch.get_num_threads()} threads"
    return lab.measure(Comparison(section, case, [subject], ceilings), lab.effort.rounds)


def streaming_copy(arena: Arena, nbytes: int, num_threads: int) -> Contender:
    """The ceiling: one memmove per thread, from the lower part of the arena to the upper.

    Slices are far larger than the caches, so that glibc writes past them (non-temporal stores). The
    bytes are not compared: it is no part of this package.
    """
    slice_nbytes = align_down(nbytes // num_threads, PAGE_NBYTES)
    starts = [arena.address + index * slice_nbytes for index in range(num_threads)]
    moves = [(start + nbytes + _GAP_NBYTES, start, slice_nbytes) for start in starts]
    threads = concurrent.futures.ThreadPoolExecutor(num_threads)

    def transfer() -> None:
        for _ in threads.map(lambda move: ctypes.memmove(*move), moves):
            pass

    return timed("streaming copy", 2 * slice_nbytes * num_threads, transfer)


def optimizer_pass(arena: Arena) -> Contender:
    """AdamW over flat fp32 state: reads weight, gradient and moments, writes all but the gradient.

    28 bytes per parameter. The first tile of the state is compared with `torch.optim.AdamW`.
    """
    part_nbytes = align_down(arena.capacity_nbytes // 4 - 2 * _GAP_NBYTES, _TILE_NBYTES)
    stride_nbytes = part_nbytes + _GAP_NBYTES
    weight, gradient, exp_avg, exp_avg_sq = (
        _tensor(arena, index * stride_nbytes, part_nbytes).view(torch.float32) for index in range(4)
    )
    start = torch.linspace(-1, 1, _TILE_NBYTES // 4)

    def prepared() -> None:
        for tensor in (weight, gradient):
            tensor.view(-1, len(start)).copy_(start)
        for moment in (exp_avg, exp_avg_sq):
            moment.zero_()

    return timed(
        "adamw",
        28 * weight.numel(),
        lambda: step_([StateSpan(weight, gradient, (exp_avg, exp_avg_sq))], _SETTINGS),
        prepare=prepared,
        compare=lambda: torch.equal(weight[-len(start) :], _stepped(start)),
    )


def _stepped(start: torch.Tensor) -> torch.Tensor:
    """Returns PyTorch's update of the same weights, with the same gradients and zero moments."""
    weight = start.clone().requires_grad_()
    weight.grad = start.clone()
    torch.optim.AdamW(
        [weight],
        lr=_SETTINGS.lr,
        betas=(_SETTINGS.beta1, _SETTINGS.beta2),
        eps=_SETTINGS.eps,
        weight_decay=_SETTINGS.weight_decay,
        fused=True,
    ).step()
    return weight.detach()


def _half_nbytes(arena: Arena) -> int:
    return align_down(arena.capacity_nbytes // 2 - 2 * _GAP_NBYTES, _GAP_NBYTES)


def _tensor(arena: Arena, offset_nbytes: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(arena.memory(offset_nbytes, nbytes), dtype=torch.uint8)


# -- A device with memory of its own ---------------------------------------------------------------


def device_copies(lab: Lab, device: DeviceAdapter) -> Iterator[Comparison]:
    """Both directions one by one, then at once."""
    nbytes = lab.effort.nbytes
    for direction in ("in", "out", "both"):
        words = {"in": "host to device", "out": "device to host", "both": "both ways at once"}
        compared = Comparison(
            "device copy",
            f"{words[direction]}, {format_nbytes(nbytes)}",
            [arena_to_device(device, lab.arena, direction, nbytes)],
            [pinned_copy(device.torch_device, direction, nbytes)],
            {"operation": direction},
        )
        yield lab.measure(compared, lab.effort.rounds)


def pipeline(drives: DriveSet, device: DeviceAdapter, extent_nbytes: int) -> Iterator[Comparison]:
    """The complete path beside the drive alone: the device should add no cost."""
    effort = drives.lab.effort
    nbytes = effort.nbytes
    with drives.files() as files:
        ceiling = engine_transfer(
            "drive to host alone", files, "read", nbytes=nbytes, extent_nbytes=extent_nbytes
        )
        yield drives.measured(
            "nvme to device", f"{format_nbytes(nbytes)} in {format_nbytes(extent_nbytes)}",
            [nvme_to_device(device, files, nbytes, extent_nbytes)], [ceiling], effort.rounds,
            operation="read", extent_nbytes=extent_nbytes,
        )  # fmt: skip


def arena_to_device(device: DeviceAdapter, arena: Arena, direction: str, nbytes: int) -> Contender:
    """`nbytes` in chunks between arena and device: "in", "out", or half each at once ("both")."""
    host, there = _tensor(arena, 0, nbytes), device.allocate(nbytes)
    # [0, half) is copied to the device, [half, end) from the device, which gets it first.
    half_nbytes = {"in": nbytes, "out": 0, "both": nbytes // 2}[direction]

    def start(low: int, high: int, *, inward: bool) -> Copy:
        here, away = host[low:high], there[low:high]
        return device.copy(here, away) if inward else device.copy(away, here)

    def copy(low: int, high: int, *, inward: bool) -> None:
        for started in [start(*chunk, inward=inward) for chunk in _chunks(low, high)]:
            started.wait()

    def prepared() -> None:
        pattern.fill(arena.memory(0, nbytes), offset_nbytes=0, seed=STILL_SEED)
        there.zero_()
        copy(half_nbytes, nbytes, inward=True)
        host[half_nbytes:].zero_()
        device.synchronize()

    def transfer() -> None:
        chunks_in, chunks_out = _chunks(0, half_nbytes), _chunks(half_nbytes, nbytes)
        copies = []
        for index in range(max(len(chunks_in), len(chunks_out))):
            for chunks, inward in ((chunks_in, True), (chunks_out, False)):
                if index < len(chunks):
                    copies.append(start(*chunks[index], inward=inward))
        for started in copies:
            started.wait()

    def compare() -> bool:
        host[:half_nbytes].zero_()
        copy(0, half_nbytes, inward=False)
        return pattern.matches(arena.memory(0, nbytes), offset_nbytes=0, seed=STILL_SEED)

    return timed(f"infinity {direction}", nbytes, transfer, prepare=prepared, compare=compare)


def _chunks(low: int, high: int) -> list[tuple[int, int]]:
    return [(at, min(at + _REQUEST_NBYTES, high)) for at in range(low, high, _REQUEST_NBYTES)]


def pinned_copy(device: torch.device, direction: str, nbytes: int) -> Contender:
    """The ceiling: one copy of torch's own pinned memory, in one operation per direction."""
    in_nbytes = {"in": nbytes, "out": 0, "both": nbytes // 2}[direction]
    is_cuda = device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pairs = [(host[:in_nbytes], there[:in_nbytes]), (there[in_nbytes:], host[in_nbytes:])]
    streams: list[AbstractContextManager[Any]] = [
        torch.cuda.stream(torch.cuda.Stream(device)) if is_cuda else nullcontext() for _ in pairs
    ]

    def synchronize() -> None:
        if is_cuda:
            torch.cuda.synchronize(device)

    def transfer() -> None:
        for (source, target), stream in zip(pairs, streams, strict=True):
            with stream:
                target.copy_(source, non_blocking=is_cuda)
        synchronize()

    return timed(f"pinned {direction}", nbytes, transfer, prepare=synchronize)


def nvme_to_device(
    device: DeviceAdapter, files: FileSet, nbytes: int, extent_nbytes: int
) -> Contender:
    """NVMe -> arena -> device: the copy of each extent to the device starts when its read ends."""
    moves = plan_moves("read", nbytes=nbytes, extent_nbytes=extent_nbytes)
    host, there = _tensor(files.arena, 0, nbytes), device.allocate(nbytes)

    def prepared() -> None:
        prepare(files, moves, STILL_SEED)
        there.zero_()
        device.synchronize()

    def transfer() -> None:
        tickets = [files.submit(move) for move in moves]
        copies = []
        for move, ticket in zip(moves, tickets, strict=True):
            ticket.wait()
            part = slice(move.offset_nbytes, move.offset_nbytes + move.nbytes)
            copies.append(device.copy(host[part], there[part]))
        for copy in copies:
            copy.wait()

    def compare() -> bool:
        host.zero_()
        device.copy(there, host).wait()
        return pattern.matches(files.arena.memory(0, nbytes), offset_nbytes=0, seed=STILL_SEED)

    return timed("infinity nvme to device", nbytes, transfer, prepare=prepared, compare=compare)
