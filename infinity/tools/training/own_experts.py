"""Experts that are trained in full beside an adapter, over a frozen base (`adapter.experts_full`).

Each of them has weights of its own in the engine (`modules/tiling/split.py`, note Own weights),
which begin with the base's decoded values, or with those of a saved adapter. They are saved beside
the adapter, under the names of the base's checkpoint. Where the checkpoint stores all experts of a
layer as one tensor, the number of the expert stands before the last part of that tensor's name.

Source: Wang et al., "Let the Expert Stick to His Last: Expert-Specialized Fine-Tuning for Sparse
Architectural Large Language Models", 2024 (arXiv 2407.01906).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infinity.bounded import MalformedError, list_of, parse_json, text_of
from infinity.checkpoint.huggingface.import_weights import WeightSource, weight_source
from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsReader,
    SafetensorsWriter,
    TensorInfo,
)
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, UnsupportedError, listed, refusing
from infinity.modules.tiling.experts import is_packed
from infinity.state.stored import StoredSlice, StoredTensor

# `adapter_*` are all files of an adapter.
EXPERTS_NAME = "adapter_experts.safetensors"
_KEY = "experts"  # Of the file's metadata: the names of the experts, as JSON.

# The parameters of chosen experts: name of the module, number of the expert, name of the parameter
# in the module, and the stored tensors that the module's whole parameter is made of.
Chosen = Sequence[tuple[str, int, str, StoredTensor]]
CHOSEN: WeakKeyDictionary[nn.Module, Chosen] = WeakKeyDictionary()

# Of a parameter of one expert: a name in a saved file, the stored tensor, and the view of it in a
# value of shape (1, ...).
_Source = tuple[str, StoredSlice, Callable[[torch.Tensor], torch.Tensor]]


def counts_of_experts(model: nn.Module) -> dict[str, int]:
    """Returns the number of experts by the name of the module that packs them."""
    return {
        name: int(module.__dict__["num_experts"])
        for name, module in model.named_modules()
        if is_packed(module)
    }


def locate(model: nn.Module, names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the numbers of experts by the name of their module. Raises ConfigError for a name
    that is none of an expert of the model."""
    counts, found = counts_of_experts(model), dict[str, list[int]]()
    for name in names:
        path, _, number = name.rpartition(".")
        if not number.isdecimal() or int(number) >= counts.get(path, 0):
            what = "which has no packed experts; leave the key out"
            if counts:
                first, (last, count) = next(iter(counts)), [*counts.items()][-1]
                what = f"whose names are those from {first}.0 to {last}.{count - 1}"
            raise ConfigError(
                f"adapter.experts_full: {name!r} is no expert of a {type(model).__name__}, {what}"
            )
        found.setdefault(path, []).append(int(number))
    return {path: sorted(set(numbers)) for path, numbers in found.items()}


def give_own_weights(
    model: nn.Module, names: Sequence[str], base: WeightSource, saved: Path | None
) -> Chosen:
    """Makes `infinity.offload` give these experts weights of their own, which are trained.

    model: on meta, without adapters. base: where first values are, unless `saved` is the directory
    of an adapter that has them.

    Raises ConfigError for names that are none of experts, and for a saved file of another base;
    UnsupportedError for experts that the checkpoint stores in a form that is converted.
    """
    by_module, stored = locate(model, names), base.plan(model, strict=False).stored()
    source = base if saved is None else weight_source(saved / EXPERTS_NAME)
    chosen: list[tuple[str, int, str, StoredTensor]] = []
    for path, numbers in by_module.items():
        module = model.get_submodule(path)
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        parts = {leaf: stored.get(f"{path}.{leaf}", ()) for leaf in own}
        if not all(parts.values()):
            raise UnsupportedError(
                f"adapter.experts_full: {base.path} stores {path} in a form that is converted "
                "when it is read, so no expert of it can be trained apart"
            )
        chosen += [(path, number, leaf, parts[leaf]) for number in numbers for leaf in parts]
        for leaf, parameter in own.items():
            value = partial(_value_of, source, parts[leaf], parameter[:1], saved is not None)
            rows: Any = {number: (True, partial(value, number)) for number in numbers}
            vars(parameter)["own_rows"] = rows  # See `modules/tiling/split.py`, note Own weights.
    if saved is not None:
        expected = {
            name: tuple(show(model.get_parameter(f"{path}.{leaf}")[:1]).shape)
            for path, number, leaf, parts_of in chosen
            for name, _, show in _sources(parts_of, number)
        }
        found = {name: source.shape(name) for name in source.names()}
        if wrong := [n for n in {*found, *expected} if found.get(n) != expected.get(n)]:
            raise ConfigError(
                f"{source.path} is of another base than {base.path}: its experts would not have "
                f"{listed(sorted(wrong))} of these names and shapes"
            )
    return chosen


def freeze(model: nn.Module) -> None:
    """Makes all parameters frozen, those of experts with weights of their own included."""
    for parameter in model.requires_grad_(False).parameters():
        own = vars(parameter).get("own_rows", {})
        own.update({number: (False, value) for number, (_, value) in own.items()})


def names_in(adapter: Path) -> list[str]:
    """Returns the names of the experts that were saved with an adapter; none for an adapter alone.
    Raises ConfigError, CorruptionError, StorageError."""
    file = adapter / EXPERTS_NAME
    if not file.exists():
        return []
    what = f"{file} has no names of experts in its metadata"
    with SafetensorsReader(file) as reader, refusing(what, MalformedError):
        names = list_of(parse_json(reader.metadata.get(_KEY, "").encode()), _KEY)
        return [text_of(name, "the name of an expert") for name in names]


def changes_of(adapter: Path, base: WeightSource) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields, for each tensor that was saved of experts, the name of the base's tensor that it
    changes, and a function that changes the value of that tensor in place and returns it."""
    if names_in(adapter):
        source, stored = weight_source(adapter / EXPERTS_NAME), set(base.names())
        for name in source.names():
            stem, number, leaf = name.rsplit(".", 2)
            is_own = name in stored
            row = ... if is_own else int(number)
            yield name if is_own else f"{stem}.{leaf}", partial(_replaced, source, name, row)


def _replaced(source: WeightSource, name: str, row: Any, tensor: torch.Tensor) -> torch.Tensor:
    tensor[row].copy_(source.read(name))
    source.close()
    return tensor


def save_experts(model: Any, prefix: str, directory: Path) -> None:
    """Writes the chosen experts of an offloaded model, one parameter at a time; nothing for a model
    without any. `prefix`: of the model's names, before those of the base."""
    chosen = CHOSEN.get(model, ())
    if not chosen:
        return
    engine, infos, plan = engine_of(model), [], []
    for path, number, leaf, stored in chosen:
        rows = {start: name for name, start, _ in engine.tile_rows(f"{prefix}{path}.{leaf}")}
        facts = engine.spec(rows[number]).facts
        empty = torch.empty(facts.shape, device="meta")
        plan.append((rows[number], list(_sources(stored, number))))
        for name, _, show in plan[-1][1]:
            infos.append(TensorInfo(name=name, dtype=facts.dtype, shape=show(empty).shape))
    names = dict.fromkeys(f"{path}.{number}" for path, number, _, _ in chosen)
    metadata = {"format": "pt", _KEY: json.dumps([*names])}
    with SafetensorsWriter(directory / EXPERTS_NAME, infos, metadata=metadata) as writer:
        for tile, sources in plan:
            value = engine.read_parameter(tile)
            for name, _, show in sources:
                writer.write(name, show(value))
        writer.finish()
        writer.commit()


def experts_nbytes(model: nn.Module) -> int:
    """Returns the bytes of the chosen experts of a model on meta."""
    own = ((p, len(vars(p).get("own_rows", ()))) for p in model.parameters())
    return sum(p[:1].nbytes * count for p, count in own if count)


def _sources(stored: StoredTensor, number: int) -> Iterator[_Source]:
    for part in stored:
        first, rest = part.box[0], part.box[1:]
        if isinstance(first, int):
            if first == number:
                yield part.source, part, replace(part, box=(0, *rest)).target
        elif first.start <= number < first.stop:
            stem, _, leaf = part.source.rpartition(".")
            own = replace(part, box=(slice(0, 1), *rest))
            yield f"{stem}.{number}.{leaf}", part, partial(_row, own)


def _row(part: StoredSlice, value: torch.Tensor) -> torch.Tensor:
    return part.target(value).select(part.axes.index(0), 0)


def _value_of(
    source: WeightSource, stored: StoredTensor, empty: torch.Tensor, is_saved: bool, number: int
) -> torch.Tensor:
    """Returns the value of an expert, in the dtype of the file; codes are decoded to that of the
    parameter, as in place. `empty`: of the shape and dtype."""
    value: torch.Tensor | None = None
    for name, part, show in _sources(stored, number):
        tensor = source.read(name if is_saved else part.source, empty.dtype)
        first = part.box[0]
        if isinstance(first, slice) and not is_saved:
            tensor = tensor.select(part.axes.index(0), number - first.start)
        if value is None:
            value = torch.empty(empty.shape, dtype=tensor.dtype)
        show(value).copy_(tensor)
    source.close()
    assert value is not None
    return value
