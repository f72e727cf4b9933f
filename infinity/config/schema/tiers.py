"""The tables `[tiers]` and `[placement]`: the places of training state, and what goes where."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from infinity.config.schema import Section, defaults, one_or_more
from infinity.config.values import (
    Budget,
    Capacity,
    Flag,
    Location,
    auto_or,
    choice,
    fault,
    number,
    or_off,
    refuse,
    refuse_all,
)
from infinity.errors import CapacityError

# The part of the free memory that "auto" takes, on the host and on a device. The rest is for what
# the engine does not allocate: activations, gradients of autograd, the program's own tensors.
_AUTO_PERCENT = 50.0

TierName = Literal["device", "host", "nvme"]
DeviceKind = Literal["auto", "cpu", "cuda"]
DirectIo = Literal["auto", "always", "never"]
FrozenLocationName = Literal["auto", "checkpoint", "copy"]


def _distinct(tiers: tuple[str, ...]) -> tuple[str, ...]:
    if not tiers or len(set(tiers)) < len(tiers):
        raise refuse("a list of tiers, not empty, each named once", tiers)
    return tiers


_Tier = Annotated[TierName, choice(TierName)]
TierList = Annotated[
    tuple[_Tier, ...],
    one_or_more(_Tier),
    AfterValidator(_distinct),
]


class DeviceTier(Section):
    """The memory that computes."""

    kind: Annotated[DeviceKind, choice(DeviceKind)] = "auto"
    """The device of the computation. "auto" takes CUDA where there is one."""
    capacity: Budget = Capacity()
    """Device memory for weights and for state placed there. A share is of the memory that is free
    when the model is offloaded; "auto" takes half of that. On cpu the capacity bounds only the
    state placed on the device; "auto" means no bound there."""

    def budget_nbytes(self, free_nbytes: int) -> int:
        """Returns the budget on a device with memory of its own, `free_nbytes` of it free."""
        return self.capacity.resolve(free_nbytes, auto_percent=_AUTO_PERCENT)


class HostTier(Section):
    """Host memory: one arena, preallocated to its budget, pinned where the device is CUDA."""

    capacity: Budget = Capacity()
    """Bytes of the arena. A share is of the memory available when the run starts (inside a
    container: under its limit). "auto" takes half of that."""
    huge_pages: Flag = True
    """Back the arena with huge pages where the kernel has them."""

    def budget_nbytes(self, available_nbytes: int) -> int:
        """Returns the bytes of the arena on a machine with `available_nbytes` of free memory."""
        return self.capacity.resolve(available_nbytes, auto_percent=_AUTO_PERCENT)


class NvmeTier(Section):
    """One directory on a drive. Several are striped."""

    path: Location
    """Directory for swap files. Its parent must exist; the directory is made."""
    capacity: Budget = Capacity()
    """Most bytes that swap files may take here. A share is of the free space of the file system;
    "auto" is the free space less a reserve."""
    direct: Annotated[DirectIo, choice(DirectIo)] = "auto"
    """Direct I/O, past the page cache. "auto" falls back to buffered I/O with a warning where the
    file system refuses it; "always" makes that an error."""
    weight: Annotated[Literal["auto"] | float, auto_or(number(above=0))] = "auto"
    """Share of the stripes on this path: its bandwidth in GB/s, or a number proportional to it if
    every path has one. "auto" measures the bandwidth if there are several paths."""
    read_gb_per_s: Annotated[float | None, or_off(number(above=0))] = None
    """Bandwidth of reading in decimal GB/s, as `infinity tune` found it. 0: not measured."""
    write_gb_per_s: Annotated[float | None, or_off(number(above=0))] = None
    """Bandwidth of writing, as `read_gb_per_s`."""
    mixed_gb_per_s: Annotated[float | None, or_off(number(above=0))] = None
    """Bandwidth of reading and writing at once, in sum, as `read_gb_per_s`."""


class Tiers(Section):
    """The places that training state may live in."""

    device: DeviceTier = defaults()
    host: HostTier = defaults()
    nvme: Annotated[
        tuple[NvmeTier, ...],
        BeforeValidator(lambda value: () if value is None else value),  # As null for a section.
    ] = ()
    """One entry per mounted drive."""

    def parts_of_pool(self, free_nbytes: int) -> tuple[int, int]:
        """Returns the bytes that the device, and that the host, may count as its own of one memory
        that is both, `free_nbytes` of it free. A size that the file names comes first, and without
        one each has half; a tenth stays with the driver and the system. Raises CapacityError."""
        pool_nbytes = free_nbytes - free_nbytes // 10
        device, host = self.device.capacity.nbytes, self.host.capacity.nbytes
        if (device or 0) + (host or 0) > pool_nbytes:
            raise CapacityError(
                "host", needed_nbytes=(device or 0) + (host or 0), available_nbytes=pool_nbytes,
                key="tiers.host.capacity",
                detail="the device computes in the host's memory, which both share",
            )  # fmt: skip
        if host is None:
            host = pool_nbytes // 2 if device is None else pool_nbytes - device
        return pool_nbytes - host, host

    @field_validator("nvme")
    @classmethod
    def _paths_once(cls, entries: tuple[NvmeTier, ...]) -> tuple[NvmeTier, ...]:
        seen: dict[str, int] = {}
        faults = []
        for index, entry in enumerate(entries):
            first = seen.setdefault(os.path.realpath(entry.path), index)
            if first != index:
                text = f"the same directory as tiers.nvme[{first}].path; give each drive one entry"
                faults.append(fault(text, index, "path"))
        refuse_all(faults)
        return entries


_NVME_DEFAULT: dict[str, Any] = {"x-default": '`["nvme"]` with an nvme tier, else `["host"]`'}


class Placement(Section):
    """The tiers of each kind of training state.

    Each key is one tier ("device", "host" or "nvme") or a list of tiers, filled in that order. With
    [adapter] and an nvme tier, `infinity train` and `infinity plan` put every kind that the file
    does not name, activations too, on `["host", "nvme"]`.
    """

    parameters: TierList = Field(("host",), json_schema_extra=_NVME_DEFAULT)
    """The weights that forward and backward read."""
    master: TierList = Field(("host",), json_schema_extra=_NVME_DEFAULT)
    """The fp32 weights that the optimizer updates."""
    moments: TierList = Field(("host",), json_schema_extra=_NVME_DEFAULT)
    """The optimizer's first and second moments."""
    frozen: Annotated[FrozenLocationName, choice(FrozenLocationName)] = "auto"
    """Frozen weights. "checkpoint" reads them in place from the files of `weights=`, which are
    never written: no swap space, no import. "copy" places them as `parameters` says. "auto" is
    "copy" where `parameters` begins with "device"."""
    gradients: TierList = ("host",)
    """Accumulated gradients."""
    activations: TierList = ("device",)
    """Layer inputs that wait for the backward of `schedule.micro_batch`. With ["host", "nvme"] the
    host takes them in place of weights that are only kept; NVMe takes the rest. Without a GPU these
    inputs are outside the host budget."""
    experts: TierList = ("device",)
    """Hidden states and sums of micro-batches that wait while a tile of experts runs for another
    one. Every tile moves them to the device and back, so use another tier only for batches that the
    device cannot hold."""

    @property
    def reads_in_place(self) -> bool:
        """Whether frozen weights rest in the files of their checkpoint, where that is possible."""
        if self.frozen == "auto":
            return self.parameters[0] != "device"
        return self.frozen == "checkpoint"
