"""The state on NVMe at one moment, kept while newer state goes to a spare generation."""

from __future__ import annotations

from infinity.state.store import LocalStore, NvmeLocation, changing_kinds
from infinity.state.units import StateKind, Unit
from infinity.storage.volume import Volume


class OldGeneration:
    """Keeps what the volume of a store holds now, until `drop`. Under the engine's lock.

    Takes one spare generation of the volume. `infinity.storage.generations` has the space.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._volume = _volume_of(store)
        self._frozen = self._volume.freeze()
        self._checksums: dict[tuple[int, StateKind], bytes] = {}

    @staticmethod
    def has_space(store: LocalStore) -> bool:
        """Whether the volume has a spare generation that nothing else holds."""
        return store.volume is not None and len(store.volume.frozen) < store.volume.num_spares

    def keep(self, unit: Unit) -> bool:
        """Remembers what `bring_back` needs, before the first write that it is to undo. Returns
        whether it can: what was written since this object was made is in no old generation."""
        for kind, location in self._changing(unit):
            if (unit.index, kind) not in self._checksums:
                extents = location.extents
                if self._volume.locate(extents) != self._volume.locate(extents, self._frozen):
                    return False
                self._checksums[unit.index, kind] = self._volume.checksums(extents)
        return True

    def bring_back(self, unit: Unit) -> None:
        """Makes the old bytes of a unit the current ones. No byte moves. The unit's writes are
        over, and nothing that was read of the unit since is used any more."""
        for kind, location in self._changing(unit):
            self._volume.roll_back(
                location.extents, self._frozen, self._checksums[unit.index, kind]
            )

    def drop(self) -> None:
        """The space of the old bytes may be written again."""
        self._volume.thaw(self._frozen)

    def _changing(self, unit: Unit) -> list[tuple[StateKind, NvmeLocation]]:
        """The state kinds of the unit that an update changes, and that rest on NVMe."""
        found = []
        for kind in changing_kinds(unit):
            location = self._store.location(unit, kind)
            if isinstance(location, NvmeLocation):
                found.append((kind, location))
        return found


def _volume_of(store: LocalStore) -> Volume:
    assert store.volume is not None, "only state on NVMe has generations"
    return store.volume
