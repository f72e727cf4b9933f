"""Commands of the package, run in this process; and the modules that a command imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner, Result

from infinity.tools.cli import app


def run_command(*words: object, **options: Any) -> Result:
    """Runs `infinity WORDS`; `options` are those of `CliRunner.invoke`."""
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def imported_by(code: str, names: Sequence[str]) -> tuple[list[str], str]:
    """Runs code in an interpreter of its own. Returns those of the modules that it has imported, and
    what it has printed."""
    script = (
        "import sys\n"
        f"try:\n    exec({code!r})\nexcept SystemExit:\n    pass\n"
        f"print(*[name for name in {list(names)} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    *printed, found = done.stdout.splitlines()
    return found.split(), "\n".join(printed)
