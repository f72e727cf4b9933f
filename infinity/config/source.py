"""Reads a swap-tier file: TOML, YAML or JSON text to one plain table.

The three readers agree: a key that occurs twice is an error, and YAML is read by the 1.2 core
schema, so that `1e9` is a number, and on, off, yes and no are words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from infinity.bounded import (
    MAX_DEPTH,
    MAX_TEXT_NBYTES,
    MalformedError,
    decode_utf8,
    parse_json,
    parse_toml,
    read_bytes,
)
from infinity.config.hub import download_remedy
from infinity.config.values import either
from infinity.errors import ConfigError

_MAX_YAML_NODES = 100_000
FORMATS = (".toml", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The origin of a configuration. It does not take part in comparisons of configurations.

    `name` is the file as the caller named it; `directory` is absolute, and relative paths start
    there; `environment` holds the keys that an environment variable decided, `overrides` the
    KEY=VALUE that replace values of the file.
    """

    kind: Literal["file", "dict"] = field(default="dict", compare=False)
    name: str = field(default="config", compare=False)
    directory: Path = field(default_factory=Path.cwd, compare=False)
    environment: tuple[str, ...] = field(default=(), compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)

    @property
    def origin(self) -> str:
        """The word of `SwapConfig.resolved` for a value that was set here."""
        return f"file {self.name}" if self.kind == "file" else "dict"


def read_source(source: object) -> tuple[dict[str, Any], ConfigSource]:
    """The table of a file, or of a dict, and its source. Raises ConfigError as `read_file`."""
    if isinstance(source, (str, os.PathLike)):
        return read_file(source)
    if isinstance(source, Mapping):
        return dict(source), ConfigSource()
    raise ConfigError(
        "expected a path, a dict, a SwapConfig or None as the configuration; got "
        f"{type(source).__name__}"
    )


def read_file(
    path: str | os.PathLike[str], overrides: Iterable[str] = ()
) -> tuple[dict[str, Any], ConfigSource]:
    """The top-level table of a file, with `overrides` as `override` takes them, and its source.
    Raises ConfigError with file and line."""
    name = os.fspath(path)
    file = Path(os.path.abspath(os.path.expanduser(name)))
    suffix = file.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(
            f"{name}: expected a file that ends in {either(FORMATS)}; "
            f"got {suffix or 'no ending'}{download_remedy(name)}"
        )
    try:
        content = read_bytes(file, max_nbytes=MAX_TEXT_NBYTES)
        table = _parse(content, suffix)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        is_absent = isinstance(error, FileNotFoundError)
        remedy = "; `infinity new MODEL_DIR` writes a configuration file" if is_absent else ""
        raise ConfigError(f"{name}: cannot be read: {reason}{remedy}") from None
    except MalformedError as error:
        where = "".join(f":{number}" for number in (error.line, error.column) if number)
        raise ConfigError(f"{name}{where}: {error}") from None
    if table is None:  # An empty YAML document.
        table = {}
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: expected a table of sections; got {type(table).__name__}")
    for text in overrides:
        override(table, text)
    return table, ConfigSource("file", name, file.parent, overrides=tuple(overrides))


def _parse(content: bytes, suffix: str) -> Any:
    if suffix == ".json":
        return parse_json(content)
    text = decode_utf8(content)
    return parse_toml(text) if suffix == ".toml" else _read_yaml(text)


def _read_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    loader = None
    try:
        loader = _yaml_loader(yaml)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _bound_expansion(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        reason = error.problem or error.context or "syntax error"
        raise MalformedError(f"not valid YAML: {reason}", line, column) from None
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except MalformedError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise MalformedError(f"not valid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _bound_expansion(root: Any) -> None:
    """Raises MalformedError for aliases that expand to a large, endless or deeply nested table.

    An alias is the node that it stands for, and the walk visits it at every place, as all readers
    of the table do.
    """
    waiting, count = [(root, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        count, line = count + 1, node.start_mark.line + 1
        if count > _MAX_YAML_NODES:
            raise MalformedError(f"its aliases expand to more than {_MAX_YAML_NODES} values", line)
        if depth > MAX_DEPTH:
            raise MalformedError(
                f"it is nested too deeply, or an alias is a part of itself: more than {MAX_DEPTH} "
                "levels", line,
            )  # fmt: skip
        for row in [] if isinstance(node.value, str) else node.value:
            waiting += [(cell, depth + 1) for cell in (row if isinstance(row, tuple) else (row,))]


def _yaml_loader(yaml: Any) -> Callable[[str], Any]:
    """PyYAML's safe loader with the plain scalars of YAML 1.2 and without repeated keys."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str | None, list[tuple[str, re.Pattern[str]]]]] = {}

        depth = 0

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= MAX_DEPTH:  # The scanner runs ahead of the composer.
                raise MalformedError(f"it is nested too deeply: more than {MAX_DEPTH} levels")
            super().fetch_flow_collection_start(token)

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1  # Before recursion ends it, which takes seconds.
            if self.depth > MAX_DEPTH:
                raise MalformedError(f"it is nested too deeply: more than {MAX_DEPTH} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

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


def override(table: dict[str, Any], text: str) -> None:
    """Sets one dotted key of a table: "train.steps=5", "tiers.nvme.0.path=/mnt/swap".

    Raises ConfigError for text that is no assignment and for a path through a value.
    """
    key, equals, written = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as train.steps=5")
    try:
        value = parse_toml(f"value = {written}")["value"]
    except MalformedError:
        value = written.strip()
    *path, last = key.strip().split(".")
    place: Any = table
    for part in path:
        if isinstance(place, dict):
            place = place.setdefault(part, {})
        else:
            place = _entry(place, part, text)
    if isinstance(place, dict):
        place[last] = value
    else:
        _entry(place, last, text)
        place[int(last)] = value


def _entry(place: Any, part: str, text: str) -> Any:
    if not isinstance(place, list) or not part.isdigit() or int(part) >= len(place):
        have = "a value"
        if isinstance(place, list):
            key = text.partition(f".{part}")[0]
            entries = f", whose entries are {key}.0 to {key}.{len(place) - 1}" if place else ""
            have = f"a list of {len(place)}{entries}"
        raise ConfigError(f"--set {text!r}: {part!r} leads nowhere, there is {have}")
    return place[int(part)]
