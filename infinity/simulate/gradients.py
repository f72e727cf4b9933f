"""Gradients on their way to where they are summed, in the simulated step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.simulate.log import COMPUTE, D2H, GATHER, H2D, READ, WRITE, OperationLog


class GradientTraffic:
    """Appends what happens to gradients after a backward.

    `out`: the operations after which gradients of the step are at rest. `sums`: by unit, the
    operation that completes this rank's sum.
    """

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self.out: list[int] = []
        self.sums: dict[int, int] = {}

    def leave(self, unit: int, *, is_first: bool) -> None:
        """Adds the transfers of a unit's gradients when the backward leaves the unit.

        `is_first`: no micro-batch of this step has left it before.
        """
        load = self._log.job.units[unit]
        tier, nbytes = load.sums
        name, out = f"gradients of {load.name}", self._log.last_on[COMPUTE]
        of = load.divided
        if of is not None and of.sums is None:
            if load.is_changed:
                self._give(unit, [out], is_first=is_first)
            return
        if not nbytes:
            return
        if self._log.rates.gather is not None:
            duration_s = load.weight_nbytes / self._log.rates.gather
            out = self._log.add(GATHER, name, duration_s, after=[out], nbytes=load.weight_nbytes,
                                traffic=GATHER)  # fmt: skip
        if of is not None:
            self.sums[unit] = out
        if tier == "device":
            self.out.append(out)
            return
        room = self._room_for_gradients(tier)
        if not self._log.job.shares_host_memory:
            out = self._log.move(D2H, name, load.leaving_nbytes, [out, *room])
        # The gradient is copied or added (it is read, and the sum is read and written), then read
        # for the norm.
        touched_nbytes = (2 if is_first else 3) * nbytes + nbytes
        if not self._log.job.shares_host_memory and is_first:
            touched_nbytes = nbytes  # The copy engine has moved them,
            if load.leaving_nbytes < nbytes:  # and they are widened.
                touched_nbytes += load.leaving_nbytes + nbytes
        summed = self._sum_up(
            unit, tier, nbytes, touched_nbytes, after=[out, *room], is_first=is_first
        )
        if of is not None:
            self.sums[unit] = summed

    def _room_for_gradients(self, tier: str) -> list[int | None]:
        """Gradients on their way to NVMe are in memory, a few units at a time."""
        if tier == "nvme" and len(self.out) >= self._log.job.num_gradient_buffers:
            return [self.out[-self._log.job.num_gradient_buffers]]
        return [None]

    def _sum_up(
        self, unit: int, tier: str, nbytes: int, touched_nbytes: int, *,
        after: Sequence[int | None], is_first: bool,
    ) -> int:  # fmt: skip
        """Adds gradients that reached the host to the sum there, or on NVMe."""
        name, before = f"gradients of {self._log.job.units[unit].name}", list(after)
        if tier == "nvme" and not is_first:
            last = self._log.written.gradients.get(unit)
            before.append(self._log.nvme(READ, name, nbytes, [last, *after[1:]]))
        summed = self._log.add(
            self._log.update_track, name, touched_nbytes / self._log.rates.host, after=before
        )
        if tier == "nvme":
            summed = self._log.nvme(WRITE, name, nbytes, [summed])
            self._log.written.gradients[unit] = summed
        self.out.append(summed)
        return summed

    def _give(self, unit: int, after: Sequence[int | None], *, is_first: bool) -> None:
        """Sends the device's gradients of the full unit to their owners; this rank sums its own
        part."""
        load = self._log.job.units[unit]
        of, name = load.divided, f"gradients of {load.name}"
        assert of is not None
        if of.are_gradients_between_devices:
            out = self._log.send("given", name, of.given_nbytes, after, is_by_device=True)
            if load.gradients == "device" or not load.gradient_nbytes:
                self.out.append(out)
                return
            room = self._room_for_gradients(load.gradients)
            out = self._log.move(D2H, name, load.gradient_nbytes, [out, *room])
            touched_nbytes = (1 if is_first else 3) * load.gradient_nbytes
            self._sum_up(unit, load.gradients, load.gradient_nbytes, touched_nbytes,
                         after=[out, *room], is_first=is_first)  # fmt: skip
            return
        if not self._log.job.shares_host_memory:
            after = [self._log.move(D2H, name, load.leaving_nbytes, after)]
        self._give_from_host(unit, after, is_first=is_first)

    def _give_from_host(self, unit: int, after: Sequence[int | None], *, is_first: bool) -> None:
        load = self._log.job.units[unit]
        of, name = load.divided, f"gradients of {load.name}"
        assert of is not None
        out = self._log.send("given", name, of.given_nbytes, after, is_by_device=False)
        # Each rank's gradients are read, widened to fp32, divided and added; then the sum is
        # written.
        touched_nbytes = (3 * of.count + (2 if is_first else 3)) * load.gradient_nbytes
        room = self._room_for_gradients(load.gradients)
        summed = self._sum_up(unit, load.gradients, load.gradient_nbytes, touched_nbytes,
                              after=[out, *room], is_first=is_first)  # fmt: skip
        if load.gradients == "device" and not self._log.job.shares_host_memory:
            self.out[-1] = self._log.move(H2D, name, load.gradient_nbytes, [summed])

    def give_sums(self, unit: int, ready: int) -> None:
        """Sends the sums of a rank that sums its own gradients of a step first."""
        load = self._log.job.units[unit]
        of, name = load.divided, f"gradients of {load.name}"
        assert of is not None and of.sums is not None
        after: list[int | None] = [ready, self._log.last_on[COMPUTE]]
        if of.are_gradients_between_devices:
            self._give(unit, after, is_first=True)
            return
        if of.sums == "nvme":
            after.append(self._log.nvme(READ, name, of.sums_nbytes, after))
        elif of.sums == "device" and not self._log.job.shares_host_memory:
            after.append(self._log.move(D2H, name, of.sums_nbytes, after))
        self._give_from_host(unit, after, is_first=True)
