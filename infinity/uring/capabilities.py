"""Questions to the kernel about its rings, answered by trying."""

from __future__ import annotations

import errno
import mmap
from dataclasses import dataclass

from infinity.uring.ring import Feature, Ring, RingError, SetupFlag

# The flag that each of these needs beside itself.
_COMPANIONS = {
    SetupFlag.TASKRUN_FLAG: SetupFlag.COOP_TASKRUN,
    SetupFlag.DEFER_TASKRUN: SetupFlag.SINGLE_ISSUER,
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The capabilities of this kernel for this process; all empty when `errno` is not 0.

    `errno` is the kernel's refusal of a small ring, or 0. `setup_flags` are the flags that the
    kernel grants; `opcodes` the names of its operations; `max_num_entries` the largest ring.
    """

    errno: int
    features: Feature = Feature.NONE
    setup_flags: SetupFlag = SetupFlag.NONE
    opcodes: frozenset[str] = frozenset()
    max_num_entries: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether the kernel did what was tried."""
        return self.errno == 0


def probe() -> Probe:
    """Sets up rings to find what the kernel grants. A refusal is a result: `Probe.errno`.

    Raises UnsupportedError when the binding was not built.
    """
    try:
        with Ring(4) as ring:
            features, opcodes = ring.features, ring.opcodes()
    except RingError as error:
        return Probe(error.errno or errno.EINVAL)
    granted = SetupFlag.NONE
    for flag in SetupFlag:
        if _sets_up(4, flag | _COMPANIONS.get(flag, SetupFlag.NONE)):
            granted |= flag
    return Probe(0, features, granted, opcodes, _max_num_entries())


def try_registering(nbytes: int) -> int:
    """Pins `nbytes` of new memory as one buffer, and unpins it. Returns 0 or the errno.

    Raises RingError when the kernel refuses the ring.
    """
    with mmap.mmap(-1, nbytes) as memory, Ring(4) as ring:
        try:
            ring.register_buffers([memory])
        except RingError as error:
            return error.errno or errno.EINVAL
        ring.unregister_buffers()
        return 0


def _max_num_entries() -> int:
    num_entries = 1 << 16
    while num_entries > 4:
        try:
            with Ring(num_entries, SetupFlag.CLAMP) as ring:
                return ring.num_entries
        except RingError:  # ENOMEM: before 5.12 the queues count against the memlock limit.
            num_entries //= 2
    return num_entries


def _sets_up(num_entries: int, flags: SetupFlag) -> bool:
    try:
        Ring(num_entries, flags).close()
    except RingError:
        return False
    return True
