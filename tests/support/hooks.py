"""Hooks of tests that only look: layer-major order refuses those of an unknown program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook under the name of the package, whose hooks keep nothing of a micro-batch."""
    hook.__module__ = "infinity"
    return hook
