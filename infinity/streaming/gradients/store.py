"""Gradients out of autograd and onto their tier, summed in fp32 over the backward passes of a step.

A gradient leaves PyTorch in the hook that fires when it is complete for this backward. The first of
a step is copied to its place, later ones are added in the order they come, as autograd adds to
`.grad`. A parameter without a gradient stays absent: `.grad` is None, and no update touches it.
A unit's gradients that rest on NVMe are summed in a host block (`blocks.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from infinity.observe import Counters
from infinity.state.store import NvmeLocation, StateStore
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, TensorSpec, Unit
from infinity.streaming.gradients.blocks import SumBlocks, SumsInBlocks
from infinity.streaming.gradients.leaving import (
    DeviceSums,
    GradientStaging,
    LeavingGradient,
    LeavingGradients,
    NarrowSums,
)
from infinity.streaming.gradients.resting_norms import RestingNorms
from infinity.streaming.gradients.sink import GradientSink, Lend
from infinity.streaming.gradients.sums import (
    SumState,
    UnitGradients,
    flat_of,
    in_memory_order,
    put,
    refuse_sparse,
    shaped,
    sums_of,
)
from infinity.streaming.gradients.tensors import CompleteSums, TensorGradient, has_any
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool


class GradientStore(GradientSink):
    """The gradients of units whose state this process owns. Called under the engine's lock."""

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        blocks: SumBlocks,
        norms: CompleteSums | None = None,
        takes_bf16: bool = False,
        has_worker: bool = False,
    ) -> None:
        """`takes_bf16`: updates read sums in bf16. `has_worker`: one calls `leaving.add_next`."""
        self._store = store
        self._pool = pool
        self._device = device
        self._sums = {unit.index: sums_of(unit, store) for unit in store.units}
        self._tensors: defaultdict[TensorSpec, TensorGradient] = defaultdict(TensorGradient)
        self._scaled: set[TensorSpec] = set()  # Those that may have a `scale`.
        self._end_reader: Callable[[], None] | None = None
        self.device_sums = DeviceSums()
        most_kept_nbytes = max(unit.weight_nbytes for unit in store.units)
        largest_numel = max(spec.numel for unit in store.units for spec in unit.tensors)
        self._staging = GradientStaging(pool, largest_numel, most_kept_nbytes)
        self.leaving = LeavingGradients(
            device, self._staging, counters, most_kept_nbytes, self._note_there, has_worker
        )
        self.norms = CompleteSums() if norms is None else norms
        self.narrow = NarrowSums(self._tensors, self.leaving, self.norms, is_on=takes_bf16)
        self.narrow_units = self.narrow.units
        self.in_blocks = SumsInBlocks(store, pool, blocks, counters, self.norms, self._tensors)
        most_nbytes = 2 * STATE_ITEM_NBYTES * max(unit.state_numel for unit in store.units)
        self._resting = RestingNorms(device, pool, self.norms, most_nbytes)

    # -- In ----------------------------------------------------------------------------------------

    def add(
        self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor, *, is_on_host: bool = False
    ) -> None:
        """Takes one gradient: any floating dtype, the parameter's shape, on the device, or on the
        host where it was summed there."""
        if gradient.layout is not torch.strided:
            refuse_sparse(spec, gradient)
        # INV-8: gradients are added in the order in which autograd delivers them.
        known, sums = self._tensors[spec], self._sums[unit.index]
        first = not known.is_present
        known.note_added(counts=self.norms.counts)
        if spec.numel == 0:
            known.note_there()
            return
        gradient = gradient.detach() if gradient.requires_grad else gradient  # Not recorded.
        if sums.on_device is not None:
            self._rescale_resting(unit, sums.on_device)
            flat = flat_of(sums.on_device, spec)
            put(flat, in_memory_order(gradient, spec).to(flat.device), first=first)
            if known.is_due and self.norms.follow_copies:
                self._resting.note(spec, known, flat)
        elif is_on_host or self._device.shares_host_memory:
            if sums.state is SumState.DUE:
                self.in_blocks.await_more(sums)
            if self.leaving.gradients and self.leaving.has(spec):
                self.leaving.end_all()  # The last one may be on its way to this place.
            if sums.narrow is not None:
                self.narrow.widen(sums)
            if self._scaled or (sums.on_host is None and sums.state is not SumState.ON_HOST):
                self._array(unit)
            place = sums.add(spec, gradient, first=first)
            if known.is_due:
                self.norms.note(spec, known, in_memory_order(place, spec))
        else:
            self._take_off_device(sums, spec, in_memory_order(gradient, spec), first=first)
            return
        known.note_there()

    def note_complete(self, unit: Unit, spec: TensorSpec) -> None:
        """No further gradient is expected in a sum of which `norms` does not count gradients. The
        norm of a sum in host memory is due; that of one on its way there, when it comes."""
        known, sums = self._tensors[spec], self._sums[unit.index]
        known.note_complete()
        array = sums.array if sums.on_host is None else sums.on_host
        if known.is_due and array is not None and not self.leaving.has(spec):
            self.norms.note(spec, known, flat_of(array, spec))

    def put(
        self, unit: Unit, spec: TensorSpec, value: torch.Tensor, *, is_other: bool = False
    ) -> None:
        """Sets the sum of this step: any float dtype, the parameter's shape. `is_other`: the stamp
        changes, so that callers see another gradient from now on."""
        self.finish_copies()
        self._tensors[spec].forget(is_other=is_other)
        self._scaled.discard(spec)
        self.add(unit, spec, value.cpu(), is_on_host=True)
        self.write_out(unit)

    def stamp(self, spec: TensorSpec) -> tuple[int, int] | None:
        """See `GradientSink.stamp`."""
        known = self._tensors[spec]
        return known.stamp if known.is_present else None

    def _take_off_device(
        self, sums: UnitGradients, spec: TensorSpec, flat: torch.Tensor, *, first: bool
    ) -> None:
        unit, known = sums.unit, self._tensors[spec]
        self.in_blocks.await_more(sums)
        if flat.dtype.itemsize > STATE_ITEM_NBYTES:
            flat = flat.float()
        if first and self.device_sums.is_open(unit):
            self.device_sums.add(unit, spec, flat)
            return
        if first and self.leaving.num_additions and self.leaving.has(spec):
            self.leaving.end_all()  # Additions to a sum that was forgotten.
        narrow = self.narrow.array_for(sums, spec, flat, first=first)
        place = flat_of(self._array(unit) if narrow is None else narrow, spec)
        if first:
            self._send(unit, spec, flat, place)
        else:
            self._send_to_sum(unit, spec, flat, place)
        known.note_there()

    def sum_on_device(self, units: Iterable[Unit], lend: Lend | None = None) -> int:
        """See `GradientSink`."""
        refused_nbytes = 0
        for unit in () if self._device.shares_host_memory else units:
            # INV-8: a sum so far is the first term, and is where it rests.
            is_first = not has_any(self._tensors, unit)
            if is_first and self._sums[unit.index].on_device is None:
                refused_nbytes += self.device_sums.begin(unit, lend)
        return refused_nbytes

    def end_device_sums(self, units: Sequence[Unit] | None = None) -> None:
        """Ends sums on the device, of all units without `units`, and waits until they have left."""
        self._end_sums(units)
        self.leaving.end_all()

    def _end_sums(self, units: Sequence[Unit] | None = None) -> None:
        """Sends the sums of these units, of all without `units`, from the device. No more gradients
        are added to them, but to sums of units outside of blocks."""
        if units is None:
            self.device_sums.end()
        for unit in self.device_sums.units() if units is None else units:
            self.device_sums.end_block(unit)
            self._send_sums(unit)

    def _send_sums(self, unit: Unit) -> None:
        for spec, flat in self.device_sums.take(unit).items():
            self._send(unit, spec, flat, flat_of(self._array(unit), spec))
            self._tensors[spec].note_there()

    def _send(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient from the device to its place on the host."""
        self._take_in_copies()
        self.leaving.start(unit, spec, flat, place)

    def _take_in_copies(self) -> None:
        """Notes what has come, and starts writing what was due and is complete. Never waits."""
        self.leaving.end_there()
        self.in_blocks.start_due(self.leaving.units)

    def _note_there(self, leaving: LeavingGradient) -> None:
        known, place = self._tensors[leaving.spec], leaving.place
        # One that was counted may still be on its way.
        if place is not None and known.is_due and not self.leaving.has(leaving.spec):
            self.norms.note(leaving.spec, known, place)

    def _send_to_sum(
        self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor
    ) -> None:
        """Starts copying a gradient that is added to its place when it has come. Waits while too
        many are on their way."""
        self._take_in_copies()
        self.in_blocks.keep(unit)  # Memory for the first blocks may be that of other sums.
        try:
            self.leaving.add(unit, spec, flat, place)
        finally:
            self.in_blocks.keep(None)

    def _array(self, unit: Unit) -> torch.Tensor:
        """The unit's gradients where the host can add to them: fp32 (state_numel,)."""
        sums = self._sums[unit.index]
        if sums.narrow is not None:
            self.narrow.widen(sums)
        if sums.on_host is None and sums.state is SumState.AT_REST:
            self._rescale_resting(unit, self.in_blocks.lend(sums))
        elif sums.state is SumState.WRITING:
            self.in_blocks.end_write(sums)
        array = sums.array if sums.on_host is None else sums.on_host
        assert array is not None
        self._rescale_resting(unit, array)
        return array

    def _readable(self, unit: Unit) -> torch.Tensor:
        """As `_array`, for a look: a write that is under way is not waited for, and the gradients
        may be in bf16."""
        sums = self._sums[unit.index]
        array = sums.array if sums.narrow is None else sums.narrow
        return self._array(unit) if array is None or self.is_scaled(unit) else array

    def is_scaled(self, unit: Unit) -> bool:
        """See `GradientSink`."""
        return bool(self._scaled) and not self._scaled.isdisjoint(unit.trainable())

    def _rescale_resting(self, unit: Unit, array: torch.Tensor) -> None:
        """Applies the factors that gradients of the unit wait for. array: fp32 (state_numel,)."""
        for spec in unit.trainable() if self.is_scaled(unit) else ():
            self._tensors[spec].apply_scale(flat_of(array, spec))
            self._scaled.discard(spec)

    # -- Out ---------------------------------------------------------------------------------------

    def finish_copies(self) -> None:
        """Waits for gradients that are on their way from the device."""
        for unit in self.device_sums.units():
            self._send_sums(unit)
        self.leaving.end_all()

    def write_out(self, unit: Unit) -> None:
        """A unit's gradients go to where they rest; its backward is over. Does not wait."""
        if not self._device.shares_host_memory:
            if self.device_sums.stays(unit, self._tensors):
                return
            self._end_sums([unit])
        sums = self._sums[unit.index]
        if sums.state in (SumState.ON_HOST, SumState.DUE):
            self.in_blocks.make_due(sums)
            self._take_in_copies()

    def next_wait(self) -> Callable[[], None] | None:
        """See `GradientSink.next_wait`."""
        self._end_sums()
        return self.leaving.next_wait()

    def write_out_all(self) -> None:
        """End of a backward: every unit's gradients go to where they rest."""
        self._end_sums()
        self.finish_copies()
        self._staging.release()
        self.in_blocks.start_writes()

    def drop_block(self, unit: Unit) -> None:
        """Gives the unit's host block back, without a write; its gradients were forgotten."""
        self.in_blocks.drop(self._sums[unit.index])

    def reclaim(self, *, waits: bool = True) -> bool:
        """Frees the staging blocks, a block of sums that are measured, or a block of sums, waiting
        for its write; without `waits` only a block whose sum nobody needs. False when there is
        none."""
        if not waits:
            return self.in_blocks.give_back_forgotten(self.leaving.units)
        if self.leaving.num_additions:
            self.leaving.end_all()
        if self._staging.release() or self._resting.reclaim():
            return True
        sums = self.in_blocks.cheapest()
        if sums is None:
            return False
        self.end_readers()  # First: an update without the lock may read the block.
        self.leaving.end_all()
        self.in_blocks.reclaim(sums)
        return True

    def lend(self, end: Callable[[], None] | None) -> None:
        """An update reads sums without the lock, until `end_readers`. `end` waits until it is over,
        and does what follows."""
        self._end_reader = end

    def end_readers(self) -> None:
        """Waits until nobody reads a sum without the lock."""
        end, self._end_reader = self._end_reader, None
        if end is not None:
            end()

    def prepare_step(self) -> None:
        """Every sum is complete, and stays in its block or is on its way to where it rests."""
        self.finish_copies()
        self._resting.advance()
        self.in_blocks.start_writes()
        self.in_blocks.end_step()
        while self._pool.is_tight and self.reclaim():
            pass

    def give_back(self, unit: Unit) -> None:
        """Frees the unit's host block if its write is over. Waits for no drive."""
        sums = self._sums[unit.index]
        if sums.state is SumState.WRITING:
            self.in_blocks.give_back_written(sums)

    def settle(self) -> None:
        """Everything is where it rests and no block is lent."""
        self.finish_copies()
        while self.reclaim():
            pass

    def close(self) -> None:
        """Gives up its views of memory, of which nobody reads any more."""
        self.norms.close(self._tensors.values())
        self._sums.clear()
        self.leaving.clear()
        self._resting.clear()

    # -- Looking -----------------------------------------------------------------------------------

    def has(self, spec: TensorSpec) -> bool:
        """Whether the tensor has a gradient."""
        return self._tensors[spec].is_present

    def is_complete(self, unit: Unit) -> bool:
        """Whether every gradient that was added is in its sum on this host, or on NVMe."""
        sums = self._sums[unit.index]
        if sums.on_device is not None:
            return False
        is_leaving = self.device_sums.has(unit) or unit in self.leaving.units()
        return not is_leaving and not self.is_scaled(unit)

    def sums_in_memory(self, unit: Unit) -> torch.Tensor | None:
        """Gradients that are not where they rest, or not in that form: those that rest on NVMe in
        their host block, fp32 (state_numel,), or narrow ones, bf16; or None."""
        # GIL: over ranks the thread of updates asks without the lock, of units whose block
        # `SumBlocks.is_read` holds, so neither field changes meanwhile.
        sums = self._sums[unit.index]
        return sums.array if sums.narrow is None else sums.narrow

    def expect_norms(self, tensors: Iterable[tuple[Unit, TensorSpec]]) -> None:
        """Norms of these gradients are asked for next. Has those that rest on a device measured
        together. Never waits."""
        for unit, spec in tensors if self.norms.follow_copies else ():
            on_device = self.resting_on_device(unit)
            if self.has(spec) and spec.numel and on_device is not None:
                self._resting.note(spec, self._tensors[spec], flat_of(on_device, spec))

    def norm(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """2-norm of one gradient: fp32 scalar on the host, same bits wherever it rests; or what
        else `norms` measures of it."""
        known = self._tensors[spec]
        assert known.is_present
        known.need_norm()
        if spec.numel == 0:
            return torch.zeros((), device="cpu")
        if known.scale is not None:
            self.apply_scales(unit)
        self._resting.start(spec)
        if known.norm is None and known.task is None:
            on_device = self.resting_on_device(unit) if self.norms.is_on_device else None
            flat = self.view(unit, spec) if on_device is None else flat_of(on_device, spec)
            if known.task is None:  # Else the sum has come with the view.
                self.norms.measure_now(spec, known, flat)
        return known.finished_norm()

    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """A copy of one gradient: fp32, the parameter's shape, on the host."""
        assert self.has(spec)
        if spec.numel == 0:
            return torch.zeros(spec.facts.shape, device="cpu")
        self.finish_copies()
        on_device = self.resting_on_device(unit)
        if on_device is not None:
            flat = flat_of(on_device, spec).cpu().clone()
        else:
            flat = flat_of(self._readable(unit), spec).to(torch.float32, copy=True)
            if isinstance(self._store.location(unit, StateKind.GRADIENTS), NvmeLocation):
                self.write_out(unit)
        return shaped(flat, spec)

    def resting_on_device(self, unit: Unit) -> torch.Tensor | None:
        """The unit's gradients where they rest: fp32 (state_numel,); None when not on a device."""
        on_device = self._sums[unit.index].on_device
        if on_device is not None:
            self._rescale_resting(unit, on_device)
        return on_device

    def view(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """One gradient, flat, on the host, fp32 or as it is kept in bf16: not a copy where that can
        be, and valid until anything else is asked of these gradients."""
        assert self.has(spec)
        self._send_sums(unit)  # Sums of other units stay on the device.
        self.leaving.end_all()
        on_device = self.resting_on_device(unit)
        return flat_of(self._readable(unit) if on_device is None else on_device, spec).cpu()

    # -- Changing ----------------------------------------------------------------------------------

    def note_scaled(self, spec: TensorSpec, factor: float) -> None:
        """See `GradientSink`."""
        self._tensors[spec].note_scaled(factor)
        self._scaled.add(spec)

    def apply_scales(self, unit: Unit) -> None:
        """See `GradientSink`."""
        if self.is_scaled(unit) and self.resting_on_device(unit) is None:
            self._array(unit)

    def factors(self, specs: Iterable[TensorSpec]) -> dict[TensorSpec, float]:
        """See `GradientSink`."""
        scales = {spec: self._tensors[spec].scale for spec in specs if spec in self._scaled}
        return {spec: scale for spec, scale in scales.items() if scale is not None}

    def forget(self, spec: TensorSpec) -> None:
        """The parameter has no gradient any more."""
        self._tensors[spec].forget()
        self._scaled.discard(spec)

    def zero(self, unit: Unit, spec: TensorSpec) -> None:
        """The gradient, if there is one, becomes zeros: `zero_grad(set_to_none=False)`."""
        known = self._tensors[spec]
        if not known.is_present or spec.numel == 0:
            return
        self.finish_copies()
        known.become_zeros()
        self._scaled.discard(spec)
        array = self._sums[unit.index].on_device
        flat_of(self._array(unit) if array is None else array, spec).zero_()
