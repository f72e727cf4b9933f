"""The device that computes: its kind, its budget and its adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.config.machine import node_of_device, pci_address
from infinity.config.schema.tiers import DeviceTier, Tiers
from infinity.errors import ConfigError
from infinity.observe import Counters
from infinity.tiers.cpu import CpuDevice
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device of a run, before it is opened. `own` is the adapter of the caller; `type` is
    torch's word for where the model computes. One that `is_integrated` copies between parts of the
    host's memory."""

    own: DeviceAdapter | None
    type: str
    shares_host_memory: bool
    is_integrated: bool

    @property
    def is_cuda(self) -> bool:
        """Whether torch knows the device's memory and address."""
        return self.own is None and self.type == "cuda"

    def sizes(self, tiers: Tiers, available_nbytes: int) -> tuple[int | None, int]:
        """Returns the budget of the device, as far as its memory is free now, None: unlimited, and
        what the host has of its `available_nbytes`. Raises CapacityError."""
        if self.is_integrated:
            # Not CUDA's figure, which counts page cache that the kernel would drop as taken.
            free_nbytes, available_nbytes = tiers.parts_of_pool(available_nbytes)
        elif self.is_cuda:
            free_nbytes, _ = torch.cuda.mem_get_info()
        else:
            # A share of "device memory" means nothing here: unlimited.
            return tiers.device.capacity.nbytes, available_nbytes
        return tiers.device.budget_nbytes(free_nbytes), available_nbytes

    def identity(self) -> str:
        """Returns the name of the device among all devices; empty where ranks may share it."""
        if not self.is_cuda:
            return ""
        return str(getattr(torch.cuda.get_device_properties(None), "uuid", ""))

    def numa_node(self) -> int | None:
        """Returns the NUMA node that the device hangs on: half of all copies would cross to the
        other one. None: nothing to prefer."""
        if not self.is_cuda:
            return None
        return node_of_device(pci_address(torch.cuda.get_device_properties(None)))

    def open(self, host: HostPool, counters: Counters) -> DeviceAdapter:
        """Opens the adapter. The caller closes it."""
        if self.own is not None:
            self.own.open(host, counters)
            return self.own
        if self.type == "cuda":
            from infinity.tiers.cuda import CudaDevice

            return CudaDevice(host, counters)
        return CpuDevice(host, counters)


def choose_device(tier: DeviceTier, own: DeviceAdapter | None) -> ChosenDevice:
    """Returns the device of the caller, or the configured one. Raises ConfigError as
    `device_kind`."""
    if own is not None:
        return ChosenDevice(own, own.torch_device.type, own.shares_host_memory, own.is_integrated)
    kind = device_kind(tier)
    return ChosenDevice(None, kind, kind == "cpu", is_integrated(kind))


def is_integrated(kind: str) -> bool:
    """Whether the current device of this kind has the host's memory, and yet needs copies."""
    if kind != "cuda":
        return False
    return bool(getattr(torch.cuda.get_device_properties(None), "is_integrated", False))


def device_kind(tier: DeviceTier) -> str:
    """Returns "cuda" or "cpu". Raises ConfigError for "cuda" on a machine without it."""
    kind = tier.kind
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "tiers.device.kind: expected a CUDA device for 'cuda', and PyTorch sees none; install "
            "a CUDA build of torch and a driver, or set it to 'cpu' or 'auto'"
        )
    return kind
