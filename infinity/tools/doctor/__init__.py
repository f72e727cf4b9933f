"""Examines this machine for a run, line by line: missing parts, their cost, and the remedy.

One module per subject. In each module, `check_*` functions judge facts and touch nothing;
`examine_*` gather the facts, from files below `root` and by trials. No check needs privileges:
files that may not be read are reported as unreadable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from infinity.config import SwapConfig

Status = Literal["ok", "degraded", "missing"]

_ORDER: tuple[Status, ...] = ("ok", "degraded", "missing")


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding about one subject, without a fault until it is judged: a line of the report.

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


def examine(config: SwapConfig, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yields every finding about this machine, for the needs of `config`, as soon as it is known.

    The trials use small rings, some memory, and on every path a scratch file of 4 KiB, which is
    removed again. Imports torch. `root` contains `proc` and `sys`.
    """
    from infinity.tools.doctor import accelerator, machine, paths

    yield from machine.examine_kernel(config, root)
    yield from machine.examine_memory(config, root)
    yield from paths.examine(config, root)
    yield from machine.examine_processor(root)
    yield from accelerator.examine_packages()
    yield from accelerator.examine(config, root)
