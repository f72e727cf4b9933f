"""Gradients on their way to where they are summed, in the simulated step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.simulate.log import COMPUTE, D2H, H2D, NORMS, READ, WRITE, OperationLog
from infinity.simulate.spec import NOT_SHARDED


class GradientTraffic:
    """Appends what happens to gradients after a backward.

    `out`: the operations after which gradients of the step are at rest. `norms`: those after which
    the step knows their norms. `sums`: by unit, the operation that completes this rank's sum.
    """

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self.out: list[int] = []
        self.norms: list[int] = []
        self._last_norm_s = 0.0  # Until the largest tensor of the last unit is measured.
        self._in_memory: dict[int, int] = {}  # By unit, the operation that ended its sum.
        self.sums: dict[int, int] = {}

    def leave(self, unit: int, *, is_first: bool) -> None:
        """Adds the transfers of a unit's gradients when the backward leaves the unit.

        `is_first`: no micro-batch of this step has left it before.
        """
        load = self._log.job.units[unit]
        tier, nbytes = load.sums
        name, out = f"gradients of {load.name}", self._log.last_on[COMPUTE]
        if load.sharded.sends_each_backward:
            if load.is_changed:
                self._send_gradients(unit, [out], is_first=is_first)
            return
        if not nbytes:
            return
        if load.sharded.sums is not None:
            self.sums[unit] = out
        if tier == "device":
            self.out.append(out)
            return
        freed = self._free_gradient_buffer(tier)
        if not self._log.job.shares_host_memory:
            nbytes -= self._log.job.narrowed_nbytes(load)
            out = self._log.move(D2H, name, nbytes, [out, *freed])
        # The gradient is copied, or added: it is read, and the sum is read and written. The first
        # one of a device is widened there, and its copy engine moves it.
        touched_nbytes = (2 if is_first else 3) * nbytes
        if not self._log.job.shares_host_memory and is_first:
            touched_nbytes = 0
        summed = self._sum_up(unit, tier, nbytes, touched_nbytes, out, is_first=is_first)
        if load.sharded.sums is not None:
            self.sums[unit] = summed

    def _free_gradient_buffer(self, tier: str) -> list[int | None]:
        """Gradients on their way to NVMe are in memory, a few units at a time."""
        if tier == "nvme" and len(self.out) >= self._log.job.num_gradient_buffers:
            return [self.out[-self._log.job.num_gradient_buffers]]
        return [None]

    def _sum_up(
        self, unit: int, tier: str, nbytes: int, touched_nbytes: int, out: int, *, is_first: bool
    ) -> int:
        """Adds gradients that reached the host by `out` to the sum there, or on NVMe."""
        name = f"gradients of {self._log.job.units[unit].name}"
        freed = self._free_gradient_buffer(tier)
        before: list[int | None] = [out, *freed]
        stays = unit in self._log.sums.kept
        if tier == "nvme" and not is_first and not stays:
            last = self._log.written_gradients.get(unit)
            before.append(self._log.nvme(READ, name, nbytes, [last, *freed]))
        if touched_nbytes:
            duration_s = touched_nbytes / self._log.rates.host
            summed = self._log.add(self._log.update_track, name, duration_s, after=before)
        else:
            summed = self._log.join(name, before)
        self._in_memory[unit] = summed
        if tier == "nvme" and not stays:
            written = self._log.nvme(WRITE, name, nbytes, [summed])
            self._log.written_gradients[unit] = written
            # The step waits for no write of a sum that is in memory.
            summed = summed if unit in self._log.sums.held else written
        self.out.append(summed)
        return summed

    def measure(self, unit: int) -> None:
        """Adds the norms of a unit's gradients, of which no further one comes. The step waits for
        the norms. Those of sums that are still to be sent follow at the end of the backward.

        On the host they are computed by the thread that trains. Beside a device other threads do,
        in the backward, also of copies of what rests on the device of one rank. Over ranks a device
        measures what rests there, in no time.
        """
        job, rates, load = self._log.job, self._log.rates, self._log.job.units[unit]
        nbytes, largest_nbytes = load.gradient_nbytes, load.largest_nbytes
        name = f"norms of {load.name}"
        if not job.takes_norms or not nbytes or unit in self.sums:
            return
        is_on_device = load.gradients == "device" and not job.shares_host_memory
        if is_on_device and load.sharded is not NOT_SHARDED:
            return
        after = [self._in_memory.get(unit)]
        if is_on_device:
            if load.looked_up_nbytes is not None:
                nbytes = largest_nbytes = load.looked_up_nbytes
            after = [self._log.move(D2H, name, nbytes, [self._log.last_on.get(COMPUTE)])]
        if job.shares_host_memory:
            duration_s = nbytes / min(rates.norm, rates.host)
            self._log.add(self._log.update_track, name, duration_s, after=after)
        else:
            self.norms.append(self._log.add(NORMS, name, rates.norms_s(nbytes), after=after))
            self._last_norm_s = rates.last_norm_s(nbytes, largest_nbytes)

    def end_backward(self) -> None:
        """Sends the sums of a rank that sums its own gradients of a step first, and adds the norms
        that are computed when all gradients are there."""
        sums, self.sums = self.sums, {}
        for unit, ready in sums.items():
            self._send_sums(unit, ready)
            self.measure(unit)
        if self.norms:  # Others were measured beside the largest tensor of this last unit.
            name = "norms of the largest tensor"
            self.norms.append(self._log.add(NORMS, name, self._last_norm_s, after=self.norms[-1:]))

    def _send_gradients(self, unit: int, after: Sequence[int | None], *, is_first: bool) -> None:
        """Sends the device's gradients of the full unit to their owners; this rank sums its own
        part."""
        load = self._log.job.units[unit]
        sharded, name = load.sharded, f"gradients of {load.name}"
        if sharded.are_gradients_between_devices:
            out = self._log.exchange("sent", name, sharded, after, is_by_device=True)
            if load.gradients == "device" or not load.gradient_nbytes:
                self.out.append(out)
                return
            freed = self._free_gradient_buffer(load.gradients)
            out = self._log.move(D2H, name, load.gradient_nbytes, [out, *freed])
            touched_nbytes = (1 if is_first else 3) * load.gradient_nbytes
            nbytes = load.gradient_nbytes
            self._sum_up(unit, load.gradients, nbytes, touched_nbytes, out, is_first=is_first)
            return
        if not self._log.job.shares_host_memory:
            after = [self._log.move(D2H, name, load.leaving_nbytes, after)]
        self._send_from_host(unit, after, is_first=is_first)

    def _send_from_host(self, unit: int, after: Sequence[int | None], *, is_first: bool) -> None:
        load = self._log.job.units[unit]
        sharded, name = load.sharded, f"gradients of {load.name}"
        out = self._log.exchange("sent", name, sharded, after, is_by_device=False)
        # Each rank's gradients are read, widened to fp32, divided and added; then the sum is
        # written.
        touched_nbytes = (3 * sharded.count + (2 if is_first else 3)) * load.gradient_nbytes
        nbytes = load.gradient_nbytes
        summed = self._sum_up(unit, load.gradients, nbytes, touched_nbytes, out, is_first=is_first)
        if load.gradients == "device" and not self._log.job.shares_host_memory:
            self.out[-1] = self._log.move(H2D, name, load.gradient_nbytes, [summed])

    def _send_sums(self, unit: int, ready: int) -> None:
        load = self._log.job.units[unit]
        sharded, name = load.sharded, f"gradients of {load.name}"
        assert sharded.sums is not None
        after: list[int | None] = [ready, self._log.last_on[COMPUTE]]
        if sharded.are_gradients_between_devices:
            self._send_gradients(unit, after, is_first=True)
            return
        if sharded.sums == "nvme":
            after.append(self._log.nvme(READ, name, sharded.sums_nbytes, after))
        elif sharded.sums == "device" and not self._log.job.shares_host_memory:
            after.append(self._log.move(D2H, name, sharded.sums_nbytes, after))
        self._send_from_host(unit, after, is_first=True)
