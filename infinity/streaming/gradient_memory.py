"""Gradients as flat fp32 memory: the range of a tensor, its order, a narrow tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.state.units import TensorSpec, Unit
from infinity.tiers.device import Copy, DeviceAdapter


@dataclass(frozen=True, slots=True)
class LeavingGradient:
    """A gradient on its way from the device into the tail of its place on the host."""

    unit: Unit
    spec: TensorSpec
    copy: Copy
    place: torch.Tensor  # fp32 (numel,)
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on their way."""
        return self.place.numel() * self.dtype.itemsize


def flat_of(array: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements in its unit's array of state."""
    return array[spec.state_offset : spec.state_offset + spec.numel]


def shaped(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns a view of flat memory with shape and stride of the parameter."""
    return flat.as_strided(spec.facts.shape, spec.facts.stride)


def in_memory_order(gradient: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements as they lie in memory when it has the parameter's strides: flat."""
    if gradient.stride() != spec.facts.stride:
        laid_out = torch.empty_strided(
            spec.facts.shape, spec.facts.stride, dtype=gradient.dtype, device=gradient.device
        )
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided((spec.numel,), (1,))


def tail_of(place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    narrow, done = tail_of(place, dtype), 0
    while (left := place.numel() - done) > _WIDENED_AT_ONCE:
        half = left // 2
        place[done : done + half].copy_(narrow[done : done + half])
        done += half
    place[done:].copy_(narrow[done:].clone())


def add_through(
    device: DeviceAdapter, staged: torch.Tensor, flat: torch.Tensor, target: torch.Tensor
) -> None:
    """Adds device memory to host memory, both (numel,), through a part of the host, of the dtype of
    `flat`. Waits."""
    count = staged.numel()
    for source, sink in zip(flat.split(count), target.split(count), strict=True):
        device.copy(source, staged[: source.numel()]).wait()
        sink.add_(staged[: source.numel()])


def put(target: torch.Tensor, flat: torch.Tensor, *, first: bool) -> None:
    """Copies `flat` to `target`, or adds it if it is not the first gradient there."""
    _ = target.copy_(flat) if first else target.add_(flat)
