"""Machines: what their memories hold and what their links move, from files of figures.

A hardware file is TOML: [host], [device], [nvme]; decimal GB/s and TFLOPS. The figures are those a
program sees, not those of a data sheet; where they come from is said in the file.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field

from infinity.errors import ConfigError
from infinity.plan.files import Table, read_table
from infinity.simulate.step import Rates, drive_rates
from infinity.sizes import parse_nbytes

Nbytes = Annotated[int, BeforeValidator(parse_nbytes)]
Gbps = Annotated[float, Field(gt=0)]

_SOCKETS_SHARE = 8  # See Host.


class Host(Table):
    """`update_gb_per_s` counts every byte the optimizer's pass reads or writes; `sum_gb_per_s`
    those of
    adding up gradients. `hold_gb_per_s` counts weights each time that they are put under a model
    that computes on the host: what the engine itself does; without it, that costs nothing.
    `sockets_gb_per_s` is what ranks of this node send each other from host to host, all of them
    together, each byte counted once; without it an eighth of `sum_gb_per_s`: a byte is copied into
    the kernel and out of it, each copy reads and writes it, and about half of that was seen."""

    memory: Nbytes
    update_gb_per_s: Gbps
    sum_gb_per_s: Gbps
    hold_gb_per_s: Gbps | None = None
    sockets_gb_per_s: Gbps | None = None


class Device(Table):
    """`count` devices, each with `memory` and the links below to the host, each `tflops` fast.
    `gather_gb_per_s` is what each receives of the others, and gives them; `update_gb_per_s` is the
    host's figure where the device makes the update. A device without memory is the host."""

    count: int = Field(1, ge=1)
    tflops: float = Field(gt=0)
    memory: Nbytes | None = None
    h2d_gb_per_s: Gbps | None = None
    d2h_gb_per_s: Gbps | None = None
    gather_gb_per_s: Gbps | None = None
    update_gb_per_s: Gbps | None = None


class Nvme(Table):
    """All drives of the node together. `mixed_gb_per_s` is the sum of both directions at once;
    without
    it reads and writes take turns. `endurance_nbytes` may be written over the life of the drives.
    """

    drives: int = Field(1, ge=1)
    capacity: Nbytes
    read_gb_per_s: Gbps
    write_gb_per_s: Gbps
    mixed_gb_per_s: Gbps | None = None
    endurance: Nbytes | None = None


class Hardware(Table):
    """One node. `source` says where its figures come from."""

    name: str
    source: str
    host: Host
    device: Device
    nvme: Nvme | None = None

    @property
    def shares_host_memory(self) -> bool:
        return self.device.memory is None

    def of_rank(self, count: int) -> Hardware:
        """What one of `count` ranks has, each with a device of its own: an even part of the host
        and of the drives. Where the device is the host itself, a part of that.

        Raises ConfigError where there are fewer devices.
        """
        device = self.device
        if self.shares_host_memory:
            device = device.model_copy(update={"tflops": device.tflops / count})
        elif count > device.count:
            raise ConfigError(
                f"--ranks {count}: {self.name} has {device.count} devices, and each rank needs one"
            )
        device = device.model_copy(update={"count": 1})
        host, nvme = self.host, self.nvme
        return self.model_copy(
            update={
                "host": _part(
                    host, count,
                    "update_gb_per_s", "sum_gb_per_s", "hold_gb_per_s", "sockets_gb_per_s",
                ).model_copy(update={"memory": host.memory // count}),
                "device": device,
                "nvme": None
                if nvme is None
                else _part(nvme, count, "read_gb_per_s", "write_gb_per_s", "mixed_gb_per_s")
                .model_copy(update={"capacity": nvme.capacity // count}),
            }
        )  # fmt: skip

    def rates(self) -> Rates:
        """Everything together: with N devices a unit is cut in N parts, which move at once."""
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
            hold=inf if self.host.hold_gb_per_s is None else self.host.hold_gb_per_s * giga,
            device_update=inf
            if device.update_gb_per_s is None
            else count * device.update_gb_per_s * giga,
            h2d=inf if device.h2d_gb_per_s is None else count * device.h2d_gb_per_s * giga,
            d2h=inf if device.d2h_gb_per_s is None else count * device.d2h_gb_per_s * giga,
            gather=gather,
            peers=inf if device.gather_gb_per_s is None else device.gather_gb_per_s * giga,
            sockets=giga * (self.host.sockets_gb_per_s or self.host.sum_gb_per_s / _SOCKETS_SHARE),
            **drives,
        )


_T = TypeVar("_T", bound=Table)


def _part(table: _T, count: int, *rates: str) -> _T:
    """With these figures, where there are any, divided."""
    found = {name: getattr(table, name) for name in rates}
    return table.model_copy(
        update={name: rate / count for name, rate in found.items() if rate is not None}
    )


def load_hardware(name: str) -> Hardware:
    """A shipped machine by name, or a file by path. Raises ConfigError with what is there."""
    return read_table(Hardware, "hardware", name)
