"""Gradients whose state is sharded: each rank sends them to their owners, which sum them in a fixed
order and take the mean. Presence and norms are those of all ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

import numpy
import torch
from typing_extensions import override

from infinity.distributed.collective.buckets import Contribution, GradientBuckets
from infinity.distributed.pending import PendingShards
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.grad_memory import SumsMemory
from infinity.distributed.sums.norms import NormsOfRanks, measured_shards
from infinity.distributed.sums.ordered_sum import OrderedReduction
from infinity.distributed.sums.partials import PartialGradient, wire_code
from infinity.distributed.sums.progress import (
    GradientReport,
    SumProgress,
    refuse_other_generation,
)
from infinity.distributed.wire.failures import ending_all
from infinity.distributed.wire.protocol import RemoteRequest
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import UnsupportedError
from infinity.observe import Counters
from infinity.ops.host_sums import add_, copied, multiplied_
from infinity.state.partition import Partition, ShardSlice
from infinity.state.store import StateStore
from infinity.state.units import StateKind, TensorSpec, Unit
from infinity.streaming.gradients.memory import flat_of, in_memory_order
from infinity.streaming.gradients.norms import CompleteSums
from infinity.streaming.gradients.sink import GradientSink, Lend
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.gradients.sums import refuse_sparse
from infinity.streaming.passes import Passes
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool

_LEAD_S = 10.0  # A rank that is ahead waits so long for the others, once in a step.
_ALL = 2**32 - 1  # More backward passes than a step has.
_IN_SUMS = "in the sums of gradients"  # What is lost there other ranks have given.


class DistributedGradients(GradientSink):
    """The gradients of full units, on their way to the ranks that own a part of them.

    In stage 1 a rank sums the backward passes of a step, as one rank does, and sends the sums to
    their owners when the step begins. In stages 2 and 3 a rank sends each gradient when it is
    complete, or, in layer-major order, when the sum over micro-batches is. The owner sums over
    ranks by `OrderedReduction`. Each contribution is divided by the number of ranks first, as in
    DistributedDataParallel, so two ranks give the same bits as there.

    A `GradientSink` that has two stores: `local` has this rank's sums, by the model's units;
    `owned` has the sums over ranks, by this rank's shard units.

    With `buckets` the devices of the ranks reduce a bucket that all ranks have proposed; the order
    of the sums is the same on both paths. Presence, stamps and norms are those of the whole group,
    from `begin_step` on.
    """

    def __init__(
        self,
        store: DistributedStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        reduce_dtype: torch.dtype | None,
        passes: Passes,
        buckets: GradientBuckets | None,
        sums: SumsMemory,
    ) -> None:
        self.local = GradientStore(store, pool=pool, device=device, counters=counters, blocks=sums)
        self._end_local = self.local.settle
        if store.partition.shards_gradients:  # In stages 2 and 3 they rest nowhere.
            self._end_local = self.local.finish_copies
        self._reduce_dtype = reduce_dtype  # None: as they come.
        self._passes = passes
        self._buckets, self._sums_memory = buckets, sums
        self._device, self._store = device, store
        self._partition: Partition = store.partition
        self._transport: PeerTransport = store.transport
        self._shares = store.partition.shares()
        self._specs = list(self._shares)
        self._index = {spec: index for index, spec in enumerate(self._specs)}
        self._local_shares: dict[int, tuple[Unit, ShardSlice]] = {}
        for shard in store.partition.local:
            for share in shard.shares:
                self._local_shares[self._index[share.full]] = shard.unit, share
        self._parts = {share.full: share.part for _, share in self._local_shares.values()}
        norms = self.norms = measured_shards(share for _, share in self._local_shares.values())
        self._pending, self._partials = store.pending, store.partials
        self.owned = OwnedSums(store, pool, device, counters, norms, store.pending)
        self._reduce_buffer: OrderedReduction[PartialGradient] = OrderedReduction(
            self._partition.count, combine=self._combine, drop=self._partials.drop
        )
        of_shard = {tensor: unit.index for tensor, (unit, _) in self._local_shares.items()}
        self.progress = SumProgress(of_shard, self._reduce_buffer.parts)
        # By tensor: this rank's contributions since the last step or `forget`.
        self._numbers: defaultdict[int, int] = defaultdict(int)
        # Steps that this rank has entered, and backward passes that it has ended since.
        self._num_steps = self._num_backwards = 0
        self._may_give = self._waits_for_others = True
        # For local sums of a single gradient: the dtype that holds them exactly.
        self._sent_as: dict[TensorSpec, torch.dtype | None] = {}
        self._num_entered = numpy.zeros(len(self._specs), numpy.int64)  # Steps with a gradient.
        self._contributed: set[TensorSpec] = set()  # Sent by this rank since the last step.
        self._known: set[TensorSpec] = set()  # Sent by some rank.
        self._norms_of_ranks = NormsOfRanks(self._shares)
        self._needs_norms = False  # Norms were asked for since the last step.
        self._sending: list[RemoteRequest] = []  # Parts of sums that rest on this rank.

    # -- In ----------------------------------------------------------------------------------------

    @override
    def add(self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor) -> None:
        if not self._partition.shards_gradients or self._passes.is_layer_major:
            if spec.numel:
                self._sent_as[spec] = None if spec in self._sent_as else gradient.dtype
                self.local.add(unit, spec, gradient)
        else:
            refuse_sparse(spec, gradient)
            contribution = self._contribution(spec, in_memory_order(gradient.detach(), spec))
            if self._buckets is not None and self._buckets.is_on and spec.numel:
                self._buckets.add(unit, contribution)
                self._take_buckets()
            else:
                self._give(contribution)
        self._contributed.add(spec)

    def _contribution(self, spec: TensorSpec, flat: torch.Tensor) -> Contribution:
        """Returns this rank's next contribution to a tensor, in the dtype in which it is sent."""
        flat = flat if self._reduce_dtype is None else flat.to(self._reduce_dtype)
        index = self._index[spec]
        number = self._numbers[index]
        self._numbers[index] += 1
        return Contribution(spec, index, self._reduce_buffer.generation(index), number, flat)

    def _take_buckets(self, *, all_of_them: bool = False) -> None:
        """Adds the sums of reduced buckets; gradients of cancelled ones go to their owners."""
        if self._buckets is None:
            return
        with ending_all(self._transport.failures, _IN_SUMS):
            for answered in self._buckets.take(all_of_them=all_of_them):
                contributions = answered.bucket.contributions
                if answered.means is None:
                    for contribution in contributions:
                        self._give(contribution)
                else:
                    for contribution, mean in zip(contributions, answered.means, strict=True):
                        self._add_sum(contribution, mean)
                    self.owned.write_out(self._partition.local[answered.bucket.unit.index].unit)

    def _add_sum(self, contribution: Contribution, mean: torch.Tensor) -> None:
        """Adds the means over all ranks of a bucket's contributions, of this rank's part."""
        index, number = contribution.index, contribution.number
        if index not in self._local_shares or self._reduce_buffer.is_outdated(
            index, contribution.generation
        ):
            return
        if self._reduce_buffer.pass_over(index, number):
            unit, share = self._local_shares[index]
            self._pending.await_update(unit.index)  # It reads the gradients of the last step.
            self.owned.add(unit, share.part, mean)
            self._note_added(index)
        else:
            partial = self._keep(self._on_host(mean), is_mean=True)
            self._reduce_buffer.deliver_sum(index, number, partial)

    def _on_host(self, flat: torch.Tensor) -> torch.Tensor:
        on_host = torch.empty(flat.shape, dtype=flat.dtype)
        self._device.copy(flat, on_host).wait()
        return on_host

    def _give(self, contribution: Contribution, *, is_on_host: bool = False) -> list[RemoteRequest]:
        """Sends the parts of a gradient to their owners and adds what may be added already."""
        self._await_turn()
        spec, index, flat = contribution.spec, contribution.index, contribution.flat
        generation, number = contribution.generation, contribution.number
        if not is_on_host and not self._device.shares_host_memory:
            flat = self._on_host(flat)
        requests = []
        for share in self._shares[spec]:
            part = flat[share.start : share.stop]
            if share.rank == self._partition.rank:
                # A view would keep the whole gradient in memory.
                self.deliver(share.rank, index, generation, number, self._keep(copied(part)))
            else:
                content = part.view(torch.uint8).numpy().data
                code = wire_code(part.dtype, number)
                request = self._transport.put(
                    share.rank, index, code, generation, content, meanwhile=self.take_in
                )
                requests.append(request)
        self._sum_up(all_are_there=False)
        return requests

    def _await_turn(self) -> None:
        """Waits, before a backward sends gradients, until the last backward is over on all ranks.

        Gradients that wait for a rank behind then belong to two backward passes at most. The wait
        is short, because a rank without further batches may wait elsewhere for this one.
        """
        if not self._may_give and self._waits_for_others:
            self._waits_for_others = self._transport.await_backwards(
                self._num_steps, self._num_backwards, timeout_s=_LEAD_S, meanwhile=self.take_in
            )
        self._may_give = True

    def _keep(self, values: torch.Tensor, *, is_mean: bool = False) -> PartialGradient:
        """Returns a partial gradient of this rank. Sums others if it needs their space."""

        def make_space() -> None:
            self.take_in()
            self._transport.check()

        return self._partials.put(values, is_mean=is_mean, meanwhile=make_space)

    def deliver(
        self, rank: int, tensor: int, generation: int, number: int, partial: PartialGradient
    ) -> None:
        """Takes a part of a gradient that this rank owns, from `rank`. Any thread."""
        self._reduce_buffer.deliver(tensor, rank, generation, number, partial)

    def _part_of_mean(self, partial: PartialGradient) -> torch.Tensor:
        """Returns a contribution over the number of ranks: fp32, memory that may be changed."""
        values = self._partials.read(partial)
        return values if partial.is_mean else multiplied_(values, 1.0 / self._partition.count)

    def _combine(self, one: PartialGradient, other: PartialGradient) -> PartialGradient:
        total = add_(self._part_of_mean(one), self._part_of_mean(other))
        return self._partials.merge((one, other), total)

    @override
    def take_in(self) -> None:
        self._sum_up(all_are_there=False)

    def _sum_up(self, *, all_are_there: bool) -> None:
        taken = self._reduce_buffer.take(all_are_there=all_are_there)
        with ending_all(self._transport.failures, _IN_SUMS):
            for tensor, of_tensor in itertools.groupby(taken, key=itemgetter(0)):
                unit, share = self._local_shares[tensor]
                for _, partial in of_tensor:
                    self._pending.await_update(unit.index)
                    self.owned.add(unit, share.part, self._part_of_mean(partial), is_on_host=True)
                    self._partials.drop(partial)
                self._note_added(tensor)

    def _note_added(self, tensor: int) -> None:
        """A sum has grown. Its norm is taken while it is in memory, if it is complete."""
        if self.progress.is_sum_complete(tensor):
            unit, share = self._local_shares[tensor]
            self.owned.note_complete(unit, share.part)

    # -- Memory of sums that are given away --------------------------------------------------------

    @override
    def begin_accumulating(self) -> None:
        self._sums_memory.open()

    @override
    def end_accumulating(self) -> None:
        self._sums_memory.close()

    # -- The step ----------------------------------------------------------------------------------

    def propose_rest(self) -> None:
        """Ends this rank's backward passes of the step, for which no other rank waits any more:
        proposes every open bucket."""
        assert self._buckets is not None
        self._transport.note_backward(self._num_steps, _ALL)
        if not self._partition.shards_gradients and self._buckets.is_on:
            for unit in self._partition.full_units:
                self._bucket_resting(unit, self._buckets)
        self._buckets.close_all()

    def _bucket_resting(self, unit: Unit, buckets: GradientBuckets) -> None:
        """Puts the sums that rest on the device into buckets, in stage 1."""
        resting = self.local.resting_on_device(unit)
        if resting is None:
            return
        for spec in unit.trainable():
            if self.local.has(spec):
                dtype = self._sent_as.pop(spec) or torch.float32
                flat = flat_of(resting, spec).to(dtype, copy=True)
                self.local.forget(spec)
                buckets.add(unit, self._contribution(spec, flat))
        buckets.close(unit)
        self._take_buckets()

    def begin_step(self, decision: bytes) -> list[bytes]:
        """Completes the sums and learns which tensors have a gradient. All ranks enter the step.

        `decision` is this rank's; returns those of all ranks.
        """
        self._pending.await_all()
        self._take_buckets(all_of_them=True)
        if not self._partition.shards_gradients:
            for unit in self._partition.full_units:
                self._give_sums(unit)
        own = self._report(decision)
        contents = self._transport.all_gather(
            "optimizer.step()", own.encode(), meanwhile=self.take_in
        )
        while self._sending:  # The next backward changes the sums.
            self._sending.pop().wait()
        reports = [GradientReport.decode(content, len(self._specs)) for content in contents]
        refuse_other_generation(self._specs, reports)
        self._take_norms(reports)
        present = numpy.logical_or.reduce([report.present for report in reports])
        self.progress.begin_step()
        self._sum_up(all_are_there=True)
        self._num_steps, self._num_backwards = self._num_steps + 1, 0
        self._may_give = self._waits_for_others = True
        self._known.update(self._specs[index] for index in numpy.flatnonzero(present))
        self._num_entered += present
        self._contributed.clear()
        self._numbers.clear()
        self._fill_in_zeros()
        if self._buckets is not None:
            self._buckets.begin_step(own.generations.tolist())
        return [report.decision for report in reports]

    def _report(self, decision: bytes) -> GradientReport:
        """Returns what this rank tells the others. Where the last step needed norms, that has the
        roots of the sums that are complete, if no rank has given more than in the last step."""
        count = len(self._specs)
        complete = [
            index for index in sorted(self._local_shares) if self.progress.is_sum_complete(index)
        ]
        told, summed = complete if self._needs_norms else [], numpy.zeros(count, numpy.int32)
        summed[told] = [self._reduce_buffer.parts(index)[0] for index in told]
        self._needs_norms = False
        generations = [self._reduce_buffer.generation(index) for index in range(count)]
        return GradientReport(
            present=numpy.array([spec in self._contributed for spec in self._specs], numpy.bool_),
            generations=numpy.array(generations, numpy.int64),
            given=numpy.array([self._numbers.get(index, 0) for index in range(count)], numpy.int32),
            summed=summed,
            roots=self._roots(told),
            decision=decision,
        )

    def _take_norms(self, reports: Sequence[GradientReport]) -> None:
        """Takes the roots that ranks have told, of the sums that lack nothing: every rank has given
        what is summed, and no rank more. All ranks take the same."""
        self._norms_of_ranks.clear()
        given = numpy.maximum.reduce([report.given for report in reports])
        for rank, report in enumerate(reports):
            self._norms_of_ranks.take(rank, numpy.flatnonzero(report.summed).tolist(), report.roots)
        for report in reports:
            for index in numpy.flatnonzero(
                (report.summed != 0) & (report.summed != given)
            ).tolist():
                self._norms_of_ranks.forget(index)

    def _fill_in_zeros(self) -> None:
        """Counts gradients that their sender has set to zero, and never sent, as present."""
        for index, (unit, share) in self._local_shares.items():
            if self._specs[index] in self._known and not self.owned.has(share.part):
                self.owned.add(unit, share.part, torch.zeros(share.part.numel), is_on_host=True)

    def _give_sums(self, unit: Unit) -> None:
        """Sends the sums of this rank to their owners."""
        is_resting = self._store.host_view(unit, StateKind.GRADIENTS) is not None
        for spec in unit.trainable():
            if self.local.has(spec):
                dtype = self._sent_as.pop(spec) or torch.float32
                # Sums that rest on the host stay as they are until the next backward.
                flat = self.local.view(unit, spec).to(dtype, copy=not is_resting)
                requests = self._give(self._contribution(spec, flat), is_on_host=True)
                self._sending += requests if is_resting else ()
                self.local.forget(spec)

    def _bucket_sums(self, unit: Unit) -> None:
        """Puts the sums of this rank into buckets, as far as devices can reduce them."""
        if self._buckets is None or not self._buckets.is_on:
            return
        for spec, flat in self.local.device_sums.take(unit).items():
            del self._sent_as[spec]
            self._buckets.add(unit, self._contribution(spec, flat))
        self._buckets.close(unit)
        self._take_buckets()

    def _give_away(self, unit: Unit) -> None:
        """Sends the sums of a unit, which rest nowhere, from its block to their owners."""
        if unit in self.local.in_blocks.units():
            self._give_sums(unit)
            self.local.drop_block(unit)

    # -- Looking -----------------------------------------------------------------------------------

    @override
    def stamp(self, spec: TensorSpec) -> tuple[int, int] | None:
        if not self.has(spec):
            return None
        index = self._index[spec]
        return self._reduce_buffer.generation(index), int(self._num_entered[index])

    @override
    def has(self, spec: TensorSpec) -> bool:
        return spec in self._known or spec in self._contributed

    @override
    def norm(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """Returns the 2-norm over all ranks: fp32 scalar on the host; see `norms.py`."""
        norms, self._needs_norms = self._norms_of_ranks, True
        if not norms.has(self._index[spec]):  # On all ranks: all know the same norms.
            known = [i for i, each in enumerate(self._specs) if each in self._known]
            lacking = [index for index in known if not norms.has(index)]
            contents = self._transport.all_gather("gradient norms", self._roots(lacking))
            for rank, content in enumerate(contents):
                norms.take(rank, lacking, content)
        return norms.norm(self._index[spec])

    def _roots(self, tensors: Iterable[int]) -> bytes:
        """Returns what this rank tells of the norms of these tensors; see `NormsOfRanks.take`."""
        local = [self._local_shares[index] for index in tensors if index in self._local_shares]
        with ending_all(self._transport.failures, "in the norms of gradients"):
            roots = [self.owned.norm(unit, share.part) for unit, share in local if share.part.numel]
        return torch.cat(roots).numpy().tobytes() if roots else b""

    @override
    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} is divided over {self._partition.count} ranks and is "
            "not read as a whole; optimizer.clip_grad_norm_ clips gradients, and returns the norm"
        )

    @override
    def put(
        self, unit: Unit, spec: TensorSpec, value: torch.Tensor, *, is_other: bool = False
    ) -> None:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} is divided over {self._partition.count} ranks and "
            "cannot be set as a whole; clip with optimizer.clip_grad_norm_, or scale the loss"
        )

    # -- Changing ----------------------------------------------------------------------------------

    @override
    def note_scaled(self, spec: TensorSpec, factor: float) -> None:
        self._norms_of_ranks.clear()
        if spec in self._parts:
            self.owned.note_scaled(self._parts[spec], factor)

    @override
    def is_scaled(self, unit: Unit) -> bool:
        return self.owned.is_scaled(self._partition.local[unit.index].unit)

    @override
    def factors(self, specs: Iterable[TensorSpec]) -> dict[TensorSpec, float]:
        full = {self._parts[spec]: spec for spec in specs if spec in self._parts}
        return {full[part]: factor for part, factor in self.owned.factors(full).items()}

    @override
    def forget(self, spec: TensorSpec) -> None:
        if (index := self._index.get(spec)) is None:
            return
        self.local.forget(spec)
        self._sent_as.pop(spec, None)
        self._norms_of_ranks.forget(index)
        self._reduce_buffer.forget(index)
        self._numbers.pop(index, None)
        self._contributed.discard(spec)
        self._known.discard(spec)
        if spec in self._parts:
            self.owned.forget(self._parts[spec])

    @override
    def zero(self, unit: Unit, spec: TensorSpec) -> None:
        if spec not in self._index:
            return
        kept = [having for having in (self._contributed, self._known) if spec in having]
        self.forget(spec)  # On every rank, so that all have one generation.
        for having in kept:
            having.add(spec)

    # -- What is done with the sums ----------------------------------------------------------------

    @override
    def sum_on_device(self, units: Iterable[Unit], lend: Lend | None = None) -> int:
        return self.local.sum_on_device(units, lend)

    @override
    def write_out(self, unit: Unit) -> None:
        if not self._partition.shards_gradients:
            self.local.write_out(unit)
        elif not self._passes.is_layer_major:
            if self._buckets is not None:
                self._buckets.close(unit)
        else:
            self._bucket_sums(unit)
            self.local.end_device_sums([unit])
            self._give_away(unit)
        self.owned.write_out(self._partition.local[unit.index].unit)

    @override
    def write_out_all(self) -> None:
        if not self._partition.shards_gradients:
            self.local.write_out_all()
        else:
            for unit in self.local.device_sums.units():
                self._bucket_sums(unit)
            self.local.end_device_sums()
            for unit in self.local.in_blocks.units():
                self._give_away(unit)
            if self._buckets is not None:
                self._buckets.close_all()
            self._take_buckets()
            self._num_backwards, self._may_give = self._num_backwards + 1, False
            self._transport.note_backward(self._num_steps, self._num_backwards)
        self._sum_up(all_are_there=False)
        self.owned.write_out_all()

    @override
    def reclaim(self) -> bool:
        # Sums that will be sent wait for all their parts, also when memory is short.
        are_sent = self._partition.shards_gradients
        return (not are_sent and self.local.reclaim()) or self.owned.reclaim()

    @override
    def settle(self) -> None:
        self._end_local()
        self.owned.settle()

    @override
    def prepare_step(self) -> None:
        self._end_local()
        self.owned.prepare_step()

    @override
    def apply_scales(self, unit: Unit) -> None:
        self.owned.apply_scales(self._partition.local[unit.index].unit)


class OwnedSums(GradientStore):
    """Sums over ranks of this rank's parts of gradients, which the thread of updates reads.

    That thread reads the block of a shard that awaits its update, or is updated early, and takes no
    lock (Note [Sums that stay in memory] in `streaming/gradients/blocks.py`). No such block is
    given up: a reclaim of that memory waits for the updates, or takes them back
    (`DistributedUpdater.reclaim`). All other methods are for the training thread, under the
    engine's lock.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        norms: CompleteSums,
        pending: PendingShards,
    ) -> None:
        super().__init__(store, pool=pool, device=device, counters=counters, norms=norms)
        self._pending = pending

    @override
    def _is_in_use(self, unit: Unit) -> bool:
        return super()._is_in_use(unit) or self._pending.is_read(unit.index)
