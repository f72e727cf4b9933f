#!/usr/bin/env python3
"""Runs a short selection of tests over the lowest and newest versions that pyproject.toml allows.

    scripts/matrix.py                  # all columns, in throwaway virtual environments
    scripts/matrix.py --column lowest  # one of them
    scripts/matrix.py --installed      # the selection in the environment that runs this script

Each column builds the package from this tree (a compiler and CMake are needed) and installs torch
and the Hugging Face libraries anew: some GB and a quarter of an hour a column. Run it by hand when
a bound in pyproject.toml changes; it is no part of the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A bound that is raised here is raised in pyproject.toml too. trl is no dependency: its trainers
# are tested where it is installed.
COLUMNS = {
    "lowest": ["torch==2.13.*", "transformers==5.23.*", "peft==0.21.*", "trl==1.16.*"],
    "newest": ["torch<2.14", "transformers<6", "peft", "trl"],
    # What the command line needs, without the Hugging Face libraries, which ask for newer ones.
    "bare": [
        "cffi==1.17.*", "numpy==1.26.*", "pydantic==2.9.*", "pyyaml==6.0.*", "rich==13.0.*",
        "safetensors==0.4.3", "torch==2.13.*", "typer==0.20.*", "typing-extensions",
    ],
}  # fmt: skip
BARE_SELECTION = ["tests/unit/test_cli_help.py", "tests/unit/test_config_load.py"]
SELECTION = [
    "tests/parity/test_adapters_on_meta.py",
    "tests/parity/test_narrowed.py",
    "tests/integrations",
    "tests/unit/test_import_checks.py",
    "tests/unit/test_safetensors_hf.py",
    "tests/unit/test_model_table.py",
]


def run(*command: str | Path, cwd: Path = ROOT) -> int:
    print("+", *command, flush=True)
    return subprocess.run([str(each) for each in command], cwd=cwd).returncode


def select(python: str | Path, selection: Sequence[str] = SELECTION) -> int:
    """The selection, against the package that `python` has, not this tree's."""
    with tempfile.TemporaryDirectory() as elsewhere:
        paths = [ROOT / path for path in selection]
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
        return run(python, "-m", "pytest", *options, *paths, cwd=Path(elsewhere))


def column(name: str, index_url: str | None) -> int:
    packages, is_bare = COLUMNS[name], name == "bare"
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory) / "bin" / "python"
        extra = ["--extra-index-url", index_url] if index_url else []
        tools = ["pytest", "pytest-timeout", "hypothesis"]
        failed = run(
            python,
            "-m",
            "pip",
            "install",
            "-q",
            *extra,
            f"{ROOT}{'' if is_bare else '[hf]'}",
            *packages,
            *tools,
        ) or run(python, "-m", "pip", "list")
        return failed or select(python, BARE_SELECTION if is_bare else SELECTION)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--column", choices=COLUMNS, action="append", help="one of them only")
    parser.add_argument("--installed", action="store_true")
    parser.add_argument("--index-url", help="where pip finds torch's CPU builds")
    chosen = parser.parse_args()
    if chosen.installed:
        return select(sys.executable)
    codes = {name: column(name, chosen.index_url) for name in chosen.column or list(COLUMNS)}
    for name, code in codes.items():
        print(f"{name}: {'passed' if code == 0 else f'failed ({code})'}")
    return max(codes.values())


if __name__ == "__main__":
    raise SystemExit(main())
