"""Machines: the sizes of their memories and the rates of their links, from files.

A hardware file is TOML: [host], [device], [nvme]; decimal GB/s and TFLOPS. The figures are those
that a program measures, not those of a data sheet. The file names their source.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from infinity.config.schema.tiers import Tiers
from infinity.errors import ConfigError
from infinity.plan.tables import Table
from infinity.simulate.spec import Rates, drive_rates
from infinity.sizes import parse_nbytes

Nbytes = Annotated[int, BeforeValidator(parse_nbytes)]
GbPerS = Annotated[float, Field(gt=0)]
Tflops = Annotated[float, Field(gt=0)]

_SOCKETS_SHARE = 8  # See Host.
_GIGA = 1e9
UNSURE = "; unsure: "  # In a source, before rates that another moment may measure otherwise.


class Host(Table):
    """The memory and rates of the host.

    `update_gb_per_s` counts every byte that the optimizer's pass reads or writes; `sum_gb_per_s`
    the bytes of summing gradients. `norm_gb_per_s` is the rate at which one thread computes norms
    of gradients, and `norm_threads` the number of such threads beside a device, all ranks together;
    on a host that computes itself one thread does. `hold_gb_per_s` counts weights each time that
    they are mapped under a model that computes on the host; without it this work costs nothing.
    `sockets_gb_per_s` is the traffic between the hosts of ranks on this node, all ranks together,
    each byte counted once. Its default is an eighth of `sum_gb_per_s`: a byte is copied into the
    kernel and out of it, each copy reads and writes it, and about half of that rate was measured.
    `network_gb_per_s` is the rate at which the node receives from other nodes, and sends, all its
    adapters together.
    """

    memory: Nbytes
    update_gb_per_s: GbPerS
    sum_gb_per_s: GbPerS
    norm_gb_per_s: GbPerS = 12.0  # Of one core of an EPYC 7003, as those of its time.
    norm_threads: int = Field(4, ge=1)
    hold_gb_per_s: GbPerS | None = None
    sockets_gb_per_s: GbPerS | None = None
    network_gb_per_s: GbPerS | None = None


class Device(Table):
    """`count` devices, each with `memory`, with the links below to the host, and `tflops` fast.

    `gather_gb_per_s` is the rate at which each device receives from the others, and sends.
    `update_gb_per_s` has the meaning of the host's, for updates on the device. `decode_gb_per_s`
    counts the weights that are made of quantised ones, in the dtype that is computed with; without
    it that takes no time. `memory_gb_per_s` is the rate at which products of few rows read weights
    from the device's memory, which bounds those of experts; without it they are as fast as others.
    `float32_tflops` is the speed in fp32 of a processor that computes in another dtype.
    A device without memory is the host; one that is `integrated`, as that of a DGX Spark, takes its
    memory from the host's.
    """

    count: int = Field(1, ge=1)
    tflops: Tflops
    memory: Nbytes | None = None
    integrated: bool = False
    h2d_gb_per_s: GbPerS | None = None
    d2h_gb_per_s: GbPerS | None = None
    gather_gb_per_s: GbPerS | None = None
    update_gb_per_s: GbPerS | None = None
    decode_gb_per_s: GbPerS | None = None
    memory_gb_per_s: GbPerS | None = None
    float32_tflops: Tflops | None = None

    @model_validator(mode="after")
    def _has_memory(self) -> Device:
        if self.integrated and self.memory is None:
            raise ValueError("device.integrated needs device.memory, that of the host")
        return self


class Nvme(Table):
    """All drives of the node together. `mixed_gb_per_s` is the sum of both directions at the same
    time; without it, reads and writes alternate. `endurance_nbytes` may be written over the life of
    the drives. `checkpoint_read_gb_per_s` is the rate of other drives that hold a frozen
    checkpoint; without it, these drives hold it."""

    drives: int = Field(1, ge=1)
    capacity: Nbytes
    read_gb_per_s: GbPerS
    write_gb_per_s: GbPerS
    mixed_gb_per_s: GbPerS | None = None
    checkpoint_read_gb_per_s: GbPerS | None = None
    endurance: Nbytes | None = None


class Hardware(Table):
    """One node. `source` names the origin of its figures."""

    name: str
    source: str
    host: Host
    device: Device
    nvme: Nvme | None = None

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device computes in host memory, as a CPU does."""
        return self.device.memory is None

    def with_parts(self, tiers: Tiers) -> Hardware:
        """Returns the machine with memory that its device and its host do not share. Raises
        CapacityError."""
        if not self.device.integrated:
            return self
        of_device, of_host = tiers.parts_of_pool(self.host.memory)
        device = self.device.model_copy(update={"memory": of_device})
        host = self.host.model_copy(update={"memory": of_host})
        return self.model_copy(update={"host": host, "device": device})

    def of_rank(self, count: int) -> Hardware:
        """Returns the share of one of `count` ranks, each with its own device: an even part of the
        host and of the drives. If the device is the host itself, a part of the host.

        Raises ConfigError if there are fewer devices.
        """
        host, device, nvme = self.host, self.device, self.nvme
        if self.shares_host_memory:
            device = device.scaled(
                1 / count, "tflops", "float32_tflops", "decode_gb_per_s", "memory_gb_per_s"
            )
        elif count > device.count:
            raise ConfigError(
                f"--ranks {count}: {self.name} has {device.count} device"
                f"{'s' * (device.count != 1)}, and each rank needs one; --hardware names a machine "
                "that has them (several devices of this one are not measured)"
            )
        host = host.scaled(
            1 / count, "update_gb_per_s", "sum_gb_per_s", "hold_gb_per_s", "sockets_gb_per_s",
            "network_gb_per_s", memory=host.memory // count,
            norm_threads=max(1, host.norm_threads // count),
        )  # fmt: skip
        if nvme is not None:
            nvme = nvme.scaled(
                1 / count, "read_gb_per_s", "write_gb_per_s", "mixed_gb_per_s",
                "checkpoint_read_gb_per_s", capacity=nvme.capacity // count,
            )  # fmt: skip
        device = device.model_copy(update={"count": 1})
        return self.model_copy(update={"host": host, "device": device, "nvme": nvme})

    def rates(self, shard_drives: int | None = None) -> Rates:
        """Returns the rates of one device, and of the host and the drives. `shard_drives` of the
        drives hold the checkpoint of a frozen base; None: all."""
        host, device, nvme = self.host, self.device, self.nvme
        drives = {}
        if nvme is not None:
            drives = drive_rates(nvme.read_gb_per_s, nvme.write_gb_per_s, nvme.mixed_gb_per_s)
        return Rates(
            flops=device.tflops * 1e12,
            update=host.update_gb_per_s * _GIGA,
            host=host.sum_gb_per_s * _GIGA,
            norm=host.norm_gb_per_s * _GIGA,
            norm_threads=host.norm_threads,
            hold=_per_s(host.hold_gb_per_s),
            device_update=_per_s(device.update_gb_per_s),
            decode=_per_s(device.decode_gb_per_s),
            memory=_per_s(device.memory_gb_per_s),
            h2d=_per_s(device.h2d_gb_per_s),
            d2h=_per_s(device.d2h_gb_per_s),
            peers=_per_s(device.gather_gb_per_s),
            network=_per_s(host.network_gb_per_s),
            checkpoint_read=self._checkpoint_read(shard_drives),
            sockets=_GIGA * (host.sockets_gb_per_s or host.sum_gb_per_s / _SOCKETS_SHARE),
            **drives,
        )

    def _checkpoint_read(self, shard_drives: int | None) -> float:
        """Returns the bytes per second that the drives of a checkpoint read."""
        nvme = self.nvme
        if nvme is None:
            return float("inf")
        if nvme.checkpoint_read_gb_per_s is not None:
            return nvme.checkpoint_read_gb_per_s * 1e9
        share = 1.0 if shard_drives is None else min(shard_drives / nvme.drives, 1.0)
        return share * nvme.read_gb_per_s * 1e9


def _per_s(gb_per_s: float | None) -> float:
    """Returns the bytes per second; a rate that is not given costs no time."""
    return float("inf") if gb_per_s is None else gb_per_s * _GIGA


def load_hardware(name: str) -> Hardware:
    """Loads a shipped machine by name, or a file by path. Raises ConfigError with the shipped
    names."""
    return Hardware.read("hardware", name)
