"""Updates one chunk of state that is in memory.

Pure but for the arrays that get the new bytes: those of the chunk and the weights, or others of an
update that no step has decided. The caller has the unit's weights checked out, and orders the
calls.

Note [Updates by the device]
  For machines whose processor is slower than the link. A slice of the state is copied to the
  device, updated, and returned; arrays that rest on the device are updated where they are. A Triton
  kernel or, where it cannot be used, the readable reference of the rule in torch operations has the
  bits of the host's native kernel: each operation is rounded as IEEE 754 says, and none is
  contracted that the rule does not fuse (`ops/on_device.py`).
  While one slice is updated, the next one is copied in and the last one out. A span that rests on
  the device is one slice where a kernel updates it: a launch costs more than the update of a
  million elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from types import MappingProxyType

import torch

from infinity.ops.dynamic_8bit import State8Bit
from infinity.ops.on_device import is_updated_by_kernel, update_span_
from infinity.ops.optimizers import is_native, step_
from infinity.ops.rules import Settings
from infinity.ops.span import StateSpan
from infinity.state.moments_8bit import states_within
from infinity.state.units import Chunk, Slice, StateKind, weight_of
from infinity.storage.checksums import PageDigests
from infinity.storage.protocol import Transfer
from infinity.streaming.updates.record import StepRecord
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tiers.host import Block


@dataclass(eq=False, slots=True)
class StagingSlot:
    """Space for one chunk of every state kind that travels, and the transfers from and to it.

    `spare`: the slot's own block of spare memory; None: the slot is a part of the ring's block.
    `written_nbytes` are on their way from the slot, while there are transfers.
    """

    parts: dict[StateKind, Block]
    spare: Block | None = None
    transfers: list[Transfer] = field(default_factory=list)
    written_nbytes: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether every transfer is over."""
        return all(transfer.done() for transfer in self.transfers)


@dataclass(eq=False, slots=True)
class StagedChunk:
    """One chunk in memory, or being read: arrays of the chunk's length, by state kind. `is_ahead`:
    the reads began before anybody needed them."""

    chunk: Chunk
    slot: StagingSlot | None
    arrays: dict[StateKind, torch.Tensor]
    is_ahead: bool = False
    digests: dict[StateKind, PageDigests] = field(default_factory=dict)  # Of what is written.
    # Those of the last update, by their first element. State at rest is updated where it is, so
    # the next update in place may have the same ones.
    spans: dict[int, KnownSpans] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KnownSpans:
    """The spans of some slices of a chunk, with the weights at one address."""

    slices: Sequence[Slice]
    weights_address: int
    kinds: Sequence[StateKind]
    spans: list[StateSpan]


def update_chunk(
    staged: StagedChunk,
    weights: torch.Tensor,
    record: StepRecord,
    device: DeviceAdapter | None,
    of_weights: PageDigests | None = None,
    into: Mapping[StateKind, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Updates a chunk: the arrays of the chunk, and the unit's weights, in place or `into` others.

    `weights`: the bytes of the unit's weights, uint8. `into`: where new bytes of the unit go, by
    state kind: uint8, all of the kind. `device` computes the update if the device has the rule;
    None computes on the host, and takes the checksums of what it writes: `staged.digests`, and
    `of_weights`.
    """
    beside = _beside(staged, weights, into) if into else None
    digests = [*staged.digests.values(), *([] if of_weights is None else [of_weights])]
    # The native update takes spans of one rule, setting, factor and format at a time.
    groups: dict[tuple[Settings, float, torch.dtype], list[Slice]] = {}
    last: tuple[Settings, float, torch.dtype] | None = None
    factors, factor = record.factors, 1.0
    for part in staged.chunk.slices:
        settings, dtype = record.settings[part.tensor], part.tensor.facts.dtype
        if factors:
            factor = factors.get(part.tensor, 1.0)
        if last is None or settings is not last[0] or factor != last[1] or dtype is not last[2]:
            last = settings, factor, dtype  # To hash settings is to hash each of their fields.
            same = groups.setdefault(last, [])
        same.append(part)
    for (settings, factor, _), slices in groups.items():
        moments = _kinds(settings.state_names)
        spans = _known_spans(staged, weights, slices, moments)
        new, new_weights = (staged, weights) if beside is None else beside
        if beside is not None:
            found = _spans(new, new_weights, slices, moments)
            spans = [replace(span, into=to) for span, to in zip(spans, found, strict=True)]
        if settings.step == 1:  # Whatever an optimizer before this one has left.
            spans = [_forgotten(span, settings) for span in spans]
        _step(spans, settings, factor, device, digests)
        if staged.chunk.unit.has_full_master:
            for part in slices:
                master = new.arrays[StateKind.MASTER][_range(staged, part)]
                weight_of(new_weights, part.tensor)[part.start : part.stop].copy_(master)


def written_ranges(
    chunks: Sequence[Chunk], record: StepRecord, kind: StateKind
) -> Iterator[tuple[int, int]]:
    """Yields the bytes of a state kind, in the unit's, that `update_chunk` writes for all of its
    chunks, ascending; none of a kind with eight bits, whose granules have a layout of their own."""
    for chunk in chunks:
        unit = chunk.unit
        for part in chunk.slices:
            tensor, dtype = part.tensor, unit.dtype(kind)
            if kind is StateKind.PARAMETERS:
                size, first = tensor.facts.dtype.itemsize, tensor.weight_offset_nbytes
            elif dtype is None or unit.is_8bit(kind):
                return
            else:
                size, first = dtype.itemsize, tensor.state_offset * dtype.itemsize
                is_master = kind is StateKind.MASTER
                has_residual = tensor.facts.dtype is torch.bfloat16
                if is_master and not (unit.has_full_master or has_residual):
                    continue
                if not is_master and kind not in _kinds(record.settings[tensor].state_names):
                    continue
            yield first + part.start * size, first + part.stop * size


def _beside(
    staged: StagedChunk, weights: torch.Tensor, into: Mapping[StateKind, torch.Tensor]
) -> tuple[StagedChunk, torch.Tensor]:
    """Returns the chunk's arrays that get the new bytes, and the unit's weights."""
    chunk, arrays = staged.chunk, dict(staged.arrays)
    for kind, new in into.items():
        dtype = chunk.unit.dtype(kind)
        if kind in arrays and dtype is not None:
            start = chunk.offset_nbytes(kind)
            arrays[kind] = new[start : start + chunk.nbytes(kind)].view(dtype)
    return StagedChunk(chunk, None, arrays), into.get(StateKind.PARAMETERS, weights)


@cache
def _kinds(state_names: tuple[str, ...]) -> tuple[StateKind, ...]:
    return tuple(map(StateKind, state_names))


def _known_spans(
    staged: StagedChunk, weights: torch.Tensor, parts: Sequence[Slice], kinds: Sequence[StateKind]
) -> list[StateSpan]:
    """As `_spans`, which are made anew if something is not as in the last update."""
    first, address = parts[0].state_start, weights.data_ptr()
    known = staged.spans.get(first)
    if (
        known is None
        or known.weights_address != address
        or known.slices != parts
        or known.kinds != kinds
    ):
        spans = _spans(staged, weights, parts, kinds)
        known = staged.spans[first] = KnownSpans(parts, address, kinds, spans)
    return known.spans


def _step(
    spans: list[StateSpan],
    settings: Settings,
    factor: float,
    device: DeviceAdapter | None,
    digests: Sequence[PageDigests],
) -> None:
    if device is None or spans[0].is_8bit:
        step_(spans, settings, grad_scale=factor, digests=digests)
    elif not can_update_on_device(spans, settings):
        update_on_host(device, spans, settings, factor)
    else:
        update_on_device(device, spans, settings, factor)


def _spans(
    staged: StagedChunk, weights: torch.Tensor, parts: Sequence[Slice], kinds: Sequence[StateKind]
) -> list[StateSpan]:
    """Returns the arrays of slices of one dtype, with the moments in `kinds`, as they lie in the
    chunk.

    The weight is fp32, or bf16 with its residual, or the fp32 master. Slices that are neighbours in
    all arrays are one span: a few calls for each small tensor cost more than its update.
    """
    if kinds and staged.chunk.unit.moments.is_8bit:
        return [span for part in parts for span in _granules(staged, weights, part, kinds)]
    arrays, chunk_start = staged.arrays, staged.chunk.start
    gradients, moments = arrays[StateKind.GRADIENTS], [arrays[kind] for kind in kinds]
    has_full_master = staged.chunk.unit.has_full_master
    dtype = parts[0].tensor.facts.dtype
    spans = []
    for start, stop, start_nbytes, stop_nbytes in _runs(parts, is_beside_weights=has_full_master):
        elements = slice(start - chunk_start, stop - chunk_start)
        states = tuple(map(itemgetter(elements), moments))
        residual = None
        if has_full_master:
            weight = arrays[StateKind.MASTER][elements]
        else:
            weight = weights[start_nbytes:stop_nbytes].view(dtype)
            if dtype is torch.bfloat16:
                residual = arrays[StateKind.MASTER][elements]
        spans.append(StateSpan(weight, gradients[elements], states, residual))
    return spans


def _runs(
    parts: Sequence[Slice], *, is_beside_weights: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yields runs of slices, each of which begins where the one before it ends: in the arrays of
    state and, unless the update `is_beside_weights`, in the weights.

    A run is its elements in the unit's arrays of state, and its bytes in the unit's weights. One
    loop: a call of Python for each tensor costs as much as the update of a small one.
    """
    begin = end = begin_nbytes = end_nbytes = -1
    for part in parts:
        tensor, itemsize = part.tensor, part.tensor.facts.dtype.itemsize
        start, stop = tensor.state_offset + part.start, tensor.state_offset + part.stop
        start_nbytes = tensor.weight_offset_nbytes + part.start * itemsize
        if start != end or not (is_beside_weights or start_nbytes == end_nbytes):
            if end >= 0:
                yield begin, end, begin_nbytes, end_nbytes
            begin, begin_nbytes = start, start_nbytes
        end, end_nbytes = stop, start_nbytes + (part.stop - part.start) * itemsize
    yield begin, end, begin_nbytes, end_nbytes


def _granules(
    staged: StagedChunk, weights: torch.Tensor, part: Slice, kinds: Sequence[StateKind]
) -> Iterator[StateSpan]:
    """Yields the arrays of a slice with moments of eight bits: a span for each granule."""
    elements = _range(staged, part)
    [span] = _spans(staged, weights, [part], ())
    moments = [staged.arrays[kind] for kind in kinds]
    numel = staged.chunk.stop - staged.chunk.start
    granules = (states_within(moment, numel, elements.start, elements.stop) for moment in moments)
    for of_granule in zip(*granules, strict=True):
        start = of_granule[0][0] - elements.start
        states = tuple(state for _, state in of_granule)
        granule = slice(start, start + states[0].numel())
        residual = None if span.residual is None else span.residual[granule]
        yield StateSpan(span.weight[granule], span.gradient[granule], states, residual)


def _range(staged: StagedChunk, part: Slice) -> slice:
    """Returns the range of a slice's elements in the arrays of the chunk."""
    start = part.state_start - staged.chunk.start
    return slice(start, start + part.stop - part.start)


def _forgotten(span: StateSpan, settings: Settings) -> StateSpan:
    """Returns the span with moments of zero, which are where the new ones go."""
    states = span.written.states
    for state, name in zip(states, settings.state_names, strict=True):
        if isinstance(state, State8Bit):
            state.zero_(name)
        else:
            state.zero_()
    return span if span.into is None else replace(span, states=states)


# -- The update by the device ----------------------------------------------------------------------


# Elements on the device at once, three times: arrays of 16 bytes each, and for the reference ten
# times 8 bytes that its arithmetic makes on the way. A multiple of span.CUT_NUMEL.
SLICE_NUMEL = 1 << 21


def can_update_on_device(spans: Sequence[StateSpan], settings: Settings) -> bool:
    """Whether the device computes the bits of the host."""
    if spans[0].is_8bit:
        return False  # Its tables are on the host.
    return spans[0].is_split or is_native(settings)


def update_on_device(
    device: DeviceAdapter, spans: Sequence[StateSpan], settings: Settings, grad_scale: float
) -> None:
    """One step of every span. Arrays are in the host's arena, or on the device. What is on the host
    is read and written when it returns or raises, the rest in the order of the current stream."""
    slices = [part for span in spans for part in _slices(device, span, settings)]
    copying: deque[list[Copy]] = deque()
    issued: list[Copy] = []

    def copy_to(source: torch.Tensor, target: torch.Tensor) -> Copy:
        issued.append(device.copy(source, target))
        return issued[-1]

    try:
        following = _copy_in(device, slices[0], copy_to) if slices else None
        for index, on_host in enumerate(slices):
            assert following is not None
            on_device, copies = following
            is_last = index + 1 == len(slices)
            following = None if is_last else _copy_in(device, slices[index + 1], copy_to)
            for copy in copies:
                copy.order()
            update_span_(on_device, settings, grad_scale)
            changed = _changed(on_device, on_host.written)
            copying.append([copy_to(new, old) for new, old in changed if new is not old])
            if len(copying) > 1:
                for copy in copying.popleft():
                    copy.order()  # Their memory on the device may be used again.
    finally:  # Others get the memory on the host: gradients may be all of it.
        for copy in issued:
            copy.wait()


def update_on_host(
    device: DeviceAdapter, spans: Sequence[StateSpan], settings: Settings, grad_scale: float
) -> None:
    """One step of every span by the host, for rules whose bits the device would not give. Arrays
    may be on the device; done when it returns."""

    def bring(array: torch.Tensor) -> torch.Tensor:
        return array if device.is_on_host(array) else array.cpu()

    brought = [_each(span, bring) for span in spans]
    step_(brought, settings, grad_scale=grad_scale)
    for new, old in zip(brought, spans, strict=True):
        for new_array, old_array in _changed(new.written, old.written):
            if new_array is not old_array:
                old_array.copy_(new_array)


def _slices(device: DeviceAdapter, span: StateSpan, settings: Settings) -> Iterator[StateSpan]:
    if not any(map(device.is_on_host, _arrays(span))) and is_updated_by_kernel(span, settings):
        yield span
        return
    for start in range(0, span.weight.numel(), SLICE_NUMEL):
        part = slice(start, start + SLICE_NUMEL)
        yield _each(span, itemgetter(part))


def _each(span: StateSpan, change: Callable[[torch.Tensor], torch.Tensor]) -> StateSpan:
    """Returns the span with its arrays changed, and those that get the new bytes."""
    return StateSpan(
        change(span.weight),
        change(span.gradient),
        tuple(map(change, _states(span))),
        None if span.residual is None else change(span.residual),
        None if span.into is None else _each(span.into, change),
    )


def _arrays(span: StateSpan) -> Iterator[torch.Tensor]:
    yield from (span.weight, span.gradient, *_states(span))
    if span.residual is not None:
        yield span.residual


def _states(span: StateSpan) -> list[torch.Tensor]:
    return [state for state in span.states if isinstance(state, torch.Tensor)]


def _copy_in(
    device: DeviceAdapter, span: StateSpan, copy_to: Callable[[torch.Tensor, torch.Tensor], Copy]
) -> tuple[StateSpan, list[Copy]]:
    copies: list[Copy] = []

    def copy_in(array: torch.Tensor) -> torch.Tensor:
        if not device.is_on_host(array):
            return array
        target = torch.empty_like(array, device=device.torch_device)
        copies.append(copy_to(array, target))
        return target

    return _each(replace(span, into=None), copy_in), copies


def _changed(
    on_device: StateSpan, on_host: StateSpan
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield on_device.weight, on_host.weight
    yield from zip(_states(on_device), _states(on_host), strict=True)
    if on_device.residual is not None and on_host.residual is not None:
        yield on_device.residual, on_host.residual
