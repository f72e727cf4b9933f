"""Machines: what their memories hold and what their links move, from files of figures.

A hardware file is TOML: [host], [device], [nvme]; decimal GB/s and TFLOPS. The figures are those a
program sees, not those of a data sheet; where they come from is said in the file.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from infinity.errors import ConfigError
from infinity.schedule.step import Rates
from infinity.sizes import parse_nbytes

Nbytes = Annotated[int, BeforeValidator(parse_nbytes)]
Gbps = Annotated[float, Field(gt=0)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Host(_Table):
    """`update_gbps` counts every byte the optimizer's pass reads or writes; `sum_gbps` those of
    adding up gradients."""

    memory: Nbytes
    update_gbps: Gbps
    sum_gbps: Gbps


class Device(_Table):
    """`count` devices, each with `memory` and the links below to the host, each `tflops` fast.
    `gather_gbps` is what each receives of the others. A device without memory is the host."""

    count: int = Field(1, ge=1)
    tflops: float = Field(gt=0)
    memory: Nbytes | None = None
    h2d_gbps: Gbps | None = None
    d2h_gbps: Gbps | None = None
    gather_gbps: Gbps | None = None


class Nvme(_Table):
    """All drives of the node together. `mixed_gbps` is the sum of both directions at once; without
    it reads and writes take turns. `endurance_nbytes` may be written over the life of the drives.
    """

    drives: int = Field(1, ge=1)
    capacity: Nbytes
    read_gbps: Gbps
    write_gbps: Gbps
    mixed_gbps: Gbps | None = None
    endurance: Nbytes | None = None


class Hardware(_Table):
    """One node. `source` says where its figures come from."""

    name: str
    source: str
    host: Host
    device: Device
    nvme: Nvme | None = None

    @property
    def shares_host_memory(self) -> bool:
        return self.device.memory is None

    def rates(self) -> Rates:
        """Everything together: with N devices a unit is cut in N parts, which move at once."""
        giga, inf = 1e9, float("inf")
        count, device, nvme = self.device.count, self.device, self.nvme
        links = {} if nvme is None else _nvme_rates(nvme)
        gather = None
        if count > 1 and device.gather_gbps is not None:
            # Each device receives the other devices' parts of a unit.
            gather = device.gather_gbps * giga * count / (count - 1)
        return Rates(
            flops=count * device.tflops * 1e12,
            update=self.host.update_gbps * giga,
            host=self.host.sum_gbps * giga,
            h2d=inf if device.h2d_gbps is None else count * device.h2d_gbps * giga,
            d2h=inf if device.d2h_gbps is None else count * device.d2h_gbps * giga,
            gather=gather,
            **links,
        )


def _nvme_rates(nvme: Nvme) -> dict[str, float]:
    taking_turns = 2 / (1 / nvme.read_gbps + 1 / nvme.write_gbps)
    return {
        "nvme_read": nvme.read_gbps * 1e9,
        "nvme_write": nvme.write_gbps * 1e9,
        "nvme_mixed": (nvme.mixed_gbps or taking_turns) * 1e9,
    }


def load_hardware(name: str) -> Hardware:
    """A shipped machine by name, or a file by path. Raises ConfigError with what is there."""
    try:
        return Hardware.model_validate(read_shipped("hardware", name))
    except ValidationError as error:
        raise ConfigError(f"hardware {name}: {_first(error)}") from None


def read_shipped(folder: str, name: str) -> dict[str, Any]:
    """The table of `infinity/plan/FOLDER/NAME.toml`, or of the file `name` if it ends in .toml."""
    shipped = resources.files("infinity.plan") / folder
    file = Path(name) if name.endswith(".toml") else shipped / f"{name}.toml"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        raise ConfigError(
            f"{folder}: {name!r} is neither a .toml file nor one of {', '.join(shipped_in(folder))}"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: {error}") from None


def shipped_in(folder: str) -> list[str]:
    """Names of the files that come with the package."""
    entries = (resources.files("infinity.plan") / folder).iterdir()
    return sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml"))


def _first(error: ValidationError) -> str:
    fault = error.errors()[0]
    return f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"


def check_table(kind: type[_Table], folder: str, name: str) -> Any:
    """The shipped table read as `kind`."""
    try:
        return kind.model_validate(read_shipped(folder, name))
    except ValidationError as error:
        raise ConfigError(f"{folder} {name}: {_first(error)}") from None
