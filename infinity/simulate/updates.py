"""Updates of units by the optimizer, in the simulated step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from infinity.simulate.log import COMPUTE, D2H, H2D, READ, WRITE, OperationLog
from infinity.simulate.memory import fetched_nbytes
from infinity.simulate.spec import NOT_SHARDED, UnitLoad
from infinity.tiers.spare import SpareMemory


class UnitUpdates:
    """Appends updates. `unwritten`: updated weights by unit, with the update."""

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self.unwritten: dict[int, int] = {}
        # The operations that free segments of the ring, oldest first.
        self._ring: list[tuple[int, ...]] = []
        self._all_fetched_nbytes = fetched_nbytes(log.job)
        is_alone = all(unit.sharded is NOT_SHARDED for unit in log.job.units)
        self._defers = log.job.defers
        self._rides_along = self._defers and log.job.reads_ahead and is_alone
        # Host memory that nobody else needs: new state takes it, or more staging slots.
        self.spare_nbytes = self._spare_nbytes()
        self._ring_nbytes = log.job.ring_nbytes + (self.spare_nbytes if is_alone else 0.0)

    def _spare_nbytes(self) -> float:
        """Returns the host memory that is left when all weights are kept, those sums of gradients
        that stay, and the weights of updated shards."""
        job = self._log.job
        if not (self._defers and job.reads_ahead):
            return 0
        kept_nbytes = sum(job.units[unit].gradient_nbytes for unit in self._log.sums.held)
        kept_nbytes += sum(
            load.written_nbytes
            for load in job.units
            if load.sharded.is_gathered and load.weights == "nvme" and load.update_nbytes
        )
        spare = SpareMemory(job.weights_cache_nbytes, self._all_fetched_nbytes, kept_nbytes)
        return max(0.0, spare.unclaimed_nbytes)

    def can_go_back(self, load: UnitLoad) -> bool:
        """Whether the unit can be updated before the step decides (design/0003)."""
        if not load.update_nbytes or load.changes_on_device:
            return False
        is_on_nvme = load.weights == "nvme" or bool(load.state_write_nbytes.get("nvme"))
        return is_on_nvme or not self._log.job.shares_host_memory

    def beside_nbytes(self, load: UnitLoad) -> int:
        """Returns the bytes of state on the host beside which an early update writes new ones."""
        changed_nbytes = (load.update_nbytes - load.gradient_nbytes) // 2
        on_nvme_nbytes = load.state_write_nbytes.get("nvme", 0)
        on_nvme_nbytes += load.written_nbytes if load.weights == "nvme" else 0
        return max(0, changed_nbytes - on_nvme_nbytes)

    def stays(self, load: UnitLoad) -> bool:
        """Whether weights on NVMe are still cached when the step changes them. The model assumes so
        only if all of them fit in memory."""
        return (
            load.weights == "nvme"
            and self._all_fetched_nbytes <= self._log.job.weights_cache_nbytes
        )

    def at_step(self, unit: int) -> None:
        """Adds the update of a unit, if it has one, inside `optimizer.step()`.

        Assembled weights are updated past the weight cache (design/0003), so shards are read.
        """
        load = self._log.job.units[unit]
        if not load.update_nbytes:
            return
        ready = None
        is_kept = not load.sharded.is_gathered and self.stays(load)
        if load.weights == "nvme" and not is_kept:
            last = self._log.written_weights.get(unit)
            name = f"weights of {load.name}"
            ready = self._log.nvme(READ, name, load.weight_nbytes, [last, self._log.decided[-1]])
        done = self.update(unit, ready)
        self._log.last_on[COMPUTE] = self._log.add(COMPUTE, f"updated {load.name}", after=[done])

    def of_shard(self, unit: int, ready: int, *, is_kept: bool) -> int:
        """Adds the update of this rank's shard by a thread beside the passes, after `ready`: the
        decision, or the sum that an early update reads. The thread reads and writes
        weights where they rest (design/0003), unless they are kept in memory."""
        load, begins = self._log.job.units[unit], ready
        if load.weights == "nvme" and not is_kept:
            last = self._log.written_weights.get(unit)
            ready = self._log.nvme(
                READ, f"weights of {load.name}", load.weight_nbytes, [last, ready]
            )
        return self.update(unit, ready, begins=begins)

    def publish(self, units: Iterable[int], after: Sequence[int | None]) -> int | None:
        """Adds the copies home of weights on the host that shards' early updates have made beside
        their home (design/0003). Returns their end, if there are any."""
        loads = [self._log.job.units[unit] for unit in units]
        moved_nbytes = 2 * sum(
            load.written_nbytes
            for load in loads
            if load.sharded.is_gathered and load.weights == "host"
        )
        if not moved_nbytes:
            return None
        duration_s = moved_nbytes / self._log.rates.update
        return self._log.add(self._log.update_track, "new weights", duration_s, after=after)

    def update(self, unit: int, weights_ready: int | None, begins: int | None = None) -> int:
        """Reads state a segment at a time, updates it and writes it back; then writes the weights.
        State that is not read ahead is read after `begins`; None: after the decision."""
        job, load = self._log.job, self._log.job.units[unit]
        decided = self._log.decided[-1]
        # Weights on the device come to the host, and return, unless the device updates them there.
        stay = job.updates_on_device and load.full_master in (None, "device")
        travels = load.weights == "device" and not job.shares_host_memory and not stay
        if travels and load.checked_out_nbytes:
            weights_ready = self._log.move(
                D2H, f"weights of {load.name}", load.checked_out_nbytes, [decided]
            )
        resident_nbytes = max(sum(load.state_read_nbytes.values()), 1)
        count = _num_segments(resident_nbytes, job.ring_nbytes)
        capacity = max(1, int(self._ring_nbytes * count // resident_nbytes))
        done = weights_ready
        for segment in range(count):
            done = self._update_segment(unit, segment, count, capacity, weights_ready, begins)
        assert done is not None
        if load.weights == "nvme":
            if job.shares_host_memory and self._defers and not load.sharded.is_gathered:
                self.unwritten[unit] = done  # The pages are under the model until it has run.
            else:
                self.write_weights(unit, [done])
        elif travels:
            done = self._log.move(H2D, f"weights of {load.name}", load.written_nbytes, [done])
        return done

    def write_weights(self, unit: int, after: Sequence[int]) -> None:
        """Adds the write of updated weights to NVMe."""
        load = self._log.job.units[unit]
        name = f"weights of {load.name}"
        self._log.written_weights[unit] = self._log.nvme(WRITE, name, load.written_nbytes, after)

    def _update_segment(
        self,
        unit: int,
        segment: int,
        count: int,
        capacity: int,
        weights_ready: int | None,
        begins: int | None,
    ) -> int:
        job, load = self._log.job, self._log.job.units[unit]
        name = f"state of {load.name}"

        def share(nbytes: int) -> int:
            return nbytes * (segment + 1) // count - nbytes * segment // count

        is_sum_held = unit in self._log.sums.held
        before: list[int | None] = [self._log.written_state.get((unit, segment))]
        if not is_sum_held:
            before.append(self._log.written_gradients.get(unit))
        begins = self._log.decided[-1] if begins is None else begins
        # State is read ahead of the decision, over ranks if its gradients are in memory.
        has_gradients = is_sum_held or load.gradients != "nvme"
        if not (self._rides_along or (self._defers and job.reads_ahead and has_gradients)):
            before.append(begins)
        if any(load.state_read_nbytes.values()):
            if len(self._ring) >= capacity:
                before += self._ring[-capacity]
            if not job.reads_ahead:
                before.append(self._log.last_on.get(COMPUTE))
        reads = []
        if load.state_read_nbytes.get("nvme"):
            kept_nbytes = load.gradient_nbytes if is_sum_held else 0
            nbytes = share(load.state_read_nbytes["nvme"] - kept_nbytes)
            reads.append(self._log.nvme(READ, name, nbytes, before))
        is_on_device = job.updates_on_device and not job.shares_host_memory
        if load.state_read_nbytes.get("device") and not is_on_device:
            reads.append(self._log.move(D2H, name, share(load.state_read_nbytes["device"]), before))
        before = [*reads, weights_ready, self._log.decided[-1], begins]
        if is_on_device:
            updated = self._update_on_device(load, name, share, before)
        else:
            moved_nbytes = load.update_nbytes - job.narrowed_nbytes(load)
            duration_s = share(moved_nbytes) / self._log.rates.update
            updated = self._log.add(self._log.update_track, name, duration_s, after=before)
        free = [updated]
        if load.state_write_nbytes.get("nvme"):
            nbytes = share(load.state_write_nbytes["nvme"])
            written = self._log.nvme(WRITE, name, nbytes, [updated])
            self._log.written_state[unit, segment] = written
            free.append(written)
        if load.state_write_nbytes.get("device") and not is_on_device:
            free.append(
                self._log.move(H2D, name, share(load.state_write_nbytes["device"]), [updated])
            )
        if reads:
            self._ring.append(tuple(free))
        return updated

    def _update_on_device(
        self, load: UnitLoad, name: str, share: Callable[[int], int], before: Sequence[int | None]
    ) -> int:
        """Adds the update of a segment by the device. State that rests elsewhere moves there, and
        what is changed of it returns; state that rests on the device is updated where it is."""
        log = self._log
        changed_nbytes = (load.update_nbytes - load.gradient_nbytes) // 2
        inward_nbytes = changed_nbytes + load.gradient_nbytes
        inward_nbytes -= load.state_read_nbytes.get("device", 0)
        outward_nbytes = changed_nbytes - load.state_write_nbytes.get("device", 0)
        if load.weights == "device":  # They stay there, or are made of their master.
            inward_nbytes -= load.written_nbytes
            outward_nbytes -= load.written_nbytes
        after = list(before)
        if inward_nbytes:
            # Until then the target memory on the device may be in use.
            after = [log.move(H2D, name, share(inward_nbytes), [*before, log.last_on.get(COMPUTE)])]
        duration_s = share(load.update_nbytes) / log.rates.device_update
        updated = log.add(COMPUTE, name, duration_s, after=after)
        if outward_nbytes:
            updated = log.move(D2H, name, share(outward_nbytes), [updated])
        return updated


# More segments make the prediction slower, but not better.
_MOST_SEGMENTS = 8
_WANTED_IN_RING = 3


def _num_segments(state_nbytes: int, ring_nbytes: float) -> int:
    """Returns the segments of one unit's state: three of them in the ring if possible."""
    wanted = -(-state_nbytes * _WANTED_IN_RING // max(int(ring_nbytes), 1))
    return min(max(wanted, 1), _MOST_SEGMENTS)
