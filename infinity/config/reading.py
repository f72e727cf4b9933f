"""The reading of one value: its context, how a message quotes it, and the errors of a reading.

The errors are pydantic's. `problems.py` collects all of a file and writes them as one ConfigError.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

_LONGEST_NAME_NBYTES = 255
_LONGEST_PATH_NBYTES = 4000  # The kernel takes 4095; files of ours are below a path of the file.
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


def show_value(value: object) -> str:
    """A value as an error message quotes it: the way a file writes it, cut to one line."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(show_value(item) for item in value)
        return f"[{inner}]" if len(inner) <= 60 else f"a list of {len(value)}"
    if value is None or isinstance(value, (bool, str)):
        text = json.dumps(value)
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def written_text(text: str) -> str:
    """`text`, which a file and a call of the kernel can hold. Raises ValueError."""
    if "\0" in text:
        raise ValueError("it holds a NUL")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is in it") from None
    return text


def usable_path(path: Path) -> Path:
    """`path`, whose names are not too long for a file system. Raises ValueError."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME_NBYTES for part in path.parts):
        raise ValueError(f"a name in it has more than {_LONGEST_NAME_NBYTES} bytes")
    if len(os.fsencode(path)) > _LONGEST_PATH_NBYTES:
        raise ValueError(f"it has more than {_LONGEST_PATH_NBYTES} bytes")
    return path


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
    text = f"expected {expected}; got {show_value(value)}" + (f" ({detail})" if detail else "")
    return PydanticCustomError("value", "{text}", {"text": text})


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
