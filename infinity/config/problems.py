"""Every fault of a configuration in one error: the place, the expected value, the actual one."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, ValidationError

from infinity.config.values import ValueType, either, nearest, show_value
from infinity.errors import ConfigError

Place = tuple[str | int, ...]
KnownKeys = dict[str, dict[str, str]]  # table -> key -> the values that a file may have there

# A key's name in other tools -> its place here.
_OTHER_NAMES = {
    "gpu": "tiers.device", "cpu": "tiers.host", "ram": "tiers.host", "disk": "tiers.nvme",
    "nvme_path": "tiers.nvme[].path", "learning_rate": "optimizer.lr", "dtype": "precision.compute",
    "gradient_clipping": "optimizer.max_grad_norm", "clip_grad_norm": "optimizer.max_grad_norm",
    "max_steps": "train.steps", "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "micro_batch_size": "train.batch_size", "lr_scheduler_type": "train.schedule",
    "gradient_checkpointing": "train.activation_checkpointing", "seq_len": "data.sequence_length",
    "max_length": "data.sequence_length", "max_seq_length": "data.sequence_length",
    "num_train_epochs": "train.epochs", "eval_steps": "train.eval_every",
    "load_best_model_at_end": "train.keep_best", "num_threads": "io.threads or train.threads",
    "pin_memory": "tiers.host",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault. `place` is dotted with list indexes, "tiers.nvme[1].capacity", or empty."""

    place: str
    text: str

    def line(self, name: str) -> str:
        """The fault on one line, after the name of the file it is in."""
        return f"{name}: {self.place}: {self.text}" if self.place else f"{name}: {self.text}"


class InvalidConfigError(ConfigError):
    """A configuration with faults: `problems` holds all of them, `name` the file or "config"."""

    def __init__(self, problems: Iterable[Problem], *, name: str) -> None:
        self.problems = tuple(problems)
        self.name = name
        lines = [problem.line(name) for problem in self.problems]
        if len(lines) > 1:
            lines = [f"{name}: {len(lines)} problems", *(f"  {line}" for line in lines)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InvalidConfigError, name=self.name), (self.problems,)


def dotted(place: Iterable[str | int]) -> str:
    """("tiers", "nvme", 1, "path") -> "tiers.nvme[1].path"."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def from_validation(
    error: ValidationError, root: type[BaseModel], *, name: str
) -> InvalidConfigError:
    """Pydantic's list of faults in our words, with the nearest known key for unknown ones."""
    keys = known_keys(root)
    return InvalidConfigError(
        (
            Problem(dotted(fault["loc"]), _text(fault, keys))
            for fault in error.errors(include_url=False)
        ),
        name=name,
    )


def _text(fault: ErrorDetails, keys: KnownKeys) -> str:
    kind, value = fault["type"], fault["input"]
    if kind == "missing":
        wanted = keys[_table_of(fault["loc"][:-1])][str(fault["loc"][-1])]
        return f"a required key is missing; expected {wanted}"
    if kind == "extra_forbidden":
        table, key = _table_of(fault["loc"][:-1]), str(fault["loc"][-1])
        return f"unknown key; {suggest(table, key, keys)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        head = written(_table_of(fault["loc"]))
        return f"expected a table, written {head}; got {show_value(value)}"
    if kind in ("tuple_type", "list_type"):
        entries = _table_of(fault["loc"]) + "[]"
        form = f", written {written(entries)}" if entries in keys else ""
        return f"expected a list{form}; got {show_value(value)}"
    if kind == "invalid_key":
        return f"expected text as a key; got {show_value(fault['loc'][-1])}"
    return fault["msg"]


def _table_of(place: Iterable[str | int]) -> str:
    """("tiers", "nvme", 1) -> "tiers.nvme[]": the table that all entries of a list share."""
    return re.sub(r"\[\d+\]", "[]", dotted(place))


def tables_in(
    model: type[BaseModel], table: str = ""
) -> Iterator[tuple[str, type[BaseModel], dict[str, FieldInfo]]]:
    """Yields ("tiers.nvme[]", its section, the fields by key) for every table of the tree, a table
    before those in it."""
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    yield table, model, fields
    for key, info in fields.items():
        place = f"{table}.{key}" if table else key
        for inner, is_list in sections_in(info.annotation):
            yield from tables_in(inner, f"{place}[]" if is_list else place)


def known_keys(root: type[BaseModel]) -> KnownKeys:
    """The keys of the whole tree: {"": {...}, "tiers.nvme[]": {"path": "a path", ...}, ...}."""
    return {
        table: {key: expected(info.annotation, info.metadata) for key, info in fields.items()}
        for table, _, fields in tables_in(root)
    }


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Returns the values that a file may have, as a phrase that follows "expected"."""
    for marker in metadata:
        if isinstance(marker, ValueType):
            return marker.expected
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return expected(inner[0], inner[1:])
    if origin in (typing.Union, types.UnionType):
        return expected(inner[0])
    if origin in (tuple, list):
        if any(sections_in(annotation)):
            return "a list of tables"
        count = f" of {len(inner)}" if origin is tuple and ... not in inner else ""
        return f"a list{count}: each {expected(inner[0])}"
    return "a table"


def sections_in(
    annotation: Any, *, is_list: bool = False
) -> Iterator[tuple[type[BaseModel], bool]]:
    """The section classes inside an annotation, and whether each stands in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_list
    origin = typing.get_origin(annotation)
    if origin in (tuple, list, typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            yield from sections_in(inner, is_list=is_list or origin in (tuple, list))


def suggest(table: str, key: str, keys: KnownKeys) -> str:
    """Returns the key that `key`, unknown in `table`, most likely means.

    Tried in this order: a close key of the same table, other tools' names, a table that has a key
    of exactly this name, a close key of any table, the keys of the table.
    """
    here = sorted(keys.get(table, {}))
    lower = key.lower().replace("-", "_")
    close = nearest(key, here, cutoff=0.7)
    homes = [written(other) for other in keys if other != table and lower in keys[other]]
    belongs = [f'"{lower}" belongs to {either(homes)}'] if homes else []
    if close is not None:
        return "; ".join([f'did you mean "{close}"?', *belongs])
    if lower in _OTHER_NAMES:
        return "; ".join([f"did you mean {_OTHER_NAMES[lower]}?", *belongs])
    if belongs:
        return belongs[0]
    if near := nearest(key, here):
        return f'did you mean "{near}"?'
    names = sorted({name for table_keys in keys.values() for name in table_keys})
    if near := nearest(key, names, cutoff=0.75):
        places = [f"{other}.{near}".lstrip(".") for other in keys if near in keys[other]]
        return f"did you mean {either(places)}?"
    return "known keys here: " + ", ".join(here)


def written(table: str) -> str:
    """A table as a file writes its header: "tiers.nvme[]" -> "[[tiers.nvme]]"."""
    if not table:
        return "the top level"
    table = table.replace("adapters[]", "adapter[]")  # The key of several has another name here.
    return f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
