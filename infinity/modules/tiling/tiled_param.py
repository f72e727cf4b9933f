"""A parameter of the user's model that is split into tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.modules.handles.handle import Handle


@dataclass(eq=False, slots=True)
class TiledParam:
    """One parameter of the user's model, and its tiles in order of rows.

    One handle stands for the parameter. A read of that handle returns a copy of all rows on the
    device, which no budget counts.
    """

    name: str
    starts: tuple[int, ...]
    tensor: nn.Parameter | Handle  # The parameter itself until the engine owns the tiles.
    tiles: list[nn.Parameter]
    handles: list[Handle] = field(default_factory=list)

    def read(self) -> torch.Tensor:
        """Returns a copy of all rows on the device; its gradient flows to the tiles. Tiles are
        fetched one by one."""
        return torch.cat([handle.clone() for handle in self.handles])

    def read_gradient(self) -> torch.Tensor:
        """Returns a copy of the whole gradient."""
        gradients = [handle.grad for handle in self.handles]
        return torch.cat([gradient.clone() for gradient in gradients if gradient is not None])
