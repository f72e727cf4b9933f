"""Modules that run as tiles: sequential operators over row ranges, fetched one after the other.

Note [Same bits]
  No sum of a forward or of a weight's gradient is split: each element is computed as in the full
  operator. Only the gradient of a linear layer's input is a sum over tiles, from the last tile to
  the first. See docs/design/0007-tiles.md.

Note [One tile at a time]
  The output is allocated once, and every tile writes its columns into it. One tile's own output
  exists beside it, not all of them. In the backward, autograd runs the node with the highest number
  first: the last write, the last tile, the write before it, and so on. A tile is therefore in use
  while its own gradients are computed.

Source: Rajbhandari et al., "ZeRO-Infinity" (SC21), section 5.1.3, memory-centric tiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import override

from infinity.errors import UnsupportedError
from infinity.modules.handles.handle import Handle


@dataclass(eq=False, slots=True)
class TiledParam:
    """One parameter of the user's model, and its tiles in order of rows.

    One handle stands for the parameter. A read of that handle returns a copy of all rows on the
    device, which no budget counts. `own`: the first values of tiles with weights of their own, by
    the number of the tile.
    """

    name: str
    starts: tuple[int, ...]
    tensor: nn.Parameter | Handle  # The parameter itself until the engine owns the tiles.
    tiles: list[nn.Parameter]
    handles: list[Handle] = field(default_factory=list)
    own: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)

    def read(self) -> torch.Tensor:
        """Returns a copy of all rows on the device; its gradient flows to the tiles. Tiles are
        fetched one by one."""
        return torch.cat([handle.clone() for handle in self.handles])


class _Write(torch.autograd.Function):
    """Writes the columns [start, ...) of `out` in place. The overwritten values have no
    gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
        ctx.columns = start, part.shape[-1]
        out.narrow(-1, start, part.shape[-1]).copy_(part)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # Earlier writes read their own columns only, so nothing is masked or copied.
        return gradient, gradient.narrow(-1, *ctx.columns), None


class Tiled(nn.Module):
    """A module whose parameters are tiles. Only `Tiling.cut` makes it."""

    tiles: nn.ModuleList
    starts: tuple[int, ...]  # First row of every tile, then the number of rows.
    limit_nbytes: int  # Of a tile; 0 where nothing limits it.
    tiled_params: dict[str, TiledParam]  # The tiled parameters by attribute.

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)
        elif value is not getattr(self, name):  # PEFT gives a layer the weight that it has.
            raise UnsupportedError(
                f"{name!r} of a {type(self).__name__} runs as tiles; copy a value into it, or "
                "replace it before infinity.offload"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        names = [tiled.name for tiled in self.tiled_params.values()]
        raise UnsupportedError(
            f"{names[0]!r} runs as tiles, and no module of tiles can be pickled or copied. Build "
            "the model again and load copy.deepcopy(model.state_dict()) into it, or offload it "
            "without schedule.tile"
        )


def tensor_of(attribute: str) -> Any:
    """Returns a property that shows a tiled parameter as one handle.

    The handle has the shape and dtype of the full parameter; a read returns a copy of all rows. The
    property is None if the module has no such parameter.
    """

    def tensor(module: Tiled) -> Any:
        tiled = module.tiled_params.get(attribute)
        return None if tiled is None else tiled.tensor

    return property(tensor)


class TiledLinear(Tiled, nn.Linear):
    """`nn.Linear`, tiled over output rows."""

    weight = tensor_of("weight")
    bias = tensor_of("bias")

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor | None = None
        for start, tile in zip(self.starts, self.tiles, strict=False):
            part = tile(input)
            if out is None:
                out = part.new_empty((*part.shape[:-1], self.out_features))
            if part.requires_grad:
                out = _Write.apply(out, part, start)  # type: ignore[no-untyped-call]
            else:
                out.narrow(-1, start, part.shape[-1]).copy_(part)
        assert out is not None
        return out


class TiledEmbedding(Tiled, nn.Embedding):
    """`nn.Embedding`, tiled over rows of the table."""

    weight = tensor_of("weight")

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor | None = None
        last = len(self.tiles) - 1
        for index, tile in enumerate(self.tiles):
            start, stop = self.starts[index : index + 2]
            ids = input - start
            inside = (ids >= 0) & (ids < stop - start)
            # Ids outside the table must raise as in the full operator, so the ends of the table do
            # not clamp.
            ids = ids.clamp(
                min=None if index == 0 else 0, max=None if index == last else stop - start - 1
            )
            part = tile(ids)
            out = part if out is None else torch.where(inside.unsqueeze(-1), part, out)
        assert out is not None
        return out
