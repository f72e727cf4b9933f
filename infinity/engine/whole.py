"""A parameter of the user's model that stands as tiles: the handle that answers for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.engine.handles import Handle, replace_handles
from infinity.errors import ParameterNotResident


@dataclass(eq=False, slots=True)
class Whole:
    """One parameter of the user's model, and its tiles in order of rows.

    As the owner of the handle that stands for it, it answers for the tiles: what reads the handle
    gets a copy on the device, put together outside of every budget.
    """

    name: str
    starts: tuple[int, ...]
    face: nn.Parameter | Handle  # The parameter itself until the engine has taken over.
    tiles: list[nn.Parameter]
    handles: list[Handle] = field(default_factory=list)

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Handle | None,
    ) -> Any:
        if changes is not None:
            raise ParameterNotResident(
                self.name,
                f"it stands as {len(self.handles)} tiles, and {getattr(function, '__name__', '')} "
                "would change a copy of them; use engine.write_parameter(name, value), or the "
                "tiles inside `with infinity.gather(module, modify=True):`",
            )

        def real(handle: Handle) -> torch.Tensor:
            whole = handle.owner
            if not isinstance(whole, Whole):
                return handle  # Fetches itself.
            return whole.read_gradient() if handle.is_gradient else whole.read()

        return function(*replace_handles(args, real), **replace_handles(dict(kwargs), real))

    def read(self) -> torch.Tensor:
        """A copy of all rows on the device; its gradient goes to the tiles. They are fetched one by
        one."""
        return torch.cat([handle.clone() for handle in self.handles])

    def read_gradient(self) -> torch.Tensor:
        gradients = [handle.grad for handle in self.handles]
        return torch.cat([gradient.clone() for gradient in gradients if gradient is not None])

    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        if any(tile.grad is None for tile in self.handles):
            return None
        return Handle.make(self, self.name, handle, is_gradient=True)

    def forget_gradient(self, handle: Handle) -> None:
        for tile in self.handles:
            tile.grad = None

    def zero_gradient(self, handle: Handle) -> None:
        for tile in self.handles:
            if tile.grad is not None:
                tile.grad.zero_()

    def leaves_of(self, handle: Handle) -> list[torch.Tensor]:
        return [leaf for tile in self.handles for leaf in tile.owner.leaves_of(tile)]

    def take_gradient(self, handle: Handle, gradient: torch.Tensor) -> None:
        for tile, start, stop in zip(self.handles, self.starts, self.starts[1:], strict=False):
            tile.owner.take_gradient(tile, gradient[start:stop])

    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        for tile in self.handles:
            tile.requires_grad_(is_trainable)
        with torch._C.DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)
