"""Decides whether the host or the device computes the update: `schedule.update_on = "auto"`.

The simulated step is run for both choices, with the machine's rates. Beside the computation of the
model, an update takes the time of its slowest stage: on the host the drives or the host kernel, on
the device the drives, the link or the device kernel.

An update on the host may overlap with the forward of a large batch. An update on the device does
not, because the forward stops for it. If the batch is unknown (a user's own program offloads a
model), the computation of the model counts as nothing; the margin accounts for that.

The bits are the same on both. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from infinity.config.schema.engine import UpdateOn
from infinity.simulate.spec import Rates, StepSpec
from infinity.simulate.step import Prediction, predict
from infinity.sizes import MIB, format_nbytes

Place = Literal["host", "device"]

# The device must be faster by this factor. If it is faster by x beside no computation, it loses at
# most 1 / (4 x) beside a computation that just covers the host's update and has a backward three
# times as long: from here on the possible gain exceeds the possible loss. Rates also vary over
# time.
LEAST_GAIN = 1.2
# A step that touches fewer bytes takes the slowest host a tenth of a second.
LEAST_UPDATE_NBYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class UpdateDevice:
    """The device of the update and the reason, in words; `figures` lists the compared values."""

    place: Place
    why: str
    figures: str = ""

    def __str__(self) -> str:
        figures = f" ({self.figures})" if self.figures else ""
        return f"on the {self.place}: {self.why}{figures}"

    @property
    def is_on_device(self) -> bool:
        """Whether the device runs the updates."""
        return self.place == "device"


def settled(
    update_on: UpdateOn, moments: str, *, shares_host_memory: bool, update_nbytes: int
) -> UpdateDevice | None:
    """Returns the decision if it needs no rates, else None. `moments`: their format, as in
    `[precision]`; `update_nbytes`: the bytes that a step's update reads and writes."""
    if shares_host_memory:
        return UpdateDevice("host", "the device computes on the host's memory")
    if moments == "8bit":
        return UpdateDevice("host", "moments of eight bits stay with it")
    if update_on != "auto":
        return UpdateDevice(update_on, "schedule.update_on says so")
    if update_nbytes < LEAST_UPDATE_NBYTES:
        return UpdateDevice("host", f"an update touches {format_nbytes(update_nbytes)} and no more")
    return None


def choose(job: StepSpec, rates: Rates) -> UpdateDevice:
    """Chooses the host, unless steps with updates on the device take clearly less time."""
    on_host, on_device = (
        predict(replace(job, updates_on_device=is_on_device), rates)
        for is_on_device in (False, True)
    )
    place: Place = "device" if LEAST_GAIN * on_device.step_s < on_host.step_s else "host"
    is_known = any(use.forward_flops for use in job.uses)
    return UpdateDevice(
        place,
        f"a step takes {_seconds(on_host)} with updates on the host, {_seconds(on_device)} "
        f"on the device{'' if is_known else ', its computation not counted'}",
        f"the host does {_gb_per_s(rates.update)} of state, the device "
        f"{_gb_per_s(rates.device_update)}, "
        f"the link {_gb_per_s(rates.h2d)} in and {_gb_per_s(rates.d2h)} out, the drives "
        f"{_gb_per_s(rates.nvme_mixed)}",
    )


def _seconds(step: Prediction) -> str:
    return f"{step.step_s:,.0f} s" if step.step_s >= 100 else f"{step.step_s:.3g} s"


def _gb_per_s(rate: float) -> str:
    return "unknown GB/s" if rate == float("inf") else f"{rate / 1e9:,.3g} GB/s"
