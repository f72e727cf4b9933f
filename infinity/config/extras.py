"""Checks the releases of PyTorch and of the packages of the extra `hf` before they are needed."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

from infinity.errors import ConfigError

_log = logging.getLogger("infinity")

version = functools.cache(metadata.version)  # It parses a file of a thousand lines.


@dataclass(frozen=True, slots=True)
class Tried:
    """The minor releases, from the oldest to the newest, that `scripts/matrix.py` has run with."""

    oldest: tuple[int, int]
    newest: tuple[int, int]

    @property
    def wanted(self) -> str:
        """The bounds of pyproject.toml, ">=2.10,<3": an untried minor release is installed."""
        return f">={self.oldest[0]}.{self.oldest[1]},<{self.newest[0] + 1}"

    def __str__(self) -> str:
        ends = ("{}.{}".format(*release) for release in (self.oldest, self.newest))
        return " to ".join(dict.fromkeys(ends))


TRIED = {
    "torch": Tried((2, 10), (2, 15)),
    "transformers": Tried((5, 16), (5, 24)),
    "peft": Tried((0, 20), (0, 21)),
    "trl": Tried((1, 16), (1, 16)),
}
_WHY_NOT_OLDER = "it uses parts that are not public, and no older release is tested"


def release_of(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, such as "5.23.0"."""
    return tuple(int(digits) for digits in re.findall(r"\d+", text)[:2])


def installed(package: str) -> str | None:
    """Returns the release of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require_release(package: str, what: str) -> None:
    """Raises ConfigError, which names the command, where a package is missing, or older or newer
    than its bounds for `what`. Warns once of a minor release that is newer than all tried ones."""
    tried = TRIED[package]
    wanted = f"{package}{tried.wanted}"
    extra = "infinity-offload" if package == "torch" else "infinity-offload[hf]"
    found = installed(package)
    if found is None:
        raise ConfigError(f"{what} needs {wanted}, which is not installed: pip install '{extra}'")
    release = release_of(found)
    if not tried.oldest <= release < (tried.newest[0] + 1,):
        raise ConfigError(
            f"{what} needs {wanted}, got {found} ({_WHY_NOT_OLDER}): pip install '{wanted}'"
        )
    if release > tried.newest:
        _warn_of_untried(package, found)


@functools.cache  # Once in a process.
def _warn_of_untried(package: str, found: str) -> None:
    tried = TRIED[package]
    _log.warning(
        "%s %s is newer than all that were tried (%s): errors are named, and to be sure compare a "
        "step with plain PyTorch; or pip install '%s<%d.%d'",
        package, found, tried, package, tried.newest[0], tried.newest[1] + 1,
    )  # fmt: skip


def require_training(*, has_adapter: bool) -> None:
    """Raises ConfigError, which names the extra, for a package that `infinity train` needs, PEFT
    for `[adapter]` alone, and that is not installed or too old."""
    require_release("transformers", "infinity train")
    needed = ("accelerate", "datasets", *(("peft",) if has_adapter else ()), "trl")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"infinity train needs {', '.join(missing)}, which is not installed: "
            "pip install 'infinity-offload[hf]'"
        )
    for name in needed:
        if name in TRIED:
            require_release(name, "infinity train")
