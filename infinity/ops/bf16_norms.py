"""The 2-norm of bf16 numbers with the bits that torch's has for the same numbers in fp32.

torch measures a tensor on the host by one sum for each lane of a vector, in the order of memory
(ATen/native/cpu/ReduceOpsKernel.cpp, `norm_kernel_tensor_iterator_impl`). How many lanes there are,
and whether a product is rounded before it is added, is its build's and the processor's choice; a
trial at the first call finds it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from infinity import _core
from infinity.ops.native import instruction_sets

# The square of a bf16 number is exact in fp32 and not rounded, unless it is too small: there, and
# not in every sum, the roundings differ.
_TRIALS = [(numel, scale) for numel in (100, 1000, 65537) for scale in (1.0, 1e-3)]
_TRIALS += [(numel, 1e-20) for numel in range(2, 200)]


def norm_of_bf16(values: torch.Tensor) -> torch.Tensor:
    """Returns `torch.linalg.vector_norm(values.float())`, an fp32 scalar, without the fp32 array.

    values: bf16 (numel,), contiguous, on the host. Native, on the calling thread, without the GIL.
    `has_norm_of_bf16` holds.
    """
    variant = _variant()
    assert variant is not None
    if values.numel() == 1:  # The root of a tiny square is not the number; torch takes no square.
        return values.abs().float().reshape(())
    return _norm(values, *variant)


def has_norm_of_bf16() -> bool:
    """Whether the native kernel has torch's bits here."""
    return _variant() is not None


def _norm(values: torch.Tensor, simd: str, variant: int) -> torch.Tensor:
    norm = _core.update.norm_of_bf16(
        values.data_ptr(), values.numel(), simd=simd, variant=variant
    )  # fmt: skip
    return torch.tensor(norm, dtype=torch.float32)


@cache
def _variant() -> tuple[str, int] | None:
    """Returns the instruction set and the rounding that give torch's bits; None if none do."""
    trials = list(_trials())
    wanted = [torch.linalg.vector_norm(values.float()) for values in trials]
    for simd in instruction_sets():
        for variant in range(_core.update.NUM_NORMS):
            found = [_norm(values, simd, variant) for values in trials]
            if all(map(torch.equal, found, wanted)):
                return simd, variant
    return None


def _trials() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)  # The global one is the user's.
    for numel, scale in _TRIALS:
        values = torch.randn(numel, generator=generator) * scale
        yield values.to(torch.bfloat16)
