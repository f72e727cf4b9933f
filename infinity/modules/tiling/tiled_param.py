"""A parameter of the user's model that is split into tiles, and the handle for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from infinity.errors import InfinityError
from infinity.modules.handles.handle import Handle, replace_handles
from infinity.modules.handles.handle_tensor import Owner
from infinity.modules.handles.mirrors import mirrored
from infinity.private.torch import DisableTorchFunctionSubclass


@dataclass(eq=False)
class TiledParam(Owner):
    """One parameter of the user's model, and its tiles in order of rows.

    A TiledParam owns the handle that stands for the parameter. A read of that handle returns a copy
    of all rows on the device, which no budget counts.
    """

    name: str
    starts: tuple[int, ...]
    tensor: nn.Parameter | Handle  # The parameter itself until the engine owns the tiles.
    tiles: list[nn.Parameter]
    handles: list[Handle] = field(default_factory=list)

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Sequence[Handle],
    ) -> Any:
        """Runs `function` on a copy of all rows, and writes changed rows back to the tiles."""
        lent: dict[int, tuple[Handle, torch.Tensor, int]] = {}

        def real(handle: Handle) -> torch.Tensor:
            if handle.kept is not None:
                return handle.kept
            if handle.owner is not self:
                return handle  # Fetches its own bytes.
            if id(handle) not in lent:
                copy = self._copy_of(handle)
                lent[id(handle)] = handle, copy, copy._version
            return lent[id(handle)][1]

        answer = function(*replace_handles(args, real), **replace_handles(dict(kwargs), real))
        for handle, copy, version in lent.values():
            if copy._version != version or any(handle is change for change in changes):
                self._write_back(handle, copy)
                if answer is copy:
                    return handle
            answer = mirrored(
                answer, copy, self.module_handle(self.name).note_alias, self, self.name,
                is_gradient=handle.is_gradient, is_copy=True,
            )  # fmt: skip
        return answer

    def _copy_of(self, handle: Handle) -> torch.Tensor:
        if handle.is_gradient:
            if handle.number != self._number_of_gradient():
                raise InfinityError(
                    f"the gradient of {self.name!r} is not there any more; clone it"
                )
            return self.read_gradient()
        return self.read().detach() if handle.is_data else self.read()

    def _write_back(self, handle: Handle, copy: torch.Tensor) -> None:
        if copy.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
        values = copy.detach().contiguous().view(-1).view(torch.uint8)
        self.write_bytes(self.name, 0, values, is_gradient=handle.is_gradient)

    def read(self) -> torch.Tensor:
        """Returns a copy of all rows on the device; its gradient flows to the tiles. Tiles are
        fetched one by one."""
        return torch.cat([handle.clone() for handle in self.handles])

    def read_gradient(self) -> torch.Tensor:
        """Returns a copy of the whole gradient."""
        gradients = [handle.grad for handle in self.handles]
        return torch.cat([gradient.clone() for gradient in gradients if gradient is not None])

    @override
    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        if any(tile.grad is None for tile in self.handles):
            return None
        gradient = Handle.make(self, self.name, handle, is_gradient=True)
        self.module_handle(self.name).note_alias(gradient)
        gradient.number = self._number_of_gradient()
        return gradient

    def _number_of_gradient(self) -> int:
        stamp = self.stamp(self.name, is_gradient=True)
        return -1 if stamp is None else stamp[0]

    @override
    def module_handle(self, name: str) -> Handle:
        assert isinstance(self.tensor, Handle)
        return self.tensor

    @override
    def put_gradient(self, handle: Handle, value: torch.Tensor, *, is_other: bool) -> None:
        for tile, start, stop in zip(self.handles, self.starts, self.starts[1:], strict=False):
            tile.owner.put_gradient(tile, value[start:stop], is_other=is_other)

    @override
    def forget_gradient(self, handle: Handle) -> None:
        for tile in self.handles:
            tile.grad = None

    @override
    def zero_gradient(self, handle: Handle) -> None:
        for tile in self.handles:
            if tile.grad is not None:
                tile.grad.zero_()

    @override
    def shown(self, handle: Handle) -> torch.Tensor | None:
        return None

    @override
    def leaves_of(self, handle: Handle) -> list[torch.Tensor]:
        return [leaf for tile in self.handles for leaf in tile.owner.leaves_of(tile)]

    @override
    def increment_version(self, handle: Handle) -> None:
        for tile in self.handles:
            tile.owner.increment_version(tile)

    @override
    def take_gradient(self, handle: Handle, gradient: torch.Tensor) -> None:
        for tile, start, stop in zip(self.handles, self.starts, self.starts[1:], strict=False):
            tile.owner.take_gradient(tile, gradient[start:stop])

    @override
    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        for tile in self.handles:
            tile.requires_grad_(is_trainable)
        with DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)

    # -- Mirrors ---------------------------------------------------------------------------------

    @override
    def stamp(self, name: str, *, is_gradient: bool) -> tuple[int, ...] | None:
        stamps = [
            tile.owner.stamp(tile.name_in_model, is_gradient=is_gradient) for tile in self.handles
        ]
        there = [stamp for stamp in stamps if stamp is not None]
        if len(there) < len(stamps):
            return None
        return sum(stamp[0] for stamp in there), *(n for stamp in there for n in stamp[1:])

    @override
    def read_bytes(self, name: str, start: int, into: torch.Tensor, *, is_gradient: bool) -> None:
        for tile, first, part in self._parts(start, into, is_gradient=is_gradient):
            tile.owner.read_bytes(tile.name_in_model, first, part, is_gradient=is_gradient)

    @override
    def write_bytes(
        self, name: str, start: int, values: torch.Tensor, *, is_gradient: bool
    ) -> None:
        for tile, first, part in self._parts(start, values, is_gradient=is_gradient):
            before = torch.empty_like(part)
            place = {"is_gradient": is_gradient}
            tile.owner.read_bytes(tile.name_in_model, first, before, **place)
            if not torch.equal(before, part):
                tile.owner.write_bytes(tile.name_in_model, first, part, **place)

    def _parts(
        self, start: int, content: torch.Tensor, *, is_gradient: bool
    ) -> Iterator[tuple[Handle, int, torch.Tensor]]:
        """Yields every tile that has some of the content, with its first byte and that part."""
        stop, first = start + content.numel(), 0
        for tile in self.handles:
            end = first + tile.numel() * (4 if is_gradient else tile.element_size())
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield tile, low - first, content[low - start : high - start]
            first = end
