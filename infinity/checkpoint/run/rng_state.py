"""Saves and restores the default generators of Python, NumPy and torch, on every device.

A program saves the generators that it makes itself in `extra`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Returns the state of all default generators as numbers and tensors."""
    version, internal, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores the default generators, except those of devices that this machine does not have."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
