"""Sums over ranks of the parts of gradients that this rank owns, each a mean over all ranks.

Contributions come in any order and wait as `PartialGradients`; `OrderedReduction` says which of
them are added next. What is added rests in a `GradientStore` of this rank's shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import itemgetter

import torch

from infinity.distributed.collective.buckets import Contribution
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.norms import measured_shards
from infinity.distributed.sums.ordered_sum import OrderedReduction
from infinity.distributed.sums.partials import PartialGradient
from infinity.distributed.sums.progress import SumProgress
from infinity.distributed.wire.failures import ending_all
from infinity.observe import Counters
from infinity.ops.host_sums import add_, multiplied_
from infinity.state.partition import ShardSlice
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.blocks import PooledSumBlocks, SumsStay
from infinity.streaming.gradients.store import GradientStore
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool

IN_SUMS = "in the sums of gradients"  # What is lost there other ranks have given.


class SumsOverRanks:
    """Contributions of ranks to the parts of tensors that this rank owns, and the sums in `store`.

    A tensor is named by its number in `Partition.shares`. Any thread may `deliver`; all else is for
    the training thread, under the engine's lock.
    """

    def __init__(
        self,
        store: DistributedStore,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        *,
        stay: SumsStay,
        takes_bf16: bool,
    ) -> None:
        partition = store.partition
        self._device = device
        self._failures = store.transport.failures
        self._pending, self._partials = store.pending, store.partials
        self._weight = 1.0 / partition.count
        index = {spec: number for number, spec in enumerate(partition.shares())}
        self._owned: dict[int, tuple[Unit, ShardSlice]] = {
            index[share.full]: (shard.unit, share)
            for shard in partition.local
            for share in shard.shares
        }
        self.norms = measured_shards(share for _, share in self._owned.values())
        # The thread of updates reads the block of a shard that awaits its update, or is updated
        # early, without a lock. To give the block up is to wait for the updates, or to take them
        # back (`Giver.SHARD_UPDATES`).
        blocks = PooledSumBlocks(pool, stay, is_read=store.pending.is_read)
        self.store = GradientStore(
            store, pool=pool, device=device, counters=counters, norms=self.norms, blocks=blocks,
            takes_bf16=takes_bf16,
        )  # fmt: skip
        self._waiting: OrderedReduction[PartialGradient] = OrderedReduction(
            partition.count, combine=self._combine, drop=self._partials.drop
        )
        of_shard = {tensor: unit.index for tensor, (unit, _) in self._owned.items()}
        self.progress = SumProgress(of_shard, self._waiting.parts)

    def part(self, tensor: int) -> TensorSpec | None:
        """Returns this rank's part of a tensor."""
        return self._owned[tensor][1].part if tensor in self._owned else None

    def generation(self, tensor: int) -> int:
        """See `OrderedReduction.generation`; of all tensors."""
        return self._waiting.generation(tensor)

    # -- In ----------------------------------------------------------------------------------------

    def deliver(
        self, rank: int, tensor: int, generation: int, number: int, partial: PartialGradient
    ) -> None:
        """Takes a part of a gradient that this rank owns, from `rank`. Any thread."""
        self._waiting.deliver(tensor, rank, generation, number, partial)

    def keep(self, values: torch.Tensor, *, is_mean: bool = False) -> PartialGradient:
        """Returns a partial gradient of this rank. Sums others if it needs their space."""

        def make_space() -> None:
            self.take_in(all_are_there=False)
            self._failures.check()

        return self._partials.put(values, is_mean=is_mean, meanwhile=make_space)

    def add_mean(self, contribution: Contribution, mean: torch.Tensor) -> None:
        """Adds the mean over all ranks of a contribution, of this rank's part, on the device."""
        tensor, number = contribution.index, contribution.number
        if tensor not in self._owned or self._waiting.is_outdated(tensor, contribution.generation):
            return
        if self._waiting.pass_over(tensor, number):
            unit, share = self._owned[tensor]
            self._pending.await_update(unit.index)  # It reads the gradients of the last step.
            self.store.add(unit, share.part, mean)
            self._note_added(tensor)
        else:
            partial = self.keep(on_host(self._device, mean), is_mean=True)
            self._waiting.deliver_sum(tensor, number, partial)

    def take_in(self, *, all_are_there: bool) -> None:
        """Adds what can be added; with `all_are_there`, everything."""
        taken = self._waiting.take(all_are_there=all_are_there)
        with ending_all(self._failures, IN_SUMS):
            for tensor, of_tensor in itertools.groupby(taken, key=itemgetter(0)):
                unit, share = self._owned[tensor]
                for _, partial in of_tensor:
                    self._pending.await_update(unit.index)
                    self.store.add(unit, share.part, self._part_of_mean(partial), is_on_host=True)
                    self._partials.drop(partial)
                self._note_added(tensor)

    def _note_added(self, tensor: int) -> None:
        """A sum has grown. Its norm is taken while it is in memory, if it is complete."""
        if self.progress.is_sum_complete(tensor):
            unit, share = self._owned[tensor]
            self.store.note_complete(unit, share.part)

    def _part_of_mean(self, partial: PartialGradient) -> torch.Tensor:
        """Returns a contribution over the number of ranks: fp32, memory that may be changed."""
        values = self._partials.read(partial)
        return values if partial.is_mean else multiplied_(values, self._weight)

    def _combine(self, one: PartialGradient, other: PartialGradient) -> PartialGradient:
        total = add_(self._part_of_mean(one), self._part_of_mean(other))
        return self._partials.merge((one, other), total)

    def fill_in_zeros(self, tensors: Iterable[int]) -> None:
        """Gives sums to tensors whose gradient every sender has set to zero, and never sent."""
        for tensor in tensors:
            unit, share = self._owned.get(tensor, (None, None))
            if unit is not None and share is not None and not self.store.has(share.part):
                zeros = torch.zeros(share.part.numel, device="cpu")
                self.store.add(unit, share.part, zeros, is_on_host=True)

    def forget(self, tensor: int) -> None:
        """Drops what was contributed to a tensor, and its sum."""
        self._waiting.forget(tensor)
        if tensor in self._owned:
            self.store.forget(self._owned[tensor][1].part)

    # -- Norms -------------------------------------------------------------------------------------

    def complete(self) -> dict[int, int]:
        """Returns the tensors, in order, whose sums have as much as in the last step, and the
        number of contributions of every rank in them."""
        tensors = [
            tensor for tensor in sorted(self._owned) if self.progress.is_sum_complete(tensor)
        ]
        return {tensor: self._waiting.parts(tensor)[0] for tensor in tensors}

    def roots(self, tensors: Iterable[int]) -> bytes:
        """Returns what this rank tells of the norms of these tensors; see `NormsOfRanks.take`."""
        owned = [self._owned[tensor] for tensor in tensors if tensor in self._owned]
        with ending_all(self._failures, "in the norms of gradients"):
            roots = [self.store.norm(unit, share.part) for unit, share in owned if share.part.numel]
        return torch.cat(roots).numpy().tobytes() if roots else b""


def on_host(device: DeviceAdapter, flat: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory."""
    copy = torch.empty(flat.shape, dtype=flat.dtype, device="cpu")
    device.copy(flat, copy).wait()
    return copy
