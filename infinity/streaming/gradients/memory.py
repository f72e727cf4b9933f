"""Gradients as flat fp32 memory: the range of a tensor, and its order."""

from __future__ import annotations

import torch

from infinity.ops.host_sums import LEAST_NBYTES, add_, copy_
from infinity.state.units import TensorSpec


def flat_of(array: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements in its unit's array of state."""
    return array[spec.state_offset : spec.state_offset + spec.numel]


def shaped(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns a view of flat memory with shape and stride of the parameter."""
    return flat.as_strided(spec.facts.shape, spec.facts.stride)


def in_memory_order(gradient: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements as they lie in memory when it has the parameter's strides: flat."""
    if gradient.stride() != spec.facts.stride:
        laid_out = torch.empty_strided(
            spec.facts.shape, spec.facts.stride, dtype=gradient.dtype, device=gradient.device
        )
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided((spec.numel,), (1,))


def put(target: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """Copies a gradient to `target`, or adds it if it is not the first one there."""
    if target.nbytes < LEAST_NBYTES:  # torch's, and no call of Python more.
        _ = target.copy_(gradient) if first else target.add_(gradient)
    else:
        _ = copy_(target, gradient) if first else add_(target, gradient)
