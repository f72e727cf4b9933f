"""Fetches of weights to the place of use, in the simulated step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.simulate.cache import Visit, visits
from infinity.simulate.log import CHECKPOINT_READ, COMPUTE, D2H, H2D, NUM_STEPS, READ, OperationLog
from infinity.simulate.memory import inputs_nbytes, kept_shards
from infinity.simulate.order import Move, Use, moves
from infinity.simulate.spec import UnitLoad
from infinity.tiers.ranges import rounded_nbytes


class Fetches:
    """Decides which uses fetch, as the weight cache does, and appends the fetches.

    `agreed`: the operation at which all ranks have completed the step before. `updated`: by unit,
    the last update of this rank's shard after a step. Those of other ranks take as long.
    """

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        job = log.job
        self.moves = moves(
            job.uses, num_fibers=job.num_fibers, tile_micro_batches=job.tile_micro_batches,
            backward_ratio=job.backward_ratio, keeps_experts=job.keeps_experts,
        )  # fmt: skip
        self._host, self._device = self._visits()
        self.kept = kept_shards(job, (unit for move in self.moves for unit in self.units_of(move)))
        self._updated_since: set[int] = set()  # Shards that no use has read since their update.
        # Visit -> the operations that free its space.
        self._host_free: dict[int, tuple[int, ...]] = {}
        self._device_free: dict[int, tuple[int, ...]] = {}
        # Visit -> the copy of stored weights to the device, after which their host memory is free;
        # or, of a use that has not computed, their read.
        self._copied: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._visit = 0
        self._space_of_staged: Sequence[int] = ()  # What gave space to those staged last.
        self.agreed: int | None = None
        self.updated: dict[int, int] = {}

    def _visits(self) -> tuple[Sequence[Visit], Sequence[Visit]]:
        job = self._log.job
        # Gradients on their way to NVMe are summed in host memory, one unit at a time.
        summed = [
            rounded_nbytes(nbytes) if tier == "nvme" and nbytes else 0
            for tier, nbytes in (unit.sums for unit in job.units)
        ]
        places = [(unit, move) for move in self.moves for unit in self.units_of(move)]
        saved = [
            nbytes
            for move, nbytes in zip(self.moves, inputs_nbytes(job, self.moves), strict=True)
            for _ in self.units_of(move)
        ]
        order = tuple(unit for unit, _ in places)
        held = tuple(move.held for _, move in places)
        # Stored weights in use are somewhere else, decoded: their stored bytes may leave.
        stored = {index for index, unit in enumerate(job.units) if unit.weights == "checkpoint"}
        held_on_host = tuple(
            tuple(unit for unit in move.held if unit not in stored) for _, move in places
        )
        taken_nbytes = tuple(
            nbytes + (summed[unit] if move.has_gradients else 0)
            for (unit, move), nbytes in zip(places, saved, strict=True)
        )
        passes = NUM_STEPS * job.num_micro_batches
        first_passes = range(0, passes, job.num_micro_batches)
        travelling = tuple(
            rounded_nbytes(u.fetched_nbytes) if u.fetched_nbytes else 0 for u in job.units
        )
        changing = frozenset(index for index, unit in enumerate(job.units) if unit.is_changed)
        # A step drops the weights in host memory that are assembled there, and those of a shard
        # that is updated where it rests.
        sharded, defers = [unit.sharded for unit in job.units], job.defers
        outdated = frozenset(
            i for i in changing
            if sharded[i].is_gathered_on_host or (sharded[i].is_gathered and defers)
        )  # fmt: skip
        if job.device_cache_nbytes is None:
            device: Sequence[Visit] = [Visit(unit, True) for unit in order] * passes
            skipped: frozenset[int] = frozenset()
        else:
            away = tuple(u.used_nbytes if u.is_away else 0 for u in job.units)
            device = visits(
                order, away, job.device_cache_nbytes,
                num_passes=passes, stale=first_passes, changing=changing, held=held,
                in_turns=job.reads_ahead,
            )  # fmt: skip
            skipped = frozenset(i for i, visit in enumerate(device) if visit.is_hit)
        host = visits(
            order, travelling, job.weights_cache_nbytes,
            num_passes=passes, skipped=skipped, taken_nbytes=taken_nbytes,
            held=held_on_host, stale=first_passes if outdated else (), changing=outdated,
            in_turns=job.reads_ahead and not job.shares_host_memory and bool(stored),
            is_arena=bool(stored),
        )  # fmt: skip
        return host, device

    def units_of(self, move: Move) -> tuple[int, ...]:
        """Returns the units in the order in which they are fetched."""
        units = self._log.job.uses[move.use].units
        return units[::-1] if move.is_backward else units

    def to_host(self, unit: int, *, is_updated: bool) -> int | None:
        """Begins the next visit: fetches its weights to host memory if it needs them there.
        `is_updated`: the host updates them before their use."""
        host, device = self._host[self._visit], self._device[self._visit]
        self._visit += 1
        if is_updated or self._log.job.shares_host_memory or not device.is_hit:
            ready = self._fetch(unit, host)
            if ready is not None:
                self._read[self._visit - 1] = ready
            return ready
        return None

    def to_device(self, unit: int, ready: int | None) -> int | None:
        """Brings weights of the visit that has begun to the device, after `ready`; returns the
        operation that the use waits for."""
        load, device = self._log.job.units[unit], self._device[self._visit - 1]
        if not device.is_hit:
            freed = [
                operation for seen in device.evicts for operation in self._device_free.get(seen, ())
            ]
            name, sharded = f"weights of {load.name}", load.sharded
            is_staged = self._log.job.stages_ahead and load.decoded_nbytes > 0
            awaited = self._space_of_staged if is_staged else freed
            after = [ready, *awaited, self.agreed, self.updated.get(unit)]
            if load.inward_nbytes:
                ready = self._log.move(H2D, name, load.inward_nbytes, after)
                if load.weights == "checkpoint" and not sharded.is_gathered:
                    self._copied[self._visit - 1] = ready
            if sharded.is_gathered and sharded.are_weights_between_devices:
                ready = self._log.exchange(
                    "received", name, sharded, [ready, *after], is_by_device=True
                )
            if is_staged:
                # The next one is asked for when this one is decoded.
                ready, self._space_of_staged = self._log.join(name, [ready, *freed]), freed
        return ready

    def note_updated(self, units: Iterable[int]) -> None:
        """Notes that the shards of these units are updated: what is kept of them is new."""
        self._updated_since.update(units)

    def _fetch(self, unit: int, visit: Visit) -> int | None:
        if visit.is_hit:
            return None
        load = self._log.job.units[unit]
        after: list[int | None]
        is_kept = unit in self._updated_since and unit in self.kept.for_use
        self._updated_since.discard(unit)
        after = [operation for seen in visit.evicts for operation in self._host_freed(seen)]
        after += [self._log.written_weights.get(unit), self.updated.get(unit)]
        if not self._log.job.reads_ahead:
            after.append(self._log.last_on.get(COMPUTE))
        name, sharded = f"weights of {load.name}", load.sharded
        if not sharded.is_gathered_on_host:
            if is_kept:
                return self._log.join(name, after)
            traffic = CHECKPOINT_READ if load.weights == "checkpoint" else READ
            return self._log.nvme(traffic, name, load.weight_nbytes, after)
        after.append(self.agreed)
        nbytes = 0 if is_kept else load.weight_nbytes + sharded.served_nbytes
        ready = self.read_parts(load, nbytes, after) if nbytes else []
        return self._log.exchange("received", name, sharded, [*after, *ready], is_by_device=False)

    def _host_freed(self, seen: int) -> Sequence[int]:
        """Returns the operations that free a visit's host memory. Of the use that has begun, stored
        bytes that are copied, or else read, may go for the next unit's."""
        if seen in self._host_free:
            return self._host_free[seen]
        last = self._copied.get(seen, self._read.get(seen))
        return () if last is None else (last,)

    def read_parts(
        self, load: UnitLoad, nbytes: int, after: Sequence[int | None]
    ) -> list[int | None]:
        """Reads weights from their tier on this rank, for this rank and for the others, which
        request them at the same time."""
        name = f"weights of {load.name}"
        if load.weights == "nvme":
            return [self._log.nvme(READ, name, nbytes, after)]
        if load.weights == "device" and not self._log.job.shares_host_memory:
            return [self._log.move(D2H, name, nbytes, after)]
        return []

    def release(self, use: Use, computed: int) -> None:
        """Frees the space of ended visits and writes changed weights."""
        first = self._visit - len(use.units)
        for visit in range(first, self._visit):
            written = self._log.written_weights.get(self._host[visit].unit)
            free = (computed,) if written is None else (computed, written)
            copied = self._copied.pop(visit, None)
            self._read.pop(visit, None)
            self._host_free[visit] = free if copied is None else (copied,)
            self._device_free[visit] = free
