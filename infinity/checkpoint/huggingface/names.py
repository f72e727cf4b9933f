"""Converts names and layouts between Hugging Face files and the model in memory.

transformers 5 renames tensors and changes their layout on import (per-expert matrices become one
packed tensor; query, key and value are split), and reverts both on export. The patterns belong to
transformers and change with every release, so this file repeats none of them. The mapping of
transformers gives the source tensors of every target, and its operations make the target. This file
divides the work into groups, so that memory holds the tensors of one group. Planning runs the same
operations on meta tensors, which gives every name and shape without reading a byte.

Source: `transformers.core_model_loading` of 5.23, `convert_and_load_state_dict_in_model` (import)
and `revert_weight_conversion` (export); the loops here follow theirs line by line. Other models
have no mapping: every tensor is a group of its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.config.extras import require_transformers
from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Source tensors that together make one or more targets.

    `sources` are (pattern, name) in the order that the operations expect. `transform` is an object
    of transformers, or None if the group copies one source to one target.
    """

    first_target: str
    sources: tuple[tuple[str, str], ...]
    transform: Any = None
    rename: Callable[[str], str] | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.sources)

    def convert(
        self, fetch: Callable[[str], torch.Tensor], model: nn.Module
    ) -> dict[str, torch.Tensor]:
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
    model: Any, source_names: Iterable[str], targets: dict[str, Any]
) -> tuple[list[TensorGroup], list[str]]:
    """Returns (groups that make tensors of `model` from those of a file, unused source names).

    `targets` has a key for every name that the model accepts, with aliases of tied weights. Sets
    `model._weight_conversions` to the conversions in use, as transformers does, so that an export
    writes the layout that was read.
    """
    if not _is_transformers_model(model):
        groups, unused = [], []
        for name in source_names:
            if name in targets:
                groups.append(TensorGroup(first_target=name, sources=((name, name),)))
            else:
                unused.append(name)
        return groups, unused

    require_transformers("reading weights of a transformers model")
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
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
            entry = collected.setdefault(target, (converter_of[pattern], []))
            entry[1].append((pattern, name))
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return [
        TensorGroup(first_target=target, sources=tuple(sources), transform=transform)
        for target, (transform, sources) in collected.items()
    ], unused


def export_groups(model: Any, names: Iterable[str]) -> list[TensorGroup]:
    """Returns the groups that make tensors of files from those of `model`."""
    plain = [TensorGroup(first_target=name, sources=((name, name),)) for name in names]
    if not _is_transformers_model(model):
        return plain

    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    if not mapping:
        return plain
    reverse = [entry.reverse_transform() for entry in mapping[::-1]]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    converter_of = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }

    def rename(name: str) -> str:
        return apply_renamings(name, renamings)

    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted((group.first_target for group in plain), key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
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
    group: TensorGroup,
    infos: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    model: nn.Module,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Computes (shape, dtype) of each target of `group` from those of its sources. Reads no byte.

    Raises ConfigError if the shapes do not fit the conversion.
    """

    def fetch(name: str) -> torch.Tensor:
        shape, dtype = infos[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    try:
        made = group.convert(fetch, model)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"{', '.join(group.source_names)} cannot be converted to {group.first_target}: {error}"
        ) from error
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}


def is_expected_extra(model: nn.Module, name: str) -> bool:
    """Whether transformers ignores tensor `name` of a file without a warning."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return any(
        re.search(pattern, name)
        for pattern in patterns | {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    )


def is_expected_missing(model: nn.Module, name: str) -> bool:
    """Whether transformers accepts a file without tensor `name`."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _is_transformers_model(model: nn.Module) -> bool:
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel)
