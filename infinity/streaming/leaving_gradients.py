"""Gradients on their way from a device to the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from infinity.state.units import TensorSpec, Unit
from infinity.tiers.device import Copy, DeviceAdapter

_WIDENED_NUMEL = 8 << 20  # Elements that the device widens at a time: 32 MiB of fp32.


@dataclass(frozen=True, slots=True)
class LeavingGradient:
    """A gradient, or a part of one, that is copied to its place on the host."""

    unit: Unit
    spec: TensorSpec
    copy: Copy
    nbytes: int  # Of device memory that is kept until then.
    place: torch.Tensor | None  # Of all of the gradient, fp32 (numel,); None: another part follows.


class LeavingGradients:
    """The copies under way, oldest first. Under the engine's lock.

    `most_kept_nbytes`: device memory that is kept for copies, beside that of the last one.
    """

    def __init__(self, device: DeviceAdapter, most_kept_nbytes: int) -> None:
        self._device = device
        self._most_kept_nbytes = most_kept_nbytes
        self._leaving: deque[LeavingGradient] = deque()  # Not on the host, or not known to be.
        self._keeping: deque[LeavingGradient] = deque()  # Those whose device memory is kept.

    def __bool__(self) -> bool:
        return bool(self._leaving)

    def start(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor, place: torch.Tensor) -> None:
        """Starts copying a gradient, flat and at most fp32, to its place, fp32 (numel,).

        The device widens it, in parts, so that the host's cores and memory, which updates need, do
        not.
        """
        numel = place.numel() if flat.dtype is torch.float32 else _WIDENED_NUMEL
        for source, target in zip(flat.split(numel), place.split(numel), strict=True):
            wide = source.float()
            is_last = target.data_ptr() + target.nbytes == place.data_ptr() + place.nbytes
            copy = self._device.copy(wide, target)
            self._keep(LeavingGradient(unit, spec, copy, wide.nbytes, place if is_last else None))

    def _keep(self, gradient: LeavingGradient) -> None:
        """Lets later kernels wait for the copies whose memory is more than may be kept."""
        self._leaving.append(gradient)
        self._keeping.append(gradient)
        kept_nbytes = sum(kept.nbytes for kept in self._keeping)
        while kept_nbytes > self._most_kept_nbytes and len(self._keeping) > 1:
            oldest = self._keeping.popleft()
            kept_nbytes -= oldest.nbytes
            oldest.copy.order()

    def has(self, spec: TensorSpec) -> bool:
        """Whether a gradient of the tensor is under way."""
        return any(gradient.spec is spec for gradient in self._leaving)

    def units(self) -> list[Unit]:
        """Returns the units of all gradients under way."""
        return [gradient.unit for gradient in self._leaving]

    def copies(self) -> list[Copy]:
        """Returns all copies under way."""
        return [gradient.copy for gradient in self._leaving]

    def is_oldest_there(self) -> bool:
        """Whether the oldest copy is over."""
        return bool(self._leaving) and self._leaving[0].copy.done()

    def end_oldest(self) -> LeavingGradient:
        """Waits for the oldest copy, and returns it."""
        oldest = self._leaving.popleft()
        if self._keeping and self._keeping[0] is oldest:
            self._keeping.popleft()
        oldest.copy.wait()
        return oldest
