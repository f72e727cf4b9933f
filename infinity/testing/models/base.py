"""The base of the tiny models, and the sizes that they share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
ROWS = 6


def noise(seed: int, *shape: int) -> Tensor:
    """Returns values of the normal distribution; a pure function of `seed` and the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TinyModel(nn.Module):
    """The base of every tiny model; defines the arguments of a call."""

    def inputs(self, seed: int) -> dict[str, Any]:
        """Returns the keyword arguments of one forward; a pure function of `seed`."""
        return {"x": noise(seed, ROWS, WIDTH)}
