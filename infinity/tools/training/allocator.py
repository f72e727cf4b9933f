"""Keeps freed memory for the next allocation, instead of returning it to the kernel.

glibc serves a block above a threshold (128 KiB to 32 MiB, adaptive) by mmap and unmaps it when it
is freed. A training step on the CPU then faults in its activations page by page, in every step.
With a high threshold, activations come from the heap and stay there.

glibc also gives every thread its own heap, which keeps the memory that the thread once needed. The
micro-batches of `infinity.forward_backward` run in threads and would keep it many times over. Such
a heap ends at 64 MiB, above which it maps and unmaps as before. One heap for all threads avoids
both, with hardly any contention, because tensors are few and large.

CUDA's allocator keeps segments of the sizes that were asked for. Units of different sizes leave
holes between their blocks there, and what one stream has freed no other stream takes. A segment
that expands has one range of addresses for a stream, so freed blocks join.
Source: PyTorch, "CUDA semantics", section "Memory management".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

from infinity.sizes import GIB

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def keep_freed_memory() -> bool:
    """Tunes malloc for the process. Returns False if the C library is not glibc.

    Call it before torch allocates and before other threads start. The heap then stays at its
    high-water mark, which a training step needs anyway. `give_back` returns memory after a phase
    that needed more.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = {_M_MMAP_THRESHOLD: GIB, _M_TRIM_THRESHOLD: 2 * GIB - 1, _M_ARENA_MAX: 1}
    return all(bool(mallopt(option, value)) for option, value in options.items())


def expand_segments(environment: MutableMapping[str, str] | None = None) -> bool:
    """Has segments of CUDA memory expand, unless the user has configured the allocator.

    Returns whether it did. Call it before CUDA allocates: torch reads the variable then.
    """
    environment = os.environ if environment is None else environment
    if any(environment.get(name) for name in _ALLOCATOR_VARIABLES):
        return False
    environment[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return True


def give_back() -> None:
    """Returns every free page of the heap to the kernel."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
