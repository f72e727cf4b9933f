"""Reading the kernel's small files, any of which may be absent or forbidden."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """The stripped contents; None when they cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_int(path: Path) -> int | None:
    """The number in a file; None when there is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def read_field(path: Path, key: str) -> str | None:
    """The value of a line "key: value"; None when there is no such line."""
    for line in (read_text(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None
