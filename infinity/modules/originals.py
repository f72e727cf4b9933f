"""The user's original parameters that are still referenced after `offload`.

A list in a module, a closure, a partial, the groups of an optimizer or another model may keep an
original parameter, which the model no longer uses. Such an original becomes a *follower*: the same
object, without bytes, that stands for the handle in every operation. A follower reads the present
value, and its gradient is added to the gradient of the parameter.

Followers are made after the model has released its parameters, from the originals that are still
alive. The objects that refer to them need not be known.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import override

from infinity.errors import InfinityError, ParameterNotResident, UnsupportedError
from infinity.modules.handle import Handle


class Follower(nn.Parameter):
    """An original parameter that stands for a handle. Only `Originals.follow` makes it."""

    # Weak, so that a model dropped without close() releases its memory.
    stands_for: weakref.ref[Handle]
    name_in_model: str

    @property
    def handle(self) -> Handle:
        """The handle in the modules. Raises ParameterNotResident if the model is gone."""
        handle = self.stands_for()
        if handle is None:
            raise ParameterNotResident(self.name_in_model, "its offloaded model is gone")
        return handle

    @property
    @override
    def grad(self) -> torch.Tensor | None:
        return self.handle.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.handle.grad = value

    @grad.deleter
    def grad(self) -> None:
        del self.handle.grad

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.handle)

    def __format__(self, spec: str) -> str:
        return format(self.handle, spec)

    def __deepcopy__(self, memo: object) -> Any:
        return self.handle.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.handle.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__hash__:
            return id(args[0])
        return func(*_followed(args), **_followed(dict(kwargs or {})))


def _followed(tree: Any) -> Any:
    """Returns the same nest with handles in the place of followers."""
    if isinstance(tree, Follower):
        return tree.handle
    if isinstance(tree, tuple):
        parts = [_followed(branch) for branch in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [_followed(branch) for branch in tree]
    if isinstance(tree, dict):
        return {key: _followed(value) for key, value in tree.items()}
    return tree


class Originals:
    """The user's own parameters while their model is offloaded. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        refuse_aliases(model)
        self._found = [(weakref.ref(p), name) for name, p in model.named_parameters()]

    def follow(self, handle_of: Callable[[str], Handle]) -> int:
        """Makes the originals that are still alive follow their handles, by name. Returns their
        number."""
        alive = [(parameter, name) for ref, name in self._found if (parameter := ref()) is not None]
        for parameter, name in alive:
            _follow(parameter, handle_of(name))
        self._found.clear()
        return len(alive)


def _follow(original: Any, handle: Handle) -> None:
    # An original without a value has operations of its own, and no memory to give back.
    with torch._C.DisableTorchFunctionSubclass():
        original.requires_grad_(handle.requires_grad)
        if not original.is_meta:
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)

    name = handle.name_in_model

    def refuse(gradient: torch.Tensor) -> NoReturn:
        raise InfinityError(
            f"a graph that was made before infinity.offload reaches {name!r}, "
            "which is on its tier now; run that backward before, or the forward again"
        )

    if handle.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            original.register_hook(refuse)
    original.stands_for, original.name_in_model = weakref.ref(handle), name
    # INV-23: gradients of the original go to its handle.
    original.__class__ = Follower


# -- Other tensors over the same memory ------------------------------------------------------------


def refuse_aliases(model: nn.Module) -> None:
    """Raises UnsupportedError for a buffer, or a tensor in an attribute of a module, that shares
    memory with a parameter, because it would keep the old values."""
    ranges: dict[int, tuple[int, str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.numel():
            start, stop = _range_of(parameter)
            ranges[start] = stop, name
    if not ranges:
        return
    starts = sorted(ranges)
    for path, module in model.named_modules():
        for attribute, tensor in _tensors_kept_by(module):
            if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
                continue
            clash = _overlapped(_range_of(tensor), starts, ranges)
            owner, _, own = (clash or "").rpartition(".")
            # The old spectral_norm keeps such a view, and sets it again in every forward.
            if clash is not None and (owner, own) != (path, f"{attribute}_orig"):
                raise UnsupportedError(
                    f"{path + '.' if path else ''}{attribute} is a view of the memory of parameter "
                    f"{clash!r}, which leaves it for its tier; take the view in the forward, or "
                    "clone it, before infinity.offload"
                )


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first address and the end of the memory that the tensor spans."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlapped(
    span: tuple[int, int], starts: Sequence[int], ranges: Mapping[int, tuple[int, str]]
) -> str | None:
    """Returns the parameter that overlaps the span, or None."""
    index = bisect_right(starts, span[0]) - 1
    for start in starts[max(index, 0) : index + 2]:
        stop, name = ranges[start]
        if start < span[1] and span[0] < stop:
            return name
    return None


def _tensors_kept_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers and plain attributes, also in lists and mappings, but no parameters."""
    own = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    for name, value in [*module._buffers.items(), *own]:
        if isinstance(value, Mapping):
            value = tuple(value.values())
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                yield name, tensor
