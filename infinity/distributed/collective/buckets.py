"""Buckets: gradients of one unit that the devices of all ranks reduce in one operation.

A bucket has the gradients of one unit that a backward delivers. It is proposed when it is complete,
or when the backward of the unit ends. The operation begins when every rank has proposed the same
bucket: the same tensors, and the same contribution since the last step. Otherwise the bucket is
cancelled, and each gradient is sent to its owner.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.exchange import DeviceExchange
from infinity.distributed.collective.issuing import Proposal
from infinity.distributed.collective.order import Key
from infinity.distributed.sums.partials import from_wire_code, wire_code
from infinity.observe import Counters
from infinity.state.partition import Partition
from infinity.state.units import TensorSpec, Unit
from infinity.tiers.device import Copy
from infinity.tiers.streams import Event, Stream

SUMMING = 1  # The kind of these proposals; see order.Key.


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """The gradient that one backward of this rank delivers: `flat`, on the device, of any dtype.

    `index` is the tensor's, `number` and `generation` are those of distributed/sums/ordered_sum.py.
    """

    spec: TensorSpec
    index: int
    generation: int
    number: int
    flat: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The bytes that are reduced."""
        return self.flat.numel() * self.flat.element_size()


@dataclass(eq=False, slots=True)
class GradientBucket:
    """Contributions to tensors of one unit, of one dtype, computed in one stream."""

    unit: Unit
    stream: Stream
    contributions: list[Contribution] = field(default_factory=list)
    proposal: Proposal | None = None
    summed: Copy | None = None  # Once issued.
    mean: torch.Tensor | None = None
    present: torch.Tensor | None = None  # By rank; None: every rank takes part.
    ready: Sequence[Event] = ()  # Behind the work that makes the gradients.

    @property
    def nbytes(self) -> int:
        """The bytes of all contributions."""
        return sum(member.nbytes for member in self.contributions)


class GradientBuckets:
    """The buckets of this rank. For the training thread, or autograd's while the training thread
    waits.

    Proposed gradients take at most the bytes of the largest unit, beside those of the last bucket.
    """

    def __init__(
        self,
        collectives: Collectives,
        exchange: DeviceExchange,
        partition: Partition,
        counters: Counters,
    ) -> None:
        self._collectives = collectives
        self._exchange = exchange
        self._counters = counters
        self._shares = partition.shares()
        self._rank = partition.rank
        self._count = partition.count
        self._most_nbytes = max(unit.weight_nbytes for unit in partition.full_units)
        self._open: dict[Unit, GradientBucket] = {}
        self._proposed: deque[GradientBucket] = deque()
        self._generations: Sequence[int] = ()  # By tensor, as the step began.
        # A sum that one rank gave nothing to is made again by the owners.
        collectives.stand_in(SUMMING, self._stand_in, is_unanimous=True)

    def begin_step(self, generations: Sequence[int]) -> None:
        """Begins a step. `generations`: by tensor, the same on all ranks."""
        self._generations = generations

    def _stand_in(self, _key: Key, size: int) -> Copy:
        return self._exchange.sum_nothing(*from_wire_code(size))

    @property
    def is_on(self) -> bool:
        """Whether devices exchange gradients at all."""
        return self._collectives.is_on

    def add(self, unit: Unit, contribution: Contribution) -> None:
        """Adds a contribution to the unit's open bucket. Closes a bucket that it does not fit."""
        bucket, stream = self._open.get(unit), self._exchange.current()
        if bucket is not None and not (bucket.stream == stream and _fits(bucket, contribution)):
            self.close(unit)
            bucket = None
        if bucket is None:
            bucket = self._open[unit] = GradientBucket(unit, stream)
        bucket.contributions.append(contribution)
        if len(bucket.contributions) == sum(1 for spec in unit.trainable() if spec.numel):
            self.close(unit)

    def close(self, unit: Unit) -> None:
        """Closes the unit's bucket: no more gradients come to it."""
        bucket = self._open.pop(unit, None)
        if bucket is None:
            return
        bucket.contributions.sort(key=lambda member: member.index)  # Autograd's order may differ.
        by_rank = [
            [
                member.flat[share.start : share.stop]
                for member in bucket.contributions
                for share in self._shares[member.spec]
                if share.rank == rank
            ]
            for rank in range(self._count)
        ]
        first = bucket.contributions[0].flat
        local_numel = sum(tensor.numel() for tensor in by_rank[self._rank])
        mean = torch.empty(local_numel, dtype=torch.float32, device=first.device)
        bucket.ready = ready = self._exchange.ready(bucket.stream)
        others_nbytes = bucket.nbytes - local_numel * first.element_size()

        present = self._exchange.host_flags() if self._collectives.is_in_lockstep else None

        def issue() -> Copy:
            bucket.summed = self._exchange.sum(
                by_rank, mean, ready=ready, owner=bucket.stream, present=present
            )
            self._counters.add("ranks_reduced_nbytes", others_nbytes)
            return bucket.summed

        bucket.mean, bucket.present = mean, present
        key = SUMMING, unit.index, _what(bucket, self._generations)
        most_numel = max(sum(tensor.numel() for tensor in tensors) for tensors in by_rank)
        size = wire_code(first.dtype, most_numel)
        bucket.proposal = self._collectives.propose(key, issue, size=size)
        self._proposed.append(bucket)

    def close_all(self) -> None:
        """Closes every open bucket: each one is proposed to the other ranks."""
        for unit in list(self._open):
            self.close(unit)

    def take(
        self, *, all_of_them: bool = False
    ) -> Iterator[tuple[GradientBucket, list[torch.Tensor] | None]]:
        """Yields answered buckets in the order of proposal, each with the means over all ranks, on
        the device: per contribution that of the part that this rank owns; None for a bucket that
        was cancelled. `all_of_them` waits for the rest."""
        while self._proposed and (
            all_of_them or self._is_over(self._proposed[0]) or self._has_too_much()
        ):
            bucket = self._proposed.popleft()
            assert bucket.proposal is not None and bucket.mean is not None
            if not self._collectives.settle(bucket.proposal):
                for event in bucket.ready:  # They are copied from, perhaps on another stream.
                    self._exchange.current().wait_event(event)
                yield bucket, None
                continue
            assert bucket.summed is not None
            bucket.summed.order()
            if bucket.present is not None:
                bucket.summed.wait()
                if not bucket.present.all():  # The host path passes a rank without gradients over.
                    yield bucket, None
                    continue
            numels = [
                sum(s.stop - s.start for s in self._shares[member.spec] if s.rank == self._rank)
                for member in bucket.contributions
            ]
            yield bucket, list(bucket.mean.split(numels))

    def _is_over(self, bucket: GradientBucket) -> bool:
        assert bucket.proposal is not None
        is_there = bucket.proposal.is_issued and bucket.summed is not None and bucket.summed.done()
        return is_there or bucket.proposal.is_cancelled

    def _has_too_much(self) -> bool:
        return sum(bucket.nbytes for bucket in list(self._proposed)[:-1]) > self._most_nbytes


def _fits(bucket: GradientBucket, contribution: Contribution) -> bool:
    return bucket.contributions[0].flat.dtype is contribution.flat.dtype and all(
        member.spec is not contribution.spec for member in bucket.contributions
    )


def _what(bucket: GradientBucket, generations: Sequence[int]) -> int:
    """Returns a number that ranks have in common whose buckets have the same layout and numbers.

    The number is that of another step with the same path: generations count from its beginning.
    """
    text = [str(bucket.contributions[0].flat.dtype)]
    for member in bucket.contributions:
        before = generations[member.index] if generations else 0
        text.append(f"{member.index} {member.generation - before} {member.number}")
    digest = hashlib.blake2b("\n".join(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
