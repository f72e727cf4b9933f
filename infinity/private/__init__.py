"""The parts of other packages that are not public, and that this package needs: one file for each
package. No other module names such a part.

A part is looked up at its first use. A release that lacks it gets an error that names the part and
what depends on it, instead of an AttributeError somewhere in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from infinity.errors import UnsupportedError


class PrivatePart(NamedTuple):
    """A part: "module:attributes", and what breaks without it.

    has_substitute: releases that the matrix runs lack it, and its user has a way without it; it is
        None there
    """

    path: str
    breaks: str
    has_substitute: bool = False


def find(parts: Mapping[str, PrivatePart], names: dict[str, Any], name: str) -> Any:
    """Returns the part `name` and keeps it in `names`, the globals of its module.

    Raises UnsupportedError where the installed release lacks it; AttributeError for another name.
    """
    if name not in parts:
        raise AttributeError(name)
    part = parts[name]
    module, _, attributes = part.path.partition(":")
    try:
        found: Any = reduce(getattr, attributes.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        if not part.has_substitute:
            package = module.partition(".")[0]
            raise UnsupportedError(
                f"{package} {version(package)} has no {part.path.replace(':', '.')}, and without "
                f"it {part.breaks}; install a release that docs/INTEGRATIONS.md names under "
                "Versions"
            ) from error
        found = None
    names[name] = found
    return found
