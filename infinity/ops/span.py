"""The operands of one update: a tensor, or a part of one, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.errors import ConfigError
from infinity.ops.dynamic_8bit import State8Bit, num_scales

# A tensor with fp32 states may be cut at multiples of this many elements without changing a bit of
# an update; one with 8-bit states at multiples of dynamic_8bit.BLOCK_NUMEL.
CUT_NUMEL = 16

_FP32 = (torch.float32,)
_SPLIT = (torch.bfloat16,)
_GRADIENT = (torch.float32, torch.bfloat16)
_RESIDUAL = (torch.int16,)
_CODES = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Flat contiguous arrays of one length, updated in place or `into` others; they are borrowed,
    never kept.

    `weight` is fp32; or bf16 beside an int16 `residual`, which together are the fp32 master
    (docs/formats/split_master.md). `gradient` is fp32 or bf16 and read only. `states` are in the
    order of the settings' `state_names`: all fp32, or all codes of eight bits with their scales.

    `into` gets the new bytes, and its gradient is not used; the arrays of this span are then only
    read. Some may be the same in both: those are updated in place. None: all are.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor | State8Bit, ...]
    residual: torch.Tensor | None = None
    into: StateSpan | None = None

    @property
    def written(self) -> StateSpan:
        """The arrays that get the new bytes."""
        return self if self.into is None else self.into

    @property
    def is_split(self) -> bool:
        """Whether the master is a bf16 weight and its 16-bit residual."""
        return self.residual is not None

    @property
    def is_8bit(self) -> bool:
        """Whether a state is stored as 8-bit codes with scales."""
        return State8Bit in map(type, self.states)

    @property
    def format(self) -> tuple[object, ...]:
        """The properties that all spans of a call have in common."""
        return self.is_split, self.gradient.dtype, self.is_8bit


def check_spans(spans: Sequence[StateSpan], state_names: Sequence[str]) -> None:
    """Raises ConfigError unless the native update may touch these arrays: dtypes, lengths, layout,
    host memory, and one format for all."""
    if not spans:
        return
    beside = [span.into for span in spans if span.into is not None]
    if beside:
        spans = [*spans, *beside]
    if _are_plain(spans, len(state_names)):
        return
    common = spans[0].format
    for span in spans:
        if span.format != common:
            raise ConfigError("expected spans of one format in a call, got several")
        if len(span.states) != len(state_names):
            raise ConfigError(
                f"expected states {', '.join(state_names) or 'none'}, got {len(span.states)} arrays"
            )
        numel = span.weight.numel()
        _check_array("weight", span.weight, _SPLIT if span.is_split else _FP32, numel)
        _check_array("gradient", span.gradient, _GRADIENT, numel)
        for name, state in zip(state_names, span.states, strict=True):
            if span.is_8bit:
                _check_8bit(name, state, numel)
            else:
                assert isinstance(state, torch.Tensor)
                _check_array(name, state, _FP32, numel)
        if span.residual is not None:
            _check_array("residual", span.residual, _RESIDUAL, numel)


def _are_plain(spans: Sequence[StateSpan], num_states: int) -> bool:
    """Whether the spans pass every check and none has states of 8 bits: the usual ones, without a
    call for each array."""
    is_split, gradient_dtype = spans[0].residual is not None, spans[0].gradient.dtype
    weight_dtype = torch.bfloat16 if is_split else torch.float32
    dtypes = (weight_dtype, gradient_dtype, *(torch.float32,) * num_states)
    if is_split:
        dtypes = (*dtypes, torch.int16)
    if gradient_dtype not in _GRADIENT:
        return False
    for span in spans:
        arrays: tuple[torch.Tensor | State8Bit, ...] = (span.weight, span.gradient, *span.states)
        if span.residual is not None:
            arrays = (*arrays, span.residual)
        if len(arrays) != len(dtypes):
            return False
        numel = span.weight.numel()
        for array, dtype in zip(arrays, dtypes, strict=True):
            if isinstance(array, State8Bit) or array.dtype is not dtype or array.numel() != numel:
                return False
            if not (array.is_cpu and array.is_contiguous()):
                return False
    return True


def _check_8bit(name: str, state: torch.Tensor | State8Bit, numel: int) -> None:
    if not isinstance(state, State8Bit):
        raise ConfigError(f"expected {name} to be in 8 bits as the other states are, got fp32")
    _check_array(f"codes of {name}", state.codes, _CODES, numel)
    _check_array(f"scales of {name}", state.scales, _FP32, num_scales(numel))


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
