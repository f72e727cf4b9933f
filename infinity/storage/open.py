"""Opens a storage engine: the one that a configuration describes, or one by its options."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

from infinity.errors import ConfigError, StorageError, UnsupportedError
from infinity.sizes import PAGE_NBYTES
from infinity.storage.native_engine import MAX_QUEUE_DEPTH, NativeEngine, RingFlags, depth_range
from infinity.storage.probe import (
    explain_missing_uring,
    explain_refused_rings,
    grants_ring_flags,
)
from infinity.storage.protocol import StorageEngine

if TYPE_CHECKING:
    from infinity.config.schema.engine import Io
    from infinity.storage.arena import Arena

EngineName = Literal["auto", "io_uring", "threads"]

MAX_BLOCK_NBYTES = 1 << 30
MAX_RINGS = 16

_log = logging.getLogger(__name__)
_warned_fallbacks: set[str] = set()


def open_configured(io: Io, arena: Arena | None, **changes: Any) -> StorageEngine:
    """Opens the engine that `[io]` describes.

    `changes` are options of `open_engine` that replace those of `io`; None keeps the option.
    """
    options: dict[str, Any] = {
        "block_nbytes": io.block_size,
        "queue_depth": io.queue_depth,
        "num_threads": io.threads,
        "num_rings": io.rings,
        "ring_flags": io.flags,
    }
    options |= {name: value for name, value in changes.items() if value is not None}
    return open_engine(io.engine, arena=arena, **options)


def open_engine(
    name: EngineName = "auto",
    *,
    arena: Arena | None,
    block_nbytes: int = 4 << 20,
    queue_depth: int | Literal["auto"] = 4,
    num_threads: int = 4,
    max_pending: int = 1024,
    num_rings: int = 1,
    ring_flags: RingFlags = "auto",
) -> StorageEngine:
    """Opens the engine `name`; "auto" takes io_uring, or threads with one warning and its cause.

    `arena` is registered with the rings when the memlock limit permits, and kept alive by the
    engine. `queue_depth` counts blocks of `block_nbytes` in flight per device; smaller ones are
    issued until their bytes are as many; "auto" finds the number while the drive works.
    `num_threads` threads serve a device of the thread engine.
    `max_pending` bounds the unfinished requests per device and priority. `num_rings` rings share
    the window and the queue of one device, each with a thread; `ring_flags` are what they are set
    up with, "auto" the best that the kernel grants (io/README.md); the thread engine uses
    neither. The environment variable INFINITY_IO_ENGINE overrides "auto" only.
    Raises UnsupportedError when `name` is "io_uring" and the kernel refuses it, or when it refuses
    flags that the configuration names.
    """
    _check_options(
        block_nbytes=block_nbytes,
        num_threads=num_threads,
        max_pending=max_pending,
        num_rings=num_rings,
        ring_flags=ring_flags,
    )
    chosen = os.environ.get("INFINITY_IO_ENGINE", "auto") if name == "auto" else name
    if chosen not in ("auto", "io_uring", "threads"):
        where = "INFINITY_IO_ENGINE" if name == "auto" else "engine"
        raise ConfigError(f"{where}={chosen!r}, expected 'auto', 'io_uring' or 'threads'")
    is_uring = False
    if chosen != "threads":
        cause = explain_missing_uring()
        is_uring = cause is None
        if cause is not None and chosen == "io_uring":
            raise UnsupportedError(f"the io_uring engine cannot start: {cause}")
        if cause is not None:
            _warn_of_fallback(cause)
        elif ring_flags != "auto" and not grants_ring_flags(ring_flags):
            raise UnsupportedError(
                f"this kernel ({os.uname().release}) refuses rings with {ring_flags}; "
                'flags = "auto" takes the best that it grants'
            )
    options: dict[str, Any] = {
        "arena": arena,
        "block_nbytes": block_nbytes,
        "depths": depth_range(queue_depth, block_nbytes),
        "num_threads": num_threads,
        "max_pending": max_pending,
        "num_rings": num_rings,
        "ring_flags": ring_flags,
    }
    if is_uring:
        try:
            return NativeEngine(is_uring=True, **options)
        except StorageError as error:  # A small ring was granted, those of this size are not.
            refusal = explain_refused_rings(error.errno or 0, error.detail)
            if chosen == "io_uring":
                raise UnsupportedError(f"the io_uring engine cannot start: {refusal}") from error
            _warn_of_fallback(str(refusal))
    return NativeEngine(is_uring=False, **options)


def _check_options(
    *,
    block_nbytes: int,
    num_threads: int,
    max_pending: int,
    num_rings: int,
    ring_flags: RingFlags,
) -> None:
    if not PAGE_NBYTES <= block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % PAGE_NBYTES:
        raise ConfigError(
            f"{block_nbytes=}, expected a multiple of {PAGE_NBYTES} up to {MAX_BLOCK_NBYTES}"
        )
    for key, value, maximum in (
        ("num_threads", num_threads, MAX_QUEUE_DEPTH),
        ("num_rings", num_rings, MAX_RINGS),
    ):
        if not 1 <= value <= maximum:
            raise ConfigError(f"{key}={value}, expected 1..{maximum}")
    if ring_flags not in get_args(RingFlags):
        raise ConfigError(f"{ring_flags=}, expected one of {', '.join(get_args(RingFlags))}")
    if max_pending < 1:
        raise ConfigError(f"{max_pending=}, expected at least 1")


def _warn_of_fallback(cause: str) -> None:
    message = (
        f"storage engine: threads, because io_uring is not available: {cause} "
        "Bandwidth is normally the same, CPU use is 2-3 times higher. "
        "engine='threads' chooses this without the warning."
    )
    if message in _warned_fallbacks:
        return
    _warned_fallbacks.add(message)
    _log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
