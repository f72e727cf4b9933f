"""Operators too large for the window, run as sequential tiles that are fetched one after the other.

An `nn.Linear` is cut over its output rows, an `nn.Embedding` over the rows of its table. The module
stays the one the user has, with its hooks and all who refer to it; its class becomes
`TiledLinear` or `TiledEmbedding`, and in the place of its parameters it has `tiles`, a list of
plain `nn.Linear` or `nn.Embedding`. Each is a site and a unit of its own (`engine/discover.py`), so
the hooks that fetch any module fetch it. A tied weight is cut once, and its tiles are tied.

Note [Same bits]
  No sum of a forward is split, nor of a weight's gradient: each element is computed as it would be
  in the whole. Only the gradient of a linear layer's input is a sum over tiles, from the last to
  the first. See docs/design/0007-tiling.md.

Note [One tile at a time]
  The output is allocated whole and tiles are written into it, so that one tile's output is there
  beside it and not all. In the backward autograd runs the node with the highest number first: the
  last write, the last tile, the write before. So a tile is held while its own gradients are made.

Source: Rajbhandari et al., "ZeRO-Infinity" (SC21), section 5.1.3, memory-centric tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from infinity.engine.handles import Handle, replace_handles
from infinity.errors import ParameterNotResident
from infinity.state.tiles import cut_rows


class _Write(torch.autograd.Function):
    """Columns [start, ...) of `out`, in place; what was there before has no gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
        ctx.columns = start, part.shape[-1]
        out.narrow(-1, start, part.shape[-1]).copy_(part)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # Earlier writes look at columns of their own: nothing is masked, so nothing is copied.
        return gradient, gradient.narrow(-1, *ctx.columns), None


class Tiled(nn.Module):
    """A module whose parameters stand as tiles. Made by `Tiling.cut` alone."""

    tiles: nn.ModuleList
    starts: tuple[int, ...]  # First row of every tile, and the number of rows.
    wholes: dict[str, Whole]  # By attribute.

    @property
    def weight(self) -> Any:
        """The whole, as a handle: its shape and dtype, and a copy of its values when read."""
        return self.wholes["weight"].face


class TiledLinear(Tiled, nn.Linear):
    """`nn.Linear` over output rows."""

    @property
    def bias(self) -> Any:
        whole = self.wholes.get("bias")
        return None if whole is None else whole.face

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
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
    """`nn.Embedding` over rows of the table."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        out: torch.Tensor | None = None
        last = len(self.tiles) - 1
        for index, tile in enumerate(self.tiles):
            start, stop = self.starts[index : index + 2]
            ids = input - start
            inside = (ids >= 0) & (ids < stop - start)
            # Not at the ends of the table: an id that no row has must raise, as it always does.
            ids = ids.clamp(
                min=None if index == 0 else 0, max=None if index == last else stop - start - 1
            )
            part = tile(ids)
            out = part if out is None else torch.where(inside.unsqueeze(-1), part, out)
        assert out is not None
        return out


# -- A parameter that stands as tiles --------------------------------------------------------------


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

    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        for tile in self.handles:
            tile.requires_grad_(is_trainable)
        with torch._C.DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)


def tiles_of(tensor: Any) -> list[Any]:
    """The handles of a whole's tiles; anything else is its own only tile."""
    owner = tensor.owner if isinstance(tensor, Handle) else None
    if not isinstance(owner, Whole):
        return [tensor]
    return list(owner.handles)


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters as the user has them: whole where they stand as tiles."""
    if isinstance(module, Tiled):
        return {attribute: whole.face for attribute, whole in module.wholes.items()}
    return dict(module._parameters)


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules`, every place of a shared one, without the tiles."""
    within: set[int] = set()
    for module in model.modules():
        if isinstance(module, Tiled):
            within.update(id(inner) for inner in module.tiles.modules())
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in within:
            yield name, module


def named_parameters_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """`named_parameters`, with every tile under the name of the parameter that it is a tile of."""
    seen: set[int] = set()
    for path, module in modules_of(model):
        for attribute, parameter in parameters_of(module).items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                name = f"{path}.{attribute}" if path else attribute
                yield from ((name, tile) for tile in tiles_of(parameter))


# -- Cutting ---------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Candidate:
    """A weight that can be cut, and all modules that it is the weight of."""

    name: str
    weight: nn.Parameter
    modules: list[tuple[str, nn.Linear | nn.Embedding]]  # By their names.


@dataclass(eq=False, slots=True)
class _Cut:
    """A module that was changed, and how it was before."""

    module: Tiled
    kind: type[nn.Module]
    parameters: dict[str, nn.Parameter | None]
    hooks: list[Any]

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()
        del self.module._modules["tiles"]
        del self.module.__dict__["starts"], self.module.__dict__["wholes"]
        self.module.__class__ = self.kind  # type: ignore[assignment]
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)


class Tiling:
    """The tiles of one model: cut, cut anew with another limit, undone, or handed to an engine.

    No value is copied: tiles are views of the parameters until those are filled into the tiers.
    """

    def __init__(self, model: nn.Module, itemsize_of: Callable[[nn.Parameter], int]) -> None:
        self._model = model
        self._itemsize_of = itemsize_of  # Bytes of an element as the engine keeps it.
        self._candidates, self._reasons = _survey(model)
        self._cuts: list[_Cut] = []
        self.wholes: list[Whole] = []

    @property
    def largest_nbytes(self) -> int:
        """Of the parameters that can be cut."""
        sizes = (self._nbytes(candidate.weight) for candidate in self._candidates)
        return max(sizes, default=0)

    def _nbytes(self, parameter: nn.Parameter) -> int:
        return parameter.numel() * self._itemsize_of(parameter)

    def why_not(self) -> str:
        """Why the largest parameters are not cut; empty when they could be."""
        sizes = [self._nbytes(parameter) for _, parameter, _ in self._reasons]
        least_nbytes = max(self.largest_nbytes, *sizes, 0) // 2
        said = [
            f"{name!r} ({reason})"
            for (name, _, reason), nbytes in zip(self._reasons, sizes, strict=True)
            if nbytes > least_nbytes
        ]
        more = f" and {len(said) - 3} more" if len(said) > 3 else ""
        return ", ".join(said[:3]) + more

    def cut(self, limit_nbytes: int | None) -> None:
        """Cuts every weight of more than the limit that can be cut; None leaves all whole."""
        self.undo()
        if limit_nbytes is None:
            return
        for candidate in self._candidates:
            weight, modules = candidate.weight, candidate.modules
            itemsize = self._itemsize_of(weight)
            has_bias = any(module._parameters.get("bias") is not None for _, module in modules)
            row_nbytes = (weight.shape[1] + has_bias) * itemsize
            starts = cut_rows(weight.shape[0], row_nbytes, limit_nbytes)
            if self._nbytes(weight) > limit_nbytes and len(starts) > 2:
                self._cut(candidate, starts)

    def _cut(self, candidate: _Candidate, starts: tuple[int, ...]) -> None:
        weight = self._whole(candidate.name, candidate.weight, starts)
        for name, module in candidate.modules:
            wholes = {"weight": weight}
            bias = module._parameters.get("bias")
            if bias is not None:
                wholes["bias"] = self._whole(f"{name}.bias" if name else "bias", bias, starts)
            self._cuts.append(_cut_module(module, starts, wholes))

    def _whole(self, name: str, parameter: nn.Parameter, starts: tuple[int, ...]) -> Whole:
        tiles = []
        for start, stop in pairwise(starts):
            rows = parameter.detach()[start:stop]
            tile = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            tile.__dict__.update(vars(parameter))
            tiles.append(tile)
        whole = Whole(name, starts, parameter, tiles)
        self.wholes.append(whole)
        return whole

    def undo(self) -> None:
        """The model is as it was."""
        for cut in reversed(self._cuts):
            cut.undo()
        self._cuts.clear()
        self.wholes.clear()

    def hand_over(self, handle_of: Callable[[nn.Parameter], Handle]) -> None:
        """Wholes answer as handles from now on. `handle_of`: that of a tile's parameter."""
        for whole in self.wholes:
            shape = whole.face.shape
            whole.handles = [handle_of(tile) for tile in whole.tiles]
            face = Handle.make(whole, whole.name, whole.handles[0], shape=shape)
            # transformers passes over it when it initialises: its tiles have their own turn.
            face._is_hf_initialized = True  # type: ignore[attr-defined]
            whole.face = face

    def forget(self) -> None:
        """Lets the memory of the user's own parameters go; there is no undoing any more."""
        self._cuts.clear()
        self._candidates.clear()
        self._reasons.clear()
        for whole in self.wholes:
            whole.tiles = []


def _survey(model: nn.Module) -> tuple[list[_Candidate], list[tuple[str, nn.Parameter, str]]]:
    """Weights that can be cut; and the others by name, each with the reason why not."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    candidates = []
    reasons = []
    names = {id(module): name for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        reason = _why_whole(parameter, places)
        if reason is None:
            modules: Any = [(names[id(module)], module) for module, _ in places[id(parameter)]]
            candidates.append(_Candidate(name, parameter, modules))
        else:
            reasons.append((name, parameter, reason))
    return candidates, reasons


def _why_whole(
    parameter: nn.Parameter, places: Mapping[int, Sequence[tuple[nn.Module, str]]]
) -> str | None:
    """None for a weight that only linear layers and embeddings use, by their own forward."""
    for module, attribute in places[id(parameter)]:
        kind = type(module)
        if kind not in (nn.Linear, nn.Embedding) or attribute != "weight":
            return f"the {attribute} of a {kind.__name__}, which is not cut"
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
    if parameter.dim() != 2 or not parameter.is_contiguous():
        return "its rows do not lie one after the other"
    if parameter._backward_hooks:
        return "it has gradient hooks, which look at the whole"
    return None


def _cut_module(
    module: nn.Linear | nn.Embedding, starts: tuple[int, ...], wholes: dict[str, Whole]
) -> _Cut:
    tiles = nn.ModuleList(_tile(module, start, stop) for start, stop in pairwise(starts))
    for attribute, whole in wholes.items():
        for tile, parameter in zip(tiles, whole.tiles, strict=True):
            tile._parameters[attribute] = parameter
    cut = _Cut(module, type(module), dict(module._parameters), [])  # type: ignore[arg-type]
    module._parameters.clear()
    tiled = TiledLinear if isinstance(module, nn.Linear) else TiledEmbedding
    module.__class__ = tiled  # type: ignore[assignment]
    module.starts, module.wholes = starts, wholes  # type: ignore[assignment]
    module._modules["tiles"] = tiles.train(module.training)
    cut.hooks = [
        module.register_state_dict_post_hook(_put_together),
        module.register_load_state_dict_pre_hook(_take_apart),
    ]
    return cut


def _tile(module: nn.Linear | nn.Embedding, start: int, stop: int) -> nn.Module:
    """Of the module's own kind, for some of its rows; without values yet."""
    if isinstance(module, nn.Linear):
        has_bias = module.bias is not None
        return nn.Linear(module.in_features, stop - start, bias=has_bias, device="meta")
    padding = module.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    return nn.Embedding(stop - start, module.embedding_dim, padding_idx=padding, device="meta")


# -- Dictionaries of state, under the names of the user's model ------------------------------------


def _tile_names(module: Tiled, prefix: str, attribute: str) -> list[str]:
    return [f"{prefix}tiles.{index}.{attribute}" for index in range(len(module.tiles))]


def _put_together(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After `state_dict()` came by: one tensor in the place of its tiles."""
    for attribute, whole in module.wholes.items():
        values = [state_dict.pop(name) for name in _tile_names(module, prefix, attribute)]
        keeps_handles = any(isinstance(value, Handle) for value in values)
        state_dict[prefix + attribute] = whole.face if keeps_handles else torch.cat(values)


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
    """Before `load_state_dict()` comes by: views of the rows in the place of the whole."""
    for attribute, whole in module.wholes.items():
        value = state_dict.get(prefix + attribute)
        if not isinstance(value, torch.Tensor):
            continue
        del state_dict[prefix + attribute]
        names = _tile_names(module, prefix, attribute)
        if value.shape != whole.face.shape:
            errors.append(
                f"size mismatch for {prefix + attribute}: the model has {tuple(whole.face.shape)}, "
                f"the state_dict {tuple(value.shape)}"
            )
        parts: Iterable[Any] = (value[start:stop] for start, stop in pairwise(whole.starts))
        if value is whole.face or value.shape != whole.face.shape:
            parts = whole.handles  # Its own values: nothing is to be done.
        state_dict.update(zip(names, parts, strict=True))
