#!/usr/bin/env python3
"""Runs the tests of `make quick`, some of parity and of integrations, over the releases of PyTorch,
transformers, PEFT and TRL that `infinity/config/extras.py` calls tried.

    scripts/matrix.py                        # every environment, one after the other
    scripts/matrix.py --only oldest newest   # some of them; rows of others stay in the file
    scripts/matrix.py --installed            # the tests in the environment that runs this script

Run it by hand when a bound changes. An environment has some GB and is removed when its tests have
run; the package is compiled once per Python. Writes bench/results/matrix.json, and the table of
docs/INTEGRATIONS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "matrix.json"
PAGE = ROOT / "docs" / "INTEGRATIONS.md"

# A bound that changes here changes in pyproject.toml and in infinity/config/extras.py, too.
ENVIRONMENTS = {
    "oldest": ["torch==2.10.*", "transformers==5.16.*", "peft==0.20.*", "trl==1.16.*"],
    "image": ["torch==2.11.*", "transformers==5.17.*", "peft==0.21.*", "trl==1.16.*"],
    "middle": ["torch==2.13.*", "transformers==5.23.*", "peft==0.21.*", "trl==1.16.*"],
    "newest": ["torch==2.15.*", "transformers==5.24.*", "peft==0.21.*", "trl==1.16.*"],
    # The lowest releases of what the command line needs, without the Hugging Face libraries, which
    # ask for newer ones.
    "bare": [
        "cffi==1.17.*", "numpy==1.26.*", "pydantic==2.9.*", "pyyaml==6.0.*", "rich==13.0.*",
        "safetensors==0.4.3", "torch==2.10.*", "typer==0.20.*", "typing-extensions",
    ],
}  # fmt: skip
SHOWN = ("torch", "transformers", "peft", "trl", "accelerate", "numpy")
TOOLS = ["hypothesis", "import-linter", "pytest", "pytest-timeout"]
LIBRARIES = ["diffusers", "lightning", "matplotlib", "tiktoken"]  # The tests of these import them.

QUICK = ["tests/tidy", "tests/unit", "tests/property", "tests/ops"]
PARITY = [
    f"tests/parity/test_{name}.py"
    for name in (
        "adapters", "adapters_on_meta", "added_gradients", "autocast", "entered_nodes",
        "expert_adapters", "functions", "layer_major", "norms", "optimizers", "originals",
        "outside_blocks", "parts", "replaced_data", "returned", "writes",
    )
]  # fmt: skip
INTEGRATIONS = [
    "tests/convert/test_merge.py", "tests/integrations/test_adapters.py",
    "tests/integrations/test_hf.py", "tests/integrations/test_trl.py",
    "tests/integrations/test_windows.py", "tests/plan/test_directory.py",
    "tests/train/test_adapter.py",
]  # fmt: skip
BARE = ["tests/unit/test_cli_help.py", "tests/unit/test_config_load.py"]


@dataclass(frozen=True)
class Counts:
    """What pytest's last line says, and the tests that failed."""

    passed: int
    failed: int
    skipped: int
    elapsed_s: float
    failures: list[str]

    @classmethod
    def of(cls, output: str, elapsed_s: float) -> Counts:
        last = next(
            (line for line in reversed(output.splitlines()) if re.search(r" in [\d.]+s", line)), ""
        )
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
        failures = re.findall(r"^(?:FAILED|ERROR) \S*?(tests/.*?)(?: - |$)", output, re.MULTILINE)
        failed = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
        if not counts:  # It did not come to the end.
            failed, failures = max(failed, 1), failures or [output[-2000:]]
        return cls(
            counts.get("passed", 0), failed, counts.get("skipped", 0), round(elapsed_s), failures
        )


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    print("+", *command, flush=True)
    return subprocess.run([str(each) for each in command], cwd=cwd, capture_output=True, text=True)


def run_tests(python: str | Path, paths: Sequence[str]) -> Counts:
    """Runs tests of this tree against the package that `python` has, in one process."""
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
        command = [python, "-m", "pytest", *options, *(ROOT / path for path in paths)]
        print("+", *command, flush=True)
        start_s = time.monotonic()
        done = subprocess.run(
            [str(each) for each in command], cwd=elsewhere, env={**os.environ, **own},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        return Counts.of(done.stdout, time.monotonic() - start_s)


def test_environment(python: str | Path, *, is_bare: bool) -> dict[str, object]:
    """Returns the versions of an environment, and what its tests say."""
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json").stdout)
    versions = {entry["name"].lower(): entry["version"] for entry in listed}
    suites = {"quick": QUICK, "parity": PARITY, "integrations": INTEGRATIONS}
    row: dict[str, object] = {
        "python": run(python, "-c", "import platform; print(platform.python_version())")
        .stdout.strip(),
        "versions": {name: versions[name] for name in SHOWN if name in versions},
    }  # fmt: skip
    for name, paths in ({"quick": BARE} if is_bare else suites).items():
        row[name] = vars(run_tests(python, paths))
        print(f"  {name}: {row[name]}", flush=True)
    return row


def build_wheel(python: str, directory: Path) -> Path:
    """Compiles the package for a Python, with the build folder of this tree. It links no torch, so
    all environments of this Python share it."""
    tools = directory / "tools"
    run(python, "-m", "venv", tools).check_returncode()
    own = tools / "bin" / "python"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [own, "-m", "pip"]
    run(*pip, "install", "-q", "--no-cache-dir", *needed, "cmake", "ninja").check_returncode()
    done = run(*pip, "wheel", "-q", "--no-deps", "-w", directory, ROOT)
    shutil.rmtree(tools)
    if done.returncode:
        raise SystemExit(done.stderr)
    return next(directory.glob("infinity_offload-*.whl"))


def make_and_test(name: str, python: str, wheel: Path, index_url: str | None) -> dict[str, object]:
    """Makes an environment, runs its tests, and removes it."""
    is_bare = name == "bare"
    extra = ["--extra-index-url", index_url] if index_url else []
    with tempfile.TemporaryDirectory(prefix=f"matrix-{name}-") as directory:
        os.chmod(directory, 0o755)  # A test runs commands as another user.
        run(python, "-m", "venv", directory).check_returncode()
        own = Path(directory) / "bin" / "python"
        package = f"infinity-offload{'' if is_bare else '[hf]'} @ {wheel.as_uri()}"
        needed = [package, *ENVIRONMENTS[name], *TOOLS, *([] if is_bare else LIBRARIES)]
        done = run(own, "-m", "pip", "install", "-q", "--no-cache-dir", *extra, *needed)
        if done.returncode:
            raise SystemExit(done.stderr)
        return test_environment(own, is_bare=is_bare)


def table(rows: dict[str, dict[str, object]]) -> str:
    """Returns the rows as Markdown."""
    heads = ["environment", "Python", *SHOWN[:4], "quick", "parity", "integrations"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for name, row in rows.items():
        versions: dict[str, str] = row["versions"]  # type: ignore[assignment]
        cells = [name, str(row["python"]), *(versions.get(each, "") for each in SHOWN[:4])]
        for suite in ("quick", "parity", "integrations"):
            counts: dict[str, int] | None = row.get(suite)  # type: ignore[assignment]
            failed = f", {counts['failed']} failed" if counts and counts["failed"] else ""
            cells.append(f"{counts['passed']} passed{failed}" if counts else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows: dict[str, dict[str, object]]) -> None:
    """Writes the results, and the table between the page's marks."""
    ordered = {name: rows[name] for name in ENVIRONMENTS if name in rows}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    before, mark, rest = PAGE.read_text().partition("<!-- matrix -->\n")
    after = rest.partition("<!-- end of matrix -->")[2]
    PAGE.write_text(f"{before}{mark}{table(ordered)}\n<!-- end of matrix -->{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=ENVIRONMENTS, nargs="+", help="some environments")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environments")
    parser.add_argument("--installed", action="store_true")
    parser.add_argument("--index-url", help="where pip finds torch's CPU builds")
    chosen = parser.parse_args()
    if chosen.installed:
        print(json.dumps(test_environment(sys.executable, is_bare=False), indent=1))
        return 0
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="matrix-wheel-") as directory:
        wheel = build_wheel(chosen.python, Path(directory))
        for name in chosen.only or ENVIRONMENTS:
            rows[name] = make_and_test(name, chosen.python, wheel, chosen.index_url)
            write(rows)
    suites = [suite for row in rows.values() for suite in row.values() if isinstance(suite, dict)]
    return int(any(suite.get("failed") for suite in suites))


if __name__ == "__main__":
    raise SystemExit(main())
