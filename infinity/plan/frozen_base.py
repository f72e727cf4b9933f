"""The facts about a frozen base that its forecast needs beside units and work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.config import AdapterConfig
from infinity.plan.stored import StoredModel
from infinity.sizes import PAGE_NBYTES, align_up
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
        return int(
            sum(
                tensor.weight_nbytes * self.decoded_per_byte.get(_full_name(tensor.name), 0.0)
                for tensor in unit.tensors
            )
        )

    def attached_per_byte(self, tensor: str) -> float:
        """Returns the bytes that a stored byte of a tensor is where the device computes."""
        return self.decoded_per_byte.get(_full_name(tensor), 1.0)

    def attached_nbytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's weights where the device computes with them."""
        if unit.state_numel:
            return unit.weight_nbytes
        tensors = unit.tensors
        found = sum(
            tensor.weight_nbytes * self.attached_per_byte(tensor.name) for tensor in tensors
        )
        return align_up(int(found), PAGE_NBYTES)


def _full_name(tensor: str) -> str:
    """Returns the name of the tensor of which a chunk is a part."""
    return tensor.partition(".tiles.")[0]
