"""A question of gpu.py: how long does it take to page-lock an arena, and what does it take of a
device?

Arenas of growing sizes, as far as host memory allows, are registered as the engine does it, in
parts of at most 64 GiB. The counterparts of the same run: pages of 4 KiB instead of huge ones, a
shared arena (several ranks of a machine have those), one registration instead of parts, and
PyTorch's own pinned memory, which is populated and page-locked at once. Of the first arena, copies
are also timed before it is registered: how fast they are, and how much of that time the host is
held up, decide what an arena that is not page-locked would cost
(docs/design/0008-on-a-device.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import progress, say
from gpu_common import Sizes, synchronize
from rich.console import Console
from rich.table import Table

from infinity.errors import CapacityError, UnsupportedError
from infinity.sizes import GIB, MIB, format_nbytes
from infinity.storage.arena import Arena, available_host_nbytes
from infinity.tiers.cuda import pin, unpin

_FITTING = 0.85  # Of the free host memory: the rest is for page tables and everybody else.
_COPIED_NBYTES = 2 * GIB
_TORCH_NBYTES = 16 * GIB  # A power of two: PyTorch rounds pinned memory up to one.


@dataclass(frozen=True, slots=True)
class Case:
    """An arena to register."""

    nbytes: int
    part_nbytes: int  # Of one registration.
    huge_pages: bool = True
    is_shared: bool = False

    @property
    def name(self) -> str:
        kind = "shared" if self.is_shared else "huge pages" if self.huge_pages else "4 KiB pages"
        count = -(-self.nbytes // self.part_nbytes)
        return f"{kind}, {count} registration{'s' if count > 1 else ''}"


class NoRuntime:
    """Stands for `torch.cuda.cudart()` on a machine without CUDA, and locks nothing."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


def cases(sizes: Sizes, free_nbytes: int) -> list[Case]:
    """The arenas that fit, and the largest that fits where a size of `sizes` does not."""
    fitting = int(free_nbytes * _FITTING)
    chosen = [nbytes for nbytes in sizes.arenas_nbytes if nbytes <= fitting]
    most = fitting // sizes.arena_step_nbytes * sizes.arena_step_nbytes
    if len(chosen) < len(sizes.arenas_nbytes) and most > max(chosen, default=0):
        chosen.append(most)
    found = [Case(nbytes, sizes.registered_nbytes) for nbytes in chosen]
    for nbytes in chosen[:1]:
        found.append(Case(nbytes, sizes.registered_nbytes, huge_pages=False))
        found.append(Case(nbytes, sizes.registered_nbytes, is_shared=True))
    found += [Case(nbytes, nbytes) for nbytes in chosen if nbytes > sizes.registered_nbytes]
    return sorted(found, key=lambda case: case.nbytes)  # The largest last: it may be refused.


def pinning(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    torch.zeros(1, device=there)  # The context takes memory of its own, before anything is read.
    free_nbytes = available_host_nbytes()
    chosen = cases(sizes, free_nbytes)
    for nbytes in sizes.arenas_nbytes:
        if nbytes not in {case.nbytes for case in chosen}:
            say(f"an arena of {format_nbytes(nbytes)} is left out: {format_nbytes(free_nbytes)} "
                "of host memory are free")  # fmt: skip
    with _log_lines():
        counterpart = _torch_row(min(_TORCH_NBYTES, sizes.arenas_nbytes[0]), there)
        rows = [_row(case, there, is_first=case is chosen[0]) for case in chosen]
    _show(rows, counterpart, there, console)
    return {"free_nbytes": free_nbytes, "rows": rows, "torch": counterpart}


def _row(case: Case, there: torch.device, *, is_first: bool) -> dict[str, Any]:
    say(f"an arena of {format_nbytes(case.nbytes)}: {case.name}")
    row: dict[str, Any] = {"name": case.name, **asdict(case)}
    begun_s = time.monotonic()
    try:
        with progress("its pages are touched", lambda: "not locked yet", every_s=10):
            arena = Arena(case.nbytes, huge_pages=case.huge_pages, is_shared=case.is_shared)
    except CapacityError as error:
        return row | {"refused": str(error)}
    with arena:
        row["touch_s"] = time.monotonic() - begun_s
        row["huge_page_nbytes"] = arena.huge_page_nbytes
        if is_first:
            row["pageable"] = _copied(arena, there)
        row |= _registered(arena, case, there)
    say(f"  {row.get('refused') or format(row['register_s'], '.2f') + ' s'}")
    return row


def _registered(arena: Arena, case: Case, there: torch.device) -> dict[str, Any]:
    runtime = torch.cuda.cudart() if there.type == "cuda" else NoRuntime()
    before_nbytes = _free_on_device(there)
    begun_s = time.monotonic()
    try:
        pin(arena, runtime, there, registered_nbytes=case.part_nbytes)
    except UnsupportedError as error:
        return {"register_s": time.monotonic() - begun_s, "refused": str(error)}
    registered_s = time.monotonic()
    within_nbytes = _free_on_device(there)
    unpin(arena, runtime, registered_nbytes=case.part_nbytes)
    return {
        "register_s": registered_s - begun_s,
        "unregister_s": time.monotonic() - registered_s,
        "device_free_before_nbytes": before_nbytes,
        "device_free_within_nbytes": within_nbytes,
        "device_free_after_nbytes": _free_on_device(there),
    }


def _copied(arena: Arena, there: torch.device) -> dict[str, Any]:
    """Copies between the device and memory that is not page-locked, as the engine issues them.
    `issue_s`: until the call returns."""
    nbytes = min(_COPIED_NBYTES, arena.capacity_nbytes)
    on_host = torch.frombuffer(arena.memory(0, nbytes), dtype=torch.uint8)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=there)
    found: dict[str, Any] = {"nbytes": nbytes}
    for name, target, source in (("in", on_device, on_host), ("out", on_host, on_device)):
        for _ in range(2):  # The first one is not counted.
            synchronize(there)
            begun_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            issued_s = time.perf_counter()
            synchronize(there)
            found[name] = {"issue_s": issued_s - begun_s, "s": time.perf_counter() - begun_s}
    return found


def _torch_row(nbytes: int, there: torch.device) -> dict[str, Any]:
    """PyTorch's pinned memory. Without CUDA, memory that is not pinned: to try the program."""
    say(f"{format_nbytes(nbytes)} of PyTorch's pinned memory")
    begun_s = time.monotonic()
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=there.type == "cuda")
    if there.type != "cuda":
        memory.zero_()
    row = {"nbytes": nbytes, "seconds": time.monotonic() - begun_s}
    del memory
    if there.type == "cuda":
        torch.accelerator.empty_host_cache()
    return row


def _free_on_device(there: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(there)[0]) if there.type == "cuda" else None


def _show(rows: Any, counterpart: Any, there: torch.device, console: Console) -> None:
    rate = counterpart["nbytes"] / GIB / counterpart["seconds"]
    is_real = there.type == "cuda"
    table = Table(
        "arena", "how", "touched s", "registered s", "GiB/s", "both GiB/s", "of PyTorch's",
        "ended s", "device MiB before", "within", "after",
        title=f"PyTorch's pinned memory: {rate:.2f} GiB/s, touched and locked at once"
        + ("" if is_real else "; no CUDA: NOTHING IS LOCKED, the figures mean nothing"),
    )  # fmt: skip
    for row in rows:
        size = format_nbytes(row["nbytes"])
        if "pageable" in row:
            console.print(_said_of_pageable(row["pageable"]))
        if "refused" in row:
            table.add_row(size, row["name"], "refused")
            console.print(f"{size}, {row['name']}: {row['refused']}")
            continue
        gib = row["nbytes"] / GIB
        both = gib / (row["touch_s"] + row["register_s"])
        moments = (row[f"device_free_{when}_nbytes"] for when in ("before", "within", "after"))
        table.add_row(
            size, row["name"], f"{row['touch_s']:.2f}", f"{row['register_s']:.2f}",
            f"{gib / row['register_s']:.2f}", f"{both:.2f}", f"{both / rate:.2f}",
            f"{row['unregister_s']:.2f}",
            *("-" if nbytes is None else f"{nbytes / MIB:,.0f} free" for nbytes in moments),
        )  # fmt: skip
    console.print(table)


def _said_of_pageable(copied: Any) -> str:
    told = (
        f"{name} {copied['nbytes'] / 1e9 / copied[name]['s']:.1f} GB/s, of which the call takes "
        f"{copied[name]['issue_s'] / copied[name]['s']:.2f}"
        for name in ("in", "out")
    )
    return "copies before the arena is page-locked: " + "; ".join(told)


@contextmanager
def _log_lines() -> Iterator[None]:
    """Shows the engine's own progress: a line for each part that it has page-locked."""
    log, handler = logging.getLogger("infinity"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("  %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
