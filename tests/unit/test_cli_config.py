"""The command line: check, show and schema, errors as one line, nothing heavy imported."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError
from tests.support.commands import imported_by, run_command

GOOD = '[io]\nthreads = 3\n[[tiers.nvme]]\npath = "swap"\n'
BAD = '[io]\nthread = 3\n[tiers.host]\ncapacity = "8G"\n'


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFINITY_IO_ENGINE", "INFINITY_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.toml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.toml"
    file.write_text(BAD)
    return file


def test_ctrl_c_while_a_value_is_written_ends_the_command_as_anywhere(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinity.config.values.Capacity.__str__", interrupted)
    assert run_command("config", "show", good).exit_code == 130


def test_check_prints_ok(good: Path) -> None:
    result = run_command("config", "check", good)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{good}: ok\n", "")


def test_check_prints_every_fault_on_its_line_and_exits_1(bad: Path) -> None:
    result = run_command("config", "check", bad)
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{bad}: ") for line in lines)
    assert "tiers.host.capacity" in lines[0]
    assert 'io.thread: unknown key; did you mean "threads"?' in lines[1]


def test_check_and_doctor_say_what_train_says_of_a_model_that_is_here(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npath = "model.gguf"\n')
    assert run_command("config", "check", job).exit_code == 0  # It may lie on another machine.
    (tmp_path / "model.gguf").touch()
    for command in (("config", "check"), ("doctor",)):
        result = run_command(*command, job)
        assert result.exit_code == 1
        assert "model.gguf is no directory" in result.output.replace("\n", " ")
        assert "infinity convert" in result.output
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    job.write_text('[model]\npath = "model"\n')
    result = run_command("config", "check", job)
    assert result.exit_code == 1 and "has neither model.safetensors nor" in result.output


def test_check_of_a_missing_file_exits_1_with_its_name(tmp_path: Path) -> None:
    result = run_command("config", "check", tmp_path / "nope.toml")
    assert result.exit_code == 1 and "nope.toml: cannot be read" in result.stderr


def test_show_prints_toml_that_reads_back_equal(good: Path) -> None:
    result = run_command("config", "show", good)
    assert result.exit_code == 0
    again = good.with_name("again.toml")
    again.write_text(result.stdout)
    assert SwapConfig.load(again) == SwapConfig.load(good)


def test_show_prints_the_origin_of_each_value(good: Path) -> None:
    lines = run_command("config", "show", good).stdout.splitlines()
    remark = {line.split(" = ")[0]: line.split("# ")[1] for line in lines if " = " in line}
    assert remark["block_size"] == "default"
    assert remark["master"] == "derived"
    assert remark["path"] == f"file {good}"
    shown = [line for line in lines if line.startswith("capacity") and "available now" in line]
    assert len(shown) == 1, "an automatic host budget says what it comes to here"


def test_show_json_holds_the_configuration_and_its_origins(good: Path) -> None:
    shown = json.loads(run_command("config", "show", good, "--json").stdout)
    assert SwapConfig.load(shown["config"]) == SwapConfig.load(good)
    assert shown["origins"]["io.threads"] == f"file {good}"
    assert shown["origins"]["placement.master"] == "derived"


def test_help_shows_names_in_brackets() -> None:
    """Rich would take [model] for markup, and show nothing."""
    assert "[checkpoint]" in run_command("train", "--help").stdout
    assert "[model]" in run_command("export", "--help").stdout


def test_schema_prints_json_schema_or_the_reference() -> None:
    schema = json.loads(run_command("config", "schema").stdout)
    assert "tiers" in schema["properties"] and schema["$defs"]["Io"]["description"]
    assert json.loads(run_command("config", "schema", "--json", "--quiet").stdout) == schema
    refused = run_command("config", "schema", "--markdown", "--json")
    assert refused.exit_code == 2 and "Markdown alone" in refused.output
    reference = run_command("config", "schema", "--markdown").stdout
    assert reference.startswith("# The swap-tier file") and reference.endswith("\n")


def test_error_of_the_package_is_a_message_and_exit_code_2(bad: Path) -> None:
    result = run_command("config", "show", bad)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {bad}: 2 problems\n")
    assert "Traceback" not in result.stderr


def test_error_is_red_on_a_terminal_that_wants_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = run_command("config", "show", tmp_path / "nope.toml", color=True)
    assert result.stderr.startswith("\x1b[31merror: ")
    monkeypatch.setenv("NO_COLOR", "1")
    result = run_command("config", "show", tmp_path / "nope.toml", color=True)
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "variables"), [(["--traceback"], {}), ([], {"INFINITY_TRACEBACK": "1"})]
)
def test_traceback_is_shown_when_asked_for(
    bad: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    result = run_command(*arguments, "config", "show", bad, env=variables)
    assert isinstance(result.exception, ConfigError)


def test_train_is_imported_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: a function with typer's annotations becomes `infinity train FILE`."""
    called = []

    def train(config: str, steps: int = 1) -> None:
        """Stand in."""
        called.append((config, steps))
        if config == "bad.toml":
            raise InfinityError("no such luck")

    module = types.ModuleType("infinity.tools.cli.train")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "infinity.tools.cli.train", module)
    assert run_command("train", "swap.toml", "--steps", "3").exit_code == 0
    assert called == [("swap.toml", 3)]
    result = run_command("train", "bad.toml")
    assert (result.exit_code, result.stderr) == (2, "error: no such luck\n")
    assert "Stand in." in run_command("train", "--help").stdout


def test_version_names_the_command() -> None:
    result = run_command("--version")
    assert result.exit_code == 0 and result.stdout.startswith("infinity ")


def test_unknown_command_is_told_the_nearest() -> None:
    result = run_command("trian")
    assert result.exit_code == 2 and "train" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["config", "--help"], ["config", "schema"]]
)
def test_help_and_config_import_no_torch(arguments: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {arguments}\nfrom infinity.tools.cli import main; main()"
    heavy = ("torch", "numpy", "transformers", "infinity.tools.cli.train")
    found, printed = imported_by(code, heavy)
    assert not found and printed
