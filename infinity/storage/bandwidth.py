"""Measures the bandwidth of paths, by moving bytes: the weights for striping over several paths.

A stripe is written once and read once or more per step, so a path's bandwidth is what it needs for
both, one after the other. The engine measures with the same blocks and depth that it will work
with. Takes about a tenth of a second per path, longer on slow drives.
"""

from __future__ import annotations

import ctypes
import mmap
import time

from infinity.sizes import MIB
from infinity.storage.protocol import Priority, Segment, StorageEngine

SAMPLE_NBYTES = 32 * MIB
_NUM_ROUNDS = 2


def measure_bandwidth(engine: StorageEngine, file: int) -> float:
    """Bytes per second of writing and reading the first 32 MiB of a file, better of two rounds.

    The file must have that length; its content is lost. Raises StorageError.
    """
    with mmap.mmap(-1, SAMPLE_NBYTES) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        sample = [Segment(file, 0, ctypes.addressof(anchor), SAMPLE_NBYTES)]
        try:
            # Not counted: extents that were never written are slow to write.
            engine.submit("write", sample, Priority.STATE).wait()
            best_s = min(_round_trip_s(engine, sample) for _ in range(_NUM_ROUNDS))
        finally:
            engine.drain()  # An interrupted wait leaves the memory in use.
            del anchor  # Else the memory cannot be unmapped.
    return 2 * SAMPLE_NBYTES / best_s


def _round_trip_s(engine: StorageEngine, sample: list[Segment]) -> float:
    start_s = time.perf_counter()
    engine.submit("write", sample, Priority.STATE).wait()
    engine.submit("read", sample, Priority.STATE).wait()
    return time.perf_counter() - start_s
