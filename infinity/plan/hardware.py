"""Machines: the sizes of their memories and the rates of their links, from files.

A hardware file is TOML: [host], [device], [nvme]; decimal GB/s and TFLOPS. The figures are those
that a program measures, not those of a data sheet. The file names their source.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field

from infinity.errors import ConfigError
from infinity.plan.files import Table, read_table
from infinity.simulate.rates import Rates, drive_rates
from infinity.sizes import parse_nbytes

Nbytes = Annotated[int, BeforeValidator(parse_nbytes)]
GbPerS = Annotated[float, Field(gt=0)]

_SOCKETS_SHARE = 8  # See Host.


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
    it that takes no time. A device without memory is the host.
    """

    count: int = Field(1, ge=1)
    tflops: float = Field(gt=0)
    memory: Nbytes | None = None
    h2d_gb_per_s: GbPerS | None = None
    d2h_gb_per_s: GbPerS | None = None
    gather_gb_per_s: GbPerS | None = None
    update_gb_per_s: GbPerS | None = None
    decode_gb_per_s: GbPerS | None = None


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

    def of_rank(self, count: int) -> Hardware:
        """Returns the share of one of `count` ranks, each with its own device: an even part of the
        host and of the drives. If the device is the host itself, a part of the host.

        Raises ConfigError if there are fewer devices.
        """
        device = self.device
        if self.shares_host_memory:
            device = _part(device, count, "tflops", "decode_gb_per_s")
        elif count > device.count:
            raise ConfigError(
                f"--ranks {count}: {self.name} has {device.count} device"
                f"{'s' * (device.count != 1)}, and each rank needs one; --hardware names a machine "
                "that has them (several devices of this one are not measured)"
            )
        device = device.model_copy(update={"count": 1})
        host, nvme = self.host, self.nvme
        return self.model_copy(
            update={
                "host": _part(
                    host, count,
                    "update_gb_per_s", "sum_gb_per_s", "hold_gb_per_s", "sockets_gb_per_s",
                    "network_gb_per_s",
                ).model_copy(
                    update={
                        "memory": host.memory // count,
                        "norm_threads": max(1, host.norm_threads // count),
                    }
                ),
                "device": device,
                "nvme": None
                if nvme is None
                else _part(
                    nvme, count,
                    "read_gb_per_s", "write_gb_per_s", "mixed_gb_per_s", "checkpoint_read_gb_per_s",
                )
                .model_copy(update={"capacity": nvme.capacity // count}),
            }
        )  # fmt: skip

    def rates(self, shard_drives: int | None = None) -> Rates:
        """Returns the rates of everything together: N devices move N parts of a unit at the same
        time. `shard_drives` of the drives hold the checkpoint of a frozen base; None: all."""
        giga, inf = 1e9, float("inf")
        count, device, nvme = self.device.count, self.device, self.nvme
        drives = {}
        if nvme is not None:
            mixed = None if nvme.mixed_gb_per_s is None else nvme.mixed_gb_per_s * giga
            drives = drive_rates(nvme.read_gb_per_s * giga, nvme.write_gb_per_s * giga, mixed)
        gather = None
        if count > 1 and device.gather_gb_per_s is not None:
            # Each device receives the other devices' parts of a unit.
            gather = device.gather_gb_per_s * giga * count / (count - 1)
        return Rates(
            flops=count * device.tflops * 1e12,
            update=self.host.update_gb_per_s * giga,
            host=self.host.sum_gb_per_s * giga,
            norm=self.host.norm_gb_per_s * giga,
            norm_threads=self.host.norm_threads,
            hold=inf if self.host.hold_gb_per_s is None else self.host.hold_gb_per_s * giga,
            device_update=inf
            if device.update_gb_per_s is None
            else count * device.update_gb_per_s * giga,
            decode=inf if device.decode_gb_per_s is None else count * device.decode_gb_per_s * giga,
            h2d=inf if device.h2d_gb_per_s is None else count * device.h2d_gb_per_s * giga,
            d2h=inf if device.d2h_gb_per_s is None else count * device.d2h_gb_per_s * giga,
            gather=gather,
            peers=inf if device.gather_gb_per_s is None else device.gather_gb_per_s * giga,
            network=inf
            if self.host.network_gb_per_s is None
            else self.host.network_gb_per_s * giga,
            checkpoint_read=self._checkpoint_read(shard_drives),
            sockets=giga * (self.host.sockets_gb_per_s or self.host.sum_gb_per_s / _SOCKETS_SHARE),
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


_T = TypeVar("_T", bound=Table)


def _part(table: _T, count: int, *rates: str) -> _T:
    """Divides these rates of a table, as far as they are set."""
    found = {name: getattr(table, name) for name in rates}
    return table.model_copy(
        update={name: rate / count for name, rate in found.items() if rate is not None}
    )


def load_hardware(name: str) -> Hardware:
    """Loads a shipped machine by name, or a file by path. Raises ConfigError with the shipped
    names."""
    return read_table(Hardware, "hardware", name)
