"""Calls of the native module that are wrong in every way it can notice: each raises, none crashes.

    python hostile_calls.py _core.so DIRECTORY     the same with a module built under sanitizers

`check(core, directory)` needs no pytest and no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

MIB = 1 << 20
PAGE = 4096
ABSURD = (2**63 - PAGE, 2**63, 2**64 - PAGE, 2**64 - 1, 2**64, 2**70)
HUGE = (2**31, 2**32, *ABSURD)
BAD = (ValueError, TypeError, OSError, OverflowError, MemoryError)


def check(core: Any, directory: Path) -> int:
    """How many calls were refused. Raises AssertionError for one that was not."""
    calls = [*_sizes(core), *_checksums(core), *_updates(core)]
    count = sum(_refused(name, call) for name, call in calls)
    for is_uring in (False, True):
        if is_uring and not core.probe_uring()["usable"]:
            continue
        count += _check_engine(core, directory, is_uring)
    return count


def _refused(name: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except BAD:
        return True
    raise AssertionError(f"accepted: {name}")


def _sizes(core: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for nbytes in (0, -1, 1, PAGE + 1, *ABSURD):
        yield f"Arena({nbytes})", lambda n=nbytes: core.Arena(n, False, 1)
        yield f"Window({nbytes})", lambda n=nbytes: core.Window(n)
    arena, window = core.Arena(MIB, False, 1), core.Window(MIB)
    numbers = (-1, 1, MIB, *HUGE)
    for which, bad in product(range(3), numbers):
        place = [0, PAGE, 0]
        place[which] = bad if not (which == 1 and bad == MIB) else 2 * MIB
        yield f"map{place}", lambda p=place: window.map(arena, *p)
        yield f"unmap{place}", lambda p=place: window.unmap(arena, *p)
    yield "map of nothing", lambda: window.map(arena, 0, 0, 0)
    yield "map of no arena", lambda: window.map(None, 0, PAGE, 0)
    yield "ring flags", lambda: core.probe_uring("everything")
    yield "ring flags with NUL", lambda: core.probe_uring("auto\0")


def _checksums(core: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for nbytes in (-1, 1, PAGE - 1, *ABSURD):
        yield f"crc32c_pages(_, {nbytes})", lambda n=nbytes: core.crc32c_pages(address, n)
        yield (
            f"first_bad_page(_, {nbytes})",
            lambda n=nbytes: core.first_bad_page(address, n, b"1234"),
        )
        yield f"PageDigests(_, {nbytes})", lambda n=nbytes: core.PageDigests(address, n)
    yield "checksums at 0", lambda: core.crc32c_pages(0, PAGE)
    yield "digests at 0", lambda: core.PageDigests(0, PAGE)
    yield "digests at the end", lambda: core.PageDigests(2**64 - PAGE, 2 * PAGE)
    yield "checksums at the end", lambda: core.crc32c_pages(2**64 - PAGE, 2 * PAGE)
    for expected in (b"", b"123", b"12345", b"12345678"):
        yield (
            f"first_bad_page(..., {expected!r})",
            lambda e=expected: core.first_bad_page(address, PAGE, e),
        )


def _updates(core: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    arrays = (ctypes.c_float * 64)()
    at = ctypes.addressof(arrays)

    def apply(span: tuple[Any, ...], **changes: Any) -> object:
        options = {
            "is_split": False, "is_gradient_bf16": False, "is_8bit": False, "gradient_scale": 1.0,
            "num_threads": 1, "simd": "", "rule": "adamw", "coefficients": [0.0] * 8, **changes,
        }  # fmt: skip
        return core.update.apply(
            options.pop("rule"), [span], options.pop("coefficients"), **options
        )

    good = (at, 0, at + 64, [at + 128, at + 192], 8)
    for which, bad in product((0, 2), (0, -1, 1, at + 1, 2**64 - 4, 2**64)):
        span = list(good)
        span[which] = bad
        yield f"update of {span}", lambda s=tuple(span): apply(s)
    for numel in (-1, 2**61, 2**63, 2**64):
        yield f"update of {numel}", lambda n=numel: apply((*good[:4], n))
    for values, count, sums in (
        *((bad, 8, at) for bad in (0, -1, at + 1, 2**64 - 4, 2**64)),
        *((at, bad, at) for bad in (-1, 2**62, 2**63, 2**64)),
        *((at, 8, bad) for bad in (0, -1, at + 4, 2**64)),
    ):
        yield (
            f"squares of {values}, {count}, {sums}",
            lambda v=values, n=count, s=sums: core.update.sum_squares(v, n, s, num_threads=1),
        )
    yield "squares on no thread", lambda: core.update.sum_squares(at, 8, at, num_threads=0)
    for states in ([], [at], [at, 0], [at, at + 2], [at] * 3):
        yield f"states {states}", lambda s=states: apply((*good[:3], s, 8))
    yield "no such rule", lambda: apply(good, rule="nothing")
    yield "no such simd", lambda: apply(good, simd="nothing")
    yield "no coefficients", lambda: apply(good, coefficients=[])
    yield "no threads", lambda: apply(good, num_threads=0)
    yield "no residual", lambda: apply(good, is_split=True)


def _check_engine(core: Any, directory: Path, is_uring: bool) -> int:
    options = {
        "block_nbytes": 16 * PAGE, "queue_depth": 2, "num_threads": 2, "max_pending": 8,
    }  # fmt: skip
    arena = core.Arena(MIB, False, 1)

    def engine(**changes: Any) -> Any:
        return core.Engine(is_uring, arena, **{**options, **changes})

    count = sum(
        _refused(f"{key}={value}", lambda k=key, v=value: engine(**{k: v}))
        for key in ("block_nbytes", "queue_depth", "num_threads", "max_pending")
        for value in (0, -1, 2**32, *((2**31, 1025) if key != "max_pending" else ()))
    )
    path = directory / "hostile"
    path.write_bytes(bytes(range(256)) * 256)
    live = engine()
    file = live.open(str(path), False)
    good = (file, 0, arena.address, PAGE)
    live.submit(True, [good, (file, PAGE, arena.address + PAGE, PAGE)], 0).wait()
    live.submit(False, [good], 4).wait(1.0)
    count += sum(_refused(name, call) for name, call in _bad_requests(live, good, path))
    assert live.drain(10.0)
    live.submit(False, [good], 0).wait()  # It still works.
    late = live.submit(False, [good], 0)
    live.close()
    late.wait()
    live.close()
    assert not late.cancel() and late.done()
    for name, call in _bad_requests(live, good, path):
        count += _refused(f"closed: {name}", call)
    count += _refused("closed: read", lambda: live.submit(False, [good], 0))
    count += _refused("closed: open", lambda: live.open(str(path), False))
    live.stats(), live.lanes(), live.drain(0.0)
    return count


def _bad_requests(
    engine: Any, good: tuple[int, int, int, int], path: Path
) -> Iterator[tuple[str, Callable[[], object]]]:
    for priority in (-1, 5, 255, 256, 2**31, 2**40):
        yield f"priority {priority}", lambda p=priority: engine.submit(False, [good], p)
    for which, bad in product(range(4), (-1, -(2**63), None, "1", 1.5, *HUGE)):
        if (which, bad) in ((2, 2**31), (2, 2**32)):
            continue  # An address like any other: nobody knows whether there is memory.
        segment = [*good]
        segment[which] = bad  # type: ignore[call-overload]
        yield f"segment {segment}", lambda s=tuple(segment): engine.submit(False, [s], 0).wait()
    file, _, address, _ = good
    for segment in (
        (), good[:3], (*good, 0), 7, None, (file, 0, 0, PAGE), (file + 1, 0, address, PAGE),
        (file, 0, address, 2 * MIB), (file, 0, address + MIB - PAGE, 2 * PAGE),
    ):  # fmt: skip
        yield f"segment {segment}", lambda s=segment: engine.submit(False, [s], 0).wait()
    yield "no segments", lambda: engine.submit(False, None, 0)
    for name in ("", "\0", f"{path}\0", f"{path}\0more", str(path.parent), "/nonexistent/file"):
        yield f"open({name!r})", lambda n=name: engine.open(n, False)
    for number in (-1, file + 1, 2**31 - 1, 2**31):
        yield f"close_file({number})", lambda n=number: engine.close_file(n)
        yield f"sync({number})", lambda n=number: engine.sync(n)
        yield f"alignment({number})", lambda n=number: engine.alignment_nbytes(n)


def _load(path: str) -> Any:
    """The module as `infinity._core`, for its errors come from `infinity.errors`."""
    spec = importlib.util.spec_from_file_location("infinity._core", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        print(check(_load(sys.argv[1]), Path(sys.argv[2])), "calls refused")
