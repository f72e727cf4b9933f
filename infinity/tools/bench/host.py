"""Host memory: copies inside the arena, and the optimizer's pass over its state.

Both count every byte on the memory bus: read bytes and written bytes.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

from infinity.ops.adamw import AdamWSettings, adamw_
from infinity.sizes import MIB, PAGE_NBYTES, align_down, format_nbytes
from infinity.storage.arena import Arena
from infinity.tools.bench.lab import Lab
from infinity.tools.bench.measure import Contender, ContenderGroup, Measurement, Result, clock

_SETTINGS = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
_TILE_NBYTES = 64 * PAGE_NBYTES
# Streams a large power of two apart use the same sets of the caches and the same banks of the
# memory: four streams exactly 256 MiB apart were seen to run at a sixth. So the distance is never
# the half or the quarter of the arena, but this much less.
_GAP_NBYTES = 2 * MIB


class StreamingCopy(Contender):
    """The ceiling: one memmove per thread, from the lower part of the arena to the upper.

    Slices are far larger than the caches, so that glibc writes past them (non-temporal stores). The
    bytes are not compared: it is no part of this package.
    """

    name = "streaming copy"

    def __init__(self, arena: Arena, nbytes: int, num_threads: int) -> None:
        self._nbytes = nbytes
        slice_nbytes = align_down(nbytes // num_threads, PAGE_NBYTES)
        starts = [arena.address + index * slice_nbytes for index in range(num_threads)]
        away_nbytes = nbytes + _GAP_NBYTES
        self._slices = [(start + away_nbytes, start, slice_nbytes) for start in starts]
        self._moved_nbytes = 2 * slice_nbytes * num_threads
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads)

    @override
    def run(self) -> Measurement:
        def transfer() -> None:
            for _ in self._threads.map(lambda move: ctypes.memmove(*move), self._slices):
                pass

        return Measurement(self._moved_nbytes, *clock(transfer))


class StreamingScale(Contender):
    """The ceiling of an update in place: every line is read, changed and written back, once."""

    name = "scaling in place"

    def __init__(self, arena: Arena) -> None:
        self._values = _tensor(arena, 0, arena.capacity_nbytes).view(torch.float32)

    @override
    def run(self) -> Measurement:
        self._values.fill_(
            1.0
        )  # Old bytes of the arena may be denormal numbers, which multiply slowly.
        return Measurement(2 * self._values.nbytes, *clock(lambda: self._values.mul_(0.5)))


class ArenaCopy(Contender):
    """Copies one tensor into another, as the tiers do when bytes move inside the host."""

    name = "tensor copy"

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._source = _tensor(arena, 0, nbytes)
        self._target = _tensor(arena, nbytes + _GAP_NBYTES, nbytes)

    @override
    def run(self) -> Measurement:
        self._target.zero_()
        seconds, cpu_s = clock(lambda: self._target.copy_(self._source))
        ok = torch.equal(self._source, self._target)
        return Measurement(2 * self._source.nbytes, seconds, cpu_s, ok=ok)


class OptimizerPass(Contender):
    """AdamW over flat fp32 state: reads weight, gradient and moments, writes all but the gradient.

    28 bytes per parameter. The first tile of the state is compared with `torch.optim.AdamW`.
    """

    name = "adamw"

    def __init__(self, arena: Arena) -> None:
        part_nbytes = align_down(arena.capacity_nbytes // 4 - 2 * _GAP_NBYTES, _TILE_NBYTES)
        stride_nbytes = part_nbytes + _GAP_NBYTES
        self._state = [
            _tensor(arena, index * stride_nbytes, part_nbytes).view(torch.float32)
            for index in range(4)
        ]

    @override
    def run(self) -> Measurement:
        weight, gradient, exp_avg, exp_avg_sq = self._state
        start = torch.linspace(-1, 1, _TILE_NBYTES // 4)
        for tensor in (weight, gradient):
            tensor.view(-1, len(start)).copy_(start)
        for moment in (exp_avg, exp_avg_sq):
            moment.zero_()

        def transfer() -> None:
            adamw_([weight], [gradient], [exp_avg], [exp_avg_sq], _SETTINGS)

        seconds, cpu_s = clock(transfer)
        ok = torch.equal(weight[-len(start) :], _stepped(start))
        return Measurement(28 * weight.numel(), seconds, cpu_s, ok=ok)


def copies(lab: Lab) -> Iterator[Result]:
    """One half of the arena into the other."""
    nbytes = _half_nbytes(lab.arena)
    ceiling = StreamingCopy(lab.arena, nbytes, torch.get_num_threads())
    yield _measure(lab, "host copy", [ArenaCopy(lab.arena, nbytes)], [ceiling])


def optimizer(lab: Lab) -> Iterator[Result]:
    """A step over state that fills the arena."""
    ceilings: list[Contender] = [
        StreamingScale(lab.arena),
        StreamingCopy(lab.arena, _half_nbytes(lab.arena), torch.get_num_threads()),
    ]
    yield _measure(lab, "optimizer", [OptimizerPass(lab.arena)], ceilings)


def _measure(
    lab: Lab, section: str, subjects: Sequence[Contender], ceilings: Sequence[Contender]
) -> Result:
    size = format_nbytes(lab.arena.capacity_nbytes)
    case = f"{size} of arena, {torch.get_num_threads()} threads"
    return lab.measure(ContenderGroup(section, case, subjects, ceilings), lab.effort.rounds)


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
