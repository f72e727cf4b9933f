"""Readers of files that anybody may have written: bounded in kind, size, depth and numbers.

A reader of JSON, TOML or raw bytes takes a hostile file for a damaged one. It opens regular files
only, so a FIFO does not block it and a device does not feed it for ever. It reads no more than a
bound. It refuses nesting that recursion could not follow, keys given twice, and numbers that are
not finite. Everything it refuses is a `MalformedError`; the caller says which file that is, and
raises its own error of the package's tree.

Kept here, at the bottom, because every layer reads such files. Imports no torch.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
import stat
from array import array
from itertools import accumulate
from typing import Any, NoReturn

from infinity.sizes import MIB, format_nbytes

MAX_DEPTH = 64  # Deeper than any table that this package or its neighbours write.
MAX_JSON_NBYTES = 256 * MIB
MAX_TEXT_NBYTES = MIB  # Of a file that a person writes.
MAX_INT = 2**63 - 1  # Of sizes, offsets and counts.

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class MalformedError(ValueError):
    """The content that was read is malformed. `line` and `column` count from 1, if they are known.

    Never leaves the package: callers raise an error that names the file.
    """

    def __init__(self, text: str, line: int | None = None, column: int | None = None) -> None:
        self.line = line
        self.column = column
        super().__init__(text)


def kind_of(mode: int) -> str:
    """Names the kind of file of an `st_mode`, in words: "a regular file", "a FIFO"."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a regular file")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises MalformedError for anything else, OSError as open(2).

    Does not wait: the open of a FIFO would, until a process writes to it.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise MalformedError(f"it is {kind_of(mode)}; expected a regular file")


def read_bytes(path: str | os.PathLike[str], *, max_nbytes: int) -> bytes:
    """All of a regular file. Raises MalformedError when it is none or longer, and OSError."""
    fd = open_regular(path)
    with open(fd, "rb", buffering=0) as file:
        nbytes = os.fstat(fd).st_size
        if nbytes > max_nbytes:
            raise MalformedError(
                f"it has {format_nbytes(nbytes)}; expected at most {format_nbytes(max_nbytes)}"
            )
        content = bytearray()
        while block := file.read(max_nbytes + 1 - len(content)):
            content += block
            if len(content) > max_nbytes:
                raise MalformedError(f"it grows; expected at most {format_nbytes(max_nbytes)}")
        return bytes(content)


def read_json(
    path: str | os.PathLike[str], *, max_nbytes: int = MAX_JSON_NBYTES, is_strict: bool = True
) -> Any:
    """The value in a JSON file, as `parse_json` reads it. Raises MalformedError and OSError."""
    return parse_json(read_bytes(path, max_nbytes=max_nbytes), is_strict=is_strict)


def decode_utf8(content: bytes) -> str:
    """The text of `content`, without a byte order mark. Raises MalformedError with the line."""
    try:
        # Not "utf-8-sig": Python would import that codec here, as the user that the process is now.
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise MalformedError(f"expected UTF-8 text; got {error.reason}", line) from None


def parse_json(content: bytes, *, max_depth: int = MAX_DEPTH, is_strict: bool = True) -> Any:
    """The value of a JSON text in UTF-8. Raises MalformedError.

    Refuses what `json.loads` accepts beyond the standard, and what no caller can use: NaN,
    Infinity, numbers beyond the range of a double, a key given twice in one table, and halves of
    surrogate pairs, which have no UTF-8. Without `is_strict` numbers that are not finite and keys
    given twice are read as `json.loads` reads them: files of other programs have some.
    """
    if _depth(content) > max_depth:
        raise MalformedError(f"it is nested too deeply: more than {max_depth} levels")
    try:
        value = json.loads(decode_utf8(content), **(_STRICT if is_strict else {}))
        if _SURROGATE.search(content):
            _refuse_lone_surrogates(value)
    except MalformedError:
        raise
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:]
        raise MalformedError(f"not valid JSON: {reason}", error.lineno, error.colno) from None
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except ValueError as error:  # An integer of thousands of digits.
        raise MalformedError(f"not valid JSON: {error}") from None
    return value


def parse_toml(text: str, *, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The table of a TOML text. Raises MalformedError."""
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _malformed_toml(text, str(error)) from None
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except ValueError as error:  # An integer of thousands of digits.
        raise MalformedError(f"not valid TOML: {error}") from None
    check_depth(table, max_depth=max_depth)  # Dotted keys nest without a bracket.
    return table


def _malformed_toml(text: str, reason: str) -> MalformedError:
    position = re.search(r" \(at (.*)\)$", reason)
    line, column = text.count("\n") + 1, None  # "at end of document"
    if position is not None:
        reason = reason[: position.start()]
        numbers = re.findall(r"\d+", position.group(1))
        if len(numbers) == 2:
            line, column = map(int, numbers)
    return MalformedError(f"not valid TOML: {reason}", line, column)


def check_depth(value: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """Raises MalformedError where lists and tables are nested deeper. Does not recurse."""
    level, depth = [value], 0
    while level := [child for value in level for child in _children(value)]:
        depth += 1
        if depth > max_depth:
            raise MalformedError(f"it is nested too deeply: more than {max_depth} levels")


def integer(value: Any, what: str, *, least: int = 0, most: int = MAX_INT) -> int:
    """`value`, which must be an integer in this range; true and 1.0 are none."""
    if type(value) is not int or not least <= value <= most:
        raise MalformedError(f"{what} is {_shown(value)}; expected {least} to {most}")
    return value


def text_of(value: Any, what: str, *, max_length: int = 4096) -> str:
    """`value`, which must be a printable text that is not empty and not longer."""
    if not isinstance(value, str) or not 0 < len(value) <= max_length or not value.isprintable():
        raise MalformedError(f"{what} is {_shown(value)}; expected a printable text")
    return value


def plain_name(value: Any, what: str) -> str:
    """`value`, which must be the name of a file in one directory, and of no other."""
    name = text_of(value, what, max_length=255)
    if name in (".", "..") or "/" in name:
        raise MalformedError(f"{what} is {_shown(value)}, which is no file name")
    return name


def list_of(value: Any, what: str) -> list[Any]:
    """Returns `value` if it is a list. Raises MalformedError, which names `what`."""
    if not isinstance(value, list):
        raise MalformedError(f"{what} is {_shown(value)}; expected a list")
    return value


def table_of(value: Any, what: str) -> dict[str, Any]:
    """Returns `value` if it is a table. Raises MalformedError, which names `what`."""
    if not isinstance(value, dict):
        raise MalformedError(f"{what} is {_shown(value)}; expected a table")
    return value


def field(table: dict[str, Any], key: str) -> Any:
    """A value that must be there."""
    if key not in table:
        raise MalformedError(f"it has no {key!r}")
    return table[key]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _depth(content: bytes) -> int:
    """Returns the depth of nested brackets up to the first fault of the text, strings left out."""
    brackets = _STRING.sub(b"", content).translate(None, _NO_BRACKETS)
    return max(accumulate(array("b", brackets.translate(_STEPS))), default=0)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values()) or [None]
    return (value or [None]) if isinstance(value, list) else []


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a table of JSON. Raises MalformedError for a key that is given twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedError(f"not valid JSON: the key {twice!r} is given twice in one table")
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedError(f"not valid JSON: {name} is no finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedError(f"not valid JSON: {text[:40]} is no finite number")
    return number


_STRICT: dict[str, Any] = {
    "object_pairs_hook": unique_keys,
    "parse_constant": _refuse_constant,
    "parse_float": _finite,
}


def _refuse_lone_surrogates(value: Any) -> None:
    level = [value]
    while level:
        texts = [t for value in level for t in (value if isinstance(value, dict) else [value])]
        for text in texts:
            if isinstance(text, str) and any(
                "\ud800" <= character <= "\udfff" for character in text
            ):
                raise MalformedError("not valid JSON: half of a surrogate pair")
        level = [child for value in level for child in _children(value)]
