"""Who makes the optimizer's update, the host or the device: `schedule.update_on = "auto"`.

The simulated step is asked twice, once for each, by what the machine does a second. Beside the
model's computation it is the slowest of what an update goes through that binds: on the host the
drives or its kernel, on the device the drives, the link or its kernel.

The host's update may be hidden behind the forward of a large batch; the device's is not, for the
forward stands still for it. Where the batch is not known, when a program of the user's own offloads
a model, its computation is taken to be nothing, and that is what the margin is for.

The bits are the same on either. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from infinity.config.schema import UpdateOn
from infinity.simulate.step import Prediction, Rates, StepSpec, predict
from infinity.sizes import MIB, format_nbytes

Place = Literal["host", "device"]

# By so much the device must be faster. If it is by x beside no computation, it loses at most
# 1 / (4 x) beside that which just hides the host's update and three times as long a backward: from
# here on there is more to win than to lose. And rates are those of a moment.
LEAST_GAIN = 1.2
# A step that touches less than this takes the slowest host a tenth of a second.
LEAST_UPDATE_NBYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class UpdateDevice:
    """Where the update is made, and why, in words; `figures` is what was compared."""

    place: Place
    why: str
    figures: str = ""

    def __str__(self) -> str:
        figures = f" ({self.figures})" if self.figures else ""
        return f"on the {self.place}: {self.why}{figures}"

    @property
    def is_on_device(self) -> bool:
        return self.place == "device"


def settled(
    update_on: UpdateOn,
    moments: str,
    *,
    shares_host_memory: bool,
    update_nbytes: int,
) -> UpdateDevice | None:
    """What needs no rates, or None. `moments`: their format, as `[precision]` says it;
    `update_nbytes`: what a step's update reads and writes."""
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
    """The host, unless steps with updates on the device take clearly less time."""
    on_host, on_device = (
        predict(replace(job, updates_on_device=there), rates) for there in (False, True)
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
