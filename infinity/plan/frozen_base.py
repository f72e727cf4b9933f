"""The facts about a frozen base that its forecast needs beside units and work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.config import AdapterConfig
from infinity.plan.stored import StoredModel
from infinity.state.units import Unit


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The frozen weights of a model. `decoded_per_byte` has, by tensor, the bytes that one stored
    byte becomes on the device; tensors that are used as they are stored are left out."""

    stored: StoredModel
    adapter: AdapterConfig
    num_params: int
    trained_params: int
    decoded_per_byte: Mapping[str, float]

    def decoded_nbytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's weights (or of a chunk's) that are decoded for a use."""
        found = 0.0
        for tensor in unit.tensors:
            name = tensor.name.partition(".tiles.")[0]
            found += tensor.weight_nbytes * self.decoded_per_byte.get(name, 0.0)
        return int(found)
