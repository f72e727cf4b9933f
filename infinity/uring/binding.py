"""The cffi module that wraps liburing, and the error of a refused call."""

from __future__ import annotations

import os
from typing import Any

from infinity.errors import InfinityError, UnsupportedError


class RingError(InfinityError, OSError):
    """The kernel refused a call about the ring. A failed operation is a Completion instead."""

    def __init__(self, code: int, call: str, remedy: str = "") -> None:
        self.call = call
        advice = f"; {remedy}" if remedy else ""
        super().__init__(code, f"{call} failed: {os.strerror(code)}{advice}")


def is_built() -> bool:
    """Returns whether the binding is part of this installation."""
    try:
        load()
    except UnsupportedError:
        return False
    return True


def load() -> tuple[Any, Any]:
    """Returns (ffi, lib) of the binding. Raises UnsupportedError when it was not built."""
    try:
        from infinity import _uring
    except ImportError as error:
        raise UnsupportedError(
            "infinity.uring is not part of this build: liburing or cffi was missing. Install "
            "liburing-dev and cffi, then build infinity-offload again"
        ) from error
    return _uring.ffi, _uring.lib


def check(answer: int, call: str) -> None:
    """Raises RingError when `answer`, the result of `call`, is a negative errno."""
    if answer < 0:
        raise RingError(-answer, call)
