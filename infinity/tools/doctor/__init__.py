"""Examines this machine for a run, line by line: missing parts, their cost, and the remedy.

One module per subject. In each module, `check_*` functions judge facts and touch nothing;
`examine_*` gather the facts, from files below `root` and by trials. No check needs privileges:
files that may not be read are reported as unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infinity.config import SwapConfig
from infinity.tools.doctor import accelerator, machine, paths
from infinity.tools.doctor.finding import Finding, Status, worst

__all__ = ["Finding", "Status", "examine", "worst"]


def examine(config: SwapConfig, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yields every finding about this machine, for the needs of `config`, as soon as it is known.

    The trials use small rings, some memory, and on every path a scratch file of 4 KiB, which is
    removed again. Imports torch. `root` contains `proc` and `sys`.
    """
    yield from machine.examine_kernel(config, root)
    yield from machine.examine_memory(config, root)
    yield from paths.examine(config, root)
    yield from machine.examine_processor(root)
    yield from accelerator.examine_packages()
    yield from accelerator.examine(config, root)
