"""The native update: tensors in, addresses to `infinity._core.update`.

Its kernels have the same bits on every instruction set; `INFINITY_SIMD` (avx512, avx2, neon or
scalar) picks one by hand, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from infinity import _core
from infinity.config.machine import threads_here
from infinity.errors import UnsupportedError
from infinity.ops.dynamic_8bit import State8Bit
from infinity.ops.span import StateSpan

SIMD_VARIABLE = "INFINITY_SIMD"


def instruction_sets() -> list[str]:
    """The instruction sets of this processor and build, the widest first. The first is used."""
    return list(_core.update.instruction_sets())


def apply_rule(
    rule: str,
    spans: Sequence[StateSpan],
    coefficients: Sequence[float],
    *,
    grad_scale: float,
    threads: int | None,
    digests: Sequence[_core.PageDigests] = (),
) -> int:
    """Runs a native rule over spans of one format.

    `coefficients` are rounded to fp32. Releases the GIL; `threads` None is what `threads_here`
    says. `digests`: see `_core.update.apply`. Returns how many scaled gradients were not finite.
    Raises UnsupportedError when INFINITY_SIMD names what is not here.
    """
    simd = os.environ.get(SIMD_VARIABLE, "")
    if simd and simd not in instruction_sets():
        raise UnsupportedError(
            f"expected {SIMD_VARIABLE} to be one of {', '.join(instruction_sets())} on this "
            f"machine, got {simd!r}; unset it to use the widest"
        )
    if not spans:
        return 0
    return _core.update.apply(
        rule,
        [_addresses(span) for span in spans],
        list(coefficients),
        is_split=spans[0].is_split,
        is_gradient_bf16=spans[0].gradient.dtype is torch.bfloat16,
        is_8bit=spans[0].is_8bit,
        gradient_scale=grad_scale,
        num_threads=threads or threads_here(torch.get_num_threads()),
        simd=simd,
        digests=digests,
    )


_Arrays = tuple[int, int, list[int]]


def _addresses(span: StateSpan) -> tuple[_Arrays, _Arrays, int, int]:
    arrays = _changed(span)
    into = arrays if span.into is None else _changed(span.into)
    return arrays, into, span.gradient.data_ptr(), span.weight.numel()


def _changed(span: StateSpan) -> _Arrays:
    residual = 0 if span.residual is None else span.residual.data_ptr()
    states: list[int] = []
    for state in span.states:
        if isinstance(state, State8Bit):
            states += (state.codes.data_ptr(), state.scales.data_ptr())
        else:
            states.append(state.data_ptr())
    return span.weight.data_ptr(), residual, states
