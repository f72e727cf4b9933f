"""Test doubles that ship with the package, for its tests and for tests of code that uses it.

  SimulatedDevice   a device without a GPU: late copies, poisoned releases
  FaultyEngine      a storage engine that fails, delays or corrupts on request

No other part of the package imports this one.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["FaultyEngine", "SimulatedDevice"]

_HOMES = {
    "FaultyEngine": "infinity.testing.faulty_engine",
    "SimulatedDevice": "infinity.testing.simulated_device",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
