"""The tables of the swap-tier file: every key, its kind of value, its default and its meaning.

All are frozen. Sizes are bytes, paths are absolute once read, an unknown key is an error. What
concerns more than one table is in `infinity.config.swap`. Here are the parts that every table is
made of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from infinity.config.values import integer

SCHEMA = 1
SEED = integer(maximum=2**63 - 1)
# Marks a key of a job that its numbers do not depend on, or whose content is compared instead.
MAY_CHANGE = "a run may go on with another value"

_T = TypeVar("_T", bound=BaseModel)


class Section(BaseModel):
    """One table of the swap-tier file. The text below a key is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _null_as_empty(cls, value: Any) -> Any:
        """A section of YAML is null if every key is commented out."""
        return {} if value is None else value


def one_or_more(kind: Any) -> BeforeValidator:
    """A list, for which one text or path may stand alone. `kind`: of a member, for the schema."""

    def read(value: Any) -> Any:
        return [value] if isinstance(value, (str, os.PathLike)) else value

    return BeforeValidator(read, json_schema_input_type=tuple[kind, ...] | kind)


def defaults() -> Any:
    """A section that may be left out: read from an empty table, so that its own rules apply."""
    return Field(default_factory=dict, validate_default=True)


def numbers(table: Section, written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a table that the numbers of a run depend on, those of inner tables
    dotted, with their values as `written`."""
    found: dict[str, Any] = {}
    for key, info in type(table).model_fields.items():
        inner = getattr(table, key)
        if MAY_CHANGE in info.metadata:
            continue
        if isinstance(inner, Section):
            found |= {f"{key}.{k}": value for k, value in numbers(inner, written[key]).items()}
        else:
            found[key] = written[key]
    return found


def changed(table: _T, values: Mapping[str, Any]) -> _T:
    """Returns the table with other values at dotted places, such as "tiers.host.capacity". The
    values are taken as they are."""
    update: dict[str, Any] = {}
    for place, value in values.items():
        name, _, rest = place.partition(".")
        inner = update.get(name, getattr(table, name))
        update[name] = changed(inner, {rest: value}) if rest else value
    return table.model_copy(update=update)
