"""Weights made of the stored bytes of a checkpoint's own files.

Note [Stored weights]
  A frozen unit may rest in a checkpoint's own files (`Unit.stored`). Its host block holds the bytes
  of the files, which may be quantised, and attaching decodes them: on a device with memory of its
  own after the copy, into the region; on the host into a second block (`decoded`), whose pages the
  region shows. The decoded block lives while the unit is ATTACHED, and costs no read to make again,
  so it is freed first when memory is needed. The block of stored bytes may be freed at any time.

Note [Zone]
  A decoded block may be several times as large as a stored one. To allocate it among kept blocks,
  the pool would have to free many of them until the freed ones are neighbours. So one range of host
  memory, the zone, is for decoded weights alone. The zone is as large as the decoded weights that
  nested modules need at once. If memory is left when all stored weights are kept, decoded weights
  may lie there, too. Nested
  modules use the zone like a stack: a block is placed beside those in use, or at an end, and those
  that are not in use are freed if they are in the way. So what the blocks in use leave of the zone
  is one hole. The zone is given up, for good, before an allocation fails that could use its memory.

Note [Staged ahead]
  A device may have no space for the decoded weights of the next unit beside those in use. Then
  their stored bytes, which are a fraction of them, go to the device while it computes, to memory
  that the unit holds (`staged`). They are decoded when the unit before has ended. If there is space
  for the decoded weights, they are decoded at once. There are two memories, which take turns: the
  bytes of one unit come while those of another are decoded. Ranks issue all-gathers in an order of
  their own, so one that was begun earlier may come behind the staged bytes. Bytes are therefore
  never staged in a memory that an all-gather still has to pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.codecs.on_device import DecodePlan
from infinity.errors import UnsupportedError
from infinity.observe import Counters
from infinity.state.store import StateStore
from infinity.state.units import StateKind, Unit
from infinity.storage.protocol import Priority
from infinity.streaming.weights.state import Weights
from infinity.tiers.device import Copy, Decoding, DeviceAdapter, Region
from infinity.tiers.host import Block, HostPool
from infinity.tiers.ranges import Range, RangeAllocator

_log = logging.getLogger("infinity")


class WeightDecoding:
    """Decodes stored weights. Writes `decoded` and `is_decoding` of `Weights`, nothing else.

    `detach(weights)` drops a unit's decoded block that is not in use. Under the engine's lock. The
    pool may ask givers in each call that needs a block.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        detach: Callable[[Weights], None],
    ) -> None:
        self._store = store
        self._pool = pool
        self._device = device
        self._counters = counters
        self._detach = detach
        self._zone: Block | None = None
        self._ranges = RangeAllocator(0)  # Of the zone.
        self._in_zone: dict[Block, tuple[Range, Weights]] = {}
        self._has_second_memory = False
        # The unit that holds the device's memory for bytes that are decoded later.
        self.staged: Weights | None = None
        self._memory = 0  # Of the device, for stored bytes: the last that was taken.
        self._staged_memory = 0
        self._passing: dict[int, int] = {}  # Memories of all-gathers that are not settled, by unit.
        self._plans: dict[int, DecodePlan] = {}  # By unit.

    def prepare(self, zone_nbytes: int, *, has_second_memory: bool) -> None:
        """Plans how each unit is decoded, and takes device memory for the stored bytes of the
        largest unit, if there are any, and host memory for the zone. `has_second_memory`: as much
        device memory for the next unit."""
        units = [unit for unit in self._store.units if unit.stored is not None]
        self._plans = {unit.index: DecodePlan(unit.weight_places()) for unit in units}
        if not self._device.shares_host_memory:
            for plan in self._plans.values():
                plan.prepare(self._device.torch_device)
        stored = [unit.stored.nbytes for unit in units if unit.stored is not None]
        self._has_second_memory = has_second_memory and bool(stored)
        if stored:
            self._device.prepare_decoding(max(stored), 2 if self._has_second_memory else 1)
        if zone_nbytes:
            self._zone = self._pool.require(zone_nbytes, "decoded parameters")
            self._ranges = RangeAllocator(zone_nbytes)

    def close(self) -> None:
        """Frees the zone. No unit is ATTACHED to it."""
        if self._zone is not None:
            self._pool.free(self._zone)
            self._zone = None

    def give_up_zone(self) -> bool:
        """Frees what is unused of the zone, for good. Returns whether there was a zone."""
        if self._zone is None:
            return False
        self._pool.dissolve(self._zone, list(self._in_zone))
        self._zone = None
        self._in_zone.clear()
        _log.info(
            "host memory for decoded weights alone is given up: the rest of tiers.host.capacity is "
            "too small without it. Weights that are kept may be read again"
        )
        return True

    def is_in_zone(self, weights: Weights) -> bool:
        """Whether dropping the decoded block frees no space for other blocks."""
        return weights.decoded in self._in_zone

    def _allocate(self, weights: Weights) -> Block:
        """Returns a block for the decoded weights. Raises CapacityError."""
        unit = weights.unit
        nbytes, label = unit.weight_nbytes, f"decoded parameters of {unit.name}"
        while self._zone is not None:
            taken = self._take_of_zone(nbytes)
            if taken is not None:
                block = self._pool.carve(self._zone, taken.offset_nbytes, nbytes)
                self._in_zone[block] = taken, weights
                return block
            # Among stored weights that are read for the first time it would leave a hole later.
            if self._pool.spare.beside_weights_nbytes >= nbytes:
                free = self._pool.try_allocate(nbytes, label)
                if free is not None:
                    return free
            if not self._drop_idle():
                break
        return self._pool.require(nbytes, label)

    def _take_of_zone(self, nbytes: int) -> Range | None:
        """Returns a range that leaves one hole when the blocks that are not in use are gone; None
        if there is none."""
        taken = self._ranges.allocate(nbytes)
        if taken is None:
            return None
        of_blocks = self._in_zone.values()
        used = [range_ for range_, weights in of_blocks if not weights.is_decoded_idle]
        if len(used) < len(of_blocks) and self._num_holes([*used, taken]) > self._num_holes(used):
            self._ranges.free(taken)
            return None
        return taken

    def _drop_idle(self) -> bool:
        """Drops the blocks of the zone that are not in use. Returns whether there were any."""
        in_zone = [weights for _, weights in self._in_zone.values()]
        idle = [weights for weights in in_zone if weights.is_decoded_idle]
        for weights in idle:
            self._detach(weights)
        return bool(idle)

    def _num_holes(self, used: Sequence[Range]) -> int:
        """Returns the number of holes of the zone between these ranges."""
        starts = sorted(taken.offset_nbytes for taken in used)
        ends = sorted(taken.end_nbytes for taken in used)
        borders = zip([0, *ends], [*starts, self._ranges.capacity_nbytes], strict=True)
        return sum(end < start for end, start in borders)

    def _free(self, block: Block) -> None:
        if block in self._in_zone:
            taken, _ = self._in_zone.pop(block)
            self._ranges.free(taken)
        else:
            self._pool.free(block)

    def can_stage(self, unit: Unit) -> bool:
        """Whether the unit's stored bytes could go to the device ahead of their space there."""
        return self._has_second_memory and unit.stored is not None and self._lendable() is not None

    def _lendable(self) -> int | None:
        """A memory that no all-gather has yet to pass; first that which was not the last taken."""
        both = (1 - self._memory, self._memory)
        return next((memory for memory in both if memory not in self._passing.values()), None)

    def lend_staging(self, weights: Weights) -> int:
        """Gives the unit such memory. No other unit holds any."""
        memory = self._lendable()
        assert self.staged is None and self.can_stage(weights.unit) and memory is not None
        self.staged, self._staged_memory, self._memory = weights, memory, memory
        return memory

    def _take_memory(self) -> int:
        """Returns the memory that was not the last to be taken, if no unit holds it."""
        if self._has_second_memory:
            is_held = self.staged is not None and self._staged_memory != self._memory
            self._memory = self._memory if is_held else 1 - self._memory
        return self._memory

    def free_staging(self) -> None:
        """Takes the memory back: what was issued for it comes before the next use."""
        self.staged = None

    def begin_pass(self, weights: Weights, memory: int) -> None:
        """Notes that an all-gather passes a memory on its way to the unit's region, whenever the
        ranks issue it, until `end_pass`."""
        self._passing[weights.unit.index] = memory

    def end_pass(self, weights: Weights) -> None:
        """The unit's all-gather is issued, or never will be."""
        self._passing.pop(weights.unit.index, None)

    def attach(self, weights: Weights) -> Copy:
        """Fills the region with the weights made of the stored bytes in the host block, or of those
        that were staged, whose memory is free for another unit then.

        On a device that computes on host memory the region shows the pages of a second block.
        Raises CapacityError if there is no space for that block.
        """
        region, block = weights.region, weights.block
        if self.staged is weights:
            copy = self._device.attach_decoded(region, None, self.on_device(weights))
            self.free_staging()
            return copy
        assert block is not None
        if self._device.shares_host_memory:
            return self._device.attach(region, self.decode(weights, block))
        return self._device.attach_decoded(region, block, self.on_device(weights))

    def on_device(self, weights: Weights) -> Decoding:
        """Returns how the region is filled on the device, from memory that the unit takes now, or
        holds."""
        plan, region = self._plans[weights.unit.index], weights.region
        stored = weights.unit.stored
        assert stored is not None

        def fill(content: torch.Tensor) -> None:
            plan.decode(content, region.content)

        memory = self._staged_memory if self.staged is weights else self._take_memory()
        return Decoding(stored.nbytes, memory, fill)

    def decode(self, weights: Weights, block: Block) -> Block:
        """Makes the weights of the stored bytes in `block`, in another block, until `drop`."""
        unit = weights.unit
        assert unit.stored is not None and weights.decoded is None
        weights.is_decoding = True
        try:
            decoded = self._allocate(weights)
        finally:
            weights.is_decoding = False
        try:
            with self._counters.timed("decode_s", f"parameters of {unit.name} are decoded"):
                plan = self._plans[unit.index]
                plan.decode(self._pool.tensor(block), self._pool.tensor(decoded))
        except BaseException:
            self._free(decoded)
            raise
        weights.decoded = decoded
        return decoded

    def drop(self, weights: Weights) -> None:
        """Frees the decoded block, if there is one."""
        if weights.decoded is not None:
            self._free(weights.decoded)
            weights.decoded = None

    def digests(self, weights: Weights) -> list[bytes]:
        """Returns a digest of each slice of the attached weights, in the order of the slices."""
        unit, stored = weights.unit, weights.unit.stored
        assert stored is not None
        shown = [
            stored_slice.target(_tensor_in(weights.region, unit, name))
            for name, stored_slice, _ in stored.slices
        ]
        return [_digest(tensor.contiguous().cpu()) for tensor in shown]

    def differs(self, weights: Weights, digests: Sequence[bytes]) -> bool:
        """Returns whether the stored weights have other digests than these. Code may write a
        parameter without changing it. The weights are not attached any more, so the space of the
        decoded block is free for the stored bytes."""
        unit, stored = weights.unit, weights.unit.stored
        assert stored is not None
        block, is_own = weights.block, weights.block is None
        weights.is_decoding = True
        try:
            if block is None:
                block = self._pool.require(stored.nbytes, f"parameters of {unit.name}")
        finally:
            weights.is_decoding = False
        try:
            if is_own:
                kind, urgency = StateKind.PARAMETERS, Priority.STATE
                self._store.read(unit, kind, block, priority=urgency).wait()
            decoded = stored.decoded(
                self._pool.tensor(block), lambda name: unit.spec(name).facts.dtype
            )
            return any(
                _digest(expected) != digest
                for expected, digest in zip(decoded, digests, strict=True)
            )
        finally:
            if is_own:
                self._pool.free(block)


def _digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the bytes of a dense tensor on the host."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(content).digest()


def refuse_change(unit: Unit) -> None:
    """Raises UnsupportedError for weights that rest in files which are not written."""
    stored = unit.stored
    if stored is not None:
        names = list(dict.fromkeys(name for name, _, _ in stored.slices))
        raise UnsupportedError(
            f"{', '.join(map(repr, names[:3]))} of {unit.name!r} cannot be "
            f"changed: the frozen weights rest in {stored.runs[0].path}, which is only read. "
            'To change them, offload with placement.frozen = "copy"'
        )


def _tensor_in(region: Region, unit: Unit, name: str) -> torch.Tensor:
    """Returns a parameter of the unit over its device region."""
    spec = unit.spec(name)
    facts = spec.facts
    return region.tensor(spec.weight_offset_nbytes, facts.shape, facts.stride, facts.dtype)
