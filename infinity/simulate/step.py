"""The operations of training steps, as the engine would issue them, for `simulate`.

Forward: each unit's weights are fetched, its pending update is applied, then the unit computes.
Backward: weights are fetched again in reverse order, and gradients are written out. The optimizer
decides when the last gradient is at rest. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from infinity.simulate.clock import Operation, Timeline, simulate
from infinity.simulate.fetches import Fetches
from infinity.simulate.gradients import GradientTraffic
from infinity.simulate.log import (
    CHECKPOINT_READ,
    COMPUTE,
    D2H,
    DECODING_ADDS,
    H2D,
    NUM_STEPS,
    NVME,
    READ,
    SHOWN,
    WRITE,
    OperationLog,
)
from infinity.simulate.memory import inputs_on_host
from infinity.simulate.order import Move, Use, blocks_in_groups
from infinity.simulate.spec import NOT_SHARDED, Rates, StepSpec
from infinity.simulate.updates import UnitUpdates
from infinity.streaming.updates.policy import choose_early


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

    @property
    def binding_share(self) -> float:
        """The part of the step in which that track is busy."""
        return self.busy_s[self.binding] / self.step_s


@contextmanager
def without_collections() -> Iterator[None]:
    """Operations are many objects without a cycle. To look for cycles among them takes a quarter of
    the time of a prediction."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def predict(job: StepSpec, rates: Rates) -> Prediction:
    """Predicts a step among equal steps, from one decision of the optimizer to the next."""
    return _predict(_Draft(job, rates), rates)


def _predict(draft: _Draft, rates: Rates) -> Prediction:
    with without_collections():
        for step in range(NUM_STEPS):
            draft.add_step(step)
        operations = _with_nvme_times(draft.log.operations, rates)
        timeline = simulate(operations)
    begin_s, end_s = (
        timeline.finish_s[decided] for decided in draft.log.decided[SHOWN - 1 : SHOWN + 1]
    )
    shown = [i for i, operation in enumerate(operations) if operation.step == SHOWN]
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
    time, so each byte of the pass takes an equal share of the total time. Bytes of a checkpoint
    that fewer drives hold count as so many more."""
    totals: defaultdict[tuple[int, str], dict[str, float]] = defaultdict(
        lambda: {READ: 0, WRITE: 0}
    )
    for operation in drafted:
        if operation.track == NVME:
            kind = READ if operation.traffic == CHECKPOINT_READ else operation.traffic
            totals[operation.step, _pass(operation)][kind] += _equal_nbytes(operation, rates)
    s_per_byte = {
        key: rates.nvme_s(moved[READ], moved[WRITE]) / max(sum(moved.values()), 1)
        for key, moved in totals.items()
    }
    return [
        replace(
            operation,
            duration_s=_equal_nbytes(operation, rates)
            * s_per_byte[operation.step, _pass(operation)],
        )
        if operation.track == NVME
        else operation
        for operation in drafted
    ]


def _equal_nbytes(operation: Operation, rates: Rates) -> float:
    """Returns the bytes that all drives read or write in the time of the operation."""
    if operation.traffic == CHECKPOINT_READ:
        return operation.nbytes * max(1.0, rates.nvme_read / rates.checkpoint_read)
    return operation.nbytes


def _pass(operation: Operation) -> str:
    return operation.name.partition(":")[0]


# The prediction takes the best of these shares; a run finds its own share while it trains.
EARLY_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def best_share(
    job: StepSpec, rates: Rates, shares: Sequence[float] = EARLY_SHARES
) -> tuple[StepSpec, Prediction]:
    """Returns the steps with the share of early updates that makes a step shortest, and the
    step. Of shares that mean the same units only the first is tried."""
    drafts: dict[frozenset[int], _Draft] = {}
    for share in shares:
        draft = _Draft(replace(job, early_share=share), rates)
        drafts.setdefault(draft.early, draft)
    steps = ((draft.log.job, _predict(draft, rates)) for draft in drafts.values())
    return min(steps, key=lambda found: found[1].step_s)


class _Draft:
    """Appends the operations of steps in the order in which they are needed."""

    def __init__(self, job: StepSpec, rates: Rates) -> None:
        self.log = OperationLog(job, rates)
        self._fetches = Fetches(self.log)
        self._updates = UnitUpdates(self.log)
        self._gradients = GradientTraffic(self.log)
        self._saved: dict[int, int] = {}  # By use: the operation that saves its input.
        self._on_host = inputs_on_host(job)
        self._blocks_in_groups = blocks_in_groups(job.uses)
        self._computed: list[int] = []  # Forwards and backwards of uses, in order.
        self._defers = job.defers
        self.early = self._early_units()
        self._updated: set[int] = set()  # In the backward of the last step.

    def _early_units(self) -> frozenset[int]:
        """Returns the units to update in the backward, if their gradients complete in time."""
        job = self.log.job
        if not job.defers or not job.early_share:
            return frozenset()
        nbytes: dict[int, int] = {}
        for move in self._fetches.moves:
            for unit in self._gradients_of(move):
                load = job.units[unit]
                nbytes.pop(unit, None)  # Of several uses the last one counts.
                if self._updates.can_go_back(load):
                    nbytes[unit] = load.weight_nbytes + sum(load.state_read_nbytes.values())
        chosen, left_nbytes = set[int](), self._updates.spare_nbytes
        for unit in choose_early(list(nbytes), nbytes, job.early_share):
            left_nbytes -= self._updates.beside_nbytes(job.units[unit])
            if left_nbytes >= 0:
                chosen.add(unit)
        return frozenset(chosen)

    def add_step(self, step: int) -> None:
        job, defers = self.log.job, self._defers
        self.log.step = step
        is_updating = step > 0
        summed: set[int] = set()  # Units with a gradient sum in this step.
        if is_updating and defers:
            self._agree_on_deferred()
        elif is_updating:
            self.log.pass_name = "update"
            units = list(dict.fromkeys(unit for use in job.uses for unit in use.units))
            for unit in units:
                self._updates.at_step(unit)
            self._agree(units)
        for micro_batch in range(job.num_micro_batches):
            is_first = micro_batch == 0
            self.log.pass_name = "forward with update" if is_first and defers else "forward"
            has_pending = is_first and is_updating and defers
            pending = set(range(len(job.units))) - self._updated if has_pending else set[int]()
            is_last = micro_batch == job.num_micro_batches - 1
            if is_last:
                self._updated = set()
            # Early units whose gradients the last move completed, each with the end of its sum.
            complete: list[tuple[int, int]] = []
            forward_pass = self.log.pass_name
            left = Counter(
                unit for move in self._fetches.moves for unit in self._gradients_of(move)
            )
            for move in self._fetches.moves:
                use = job.uses[move.use]
                if not move.is_backward:
                    self.log.pass_name = forward_pass
                    self._compute(move, pending)
                    self._save(move.use, use)
                    continue
                self.log.pass_name = "backward"
                self._compute(move, pending, self._restore(move.use, use))
                for unit, at_rest in complete:  # Their chunks were read in the meantime.
                    self._update_early(unit, at_rest)
                complete.clear()
                for unit in self._gradients_of(move):
                    left[unit] -= 1
                    if left[unit] == 0 or self._leaves_early(unit, use):
                        self._gradients.leave(unit, is_first=unit not in summed)
                        summed.add(unit)
                    is_complete = is_last and left[unit] == 0
                    if is_complete:
                        self._gradients.measure(unit)
                    if is_updating and is_complete and unit in self.early:
                        complete.append((unit, self._gradients.out[-1]))
        self.log.pass_name = "backward"
        self._gradients.end_backward()
        # The optimizer waits until all gradients are at rest, and for their norms.
        traffic = self._gradients
        after = [*traffic.out, *traffic.norms, self.log.last_on.get(self.log.update_track)]
        traffic.out.clear()
        traffic.norms.clear()
        after.append(self._updates.publish(self._updated, after))
        self.log.decided.append(self.log.add(COMPUTE, "optimizer decides", after=after))

    def _update_early(self, unit: int, summed: int) -> None:
        """Updates a unit in the backward. Units that are not updated there stay pending. Ranks read
        the state of a shard when its sum is complete."""
        if self.log.job.units[unit].sharded.is_gathered:
            self._fetches.updated[unit] = self._of_shard(unit, summed)
            self._updated.add(unit)
            return
        done = self._updates.update(unit, self.log.last_on[COMPUTE])
        if unit in self._updates.unwritten:
            self._updates.write_weights(unit, [self._updates.unwritten.pop(unit), done])
        self._updated.add(unit)

    def _leaves_early(self, unit: int, use: Use) -> bool:
        """Whether a sum leaves memory before all micro-batches are added: inside blocks, if
        micro-batches pass in groups; outside blocks, if no memory is left to keep it. Gradients for
        other ranks have separate memory until then."""
        if self.log.job.units[unit].sharded.sends_each_backward:
            return False
        if use.block is None:
            return self.log.job.num_fibers > 1 and not self.log.job.weights_cache_nbytes
        is_in_groups = self.log.job.num_fibers > self.log.job.tile_micro_batches
        return is_in_groups and not use.is_experts and use.block in self._blocks_in_groups

    def _gradients_of(self, move: Move) -> tuple[int, ...]:
        return self.log.job.uses[move.use].units if move.has_gradients else ()

    def _compute(self, move: Move, pending: set[int], saved: int | None = None) -> None:
        """Fetches what a use needs, computes, and releases it. `saved`: the end of the copies of
        its input, in a backward."""
        use, ready = self.log.job.uses[move.use], [saved, self._pass_in(move)]
        for unit in self._fetches.units_of(move):
            is_pending = unit in pending
            pending.discard(unit)
            ready.append(self._fetch(unit, is_pending=is_pending))
        duration_s = self.log.rates.product_s(use, move.forwards) + self._hold_s(use)
        ready = self._decode(use, ready)
        computed = self.log.add(COMPUTE, self._name(use), duration_s, after=ready)
        self._computed.append(computed)
        self._pass_out(move, computed)
        for unit in use.units:
            if unit in self._updates.unwritten:
                self._updates.write_weights(unit, [self._updates.unwritten.pop(unit), computed])
        self._fetches.release(use, computed)

    def _pass_in(self, move: Move) -> int | None:
        """Copies the tensors that a tile adds to, for all micro-batches, to the device while the
        previous use computes."""
        use = self.log.job.uses[move.use]
        if not use.passing_nbytes[0]:
            return None
        before = self._computed[-2] if len(self._computed) > 1 else None
        return self.log.move(H2D, f"inputs of {self._name(use)}", use.passing_nbytes[0], [before])

    def _pass_out(self, move: Move, computed: int) -> None:
        use = self.log.job.uses[move.use]
        if use.passing_nbytes[1]:
            self.log.move(D2H, f"sums of {self._name(use)}", use.passing_nbytes[1], [computed])

    def _save(self, index: int, use: Use) -> None:
        """Saves the input of the use for the backward."""
        name = f"input of {self._name(use)}"
        if not use.saved_nbytes or self.log.job.saved_on == "device":
            return
        out = self._computed[-1]
        if not self.log.job.shares_host_memory:
            out = self.log.move(D2H, name, use.saved_nbytes, [out])
        away_nbytes = use.saved_nbytes - self._on_host[index]
        if away_nbytes:
            out = self.log.nvme(WRITE, name, away_nbytes, [out])
        self._saved[index] = out

    def _restore(self, index: int, use: Use) -> int | None:
        """Restores the input while the previous use, in the backward's order, computes."""
        if index not in self._saved:
            return None
        name = f"input of {self._name(use)}"
        after = [self._saved.pop(index), self._computed[-2] if len(self._computed) > 1 else None]
        restored: int | None = after[0]
        away_nbytes = use.saved_nbytes - self._on_host[index]
        if away_nbytes:
            restored = self.log.nvme(READ, name, away_nbytes, after)
        if not self.log.job.shares_host_memory:
            restored = self.log.move(H2D, name, use.saved_nbytes, [restored, after[1]])
        return restored

    def _hold_s(self, use: Use) -> float:
        """Returns the time in which the engine maps weights on the host before a computation."""
        if not self.log.job.shares_host_memory:
            return 0.0
        held_nbytes = sum(self.log.job.units[unit].weight_nbytes for unit in use.units)
        return held_nbytes / self.log.rates.hold

    def _decode(self, use: Use, ready: list[int | None]) -> list[int | None]:
        """Decodes the weights of a use, which computes after what is returned."""
        if not use.decoded_nbytes:
            return ready
        duration_s = use.decoded_nbytes / self.log.rates.decode
        if not self.log.job.shares_host_memory:
            duration_s *= DECODING_ADDS
        name = f"decoding of {self._name(use)}"
        return [self.log.add(COMPUTE, name, duration_s, after=ready)]

    def _name(self, use: Use) -> str:
        return "+".join(self.log.job.units[unit].name for unit in use.units)

    def _of_shard(self, unit: int, ready: int) -> int:
        is_kept = self._fetches.kept.for_update
        return self._updates.of_shard(unit, ready, is_kept=is_kept)

    def _fetch(self, unit: int, *, is_pending: bool) -> int | None:
        """Fetches weights to the place of use; returns the operation that the use waits for."""
        load = self.log.job.units[unit]
        is_updated = is_pending and load.update_nbytes > 0
        if is_updated and load.sharded.is_gathered:
            self._fetches.updated[unit] = self._of_shard(unit, self.log.decided[-1])
            is_updated = False
        ready = self._fetches.to_host(unit, is_updated=is_updated)
        if is_updated:
            ready = self._updates.update(unit, ready)
        return self._fetches.to_device(unit, ready)

    # -- Ranks -------------------------------------------------------------------------------------

    def _agree_on_deferred(self) -> None:
        """Waits until all ranks have decided. Each updates its shards while the others read; who
        reads a shard waits for its update."""
        if any(load.sharded is not NOT_SHARDED for load in self.log.job.units):
            self._fetches.agreed = self.log.decided[-1]
            self._fetches.note_updated(range(len(self.log.job.units)))

    def _agree(self, units: Sequence[int]) -> None:
        """Waits until all ranks have updated their parts. A rank with all weights fetches the other
        parts."""
        loads = self.log.job.units
        if all(loads[unit].sharded is NOT_SHARDED for unit in units):
            return
        last_writes = [self.log.written_weights.get(unit) for unit in units]
        updated = self.log.add(COMPUTE, "shards are updated", after=last_writes)
        pulled = [self._pull(unit, updated) for unit in units]
        self._fetches.agreed = self.log.add(COMPUTE, "all ranks have stepped", after=pulled)

    def _pull(self, unit: int, updated: int) -> int:
        load = self.log.job.units[unit]
        sharded, name = load.sharded, f"weights of {load.name}"
        if sharded.is_gathered or not sharded.received_nbytes:
            return updated
        if sharded.are_weights_between_devices:
            return self.log.exchange("received", name, sharded, [updated], is_by_device=True)
        # On a device the own part is there already, and the others are written beside it.
        is_there = load.weights == "device" or self._updates.stays(load)
        own_nbytes = 0 if is_there else load.weight_nbytes
        read = self._fetches.read_parts(load, own_nbytes + sharded.served_nbytes, [updated])
        received = self.log.exchange(
            "received", name, sharded, [updated, *read], is_by_device=False
        )
        if load.weights == "nvme":
            self._updates.write_weights(unit, [received])
            return self.log.written_weights[unit]
        if load.weights == "device" and not self.log.job.shares_host_memory:
            return self.log.move(H2D, name, sharded.received_nbytes, [received])
        return received
