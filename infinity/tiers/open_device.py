"""The device that computes: its kind, its budget and its adapter."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from infinity.config import SwapConfig
from infinity.config.cores import node_of_device
from infinity.errors import ConfigError
from infinity.observe import Counters
from infinity.tiers.cpu import CpuDevice
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostBlocks


class OwnDevice(DeviceAdapter, Protocol):
    """A device adapter of the caller, which is given the host tier when it exists."""

    def open(self, host: HostBlocks, counters: Counters) -> None:
        """Receives the arena and the counters, before any other call."""


def shares_host_memory(config: SwapConfig, device: OwnDevice | None) -> bool:
    """Returns whether the device computes on host memory. Raises ConfigError as `device_kind`."""
    return device.shares_host_memory if device is not None else device_kind(config) == "cpu"


def device_nbytes(config: SwapConfig, *, is_cuda: bool) -> int | None:
    """Returns the budget of the device; None: unlimited. `is_cuda`: torch knows its free memory."""
    if not is_cuda:
        # A share of "device memory" means nothing here: unlimited.
        return config.tiers.device.capacity.nbytes
    free_nbytes, _ = torch.cuda.mem_get_info()
    return config.tiers.device.budget_nbytes(free_nbytes)


def device_kind(config: SwapConfig) -> str:
    """Returns "cuda" or "cpu". Raises ConfigError for "cuda" on a machine without it."""
    kind = config.tiers.device.kind
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "tiers.device.kind: expected a CUDA device for 'cuda', and PyTorch sees none; install "
            "a CUDA build of torch and a driver, or set it to 'cpu' or 'auto'"
        )
    return kind


def pci_address(properties: object) -> str:
    """Returns the address of a device as in /sys/bus/pci/devices, from its properties in torch;
    empty if torch does not report it."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers: list[Any] = [getattr(properties, name, None) for name in names]
    if not all(isinstance(number, int) for number in numbers):
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def device_identity(config: SwapConfig, own: OwnDevice | None) -> str:
    """Returns the name of the device among all devices; empty where ranks may share it."""
    if own is not None or device_kind(config) != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(None), "uuid", ""))


def device_node(config: SwapConfig, own: OwnDevice | None) -> int | None:
    """Returns the NUMA node that the device hangs on: half of all copies would cross to the other
    one. None: nothing to prefer."""
    if own is not None or device_kind(config) != "cuda":
        return None
    return node_of_device(pci_address(torch.cuda.get_device_properties(None)))


def open_device(
    config: SwapConfig, host: HostBlocks, counters: Counters, own: OwnDevice | None
) -> DeviceAdapter:
    """Opens the adapter of the caller, or of the configured device. The caller closes it."""
    if own is not None:
        own.open(host, counters)
        return own
    if device_kind(config) == "cuda":
        from infinity.tiers.cuda import CudaDevice

        return CudaDevice(host, counters)
    return CpuDevice(host, counters)
