"""Writing the configuration and its schema: TOML with origins, JSON Schema, Markdown reference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import WithDefaultSchema

from infinity.config import problems
from infinity.config.schema import SCHEMA
from infinity.config.swap import SwapConfig

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_INTRODUCTION = f"""\
# The swap-tier file

<!-- Written by `infinity config schema --markdown`; a test keeps it true. Edit infinity/config. -->

One file says where training state may live and, for `infinity train`, what to train. It is TOML by
default; YAML (`.yaml`, `.yml`), JSON and a Python dict carry the same keys. `infinity config check
FILE` reports every fault at once, `infinity config show FILE` prints every value and where it came
from, and `infinity config schema` prints a JSON Schema for editors. `examples/swap.toml` and
`examples/swap.yaml` are to be copied.

- **Sizes** carry a unit: `"512MiB"`, `"1.5GiB"` (powers of 1024) or `"500MB"` (powers of 1000). A
  whole number without quotes is bytes. A bare `K`, `M`, `G` or `T` is refused.
- **Capacities** are a size, a share such as `"80%"`, or `"auto"`.
- **Paths** may start with `~` and hold `$VARIABLES`. Relative ones start at the directory of the
  file, in a dict at the working directory.
- **0 for off**: TOML has no null, so a limit that is off is written 0; YAML and JSON may say null.
- **YAML** is read by the rules of YAML 1.2: `1e-5` is a number; `on`, `off`, `yes` and `no` are
  words, which keys of true and false understand.
- The environment variable `INFINITY_IO_ENGINE` decides `io.engine` where the file says `"auto"`.

This page describes schema {SCHEMA}.
"""
_BEHIND = {  # Tables that explain a key with several modes, behind the table of its section.
    "schedule": """\
| `updates` | a unit is updated | needs | costs |
| --- | --- | --- | --- |
| `"at_step"` | in `optimizer.step()` | | nothing overlaps |
| `"deferred"` | right before its next use, while the forward computes | | on one rank, free host \
memory for state on its way |
| `"both_passes"` | some units in the backward, before the step has decided; if the step clips or \
differs otherwise from the expected one, their old state stays | state on NVMe with a spare \
generation of the swap files; with a GPU also state on the host with free memory | the space of \
that state once more |
| `"auto"` | as `"both_passes"` if the weights still fit next to that state, else as `"deferred"` \
| | |

Over ranks a thread of each rank updates its shards in stage 3; stages 1 and 2 update at the step.
""",
}


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
    name = ".".join(_toml_key(part) for part in table if isinstance(part, str))
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
    schema = SwapConfig.model_json_schema(by_alias=True, schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def to_markdown() -> str:
    """The reference of every section and key, generated from the schema."""
    schema = json_schema()
    definitions = schema["$defs"]
    parts = [_INTRODUCTION]

    def visit(node: dict[str, Any], table: str) -> None:
        required = node.get("required", [])
        rows, inner = [], []
        for key, value in node["properties"].items():
            section, is_list = _section_of(value)
            if section is None or is_list:
                rows.append(_row(key, value, is_required=key in required))
            if section is not None:
                place = f"{table}.{key}" if table else key
                inner.append((definitions[section], f"{place}[]" if is_list else place))
        title = f"`{problems.written(table)}`" if table else "Top level"
        parts.append(f"## {title}\n\n{' '.join(node['description'].split())}\n")
        if rows:
            head = "| key | value | default | meaning |\n| --- | --- | --- | --- |\n"
            parts.append(head + "\n".join(rows) + "\n")
        if table in _BEHIND:
            parts.append(_BEHIND[table])
        for child, place in inner:
            visit(child, place)

    visit(schema, "")
    return "\n".join(parts)


def _section_of(node: dict[str, Any], *, is_list: bool = False) -> tuple[str | None, bool]:
    """The section that a schema node refers to, and whether it stands in a list."""
    if "$ref" in node:
        return node["$ref"].rpartition("/")[2], is_list
    inner = [(option, is_list) for option in node.get("anyOf", ())]
    if isinstance(node.get("items"), dict):
        inner.append((node["items"], True))
    for option, in_list in inner:
        name, found_in_list = _section_of(option, is_list=in_list)
        if name is not None:
            return name, found_in_list
    return None, False


def _row(key: str, node: dict[str, Any], *, is_required: bool) -> str:
    if is_required:
        default = "required"
    elif "x-default" in node:
        default = node["x-default"]
    elif node.get("default") is None:
        default = "not set"
    else:
        default = f"`{json.dumps(node['default'])}`"
    cells = (f"`{key}`", _phrase(node), default, node.get("description", ""))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _phrase(node: dict[str, Any]) -> str:
    """Returns the values that a file may have, in the phrase of error messages."""
    if "x-expected" in node:
        return str(node["x-expected"])
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}: each {_phrase(node['prefixItems'][0])}"
    if node.get("type") == "array":
        is_section = _section_of(node)[0] is not None
        return "a list of tables" if is_section else f"a list: each {_phrase(node['items'])}"
    for option in node.get("anyOf", ()):
        if option.get("type") != "null":
            return _phrase(option)
    return "a table"
