"""What this machine can do for a run, line by line: what is missing, what it costs, what to do.

One module per subject. In each, `check_*` functions judge facts and touch nothing; `examine`
gathers the facts, from files below `root` and by trying. Nothing here needs privileges: what may
not be read is said to be unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infinity.config import SwapConfig
from infinity.doctor import accelerator, kernel, memory, paths, processor
from infinity.doctor.finding import Finding, Status, worst

__all__ = ["Finding", "Status", "examine", "worst"]


def examine(config: SwapConfig, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Every finding about this machine, for what `config` asks, as soon as it is known.

    Tries things: small rings, some memory, a scratch file of 4 KiB on every path, which is removed
    again. Imports torch. `root` holds `proc` and `sys`.
    """
    yield from kernel.examine(config, root)
    yield from memory.examine(config, root)
    yield from paths.examine(config, root)
    yield from processor.examine(root)
    yield from accelerator.examine(config, root)
