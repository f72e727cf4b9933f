"""Gradients out of autograd and onto their tier, summed in fp32 over the backward passes of a step.

A gradient leaves PyTorch in the hook that fires when it is complete for this backward. The first of
a step is copied to its place, later ones are added in the order they come, exactly as autograd adds
to `.grad`. A parameter that got no gradient stays absent: `.grad` is None, and no update touches
it.

Where gradients rest on NVMe a unit's are summed in a host block that is written out when the unit's
backward is over, and read back only if another backward adds to it.

Note [Out of the device]
  A gradient leaves a device with memory of its own in its own dtype, into the tail of its place on
  the host, and is made fp32 in place once it has come (`widen`). The host does not wait for that
  while the backward runs: what is due to be written waits for its copies, and the computation waits
  for those of the unit before the last, whose memory is free then.
  Where several micro-batches go through one block they are summed on the device first
  (`sum_on_device`), in the same order and so to the same bits, and leave it once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import UnsupportedError
from infinity.observe import Counters
from infinity.state.budgets import STAGED_NBYTES
from infinity.state.store import DeviceLocation, NvmeLocation, StateStore, Transfer
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, TensorSpec, Unit
from infinity.storage.protocol import Priority
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool


@dataclass(eq=False, slots=True)
class _Buffer:
    """One unit's gradients in a host block; `writing` once they are on their way out."""

    block: Block
    array: torch.Tensor  # fp32 (state_numel,)
    writing: Transfer | None = None


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A gradient on its way from the device into the tail of its place on the host."""

    unit: Unit
    copy: Copy
    place: torch.Tensor  # fp32 (numel,)
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.place.numel() * self.dtype.itemsize


class GradientStore:
    """The gradients of every unit. Called under the engine's lock."""

    def __init__(
        self,
        store: StateStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
    ) -> None:
        self._store = store
        self._pool = pool
        self._device = device
        self._counters = counters
        self._present: dict[TensorSpec, None] = {}  # Insertion-ordered set.
        self._norms: dict[TensorSpec, torch.Tensor] = {}
        self._buffers: dict[Unit, _Buffer] = {}
        self._in_use: Unit | None = None  # Its buffer must not be reclaimed now.
        self._leaving: deque[_Leaving] = deque()  # Not on the host yet, or not known to be.
        self._keeping: deque[_Leaving] = deque()  # Those whose device memory is still kept.
        self._most_kept_nbytes = max(unit.weight_nbytes for unit in store.units)
        self._due: dict[Unit, None] = {}  # To be written out when their copies are over.
        self._summing: frozenset[Unit] = frozenset()  # Units whose sums are made on the device now.
        self._sums: dict[Unit, dict[TensorSpec, torch.Tensor]] = {}  # On the device: flat.
        # Clip factors of a step whose gradients are still kept, not applied to them yet.
        self._scales: dict[TensorSpec, torch.Tensor] = {}
        # (Which gradient of the parameter, counted from the first; how often it was changed.)
        self._stamps: dict[TensorSpec, tuple[int, int]] = {}

    # -- In ----------------------------------------------------------------------------------------

    def add(
        self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor, *, is_on_host: bool = False
    ) -> None:
        """Takes one gradient: any floating dtype, the parameter's shape, on the device, or on the
        host where it was summed there."""
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {spec.name!r} has layout {gradient.layout}; expected a dense "
                "one. Build the embedding with sparse=False"
            )
        first = spec not in self._present
        self._note_change(spec)
        if spec.numel == 0:
            self._present[spec] = None
            return
        flat = in_memory_order(gradient.detach(), spec)
        self._norms.pop(spec, None)
        location = self._store.location(unit, StateKind.GRADIENTS)
        with torch.no_grad():
            if isinstance(location, DeviceLocation):
                self._rescale_resting(unit, location.memory)
                flat = flat.to(self._device.torch_device)
                _put(flat_of(location.memory.view(torch.float32), spec), flat, first=first)
            elif is_on_host or self._device.shares_host_memory:
                self._due.pop(unit, None)
                if not first:
                    self.finish_copies()  # The last one may be on its way to this place.
                _put(flat_of(self._array(unit), spec), flat, first=first)
            else:
                self._take_off_device(unit, spec, flat, first=first)
        if spec not in self._sums.get(unit, ()):
            self._present[spec] = None

    def put(
        self, unit: Unit, spec: TensorSpec, value: torch.Tensor, *, is_other: bool = False
    ) -> None:
        """Changes the sum so far, or makes it: any float dtype, the parameter's shape. `is_other`:
        to those who look at it this is another gradient from now on."""
        self.finish_copies()
        before = self._stamps.get(spec)
        self.forget(spec)
        if before is not None and not is_other:
            self._stamps[spec] = before
        self.add(unit, spec, value.cpu(), is_on_host=True)
        self.write_out(unit)

    def stamp(self, spec: TensorSpec) -> tuple[int, int] | None:
        """Says which gradient of a parameter this is, and changes when it does; None without
        one."""
        return self._stamps.get(spec, (0, 0)) if spec in self._present else None

    def _note_change(self, spec: TensorSpec) -> None:
        number, changes = self._stamps.get(spec, (0, 0))
        self._stamps[spec] = number, changes + 1

    def _take_off_device(
        self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, *, first: bool
    ) -> None:
        self._due.pop(unit, None)
        if flat.dtype.itemsize > STATE_ITEM_NBYTES:
            flat = flat.float()
        if unit in self._summing and first:
            self._add_on_device(unit, spec, flat)
        elif first:
            self._send(unit, flat, flat_of(self._array(unit), spec))
        else:
            self.finish_copies()
            self._add_staged(unit, spec, flat, flat_of(self._array(unit), spec))

    def sum_on_device(self, units: Iterable[Unit]) -> None:
        """Several gradients will come to each parameter of these units, until `write_out`."""
        if not self._device.shares_host_memory:
            fresh = (u for u in units if all(spec not in self._present for spec in u.trainable()))
            self._summing = self._summing.union(fresh)

    def _add_on_device(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor) -> None:
        sums = self._sums.setdefault(unit, {})
        before = sums.get(spec)
        if before is None:
            sums[spec] = flat  # One alone leaves in its own dtype, from where autograd put it.
        elif before.dtype is torch.float32:
            sums[spec] = before + flat
        else:
            sums[spec] = before.float().add_(flat)

    def _end_sums(self, units: Sequence[Unit]) -> None:
        """No more gradients come to these units: what was summed on the device leaves it."""
        self._summing = self._summing.difference(units)
        for unit in units:
            self._send_sums(unit)

    def _send_sums(self, unit: Unit) -> None:
        for spec, flat in self._sums.pop(unit, {}).items():
            self._send(unit, flat, flat_of(self._array(unit), spec))
            self._present[spec] = None

    def _send(self, unit: Unit, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient from the device to its place on the host."""
        self._take_in_copies()
        copy = self._device.copy(flat, _tail(place, flat.dtype))
        leaving = _Leaving(unit, copy, place, flat.dtype)
        self._leaving.append(leaving)
        self._keeping.append(leaving)
        kept_nbytes = sum(each.nbytes for each in self._keeping)
        while kept_nbytes > self._most_kept_nbytes and len(self._keeping) > 1:
            oldest = self._keeping.popleft()
            kept_nbytes -= oldest.nbytes
            oldest.copy.order()

    def _take_in_copies(self) -> None:
        """Widens what has come, and starts writing what was due and is complete. Never waits."""
        while self._leaving and self._leaving[0].copy.done():
            self._end_oldest()
        for unit in [u for u in self._due if all(u is not each.unit for each in self._leaving)]:
            self._start_write(unit)

    def _end_oldest(self) -> None:
        leaving = self._leaving.popleft()
        if self._keeping and self._keeping[0] is leaving:
            self._keeping.popleft()
        leaving.copy.wait()
        widen(leaving.place, leaving.dtype)

    def _add_staged(
        self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Adds a gradient in device memory to a sum on the host, through a small block."""
        count = min(flat.numel(), STAGED_NBYTES // STATE_ITEM_NBYTES)
        self._in_use = unit
        try:
            block = self._pool.require(count * STATE_ITEM_NBYTES, f"gradient of {spec.name}")
        finally:
            self._in_use = None
        try:
            staged = self._pool.tensor(block)[: count * flat.dtype.itemsize].view(flat.dtype)
            for source, sink in zip(flat.split(count), target.split(count), strict=True):
                self._device.copy(source, staged[: source.numel()]).wait()
                sink.add_(staged[: source.numel()])
        finally:
            self._pool.free(block)

    def _array(self, unit: Unit) -> torch.Tensor:
        """The unit's gradients where the host can add to them: fp32 (state_numel,)."""
        host_view = self._store.host_view(unit, StateKind.GRADIENTS)
        if host_view is not None:
            self._rescale_resting(unit, host_view)
            return host_view.view(torch.float32)
        buffer = self._buffers.get(unit)
        if buffer is None:
            block = self._take_block(unit)
            buffer = _Buffer(block, self._pool.tensor(block).view(torch.float32))
            if any(spec in self._present for spec in unit.trainable()):
                try:
                    self._wait_read(
                        unit,
                        self._store.read(unit, StateKind.GRADIENTS, block, priority=Priority.STATE),
                    )
                except BaseException:
                    self._pool.free(block)
                    raise
                self._rescale_resting(unit, buffer.array.view(torch.uint8))
            self._buffers[unit] = buffer
        elif buffer.writing is not None:
            self._wait_write(unit, buffer)
        return buffer.array

    def _take_block(self, unit: Unit) -> Block:
        nbytes = unit.state_numel * STATE_ITEM_NBYTES  # Also of a unit with no home for them.
        return self._pool.require(nbytes, f"gradients of {unit.name}")

    def _rescale_resting(self, unit: Unit, memory: torch.Tensor) -> None:
        """Applies the clip factor that the last step left for later."""
        for spec in unit.trainable():
            scale = self._scales.pop(spec, None)
            if scale is not None:
                flat_of(memory.view(torch.float32), spec).mul_(scale.to(memory.device))

    def _wait_read(self, unit: Unit, transfer: Transfer) -> None:
        what = f"gradients of {unit.name} are added to"
        with self._counters.timed("read_wait_s", what, (transfer,)):
            transfer.wait()

    def _wait_write(self, unit: Unit, buffer: _Buffer) -> None:
        if buffer.writing is not None:
            what = f"gradients of {unit.name} must be written"
            with self._counters.timed("write_wait_s", what, (buffer.writing,)):
                buffer.writing.wait()
            buffer.writing = None

    def begin_accumulating(self) -> None:
        """Several micro-batches are about to be summed. Raises CapacityError, before anything was
        done, where they cannot be."""

    def end_accumulating(self) -> None:
        """Every gradient of them is where it rests, or a failure ended it."""

    def take_in(self) -> None:
        """Where ranks share gradients, adds up what others have given. Called now and then."""

    # -- Out ---------------------------------------------------------------------------------------

    def finish_copies(self) -> None:
        """Waits for gradients that are on their way from the device."""
        for unit in list(self._sums):
            self._send_sums(unit)
        self._end_copies()

    def _end_copies(self) -> None:
        if self._leaving:
            what = "gradients leave the device"
            copies = [leaving.copy for leaving in self._leaving]
            with self._counters.timed("copy_wait_s", what, copies):
                for copy in copies:
                    copy.wait()
            while self._leaving:
                self._end_oldest()

    def write_out(self, unit: Unit) -> None:
        """A unit's gradients go to where they rest; its backward is over. Does not wait."""
        self._end_sums([unit])
        buffer = self._buffers.get(unit)
        if buffer is not None and buffer.writing is None:
            self._due[unit] = None
            self._take_in_copies()

    def _start_write(self, unit: Unit) -> None:
        """All its copies are over."""
        self._due.pop(unit, None)
        buffer = self._buffers[unit]
        if buffer.writing is None:
            for spec in unit.trainable():
                if spec in self._present:
                    self._norms[spec] = self._norm(spec, buffer.array)
            buffer.writing = self._store.write(unit, StateKind.GRADIENTS, buffer.block)

    def write_out_all(self) -> None:
        """End of a backward: every unit's gradients go to where they rest."""
        self._end_sums(list(self._summing))
        self.finish_copies()
        for unit in list(self._buffers):
            self._start_write(unit)

    def reclaim(self) -> bool:
        """Frees the oldest buffer, waiting for its write. False when there is none."""
        for unit, buffer in self._buffers.items():
            if unit is not self._in_use:
                self._end_copies()
                self._start_write(unit)
                del self._buffers[unit]
                self._wait_write(unit, buffer)
                self._pool.free(buffer.block)
                return True
        return False

    def settle(self) -> None:
        """Everything is where it rests and no block is lent."""
        self.finish_copies()
        while self.reclaim():
            pass

    # -- Looking -----------------------------------------------------------------------------------

    def has(self, spec: TensorSpec) -> bool:
        return spec in self._present

    def norm(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """2-norm of one gradient: fp32 scalar on the host, same bits wherever the gradient
        rests."""
        assert spec in self._present
        if spec.numel == 0:
            return torch.zeros(())
        if spec in self._scales and not isinstance(
            self._store.location(unit, StateKind.GRADIENTS), DeviceLocation
        ):
            self._array(unit)  # Applies what the last step left for later.
        if spec not in self._norms:
            self.finish_copies()
            location = self._store.location(unit, StateKind.GRADIENTS)
            if (
                isinstance(location, NvmeLocation)
                or self._store.host_view(unit, StateKind.GRADIENTS) is not None
            ):
                self._norms[spec] = self._norm(spec, self._array(unit))
            else:
                self._norms[spec] = torch.linalg.vector_norm(self.read(unit, spec))
        return self._norms[spec]

    def _norm(self, spec: TensorSpec, array: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(_shaped(flat_of(array, spec), spec))

    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """A copy of one gradient: fp32, the parameter's shape, on the host."""
        assert spec in self._present
        if spec.numel == 0:
            return torch.zeros(spec.facts.shape)
        self.finish_copies()
        location = self._store.location(unit, StateKind.GRADIENTS)
        if isinstance(location, DeviceLocation):
            self._rescale_resting(unit, location.memory)
            flat = flat_of(location.memory.view(torch.float32), spec).cpu().clone()
        else:
            flat = flat_of(self._array(unit), spec).clone()
            if isinstance(location, NvmeLocation):
                self.write_out(unit)
        return _shaped(flat, spec)

    def view(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """One gradient, fp32, flat, on the host: not a copy where that can be, and valid until
        anything else is asked of these gradients."""
        assert spec in self._present
        self.finish_copies()
        location = self._store.location(unit, StateKind.GRADIENTS)
        if isinstance(location, DeviceLocation):
            self._rescale_resting(unit, location.memory)
            return flat_of(location.memory.view(torch.float32), spec).cpu()
        return flat_of(self._array(unit), spec)

    # -- After a step ------------------------------------------------------------------------------

    def note_clipped(self, specs: Iterable[TensorSpec], scale: torch.Tensor) -> None:
        """The update used these gradients times `scale`; who looks at them shall see that."""
        for spec in specs:
            self._norms.pop(spec, None)
            self._note_change(spec)
            if spec in self._present:
                self._scales[spec] = scale

    def apply_scales(self, unit: Unit) -> None:
        """What was noted is done, before somebody reads the unit's gradients where they rest."""
        if any(spec in self._scales for spec in unit.trainable()):
            location = self._store.location(unit, StateKind.GRADIENTS)
            if isinstance(location, DeviceLocation):
                self._rescale_resting(unit, location.memory)
            else:
                self._array(unit)

    def forget(self, spec: TensorSpec) -> None:
        """The parameter has no gradient any more."""
        for table in (self._present, self._norms, self._scales):
            table.pop(spec, None)  # type: ignore[attr-defined]
        number, changes = self._stamps.get(spec, (0, 0))
        self._stamps[spec] = number + 1, changes

    def zero(self, unit: Unit, spec: TensorSpec) -> None:
        """The gradient, if there is one, becomes zeros: `zero_grad(set_to_none=False)`."""
        if spec not in self._present or spec.numel == 0:
            return
        self.finish_copies()
        self._norms.pop(spec, None)
        self._scales.pop(spec, None)
        self._note_change(spec)
        location = self._store.location(unit, StateKind.GRADIENTS)
        on_device = isinstance(location, DeviceLocation)
        array = location.memory.view(torch.float32) if on_device else self._array(unit)
        flat_of(array, spec).zero_()


def flat_of(array: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements in its unit's array of state."""
    return array[spec.state_offset : spec.state_offset + spec.numel]


def _shaped(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return flat.as_strided(spec.facts.shape, spec.facts.stride)


def in_memory_order(gradient: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements as they lie in memory when it has the parameter's strides: flat."""
    if gradient.stride() != spec.facts.stride:
        laid_out = torch.empty_strided(
            spec.facts.shape, spec.facts.stride, dtype=gradient.dtype, device=gradient.device
        )
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided((spec.numel,), (1,))


def _tail(place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The last bytes of fp32 (numel,) that hold as many elements of a dtype that is no wider."""
    return place.view(dtype)[-place.numel() :]


_WIDENED_AT_ONCE = 1024


def widen(place: torch.Tensor, dtype: torch.dtype) -> None:
    """Elements of `dtype` in the tail of `place`, fp32 (numel,), become fp32 in place; exact.

    From the front, half of what is left at a time: 4-byte elements [done, done + half) end where
    the narrow ones from `done` on begin, or before.
    """
    if dtype is torch.float32:
        return
    narrow, done = _tail(place, dtype), 0
    while (left := place.numel() - done) > _WIDENED_AT_ONCE:
        half = left // 2
        place[done : done + half].copy_(narrow[done : done + half])
        done += half
    place[done:].copy_(narrow[done:].clone())


def _put(target: torch.Tensor, flat: torch.Tensor, *, first: bool) -> None:
    _ = target.copy_(flat) if first else target.add_(flat)
