"""What the devices of several ranks do together: put weights together, and sum gradients.

Each rank brings its own part to its device, and the devices exchange the rest among themselves, so
that every rank's link to the host carries 1/N of what all of them need ("bandwidth-centric
partitioning": Rajbhandari et al., "ZeRO-Infinity", 2021, section 6.1).

Note [Rounds]
  A unit goes through buffers of a constant size, in as many rounds as it takes: what is reserved on
  the device depends on neither model nor number of ranks. Rounds of weights follow each other on
  two streams: the next part comes from the host (`in`) while the last one goes to the others
  (`link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.sizes import MIB, align_up
from infinity.tiers.device import Region, ResizedRegion, all_of
from infinity.tiers.streams import Event, Stream, StreamCopy, StreamDevice, StreamRegion

_ROUND_NBYTES = 32 * MIB  # Of all ranks together.
_ALIGNED_NBYTES = 512


class Operations(Protocol):
    """Collective operations on tensors of the device, issued in the stream that is current."""

    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Every rank's `source`, uint8 (n,), into `target`, uint8 (count * n,), in rank order."""

    def all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Row r of `source` to row `rank` of rank r's `target`: both (count, n), of one dtype."""


@dataclass(frozen=True, slots=True)
class PlacedRange:
    """`nbytes` from `start` on of a rank's part, and where in the whole they belong."""

    rank: int
    start: int
    place: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """Sizes of what an exchange keeps on the device, for units of `largest_nbytes` at most."""

    count: int
    largest_nbytes: int

    @property
    def part_nbytes(self) -> int:
        """Of one rank, in a round."""
        of_all = min(_ROUND_NBYTES, self.largest_nbytes)
        return align_up(-(-of_all // self.count), _ALIGNED_NBYTES)

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return (2 * self.count + 2) * self.part_nbytes


class DeviceExchange:
    """One device's side. Issued by one thread, in an order that is the same on all ranks."""

    def __init__(self, device: StreamDevice, operations: Operations, buffers: Buffers) -> None:
        self._device = device
        self._operations = operations
        self._count = buffers.count
        self._part_nbytes = buffers.part_nbytes
        self._link: Stream = device.streams.new_stream()
        whole_nbytes = buffers.count * buffers.part_nbytes
        self._sending = [self._buffer(buffers.part_nbytes) for _ in range(2)]
        self._giving = self._buffer(whole_nbytes)
        self._coming = self._buffer(whole_nbytes)
        self._sent: list[Event | None] = [None, None]  # By buffer: nobody sends from it any more.

    def _buffer(self, nbytes: int) -> StreamRegion:
        region = self._device.reserve(nbytes)
        assert isinstance(region, StreamRegion)
        region.memory.take_memory()
        return region

    def take(self, region: Region) -> None:
        """Memory for a region that will be put together. By the thread that attaches."""
        self._device.take(region)

    # -- Weights -----------------------------------------------------------------------------------

    def gather(
        self, region: Region, mine: torch.Tensor, stretches: Sequence[PlacedRange]
    ) -> tuple[StreamCopy, StreamCopy]:
        """Issues putting a unit's weights together in `region`, which has its memory.

        `mine`: this rank's part, uint8, on the host or on the device. Gives the arrival of all of
        it, as of `attach`, and when `mine` is not read any more.
        """
        assert isinstance(region, StreamRegion)
        whole = all_of(region.memory)
        copies = self._gather(whole, mine, stretches, made=region.memory)
        self._device.note_use(region, self._link)
        return copies

    def gather_in_place(
        self,
        whole: torch.Tensor,
        mine: torch.Tensor,
        stretches: Sequence[PlacedRange],
        ready: Sequence[Event],
    ) -> StreamCopy:
        """As `gather`, in device memory of one's own, uint8, of which `mine` may be a part.
        `ready`: what uses or makes that memory until now."""
        for event in ready:
            self._link.wait_event(event)
        arrival, _ = self._gather(whole, mine, stretches)
        return arrival

    def _gather(
        self,
        whole: torch.Tensor,
        mine: torch.Tensor,
        stretches: Sequence[PlacedRange],
        made: ResizedRegion | None = None,
    ) -> tuple[StreamCopy, StreamCopy]:
        is_on_host = self._device.is_on_host(mine)
        total_nbytes = max(each.start + each.nbytes for each in stretches)
        self._link.wait_event(self._device.inward_event())  # The region's memory is taken there.
        departure: StreamCopy | None = None
        for number, start in enumerate(range(0, total_nbytes, self._part_nbytes)):
            nbytes = min(self._part_nbytes, total_nbytes - start)
            own, turn = mine[start : start + nbytes], number % 2
            if is_on_host and own.numel():
                departure = self._bring(own, turn)
            work = self._round(whole, None if is_on_host else own, turn, start, nbytes, stretches)
            used = (self._sending[turn].memory, self._coming.memory)
            self._device.streams.run(self._link, work, used, made)
            event = self._device.streams.new_event()
            event.record(self._link)
            self._sent[turn] = event
        arrival = self._device.watch_link(self._link, whole)
        return arrival, departure or arrival

    def _bring(self, own: torch.Tensor, turn: int) -> StreamCopy:
        """A part from the host to the buffer whose turn it is."""
        sent = self._sent[turn]
        if sent is not None:
            self._device.inward_waits(sent)
        buffer = all_of(self._sending[turn].memory)[: own.numel()]
        copy = self._device.bring(own, buffer)
        copy.order_stream(self._link)
        return copy

    def _round(
        self,
        whole: torch.Tensor,
        own: torch.Tensor | None,
        turn: int,
        start: int,
        nbytes: int,
        stretches: Sequence[PlacedRange],
    ) -> Callable[[], None]:
        """Bytes [start, start + nbytes) of every rank's part go to their places in `whole`."""
        sending = all_of(self._sending[turn].memory)[:nbytes]
        coming = all_of(self._coming.memory)[: self._count * nbytes]

        def work() -> None:
            if own is not None:
                sending[: own.numel()].copy_(own)
            self._operations.all_gather(coming, sending)
            for each in stretches:
                low = max(start, each.start)
                high = min(start + nbytes, each.start + each.nbytes)
                if low < high:
                    place = each.place + low - each.start
                    at = each.rank * nbytes + low - start
                    whole[place : place + high - low].copy_(coming[at : at + high - low])

        return work

    # -- Gradients ---------------------------------------------------------------------------------

    def current(self) -> Stream:
        """Returns the stream that is current in this thread."""
        return self._device.streams.current()

    def ready(self, stream: Stream | None = None) -> list[Event]:
        """What a stream has to do until now, which makes the tensors that are given; and the
        current one, which has just allocated what takes the result."""
        events = []
        for each in {stream or self.current(), self.current()}:
            events.append(self._device.streams.new_event())
            events[-1].record(each)
        return events

    def sum(
        self,
        given: Sequence[Sequence[torch.Tensor]],
        mean: torch.Tensor,
        *,
        ready: Sequence[Event],
        owner: Stream,
    ) -> StreamCopy:
        """Issues giving every rank its parts of this rank's gradients, and summing what comes.

        `given`: by rank, flat tensors of one dtype, of the same sizes on all ranks. `mean`, fp32:
        takes the sum, divided by the number of ranks, of what all give to this one, one tensor
        after the other. `ready`: what makes them. All are memory of the stream `owner`, and kept
        until somebody waits for the result. Sums are made by the tree of
        distributed/ordered_sum.py: their bits are those of gradients that come one by one.
        """
        for event in ready:
            self._link.wait_event(event)
        dtype = next(tensor.dtype for tensors in given for tensor in tensors)
        at_once = self._part_nbytes // dtype.itemsize
        totals = [sum(tensor.numel() for tensor in tensors) for tensors in given]
        for start in range(0, max(totals), at_once):
            numel = min(at_once, max(totals) - start)
            self._sum_round(given, mean, start, numel, dtype)
        kept = [mean, *(tensor for tensors in given for tensor in tensors)]
        return self._device.watch_link(self._link, kept, owner=owner)

    def _sum_round(
        self,
        given: Sequence[Sequence[torch.Tensor]],
        mean: torch.Tensor,
        start: int,
        numel: int,
        dtype: torch.dtype,
    ) -> None:
        nbytes = self._count * numel * dtype.itemsize
        giving, coming = (
            all_of(each.memory)[:nbytes].view(dtype).view(self._count, numel)
            for each in (self._giving, self._coming)
        )

        def work() -> None:
            for row, tensors in zip(giving, given, strict=True):
                _pack(row, tensors, start)
            self._operations.all_to_all(coming, giving)
            mine = mean[start : start + numel]
            if mine.numel():
                mine.copy_(mean_of([row[: mine.numel()] for row in coming]))

        used = (self._giving.memory, self._coming.memory)
        self._device.streams.run(self._link, work, used)


def _pack(row: torch.Tensor, tensors: Sequence[torch.Tensor], start: int) -> None:
    """Elements [start, start + len(row)) of tensors that follow each other; there may be fewer."""
    first = 0
    for tensor in tensors:
        low, high = max(start, first), min(start + row.numel(), first + tensor.numel())
        if low < high:
            row[low - start : high - start].copy_(tensor[low - first : high - first])
        first += tensor.numel()


def mean_of(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of what ranks gave, fp32, summed by the tree of distributed/ordered_sum.py."""
    level = [row.float().mul_(1.0 / len(rows)) for row in rows]
    while len(level) > 1:
        pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
        level = [pair[0].add_(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]
