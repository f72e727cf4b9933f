"""The operations of simulated steps in the order in which they are needed. Pure.

Tracks: compute, with the decoding of stored weights; update (the host's thread), norms (threads of
the host), nvme, h2d, d2h, gather (between devices), sockets (between the hosts of ranks), network
(between nodes). If the device is the host itself, compute, update and norms are one thread and one
track.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from infinity.simulate.clock import Operation
from infinity.simulate.memory import sums_in_memory
from infinity.simulate.spec import Rates, ShardedLoad, StepSpec

COMPUTE, UPDATE, NVME, H2D, D2H, GATHER = "compute", "update", "nvme", "h2d", "d2h", "gather"
SOCKETS, NETWORK = "sockets", "network"
# Of the time that decoding takes alone, what it adds to matrix products beside it: 0.82 to 0.93 on
# an H200, whatever the priority of its stream.
DECODING_ADDS = 0.9
NORMS = "norms"  # All threads that compute them; beside a device.
_JOIN = "join"  # Ends what several tracks do at the same time. Takes no time.
READ, WRITE = "nvme_read", "nvme_write"
CHECKPOINT_READ = "checkpoint_read"  # Of the files that a frozen base rests in.

# By the last step but one the caches and queues are in their steady state. The last step exists to
# compete with it for the links.
NUM_STEPS = 5
SHOWN = NUM_STEPS - 2


class OperationLog:
    """Appends operations. Operations of compute and update keep the order of the program.

    `decided` has the operation of each step at which the optimizer decides. `sums`: units
    whose gradients rest on NVMe and are in memory.
    """

    def __init__(self, job: StepSpec, rates: Rates) -> None:
        self.job = job
        self.rates = rates
        self.operations: list[Operation] = []
        self.decided: list[int] = []
        self.step = 0
        self.pass_name = ""
        self.update_track = COMPUTE if job.shares_host_memory else UPDATE
        self.last_on: dict[str, int] = {}
        # The operations that a later read of the same bytes waits for.
        self.written_weights: dict[int, int] = {}
        self.written_gradients: dict[int, int] = {}
        self.written_state: dict[tuple[int, int], int] = {}
        self.sums = sums_in_memory(job)

    def add(
        self, track: str, name: str, duration_s: float = 0.0, *, after: Sequence[int | None] = (),
        nbytes: int = 0, traffic: str = "",
    ) -> int:  # fmt: skip
        """Adds an operation on `track` after those with the indices `after` and the track's last.

        Returns its index.
        """
        before = [index for index in after if index is not None]
        if track in (COMPUTE, UPDATE) and track in self.last_on:
            before.append(self.last_on[track])
        index = len(self.operations)
        self.last_on[track] = index
        label = f"{self.pass_name}: {name}"
        waits = tuple(dict.fromkeys(before))
        is_late = traffic == WRITE
        self.operations.append(
            Operation(track, label, duration_s, waits, nbytes, traffic, self.step, is_late)
        )
        return index

    def join(self, name: str, after: Sequence[int | None]) -> int:
        """Adds the moment when all of these operations are over."""
        return self.add(_JOIN, name, after=after)

    def move(self, track: str, name: str, nbytes: int, after: Sequence[int | None]) -> int:
        """Adds a transfer between device and host."""
        rate = {H2D: self.rates.h2d, D2H: self.rates.d2h}[track]
        return self.add(track, name, nbytes / rate, after=after, nbytes=nbytes, traffic=track)

    def nvme(self, traffic: str, name: str, nbytes: int, after: Sequence[int | None]) -> int:
        """Adds a transfer of the drives; `traffic` is READ or WRITE."""
        return self.add(NVME, name, after=after, nbytes=nbytes, traffic=traffic)

    def exchange(
        self, verb: Literal["received", "sent"], name: str, sharded: ShardedLoad,
        after: Sequence[int | None], *, is_by_device: bool,
    ) -> int:  # fmt: skip
        """Adds the transfer of a unit's weights from the other ranks ("received"), or that of its
        gradients to them ("sent")."""
        nbytes, between_nodes_nbytes = sharded.sent_nbytes, sharded.network_sent_nbytes
        if verb == "received":
            nbytes, between_nodes_nbytes = sharded.received_nbytes, sharded.network_received_nbytes
        track, rate = (GATHER, self.rates.peers) if is_by_device else (SOCKETS, self.rates.sockets)
        exchanged = self.add(
            track, name, nbytes / rate, after=after, nbytes=nbytes, traffic=f"{track}_{verb}"
        )
        if not between_nodes_nbytes:
            return exchanged
        between = self.add(
            NETWORK, name, between_nodes_nbytes / self.rates.network, after=after,
            nbytes=between_nodes_nbytes, traffic=f"{NETWORK}_{verb}",
        )  # fmt: skip
        return self.join(name, [exchanged, between])
