"""Reading a swap-tier file: TOML, YAML or JSON text to one plain table.

The three readers agree with one another: a key given twice is an error, and YAML is read by the
1.2 core schema, so that `1e9` is a number, and on, off, yes and no are words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from infinity.errors import ConfigError

_FORMATS = (".toml", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration came from. Two configurations are equal wherever they came from.

    `name` is the file as the caller named it; `directory` is absolute, and relative paths start
    there; `environment` holds the keys that an environment variable decided.
    """

    kind: Literal["file", "dict"] = field(default="dict", compare=False)
    name: str = field(default="config", compare=False)
    directory: Path = field(default_factory=Path.cwd, compare=False)
    environment: tuple[str, ...] = field(default=(), compare=False)

    @property
    def origin(self) -> str:
        """How `SwapConfig.resolved` calls a value that was set here."""
        return f"file {self.name}" if self.kind == "file" else "dict"


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Source]:
    """The top-level table of a file, and its source. Raises ConfigError with file and line."""
    name = os.fspath(path)
    file = Path(os.path.abspath(os.path.expanduser(name)))
    suffix = file.suffix.lower()
    if suffix not in _FORMATS:
        raise ConfigError(
            f"{name}: expected a file that ends in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}; "
            f"got {suffix or 'no ending'}"
        )
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{name}: cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line}: expected UTF-8 text; got {error.reason}") from None
    reader = {".toml": _read_toml, ".json": _read_json}.get(suffix, _read_yaml)
    try:
        table = reader(text)
    except _SyntaxError as error:
        where = "".join(f":{number}" for number in (error.line, error.column) if number)
        raise ConfigError(f"{name}{where}: {error.text}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    except ValueError as error:  # An integer of thousands of digits.
        raise ConfigError(f"{name}: {error}") from None
    if table is None:  # An empty YAML document.
        table = {}
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: expected a table of sections; got {type(table).__name__}")
    return table, Source("file", name, file.parent)


class _SyntaxError(Exception):
    def __init__(self, text: str, line: int | None = None, column: int | None = None) -> None:
        self.text = text
        self.line = line
        self.column = column


def _read_toml(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, position = str(error), re.search(r" \(at (.*)\)$", str(error))
        line, column = text.count("\n") + 1, None  # "at end of document"
        if position is not None:
            reason = reason[: position.start()]
            numbers = re.findall(r"\d+", position.group(1))
            if len(numbers) == 2:
                line, column = map(int, numbers)
        raise _SyntaxError(f"not valid TOML: {reason}", line, column) from None


def _read_json(text: str) -> Any:
    import json

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _SyntaxError(f"not valid JSON: the key {key!r} is given twice in one table")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:]
        raise _SyntaxError(f"not valid JSON: {reason}", error.lineno, error.colno) from None


def _read_yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise _SyntaxError("reading YAML needs PyYAML: pip install pyyaml, or use TOML") from None
    loader = _yaml_loader(yaml)(text)
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        reason = error.problem or error.context or "syntax error"
        raise _SyntaxError(f"not valid YAML: {reason}", line, column) from None
    except yaml.YAMLError as error:
        raise _SyntaxError(f"not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _yaml_loader(yaml: Any) -> Callable[[str], Any]:
    """PyYAML's safe loader with the plain scalars of YAML 1.2 and without repeated keys."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str | None, list[tuple[str, re.Pattern[str]]]]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = key_node.value if isinstance(key_node.value, str) else ""
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
            return dict(super().construct_mapping(node, deep=deep))

    scalars = {
        "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
        "null": (r"~|null|Null|NULL|", "~nN"),
        "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
        "float": (
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
            "-+0123456789.",
        ),
        "merge": (r"<<", "<"),
    }
    for name, (pattern, first) in scalars.items():
        starts = [*first, ""] if name == "null" else list(first)
        Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), starts
        )

    def integer(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node)
        if text.startswith("0o"):
            return int(text.removeprefix("0o"), 8)
        return int(text, 16) if text.startswith("0x") else int(text)

    Loader.add_constructor("tag:yaml.org,2002:int", integer)
    return Loader
