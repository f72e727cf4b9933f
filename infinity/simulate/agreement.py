"""The end of a step that ranks make together, in the simulated step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.simulate.fetches import Fetches
from infinity.simulate.log import COMPUTE, H2D, OperationLog
from infinity.simulate.spec import NOT_SHARDED
from infinity.simulate.updates import UnitUpdates


class RankAgreement:
    """Appends the wait for all ranks, and the fetch of other ranks' weights after it."""

    def __init__(self, log: OperationLog, fetches: Fetches, updates: UnitUpdates) -> None:
        self._log = log
        self._fetches = fetches
        self._updates = updates

    def agree_on_deferred(self) -> None:
        """Waits until all ranks have decided. Each updates its shards while the others read; who
        reads a shard waits for its update."""
        if any(load.sharded is not NOT_SHARDED for load in self._log.job.units):
            self._fetches.agreed = self._log.decided[-1]
            self._fetches.note_updated(range(len(self._log.job.units)))

    def agree(self, units: Sequence[int]) -> None:
        """Waits until all ranks have updated their parts. A rank with all weights fetches the other
        parts."""
        loads = self._log.job.units
        if all(loads[unit].sharded is NOT_SHARDED for unit in units):
            return
        last_writes = [self._log.written.weights.get(unit) for unit in units]
        updated = self._log.add(COMPUTE, "shards are updated", after=last_writes)
        pulled = [self._pull(unit, updated) for unit in units]
        self._fetches.agreed = self._log.add(COMPUTE, "all ranks have stepped", after=pulled)

    def _pull(self, unit: int, updated: int) -> int:
        load = self._log.job.units[unit]
        sharded, name = load.sharded, f"weights of {load.name}"
        if sharded.is_gathered or not sharded.received_nbytes:
            return updated
        if sharded.are_weights_between_devices:
            return self._log.receive(name, sharded, [updated], is_by_device=True)
        # On a device the own part is there already, and the others are written beside it.
        is_there = load.weights == "device" or self._updates.stays(load)
        own_nbytes = 0 if is_there else load.weight_nbytes
        read = self._fetches.read_parts(load, own_nbytes + sharded.served_nbytes, [updated])
        received = self._log.receive(name, sharded, [updated, *read], is_by_device=False)
        if load.weights == "nvme":
            self._updates.write_weights(unit, [received])
            return self._log.written.weights[unit]
        if load.weights == "device" and not self._log.job.shares_host_memory:
            return self._log.move(H2D, name, sharded.received_nbytes, [received])
        return received
