"""Counters: bytes moved, seconds waited, memory in use. No result depends on them; the
policy of early updates reads the seconds waited.

Names end in their unit. `host_in_use_nbytes` is a gauge, everything else only grows:

  nvme_read_nbytes, nvme_write_nbytes        bytes requested of the drives
  shard_read_nbytes                          the part of them read from a checkpoint's own files
  device_in_nbytes, device_out_nbytes        bytes copied host -> device and device -> host
  activation_in_nbytes, activation_out_nbytes  saved layer inputs: copied to the device, and from it
  read_wait_s, write_wait_s, copy_wait_s     time the training thread waited for a transfer
  ranks_wait_s                               the same, for other ranks
  data_wait_s                                time in which a Trainer made the batches of steps
  decode_s                                   making weights of stored bytes, on the host
  update_s                                   arithmetic of the optimizer, waits not counted
  early_updates_kept, early_updates_undone   units updated in the backward: kept by the step, or not
  state_held_back_nbytes                     updated state not yet written when a backward begins
  chunks_read_in_backward                    chunks read in a backward for the next update
  chunks_read_in_forward                     chunks read in a forward for updates in the backward
  weights_s                                  moving weights in and out for updates
  fetches, fetches_late, fetches_unplanned   unit fetches; those waited for; those not predicted
  fetches_staged                             stored weights on a device before space to decode them
  faults                                     operations on handles outside their module
  host_in_use_nbytes                         arena bytes lent at this moment
  ranks_gathered_nbytes                      bytes of weights exchanged with other ranks
  ranks_gathered_between_nodes_nbytes        of these, those of ranks of other nodes
  ranks_reduced_nbytes                       bytes of gradients exchanged with other ranks
  ranks_socket_nbytes                        bytes that this rank sent through sockets to others
  ranks_collectives, ranks_cancelled         operations of all ranks at once; those cancelled
  ranks_stand_ins, ranks_control_messages    operations for others; words about operations
  ranks_reduce_buffer_high_water_nbytes      most memory that partial gradients took
  ranks_reduce_buffer_spilled_nbytes         partial gradients that went to the drives

While `tracer` is on, every timed section also becomes a span, and every gauge a point, by the same
readings of the clock: a trace and the counters never disagree.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from infinity.observe.tracer import Tracer, Track

# The track that shows the time behind a counter. Other counters are sums over shown spans.
_TRACKS = {
    "read_wait_s": Track.STALLS,
    "write_wait_s": Track.STALLS,
    "copy_wait_s": Track.STALLS,
    "ranks_wait_s": Track.STALLS,
    "data_wait_s": Track.STALLS,
    "update_s": Track.UPDATES,
    "decode_s": Track.STALLS,
}


class Counters:
    """Named sums, safe to add to from any thread."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float) -> None:
        """Adds to a counter, which begins at 0. Any thread."""
        with self._lock:
            self._values[name] += value

    def set(self, name: str, value: float) -> None:
        """Sets a counter, and records the value in a running trace. Any thread."""
        with self._lock:
            self._values[name] = value
        if self.tracer.is_on:
            self.tracer.count(name, value)

    def snapshot(self) -> dict[str, float]:
        """A copy of every counter; a name that was never added to is absent."""
        with self._lock:
            return dict(self._values)

    @contextmanager
    def timed(self, name: str, what: str = "", waits_for: Iterable[object] = ()) -> Iterator[None]:
        """Adds the seconds the block took to `name`, also when it raises.

        In a trace the span is called `what`; `waits_for` are the transfers it stands still for.
        """
        tracer = self.tracer
        details = tracer.details_of(waits_for) if tracer.is_on else {}
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add_time(name, start_ns, what, **details)

    def add_time(self, name: str, start_ns: int, what: str = "", **details: Any) -> None:
        """Adds the seconds since a time of CLOCK_MONOTONIC, as `timed` does: for what each unit
        does, because a context manager costs several calls."""
        end_ns = time.monotonic_ns()
        self.add(name, (end_ns - start_ns) / 1e9)
        tracer = self.tracer
        if tracer.is_on and name in _TRACKS:
            tracer.span(_TRACKS[name], what or name, start_ns, end_ns, counter=name, **details)
