"""Modules whose own code may write parameters behind autograd's back.

A write through `.data` or through a numpy array changes no version counter, so only a comparison of
bytes finds it. The comparison reads a unit twice per use. It is made for the units of modules whose
source mentions such an access, and for no others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

from infinity.modules.hooks import HookedModule

_ACCESS = re.compile(r"\.data\b|\.numpy\(")
# Methods that run before the model is offloaded.
_EARLY = frozenset({"__init__", "_init_weights", "init_weights", "reset_parameters"})


def units_written_by_data(hooked_modules: Iterable[HookedModule]) -> frozenset[int]:
    """Returns the units of modules whose code, or that of a module in them, mentions `.data` or
    `.numpy(`.

    The methods of the modules' own classes are searched. Modules of PyTorch, base classes and
    functions outside the classes are not.
    """
    return frozenset(
        unit
        for hooked in hooked_modules
        if any(_may_write_data(child) for child in hooked.module.modules())
        for unit in hooked.units
    )


def _may_write_data(module: nn.Module) -> bool:
    kind: Any = type(module)
    return _mentions_data(kind)


@lru_cache(maxsize=4096)
def _mentions_data(kind: Any) -> bool:
    if kind.__module__.startswith("torch."):
        return False
    methods = (value for name, value in vars(kind).items() if name not in _EARLY)
    return any(
        _ACCESS.search(_source_of(method)) for method in methods if isinstance(method, FunctionType)
    )


def _source_of(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # Made without a file.
        return ""
