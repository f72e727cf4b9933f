"""Where the stored bytes of a frozen unit lie in its host block, and its weights in its region."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infinity.codecs.batches import WeightPlace
from infinity.state.units import TensorSpec, Unit


def weight_places(unit: Unit) -> Iterator[WeightPlace]:
    """Yields the place of each slice of the unit. Pure: strides are those of torch's own views."""
    assert unit.stored is not None
    parameters = {spec.name: _without_memory(spec) for spec in unit.tensors}
    for name, stored_slice, parts in unit.stored.slices:
        target = stored_slice.target(parameters[name])
        yield WeightPlace(
            stored_slice.codec,
            stored_slice.shape,
            parts,
            target.dtype,
            int(target.storage_offset()),
            target.stride(),
        )


def _without_memory(spec: TensorSpec) -> torch.Tensor:
    """Returns the parameter at its offset in the unit's weights, as a tensor without bytes."""
    facts = spec.facts
    first = spec.weight_offset_nbytes // facts.dtype.itemsize
    empty = torch.empty(first + spec.numel, dtype=facts.dtype, device="meta")
    return empty.as_strided(facts.shape, facts.stride, first)
