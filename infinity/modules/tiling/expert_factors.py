"""A packed weight with low-rank factors, multiplied without ever being added up.

The adapted weight of an expert is `W + scaling * left @ right`. A product with the sum needs memory
for the sum of all experts, and its backward makes a gradient as large as the frozen weight. The
factored product makes neither: `x W + scaling * (x left) right`.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from infinity.private.torch import tree_map

_log = logging.getLogger(__name__)

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
