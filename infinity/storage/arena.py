"""Host memory that I/O goes to and from: the arena, and windows through which it is seen.

Note "moving pages": a Window is reserved address space. `map` moves pages of the arena into it,
`unmap` moves them back; no byte is copied and the physical pages stay the same. While a range is
mapped away, the arena's own addresses of it fault, and no I/O may be issued to it. Where a window
has no pages it reads as bytes of 0xFF, NaN in every floating-point format, and cannot be written.
Those bytes are one file in memory for all windows, an eighth of the largest: 8 to 64 MiB.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from errno import ENOMEM
from pathlib import Path
from typing import Any

from infinity import _core
from infinity.config.machine import host_memory, usable_cores
from infinity.errors import CapacityError, ConfigError
from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES, align_up
from infinity.storage.closing import Closing

_log = logging.getLogger("infinity")
_VMA = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


class Arena(Closing):
    """One populated mapping: aligned to 2 MiB, of huge pages where the kernel has them.

    The capacity is rounded up to full pages of 4096 bytes. Not inherited by forked children.
    Views returned by `memory` keep the memory alive, also after `close`; it is unmapped when the
    last of them, and of the engines that were opened with it, is gone. `numa_node`: where its pages
    shall lie as long as there are free ones, usually that of the device; mbind(2). `is_shared`: the
    mapping is of a file in memory that other processes can map; see `can_share`.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        is_shared: bool = False,
    ) -> None:
        if capacity_nbytes <= 0:
            raise ConfigError(f"{capacity_nbytes=}, expected a positive number of bytes")
        capacity_nbytes = align_up(capacity_nbytes, PAGE_NBYTES)
        memory = host_memory()
        # Populating all there is would end in the OOM killer, not in an error.
        if capacity_nbytes > memory.most_nbytes:
            raise _too_large(capacity_nbytes, memory.most_nbytes, memory.limit)
        wish: dict[str, Any] = {} if numa_node is None else {"numa_node": numa_node}
        wish |= {"is_shared": True} if is_shared else {}
        try:
            self._core: _core.Arena | None = _core.Arena(
                capacity_nbytes, huge_pages=huge_pages, num_threads=usable_cores(), **wish
            )
        except OSError as error:
            if error.errno != ENOMEM:
                raise
            memory = host_memory()
            raise _too_large(capacity_nbytes, memory.nbytes, memory.limit) from error
        self.address: int = self._core.address
        self.capacity_nbytes = capacity_nbytes
        self.is_shared = is_shared
        if numa_node is not None:
            taken = "on" if self._core.prefers_node else "not, as the kernel refuses mbind, on"
            _log.info("pages of the host arena %s NUMA node %d", taken, numa_node)

    @property
    def core(self) -> _core.Arena:
        """The native arena. Raises ValueError after close()."""
        if self._core is None:
            raise ValueError("the arena is closed")
        return self._core

    @property
    def descriptor(self) -> int | None:
        """The file in memory of a shared arena, sealed against truncation; None without one, and
        after `close_file`."""
        descriptor = self.core.descriptor if self.is_shared else -1
        return None if descriptor < 0 else descriptor

    def close_file(self) -> None:
        """Closes the file of a shared arena, before a child of a fork inherits it and keeps the
        memory. What is mapped, here or elsewhere, stays. Idempotent."""
        if self.is_shared:
            self.core.close_file()

    @property
    def huge_page_nbytes(self) -> int:
        """Bytes that huge pages back now. Asks the kernel about all mappings: milliseconds."""
        start = self.core.address
        end = start + align_up(self.capacity_nbytes, HUGE_PAGE_NBYTES)
        total_nbytes, is_inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():  # Linux 4.8.
            if match := _VMA.match(line):
                is_inside = start <= int(match[1], 16) and int(match[2], 16) <= end
            elif is_inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
                total_nbytes += int(line.split()[1]) * 1024
        return total_nbytes

    def memory(self, offset_nbytes: int, nbytes: int) -> memoryview:
        """A writable view of bytes, without a copy."""
        _check_range(offset_nbytes, nbytes, self.capacity_nbytes)
        return memoryview(self.core)[offset_nbytes : offset_nbytes + nbytes]

    def close(self) -> None:
        """Unmaps the memory. Idempotent."""
        self._core = None


def view_arena(pid: int, descriptor: int, nbytes: int) -> memoryview:
    """Returns the memory of a shared arena of another process, read-only; it stays as long as the
    view, also after the end of that process.

    `descriptor`: `Arena.descriptor` there. Raises OSError if this process may not open it, or if it
    is no such file. proc(5).
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(_core.ArenaView(opened, nbytes))
    finally:
        os.close(opened)


class Window(Closing):
    """A reserved address range that shows pages of an arena, for as long as they are mapped."""

    def __init__(self, capacity_nbytes: int) -> None:
        if capacity_nbytes <= 0:
            raise ConfigError(f"{capacity_nbytes=}, expected a positive number of bytes")
        self.capacity_nbytes = align_up(capacity_nbytes, PAGE_NBYTES)
        self._core: _core.Window | None = _core.Window(self.capacity_nbytes)
        self.address: int = self._core.address

    def map(
        self, arena: Arena, arena_offset_nbytes: int, nbytes: int, window_offset_nbytes: int = 0
    ) -> None:
        """Moves pages of the arena into the window.

        All three numbers are multiples of 4096; multiples of 2 MiB do not split huge pages. Nothing
        may be in flight in the range. Raises ValueError for a bad range, OSError when the kernel
        refuses.
        """
        self._live().map(arena.core, arena_offset_nbytes, nbytes, window_offset_nbytes)

    def unmap(
        self, arena: Arena, arena_offset_nbytes: int, nbytes: int, window_offset_nbytes: int = 0
    ) -> None:
        """Moves the pages back, with the same arguments as `map`."""
        self._live().unmap(arena.core, arena_offset_nbytes, nbytes, window_offset_nbytes)

    def memory(self, offset_nbytes: int, nbytes: int) -> memoryview:
        """A view of the window. A part that is not mapped reads as 0xFF; writing it is a segfault.

        Where that would take too many mappings (windows of 1 TiB in all, or 16384 of them), it
        cannot be read either.
        """
        _check_range(offset_nbytes, nbytes, self.capacity_nbytes)
        return memoryview(self._live())[offset_nbytes : offset_nbytes + nbytes]

    def close(self) -> None:
        """Unmaps the addresses. Pages that are still mapped are lost. Idempotent."""
        self._core = None

    def _live(self) -> _core.Window:
        if self._core is None:
            raise ValueError("the window is closed")
        return self._core


@functools.cache
def can_remap() -> bool:
    """Returns whether the kernel moves pages as `Window` needs, found by trying. Else: copy."""
    return _core.can_remap()


@functools.cache
def can_share(*, huge_pages: bool) -> bool:
    """Returns whether a shared arena is as good as one of this process alone, found by trying: the
    kernel gives it as many huge pages, and moves its pages into windows (Linux 5.13)."""
    nbytes = 2 * HUGE_PAGE_NBYTES
    try:
        with (
            Arena(nbytes, huge_pages=huge_pages) as own,
            Arena(nbytes, huge_pages=huge_pages, is_shared=True) as shared,
        ):
            if shared.huge_page_nbytes < own.huge_page_nbytes:
                return False
            if can_remap():
                with Window(nbytes) as window:
                    window.map(shared, 0, nbytes)
                    window.unmap(shared, 0, nbytes)
    except (OSError, CapacityError):
        return False
    return True


def available_host_nbytes() -> int:
    """Memory that can be populated without swapping, inside the limits of every cgroup."""
    return host_memory().nbytes


def _too_large(capacity_nbytes: int, available_nbytes: int, limit: str | None) -> CapacityError:
    why = "" if limit is None else f" below {limit}"
    return CapacityError(
        "host",
        needed_nbytes=capacity_nbytes,
        available_nbytes=available_nbytes,
        key="tiers.host.capacity",
        detail=f"the host arena does not fit the memory that is free now{why}",
    )


def _check_range(offset_nbytes: int, nbytes: int, capacity_nbytes: int) -> None:
    if offset_nbytes < 0 or nbytes < 0 or offset_nbytes + nbytes > capacity_nbytes:
        raise ValueError(
            f"range {offset_nbytes}..{offset_nbytes + nbytes} is outside 0..{capacity_nbytes}"
        )
