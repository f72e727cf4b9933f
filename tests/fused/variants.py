"""The variants of kernels that launches ask Triton to compile, without a device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

VARIABLE = "TRITON_INTERPRET"


class Variants:
    """Launches of the interpreted kernels of a module, and what each would be compiled for: types,
    constants, and properties of arguments that Triton specialises for."""

    def __init__(self, module: str, monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
        """`forget()`: makes the next import define the kernels anew."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        monkeypatch.delenv(VARIABLE, raising=False)
        forget()
        compiled: Any = importlib.import_module(module)
        monkeypatch.setenv(VARIABLE, "1")
        forget()
        interpreted: Any = importlib.import_module(module)
        self.found: set[str] = set()
        backend = make_backend(GPUTarget("cuda", 90, 32))
        for name, kernel in vars(compiled).items():
            is_launched = getattr(kernel, "module", "") == module and not name.startswith("_")
            if not is_launched or not hasattr(kernel, "params"):
                continue
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            launched = _Recorded(self, name, bind, getattr(interpreted, name))
            monkeypatch.setattr(interpreted, name, launched)


class _Recorded:
    def __init__(self, variants: Variants, name: str, bind: Any, kernel: Any) -> None:
        self._variants, self._name, self._bind, self._kernel = variants, name, bind, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            bound, properties, options = self._bind(*arguments, **named)
            constants = {
                name: bound[name]
                for name, (kind, _) in zip(bound, properties, strict=True)
                if kind == "constexpr"
            }
            self._variants.found.add(f"{self._name} {properties} {constants} {options}")
            self._kernel[grid](*arguments, **named)

        return launch
