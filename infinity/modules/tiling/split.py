"""Splits operators that exceed the fetch window into sequential tiles.

An `nn.Linear` is split over its output rows, an `nn.Embedding` over the rows of its table, packed
experts over the experts. The module object stays, with its hooks and all references to it. Its
class becomes a tiled class (`modules/tiling/layers.py`, `modules/tiling/experts.py`). Its
parameters are replaced by `tiles`, a list of modules of the same kind with some of the rows. Each
tile is a hooked module and a unit (`modules/reading/discover.py`), so the usual hooks fetch it. A
tied weight is split once, and its tiles are tied. See docs/design/0007-tiles.md.

Note [Own weights]
  Some experts of frozen, packed ones may have weights of their own: trained, or read from another
  file. The packed parameters then have the attribute `own_rows`: whether the row is trained, and a
  function that returns its first value, by the number of the expert. Each of these experts is a
  tile, so its weights are those of a unit, and the stored bytes of its place are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from infinity.config.schema.engine import ExpertProducts
from infinity.errors import UnsupportedError
from infinity.modules.handles.handle import Handle, is_value_of, plain_value
from infinity.modules.handles.originals import Follower
from infinity.modules.reading.empty_weights import Provisional, without_class
from infinity.modules.tiling import experts as tiled_experts
from infinity.modules.tiling.expert_adapters import factor_adapters, merge_adapters
from infinity.modules.tiling.layers import Tiled, TiledEmbedding, TiledLinear, TiledParam
from infinity.state.tiles import ROW_ALIGNMENT, CutRows, is_cut_by_name


def tiles_of(tensor: Any) -> list[Any]:
    """Returns the handles of a tiled parameter's tiles; any other tensor is its only tile, and a
    follower stands for its handle."""
    if isinstance(tensor, Follower):
        tensor = tensor.handle
    if isinstance(tensor, Handle) and tensor.owner.is_tiled(tensor):
        return list(tensor.owner.tiles_of(tensor))
    return [tensor]


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own parameters under the user's names; a tiled parameter as one handle."""
    if isinstance(module, Tiled):
        return {attribute: tiled.tensor for attribute, tiled in module.tiled_params.items()}
    return dict(module._parameters)


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields `named_modules`, with every place of a shared module, without the tiles."""
    within: set[int] = set()
    for module in model.modules():
        if isinstance(module, Tiled):
            within.update(id(inner) for inner in module.tiles.modules())
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in within:
            yield name, module


def named_parameters_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields `named_parameters`, with every tile under the name of its tiled parameter."""
    seen: set[int] = set()
    for path, module in modules_of(model):
        for attribute, parameter in parameters_of(module).items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                name = f"{path}.{attribute}" if path else attribute
                yield from ((name, tile) for tile in tiles_of(parameter))


# -- Splitting -------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Candidate:
    """Parameters that are split at the same rows, and the modules that run by rows.

    A candidate is one weight with all linear layers and embeddings that use it, and their biases;
    or all parameters of one module of packed experts.
    """

    parameters: dict[str, tuple[str, nn.Parameter]]  # (full name, parameter) by attribute.
    modules: list[tuple[str, nn.Module]]  # (name, module).
    alignment: int  # Tiles start at multiples of this number of rows.

    @property
    def is_experts(self) -> bool:
        return self.alignment == 1

    def rows(self, itemsize_of: Callable[[nn.Parameter], int]) -> CutRows:
        """Returns the rows that are cut, with the element of a bias."""
        values = [parameter for _, parameter in self.parameters.values()]
        has_bias = any(
            "bias" not in self.parameters and module._parameters.get("bias") is not None
            for _, module in self.modules
        )
        row_nbytes = sum(math.prod(p.shape[1:]) * itemsize_of(p) for p in values)
        row_nbytes += has_bias * itemsize_of(values[0])
        nbytes = sum(parameter.numel() * itemsize_of(parameter) for parameter in values)
        return CutRows(values[0].shape[0], nbytes, row_nbytes, self.alignment)


@dataclass(eq=False, slots=True)
class _TileEdit:
    """A changed module and its previous state."""

    module: Tiled
    kind: type[nn.Module]
    parameters: dict[str, nn.Parameter | None]
    hooks: list[Any]

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()
        del self.module._modules["tiles"]
        for name in ("starts", "limit_nbytes", "tiled_params"):
            del self.module.__dict__[name]
        self.module.__class__ = self.kind  # type: ignore[assignment]
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)


class Tiling:
    """The tiles of one model: split, split again with another limit, undone, or given to an engine.

    No value is copied: tiles are views of the parameters until the tiers have the values.
    """

    def __init__(
        self,
        model: nn.Module,
        itemsize_of: Callable[[nn.Parameter], int],
        products: ExpertProducts = "auto",
    ) -> None:
        self._model = model
        self._itemsize_of = itemsize_of  # Bytes of an element on the tiers.
        self._products = products
        self._candidates, self._reasons = _survey(model)
        for name, parameter, reason in self._reasons:
            if hasattr(parameter, "own_rows"):
                raise UnsupportedError(f"{name!r}: no expert can be trained apart: {reason}")
        self._cuts: list[_TileEdit] = []
        # Tiles of experts have no sum of weights and adapters, so all experts use factors.
        self._adapters = factor_adapters(model)
        self.tiled_params: list[TiledParam] = []

    @property
    def largest_nbytes(self) -> int:
        """The bytes of the largest set of parameters that can be split at the same rows."""
        sizes = (candidate.rows(self._itemsize_of).nbytes for candidate in self._candidates)
        return max(sizes, default=0)

    def why_not(self) -> str:
        """The reason why the largest parameters are not split; empty if they could be."""
        sizes = [param.numel() * self._itemsize_of(param) for _, param, _ in self._reasons]
        least_nbytes = max(self.largest_nbytes, *sizes, 0) // 2
        said = [
            f"{name!r} ({reason})"
            for (name, _, reason), nbytes in zip(self._reasons, sizes, strict=True)
            if nbytes > least_nbytes
        ]
        more = f" and {len(said) - 3} more" if len(said) > 3 else ""
        return ", ".join(said[:3]) + more

    def cut(self, limit_nbytes: int | None) -> None:
        """Splits every candidate larger than the limit; None splits nothing. Experts that must have
        one product are at least one tile."""
        self._join()
        for candidate in self._candidates:
            rows = candidate.rows(self._itemsize_of)
            starts = () if limit_nbytes is None else rows.starts(limit_nbytes)
            numbers = getattr(next(iter(candidate.parameters.values()))[1], "own_rows", ())
            own = {edge for number in numbers for edge in (number, number + 1)}
            if own or (candidate.is_experts and self._products == "grouped"):
                starts = starts or (0, rows.num_rows)
            if starts:
                self._cut(candidate, tuple(sorted(own.union(starts))), limit_nbytes or 0)

    def _cut(self, candidate: _Candidate, starts: tuple[int, ...], limit_nbytes: int) -> None:
        shared = {
            attribute: self._tiled(name, parameter, starts)
            for attribute, (name, parameter) in candidate.parameters.items()
        }
        for name, module in candidate.modules:
            bias = module._parameters.get("bias")
            tiled_params = dict(shared)
            if bias is not None and "bias" not in tiled_params:
                tiled_params["bias"] = self._tiled(f"{name}.bias" if name else "bias", bias, starts)
            self._cuts.append(_cut_module(module, starts, tiled_params))
            self._cuts[-1].module.limit_nbytes = limit_nbytes
            for tile in self._cuts[-1].module.tiles:
                tile.__dict__["products"] = self._products

    def _tiled(self, name: str, parameter: nn.Parameter, starts: tuple[int, ...]) -> TiledParam:
        tiled = TiledParam(name, starts, parameter, [])
        full = without_class(parameter.detach())  # Rows of an Awaited take a millisecond each.
        for index, (start, stop) in enumerate(pairwise(starts)):
            tile = nn.Parameter(full[start:stop], requires_grad=parameter.requires_grad)
            if isinstance(parameter, Provisional):
                tile.__class__ = Provisional
            tile.__dict__.update(vars(parameter))
            if (own := tile.__dict__.pop("own_rows", {}).get(start)) is not None:
                tile.requires_grad_(own[0])
                tiled.own[index] = own[1]
            tiled.tiles.append(tile)
        self.tiled_params.append(tiled)
        return tiled

    def undo(self) -> None:
        """Restores the model."""
        merge_adapters(self._adapters)
        self._join()

    def _join(self) -> None:
        for cut in reversed(self._cuts):
            cut.undo()
        self._cuts.clear()
        self.tiled_params.clear()

    def hand_over(self, handle_of: Callable[[nn.Parameter], Handle]) -> None:
        """Makes tiled parameters handles. `handle_of` returns the handle of a tile's parameter."""
        for tiled in self.tiled_params:
            shape = tiled.tensor.shape
            tiled.handles = [handle_of(tile) for tile in tiled.tiles]
            # Of a parameter with some trained tiles, these alone are trained.
            like = min(tiled.handles, key=lambda handle: handle.requires_grad)
            tensor = Handle.make(like.owner, tiled.name, like, shape=shape)
            # Initialisation of transformers skips it: it initialises the tiles instead.
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            tiled.tensor = tensor

    def forget(self) -> None:
        """Drops the user's parameters. `undo` is not possible afterwards."""
        self._cuts.clear()
        self._candidates.clear()
        self._reasons.clear()
        for tiled in self.tiled_params:
            tiled.tiles, tiled.own = [], {}


# (module, attribute) by the id of the parameter.
_Places = Mapping[int, Sequence[tuple[nn.Module, str]]]


def _survey(model: nn.Module) -> tuple[list[_Candidate], list[tuple[str, nn.Parameter, str]]]:
    """Returns the candidates, and the other parameters as (name, parameter, reason why not)."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    names = {id(module): name for name, module in model.named_modules()}
    candidates: list[_Candidate] = []
    experts: dict[int, _Candidate] = {}  # By the id of their module.
    reasons = []
    for name, parameter in model.named_parameters():
        module, attribute = places[id(parameter)][0]
        if tiled_experts.is_packed(module):
            reason = _why_not_experts(module, places)
            if reason is None:
                if id(module) not in experts:
                    experts[id(module)] = _Candidate({}, [(names[id(module)], module)], 1)
                    candidates.append(experts[id(module)])
                experts[id(module)].parameters[attribute] = name, parameter
        else:
            reason = _why_not(parameter, places)
            if reason is None:
                users = [(names[id(module)], module) for module, _ in places[id(parameter)]]
                candidates.append(_Candidate({"weight": (name, parameter)}, users, ROW_ALIGNMENT))
        if reason is not None:
            reasons.append((name, parameter, reason))
    return candidates, reasons


def _why_not(parameter: nn.Parameter, places: _Places) -> str | None:
    """Returns None if only linear layers and embeddings use the weight, in their own forward; else
    the reason why it cannot be split."""
    for module, attribute in places[id(parameter)]:
        kind = type(module)
        if kind not in (nn.Linear, nn.Embedding) or attribute != "weight":
            return f"the {attribute} of a {kind.__name__}, which cannot be split"
        if "forward" in module.__dict__:
            return f"the forward of its {kind.__name__} was replaced"
        if isinstance(module, nn.Embedding) and (
            module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        ):
            return "an embedding with max_norm, scale_grad_by_freq or sparse looks at all rows"
        bias = module._parameters.get("bias")
        if bias is not None and len(places[id(bias)]) > 1:
            return "its bias is shared"
        if set(module._parameters) - {"weight", "bias"}:
            return f"its {kind.__name__} has more parameters than that class"
        if bias is not None and bias._backward_hooks:
            return "its bias has gradient hooks"
    if parameter.dim() != 2:
        return _APART
    return _why_not_by_rows(parameter)


def _why_not_experts(module: nn.Module, places: _Places) -> str | None:
    """Returns None for packed experts that run the forward of their class, else the reason."""
    if "forward" in module.__dict__:
        return f"the forward of its {type(module).__name__} was replaced"
    for attribute, parameter in module._parameters.items():
        if parameter is None:
            continue
        if len(places[id(parameter)]) > 1:
            return f"the {attribute} of its {type(module).__name__} is shared"
        if not is_cut_by_name(attribute):
            return f"the {attribute} of a {type(module).__name__}, which cannot be split"
        reason = _why_not_by_rows(parameter)
        if reason is not None:
            return reason
    return tiled_experts.why_not_cut(module)


_APART = "its rows are not contiguous"


def _why_not_by_rows(parameter: nn.Parameter) -> str | None:
    if not parameter.is_contiguous():
        return _APART
    if parameter._backward_hooks:
        return "it has gradient hooks, which expect the full gradient"
    return None


def _cut_module(
    module: nn.Module, starts: tuple[int, ...], tiled_params: dict[str, TiledParam]
) -> _TileEdit:
    tiles = nn.ModuleList(_tile(module, start, stop) for start, stop in pairwise(starts))
    for attribute, tiled in tiled_params.items():
        for tile, parameter in zip(tiles, tiled.tiles, strict=True):
            tile._parameters[attribute] = parameter
    cut = _TileEdit(module, type(module), dict(module._parameters), [])  # type: ignore[arg-type]
    module.__class__ = _tiled_class(module)
    module._parameters.clear()
    module.starts, module.tiled_params = starts, tiled_params  # type: ignore[assignment]
    module._modules["tiles"] = tiles.train(module.training)
    cut.hooks = [
        module.register_state_dict_post_hook(_put_together),
        module.register_load_state_dict_pre_hook(_take_apart),
    ]
    return cut


def _tiled_class(module: nn.Module) -> type[Tiled]:
    if isinstance(module, nn.Linear):
        return TiledLinear
    if isinstance(module, nn.Embedding):
        return TiledEmbedding
    kind: Any = type(module)
    return tiled_experts.tiled_class(kind, tuple(module._parameters))


def _tile(module: nn.Module, start: int, stop: int) -> nn.Module:
    """Returns a module of the same kind for some of its rows, without values."""
    if isinstance(module, nn.Linear):
        has_bias = module.bias is not None
        return nn.Linear(module.in_features, stop - start, bias=has_bias, device="meta")
    if isinstance(module, nn.Embedding):
        padding = module.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        return nn.Embedding(stop - start, module.embedding_dim, padding_idx=padding, device="meta")
    return tiled_experts.tile_of(module, start, stop)


# -- Dictionaries of state, under the names of the user's model ------------------------------------


def _tile_names(module: Tiled, prefix: str, attribute: str) -> list[str]:
    return [f"{prefix}tiles.{index}.{attribute}" for index in range(len(module.tiles))]


def _put_together(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Joins tiles to one tensor after `state_dict()` has visited the module."""
    for attribute, tiled in module.tiled_params.items():
        values = [state_dict.pop(name) for name in _tile_names(module, prefix, attribute)]
        if any(isinstance(value, Handle) for value in values):
            is_state = any(getattr(value, "is_state", False) for value in values)
            tensor = tiled.tensor
            state_dict[prefix + attribute] = tensor.make_data(is_state=True) if is_state else tensor
        else:
            state_dict[prefix + attribute] = torch.cat(values)


def _take_apart(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Replaces a tensor by views of its rows before `load_state_dict()` visits the module."""
    for attribute, tiled in module.tiled_params.items():
        value = state_dict.get(prefix + attribute)
        if not isinstance(value, torch.Tensor):
            continue
        del state_dict[prefix + attribute]
        names = _tile_names(module, prefix, attribute)
        if value.shape != tiled.tensor.shape:
            errors.append(
                f"size mismatch for {prefix + attribute}: the model has "
                f"{tuple(tiled.tensor.shape)}, "
                f"the state_dict {tuple(value.shape)}"
            )
        # The dict has the parameter's own handle: nothing to load.
        parts: Iterable[Any] = tiled.handles
        if not is_value_of(value, tiled.tensor) and value.shape == tiled.tensor.shape:
            value = plain_value(value)
            parts = [value[start:stop] for start, stop in pairwise(tiled.starts)]
        state_dict.update(zip(names, parts, strict=True))
