"""Commands of the package, run in this process; and the modules that a command imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infinity.tools.cli import app


def run_command(*words: object, **options: Any) -> Result:
    """Runs `infinity WORDS`; `options` are those of `CliRunner.invoke`."""
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def plan_in_numbers(*words: object) -> dict[str, Any]:
    """What `infinity plan WORDS --json` writes, without advice: that is several plans more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.tools.plan.advice.advise", lambda *_: [])
        result = run_command("plan", *words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


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
