"""The update of any optimizer (`rules.py`): native, by torch's own kernel, and as a readable
reference.

The native kernels have the same bits on every instruction set; `INFINITY_SIMD` (avx512, avx2, neon
or scalar) picks one by hand, for tests.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from infinity import _core
from infinity.config.machine import SIMD_VARIABLE, chosen_simd, threads_here
from infinity.ops.dynamic_8bit import State8Bit, decode, encode_
from infinity.ops.exact import join, split
from infinity.ops.rules import AdamSettings, AdamWSettings, Settings, SGDSettings
from infinity.ops.span import StateSpan, check_spans
from infinity.private.torch import fused_adam_, fused_adamw_, fused_sgd_

REFERENCE_LANES = 8  # Elements in one vector of torch's kernels, whose bits these are.
_CANONICAL_NAN = torch.tensor(-(1 << 22), dtype=torch.int32, device="cpu").view(torch.float32)
# Of each rule of torch, both ways of interpolating a moment, and every way of a momentum.
_PROBED: dict[type[Settings], tuple[Settings, ...]] = {
    kind: tuple(
        kind(lr=3e-3, beta1=beta1, beta2=0.98, eps=1e-8, weight_decay=decay, step=3)
        for beta1, decay in ((0.9, 0.01), (0.25, 0.0))
    )
    for kind in (AdamWSettings, AdamSettings)
} | {
    SGDSettings: tuple(
        SGDSettings(
            lr=3e-3, momentum=momentum, dampening=dampening, weight_decay=0.01,
            nesterov=nesterov, step=3,
        )
        for momentum, dampening, nesterov in ((0.0, 0.0, False), (0.9, 0.1, False), (0.9, 0, True))
    ),
}  # fmt: skip


def update_(
    spans: Sequence[StateSpan],
    settings: Settings,
    *,
    grad_scale: float | torch.Tensor = 1.0,
    threads: int | None = None,
    digests: Sequence[_core.PageDigests] = (),
) -> None:
    """One step of every span, in one pass over memory.

    Gradients are widened to fp32 and multiplied by `grad_scale` (an fp32 clip factor) as they are
    read; they are not written. All spans have one format (see StateSpan). A split weight is
    updated as its fp32 master would be; a master that becomes NaN is kept as the canonical quiet
    NaN.

    States of 8 bits are widened, updated as fp32 ones would be, and rounded to codes again: an
    approximation of the fp32 update, exactly as `dynamic_8bit` defines it.

    A tensor may be updated in parts that are cut at multiples of `span.CUT_NUMEL` elements (of
    `dynamic_8bit.BLOCK_NUMEL` with 8-bit states). The result does not depend on that, on `threads`
    (None: torch's number) or on the instruction set. `digests` take the checksums of pages that
    change, while they are in a cache. Gradients that are not finite are used as they are. Raises
    ConfigError for arrays of wrong dtype, length or layout.
    """
    check_spans(spans, settings.state_names)
    apply_rule(
        settings.rule, spans, settings.coefficients(),
        grad_scale=float(grad_scale), threads=threads, digests=digests,
    )  # fmt: skip


def step_(
    spans: Sequence[StateSpan],
    settings: Settings,
    *,
    grad_scale: float = 1.0,
    digests: Sequence[_core.PageDigests] = (),
) -> None:
    """`update_` with the bits of this torch: where its kernel rounds otherwise than the native one
    (another processor, another build), fp32 spans go through torch's own."""
    # Split and 8-bit spans equal nothing of torch's.
    if is_native(settings) or spans[0].is_split or spans[0].is_8bit:
        update_(spans, settings, grad_scale=grad_scale, digests=digests)
        return
    gradients = [span.gradient.float() for span in spans]
    spans = list(map(_copied, spans))
    if grad_scale != 1.0:
        gradients = [gradient * grad_scale for gradient in gradients]
    states = [_fp32_states(span, settings) for span in spans]
    torch_step_([span.weight for span in spans], gradients, states, settings)


def _copied(span: StateSpan) -> StateSpan:
    """Returns the arrays that get the new bytes of an fp32 span, with the old ones."""
    into = span.written
    for new, old in zip((into.weight, *into.states), (span.weight, *span.states), strict=True):
        if new is not old:
            assert isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)
            new.copy_(old)
    return into


# -- The reference ---------------------------------------------------------------------------------


def reference_span_(span: StateSpan, settings: Settings, grad_scale: float) -> None:
    """`update_` of one span in torch operations, readable and slow: what the native kernels must
    equal. The arrays may be on any device unless they have 8 bits."""
    gradient = span.gradient.to(torch.float32) * grad_scale
    weight = span.weight if span.residual is None else join(span.weight, span.residual)
    body = weight.numel() - weight.numel() % REFERENCE_LANES
    into, wide_states = span.written, _fp32_states(span, settings)
    new_states = _fp32_states(into, settings)
    for part, is_tail in ((slice(0, body), False), (slice(body, None), True)):
        states = [state[part] for state in wide_states]
        new_weight, *found = settings.reference(
            weight[part], gradient[part], states, is_tail=is_tail
        )
        for state, new_state in zip(new_states, found, strict=True):
            state[part] = new_state
        if into.residual is None:
            into.weight[part] = new_weight
        else:
            master = torch.where(torch.isnan(new_weight), _CANONICAL_NAN, new_weight)
            into.weight[part], into.residual[part] = split(master)
    for kept, wide, name in zip(into.states, new_states, settings.state_names, strict=True):
        if isinstance(kept, State8Bit):
            encode_(kept, wide, name)


def _fp32_states(span: StateSpan, settings: Settings) -> list[torch.Tensor]:
    """The span's own arrays, or for 8-bit states their values."""
    return [
        decode(state, name) if isinstance(state, State8Bit) else state
        for state, name in zip(span.states, settings.state_names, strict=True)
    ]


# -- torch's own kernels ---------------------------------------------------------------------------
#
# Another processor, compiler or release may contract other sums than the native kernels do. An fp32
# update must have the bits of the torch that it stands in for, so where they differ torch's own
# kernel is used. torch has no Lion to be equal to.


def is_native(settings: Settings) -> bool:
    """Returns whether the native rule may replace torch's kernel in an fp32 update."""
    kind: Any = type(settings)
    return kind not in _PROBED or has_torch_bits(kind)


@functools.cache
def has_torch_bits(kind: Any) -> bool:
    """Returns whether the CPU kernel of this torch rounds as the native one, by comparing them.

    kind: of `Settings`
    """
    source = torch.Generator().manual_seed(0)
    numel = 16 * 64 + 15  # Vectors of any width and a tail of any length.
    for settings in _PROBED[kind]:
        ours = torch.randn(2 + len(settings.state_names), numel, generator=source, device="cpu")
        ours[-1] = ours[-1].square()  # A second moment has no sign; others do not mind.
        torchs = ours.clone()
        span = StateSpan(ours[0], ours[1], tuple(ours[2:]))
        apply_rule(settings.rule, [span], settings.coefficients(), grad_scale=1.0, threads=1)
        torch_step_([torchs[0]], [torchs[1]], [list(torchs[2:])], settings)
        if not torch.equal(ours, torchs):
            return False
    return True


def torch_step_(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    settings: Settings,
) -> None:
    """One step of torch's fused kernel, in place, on any device; `states` are those of each
    weight."""
    by_name = [list(arrays) for arrays in zip(*states, strict=True)]
    if isinstance(settings, AdamSettings):
        kernel = fused_adamw_ if settings.is_decoupled else fused_adam_
        step = torch.tensor(float(settings.step), device=weights[0].device)
        kernel(
            list(weights), list(gradients), *by_name, [], [step] * len(weights), lr=settings.lr,
            beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay,
            eps=settings.eps, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
    else:
        assert isinstance(settings, SGDSettings)
        fused_sgd_(
            list(weights), list(gradients), by_name[0] if by_name else [],
            weight_decay=settings.weight_decay, momentum=settings.momentum, lr=settings.lr,
            dampening=settings.dampening, nesterov=bool(settings.nesterov), maximize=False,
            is_first_step=settings.step == 1,
        )  # fmt: skip


# -- The native kernels ----------------------------------------------------------------------------


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
) -> None:
    """Runs a native rule over spans of one format.

    `coefficients` are rounded to fp32. Releases the GIL; `threads` None is what `threads_here`
    says. `digests`: see `_core.update.apply`. Raises UnsupportedError when INFINITY_SIMD names
    what is not here.
    """
    # Without the variable an update costs no call more.
    simd = chosen_simd(instruction_sets) if SIMD_VARIABLE in os.environ else ""
    if not spans:
        return
    _core.update.apply(
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
