"""The names of the machines and models that come with the package. Imports nothing heavy."""

from __future__ import annotations

from importlib import resources


def shipped_in(folder: str) -> list[str]:
    """Returns the names of the files that come with the package."""
    entries = (resources.files("infinity.plan") / folder).iterdir()
    return sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml"))
