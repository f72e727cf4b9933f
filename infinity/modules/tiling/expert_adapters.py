"""Adapters of PEFT on packed experts (`target_parameters`), multiplied without ever being added up.

The adapted weight of an expert is `W + scaling * left @ right`. A product with the sum needs memory
for the sum of all experts, and its backward makes a gradient as large as the frozen weight. The
factored product makes neither: `x W + scaling * (x left) right`.

PEFT wraps the module of experts once per adapted parameter, one wrapper in the other. While the
module runs, a wrapper replaces its parameter by the sum over all experts. Here the module gets an
`AdaptedWeight` instead, and the tiles of experts get their parts of the factors. Names, shapes and
files of the adapter stay PEFT's: `lora_A.weight` is [rank * experts, in], `lora_B.weight` is
[out, rank * experts], with the expert's number varying slowest in the first and fastest in the
second (peft 0.21, `tuners/lora/layer.py`, `ParamWrapper`).

Note [Same bits]
  The factored product rounds `x W` and adds the adapter's part to it. The product with the sum
  rounds the sum first. Both are correct to rounding, and they differ: by some 1e-7 of the output
  in fp32; in bf16 the factored product is the more exact one, since the sum loses an adapter that
  is small beside the weight. With one factor of zeros, as a new adapter has it, both are equal to
  the bit. One expert's factored product depends on that expert's rows only, so no bit depends on
  how experts are cut or where they rest.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from infinity.modules.tiling.layers import Tiled
from infinity.private.torch import tree_map

_log = logging.getLogger(__name__)
_INSTEAD_OF = "_activate_lora"  # PEFT's method that replaces the parameter by the sum.

# Grouped products read rows at multiples of this many bytes.
_ALIGNMENT_NBYTES = 16

# Facts about the adapted weight that are those of the weight.
_FACTS = frozenset(
    ("shape", "dtype", "device", "ndim", "dim", "size", "stride", "data_ptr", "is_contiguous")
)


class AdaptedWeight:
    """Stands for `weight + scaling * left @ right` while a module of experts runs.

    The module's own forward uses it as the weight: it takes rows of it, transposes it and
    multiplies with it. These products are factored. Any other operation gets the sum.

    weight: [..., m, n], read when it is first used. left: [..., m, r]. right: [..., r, n]. Both in
    the dtype of the weight.
    """

    def __init__(
        self,
        weight_of: Callable[[], torch.Tensor],
        left: torch.Tensor,
        right: torch.Tensor,
        scaling: float,
    ) -> None:
        self._weight_of = weight_of
        self._left = left
        self._right = right
        self._scaling = scaling
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._ends: torch.Tensor | None = None

    def of_groups(self, ends: torch.Tensor) -> AdaptedWeight:
        """Gives the factors groups of their own in grouped products: `ends` of rows, one group for
        each of their matrices."""
        self._ends = ends
        return self

    @property
    def weight(self) -> torch.Tensor:
        """The weight without the adapter."""
        return self._weight_of()

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, index: Any) -> Any:
        weight = self.weight
        is_number = isinstance(index, int) or (
            isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype != torch.bool
        )
        if is_number and weight.dim() == 3:
            if self._rows is None:  # One node for all rows, which joins their gradients.
                self._rows = list(zip(self._left.unbind(), self._right.unbind(), strict=True))
            number = int(index)
            row, (left, right) = weight[number], self._rows[number]
        elif weight.dim() == 3 and isinstance(index, (slice, torch.Tensor)):
            row, left, right = weight[index], self._left[index], self._right[index]
        else:
            return self.merged()[index]
        return AdaptedWeight(lambda: row, left, right, self._scaling)

    def transpose(self, first: int, second: int) -> Any:
        """Transposes as `torch.Tensor.transpose`; lazy if the last two dimensions swap, else
        merged."""
        ndim = self.weight.dim()
        if {first % ndim, second % ndim} != {ndim - 2, ndim - 1}:
            return self.merged().transpose(first, second)
        weight = self.weight.transpose(-2, -1)
        left, right = self._right.transpose(-2, -1), self._left.transpose(-2, -1)
        transposed = AdaptedWeight(lambda: weight, left, right, self._scaling)
        transposed._ends = self._ends
        return transposed

    @property
    def mT(self) -> Any:  # noqa: N802  # PyTorch's name.
        """The transpose of the last two dimensions, lazy."""
        return self.transpose(-2, -1)

    @property
    def T(self) -> Any:  # noqa: N802  # PyTorch's name.
        """The transpose; lazy with two dimensions."""
        return self.transpose(-2, -1) if self.weight.dim() == 2 else self.merged().T

    def t(self) -> Any:
        """Returns the transpose of two dimensions, lazy."""
        return self.transpose(-2, -1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.weight if name in _FACTS else self.merged(), name)

    def merged(self) -> torch.Tensor:
        """Returns the sum: as much memory as the weight."""
        _log.warning(
            "an adapted weight of experts, of shape %s, is added up: its module uses it in another "
            "way than by products",
            tuple(self.weight.shape),
        )
        return torch.add(self.weight, self._left @ self._right, alpha=self._scaling)

    # -- Products ----------------------------------------------------------------------------------

    def after(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `rows @ self`. rows: [..., m]; a matrix of rows for every matrix of a stack."""
        if self.weight.dim() == 3:
            through = torch.bmm(rows, self._left)
            return torch.baddbmm(
                torch.bmm(rows, self.weight), through, self._right, alpha=self._scaling
            )
        flat = rows.reshape(-1, rows.shape[-1])
        through = flat @ self._left
        out = torch.addmm(flat @ self.weight, through, self._right, alpha=self._scaling)
        return out.view(*rows.shape[:-1], out.shape[-1])

    def before(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns `self @ columns` for stacks. columns: [stack, n, any]."""
        through = torch.bmm(self._right, columns)
        return torch.baddbmm(
            torch.bmm(self.weight, columns), self._left, through, alpha=self._scaling
        )

    def grouped(
        self,
        product: Callable[..., torch.Tensor],
        rows: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Returns the product of each group of rows with the matrix of its expert. `product` takes
        the rows, a stack of matrices, and the arguments that give the ends of the groups."""
        left, right = _aligned(self._left, self._right)
        product_of_base = product(rows, self.weight, *args, **kwargs)
        if self._ends is not None:
            kwargs = {**kwargs, "offs": self._ends}
        through = product(product(rows, left, *args, **kwargs), right, *args, **kwargs)
        return torch.add(product_of_base, through, alpha=self._scaling)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if len(args) >= 2 and isinstance(args[1], cls) and isinstance(args[0], torch.Tensor):
            rows, adapted = args[0], args[1]
            bias = args[2] if len(args) == 3 else kwargs.get("bias")
            if func is functional.linear:
                out = adapted.t().after(rows)
                return out if bias is None else out + bias
            if name in _MATMULS and adapted.weight.dim() == (3 if name == "bmm" else 2):
                return adapted.after(rows)
            if name in _GROUPED and not any(kwargs.get(option) for option in ("bias", "out_dtype")):
                return adapted.grouped(func, rows, args[2:], kwargs)
        if name == "bmm" and len(args) == 2 and isinstance(args[0], cls):
            return args[0].before(args[1])
        args, kwargs = tree_map(lambda x: x.merged() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)


def _of_sum(name: str) -> Callable[..., Any]:
    def operate(adapted: AdaptedWeight, other: Any) -> Any:
        return getattr(adapted.merged(), name)(other)

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv"):
    setattr(AdaptedWeight, f"__{_name}__", _of_sum(f"__{_name}__"))

_MATMULS = ("matmul", "__matmul__", "mm", "bmm")
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def _aligned(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads the rank with zeros, as grouped products need it."""
    rank, multiple = left.shape[-1], _ALIGNMENT_NBYTES // left.element_size()
    missing = -rank % multiple
    if missing:
        left = functional.pad(left, (0, missing))
        right = functional.pad(right, (0, 0, 0, missing))
    return left, right


# -- PEFT's wrappers -------------------------------------------------------------------------------


class Adaptation(NamedTuple):
    """The effect of an adapter on a parameter with one row per expert.

    `tensors` have one row per expert, too. `shown` makes what a module uses in the place of the
    weight, from a function that returns the weight and from rows of the tensors.
    """

    tensors: tuple[torch.Tensor, ...]
    shown: Callable[..., Any]

    def of(self, weight_of: Callable[[], torch.Tensor]) -> Any:
        """Returns what a module uses in the place of the weight."""
        return self.shown(weight_of, *self.tensors)


def _sum(weight_of: Callable[[], torch.Tensor], delta: torch.Tensor) -> torch.Tensor:
    return weight_of() + delta  # A small parameter, such as the experts' biases.


class _Active(threading.local):
    """Active adaptations by tiled module and attribute. Micro-batches in one block run in several
    threads, each with the adapters of its own forward."""

    def __init__(self) -> None:
        self.of_module: dict[int, dict[str, Adaptation]] = {}


_active = _Active()


def adaptations_of(module: nn.Module) -> Mapping[str, Adaptation]:
    """Returns the adaptations of a tiled module's parameters in the running forward."""
    return _active.of_module.get(id(module), {})


def factor_adapters(model: nn.Module) -> list[nn.Module]:
    """Makes PEFT's wrappers of packed experts use factors; returns the wrappers that changed."""
    wrappers = [
        module
        for module in model.modules()
        if hasattr(type(module), _INSTEAD_OF)
        and hasattr(module, "parameter_name")
        and _INSTEAD_OF not in module.__dict__
    ]
    for wrapper in wrappers:
        wrapper.__dict__[_INSTEAD_OF] = partial(_activated, wrapper)
    return wrappers


def merge_adapters(wrappers: list[nn.Module]) -> None:
    """Undoes `factor_adapters`: the wrappers add their adapters up again."""
    for wrapper in wrappers:
        wrapper.__dict__.pop(_INSTEAD_OF, None)


@contextmanager
def _activated(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """Runs the wrapped module with these adapters."""
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    module, attribute = wrapper.get_base_layer(), wrapper.parameter_name
    if not adapters:
        yield
    elif isinstance(module, Tiled):
        shown = _active.of_module.setdefault(id(module), {})
        shown[attribute] = _adaptation(wrapper, adapters)
        try:
            yield
        finally:
            del shown[attribute]
            if not shown:
                _active.of_module.pop(id(module), None)
    elif wrapper.num_experts == 1:  # One matrix, not one per expert.
        with getattr(type(wrapper), _INSTEAD_OF)(wrapper, active_adapters):
            yield
    else:
        adaptation = _adaptation(wrapper, adapters)
        # The attribute hides the parameter, which may have no bytes before the module runs.
        module.__dict__[attribute] = adaptation.of(lambda: module._parameters[attribute])
        try:
            yield
        finally:
            del module.__dict__[attribute]


def _adaptation(wrapper: Any, adapters: list[str]) -> Adaptation:
    if wrapper.num_experts == 1:
        deltas = [wrapper.get_delta_weight(name) for name in adapters]
        return Adaptation((sum(deltas[1:], start=deltas[0]),), _sum)
    factors = [_factors(wrapper, name) for name in adapters]
    left, right, scaling = factors[0]
    if len(factors) > 1:
        left = torch.cat([factor * scale for factor, _, scale in factors], dim=-1)
        right, scaling = torch.cat([factor for _, factor, _ in factors], dim=-2), 1.0
    factored = partial(AdaptedWeight, scaling=float(scaling))
    return Adaptation((_dense(left), _dense(right)), factored)


def _factors(wrapper: Any, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns (left, right, scaling) whose product is what the adapter adds to the experts, as
    `ParamWrapper.get_delta_factors` does from PEFT 0.21 on."""
    by_a, by_b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    right = by_a.reshape(wrapper.num_experts, -1, by_a.shape[-1])
    left = by_b.reshape(by_b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    if not wrapper._did_swap_in_out_features:  # Experts of (in, out).
        left, right = right.transpose(-2, -1), left.transpose(-2, -1)
    dtype = wrapper.get_param().dtype
    return left.to(dtype), right.to(dtype), wrapper.scaling[name]


def _dense(factor: torch.Tensor) -> torch.Tensor:
    """Returns a factor whose matrices BLAS reads in place. PEFT's lora_B keeps the elements of one
    expert apart, so it is copied once for all experts."""
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()
