"""The optimizers there are, and the update of any of them: native, and as a readable reference.

An optimizer is a frozen dataclass of settings in a file of its own (see `adamw.py`) and its rule in
`csrc/update/rules/`. Both say the same arithmetic, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from infinity._core import PageDigests
from infinity.ops.adam import AdamSettings
from infinity.ops.adamw import AdamWSettings
from infinity.ops.dynamic_8bit import State8Bit, decode, encode_
from infinity.ops.lion import LionSettings
from infinity.ops.native import apply_rule
from infinity.ops.sgd import SGDSettings
from infinity.ops.span import StateSpan, check_spans
from infinity.ops.split_master import join, split
from infinity.ops.torch_kernels import is_native, torch_step_

REFERENCE_LANES = 8  # Elements in one vector of torch's kernels, whose bits these are.
_CANONICAL_NAN = torch.tensor(0xFFC00000 - 2**32, dtype=torch.int32).view(torch.float32)


class Settings(Protocol):
    """Settings of one step of one parameter group. Frozen and hashable; `step` counts from 1."""

    @property
    def rule(self) -> str:
        """Name of the native rule."""

    @property
    def step(self) -> int:
        """The number of this step, from 1."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The arrays that a span carries beside weight and gradient; `exp_avg_sq` has no sign."""

    def coefficients(self) -> tuple[float, ...]:
        """The numbers of the native rule in its order, fp64, rounded to fp32 when used."""

    def reference(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        is_tail: bool,
    ) -> tuple[torch.Tensor, ...]:
        """New weight and new states, from fp32 tensors. `is_tail`: of the last numel % 8."""


OPTIMIZERS: dict[str, type[Settings]] = {
    "adamw": AdamWSettings,
    "adam": AdamSettings,
    "sgd": SGDSettings,
    "lion": LionSettings,
}


def update_(
    spans: Sequence[StateSpan],
    settings: Settings,
    *,
    grad_scale: float | torch.Tensor = 1.0,
    threads: int | None = None,
    digests: Sequence[PageDigests] = (),
) -> int:
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
    change, while they are in a cache. Returns how many scaled gradients were not finite; those are
    used as they are. Raises ConfigError for arrays of wrong dtype, length or
    layout.
    """
    check_spans(spans, settings.state_names)
    return apply_rule(
        settings.rule, spans, settings.coefficients(),
        grad_scale=float(grad_scale), threads=threads, digests=digests,
    )  # fmt: skip


def step_(
    spans: Sequence[StateSpan],
    settings: Settings,
    *,
    grad_scale: float = 1.0,
    digests: Sequence[PageDigests] = (),
) -> None:
    """`update_` with the bits of this torch: where its kernel rounds otherwise than the native one
    (another processor, another build), fp32 spans go through torch's own."""
    if (
        is_native(settings) or spans[0].is_split or spans[0].is_8bit
    ):  # The latter equal nothing of torch's.
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


def reference_update_(
    spans: Sequence[StateSpan], settings: Settings, *, grad_scale: float | torch.Tensor = 1.0
) -> int:
    """`update_` in torch operations, readable and slow: what the native kernels must equal."""
    check_spans(spans, settings.state_names)
    return int(sum(reference_span_(span, settings, float(grad_scale)) for span in spans))


def reference_span_(span: StateSpan, settings: Settings, grad_scale: float) -> torch.Tensor:
    """`reference_update_` of one span, whose arrays may be on any device unless they have 8 bits.
    The count is a tensor there: to read it would be to wait."""
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
    return (~torch.isfinite(gradient)).sum()


def _fp32_states(span: StateSpan, settings: Settings) -> list[torch.Tensor]:
    """The span's own arrays, or for 8-bit states their values."""
    return [
        decode(state, name) if isinstance(state, State8Bit) else state
        for state, name in zip(span.states, settings.state_names, strict=True)
    ]
