"""Operations between the devices of several ranks: all-gather of weights, reduction of gradients.

Each rank copies its own part to its device, and the devices exchange the rest, so that every rank's
link to the host carries 1/N of the bytes ("bandwidth-centric partitioning": Rajbhandari et al.,
"ZeRO-Infinity", 2021, section 6.1).

Note [Rounds]
  A unit passes buffers of a constant size in several rounds. `choose_round` gives the size, which
  is the same on all ranks. Rounds of weights use two streams: the next part is
  copied from the host (`in`) while the last one is sent to the other ranks (`link`). Sums have
  buffers and a stream of their own (`sums`): a gather ahead of the backward does not wait for the
  gradients that a sum waits for. The two share no memory, so no event is between them. A unit of
  one round whose parts are equal is gathered where it is used. The buffer of gathered parts stays:
  a rank that does not need the unit has no other place for the parts of the other ranks.

Note [Gathers of a node]
  Weights that every node has (`Partition.is_of_node`) are gathered by the ranks of each node, in a
  process group of their own. They use the stream and the buffers of the other gathers. A round has
  the same bytes of all ranks together, so a rank's part of it is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infinity.distributed.collective.process_groups import GroupOperations
from infinity.ops.mean import write_mean
from infinity.sizes import MIB, align_up
from infinity.storage.protocol import Transfer
from infinity.tiers.device import Decoding, Region, ResizedRegion
from infinity.tiers.streams import Event, Stream, StreamCopy, StreamDevice, event_behind

# Of all ranks together in a round. A round costs some launches from Python, and a unit of one round
# with equal parts no copy on the device; buffers take memory from weights.
_ROUNDS_NBYTES = (256 * MIB, 128 * MIB, 64 * MIB, 32 * MIB)
_SHARE_OF_DEVICE = 64  # Buffers take at most this part of a device's capacity, or are the least.
_ALIGNED_NBYTES = 512


@dataclass(frozen=True, slots=True)
class PlacedRange:
    """`nbytes` from `start` on of a rank's part, and their place in the full unit."""

    rank: int
    start: int
    place: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """The sizes of the device buffers of an exchange, in bytes.

    round_nbytes: the most bytes of all ranks in a round
    weights_nbytes, gradients_nbytes: the most that one rank gives or owns of a unit
    node_count, node_weights_nbytes: the ranks of a node, and the most that one gives to it; 0
        without gathers of a node
    """

    count: int
    round_nbytes: int
    weights_nbytes: int
    gradients_nbytes: int
    node_count: int = 0
    node_weights_nbytes: int = 0

    @property
    def part_nbytes(self) -> int:
        """The bytes of one rank in a round of weights."""
        return self._part(self.count, self.weights_nbytes)

    @property
    def node_part_nbytes(self) -> int:
        """The bytes of one rank in a round of a node's weights; 0 without."""
        return self._part(self.node_count, self.node_weights_nbytes) if self.node_count else 0

    @property
    def sum_part_nbytes(self) -> int:
        """The bytes of one rank in a round of gradients."""
        return self._part(self.count, self.gradients_nbytes)

    @property
    def sent_nbytes(self) -> int:
        """The most bytes of one rank in a round of any weights."""
        return max(self.part_nbytes, self.node_part_nbytes)

    @property
    def gathered_nbytes(self) -> int:
        """The most bytes of all ranks in a round of any weights."""
        return max(self.count * self.part_nbytes, self.node_count * self.node_part_nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        of_weights = self.gathered_nbytes + 2 * self.sent_nbytes
        return of_weights + 2 * self.count * self.sum_part_nbytes

    def _part(self, count: int, most_nbytes: int) -> int:
        of_one = min(-(-self.round_nbytes // count), most_nbytes)
        return align_up(max(1, of_one), _ALIGNED_NBYTES)


def choose_round(
    count: int,
    weights_nbytes: int,
    gradients_nbytes: int,
    device_nbytes: int | None,
    *,
    node_count: int = 0,
    node_weights_nbytes: int = 0,
) -> Buffers:
    """Returns the buffers of the largest rounds that take at most 1/64 of a device's capacity, or
    of rounds of 32 MiB. Pure. The other numbers: see `Buffers`.

    device_nbytes: the least capacity of a rank's device, so that all ranks choose alike. None:
        unlimited
    """
    for round_nbytes in _ROUNDS_NBYTES:
        buffers = Buffers(
            count, round_nbytes, weights_nbytes, gradients_nbytes, node_count, node_weights_nbytes
        )
        if device_nbytes is None or buffers.nbytes <= device_nbytes // _SHARE_OF_DEVICE:
            break
    return buffers


class _Gathers(NamedTuple):
    """The gathers of one process group: its ranks, and the bytes of each in a round."""

    operations: GroupOperations
    num_ranks: int
    part_nbytes: int


class DeviceExchange:
    """One device's side. One thread issues the operations, in an order that is the same on all
    ranks. Those of `gathers` do not wait for those of `sums`.

    `node_gathers`: of the ranks of this node; None if `buffers` has no such gathers. A rank in a
    `PlacedRange` of such a gather is its number on the node.
    """

    def __init__(
        self,
        device: StreamDevice,
        gathers: GroupOperations,
        sums: GroupOperations,
        buffers: Buffers,
        node_gathers: GroupOperations | None = None,
    ) -> None:
        self._device = device
        self._sums = sums
        self._count = buffers.count
        self._sum_part_nbytes = buffers.sum_part_nbytes
        self._of_all = _Gathers(gathers, buffers.count, buffers.part_nbytes)
        self._of_node: _Gathers | None = None
        if node_gathers is not None and buffers.node_count:
            self._of_node = _Gathers(node_gathers, buffers.node_count, buffers.node_part_nbytes)
        self._link: Stream = device.streams.new_stream("link")
        self._sum_link: Stream = device.streams.new_stream("sums")
        self._sending = [self._buffer(buffers.sent_nbytes) for _ in range(2)]
        self._gathered = self._buffer(buffers.gathered_nbytes)
        self._outgoing = self._buffer(buffers.count * buffers.sum_part_nbytes)
        self._incoming = self._buffer(buffers.count * buffers.sum_part_nbytes)
        self._sent: list[Event | None] = [None, None]  # By buffer: no rank sends from it any more.
        self._turn = 0  # The next buffer, also of units of one round: their parts come meanwhile.

    def _buffer(self, nbytes: int) -> ResizedRegion:
        region = self._device.reserve(nbytes)
        assert isinstance(region, ResizedRegion)
        region.take_memory()
        return region

    def try_all(self) -> list[StreamCopy]:
        """Issues gathers and sums of the least and of the most bytes, of nothing, in the order of
        all ranks. Each of their process groups carries out its own kinds only: NCCL keeps memory
        for each kind that a group has carried out.
        """
        nothing = self._gathered.content[:0]
        copies = []
        for gathers in filter(None, (self._of_all, self._of_node)):
            for nbytes in sorted({_ALIGNED_NBYTES, gathers.part_nbytes}):
                ranges = [PlacedRange(0, 0, 0, nbytes)]
                copies.append(self.give(nothing, ranges, is_of_node=gathers is self._of_node))
        most = self._sum_part_nbytes // torch.float32.itemsize
        return [*copies, *(self.sum_nothing(torch.float32, n) for n in sorted({1, most}))]

    def take(self, region: Region) -> None:
        """Takes the memory of a region that an all-gather will fill. For the thread that
        attaches."""
        self._device.take(region)

    def give_back(self, region: Region) -> None:
        """Gives back the memory of `take`, which no all-gather fills."""
        self._device.detach(region)

    # -- Weights -----------------------------------------------------------------------------------

    def gather(
        self,
        region: Region | None,
        local: torch.Tensor,
        ranges: Sequence[PlacedRange],
        decoding: Decoding | None = None,
        *,
        is_of_node: bool = False,
    ) -> tuple[StreamCopy, StreamCopy]:
        """Issues the all-gather of a unit's weights into `region`, which has its memory.

        local: this rank's part, uint8, on the host or on the device
        decoding: of the unit's stored bytes, which come to its memory and are decoded into
            `region`; without a region they stay there, and are decoded later
        is_of_node: the ranks of each node gather by themselves
        Returns two copies: the arrival of all parts, as of `attach`, and the end of reads of
        `local`.
        """
        assert region is None or isinstance(region, ResizedRegion)
        if decoding is None:
            assert region is not None
            copies = self._gather(region.content, local, ranges, is_of_node, made=region)
            self._device.note_use(region, self._link)
            return copies
        streams = [self._link] if region is None else [self._link, self._device.decoder]
        with self._device.using_staging(decoding.memory, *streams) as staging:
            copies = self._gather(staging.content, local, ranges, is_of_node, made=staging)
            if region is None:
                return copies
            return self._device.decode(region, staging, decoding, self._link), copies[1]

    def follow(self, transfer: Transfer) -> None:
        """Orders later exchanges of memory of the device behind a copy, or waits for another
        transfer."""
        if isinstance(transfer, StreamCopy):
            transfer.order_stream(self._link)
        else:
            transfer.wait()

    def gather_in_place(
        self,
        full: torch.Tensor,
        local: torch.Tensor,
        ranges: Sequence[PlacedRange],
        ready: Sequence[Event],
    ) -> StreamCopy:
        """Issues an all-gather in device memory, uint8, of which `local` may be a part.

        ready: the end of the present uses of that memory
        """
        for event in ready:
            self._link.wait_event(event)
        arrival, _ = self._gather(full, local, ranges, is_of_node=False)
        return arrival

    def give(
        self, local: torch.Tensor, ranges: Sequence[PlacedRange], *, is_of_node: bool = False
    ) -> StreamCopy:
        """Issues an all-gather whose result this rank drops. Arguments: as of `gather`."""
        arrival, _ = self._gather(None, local, ranges, is_of_node)
        return arrival

    def _gather(
        self,
        full: torch.Tensor | None,
        local: torch.Tensor,
        ranges: Sequence[PlacedRange],
        is_of_node: bool,
        made: ResizedRegion | None = None,
    ) -> tuple[StreamCopy, StreamCopy]:
        gathers = self._of_node if is_of_node else self._of_all
        assert gathers is not None, "the ranks of a node have no gathers of their own"
        is_on_host = self._device.is_on_host(local)
        total_nbytes = max(part.start + part.nbytes for part in ranges)
        self._link.wait_event(self._device.inward_event())  # The region's memory is taken there.
        departure: StreamCopy | None = None
        for start in range(0, total_nbytes, gathers.part_nbytes):
            nbytes = min(gathers.part_nbytes, total_nbytes - start)
            own, turn = local[start : start + nbytes], self._turn
            self._turn = 1 - turn
            if is_on_host and own.numel():
                departure = self._bring(own, turn)
            on_device = None if is_on_host else own
            work = self._round(gathers, full, on_device, turn, start, nbytes, ranges)
            used = (self._sending[turn], self._gathered)
            self._device.streams.run(self._link, work, used, made)
            self._sent[turn] = event_behind(self._device.streams, self._link)
        arrival = self._device.watch_link(self._link, local if full is None else full)
        return arrival, departure or arrival

    def _bring(self, own: torch.Tensor, turn: int) -> StreamCopy:
        """Copies a part from the host to the next buffer."""
        sent = self._sent[turn]
        if sent is not None:
            self._device.inward_waits(sent)
        buffer = self._sending[turn].content[: own.numel()]
        copy = self._device.bring(own, buffer)
        copy.order_stream(self._link)
        return copy

    def _round(
        self,
        gathers: _Gathers,
        full: torch.Tensor | None,
        own: torch.Tensor | None,
        turn: int,
        start: int,
        nbytes: int,
        ranges: Sequence[PlacedRange],
    ) -> Callable[[], None]:
        """Sends the bytes [start, start + nbytes) of every rank's part to their places in
        `full`."""
        sending = self._sending[turn].content[:nbytes]
        incoming = self._gathered.content[: gathers.num_ranks * nbytes]
        is_in_place = full is not None and _are_rows(ranges, gathers.num_ranks, nbytes)
        if full is not None and is_in_place:
            incoming = full[: incoming.numel()]

        def work() -> None:
            if own is not None:
                sending[: own.numel()].copy_(own)
            gathers.operations.all_gather(incoming, sending)
            for part in () if full is None or is_in_place else ranges:
                low = max(start, part.start)
                high = min(start + nbytes, part.start + part.nbytes)
                if low < high:
                    place = part.place + low - part.start
                    at = part.rank * nbytes + low - start
                    assert full is not None
                    full[place : place + high - low].copy_(incoming[at : at + high - low])

        return work

    # -- Gradients ---------------------------------------------------------------------------------

    def current(self) -> Stream:
        """Returns the stream that is current in this thread."""
        return self._device.streams.current()

    def ready(self, stream: Stream | None = None) -> list[Event]:
        """Returns an event behind the present work of a stream, which makes the tensors, and of the
        current one, which has just allocated the result.
        """
        streams = {stream or self.current(), self.current()}
        return [event_behind(self._device.streams, stream) for stream in streams]

    def sum(
        self,
        gradients: Sequence[Sequence[torch.Tensor]],
        mean: torch.Tensor,
        *,
        ready: Sequence[Event],
        owner: Stream,
        present: torch.Tensor | None = None,
    ) -> StreamCopy:
        """Issues the exchange of gradients and the sums of the parts that this rank owns.

        gradients: by rank, flat tensors of one dtype, of the same sizes on all ranks
        mean: fp32; gets the sum over ranks divided by their number, one tensor after the other
        ready: the event behind the work that makes the tensors
        owner: the stream whose memory the tensors are; they are kept until the result is waited for
        present: bool on the host, by rank; gets whether the rank took part with gradients. None
            where every rank does

        Sums follow the tree of distributed/sums/ordered_sum.py: they have the bits of gradients
        that are sent one by one.
        """
        for event in ready:
            self._sum_link.wait_event(event)
        dtype = next(tensor.dtype for tensors in gradients for tensor in tensors)
        most_numel = max(sum(tensor.numel() for tensor in tensors) for tensors in gradients)
        for start, numel in self._sum_rounds(dtype, most_numel):
            self._sum_round(gradients, mean, start, numel, dtype)
        if present is not None:
            self._exchange_presence(present, is_present=True)
        kept = [mean, *(tensor for tensors in gradients for tensor in tensors)]
        return self._device.watch_link(self._sum_link, kept, owner=owner)

    def sum_nothing(self, dtype: torch.dtype, most_numel: int) -> StreamCopy:
        """Takes part in the exchange of gradients of other ranks, without gradients. A rank owns
        `most_numel` elements of these at the most."""
        for _, numel in self._sum_rounds(dtype, most_numel):
            self._sum_round(None, None, 0, numel, dtype)
        present = self.host_flags()
        self._exchange_presence(present, is_present=False)
        return self._device.watch_link(self._sum_link, present)

    def _sum_rounds(self, dtype: torch.dtype, most_numel: int) -> Iterator[tuple[int, int]]:
        at_once = self._sum_part_nbytes // dtype.itemsize
        for start in range(0, most_numel, at_once):
            yield start, min(at_once, most_numel - start)

    def _sum_round(
        self,
        gradients: Sequence[Sequence[torch.Tensor]] | None,
        mean: torch.Tensor | None,
        start: int,
        numel: int,
        dtype: torch.dtype,
    ) -> None:
        nbytes = self._count * numel * dtype.itemsize
        outgoing, incoming = (
            side.content[:nbytes].view(dtype).view(self._count, numel)
            for side in (self._outgoing, self._incoming)
        )

        def work() -> None:
            if gradients is not None:
                for row, tensors in zip(outgoing, gradients, strict=True):
                    _pack(row, tensors, start)
            self._sums.all_to_all(incoming, outgoing)
            local = incoming[0, :0] if mean is None else mean[start : start + numel]
            write_mean(local, incoming)

        used = (self._outgoing, self._incoming)
        self._device.streams.run(self._sum_link, work, used)

    def host_flags(self) -> torch.Tensor:
        """Returns a flag for each rank: bool, on the host, where the device may write it."""
        return self.host_memory(self._count).fill_(1).view(torch.bool)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Returns memory that is copied from and to the device without a wait of the host: uint8
        (nbytes,), undefined values."""
        is_pinned = self._device.torch_device.type == "cuda"
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")

    def _exchange_presence(self, present: torch.Tensor, *, is_present: bool) -> None:
        """Tells the other ranks whether this rank has given gradients. `present`: as of `sum`."""
        sending = self._outgoing.content[:_ALIGNED_NBYTES]
        incoming = self._incoming.content[: self._count * _ALIGNED_NBYTES]

        def work() -> None:
            sending.fill_(is_present)
            self._sums.all_gather(incoming, sending)
            flags = incoming[::_ALIGNED_NBYTES].to(torch.bool)
            present.copy_(flags, non_blocking=True)

        used = (self._outgoing, self._incoming)
        self._device.streams.run(self._sum_link, work, used)


def _are_rows(ranges: Sequence[PlacedRange], count: int, nbytes: int) -> bool:
    """Whether the full unit is one row of `nbytes` for each rank, in rank order: what a round of
    that size gathers. Such a round needs no copy on the device."""
    rows = [PlacedRange(rank, 0, rank * nbytes, nbytes) for rank in range(count)]
    return [part for part in ranges if part.nbytes] == rows


def _pack(row: torch.Tensor, tensors: Sequence[torch.Tensor], start: int) -> None:
    """Copies the elements [start, start + len(row)) of adjacent tensors, or fewer at their end."""
    first = 0
    for tensor in tensors:
        low, high = max(start, first), min(start + row.numel(), first + tensor.numel())
        if low < high:
            row[low - start : high - start].copy_(tensor[low - first : high - first])
        first += tensor.numel()
