"""The kinds of value in the swap-tier file: sizes, budgets, numbers, words and places.

A `ValueType` stands in an annotation, `Annotated[int, size(multiple=4096)]`. It reads a value of a
file, names the values that it expects when it refuses one, and writes the value as a file holds it.
Reading a written value gives the same value. The errors are pydantic's: `problems.py` collects all
of a file and writes them as one ConfigError.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticCustomError,
    ValidationError,
    core_schema,
)

from infinity.sizes import MIB, parse_nbytes, write_size

# Sizes travel to the kernel as signed 64-bit offsets.
MAX_NBYTES = 2**63 - 1
# Of training state, as [placement] names them.
PLACED_KINDS = ("parameters", "master", "moments", "gradients")

_LONGEST_NAME_NBYTES = 255
_LONGEST_OWN_NAME_NBYTES = 200  # Names of partial and damaged files are longer than their own.
_LONGEST_PATH_NBYTES = 4000  # The kernel takes 4095; files of ours are below a path of the file.
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
_WORDS_OF_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_OFF = (None, "none", "null", "off")
_QUOTE_IT = "quote the word: YAML 1.1 takes on, off, yes and no for booleans"
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
# A word of other tools -> the words here; the first allowed one is suggested.
_SYNONYMS = {
    "gpu": ("cuda", "device"), "cpu": ("host",), "ram": ("host",), "memory": ("host",),
    "disk": ("nvme",), "ssd": ("nvme",), "none": ("never",), "off": ("never",), "no": ("never",),
    "on": ("always",), "yes": ("always",), "true": ("always",), "false": ("never",),
    "fp32": ("float32",), "f32": ("float32",), "bf16": ("bfloat16",),
    "uring": ("io_uring",), "thread": ("threads",), "threadpool": ("threads",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loading:
    """The context of one reading, and its record.

    Relative paths start at `directory`; `environment` collects the keys that an environment
    variable decided.
    """

    directory: Path
    environment: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ValueType:
    """One kind of value.

    expected: the values that a file may have here, as a phrase that follows "expected"
    schema: their JSON schema
    read: returns the value that a value of a file stands for; raises ValueError or OverflowError
        with the reason, which may be empty
    write: returns a read value as a file holds it
    """

    expected: str
    schema: Mapping[str, Any]
    read: Callable[[Any, Loading], Any]
    write: Callable[[Any], Any] = lambda value: value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:

        def read(value: Any, info: ValidationInfo) -> Any:
            loading = info.context if isinstance(info.context, Loading) else Loading(Path.cwd())
            try:
                return self.read(value, loading)
            except (ValueError, OverflowError) as error:
                raise refuse(self.expected, value, str(error)) from None

        return core_schema.with_info_plain_validator_function(
            read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.write, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**self.schema, "x-expected": self.expected}


# -- Sizes and budgets -----------------------------------------------------------------------------


def size(minimum: int = 1, maximum: int = MAX_NBYTES, multiple: int = 1) -> ValueType:
    """Bytes: "8GiB", "500MB" or an integer."""
    limits = [f'a size such as "{write_size(max(minimum, 8 * MIB))}"']
    if multiple > 1:
        limits.append(f"a multiple of {write_size(multiple)}")
    if minimum > 1:
        limits.append(f"at least {write_size(minimum)}")
    if maximum < MAX_NBYTES:
        limits.append(f"at most {write_size(maximum)}")

    def read(value: Any, _: Loading) -> int:
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
        if nbytes < minimum:
            raise ValueError(f"at least {write_size(minimum)}")
        if nbytes > maximum:
            raise ValueError(f"at most {write_size(maximum)}")
        if nbytes % multiple:
            raise ValueError(f"{nbytes} is not a multiple of {write_size(multiple)}")
        return nbytes

    text = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([kKMGT]i?)?B\s*$"}
    schema = {"anyOf": [text, {"type": "integer", "minimum": minimum}]}
    return ValueType(", ".join(limits), schema, read, write_size)


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


def budget() -> ValueType:
    """A tier's capacity: "auto", a size, or a share such as "80%". Reads to `Capacity`."""
    nbytes = size()

    def read(value: Any, loading: Loading) -> Capacity:
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
        return Capacity(nbytes=nbytes.read(value, loading))

    share = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}
    schema = {"anyOf": [{"const": "auto"}, *nbytes.schema["anyOf"], share]}
    return ValueType('"auto", a size such as "8GiB" or a share such as "80%"', schema, read, str)


# -- Numbers and words -----------------------------------------------------------------------------


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


def integer(minimum: int = 0, maximum: int | None = None) -> ValueType:
    """An integer, not below `minimum` and not above `maximum`."""
    return number(minimum, maximum, is_integer=True)


def number(
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    *,
    is_integer: bool = False,
) -> ValueType:
    """A finite float, or an integer. `above` and `below` are limits that the value itself may not
    take."""

    def read(value: Any, _: Loading) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(_number_detail(value))
        if is_integer and isinstance(value, float) and not value.is_integer():
            raise ValueError("")
        found = int(value) if is_integer else float(value)  # 1e3 is a float to TOML and YAML.
        if not is_integer and not math.isfinite(found):
            raise ValueError("not finite")
        if (
            (minimum is not None and found < minimum)
            or (maximum is not None and found > maximum)
            or (above is not None and found <= above)
            or (below is not None and found >= below)
        ):
            raise ValueError("")
        return found

    end = f" and < {below:g}" if below is not None else ""
    limits = {
        "minimum": minimum, "maximum": maximum, "exclusiveMinimum": above,
        "exclusiveMaximum": below,
    }  # fmt: skip
    schema = {name: limit for name, limit in limits.items() if limit is not None}
    kind, article = ("integer", "an") if is_integer else ("number", "a")
    phrase = f"{article} {kind}{_range(minimum, maximum, above)}{end}"
    if is_integer and minimum == maximum:
        phrase = f"the integer {minimum}"
    return ValueType(phrase, {"type": kind, **schema}, read)


def _read_flag(value: Any, _: Loading) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _WORDS_OF_BOOL:
        return _WORDS_OF_BOOL[value.lower()]
    raise ValueError("")


def choice(literal: Any) -> ValueType:
    """One of some words: those of the Literal that it annotates."""
    words: tuple[str, ...] = get_args(literal)

    def read(value: Any, _: Loading) -> str:
        if isinstance(value, bool):
            raise ValueError(_QUOTE_IT)
        if not isinstance(value, str):
            raise ValueError("")
        if value not in words:
            near = nearest(value, words)
            raise ValueError(f'did you mean "{near}"?' if near else "")
        return value

    phrase = either([f'"{word}"' for word in words])
    return ValueType(phrase, {"type": "string", "enum": list(words)}, read)


def some_text(what: str = "text") -> ValueType:
    """Text that is not empty and holds no NUL. `what` names it in messages."""

    def read(value: Any, _: Loading) -> str:
        if isinstance(value, bool):
            raise ValueError(_QUOTE_IT)
        if not isinstance(value, str) or not value:
            raise ValueError("")
        return written_text(value)

    return ValueType(what, _TEXT_SCHEMA, read)


# -- Places ----------------------------------------------------------------------------------------


def file_name(taken: tuple[str, ...] = ()) -> ValueType:
    """The name of a file inside a directory that another key names.

    `taken` are shell patterns, in lower case, of names in that directory that have another use.
    """

    def read(value: Any, _: Loading) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("")
        path = _usable_path(Path(written_text(value)))
        if path.is_absolute() or ".." in path.parts or path == Path("."):
            raise ValueError("it stays inside that directory")
        if any(len(os.fsencode(part)) > _LONGEST_OWN_NAME_NBYTES for part in path.parts):
            raise ValueError(f"a name has at most {_LONGEST_OWN_NAME_NBYTES} bytes")
        first = path.parts[0].lower()
        if any(fnmatchcase(first, pattern) for pattern in taken):
            raise ValueError(f"other files of the directory are called {path.parts[0]!r}")
        return value

    return ValueType("a file name inside the directory", _TEXT_SCHEMA, read)


def location(words: tuple[str, ...] = (), what: str = "a path") -> ValueType:
    """A path, absolute once read: ~ and $VARIABLES expanded, relative to the file's directory.

    `words` are not paths but stand for themselves.
    """

    def read(value: Any, loading: Loading) -> Path | str:
        if isinstance(value, str) and value in words:
            return value
        if value is None:
            raise ValueError("a bare ~ is null in YAML: quote it")
        if isinstance(value, bool) or not isinstance(value, (str, os.PathLike)):
            raise ValueError("")
        written = os.fspath(value)
        if not isinstance(written, str) or not written.strip():
            raise ValueError("a path is not empty")
        written = os.path.expanduser(_VARIABLE.sub(_variable, written_text(written)))
        if written.startswith("~"):
            raise ValueError("there is no such home directory; write ./~ for a file of that name")
        path = _usable_path(Path(loading.directory, written))
        # ".." is followed as the kernel does, through links; other paths stay as written.
        return Path(os.path.realpath(path)) if ".." in path.parts else path

    phrase = " or ".join([*(f'"{word}"' for word in words), what])
    return ValueType(phrase, _TEXT_SCHEMA, read, str)


def _variable(match: re.Match[str]) -> str:
    name = match.group(1) or match.group(2)
    if not name or name not in os.environ:
        raise ValueError(f"the environment variable {name or match.group(0)} is not set")
    return os.environ[name]


def _usable_path(path: Path) -> Path:
    """`path`, whose names are not too long for a file system. Raises ValueError."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME_NBYTES for part in path.parts):
        raise ValueError(f"a name in it has more than {_LONGEST_NAME_NBYTES} bytes")
    if len(os.fsencode(path)) > _LONGEST_PATH_NBYTES:
        raise ValueError(f"it has more than {_LONGEST_PATH_NBYTES} bytes")
    return path


def written_text(text: str) -> str:
    """`text`, which a file and a call of the kernel can hold. Raises ValueError."""
    if "\0" in text:
        raise ValueError("it holds a NUL")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is in it") from None
    return text


# -- Kinds of other kinds --------------------------------------------------------------------------


def auto_or(kind: ValueType) -> ValueType:
    """A value of `kind`, or the word "auto"."""

    def read(value: Any, loading: Loading) -> Any:
        if isinstance(value, str) and value.strip().lower() == "auto":
            return "auto"
        return kind.read(value, loading)

    def write(value: Any) -> Any:
        return value if value == "auto" else kind.write(value)

    schema = {"anyOf": [{"const": "auto"}, kind.schema]}
    return ValueType(f'"auto" or {kind.expected}', schema, read, write)


def or_off(kind: ValueType) -> ValueType:
    """A value of `kind`, or None for 0, null and "none". Written back as 0: TOML has no null."""

    def read(value: Any, loading: Loading) -> Any:
        is_zero = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
        if is_zero or value is None or (isinstance(value, str) and value.lower() in _OFF):
            return None
        return kind.read(value, loading)

    def write(value: Any) -> Any:
        return 0 if value is None else kind.write(value)

    schema = {"anyOf": [kind.schema, {"const": 0}, {"type": "null"}]}
    return ValueType(f"{kind.expected}, or 0 for off", schema, read, write)


# true or false. The words of YAML 1.1 (on, off, yes, no) are read as it means them.
Flag = Annotated[bool, ValueType("true or false", {"type": "boolean"}, _read_flag)]
Budget = Annotated[Capacity, budget()]
Location = Annotated[Path, location()]


# -- Errors of a reading ---------------------------------------------------------------------------


def either(words: Sequence[str]) -> str:
    """Words as a message names alternatives: "a, b or c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def show_value(value: object) -> str:
    """A value as an error message quotes it: the way a file writes it, cut to one line."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(show_value(item) for item in value)
        return f"[{inner}]" if len(inner) <= 60 else f"a list of {len(value)}"
    if value is None or isinstance(value, (bool, str)):
        shown = json.dumps(value)
    else:
        shown = str(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def nearest(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that `word` most likely stands for, or None."""
    plain = {name.lower(): name for name in known}
    lower = word.lower().replace("-", "_")
    for synonym in (lower, *_SYNONYMS.get(lower, ())):
        if synonym in plain:
            return plain[synonym]
    found = difflib.get_close_matches(lower, list(plain), n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def refuse(expected: str, value: object, detail: str = "") -> PydanticCustomError:
    """The error of a value that is not what its key holds."""
    return conflict(
        f"expected {expected}; got {show_value(value)}" + (f" ({detail})" if detail else "")
    )


def conflict(text: str) -> PydanticCustomError:
    """The error of a value that is right in itself and does not fit the rest."""
    return PydanticCustomError("conflict", "{text}", {"text": text})


def fault(text: str, *place: str | int) -> InitErrorDetails:
    """A conflict at `place`, relative to the value that is being validated."""
    return InitErrorDetails(type=conflict(text), loc=place, input=None)


def refuse_all(faults: list[InitErrorDetails]) -> None:
    """Raises every fault at its own place; nothing when there is none."""
    if faults:
        raise ValidationError.from_exception_data("config", faults)
