"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ok", "degraded", "missing"]

_ORDER: tuple[Status, ...] = ("ok", "degraded", "missing")


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding about one subject, without a fault until it is judged.

    "degraded" works at a cost; "missing" is a need of the configuration that is not met. Both name
    the cost, and the remedy if there is one.
    """

    subject: str
    found: str
    status: Status = "ok"
    cost: str = ""
    remedy: str = ""

    def degraded(self, cost: str, remedy: str = "") -> Finding:
        """Returns the finding of something that works at a cost."""
        return replace(self, status="degraded", cost=cost, remedy=remedy)

    def missing(self, cost: str, remedy: str = "") -> Finding:
        """Returns the finding of something that does not work."""
        return replace(self, status="missing", cost=cost, remedy=remedy)

    def more(self, text: str) -> Finding:
        """Returns the finding with more text about what was found."""
        return replace(self, found=self.found + text)


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the status of the whole report: that of its worst line."""
    return max((finding.status for finding in findings), key=_ORDER.index, default="ok")
