"""The operations of training steps, as the engine would issue them, for `simulate`.

Forward: each unit's weights are fetched, its pending update is applied, then the unit computes.
Backward: weights are fetched again in reverse order, and gradients are written out. The optimizer
decides when the last gradient is at rest. Pure: no torch, no I/O, no clock.

Tracks: compute, update (the host's thread), nvme, h2d, d2h, gather (between devices), sockets
(between the hosts of ranks). If the device is the host itself, compute and update are one thread
and one track.

With ranks, the job is that of one rank, beside other ranks that do the same at the same time. A
shared unit has a `Divided`, and every resource of the node that ranks share is given as this rank's
part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from infinity.simulate.cache import Visit, visits
from infinity.simulate.clock import Operation, Timeline, simulate
from infinity.simulate.order import Move, Use, moves
from infinity.tiers.ranges import rounded_nbytes

COMPUTE, UPDATE, NVME, H2D, D2H, GATHER = "compute", "update", "nvme", "h2d", "d2h", "gather"
SOCKETS = "sockets"
READ, WRITE = "nvme_read", "nvme_write"


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of the links and processors of a node, all devices together: bytes and FLOPs per
    second.

    `nvme_mixed` is the sum of both directions if equal amounts are read and written. `update`
    counts every byte that the optimizer's pass reads or writes. `host` counts the bytes of summed
    gradients. `hold` counts the bytes of weights that the engine maps under a computation on the
    host. `device_update` is `update` on the devices. `gather` is None with one device.

    With ranks, `peers` is the rate at which a rank's device receives from the other devices, and
    `sockets` that at which its host receives. Sending takes as long.
    """

    flops: float
    update: float
    host: float
    hold: float = float("inf")
    device_update: float = float("inf")
    nvme_read: float = float("inf")
    nvme_write: float = float("inf")
    nvme_mixed: float = float("inf")
    h2d: float = float("inf")
    d2h: float = float("inf")
    gather: float | None = None
    peers: float = float("inf")
    sockets: float = float("inf")

    def nvme_s(self, read_nbytes: float, write_nbytes: float) -> float:
        """Returns the least time to read and write these bytes, in any useful interleaving."""
        alone_s = read_nbytes / self.nvme_read + write_nbytes / self.nvme_write
        both_nbytes = min(read_nbytes, write_nbytes)
        mixed_s = (
            2 * both_nbytes / self.nvme_mixed
            + (read_nbytes - both_nbytes) / self.nvme_read
            + (write_nbytes - both_nbytes) / self.nvme_write
        )
        least_s = max(read_nbytes / self.nvme_read, write_nbytes / self.nvme_write)
        return max(min(alone_s, mixed_s), least_s)


def drive_rates(read: float, write: float, mixed: float | None) -> dict[str, float]:
    """Returns the drives' part of `Rates`. Without a rate for both directions at the same time,
    reads and writes alternate."""
    mixed = 2 / (1 / read + 1 / write) if mixed is None else mixed
    return {"nvme_read": read, "nvme_write": write, "nvme_mixed": mixed}


@dataclass(frozen=True, slots=True)
class Divided:
    """The traffic of one rank for a unit whose state is shared by `count` ranks.

    Data that the ranks' devices do not exchange directly passes between their hosts. `got_nbytes`
    of weights are the other ranks' parts. If they pass between hosts, `served_nbytes` of this
    rank's part are read from their tier for the others. `given_nbytes` of gradients are sent to
    their owners.
    """

    count: int
    whole_nbytes: int  # Of weights, in the form in which they are used.
    # Every fetch gathers the weights (stage 3); otherwise every rank has all of them.
    is_put_together: bool
    are_weights_between_devices: bool
    are_gradients_between_devices: bool
    got_nbytes: int
    served_nbytes: int
    given_nbytes: int
    # Stage 1: the place where this rank sums its gradients of a step before it sends them.
    sums: str | None = None
    sums_nbytes: int = 0

    @property
    def comes_to_host(self) -> bool:
        return self.is_put_together and not self.are_weights_between_devices


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """One unit in the simulated schedule. `weights` is the tier where they rest; bytes are by tier
    name.

    With ranks, the weights are those that rest on this rank: all of the unit's, or its part. State
    and gradients are its part. `leaving_nbytes` are of the full unit.
    """

    name: str
    weights: str
    weight_nbytes: int
    written_nbytes: int  # Of the weights, by an update.
    state_read_nbytes: Mapping[str, int]
    state_write_nbytes: Mapping[str, int]
    update_nbytes: int  # Touched in memory by the optimizer's pass; 0 for a frozen unit.
    gradients: str
    gradient_nbytes: int
    leaving_nbytes: int  # Of a gradient that leaves a device, in its own dtype.
    divided: Divided | None = None

    @property
    def used_nbytes(self) -> int:
        """Bytes of weights that are computed with."""
        return self.weight_nbytes if self.divided is None else self.divided.whole_nbytes

    @property
    def fetched_nbytes(self) -> int:
        """Bytes of weights that a use fetches to host memory."""
        if self.divided is not None and self.divided.comes_to_host:
            return self.divided.whole_nbytes
        return self.weight_nbytes if self.weights == "nvme" else 0

    @property
    def inward_nbytes(self) -> int:
        """Bytes of weights that a use copies from the host to a device."""
        if self.divided is None or not self.divided.is_put_together:
            return self.weight_nbytes
        if self.divided.comes_to_host:
            return self.divided.whole_nbytes
        return self.weight_nbytes if self.weights != "device" else 0

    @property
    def is_away(self) -> bool:
        """Whether the weights rest off the device."""
        is_put_together = self.divided is not None and self.divided.is_put_together
        return is_put_together or self.weights != "device"

    @property
    def is_changed(self) -> bool:
        """Whether a step changes the unit, on any rank."""
        return self.update_nbytes > 0 or (
            self.divided is not None and self.divided.given_nbytes > 0
        )

    @property
    def sums(self) -> tuple[str, int]:
        """The place where the backward sums gradients, and the fp32 bytes there."""
        if self.divided is not None and self.divided.sums is not None:
            return self.divided.sums, self.divided.sums_nbytes
        return self.gradients, self.gradient_nbytes


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Everything that the prediction depends on, except the machine's speed.

    `weights_cache_nbytes` is host memory for weights in transit, and `device_cache_nbytes` the same
    on the device (None if it computes on host memory). `ring_nbytes` of state are in memory at the
    same time. `backward_ratio` is the backward's FLOPs over the forward's: 2, or 3 with
    recomputation. A micro-batch may stand for `num_fibers` of them that pass block by block,
    `tile_micro_batches` at a time in a block with tiles.
    """

    units: tuple[UnitLoad, ...]
    uses: tuple[Use, ...]
    num_micro_batches: int
    backward_ratio: float
    weights_cache_nbytes: float
    device_cache_nbytes: float | None
    ring_nbytes: float
    num_gradient_buffers: int = 2
    reads_ahead: bool = True
    is_deferred: bool = True
    updates_on_device: bool = False
    saved_on: str = "device"
    num_fibers: int = 1
    tile_micro_batches: int = 1

    @property
    def shares_host_memory(self) -> bool:
        return self.device_cache_nbytes is None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step in the steady state. 0 in `timeline` is the start of the step. Fetches for this step
    that run during the step before have negative times."""

    step_s: float
    busy_s: Mapping[str, float]
    moved_nbytes: Mapping[str, int]
    timeline: Timeline

    @property
    def binding(self) -> str:
        """The track that is busy longest. The step cannot be faster than this track."""
        return max(self.busy_s, key=lambda track: self.busy_s[track])


# By the last step but one the caches and queues are in their steady state. The last step exists to
# compete with it for the links.
_NUM_STEPS = 5
_SHOWN = _NUM_STEPS - 2


def predict(job: StepSpec, rates: Rates) -> Prediction:
    """Predicts a step among equal steps, from one decision of the optimizer to the next."""
    draft = _Draft(job, rates)
    for step in range(_NUM_STEPS):
        draft.add_step(step)
    operations = _with_nvme_times(draft.operations, rates)
    timeline = simulate(operations)
    begin_s, end_s = (
        timeline.finish_s[decided] for decided in draft.decided[_SHOWN - 1 : _SHOWN + 1]
    )
    shown = [i for i, each in enumerate(operations) if each.step == _SHOWN]
    busy_s: defaultdict[str, float] = defaultdict(float)
    moved_nbytes: defaultdict[str, int] = defaultdict(int)
    for index in shown:
        busy_s[operations[index].track] += operations[index].duration_s
        if operations[index].traffic:
            moved_nbytes[operations[index].traffic] += operations[index].nbytes
    return Prediction(
        step_s=end_s - begin_s,
        busy_s=dict(busy_s),
        moved_nbytes=dict(moved_nbytes),
        timeline=Timeline(
            tuple(operations[i] for i in shown),
            tuple(timeline.start_s[i] - begin_s for i in shown),
            tuple(timeline.finish_s[i] - begin_s for i in shown),
        ),
    )


def _with_nvme_times(drafted: Sequence[Operation], rates: Rates) -> list[Operation]:
    """Sets the times of drive transfers. If a pass reads and writes, the drives do both at the same
    time, so each byte of the pass takes an equal share of the total time."""
    totals: defaultdict[tuple[int, str], dict[str, int]] = defaultdict(lambda: {READ: 0, WRITE: 0})
    for each in drafted:
        if each.track == NVME:
            totals[each.step, _pass(each)][each.traffic] += each.nbytes
    s_per_byte = {
        key: rates.nvme_s(moved[READ], moved[WRITE]) / max(sum(moved.values()), 1)
        for key, moved in totals.items()
    }
    return [
        replace(each, duration_s=each.nbytes * s_per_byte[each.step, _pass(each)])
        if each.track == NVME
        else each
        for each in drafted
    ]


def _pass(operation: Operation) -> str:
    return operation.name.partition(":")[0]


# -- Drafting --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LastWrites:
    """The operations that a later read of the same bytes waits for, by unit."""

    weights: dict[int, int] = field(default_factory=dict)
    state: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)


class _Draft:
    """Appends the operations of steps in the order in which they are needed."""

    def __init__(self, job: StepSpec, rates: Rates) -> None:
        self.job = job
        self.rates = rates
        self.operations: list[Operation] = []
        self.decided: list[int] = []  # The operation of each step at which the optimizer decides.
        self._step = 0
        self._pass = ""
        self._update_track = COMPUTE if job.shares_host_memory else UPDATE
        self._last_on: dict[str, int] = {}  # Compute and update keep the order of the program.
        self._written = _LastWrites()
        # The operations that free segments of the ring, oldest first.
        self._ring: list[tuple[int, ...]] = []
        self._gradients_out: list[int] = []
        self._saved: dict[int, int] = {}  # By use: the operation that saves its input.
        self._computed: list[int] = []  # Forwards and backwards of uses, in order.
        self._moves = moves(
            job.uses, num_fibers=job.num_fibers, tile_micro_batches=job.tile_micro_batches,
            backward_ratio=job.backward_ratio,
        )  # fmt: skip
        self._host, self._device = self._visits()
        # Visit -> the operations that free its space.
        self._host_free: dict[int, tuple[int, ...]] = {}
        self._device_free: dict[int, tuple[int, ...]] = {}
        self._visit = 0
        self._unwritten: dict[int, int] = {}  # Updated weights by unit, with the update.
        # The operation at which all ranks have completed the step before.
        self._agreed: int | None = None
        # The bytes if everything that reaches host memory were kept: with ranks, parts beside the
        # gathered weights.
        self._all_fetched_nbytes = sum(
            unit.fetched_nbytes
            + (unit.weight_nbytes if unit.divided is not None and unit.divided.comes_to_host else 0)
            for unit in job.units
        )
        self._sums: dict[int, int] = {}  # By unit: the operation that completes this rank's sum.

    def _visits(self) -> tuple[list[Visit], list[Visit]]:
        job = self.job
        # Gradients on their way to NVMe are summed in host memory, one unit at a time.
        summed = [
            rounded_nbytes(nbytes) if tier == "nvme" and nbytes else 0
            for tier, nbytes in (unit.sums for unit in job.units)
        ]
        places = [(unit, move) for move in self._moves for unit in self._units_of(move)]
        order = [unit for unit, _ in places]
        held = [move.held for _, move in places]
        taken_nbytes = [summed[unit] if move.has_gradients else 0 for unit, move in places]
        passes = _NUM_STEPS * job.num_micro_batches
        first_passes = range(0, passes, job.num_micro_batches)
        travelling = [
            rounded_nbytes(u.fetched_nbytes) if u.fetched_nbytes else 0 for u in job.units
        ]
        changing = {index for index, unit in enumerate(job.units) if unit.is_changed}
        # A step makes gathered weights outdated.
        outdated = {i for i in changing if (of := job.units[i].divided) and of.comes_to_host}
        if job.device_cache_nbytes is None:
            device = [Visit(unit, True) for unit in order] * passes
            skipped: frozenset[int] = frozenset()
        else:
            away = [u.used_nbytes if u.is_away else 0 for u in job.units]
            device = visits(
                order, away, job.device_cache_nbytes,
                num_passes=passes, stale=first_passes, changing=changing, held=held,
            )  # fmt: skip
            skipped = frozenset(i for i, visit in enumerate(device) if visit.is_hit)
        host = visits(
            order, travelling, job.weights_cache_nbytes,
            num_passes=passes, skipped=skipped, taken_nbytes=taken_nbytes, held=held,
            stale=first_passes if outdated else (), changing=outdated,
        )  # fmt: skip
        return host, device

    def _units_of(self, move: Move) -> tuple[int, ...]:
        """Returns the units in the order in which they are fetched."""
        units = self.job.uses[move.use].units
        return units[::-1] if move.is_backward else units

    def _add(
        self, track: str, name: str, duration_s: float = 0.0, *, after: Sequence[int | None] = (),
        nbytes: int = 0, traffic: str = "",
    ) -> int:  # fmt: skip
        before = [each for each in after if each is not None]
        if track in (COMPUTE, UPDATE) and track in self._last_on:
            before.append(self._last_on[track])
        index = len(self.operations)
        self._last_on[track] = index
        label = f"{self._pass}: {name}"
        waits = tuple(dict.fromkeys(before))
        self.operations.append(
            Operation(track, label, duration_s, waits, nbytes, traffic, self._step)
        )
        return index

    def _move(self, track: str, name: str, nbytes: int, after: Sequence[int | None]) -> int:
        """Adds a transfer between device and host."""
        rate = {H2D: self.rates.h2d, D2H: self.rates.d2h}[track]
        return self._add(track, name, nbytes / rate, after=after, nbytes=nbytes, traffic=track)

    def _nvme(self, traffic: str, name: str, nbytes: int, after: Sequence[int | None]) -> int:
        return self._add(NVME, name, after=after, nbytes=nbytes, traffic=traffic)

    def _send(
        self, verb: str, name: str, nbytes: int, after: Sequence[int | None], *, is_by_device: bool
    ) -> int:
        """Adds a transfer from other ranks ("got") or to other ranks ("given")."""
        track, rate = (GATHER, self.rates.peers) if is_by_device else (SOCKETS, self.rates.sockets)
        return self._add(
            track, name, nbytes / rate, after=after, nbytes=nbytes, traffic=f"{track}_{verb}"
        )

    def add_step(self, step: int) -> None:
        job = self.job
        self._step = step
        is_updating = step > 0
        given: set[int] = set()  # Units with a gradient sum in this step.
        if is_updating and not job.is_deferred:
            self._pass = "update"
            units = list(dict.fromkeys(unit for use in job.uses for unit in use.units))
            for unit in units:
                self._update_at_step(unit)
            self._agree(units)
        for micro_batch in range(job.num_micro_batches):
            is_first = micro_batch == 0
            self._pass = "forward with update" if is_first and job.is_deferred else "forward"
            pending = set(range(len(job.units))) if is_first and is_updating else set()
            if not job.is_deferred:
                pending.clear()
            forward_pass = self._pass
            left = Counter(unit for move in self._moves for unit in self._given_by(move))
            for move in self._moves:
                use = job.uses[move.use]
                if not move.is_backward:
                    self._pass = forward_pass
                    self._forward(move, pending)
                    self._save(move.use, use)
                    continue
                self._pass = "backward"
                self._backward(move, self._take_back(move.use, use))
                for unit in self._given_by(move):
                    left[unit] -= 1
                    if left[unit] == 0 or self._leaves_early(unit, use):
                        self._gradient_out(unit, is_first=unit not in given)
                        given.add(unit)
        self._pass = "backward"
        for unit, ready in self._sums.items():
            self._give_sums(unit, ready)
        self._sums.clear()
        # The optimizer reads all gradients and waits until they are at rest.
        after = [*self._gradients_out, self._last_on.get(self._update_track)]
        self._gradients_out.clear()
        self.decided.append(self._add(COMPUTE, "optimizer decides", after=after))

    # -- Forward and backward --------------------------------------------------------------------

    def _leaves_early(self, unit: int, use: Use) -> bool:
        """Whether a sum leaves memory before all micro-batches are added: inside blocks, if
        micro-batches pass in groups; outside blocks, if no memory is left to keep it. Gradients for
        other ranks have separate memory until then."""
        of = self.job.units[unit].divided
        if of is not None and of.sums is None:
            return False
        if use.block is None:
            return self.job.num_fibers > 1 and not self.job.weights_cache_nbytes
        return self.job.num_fibers > self.job.tile_micro_batches

    def _given_by(self, move: Move) -> tuple[int, ...]:
        return self.job.uses[move.use].units if move.has_gradients else ()

    def _forward(self, move: Move, pending: set[int]) -> None:
        use, ready = self.job.uses[move.use], []
        for unit in use.units:
            is_pending = unit in pending
            pending.discard(unit)
            ready.append(self._bring_in(unit, is_pending=is_pending))
        duration_s = use.forward_flops * move.forwards / self.rates.flops + self._hold_s(use)
        computed = self._add(COMPUTE, self._name(use), duration_s, after=ready)
        self._computed.append(computed)
        for unit in use.units:
            if unit in self._unwritten:
                self._write_weights(unit, [self._unwritten.pop(unit), computed])
        self._let_go(use, computed)

    def _backward(self, move: Move, saved: int | None) -> None:
        use = self.job.uses[move.use]
        ready = [*(self._bring_in(unit) for unit in self._units_of(move)), saved]
        duration_s = use.forward_flops * move.forwards / self.rates.flops
        duration_s += self._hold_s(use)
        computed = self._add(COMPUTE, self._name(use), duration_s, after=ready)
        self._computed.append(computed)
        self._let_go(use, computed)

    def _save(self, index: int, use: Use) -> None:
        """Saves the input of the use for the backward."""
        tier, name = self.job.saved_on, f"input of {self._name(use)}"
        if not use.saved_nbytes or tier == "device":
            return
        out = self._computed[-1]
        if not self.job.shares_host_memory:
            out = self._move(D2H, name, use.saved_nbytes, [out])
        if tier == "nvme":
            out = self._nvme(WRITE, name, use.saved_nbytes, [out])
        self._saved[index] = out

    def _take_back(self, index: int, use: Use) -> int | None:
        """Restores the input while the previous use, in the backward's order, computes."""
        if index not in self._saved:
            return None
        name = f"input of {self._name(use)}"
        after = [self._saved.pop(index), self._computed[-2] if len(self._computed) > 1 else None]
        back: int | None = after[0]
        if self.job.saved_on == "nvme":
            back = self._nvme(READ, name, use.saved_nbytes, after)
        if not self.job.shares_host_memory:
            back = self._move(H2D, name, use.saved_nbytes, [back, after[1]])
        return back

    def _hold_s(self, use: Use) -> float:
        """The time of the engine's own work on the computing thread."""
        if not self.job.shares_host_memory:
            return 0.0
        return sum(self.job.units[unit].weight_nbytes for unit in use.units) / self.rates.hold

    def _name(self, use: Use) -> str:
        return "+".join(self.job.units[unit].name for unit in use.units)

    def _bring_in(self, unit: int, *, is_pending: bool = False) -> int | None:
        """Fetches weights to the place of use; returns the operations that the use waits for."""
        load = self.job.units[unit]
        host, device = self._host[self._visit], self._device[self._visit]
        self._visit += 1
        ready: int | None = None
        if is_pending and load.update_nbytes:
            ready = self._fetch(unit, host)
            ready = self._update(unit, ready)
        elif self.job.shares_host_memory or not device.is_hit:
            ready = self._fetch(unit, host)
        if not device.is_hit:
            room = [each for visit in device.evicts for each in self._device_free.get(visit, ())]
            name, after = f"weights of {load.name}", [ready, *room, self._agreed]
            if load.inward_nbytes:
                ready = self._move(H2D, name, load.inward_nbytes, after)
            if (of := load.divided) and of.is_put_together and of.are_weights_between_devices:
                ready = self._send(
                    "got", name, of.got_nbytes, [ready, *after], is_by_device=True
                )  # fmt: skip
            if self.rates.gather is not None:
                duration_s = load.weight_nbytes / self.rates.gather
                ready = self._add(GATHER, f"weights of {load.name}", duration_s, after=[ready],
                                  nbytes=load.weight_nbytes, traffic=GATHER)  # fmt: skip
        return ready

    def _fetch(self, unit: int, visit: Visit) -> int | None:
        if visit.is_hit:
            return None
        load = self.job.units[unit]
        after: list[int | None]
        after = [each for seen in visit.evicts for each in self._host_free.get(seen, ())]
        after.append(self._written.weights.get(unit))
        if not self.job.reads_ahead:
            after.append(self._last_on.get(COMPUTE))
        name, of = f"weights of {load.name}", load.divided
        if of is None or not of.comes_to_host:
            return self._nvme(READ, name, load.weight_nbytes, after)
        after.append(self._agreed)
        ready = self._read_parts(load, load.weight_nbytes + of.served_nbytes, after)
        return self._send("got", name, of.got_nbytes, [*after, *ready], is_by_device=False)

    def _read_parts(
        self, load: UnitLoad, nbytes: int, after: Sequence[int | None]
    ) -> list[int | None]:
        """Reads weights from their tier on this rank, for this rank and for the others, which
        request them at the same time."""
        name = f"weights of {load.name}"
        if load.weights == "nvme":
            return [self._nvme(READ, name, nbytes, after)]
        if load.weights == "device" and not self.job.shares_host_memory:
            return [self._move(D2H, name, nbytes, after)]
        return []

    def _let_go(self, use: Use, computed: int) -> None:
        """Frees the space of ended visits and writes changed weights."""
        first = self._visit - len(use.units)
        for visit in range(first, self._visit):
            written = self._written.weights.get(self._host[visit].unit)
            free = (computed,) if written is None else (computed, written)
            self._host_free[visit] = self._device_free[visit] = free

    def _gradient_out(self, unit: int, *, is_first: bool) -> None:
        load = self.job.units[unit]
        tier, nbytes = load.sums
        name, out = f"gradients of {load.name}", self._last_on[COMPUTE]
        of = load.divided
        if of is not None and of.sums is None:
            if load.is_changed:
                self._give(unit, [out], is_first=is_first)
            return
        if not nbytes:
            return
        if self.rates.gather is not None:
            out = self._add(GATHER, name, load.weight_nbytes / self.rates.gather, after=[out],
                            nbytes=load.weight_nbytes, traffic=GATHER)  # fmt: skip
        if of is not None:
            self._sums[unit] = out
        if tier == "device":
            self._gradients_out.append(out)
            return
        room = self._room_for_gradients(tier)
        if not self.job.shares_host_memory:
            out = self._move(D2H, name, load.leaving_nbytes, [out, *room])
        # The gradient is copied or added (it is read, and the sum is read and written), then read
        # for the norm.
        touched_nbytes = (2 if is_first else 3) * nbytes + nbytes
        if not self.job.shares_host_memory and is_first:
            touched_nbytes = nbytes  # The copy engine has moved them,
            if load.leaving_nbytes < nbytes:  # and they are widened.
                touched_nbytes += load.leaving_nbytes + nbytes
        summed = self._sum_up(
            unit, tier, nbytes, touched_nbytes, after=[out, *room], is_first=is_first
        )
        if of is not None:
            self._sums[unit] = summed

    def _room_for_gradients(self, tier: str) -> list[int | None]:
        """Gradients on their way to NVMe are in memory, a few units at a time."""
        if tier == "nvme" and len(self._gradients_out) >= self.job.num_gradient_buffers:
            return [self._gradients_out[-self.job.num_gradient_buffers]]
        return [None]

    def _sum_up(
        self, unit: int, tier: str, nbytes: int, touched_nbytes: int, *,
        after: Sequence[int | None], is_first: bool,
    ) -> int:  # fmt: skip
        """Adds gradients that reached the host to the sum there, or on NVMe."""
        name, before = f"gradients of {self.job.units[unit].name}", list(after)
        if tier == "nvme" and not is_first:
            last = self._written.gradients.get(unit)
            before.append(self._nvme(READ, name, nbytes, [last, *after[1:]]))
        summed = self._add(self._update_track, name, touched_nbytes / self.rates.host, after=before)
        if tier == "nvme":
            summed = self._nvme(WRITE, name, nbytes, [summed])
            self._written.gradients[unit] = summed
        self._gradients_out.append(summed)
        return summed

    # -- Ranks -----------------------------------------------------------------------------------

    def _give(self, unit: int, after: Sequence[int | None], *, is_first: bool) -> None:
        """Sends the device's gradients of the full unit to their owners; this rank sums its own
        part."""
        load = self.job.units[unit]
        of, name = load.divided, f"gradients of {load.name}"
        assert of is not None
        if of.are_gradients_between_devices:
            out = self._send("given", name, of.given_nbytes, after, is_by_device=True)
            if load.gradients == "device" or not load.gradient_nbytes:
                self._gradients_out.append(out)
                return
            room = self._room_for_gradients(load.gradients)
            out = self._move(D2H, name, load.gradient_nbytes, [out, *room])
            touched_nbytes = (1 if is_first else 3) * load.gradient_nbytes
            self._sum_up(unit, load.gradients, load.gradient_nbytes, touched_nbytes,
                         after=[out, *room], is_first=is_first)  # fmt: skip
            return
        if not self.job.shares_host_memory:
            after = [self._move(D2H, name, load.leaving_nbytes, after)]
        self._give_from_host(unit, after, is_first=is_first)

    def _give_from_host(self, unit: int, after: Sequence[int | None], *, is_first: bool) -> None:
        load = self.job.units[unit]
        of, name = load.divided, f"gradients of {load.name}"
        assert of is not None
        out = self._send("given", name, of.given_nbytes, after, is_by_device=False)
        # Each rank's gradients are read, widened to fp32, divided and added; then the sum is
        # written.
        touched_nbytes = (3 * of.count + (2 if is_first else 3)) * load.gradient_nbytes
        room = self._room_for_gradients(load.gradients)
        summed = self._sum_up(unit, load.gradients, load.gradient_nbytes, touched_nbytes,
                              after=[out, *room], is_first=is_first)  # fmt: skip
        if load.gradients == "device" and not self.job.shares_host_memory:
            self._gradients_out[-1] = self._move(H2D, name, load.gradient_nbytes, [summed])

    def _give_sums(self, unit: int, ready: int) -> None:
        """Sends the sums of a rank that sums its own gradients of a step first."""
        load = self.job.units[unit]
        of, name = load.divided, f"gradients of {load.name}"
        assert of is not None and of.sums is not None
        after: list[int | None] = [ready, self._last_on[COMPUTE]]
        if of.are_gradients_between_devices:
            self._give(unit, after, is_first=True)
            return
        if of.sums == "nvme":
            after.append(self._nvme(READ, name, of.sums_nbytes, after))
        elif of.sums == "device" and not self.job.shares_host_memory:
            after.append(self._move(D2H, name, of.sums_nbytes, after))
        self._give_from_host(unit, after, is_first=True)

    def _agree(self, units: Sequence[int]) -> None:
        """Waits until all ranks have updated their parts. A rank with all weights fetches the other
        parts."""
        loads = self.job.units
        if all(loads[unit].divided is None for unit in units):
            return
        last_writes = [self._written.weights.get(unit) for unit in units]
        met = self._add(COMPUTE, "shards are updated", after=last_writes)
        over = [self._refresh(unit, met) for unit in units]
        self._agreed = self._add(COMPUTE, "all ranks have stepped", after=over)

    def _refresh(self, unit: int, met: int) -> int:
        load = self.job.units[unit]
        of, name = load.divided, f"weights of {load.name}"
        if of is None or of.is_put_together or not of.got_nbytes:
            return met
        if of.are_weights_between_devices:
            return self._send("got", name, of.got_nbytes, [met], is_by_device=True)
        own_nbytes = 0 if self._stays(load) else load.weight_nbytes
        read = self._read_parts(load, own_nbytes + of.served_nbytes, [met])
        got = self._send("got", name, of.got_nbytes, [met, *read], is_by_device=False)
        if load.weights == "nvme":
            self._write_weights(unit, [got])
            return self._written.weights[unit]
        if load.weights == "device" and not self.job.shares_host_memory:
            return self._move(H2D, name, load.written_nbytes, [got])
        return got

    def _stays(self, load: UnitLoad) -> bool:
        """Whether weights on NVMe are still cached when the step changes them. The model assumes so
        only if all of them fit in memory."""
        return load.weights == "nvme" and self._all_fetched_nbytes <= self.job.weights_cache_nbytes

    # -- Updates ---------------------------------------------------------------------------------

    def _update_at_step(self, unit: int) -> None:
        load = self.job.units[unit]
        if not load.update_nbytes:
            return
        ready = None
        if load.weights == "nvme" and not (load.divided is not None and self._stays(load)):
            last = self._written.weights.get(unit)
            name = f"weights of {load.name}"
            ready = self._nvme(READ, name, load.weight_nbytes, [last, self.decided[-1]])
        done = self._update(unit, ready)
        self._last_on[COMPUTE] = self._add(COMPUTE, f"updated {load.name}", after=[done])

    def _update(self, unit: int, weights_ready: int | None) -> int:
        """Reads state a segment at a time, updates it and writes it back; then writes the
        weights."""
        job, load = self.job, self.job.units[unit]
        decided = self.decided[-1]
        if load.weights == "device" and not job.shares_host_memory:
            weights_ready = self._move(
                D2H, f"weights of {load.name}", load.weight_nbytes, [decided]
            )
        resident_nbytes = max(sum(load.state_read_nbytes.values()), 1)
        count, capacity = _segments(resident_nbytes, job.ring_nbytes)
        done = weights_ready
        for segment in range(count):
            done = self._update_segment(unit, segment, count, capacity, weights_ready)
        assert done is not None
        if load.weights == "nvme":
            if job.shares_host_memory and job.is_deferred:
                self._unwritten[unit] = done  # The pages are under the model until it has run.
            else:
                self._write_weights(unit, [done])
        elif load.weights == "device" and not job.shares_host_memory:
            done = self._move(H2D, f"weights of {load.name}", load.written_nbytes, [done])
        return done

    def _write_weights(self, unit: int, after: Sequence[int]) -> None:
        load = self.job.units[unit]
        name = f"weights of {load.name}"
        self._written.weights[unit] = self._nvme(WRITE, name, load.written_nbytes, after)

    def _update_segment(
        self, unit: int, segment: int, count: int, capacity: int, weights_ready: int | None
    ) -> int:
        job, load = self.job, self.job.units[unit]
        name = f"state of {load.name}"

        def share(nbytes: int) -> int:
            return nbytes * (segment + 1) // count - nbytes * segment // count

        before: list[int | None] = [self.decided[-1], self._written.state.get((unit, segment))]
        before.append(self._written.gradients.get(unit))
        if any(load.state_read_nbytes.values()):
            if len(self._ring) >= capacity:
                before += self._ring[-capacity]
            if not job.reads_ahead:
                before.append(self._last_on.get(COMPUTE))
        reads = []
        if load.state_read_nbytes.get("nvme"):
            nbytes = share(load.state_read_nbytes["nvme"])
            reads.append(self._nvme(READ, name, nbytes, before))
        if load.state_read_nbytes.get("device"):
            reads.append(self._move(D2H, name, share(load.state_read_nbytes["device"]), before))
        before = [*reads, weights_ready, self.decided[-1]]
        if job.updates_on_device and not job.shares_host_memory:
            # All state moves to the device, and changed state returns.
            changed_nbytes = share((load.update_nbytes - load.gradient_nbytes) // 2)
            there = changed_nbytes + share(load.gradient_nbytes)
            # Until then the target memory on the device may be in use.
            arrived = self._move(H2D, name, there, [*before, self._last_on.get(COMPUTE)])
            duration_s = share(load.update_nbytes) / self.rates.device_update
            updated = self._add(COMPUTE, name, duration_s, after=[arrived])
            updated = self._move(D2H, name, changed_nbytes, [updated])
        else:
            duration_s = share(load.update_nbytes) / self.rates.update
            updated = self._add(self._update_track, name, duration_s, after=before)
        free = [updated]
        if load.state_write_nbytes.get("nvme"):
            nbytes = share(load.state_write_nbytes["nvme"])
            written = self._nvme(WRITE, name, nbytes, [updated])
            self._written.state[unit, segment] = written
            free.append(written)
        if load.state_write_nbytes.get("device"):
            free.append(self._move(H2D, name, share(load.state_write_nbytes["device"]), [updated]))
        if reads:
            self._ring.append(tuple(free))
        return updated


# More segments make the prediction slower, but not better.
_MOST_SEGMENTS = 8
_WANTED_IN_RING = 3


def _segments(state_nbytes: int, ring_nbytes: float) -> tuple[int, int]:
    """Returns (segments of one unit's state, segments in the ring), with three in the ring if
    possible."""
    wanted = -(-state_nbytes * _WANTED_IN_RING // max(int(ring_nbytes), 1))
    count = min(max(wanted, 1), _MOST_SEGMENTS)
    return count, max(1, int(ring_nbytes * count // state_nbytes))
