"""Keeping freed memory for the next allocation, instead of giving it back to the kernel.

glibc serves a block above a threshold (128 KiB to 32 MiB, moving) by mmap and unmaps it when freed,
so a training step on the CPU faults in its activations page by page, again and again. With a high
threshold they come from the heap and stay there.

And glibc gives every thread a heap of its own, which keeps what that thread once needed: the
micro-batches of `infinity.forward_backward` run in threads and would keep it many times over. Such
a heap
also ends at 64 MiB, beyond which it maps and unmaps as before. One heap for all has neither fault,
and hardly any contention: tensors are few and large.
"""

from __future__ import annotations

import ctypes

from infinity.sizes import GIB

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_freed_memory() -> bool:
    """Tunes malloc for the process; False where the C library is not glibc.

    Call before torch allocates and before there are other threads. The heap then stays at its
    high-water mark, which is what a training step needs anyway; `give_back` returns it after a
    phase that needed more.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = {_M_MMAP_THRESHOLD: GIB, _M_TRIM_THRESHOLD: 2 * GIB - 1, _M_ARENA_MAX: 1}
    return all(bool(mallopt(option, value)) for option, value in options.items())


def give_back() -> None:
    """Returns every free page of the heap to the kernel."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
