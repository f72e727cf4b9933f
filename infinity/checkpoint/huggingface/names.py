"""Converts names and layouts between Hugging Face files and the model in memory.

transformers 5 renames tensors and changes their layout on import (per-expert matrices become one
packed tensor; query, key and value are split), and reverts both on export. The patterns belong to
transformers and change with every release, so this file repeats none of them. The mapping of
transformers gives the source tensors of every target, and its operations make the target. This file
divides the work into groups, so that memory holds the tensors of one group. Planning runs the same
operations on meta tensors, which gives every name and shape without reading a byte.

Source: `transformers.core_model_loading` of 5.24, `convert_and_load_state_dict_in_model` (import)
and `revert_weight_conversion` (export); the loops here follow theirs line by line. Other models
have no mapping: every tensor is a group of its own.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.config.extras import require_release
from infinity.errors import listed, refusing
from infinity.modules.reading.adapters import follows
from infinity.modules.reading.empty_weights import is_to_come


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Source tensors that together make one or more targets.

    `sources` are (pattern, name) in the order that the operations expect. `transform` is an object
    of transformers, or None if the group copies one source to one target. `targets`: the shapes of
    what it makes, by name, once it is planned. `is_foreign`: an export has other names for it.
    """

    first_target: str
    sources: tuple[tuple[str, str], ...]
    transform: Any = None
    rename: Callable[[str], str] | None = None
    targets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    is_foreign: bool = False

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the tensors in the files, in the order in which they are combined."""
        return tuple(name for _, name in self.sources)

    def convert(self, fetch: Callable[[str], torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Returns the targets by name. Calls `fetch` once for every source name."""
        if self.transform is None:
            return {self.first_target: fetch(self.sources[0][1])}
        transform = copy.deepcopy(self.transform)
        for pattern, name in self.sources:
            transform.add_tensor(self.first_target, name, pattern, fetch(name))
        made = transform.convert(self.first_target, model=model, config=model.config)
        renamed = self.rename or (lambda name: name)
        return {
            renamed(name): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


def import_groups(
    model: Any, source_names: Sequence[str], targets: dict[str, Any]
) -> tuple[list[TensorGroup], list[str]]:
    """Returns (groups that make tensors of `model` from those of a file, unused source names).

    `targets` has a key for every name that the model accepts, with aliases of tied weights. Sets
    `model._weight_conversions` to the conversions in use, as transformers does, so that an export
    writes the layout that was read.
    """
    if not _is_transformers_model(model):
        known = [name for name in source_names if name in targets]
        groups = [TensorGroup(first_target=name, sources=((name, name),)) for name in known]
        return groups, [name for name in source_names if name not in targets]

    require_release("transformers", "reading weights of a transformers model")
    from infinity.private.transformers import (
        dot_natural_key,
        get_model_conversion_mapping,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    others = _of_other_writers(model, source_names, targets, _by_kind(mapping)[1])
    mapping = [*(made for made, _ in others), *mapping]
    renamings, converters, converter_of = _by_kind(mapping)
    prefix = model.base_model_prefix
    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unused = []
    for name in sorted(source_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets and name in targets:
            target, pattern = rename_source_key(name, [], [], prefix, targets)
        if target not in targets:
            unused.append(name)
        elif pattern is None:
            collected.setdefault(target, (None, []))[1].append((name, name))
        else:
            collected.setdefault(target, (converter_of[pattern], []))[1].append((pattern, name))
    written_as = {id(made): entry for made, entry in others}
    used = (written_as.get(id(entry), entry) for entry in mapping if entry.was_used())
    model._weight_conversions = [entry for entry in used if entry is not None]
    return [
        TensorGroup(
            first_target=target,
            sources=tuple(sources),
            transform=transform,
            is_foreign=id(transform) in written_as or _STACKED in sources[0][1],
        )
        for target, (transform, sources) in collected.items()
    ], unused


_STACKED = ".switch_mlp."  # By mlx-lm.


def _by_kind(mapping: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Returns the renamings and the converters of a mapping, and the converter of each pattern."""
    from infinity.private.transformers import WeightConverter, WeightRenaming

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    return renamings, converters, {p: entry for entry in converters for p in entry.source_patterns}


def _of_other_writers(
    model: Any, names: Sequence[str], targets: Mapping[str, Any], converters: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """Returns conversions of experts in a layout that transformers does not know of the class, each
    with the one by which an export writes them, None for none: those that mlx-lm has stacked, and
    those of llm-compressor and AutoAWQ, which are apart where the class alone has them packed."""
    from infinity.private.transformers import (
        Concatenate,
        MergeModulelist,
        Transpose,
        WeightConverter,
        WeightRenaming,
    )

    found: list[tuple[Any, Any]] = []
    for entry in converters if any(_STACKED in name for name in names) else ():
        sources = [p.replace("experts.*.", "switch_mlp.") for p in entry.source_patterns]
        if sources == entry.source_patterns or type(entry.operations[0]) is not MergeModulelist:
            continue
        left = entry.operations[1:]
        made = WeightConverter(sources, entry.target_patterns, left) if left else None
        found.append((made or WeightRenaming(sources[0], entry.target_patterns[0]), entry))
    packed = next((name for name in targets if name.endswith(".experts.gate_up_proj")), None)
    is_known = any("experts.*." in p for entry in converters for p in entry.source_patterns)
    is_apart = any(re.search(r"\.experts\.\d+\.down_proj\.weight$", name) for name in names)
    # Gates come before the others, not each beside its own as in gpt-oss.
    has_halves = all(getattr(module, "is_concatenated", True) for module in model.modules())
    # A class of a directory's own code may pack them in another order.
    is_own = type(model).__module__.startswith("transformers.")
    if packed is None or is_known or not is_apart or not has_halves or not is_own:
        return found
    inner = targets[packed.replace("gate_up_proj", "down_proj")].shape[2]
    turned = [] if targets[packed].shape[1] == 2 * inner else [Transpose(1, 2)]
    for own, parts, joins in (
        ("gate_up_proj", ("gate_proj", "up_proj"), [Concatenate(1)]),
        ("down_proj", ("down_proj",), []),
    ):
        patterns = [rf"\.experts.*.{part}.weight" for part in parts]
        steps = [MergeModulelist(0), *joins, *turned]
        found.append((WeightConverter(patterns, f".experts.{own}", steps), None))
    return found


def export_groups(model: Any, names: Iterable[str]) -> list[TensorGroup]:
    """Returns the groups that make tensors of files from those of `model`."""
    plain = [TensorGroup(first_target=name, sources=((name, name),)) for name in names]
    if not _is_transformers_model(model):
        return plain

    from infinity.private.transformers import (
        PrefixChange,
        dot_natural_key,
        get_model_conversion_mapping,
    )

    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    if not mapping:
        return plain
    reverse = [entry.reverse_transform() for entry in mapping[::-1]]
    renamings, converters, converter_of = _by_kind(reverse)

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted((group.first_target for group in plain), key=dot_natural_key):
        matches = (converter.rename_source_key(name) for converter in converters)
        target, pattern = next((match for match in matches if match[1] is not None), (name, None))
        if pattern is None:
            collected.setdefault(rename(name), (None, []))[1].append((name, name))
        else:
            collected.setdefault(target, (converter_of[pattern], []))[1].append((pattern, name))
    return [
        TensorGroup(
            first_target=target,
            sources=tuple(sources),
            transform=transform,
            rename=None if transform is None else rename,
        )
        for target, (transform, sources) in collected.items()
    ]


def planned_targets(
    group: TensorGroup, infos: Mapping[str, tuple[tuple[int, ...], torch.dtype]], model: Any
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Computes (shape, dtype) of each target of `group` from those of its sources. Reads no byte.

    Raises ConfigError if the shapes do not fit the conversion.
    """

    def fetch(name: str) -> torch.Tensor:
        shape, dtype = infos[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    what = f"{listed(group.source_names)} cannot be converted to {group.first_target}"
    with refusing(what, RuntimeError, ValueError, IndexError, KeyError):
        made = group.convert(fetch, model)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}


@dataclass(frozen=True, slots=True)
class PlacedSource:
    """One source tensor as a box of a target: `target[box].permute(axes)` has its shape and
    elements. `index` counts the sources of the group."""

    index: int
    box: tuple[int | slice, ...]
    axes: tuple[int, ...]


class SourcePlaces:
    """Finds the boxes of sources in targets. Groups with equal shapes share one answer: the layers
    of a model."""

    def __init__(self, model: Any) -> None:
        self._config = getattr(model, "config", None)
        self._known: dict[object, list[list[PlacedSource]] | None] = {}

    def of(
        self,
        group: TensorGroup,
        shapes: Sequence[tuple[int, ...]],
        targets: Mapping[str, tuple[int, ...]],
    ) -> list[list[PlacedSource]] | None:
        """Returns the sources of each target; None if the conversion is more than stacking,
        concatenating and transposing full tensors.

        `shapes` are those of the sources, `targets` those that the conversion gives, in its order.
        """
        if group.transform is None:
            box = tuple(slice(0, size) for size in shapes[0])
            return [[PlacedSource(0, box, tuple(range(len(shapes[0]))))]]
        patterns = tuple(pattern for pattern, _ in group.sources)
        key = id(group.transform), patterns, tuple(shapes), tuple(targets.values())
        if key not in self._known:
            trials = [_placed(group, shapes, targets, self._config, sizes) for sizes in _SIZES]
            self._known[key] = trials[0] if trials[0] == trials[1] else None
        return self._known[key]


def _placed(
    group: TensorGroup,
    shapes: Sequence[tuple[int, ...]],
    targets: Mapping[str, tuple[int, ...]],
    config: Any,
    sizes: Sequence[int],
) -> list[list[PlacedSource]] | None:
    """Runs the conversion once on small tensors of numbers, which show where each element goes.
    What all sources of an axis have in common is replaced by one of `sizes`, equal ones by the same
    size."""
    num_axes = len(shapes[0])
    if any(len(shape) != num_axes or 0 in shape for shape in shapes) or num_axes > len(sizes):
        return None
    common = [math.gcd(*(shape[axis] for shape in shapes)) for axis in range(num_axes)]
    size_of = dict(zip(common, sizes, strict=False))
    small = [
        tuple(size // unit * size_of[unit] for size, unit in zip(shape, common, strict=True))
        for shape in shapes
    ]

    def get_parameter(name: str) -> torch.Tensor:
        (_,) = shapes  # Of several, a target of this size may be stacked.
        return torch.empty([size_of[size] for size in targets[name]], device="meta")

    starts = np.cumsum([0, *(math.prod(shape) for shape in small)])
    if starts[-1] > _MOST_NUMBERS:
        return None
    numbers = {
        name: torch.arange(int(start), int(start) + math.prod(shape), device="cpu").view(shape)
        for name, shape, start in zip(group.source_names, small, starts, strict=False)
    }
    try:
        view = SimpleNamespace(config=config, get_parameter=get_parameter)
        made = group.convert(numbers.__getitem__, view)
    except Exception:  # A conversion that needs the real sizes or dtypes.
        return None
    if list(made) != list(targets):
        return None
    placed: list[list[PlacedSource]] = []
    for target, tensor in made.items():
        if tensor.dim() != len(targets[target]) or tensor.dtype is not torch.int64:
            return None
        if not tensor.numel() or tensor.min() < 0 or tensor.max() >= starts[-1]:
            return None  # The conversion computes.
        boxes = _boxes(tensor.contiguous().numpy(), small, starts)
        scaled = [
            None if box is None else _scaled(index, box, shapes[index], common, size_of)
            for index, box in boxes
        ]
        found = [box for box in scaled if box is not None]
        covered = sum(math.prod(shapes[box.index]) for box in found)
        axes = zip(*(box.box for box in found), strict=True)
        ends = [max(at.stop if isinstance(at, slice) else at + 1 for at in axis) for axis in axes]
        is_full = (*ends,) == targets[target] and covered == math.prod(ends)
        if len(found) < len(scaled) or not is_full:
            return None
        placed.append(found)
    return placed


# Odd, so that nothing halves them; two, because no rotation of heads is the identity at both.
_SIZES = ((3, 5, 7, 11), (5, 3, 11, 7))
_MOST_NUMBERS = 1 << 24
# Start and axis of the source (None: a stacked axis) by axis of the target, and the permutation.
_SmallBox = tuple[list[tuple[int, int | None]], tuple[int, ...]]


def _boxes(
    made: np.ndarray[Any, Any], small: list[tuple[int, ...]], starts: np.ndarray[Any, Any]
) -> list[tuple[int, _SmallBox | None]]:
    """Returns (index of the source, its box or None) of every source in `made`."""
    owner = np.searchsorted(starts, made.ravel(), side="right") - 1
    order = np.argsort(owner, kind="stable")
    present, first = np.unique(owner[order], return_index=True)
    found: list[tuple[int, _SmallBox | None]] = []
    for index, positions in zip(present, np.split(order, first[1:]), strict=True):
        places = np.unravel_index(positions, made.shape)
        low = [int(place.min()) for place in places]
        high = [int(place.max()) + 1 for place in places]
        part = made[tuple(map(slice, low, high))] - starts[index]
        found.append((int(index), _small_box(part, low, small[index])))
    return found


def _small_box(
    part: np.ndarray[Any, Any], low: list[int], shape: tuple[int, ...]
) -> _SmallBox | None:
    kept = [axis for axis, size in enumerate(part.shape) if size > 1]
    squeezed = part.reshape([part.shape[axis] for axis in kept])
    expected = np.arange(math.prod(shape)).reshape(shape)
    for axes in itertools.permutations(range(len(kept))):
        shown = squeezed.transpose(axes)
        if shown.shape == shape and np.array_equal(shown, expected):
            source_axis = {kept[axes[i]]: i for i in range(len(axes))}
            return [(low[axis], source_axis.get(axis)) for axis in range(part.ndim)], axes
    return None


def _scaled(
    index: int,
    small: _SmallBox,
    shape: tuple[int, ...],
    common: list[int],
    size_of: Mapping[int, int],
) -> PlacedSource | None:
    """Returns the box in the sizes of the real tensors."""
    starts, axes = small
    box: list[int | slice] = []
    for start, axis in starts:
        if axis is None:
            box.append(start)
            continue
        real, rest = divmod(start * common[axis], size_of[common[axis]])
        if rest:
            return None
        box.append(slice(real, real + shape[axis]))
    return PlacedSource(index, tuple(box), axes)


def is_expected_extra(model: nn.Module, name: str) -> bool:
    """Whether transformers ignores tensor `name` of a file without a warning, or a layer for
    multi-token prediction has it. Such layers stand behind the others, or in a module `mtp`."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer is not None and _is_transformers_model(model):
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        behind = int(layer[1]) - int(getattr(config, "num_hidden_layers", 0) or 0)
        if 0 <= behind < int(getattr(config, "num_nextn_predict_layers", 0) or 0):
            return True
    return any(
        re.search(pattern, name)
        for pattern in patterns | {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"(^|\.)mtp\."}
    )


def _is_transformers_model(model: nn.Module) -> bool:
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel)


# -- A model under the names of its checkpoint -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """One parameter or persistent buffer of the model.

    `canonical` is its first name in the view, which all aliases of a tied weight share.
    `parameter_names` are its names for the writer: one, or several if PEFT keeps a trainable copy
    of a module beside the frozen one. Exactly one of the fields of names and buffers is filled.
    `has_value`: it was given one, in a model that was built without memory.
    """

    canonical: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter_names: tuple[str, ...] = ()
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    has_value: bool = False

    def is_resized_from(self, shape: tuple[int, ...]) -> bool:
        """Whether it has a value with more or fewer rows than `shape`, as embeddings have after
        `resize_token_embeddings`."""
        return self.has_value and len(shape) > 0 and self.shape[1:] == shape[1:]


class ModelView:
    """A model under the names of its checkpoint, without the wrapping of PEFT, whose adapters have
    none. The model may be on meta, or have handles or plain parameters: only names, shapes and
    dtypes are used.

    `config` and `get_parameter` are what conversions need of a model.
    """

    def __init__(self, model: Any) -> None:
        is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        self.model: nn.Module = model.get_base_model() if is_peft else model
        self.config: Any = getattr(self.model, "config", None)
        self.targets: dict[str, WeightTarget] = {}
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters: dict[str, list[nn.Parameter]] = {}
        buffers: dict[str, list[tuple[nn.Module, str]]] = {}
        self._computed: dict[str, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for leaf, parameter in module._parameters.items():
                name = _without_peft(self.model, prefix + leaf)
                if parameter is not None and name is not None:
                    parameters.setdefault(name, []).append(parameter)
            for leaf, buffer in module._buffers.items():
                name = _without_peft(self.model, prefix + leaf)
                is_saved = leaf not in module._non_persistent_buffers_set
                if not is_saved and name is not None:
                    self._computed.setdefault(leaf, []).append(name)
                if buffer is not None and is_saved and name is not None:
                    buffers.setdefault(name, []).append((module, leaf))
        is_built_empty = any(map(is_to_come, model.parameters()))
        first_name: dict[int, str] = {}
        for name, copies in parameters.items():
            same = [copies[0], *(copy for copy in copies[1:] if follows(copy, copies[0]))]
            self.targets[name] = WeightTarget(
                canonical=first_name.setdefault(id(same[0]), name),
                shape=tuple(same[0].shape),
                dtype=same[0].dtype,
                parameter_names=tuple(dict.fromkeys(name_of[id(one)] for one in same)),
                has_value=is_built_empty and not is_to_come(same[0]),
            )
        for name, places in buffers.items():
            module, leaf = places[0]
            buffer = module._buffers[leaf]
            assert buffer is not None
            self.targets[name] = WeightTarget(
                canonical=first_name.setdefault(id(buffer), name),
                shape=tuple(buffer.shape),
                dtype=buffer.dtype,
                buffers=tuple(places),
            )

    def may_be_missing(self, name: str) -> bool:
        """Whether a checkpoint is complete without `name`.

        The model computes its buffers itself, and transformers lists some weights by pattern.
        """
        patterns = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()
        return bool(self.targets[name].buffers) or any(re.search(p, name) for p in patterns)

    def computes(self, name: str) -> bool:
        """Whether `name` is a buffer that the model computes itself; older versions saved some."""
        leaf = name.rpartition(".")[2]
        return any(
            own == name or own.endswith(f".{name}") or name.endswith(f".{own}")
            for own in self._computed.get(leaf, ())
        )

    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a parameter on meta: conversions look at its shape."""
        if name not in self.targets:
            raise AttributeError(f"the model has no parameter {name!r}")
        return torch.empty(self.targets[name].shape, device="meta")


def _without_peft(model: nn.Module, name: str) -> str | None:
    """Returns the name that a parameter had before PEFT wrapped its module; None for adapters.

    A tuner layer keeps the wrapped module as `base_layer` and names its own parts in
    `adapter_layer_names`; a module to save keeps `original_module` and copies by adapter name, and
    trainable tokens are a tuner layer called `token_adapter` in one of those.
    """
    kept: list[str] = []
    parts = name.split(".")
    module: Any = model
    while parts:
        part = parts.pop(0)
        child = getattr(module, part, None)
        if hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer"):
            if part != "base_layer":
                return None
        elif hasattr(module, "original_module"):
            if part == "modules_to_save":
                child = child[parts.pop(0)]  # type: ignore[index]
            elif part not in ("original_module", "token_adapter"):
                return None
        else:
            kept.append(part)
        module = child
    return ".".join(kept)
