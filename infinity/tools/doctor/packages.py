"""Releases of the packages that this one is built on, and others of its own name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import infinity
from infinity.config.extras import TRIED, release_of
from infinity.namesake import other_distributions, other_places
from infinity.tools.doctor.finding import Finding, degraded, missing, ok


def examine() -> Iterator[Finding]:
    """Yields the findings on packages; PyTorch's is `infinity.tools.doctor.accelerator`'s."""
    for package in ("transformers", "peft", "trl"):
        try:
            yield check_release(package, version(package))
        except PackageNotFoundError:
            yield ok(package, f"not installed (tried: {TRIED[package]})")
    own = Path(infinity.__file__ or "").parent
    yield check_namesakes(other_distributions(), other_places(own))


def check_release(package: str, found: str) -> Finding:
    """Judges a release by those that were tried."""
    tried, release = TRIED[package], release_of(found)
    text = f"{found} (tried: {tried})"
    if not tried.oldest <= release < (tried.newest[0] + 1,):
        return missing(
            package,
            text,
            cost="what needs it is refused",
            remedy=f"pip install '{package}{tried.wanted}'",
        )
    if release > tried.newest:
        return degraded(
            package,
            text,
            cost="no test has run with it",
            remedy=f"pip install '{package}<{tried.newest[0]}.{tried.newest[1] + 1}', or compare a "
            "step with plain PyTorch.",
        )
    return ok(package, text)


def check_namesakes(distributions: list[str], places: list[str]) -> Finding:
    """Judges other packages called `infinity`: distributions with files in it, and places on the
    path of a program that is started here."""
    subject = "package infinity"
    if distributions:
        names = " ".join(distributions)
        return missing(
            subject,
            f"{', '.join(distributions)} has files of a package infinity, too",
            cost="the one that was installed last has replaced files of the other",
            remedy=f"An environment for each; or pip uninstall {names} infinity-offload, then pip "
            "install infinity-offload.",
        )
    if places:
        return degraded(
            subject,
            f"another one is on the path: {', '.join(places)}",
            cost="a program that is started here may import that one",
            remedy="Start programs in another directory, or take its folder from PYTHONPATH.",
        )
    return ok(subject, "no other of this name")
