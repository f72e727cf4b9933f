"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "degraded", "missing"]

_ORDER: tuple[Status, ...] = ("ok", "degraded", "missing")


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding about one subject.

    "degraded" works at a cost; "missing" is a need of the configuration that is not met. Both name
    the cost, and the remedy if there is one.
    """

    subject: str
    status: Status
    found: str
    cost: str = ""
    remedy: str = ""


def ok(subject: str, found: str) -> Finding:
    """Returns a finding without a fault."""
    return Finding(subject, "ok", found)


def degraded(subject: str, found: str, *, cost: str, remedy: str = "") -> Finding:
    """Returns a finding of something that works at a cost."""
    return Finding(subject, "degraded", found, cost, remedy)


def missing(subject: str, found: str, *, cost: str, remedy: str = "") -> Finding:
    """Returns a finding of something that does not work."""
    return Finding(subject, "missing", found, cost, remedy)


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the status of the whole report: that of its worst line."""
    return max((finding.status for finding in findings), key=_ORDER.index, default="ok")
