"""Gradients whose state is sharded: each rank sends them to their owners, which sum them in a fixed
order and take the mean. Presence and norms are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy
import torch
from typing_extensions import override

from infinity.distributed.collective.buckets import Contribution, GradientBuckets
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.grad_memory import SumsMemory
from infinity.distributed.sums.norms import NormsOfRanks
from infinity.distributed.sums.over_ranks import IN_SUMS, SumsOverRanks, on_host
from infinity.distributed.sums.partials import wire_code
from infinity.distributed.sums.progress import (
    Contributions,
    GradientReport,
    refuse_other_generation,
)
from infinity.distributed.wire.failures import ending_all
from infinity.distributed.wire.protocol import RemoteRequest
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import UnsupportedError
from infinity.ops.host_sums import copied
from infinity.state.units import StateKind, TensorSpec, Unit
from infinity.streaming.gradients.sink import GradientSink, Lend
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.gradients.sums import flat_of, in_memory_order, refuse_sparse
from infinity.streaming.passes import Passes
from infinity.tiers.device import DeviceAdapter

_LEAD_S = 10.0  # A rank that is ahead waits so long for the others, once in a step.
_ALL = 2**32 - 1  # More backward passes than a step has.


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
        local: GradientStore,
        sums: SumsOverRanks,
        sums_memory: SumsMemory,
        device: DeviceAdapter,
        reduce_dtype: torch.dtype | None,
        passes: Passes,
        buckets: GradientBuckets | None,
    ) -> None:
        """`sums_memory`: that of `local`."""
        self.local, self.sums = local, sums
        self.owned, self.norms = sums.store, sums.norms
        self._reduce_dtype = reduce_dtype  # None: as they come.
        self._passes = passes
        self._buckets, self._sums_memory = buckets, sums_memory
        self._device, self._store = device, store
        self._turns = _Turns(store.transport)
        self._shares = store.partition.shares()
        self._tensors = Contributions(self._shares)
        # For local sums of a single gradient: the dtype that holds them exactly.
        self._sent_as: dict[TensorSpec, torch.dtype | None] = {}
        self._norms_of_ranks = NormsOfRanks(self._shares)
        self._sending: list[RemoteRequest] = []  # Parts of sums that rest on this rank.

    # -- In ----------------------------------------------------------------------------------------

    @override
    def add(self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor) -> None:
        if not self._store.partition.shards_gradients or self._passes.is_layer_major:
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
        self._tensors.note(spec)

    def _contribution(self, spec: TensorSpec, flat: torch.Tensor) -> Contribution:
        """Returns this rank's next contribution to a tensor, in the dtype in which it is sent."""
        flat = flat if self._reduce_dtype is None else flat.to(self._reduce_dtype)
        index = self._tensors.number[spec]
        generation = self.sums.generation(index)
        return Contribution(spec, index, generation, self._tensors.next(index), flat)

    def _take_buckets(self, *, all_of_them: bool = False) -> None:
        """Adds the sums of reduced buckets; gradients of cancelled ones go to their owners."""
        if self._buckets is None:
            return
        with ending_all(self._store.transport.failures, IN_SUMS):
            for bucket, means in self._buckets.take(all_of_them=all_of_them):
                if means is None:
                    for contribution in bucket.contributions:
                        self._give(contribution)
                else:
                    for contribution, mean in zip(bucket.contributions, means, strict=True):
                        self.sums.add_mean(contribution, mean)
                    self.owned.write_out(self._store.partition.local[bucket.unit.index].unit)

    def _give(self, contribution: Contribution, *, is_on_host: bool = False) -> list[RemoteRequest]:
        """Sends the parts of a gradient to their owners and adds what may be added already."""
        self._turns.await_next(self.take_in)
        spec, index, flat = contribution.spec, contribution.index, contribution.flat
        generation, number = contribution.generation, contribution.number
        if not is_on_host and not self._device.shares_host_memory:
            flat = on_host(self._device, flat)
        requests = []
        for share in self._shares[spec]:
            part = flat[share.start : share.stop]
            if share.rank == self._store.partition.rank:
                # A view would keep the whole gradient in memory.
                partial = self.sums.keep(copied(part))
                self.sums.deliver(share.rank, index, generation, number, partial)
            else:
                content = part.view(torch.uint8).numpy().data
                code = wire_code(part.dtype, number)
                request = self._store.transport.put(
                    share.rank, index, code, generation, content, meanwhile=self.take_in
                )
                requests.append(request)
        self.take_in()
        return requests

    @override
    def take_in(self) -> None:
        self.sums.take_in(all_are_there=False)

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
        self._turns.end_all()
        if not self._store.partition.shards_gradients and self._buckets.is_on:
            for unit in self._store.partition.full_units:
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
        self._store.pending.await_all()
        self._take_buckets(all_of_them=True)
        if not self._store.partition.shards_gradients:
            for unit in self._store.partition.full_units:
                self._give_sums(unit)
        own = self._report(decision)
        contents = self._store.transport.all_gather(
            "optimizer.step()", own.encode(), meanwhile=self.take_in
        )
        while self._sending:  # The next backward changes the sums.
            self._sending.pop().wait()
        reports = [GradientReport.decode(content, len(self._tensors.specs)) for content in contents]
        refuse_other_generation(self._tensors.specs, reports)
        self._take_norms(reports)
        present = numpy.logical_or.reduce([report.present for report in reports])
        self.sums.progress.begin_step()
        self.sums.take_in(all_are_there=True)
        self._turns.begin_step()
        self._tensors.begin_step(present)
        self.sums.fill_in_zeros(self._tensors.of_all())
        if self._buckets is not None:
            self._buckets.begin_step(own.generations.tolist())
        return [report.decision for report in reports]

    def _report(self, decision: bytes) -> GradientReport:
        """Returns what this rank tells the others. Where the last step needed norms, that has the
        roots of the sums that are complete, if no rank has contributed more than in the
        last step."""
        count = len(self._tensors.specs)
        told = self.sums.complete() if self._norms_of_ranks.take_needed() else {}
        summed = numpy.zeros(count, numpy.int32)
        summed[list(told)] = list(told.values())
        generations = [self.sums.generation(index) for index in range(count)]
        present, counts = self._tensors.report()
        return GradientReport(
            present=present,
            generations=numpy.array(generations, numpy.int64),
            counts=counts,
            summed=summed,
            roots=self.sums.roots(told),
            decision=decision,
        )

    def _take_norms(self, reports: Sequence[GradientReport]) -> None:
        """Takes the roots that ranks have told, of the sums that lack nothing: no rank has
        contributed more than is summed. All ranks take the same."""
        self._norms_of_ranks.clear()
        counts = numpy.maximum.reduce([report.counts for report in reports])
        for rank, report in enumerate(reports):
            self._norms_of_ranks.take(rank, numpy.flatnonzero(report.summed).tolist(), report.roots)
        for report in reports:
            is_outdated = (report.summed != 0) & (report.summed != counts)
            for index in numpy.flatnonzero(is_outdated).tolist():
                self._norms_of_ranks.forget(index)

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
        index = self._tensors.number[spec]
        return self.sums.generation(index), self._tensors.num_entered(index)

    @override
    def has(self, spec: TensorSpec) -> bool:
        return self._tensors.has(self._tensors.number.get(spec))

    @override
    def norm(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """Returns the 2-norm over all ranks: fp32 scalar on the host; see `norms.py`."""
        norms, number = self._norms_of_ranks, self._tensors.number[spec]
        if not norms.has(number):  # On all ranks: all know the same norms.
            lacking = [index for index in self._tensors.of_all() if not norms.has(index)]
            contents = self._store.transport.all_gather("gradient norms", self.sums.roots(lacking))
            for rank, content in enumerate(contents):
                norms.take(rank, lacking, content)
        return norms.norm(number)

    @override
    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} is divided over {self._store.partition.count} ranks "
            "and is not read as a whole; optimizer.clip_grad_norm_ clips gradients, and returns "
            "the norm"
        )

    @override
    def put(
        self, unit: Unit, spec: TensorSpec, value: torch.Tensor, *, is_other: bool = False
    ) -> None:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} is divided over {self._store.partition.count} ranks "
            "and cannot be set as a whole; clip with optimizer.clip_grad_norm_, or scale the loss"
        )

    # -- Changing ----------------------------------------------------------------------------------

    @override
    def note_scaled(self, spec: TensorSpec, factor: float) -> None:
        self._norms_of_ranks.clear()
        if (part := self.sums.part(self._tensors.number[spec])) is not None:
            self.owned.note_scaled(part, factor)

    @override
    def is_scaled(self, unit: Unit) -> bool:
        return self.owned.is_scaled(self._store.partition.local[unit.index].unit)

    @override
    def factors(self, specs: Iterable[TensorSpec]) -> dict[TensorSpec, float]:
        parts = {self.sums.part(self._tensors.number[spec]): spec for spec in specs}
        owned = [part for part in parts if part is not None]
        return {parts[part]: factor for part, factor in self.owned.factors(owned).items()}

    @override
    def forget(self, spec: TensorSpec) -> None:
        self._forget(spec, stays=False)

    def _forget(self, spec: TensorSpec, *, stays: bool) -> None:
        if (index := self._tensors.number.get(spec)) is None:
            return
        self.local.forget(spec)
        self._sent_as.pop(spec, None)
        self._norms_of_ranks.forget(index)
        self.sums.forget(index)
        self._tensors.forget(index, stays=stays)

    @override
    def zero(self, unit: Unit, spec: TensorSpec) -> None:
        self._forget(spec, stays=True)  # On every rank, so that all have one generation.

    # -- What is done with the sums ----------------------------------------------------------------

    @override
    def sum_on_device(self, units: Iterable[Unit], lend: Lend | None = None) -> int:
        return self.local.sum_on_device(units, lend)

    @override
    def write_out(self, unit: Unit) -> None:
        if not self._store.partition.shards_gradients:
            self.local.write_out(unit)
        elif not self._passes.is_layer_major:
            if self._buckets is not None:
                self._buckets.close(unit)
        else:
            self._bucket_sums(unit)
            self.local.end_device_sums([unit])
            self._give_away(unit)
        self.owned.write_out(self._store.partition.local[unit.index].unit)

    @override
    def write_out_all(self) -> None:
        if not self._store.partition.shards_gradients:
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
            self._turns.end_backward()
        self.take_in()
        self.owned.write_out_all()

    def _end_local(self) -> None:
        if self._store.partition.shards_gradients:  # Its sums rest nowhere.
            self.local.finish_copies()
        else:
            self.local.settle()

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
        self.owned.apply_scales(self._store.partition.local[unit.index].unit)


class _Turns:
    """When a backward of this rank may send its gradients.

    It waits until the last backward is over on all ranks: gradients that wait for a rank behind
    then belong to two backward passes at most. The wait is short, because a rank without further
    batches may wait elsewhere for this one.
    """

    def __init__(self, transport: PeerTransport) -> None:
        self._transport = transport
        # Steps that this rank has entered, and backward passes that it has ended since.
        self._num_steps = self._num_backwards = 0
        self._has_turn = self._waits_for_others = True

    def await_next(self, meanwhile: Callable[[], None]) -> None:
        """Waits for the turn of the present backward, unless it has it."""
        if not self._has_turn and self._waits_for_others:
            self._waits_for_others = self._transport.await_backwards(
                self._num_steps, self._num_backwards, timeout_s=_LEAD_S, meanwhile=meanwhile
            )
        self._has_turn = True

    def end_backward(self) -> None:
        """Tells the other ranks that a backward is over."""
        self._num_backwards, self._has_turn = self._num_backwards + 1, False
        self._transport.note_backward(self._num_steps, self._num_backwards)

    def end_all(self) -> None:
        """Tells the other ranks that no further backward of this step comes."""
        self._transport.note_backward(self._num_steps, _ALL)

    def begin_step(self) -> None:
        """All ranks have entered the step."""
        self._num_steps, self._num_backwards = self._num_steps + 1, 0
        self._has_turn = self._waits_for_others = True
