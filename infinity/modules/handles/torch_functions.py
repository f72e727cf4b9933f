"""Functions of PyTorch, as the tensors that stand for managed state tell them apart.

Those that need no bytes, those that write; the caller of one; the end of a compiled graph; the
tensors among arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from infinity.private.torch import DisableTorchFunctionSubclass, parse_to, skip_in_compiled_code

F = TypeVar("F", bound=Callable[..., Any])

TENSOR: Any = torch.Tensor  # Its types have the values of properties, not `__get__` and `__set__`.


def members(names: str) -> set[Any]:
    """Returns the getters and methods of torch.Tensor in `names` that this PyTorch has."""
    found: set[Any] = set()
    for name in names.split():
        member = getattr(torch.Tensor, name, None)
        if member is not None:
            found.add(member.__get__ if not callable(member) else member)
    return found


# They need no bytes of a parameter.
PLAIN = members(
    "shape dtype device layout is_leaf grad_fn ndim is_cuda is_cpu is_meta is_sparse "
    "is_sparse_csr is_quantized is_mkldnn is_nested is_mps is_xla is_xpu is_ipu is_vulkan is_mtia "
    "is_maia is_neg is_conj is_inference itemsize nbytes _version output_nr "
    "retains_grad _backward_hooks _base name size dim numel nelement ndimension stride "
    "storage_offset element_size is_floating_point is_complex is_signed is_contiguous is_pinned "
    "is_same_size get_device __len__ __hash__ _is_view is_coalesced requires_grad dense_dim "
    "sparse_dim dim_order has_names"
) | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}


def says_it_writes(func: Callable[..., Any]) -> bool:
    """Whether `func` writes to its first argument, according to PyTorch's naming: `add_`,
    `__iadd__`."""
    name = getattr(func, "__name__", "")
    dunder = name.startswith("__") and name.endswith("__")
    return name in _WRITING_DUNDERS if dunder else name.endswith("_")


_WRITING_DUNDERS = frozenset(
    f"__{name}__"
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
        "ilshift", "irshift", "setitem",
    )
)  # fmt: skip


def asked_of_to(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    """Returns the device and the dtype that a call of `Tensor.to` asks for."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype
    wanted = {key: kwargs[key] for key in ("device", "dtype") if key in kwargs}
    device, dtype, _, _ = parse_to(*args, **wanted)
    return device, dtype


def was_called_by(function: Any) -> bool:
    """Whether `function` is the function that `__torch_function__` received and that called the
    caller."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is function.__code__


# Inside a compiled function, too, this package runs as it is: hooks, and an optimizer's step.
skip_in_compiled_code("infinity")


def outside_graphs(reason: str) -> Callable[[F], F]:
    """torch.compile ends its graph before the function, and tells the reason under fullgraph=True.
    The wrapper of `torch.compiler.disable` costs several calls each time."""

    def mark(function: F) -> F:
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        return function

    return mark


class StandIn(torch.Tensor):
    """A tensor that stands for state that may be elsewhere. A subclass has a table of functions of
    torch that do something else with it, and `run` for all others."""

    # An entry returns NotImplemented to leave its function to `run`.
    special: ClassVar[Mapping[Any, Callable[..., Any]]] = {}

    @classmethod
    def run(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function of torch that needs the bytes."""
        raise NotImplementedError

    @classmethod
    @outside_graphs(
        "infinity fetches a weight outside of its module between graphs; leave out "
        "fullgraph=True, or call the function inside `with infinity.gather(module):`"
    )
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        special = cls.special.get(func)
        if special is not None:
            answer = special(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if func in PLAIN:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls.run(func, args, kwargs)


# -- Tensors among arguments -----------------------------------------------------------------------

T = TypeVar("T", bound=torch.Tensor)


def find_tensors(tree: Any, kind: type[T]) -> list[T]:
    """Returns every tensor of this kind in nested tuples, lists and mappings."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [tensor for branch in tree for tensor in find_tensors(branch, kind)]
    if isinstance(tree, Mapping):
        return [tensor for branch in tree.values() for tensor in find_tensors(branch, kind)]
    return []


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns what counts the changes of a tensor. Inference tensors count none."""
    return None if tensor.is_inference() else tensor._version


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns the same nest of tuples, lists and dicts, with every tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, list):
        return [map_tensors(branch, change) for branch in tree]
    if isinstance(tree, tuple):
        parts = [map_tensors(branch, change) for branch in tree]
        if all(new is old for new, old in zip(parts, tree, strict=True)):
            return tree  # Named tuples of torch have other constructors.
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    return tree


def written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[T]
) -> list[T]:
    """Returns the tensors of this kind that `func` writes to, according to its signature."""
    out = find_tensors(kwargs.get("out"), kind)
    if out or not says_it_writes(func):
        return out
    return find_tensors(args[0] if args else next(iter(kwargs.values()), None), kind)
