"""How the weights of one block of stored bytes are decoded: worked out once, carried out often."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from infinity.codecs import on_device
from infinity.codecs.batches import WeightPlace, batches_of, places_on


class DecodePlan:
    """Decodes the weights of a block. Owns the tables of its launches, on the devices for them."""

    def __init__(self, weights: Iterable[WeightPlace]) -> None:
        """Raises ConfigError if a codec needs other numbers of bytes than its weight has."""
        self._batches = batches_of(weights)
        # A tensor for each batch, which is empty if no launch decodes the batch.
        self._places: dict[torch.device, Sequence[torch.Tensor]] = {}

    def prepare(self, device: torch.device) -> None:
        """Chooses kernels, which takes seconds where one is compiled and tried for the first time,
        and brings the tables of their launches to the device, 56 bytes for each weight."""
        rows = [batch.rows() if on_device.runs(batch, device) else [] for batch in self._batches]
        places = places_on(device, list(chain.from_iterable(rows)))
        self._places[device] = places.split(list(map(len, rows)))

    def decode(self, block: torch.Tensor, memory: torch.Tensor) -> None:
        """Fills the weights in `memory` from the stored bytes in `block`: both uint8, on a device,
        in the order of its current stream."""
        device = block.device
        if device not in self._places:
            self.prepare(device)
        with torch.no_grad(), on_device.made_current(device):
            for batch, places in zip(self._batches, self._places[device], strict=True):
                if len(places):
                    batch.decode_at_once(block, memory, places)
                else:
                    batch.decode_one_by_one(block, memory)
