"""What one update works on: a tensor, or a part of one, and the state that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.errors import ConfigError

# A tensor may be cut at multiples of this many elements without changing a bit of an update.
CUT_NUMEL = 16

_FP32 = (torch.float32,)
_SPLIT = (torch.bfloat16,)
_GRADIENT = (torch.float32, torch.bfloat16)
_RESIDUAL = (torch.int16,)


@dataclass(frozen=True, slots=True)
class Span:
    """Flat contiguous arrays of one length, updated in place; they are borrowed, never kept.

    `weight` is fp32; or bf16 beside an int16 `residual`, which together are the fp32 master
    (docs/formats/split_master.md). `gradient` is fp32 or bf16 and read only. `states` are fp32, in
    the order of the settings' `state_names`.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...]
    residual: torch.Tensor | None = None

    @property
    def is_split(self) -> bool:
        return self.residual is not None


def check_spans(spans: Sequence[Span], state_names: Sequence[str]) -> None:
    """Raises ConfigError unless the native update may touch these arrays: dtypes, lengths, layout,
    host memory, and one format for all."""
    for span in spans:
        if (span.is_split, span.gradient.dtype) != (spans[0].is_split, spans[0].gradient.dtype):
            raise ConfigError("expected spans of one format in a call, got several")
        if len(span.states) != len(state_names):
            raise ConfigError(
                f"expected states {', '.join(state_names) or 'none'}, got {len(span.states)} arrays"
            )
        numel = span.weight.numel()
        _check_array("weight", span.weight, _SPLIT if span.is_split else _FP32, numel)
        _check_array("gradient", span.gradient, _GRADIENT, numel)
        for name, state in zip(state_names, span.states, strict=True):
            _check_array(name, state, _FP32, numel)
        if span.residual is not None:
            _check_array("residual", span.residual, _RESIDUAL, numel)


def _check_array(
    name: str, array: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int
) -> None:
    if array.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ConfigError(f"expected {name} to be {expected}, got {array.dtype}")
    if array.numel() != numel:
        raise ConfigError(f"expected {name} to have {numel} elements, got {array.numel()}")
    if not (array.is_cpu and array.is_contiguous()):
        raise ConfigError(f"expected {name} to be contiguous in host memory; copy it there first")
