"""Memory of tensors that wait on a tier while something else computes.

A tensor that waits may have other owners: variables of the waiting code, and views. So the memory
is freed in the tensor's storage (`UntypedStorage.resize_`, as FSDP does with parameters), and is
allocated in the same storage again: every owner sees the same bytes. No code may touch the tensor,
or a view of it, in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.streaming.inputs.activations import ActivationStore, SavedInput


@dataclass(frozen=True, slots=True)
class _Away:
    """A storage without memory, and its content."""

    storage: torch.UntypedStorage
    nbytes: int
    saved: SavedInput


class WaitingMemory:
    """Moves the content of tensors to a tier while they wait. Owns the store.

    If the store leaves a tensor on the device, nothing happens. One thread at a time.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._away: dict[StorageWeakRef, _Away] = {}

    @property
    def keeps_all(self) -> bool:
        """Whether every tensor stays on the device."""
        return self._store.keeps_all

    def put_away(self, tensor: torch.Tensor) -> None:
        """Moves the content of the tensor's storage to a tier.

        Raises CapacityError if the tiers are full, StorageError if a write fails.
        """
        storage, place = tensor.untyped_storage(), place_of(tensor)
        if self.keeps_all or place in self._away:
            return
        if not storage.nbytes() or not storage.resizable():
            return
        saved = self._store.save(_content_of(storage))
        if saved.kept is not None:
            self._store.restore(saved)
            return
        saved.copying.order()  # Its memory on the device is free from here on.
        self._away[place] = _Away(storage, storage.nbytes(), saved)
        storage.resize_(0)

    def fetch(self, tensor: torch.Tensor) -> None:
        """Starts to read the content. Never waits."""
        away = self._away.get(place_of(tensor))
        if away is not None:
            self._store.fetch(away.saved)

    def bring_back(self, tensor: torch.Tensor) -> None:
        """Ends `put_away`. Raises CapacityError, StorageError."""
        away = self._away.pop(place_of(tensor), None)
        if away is not None:
            content = self._store.restore(away.saved)
            away.storage.resize_(away.nbytes)
            _content_of(away.storage).copy_(content)

    def clear(self) -> None:
        """Ends every `put_away`. The content is lost: the waiting code will not run again."""
        for away in self._away.values():
            away.storage.resize_(away.nbytes)
        self._away.clear()
        self._store.clear()


def place_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Returns a key of the tensor's storage, which its views share."""
    return StorageWeakRef(tensor.untyped_storage())


def _content_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns all bytes of a storage: uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
