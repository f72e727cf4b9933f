"""Counters: what moved, what waited, what is in use. No logic depends on them.

Names end in their unit. `*_in_use_nbytes` are gauges, everything else only grows:

  nvme_read_nbytes, nvme_write_nbytes        bytes asked of the drives
  device_in_nbytes, device_out_nbytes        bytes copied host -> device and device -> host
  read_wait_s, write_wait_s, copy_wait_s     time the training thread stood still for a transfer
  update_s                                   arithmetic of the optimizer, waits not counted
  fetches, fetches_late, fetches_unplanned   unit fetches; those waited for; those not foreseen
  faults                                     parameters touched outside their module
  host_in_use_nbytes                         arena bytes lent out at this moment
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Counters:
    """Named sums, safe to add to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name] += value

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name] = value

    def snapshot(self) -> dict[str, float]:
        """A copy of every counter; a name that was never added to is absent."""
        with self._lock:
            return dict(self._values)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds the block took to `name`, also when it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start_s)
