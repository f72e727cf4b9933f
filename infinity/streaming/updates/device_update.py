"""The update of a chunk by the device: a slice of its state is copied there, updated, and returned.
Arrays that rest on the device are updated where they are.

For machines whose processor is slower than the link. A Triton kernel or, where it cannot be used,
the readable reference of the rule in torch operations has the bits of the host's native kernel:
each operation is rounded as IEEE 754 says, and none is contracted that the rule does not fuse
(`ops/on_device.py`).

While one slice is updated, the next one is copied in and the last one out. A span that rests on the
device is one slice where a kernel updates it: a launch costs more than the update of a million
elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

import torch

from infinity.ops.on_device import is_updated_by_kernel, update_span_
from infinity.ops.optimizers import is_native, step_
from infinity.ops.rules import Settings
from infinity.ops.span import StateSpan
from infinity.tiers.device import Copy, DeviceAdapter

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
