"""Gradients on a device, and on their way from there to the host.

The first gradient of a sum is copied to its place. A later one is copied to staging blocks, and
added to the place when the copy is over. Copies end in the order in which they were started, and so
do the additions (INV-8).

Note [Out of the device]
  A gradient leaves a device with memory of its own for its place on the host. That is bf16 where
  the update reads it so (`NarrowSums`). Else the device widens it to fp32: twice the bytes cross
  the link, and the host's memory, which bounds the updates, moves 4 bytes an element where it would
  move 10. The host does not wait while the backward runs: what is due to be written waits for its
  copies, and the computation waits for those of the unit before the last, whose memory is free
  then. A further gradient of a sum that is on the host passes staging blocks, and is added when its
  copy is over, by the engine's worker or by the next call.

Note [Sums on the device]
  Where several micro-batches go through one block their gradients are added on the device, in the
  order in which they come, and the sum leaves it once. A block's sums end when all micro-batches
  have passed its backward. Those of a unit outside of blocks may get more after that, when another
  use of the unit (a tied head, a shared block) is reached: they stay until as many gradients have
  come as to the last sum, and at most until the end of the backward. Their memory is lent of the
  device's window for weights.

Note [Narrow sums]
  Where each parameter of a unit gets one gradient a step, in bf16, from a device with memory of its
  own, there is nothing to sum, and gradients that rest on the host stay in bf16: half of the bytes
  cross the link, and the update reads half as many. It widens them itself, and so do norms
  (`ops/norms.py`), so no bit changes. The last step says what this one is expected to be like.
  They lie in the second half of their fp32 memory. Before anything is added to one, or one is
  changed, all of the unit are widened, in place; an update that reads them ends before.

Note [Staging blocks]
  Two blocks are within every budget; where memory is free there are more, so that as many gradients
  may be on their way as device memory is kept for. A block is free when what it has is added.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infinity.errors import InfinityError
from infinity.observe import Counters
from infinity.ops.host_sums import add_
from infinity.state.budgets import STAGED_NBYTES
from infinity.state.units import STATE_ITEM_NBYTES, TensorSpec, Unit
from infinity.streaming.gradients.sink import Lend
from infinity.streaming.gradients.sums import UnitGradients
from infinity.streaming.gradients.tensors import CompleteSums, TensorGradient, has_any
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import rounded_nbytes

_LABEL = "gradients that are added"
_WIDENED_NUMEL = 8 << 20  # Elements that the device widens at a time: 32 MiB of fp32.


class DeviceSums:
    """The sums on the device, by unit. Under the engine's lock."""

    def __init__(self) -> None:
        self._sums: dict[Unit, dict[TensorSpec, torch.Tensor]] = {}  # Flat; the oldest unit first.
        # Units to which more gradients come, and whether their sums stay until all of them have.
        self._open: dict[Unit, bool] = {}
        self._own: set[TensorSpec] = set()  # Those whose memory nobody else has.

    def begin(self, unit: Unit, lend: Lend | None) -> int:
        """Several gradients will come to each parameter of the unit, until it ends. `lend`: see
        `GradientSink.sum_on_device`. Returns the bytes that were not lent."""
        if unit in self._open:
            return 0
        nbytes = 0 if lend is None else sum(s.numel for s in unit.trainable()) * STATE_ITEM_NBYTES
        if lend is not None and nbytes and not lend(nbytes):
            return nbytes
        self._open[unit] = lend is not None
        return 0

    def is_open(self, unit: Unit) -> bool:
        """Whether the gradients of the unit are summed here."""
        return unit in self._open

    def end_block(self, unit: Unit) -> None:
        """No more gradients are added to the unit's sums, unless it is used outside of blocks."""
        if not self._open.get(unit, True):
            del self._open[unit]

    def end(self) -> None:
        """No more gradients are added to any sums."""
        self._open.clear()

    def add(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor) -> None:
        """Adds a gradient, at most fp32 and (numel,), to the sum: fp32 unless it is the only
        one."""
        sums = self._sums.setdefault(unit, {})
        before = sums.get(spec)
        if before is None:  # One alone leaves in its own dtype, from where autograd put it.
            sums[spec] = flat
        elif spec in self._own:
            before.add_(flat)
        else:
            is_wide = before.dtype is torch.float32
            sums[spec] = before + flat if is_wide else before.float().add_(flat)
            self._own.add(spec)

    def has(self, unit: Unit) -> bool:
        """Whether sums of the unit are here."""
        return unit in self._sums

    def units(self) -> list[Unit]:
        """Returns the units of which sums are here."""
        return list(self._sums)

    def take(self, unit: Unit) -> dict[TensorSpec, torch.Tensor]:
        """Hands the unit's sums over: flat. They are the caller's from now on."""
        taken = self._sums.pop(unit, {})
        self._own.difference_update(taken)
        return taken

    def stays(self, unit: Unit, tensors: Mapping[TensorSpec, TensorGradient]) -> bool:
        """Whether the sums await gradients that came to the last ones after the end of a block."""
        if not self._open.get(unit, False):
            return False
        return any(tensors[s].num_added < tensors[s].num_expected for s in self._sums.get(unit, ()))


@dataclass(eq=False, slots=True)
class StagingBlock:
    """Memory for a part of a gradient: uint8. `block` None: one of the first two."""

    memory: torch.Tensor
    block: Block | None = None


class GradientStaging:
    """Lends staging blocks. Under the engine's lock.

    `largest_numel`: elements of the largest tensor. `most_nbytes`: all blocks but the first two.
    """

    def __init__(self, pool: HostPool, largest_numel: int, most_nbytes: int) -> None:
        self._pool = pool
        largest_nbytes = max(1, largest_numel) * STATE_ITEM_NBYTES
        self._both_nbytes = rounded_nbytes(min(largest_nbytes, STAGED_NBYTES))
        self._most_more = most_nbytes // self.part_nbytes
        self._num_more = 0
        self._both: Block | None = None
        self._free: list[StagingBlock] = []  # Of the two.

    @property
    def part_nbytes(self) -> int:
        """The bytes of a block."""
        return self._both_nbytes // 2

    def take(self) -> StagingBlock | None:
        """Returns a block until `give_back`; None while all of them are taken. Raises CapacityError
        if there is no memory for two."""
        if self._both is None:
            self._both = self._pool.require(self._both_nbytes, _LABEL)
            halves = self._pool.tensor(self._both)[: self._both_nbytes].split(self.part_nbytes)
            self._free = [StagingBlock(half) for half in halves]
        if self._free:
            return self._free.pop(0)
        if self._num_more < self._most_more:
            block = self._pool.try_allocate(self.part_nbytes, _LABEL)
            if block is not None:
                self._num_more += 1
                return StagingBlock(self._pool.tensor(block), block)
        return None

    def give_back(self, taken: StagingBlock) -> None:
        """Ends the use of a block."""
        if taken.block is None:
            self._free.append(taken)
        else:
            self._num_more -= 1
            self._pool.free(taken.block)

    def release(self) -> bool:
        """Frees the memory if no block is taken. Returns whether there was some."""
        if self._both is None or len(self._free) < 2 or self._num_more:
            return False
        self._free.clear()
        self._pool.free(self._both)
        self._both = None
        return True


@dataclass(frozen=True, slots=True)
class LeavingGradient:
    """A gradient, or a part of one, that is copied to its place on the host, or added there."""

    unit: Unit
    spec: TensorSpec
    copy: Copy
    nbytes: int  # Of device memory that is kept until then.
    place: torch.Tensor | None  # Of all of the gradient, (numel,); None: another part follows.
    # Of a part that is added after its copy: its block, its (numel,) there, and those of the sum.
    block: StagingBlock | None = None
    staged: torch.Tensor | None = None
    target: torch.Tensor | None = None


class LeavingGradients:
    """The copies under way, oldest first. Under the engine's lock.

    `most_kept_nbytes`: device memory that is kept for copies, beside that of the last one. `note`
    is called with each part that is in its place.
    """

    def __init__(
        self,
        device: DeviceAdapter,
        staging: GradientStaging,
        counters: Counters,
        most_kept_nbytes: int,
        note: Callable[[LeavingGradient], None],
        has_worker: bool,
    ) -> None:
        self._device = device
        self._staging = staging
        self._counters = counters
        self._note = note
        self.num_additions = 0  # Those that are due.
        self._has_worker = has_worker  # Which calls `add_next`.
        self._most_kept_nbytes = most_kept_nbytes
        self.gradients: deque[LeavingGradient] = deque()  # Not on the host, or not known to be.
        self._awaited: Copy | None = None  # By the end of a backward.
        self._keeping: deque[LeavingGradient] = deque()  # Those whose device memory is kept.

    def __bool__(self) -> bool:
        return bool(self.gradients)

    def start(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient, flat and at most fp32, to its place, (numel,), of its dtype or
        fp32.

        The device widens it, in parts, so that the host's cores and memory, which updates need, do
        not.
        """
        numel = place.numel() if flat.dtype is place.dtype else _WIDENED_NUMEL
        for source, target in zip(flat.split(numel), place.split(numel), strict=True):
            wide = source.to(place.dtype)
            is_last = target.data_ptr() + target.nbytes == place.data_ptr() + place.nbytes
            copy = self._device.copy(wide, target)
            self._keep(LeavingGradient(unit, spec, copy, wide.nbytes, place if is_last else None))

    def add(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient, flat and at most fp32, that is added to its place when it has
        come. Waits for the oldest copies while no staging block is free."""
        numel = self._staging.part_nbytes // flat.dtype.itemsize
        for source, target in zip(flat.split(numel), place.split(numel), strict=True):
            while (block := self._staging.take()) is None:
                self._end(1, "a staging block for gradients is taken")
            staged = block.memory[: source.nbytes].view(flat.dtype)
            is_last = target.data_ptr() + target.nbytes == place.data_ptr() + place.nbytes
            copy = self._device.copy(source, staged)
            self.num_additions += 1
            after = place if is_last else None
            self._keep(
                LeavingGradient(unit, spec, copy, source.nbytes, after, block, staged, target)
            )

    def _keep(self, gradient: LeavingGradient) -> None:
        """Lets later kernels wait for the copies whose memory is more than may be kept."""
        self.gradients.append(gradient)
        self._keeping.append(gradient)
        kept_nbytes = sum(kept.nbytes for kept in self._keeping)
        while kept_nbytes > self._most_kept_nbytes and len(self._keeping) > 1:
            oldest = self._keeping.popleft()
            kept_nbytes -= oldest.nbytes
            oldest.copy.order()

    def has(self, spec: TensorSpec) -> bool:
        """Whether a gradient of the tensor is under way."""
        return any(gradient.spec is spec for gradient in self.gradients)

    def units(self) -> list[Unit]:
        """Returns the units of all gradients under way."""
        return [gradient.unit for gradient in self.gradients]

    def end_there(self) -> None:
        """Ends the copies that are over, in order. Never waits. Additions are the worker's, if
        there is one."""
        while self.gradients and not (self._has_worker and self.gradients[0].block):
            if not self.gradients[0].copy.done():
                return
            self._end_oldest()

    def next_wait(self) -> Callable[[], None] | None:
        """Ends the copies that are over, with their additions. Returns the wait for the next one,
        which needs no lock and is to follow at once; None: no copy is left."""
        while self.gradients:
            copy = self.gradients[0].copy
            if copy is not self._awaited and not copy.done():
                self._awaited = copy  # Over when this is called again.
                return partial(self._wait, copy)
            self._end_oldest()
        return None

    def _wait(self, copy: Copy) -> None:
        with self._counters.timed("copy_wait_s", "gradients leave the device", (copy,)):
            copy.wait()

    def end_all(self) -> None:
        """Waits for all copies; all additions are made."""
        if self.gradients:
            self._end(len(self.gradients), "gradients leave the device")

    def add_next(self) -> Sequence[Copy] | None:
        """Makes an addition that is due. Never waits: returns the copy that the next one needs,
        none if it was made, or None if none is due, or the copy has failed: the next use of the
        sum raises the error."""
        if not self.num_additions:
            return None
        copy = self.gradients[0].copy
        try:
            if not copy.done():
                return (copy,)
            copy.wait()
        except InfinityError:
            return None
        self._end_oldest()
        return ()

    def _end(self, count: int, what: str) -> None:
        copies = [gradient.copy for gradient in itertools.islice(self.gradients, count)]
        with self._counters.timed("copy_wait_s", what, copies):
            for _ in range(count):
                self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = self.gradients.popleft()
        if self._keeping and self._keeping[0] is oldest:
            self._keeping.popleft()
        if oldest.block is None:
            oldest.copy.wait()
        else:
            assert oldest.target is not None and oldest.staged is not None
            self.num_additions -= 1
            try:
                oldest.copy.wait()
                add_(oldest.target, oldest.staged)
            finally:
                self._staging.give_back(oldest.block)
        self._note(oldest)

    def clear(self) -> None:
        """Forgets all copies."""
        self.gradients.clear()
        self._keeping.clear()
        self.num_additions = 0


class NarrowSums:
    """Decides which sums are narrow. Under the engine's lock; `GradientStore` calls it.

    `is_on`: whether updates read bf16. `units`: those whose sums are narrow. See Note [Narrow
    sums].
    """

    def __init__(
        self,
        tensors: Mapping[TensorSpec, TensorGradient],
        leaving: LeavingGradients,
        norms: CompleteSums,
        *,
        is_on: bool,
    ) -> None:
        self._tensors = tensors
        self._leaving = leaving
        self._norms = norms
        self.is_on = is_on
        self.units: set[int] = set()

    def array_for(
        self, sums: UnitGradients, spec: TensorSpec, flat: torch.Tensor, *, first: bool
    ) -> torch.Tensor | None:
        """Returns the unit's gradients in bf16, (state_numel,), if this one is to be among them.
        The first of a unit decides it for all others."""
        if not self.is_on or sums.on_host is None:
            return None
        unit, is_bf16 = sums.unit, first and flat.dtype is torch.bfloat16
        if not has_any(self._tensors, unit):
            self._set(sums, is_bf16 and self._is_expected(unit, spec))
        return sums.narrow if is_bf16 else None

    def _is_expected(self, unit: Unit, spec: TensorSpec) -> bool:
        """Whether all tensors of the unit are bf16, and none had several gradients in the last
        step."""
        specs = list(unit.trainable())
        known = [self._tensors[other] for other in specs]
        is_measured = any(gradient.was_norm_needed for gradient in known)
        return (
            self._tensors[spec].num_expected == 1
            and all(other.facts.dtype is torch.bfloat16 for other in specs)
            and all(gradient.num_expected <= 1 for gradient in known)
            and (not is_measured or self._norms.takes_bf16)
        )

    def _set(self, sums: UnitGradients, is_narrow: bool) -> None:
        if is_narrow:
            sums.begin_narrow()
            self.units.add(sums.unit.index)
        else:
            sums.end_narrow(widens=False)
            self.units.discard(sums.unit.index)

    def widen(self, sums: UnitGradients) -> None:
        """Ends the narrow form of a unit's sums. Waits for those that are on their way to it."""
        has_sums = has_any(self._tensors, sums.unit)
        if has_sums:
            self._leaving.end_all()
            for spec in sums.unit.trainable():
                self._tensors[spec].finish_task()
        sums.end_narrow(widens=has_sums)
        self.units.discard(sums.unit.index)
