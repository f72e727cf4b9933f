"""Writing the configuration and its schema: TOML with origins, JSON Schema, Markdown reference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import WithDefaultSchema

from infinity.config import problems
from infinity.config.schema import SCHEMA
from infinity.config.swap import SwapConfig
from infinity.config.values import ValueType

_SEVERAL = "adapters"  # A list that a file writes as `[[adapter]]`.
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_INTRODUCTION = f"""\
# The swap-tier file

<!-- Written by `infinity config schema --markdown`; a test keeps it true. Edit infinity/config. -->

One file says where training state may live and, for `infinity train`, what to train. It is TOML by
default; YAML (`.yaml`, `.yml`), JSON and a Python dict carry the same keys. `infinity config`
checks a file, prints every value with its origin, and writes a JSON Schema for editors.
`examples/swap.toml` and `examples/swap.yaml` are to be copied.

- **Sizes** carry a unit: `"1.5GiB"` (powers of 1024) or `"500MB"` (powers of 1000). A whole number
  without quotes is bytes. A bare `K`, `M`, `G` or `T` is refused.
- **Capacities** are a size, a share such as `"80%"`, or `"auto"`.
- **Paths** may start with `~` and hold `$VARIABLES`. Relative ones start at the directory of the
  file, in a dict at the working directory.
- **0 for off**: TOML has no null; YAML and JSON may say null.
- **YAML** is 1.2: `1e-5` is a number; `on`, `off`, `yes` and `no` are words, which keys of true and
  false understand.

This page describes schema {SCHEMA}. A key is followed by its default and by what it takes.
"""


def to_toml(
    config: SwapConfig, notes: Mapping[str, str] | None = None, *, only_set: bool = False
) -> str:
    """Returns the whole configuration as TOML, each line with its origin. Reading it gives an equal
    one.

    `notes` adds a remark to the line of a dotted key. A null inside `[model.config]`, which TOML
    does not have, becomes a comment. With `only_set`, only the keys of the source are written, each
    with its note alone.
    """
    notes = notes or {}
    lines: list[str] = []
    table: problems.Place = ()
    for place, value, origin in config.walk():
        if only_set and origin != config.source.origin:
            continue
        if place[:-1] != table:
            table = place[:-1]
            lines += ["", _header(table)]
        key = problems.dotted(place)
        remark = "; ".join(
            [*([] if only_set else [origin]), *([notes[key]] if key in notes else [])]
        )
        name = _toml_key(str(place[-1]))
        try:
            text = f"{name} = {_toml_value(value)}"
        except _NullError:
            state = "is not set" if value is None else "holds a null, which TOML cannot say"
            text = f"# {name} {state}"
        lines.append(f"{text:<40}  # {remark}" if remark else text)
    return "\n".join(lines) + "\n"


def _header(table: problems.Place) -> str:
    is_entry = isinstance(table[-1], int)
    first = "adapter" if table[0] == _SEVERAL else table[0]
    name = ".".join(_toml_key(part) for part in (first, *table[1:]) if isinstance(part, str))
    return f"[[{name}]]" if is_entry else f"[{name}]"


class _NullError(Exception):
    """A null is in the value."""


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if value is None:
        raise _NullError
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # TOML writes inf, -inf and nan as Python does.
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {_toml_value(inner)}" for key, inner in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(inner) for inner in value)}]"
    return repr(value)


class _Generator(GenerateJsonSchema):
    """Writes defaults as a file would hold them: "4MiB", not 4194304."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        node = super().default_schema(schema)
        serialization: Any = schema["schema"].get("serialization")
        if serialization is not None and "default" in schema and "default" in node:
            node["default"] = serialization["function"](schema["default"])
        return node


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a swap-tier file, for editors that complete and check."""
    written = SwapConfig.model_json_schema(by_alias=True, schema_generator=_Generator)
    schema: dict[str, Any] = json.loads(json.dumps(written), object_hook=_on_one_line)
    several = schema["properties"].pop(_SEVERAL)
    schema["properties"]["adapter"]["anyOf"].append({k: several[k] for k in ("type", "items")})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _on_one_line(node: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of the schema with its description on one line."""
    text = node.get("description")
    return node | {"description": " ".join(text.split())} if isinstance(text, str) else node


def to_markdown() -> str:
    """The reference of every section and key, generated from the schema."""
    parts, places = [_INTRODUCTION], dict[Any, str]()
    for table, section, fields in problems.tables_in(SwapConfig):
        if table.startswith(_SEVERAL):
            continue
        title = f"`{problems.written(table)}`" if table else "Top level"
        parts.append(f"## {title}\n\n{' '.join((section.__doc__ or '').split())}\n")
        if section in places:
            parts.append(f"Its keys are those of {places[section]}.\n")
            continue
        places[section] = title
        rows = []
        for key, info in fields.items():
            inner = list(problems.sections_in(info.annotation))
            if not inner or any(is_list for _, is_list in inner):
                rows.append(_row(key, info))
        if rows:
            parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(key: str, info: FieldInfo) -> str:
    extra = info.json_schema_extra
    written = info.default
    for marker in info.metadata:
        if isinstance(marker, ValueType) and not info.is_required():
            written = marker.write(info.default)
    if info.is_required():
        default = "required"
    elif isinstance(extra, dict) and "x-default" in extra:
        default = str(extra["x-default"])
    elif info.default_factory is not None or written is None:
        default = "not set"
    else:
        default = f"`{json.dumps(written)}`"
    # Of a size the introduction has the forms.
    phrase = re.sub(r' such as "[^"]*"', "", problems.expected(info.annotation, info.metadata))
    phrase = phrase.replace('a list: each "device", "host" or "nvme"', "tiers")
    about = " ".join((info.description or "").split())
    choices = re.findall(r'"[^"]*"', phrase)
    is_said = choices and not re.sub(r'"[^"]*"|,| or ', "", phrase).strip()
    if default in ("`true`", "`false`") or (is_said and all(word in about for word in choices)):
        phrase = ""
    return f"* **`{key}`** ({default}): {phrase}{'. ' if phrase else ''}{about}"
