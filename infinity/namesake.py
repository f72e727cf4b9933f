"""Other distributions whose package is called `infinity`, too, in the environment of this one.

Python has one package of a name: where two are installed, their files lie in one folder, and the
one that was installed last has replaced files of the other. This module needs the standard library
alone, since any other module of the package may be a stranger's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

DISTRIBUTION = "infinity-offload"

# The folders and modules of this package.
OWN = frozenset(
    {
        "api", "bounded", "checkpoint", "codecs", "config", "distributed", "engine", "errors",
        "fused", "integrations", "modules", "namesake", "observe", "ops", "optimizers", "plan",
        "private", "simulate", "sizes", "state", "storage", "streaming", "testing", "tiers",
        "tools", "uring",
    }
)  # fmt: skip


def strange_entries(folders: Iterable[str]) -> list[str]:
    """Returns the folders and modules in the package's folders that this distribution does not
    have."""
    found = set()
    for folder in folders:
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            name, ending = os.path.splitext(entry.name)
            if name in OWN or name.startswith((".", "_")):
                continue
            # A folder of an older release may have kept its __pycache__.
            if ending == ".py" or (not ending and any(Path(entry).rglob("*.py"))):
                found.add(entry.name)
    return sorted(found)


def other_distributions() -> list[str]:
    """Returns the names of the other installed distributions with files of a package `infinity`.
    Reads the metadata of all that are installed."""
    from importlib import metadata  # Slow to import.

    found = set()
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower().replace("_", "-") == DISTRIBUTION:
            continue
        for file in distribution.files or ():
            if file.parts[0] in ("infinity", "infinity.py"):
                found.add(name)
                break
    return sorted(found)


def other_places(folder: Path) -> list[str]:
    """Returns the other packages or modules `infinity` on the path of a program that is started
    here. `folder` is that of this package."""
    found: dict[str, None] = {}
    for entry in ["", *sys.path]:
        for place in (Path(entry, "infinity", "__init__.py"), Path(entry, "infinity.py")):
            if os.path.isfile(place) and place.parent.resolve() != folder.resolve():
                found[str(place.resolve())] = None
    return list(found)


def explain(entries: list[str]) -> str:
    """Returns what is wrong with an installation, and the remedy. `entries`: as found here."""
    others = other_distributions()
    names = " ".join(others) or "the other distribution"
    return (
        f"files of {names} lie in the package `infinity`"
        + (f" ({', '.join(entries)})" if entries else "")
        + f", which {DISTRIBUTION} is imported as, too; only one of them can work here: use an "
        f"environment for each, or pip uninstall {names} {DISTRIBUTION} and then pip install "
        f"{DISTRIBUTION}"
    )
