"""Checks the packages of the extra `hf` before they are needed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from infinity.errors import ConfigError

# As in pyproject.toml. What is private in transformers changes from one release to the next.
TRANSFORMERS = ((5, 23), (6,))


def release_of(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, such as "5.23.0"."""
    return tuple(int(digits) for digits in re.findall(r"\d+", text)[:2])


def require_transformers(what: str) -> None:
    """Raises ConfigError, which names the extra, where transformers is missing or too old or new
    for `what`."""
    lowest, beyond = (".".join(map(str, bound)) for bound in TRANSFORMERS)
    wanted = f"transformers>={lowest},<{beyond}"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ConfigError(
            f"{what} needs {wanted}, which is not installed: pip install 'infinity-offload[hf]'"
        ) from None
    if not TRANSFORMERS[0] <= release_of(found) < TRANSFORMERS[1]:
        raise ConfigError(f"{what} needs {wanted}, got {found}: pip install 'infinity-offload[hf]'")


def require_training(*, has_adapter: bool) -> None:
    """Raises ConfigError, which names the extra, for a package that `infinity train` needs, PEFT
    for `[adapter]` alone, and that is not installed."""
    require_transformers("infinity train")
    needed = ("accelerate", "datasets", *(("peft",) if has_adapter else ()), "trl")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"infinity train needs {', '.join(missing)}, which is not installed: "
            "pip install 'infinity-offload[hf]'"
        )
