"""Kernels compiled for a device that is not there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any


def float_operations(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, object]
) -> Counter[str]:
    """Counts the PTX instructions on floating-point numbers of a kernel, for compute capability
    9.0, with the options of every launch of the package. Arguments in neither mapping are i32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "num_warps": 4},
    )
    instructions = re.findall(
        r"^\s*(?:@\S+\s+)?([a-z]\w*(?:\.\w+)+)\s", compiled.asm["ptx"], re.MULTILINE
    )
    is_float = re.compile(r"\.b?f(16|32|64)|ftz|approx")
    return Counter(name for name in instructions if is_float.search(name))
