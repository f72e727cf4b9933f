"""The value types of the swap-tier file: sizes, budgets, numbers, words and places.

A `ValueType` stands in an annotation, `Annotated[int, Size(multiple=4096)]`. It reads a value of a
file, names the values that it expects when it refuses one, and writes the value as a file holds it.
Reading a written value gives the same value.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

from infinity.config.reading import Loading, nearest, refuse, usable_path, written_text
from infinity.sizes import MIB, parse_nbytes, write_size

# Sizes travel to the kernel as signed 64-bit offsets.
MAX_NBYTES = 2**63 - 1

_LONGEST_NAME_NBYTES = 200  # Names of partial and damaged files are longer than those they are of.
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
_WORDS_OF_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_OFF = (None, "none", "null", "off")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The budget of a tier as the file requests it: bytes, a percentage of the total, or "auto".

    At most one of `nbytes` and `percent` is set; neither means "auto". A percentage stays one here,
    because the total belongs to the machine that runs, not to the file.
    """

    nbytes: int | None = None
    percent: float | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the budget is "auto"."""
        return self.nbytes is None and self.percent is None

    def resolve(self, total_nbytes: int, *, auto_percent: float = 100.0) -> int:
        """Returns the bytes of this budget, for a total of `total_nbytes`.

        "auto" takes `auto_percent` of the total; a percentage is rounded down to bytes; a
        size is returned as it is, even beyond the total: the tier refuses it.
        """
        if self.nbytes is not None:
            return self.nbytes
        percent = auto_percent if self.percent is None else self.percent
        return int(total_nbytes * Decimal(repr(percent)) / 100)

    def __str__(self) -> str:
        if self.nbytes is not None:
            return write_size(self.nbytes)
        if self.percent is None:
            return "auto"
        digits = format(Decimal(repr(self.percent)), "f")
        return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}%"


class ValueType(ABC):
    """One kind of value."""

    @abstractmethod
    def read(self, value: Any, loading: Loading) -> Any:
        """Returns the value that a value of a file stands for.

        Raises ValueError or OverflowError with the reason, which may be empty.
        """

    @abstractmethod
    def expected(self) -> str:
        """Returns the values that a file may have here, as a phrase that follows "expected"."""

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the values that a file may have here."""

    def write(self, value: Any) -> Any:
        """Returns a read value as a file holds it."""
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:

        def read(value: Any, info: ValidationInfo) -> Any:
            loading = info.context if isinstance(info.context, Loading) else Loading(Path.cwd())
            try:
                return self.read(value, loading)
            except (ValueError, OverflowError) as error:
                raise refuse(self.expected(), value, str(error)) from None

        return core_schema.with_info_plain_validator_function(
            read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.write, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.json_schema() | {"x-expected": self.expected()}


@dataclass(frozen=True)
class Size(ValueType):
    """Bytes: "8GiB", "500MB" or an integer."""

    minimum: int = 1
    maximum: int = MAX_NBYTES
    multiple: int = 1

    @override
    def read(self, value: Any, loading: Loading) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError("")
        try:
            nbytes = parse_nbytes(value)
        except (ValueError, OverflowError) as error:
            # The caller adds "expected ..., got ..."; only the reason is kept.
            detail = str(error)
            raise ValueError("" if detail.startswith("expected") else detail) from None
        if nbytes < self.minimum:
            raise ValueError(f"at least {write_size(self.minimum)}")
        if nbytes > self.maximum:
            raise ValueError(f"at most {write_size(self.maximum)}")
        if nbytes % self.multiple:
            raise ValueError(f"{nbytes} is not a multiple of {write_size(self.multiple)}")
        return nbytes

    @override
    def write(self, value: Any) -> Any:
        return write_size(value)

    @override
    def expected(self) -> str:
        limits = []
        if self.multiple > 1:
            limits.append(f"a multiple of {write_size(self.multiple)}")
        if self.minimum > 1:
            limits.append(f"at least {write_size(self.minimum)}")
        if self.maximum < MAX_NBYTES:
            limits.append(f"at most {write_size(self.maximum)}")
        example = write_size(max(self.minimum, 8 * MIB))
        return ", ".join([f'a size such as "{example}"', *limits])

    @override
    def json_schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": self.minimum}
        text = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([kKMGT]i?)?B\s*$"}
        return {"anyOf": [text, number]}


@dataclass(frozen=True)
class Budget(ValueType):
    """A tier's capacity: "auto", a size, or a share such as "80%". Reads to `Capacity`."""

    @override
    def read(self, value: Any, loading: Loading) -> Capacity:
        if isinstance(value, Capacity):
            return value
        if isinstance(value, str):
            if value.strip().lower() == "auto":
                return Capacity()
            match = _PERCENT.fullmatch(value)
            if match is not None:
                percent = float(match.group(1))
                if not 0 < percent <= 100:
                    raise ValueError("a share is more than 0% and at most 100%")
                return Capacity(percent=percent)
        return Capacity(nbytes=Size().read(value, loading))

    @override
    def write(self, value: Any) -> Any:
        return str(value)

    @override
    def expected(self) -> str:
        return '"auto", a size such as "8GiB" or a share such as "80%"'

    @override
    def json_schema(self) -> dict[str, Any]:
        share = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}
        return {"anyOf": [{"const": "auto"}, *Size().json_schema()["anyOf"], share]}


def _range(minimum: float | None, maximum: float | None, above: float | None) -> str:
    if maximum is not None and maximum >= MAX_NBYTES:
        maximum = None  # The limit of a machine word is not worth a mention.
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    lower = f" >= {minimum}" if minimum is not None else f" > {above}" if above is not None else ""
    return f"{lower} and <= {maximum}" if lower and maximum is not None else lower


def _number_detail(value: object) -> str:
    """Why text that looks like a number is refused, with the fix."""
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return "this is text: remove the quotes; YAML 1.1 readers also take 1e-5 for text, not 1.0e-5"


@dataclass(frozen=True)
class Integer(ValueType):
    """An integer, not below `minimum` and not above `maximum`."""

    minimum: int = 0
    maximum: int | None = None

    @override
    def read(self, value: Any, loading: Loading) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1e3 is a float to TOML and YAML.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(_number_detail(value))
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise ValueError("")
        return value

    @override
    def expected(self) -> str:
        if self.minimum == self.maximum:
            return f"the integer {self.minimum}"
        return "an integer" + _range(self.minimum, self.maximum, None)

    @override
    def json_schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        return {"type": "integer"} | {k: v for k, v in bounds.items() if v is not None}


@dataclass(frozen=True)
class Number(ValueType):
    """A finite float. `above` and `below` are limits that the value itself may not take."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    @override
    def read(self, value: Any, loading: Loading) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(_number_detail(value))
        number = float(value)
        if not math.isfinite(number):
            raise ValueError("not finite")
        if (
            (self.minimum is not None and number < self.minimum)
            or (self.maximum is not None and number > self.maximum)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        ):
            raise ValueError("")
        return number

    @override
    def expected(self) -> str:
        below = f" and < {self.below:g}" if self.below is not None else ""
        return "a number" + _range(self.minimum, self.maximum, self.above) + below

    @override
    def json_schema(self) -> dict[str, Any]:
        bounds = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "exclusiveMinimum": self.above,
            "exclusiveMaximum": self.below,
        }
        return {"type": "number"} | {k: v for k, v in bounds.items() if v is not None}


@dataclass(frozen=True)
class Flag(ValueType):
    """true or false. The words of YAML 1.1 (on, off, yes, no) are read as it means them."""

    @override
    def read(self, value: Any, loading: Loading) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _WORDS_OF_BOOL:
            return _WORDS_OF_BOOL[value.lower()]
        raise ValueError("")

    @override
    def expected(self) -> str:
        return "true or false"

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Choice(ValueType):
    """One of some words: those of the Literal that it annotates."""

    def __init__(self, literal: Any) -> None:
        self.words: tuple[str, ...] = get_args(literal)

    @override
    def read(self, value: Any, loading: Loading) -> str:
        if isinstance(value, bool):
            raise ValueError("quote the word: YAML 1.1 takes on, off, yes and no for booleans")
        if not isinstance(value, str):
            raise ValueError("")
        if value not in self.words:
            near = nearest(value, self.words)
            raise ValueError(f'did you mean "{near}"?' if near else "")
        return value

    @override
    def expected(self) -> str:
        quoted = [f'"{word}"' for word in self.words]
        return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True)
class Text(ValueType):
    """Text that is not empty and holds no NUL. `what` names it in messages."""

    what: str = "text"

    @override
    def read(self, value: Any, loading: Loading) -> str:
        if isinstance(value, bool):
            raise ValueError("quote the word: YAML 1.1 takes on, off, yes and no for booleans")
        if not isinstance(value, str) or not value:
            raise ValueError("")
        return written_text(value)

    @override
    def expected(self) -> str:
        return self.what

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class FileName(ValueType):
    """The name of a file inside a directory that another key names.

    `taken` are shell patterns, in lower case, of names in that directory that have another use.
    """

    taken: tuple[str, ...] = ()

    @override
    def read(self, value: Any, loading: Loading) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("")
        path = usable_path(Path(written_text(value)))
        if path.is_absolute() or ".." in path.parts or path == Path("."):
            raise ValueError("it stays inside that directory")
        if any(len(os.fsencode(part)) > _LONGEST_NAME_NBYTES for part in path.parts):
            raise ValueError(f"a name has at most {_LONGEST_NAME_NBYTES} bytes")
        first = path.parts[0].lower()
        if any(fnmatchcase(first, pattern) for pattern in self.taken):
            raise ValueError(f"other files of the directory are called {path.parts[0]!r}")
        return value

    @override
    def expected(self) -> str:
        return "a file name inside the directory"

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class Location(ValueType):
    """A path, absolute once read: ~ and $VARIABLES expanded, relative to the file's directory.

    `words` are not paths but stand for themselves.
    """

    words: tuple[str, ...] = ()
    what: str = "a path"

    @override
    def read(self, value: Any, loading: Loading) -> Path | str:
        if isinstance(value, str) and value in self.words:
            return value
        if value is None:
            raise ValueError("a bare ~ is null in YAML: quote it")
        if isinstance(value, bool) or not isinstance(value, (str, os.PathLike)):
            raise ValueError("")
        text = os.fspath(value)
        if not isinstance(text, str) or not text.strip():
            raise ValueError("a path is not empty")
        text = os.path.expanduser(_expand_variables(written_text(text)))
        if text.startswith("~"):
            raise ValueError("there is no such home directory; write ./~ for a file of that name")
        path = usable_path(Path(loading.directory, text))
        # ".." is followed as the kernel does, through links; other paths stay as written.
        return Path(os.path.realpath(path)) if ".." in path.parts else path

    @override
    def write(self, value: Any) -> Any:
        return str(value)

    @override
    def expected(self) -> str:
        return " or ".join([*(f'"{word}"' for word in self.words), self.what])

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


def _expand_variables(text: str) -> str:
    def value_of(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if not name or name not in os.environ:
            raise ValueError(f"the environment variable {name or match.group(0)} is not set")
        return os.environ[name]

    return _VARIABLE.sub(value_of, text)


@dataclass(frozen=True)
class AutoOr(ValueType):
    """A value of `kind`, or the word "auto"."""

    kind: ValueType = field(default_factory=Size)

    @override
    def read(self, value: Any, loading: Loading) -> Any:
        if isinstance(value, str) and value.strip().lower() == "auto":
            return "auto"
        return self.kind.read(value, loading)

    @override
    def write(self, value: Any) -> Any:
        return value if value == "auto" else self.kind.write(value)

    @override
    def expected(self) -> str:
        return f'"auto" or {self.kind.expected()}'

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": "auto"}, self.kind.json_schema()]}


@dataclass(frozen=True)
class OrOff(ValueType):
    """A value of `kind`, or None for 0, null and "none". Written back as 0: TOML has no null."""

    kind: ValueType = field(default_factory=Size)

    @override
    def read(self, value: Any, loading: Loading) -> Any:
        is_zero = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
        if is_zero or value is None or (isinstance(value, str) and value.lower() in _OFF):
            return None
        return self.kind.read(value, loading)

    @override
    def write(self, value: Any) -> Any:
        return 0 if value is None else self.kind.write(value)

    @override
    def expected(self) -> str:
        return f"{self.kind.expected()}, or 0 for off"

    @override
    def json_schema(self) -> dict[str, Any]:
        return {"anyOf": [self.kind.json_schema(), {"const": 0}, {"type": "null"}]}
