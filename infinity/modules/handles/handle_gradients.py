"""Functions of autograd for handles: gradients with respect to a handle, hooks, gradient edges.

A handle stands for one leaf of the graph, or for the leaves of its tiles.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from infinity.errors import UnsupportedError
from infinity.modules.handles.handle_tensor import Handle, find_handles
from infinity.modules.handles.torch_names import was_called_by
from infinity.private.torch import get_grad_fn_or_grad_acc


def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` for handles. The backward itself fetches the parameters it needs."""
    if find_handles(outputs):
        return NotImplemented
    tensors = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = [_leaves_of(tensor) for tensor in tensors]
    wanted = [leaf for tiles in leaves for leaf in tiles]
    flat = iter(torch.autograd.grad(outputs, wanted, *args, **kwargs))
    dim = 1 if kwargs.get("is_grads_batched") else 0
    return tuple(_joined([next(flat) for _ in tiles], tiles, dim) for tiles in leaves)


def _leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return tensor.owner.leaves_of(tensor) if isinstance(tensor, Handle) else [tensor]


def _joined(
    parts: list[torch.Tensor | None], leaves: list[torch.Tensor], dim: int
) -> torch.Tensor | None:
    """Joins the gradients of tiles into one gradient; a tile without a gradient counts as zero."""
    first = next((part for part in parts if part is not None), None)
    if len(parts) == 1 or first is None:
        return first
    lead = first.shape[:dim]
    return torch.cat(
        [
            first.new_zeros((*lead, *leaf.shape)) if part is None else part
            for part, leaf in zip(parts, leaves, strict=True)
        ],
        dim,
    )


def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.backward(..., inputs=handles)`."""
    inputs = kwargs.get("inputs")
    if inputs is None or find_handles((tensors, args)):
        return NotImplemented
    targets = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    leaves = [leaf for target in targets for leaf in _leaves_of(target)]
    return torch.autograd.backward(tensors, *args, **{**kwargs, "inputs": leaves})


def install() -> None:
    """Makes `torch.autograd.backward` look for handles among its `inputs`.

    That of PyTorch 2.10 does not, and no gradient of these would arrive.
    """
    plain = torch.autograd.backward
    if "has_torch_function" in plain.__code__.co_names:
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def asking(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        inputs = named.get("inputs")
        targets = (inputs,) if isinstance(inputs, torch.Tensor) else inputs or ()
        tensors = tuple(target for target in targets if isinstance(target, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(asking, tensors, named.pop("tensors"), **named)
        return plain(*args, **kwargs)

    torch.autograd.backward = asking
    Handle.functions = {**Handle.functions, asking: backward}


def register_hook(handle: Handle, hook: Any) -> Any:
    """Registers a hook on the leaf of a handle."""
    if handle.is_gradient:
        return NotImplemented
    return _leaf_of(handle, "a hook").register_hook(hook)


def view_as(handle: Any, other: Any) -> Any:
    """Returns a tensor whose node `torch.autograd.graph` can inspect; its values are not used."""
    if not was_called_by(get_grad_fn_or_grad_acc):
        return NotImplemented
    leaf = _leaf_of(handle, "a gradient edge")
    return leaf.view_as(leaf)


def _leaf_of(handle: Handle, what: str) -> torch.Tensor:
    leaves = handle.owner.leaves_of(handle)
    if len(leaves) != 1:
        raise UnsupportedError(
            f"{what} of {handle!r}: the parameter is split into {len(leaves)} tiles, each with a "
            "gradient of its own; use the tiles, which model.parameters() yields"
        )
    return leaves[0]
