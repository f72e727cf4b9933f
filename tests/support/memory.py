"""How much memory a process has, and how much more a piece of work takes: from /proc, of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_PR_SET_THP_DISABLE = 41  # <linux/prctl.h>
_M_MMAP_THRESHOLD = -3  # <malloc.h>


def resident_nbytes() -> int:
    """Counted page by page: /proc/self/statm lags behind by some pages on every processor."""
    return _nbytes_of("smaps_rollup", "Rss:")


def use_small_pages() -> None:
    """From here on this process gets no huge page. Where the kernel gives them unasked, a page that is
    touched may count as two MiB."""
    assert ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0


def return_large_blocks() -> None:
    """Call this before the first large block: every block of a MiB and more then has a mapping of its
    own, which free() returns. In the heap of glibc, gaps between blocks would count as growth, in
    each run others."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20) == 1


def growth_nbytes(work: Callable[[], object]) -> int:
    """How far resident memory rises above what it is now while `work` runs, the lesser of two times.

    The mark belongs to the whole process, so it should be one of its own.
    """
    from infinity.tools.training.process import give_back

    use_small_pages()

    def once() -> int:
        give_back()  # Or what was freed is taken again, and is no growth.
        Path("/proc/self/clear_refs").write_text("5")  # The mark falls to what is resident now.
        before = _nbytes_of("status", "VmHWM:")
        work()
        return _nbytes_of("status", "VmHWM:") - before

    return min(once(), once())  # The first time is also the first of some imports.


def _nbytes_of(file: str, name: str) -> int:
    """A line of a file in /proc/self, in bytes."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
