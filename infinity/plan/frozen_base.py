"""The facts about a frozen base that its forecast needs beside units and work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from infinity.config import AdapterConfig
from infinity.plan.stored import StoredModel
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.stored import StoredTensor, StoredWeights, lay_out_stored, stored_tiles
from infinity.state.units import TensorFacts, Unit


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The frozen weights of a model. `decoded_per_byte` has, by tensor, the bytes that one stored
    byte becomes on the device; tensors that are used as they are stored are left out. `tensors` has
    the ranges of files, by tensor; empty if the files are not there. `is_copied`: the engine copies
    the weights, decoded, to the tiers of `parameters`, and reads them there."""

    stored: StoredModel
    adapter: AdapterConfig
    num_params: int
    trained_params: int
    decoded_per_byte: Mapping[str, float]
    tensors: Mapping[str, StoredTensor]
    is_copied: bool = False

    def in_place(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Returns the units with frozen weights in the files of their checkpoint, and the pages
        that a read of them takes: the engine's own functions cut and cover the ranges."""
        specs = [spec.facts for unit in units if not unit.state_numel for spec in unit.tensors]
        tiles: defaultdict[str, list[TensorFacts]] = defaultdict(list)
        for facts in specs:
            tiles[_full_name(facts.name)].append(facts)
        found: dict[str, StoredTensor] = {}
        for name, parts in tiles.items():
            starts = list(accumulate((facts.shape[0] for facts in parts), initial=0))
            cut = stored_tiles(self.tensors.get(name, ()), starts)
            assert cut is not None
            found.update(zip((facts.name for facts in parts), cut, strict=True))

        def stored(unit: Unit) -> StoredWeights:
            if not self.tensors:
                return StoredWeights(unit.weight_nbytes, (), ())
            return lay_out_stored({spec.name: found[spec.name] for spec in unit.tensors})

        return tuple(u if u.state_numel else replace(u, stored=stored(u)) for u in units)

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
