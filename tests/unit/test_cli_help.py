"""The help of every command, and the completion of the shell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.tools.cli import _COMMANDS
from tests.support.commands import imported_by, run_command

GROUPS = {"config": ("check", "show", "schema", "import"), "trace": ("summary", "view")}
COMMANDS = [
    (name, *more)
    for name in _COMMANDS
    for more in [(), *((each,) for each in GROUPS.get(name, ()))]
]


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_help_names_no_type_of_python(command: tuple[str, ...]) -> None:
    result = run_command(*command, "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--help" in result.output and "[[" not in result.output
    assert not re.search(r"<(?!\w+\|)[^>]*>", result.output), "choices have brackets, types none"


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if len(each) > 1 or each[0] not in GROUPS], ids=" ".join
)
def test_every_command_has_quiet_and_json(command: tuple[str, ...]) -> None:
    words = run_command(*command, "--help", env={"COLUMNS": "200"}).output
    assert "--quiet" in words and "-q" in words
    assert "--json" in words


def test_quiet_leaves_the_exit_code_json_and_errors(tmp_path: Path) -> None:
    quiet = run_command("plan", "--list", "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert "models" in json.loads(run_command("plan", "--list", "-q", "--json").stdout)
    refused = run_command("inspect", tmp_path / "nothing", "--quiet")
    assert refused.exit_code == 2 and "nothing" in refused.output


def test_help_of_a_command_imports_neither_torch_nor_pydantic() -> None:
    code = "import infinity.tools.cli as cli\nfor name in cli._COMMANDS:\n    cli._import_command(name)"
    assert imported_by(code, ("torch", "pydantic", "numpy")) == ([], "")


@pytest.mark.parametrize(
    ("module", "code"), [("typer", -signal.SIGINT), ("infinity.tools.cli.watch", 130)]
)
def test_ctrl_c_shows_no_traceback(module: str, code: int) -> None:
    """Neither while the command line is imported nor while a command runs."""
    program = f"""
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
from infinity.__main__ import main
sys.meta_path.insert(0, Finder)
main()
"""
    words = [sys.executable, "-c", program, "watch", "nothing"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr


def complete(*words: str) -> list[str]:
    """What a shell would offer for the last of these words."""
    code = "from infinity.tools.cli import main; main()"
    variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1),
                 "_INFINITY_COMPLETE": "complete_bash"}  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables
    )
    return found.stdout.split()


def test_the_shell_completes_commands_and_their_options() -> None:
    assert complete("infinity", "pla") == ["plan"]
    assert "--data-tokens" in complete("infinity", "plan", "--data")


def run(*arguments: object) -> Any:
    return run_command("clean", *arguments)


def leave(directory: Path) -> Path:
    """What a job that was killed leaves."""
    directory.mkdir()
    (directory / "infinity-0123456789abcdef.swap").write_bytes(bytes(8192))
    lock = directory / "infinity.lock"
    lock.write_text('{"schema": 1, "job": "0123456789abcdef", "pid": 1, "host": "gone"}')
    lock.chmod(0o600)
    (directory / "mine.txt").write_text("not ours")
    return directory


def test_clean_removes_what_an_ended_job_left_and_nothing_else(tmp_path: Path) -> None:
    directory = leave(tmp_path / "swap")
    tried = run(directory, "--dry-run")
    assert tried.exit_code == 0 and "stale" in tried.output
    assert len(list(directory.iterdir())) == 3
    file = tmp_path / "run.toml"
    file.write_text(f'tiers.nvme = [{{path = "{directory}"}}]')
    result = run(file)
    assert result.exit_code == 0 and "removed" in result.output
    assert [each.name for each in directory.iterdir()] == ["mine.txt"]
    assert "clean" in run(directory).output
    assert run(directory, "--quiet").output == ""


def test_clean_leaves_a_directory_that_a_living_job_holds(tmp_path: Path) -> None:
    from infinity.storage.swap_directory import SwapDirectory

    held = SwapDirectory(str(tmp_path / "swap"))
    try:
        code = "from infinity.tools.cli import main; main()"
        found = subprocess.run(
            [sys.executable, "-c", code, "clean", str(tmp_path / "swap")],
            capture_output=True, text=True,
        )  # fmt: skip
        assert found.returncode == 1 and f"process {os.getpid()}" in found.stdout
        assert Path(held.swap_path).exists()
    finally:
        held.close(remove=True)


def test_clean_keeps_a_committed_step_unless_it_is_asked_for(tmp_path: Path) -> None:
    directory = leave(tmp_path / "swap")
    step = directory / "commits" / "step-00000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    kept = run(directory)
    assert kept.exit_code == 0 and "--commits" in kept.output
    assert (step / "manifest.json").exists()


def test_clean_refuses_what_is_no_swap_directory(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing")
    assert result.exit_code == 2 and "expected a swap directory" in result.stderr
