#!/usr/bin/env python3
"""Which tests run a source file: writes and reads tests/INDEX.json (source file -> files of tests).

    scripts/test_index.py tests/storage ...   runs these tests, and writes what they have called
    scripts/test_index.py --affected [REF]    the tests of what has changed since REF, or since main

A file counts when one of its functions is called, in any thread, while a test of a file runs. What
another process runs is not seen: there the imports of the file of tests count, and those of the
helpers that it imports. Runs of folders add to each other; a file of tests that runs again replaces
what it had.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "tests" / "INDEX.json"
PACKAGE = str(ROOT / "infinity") + os.sep


class Calls:
    """A plugin of pytest that notes the source files whose functions each file of tests calls."""

    def __init__(self) -> None:
        self.sources: defaultdict[str, set[str]] = defaultdict(set)
        self._codes: set[CodeType] = set()  # Of the present file of tests.
        self._tests = ""

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in self._codes:
            self._codes.add(code)
            if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
                self.sources[self._tests].add(os.path.relpath(code.co_filename, ROOT))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        tests = os.path.relpath(item.path, ROOT)
        if tests != self._tests:
            self._tests, self._codes = tests, set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def imported(path: Path, known: dict[Path, set[str]]) -> set[str]:
    """Source files that a file of tests imports, itself or through other files of tests."""
    if path in known:
        return known[path]
    known[path] = found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = path.parents[node.level - 1] if node.level else ROOT
        module = base.joinpath(*(node.module or "").split("."))
        for place in (module, *(module / alias.name for alias in node.names)):
            file = place.with_suffix(".py")
            if file.is_file() and file.is_relative_to(ROOT / "tests"):
                found |= imported(file, known)
            elif file.is_file() and file.is_relative_to(ROOT / "infinity"):
                found.add(str(file.relative_to(ROOT)))
    return found


def write(arguments: list[str]) -> int:
    calls = Calls()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[calls])
    index: defaultdict[str, set[str]] = defaultdict(set)
    if INDEX.exists():
        for source, tests in json.loads(INDEX.read_text()).items():
            index[source] = {each for each in tests if each not in calls.sources}
    known: dict[Path, set[str]] = {}
    for tests, sources in calls.sources.items():
        for source in sources | imported(ROOT / tests, known):
            index[source].add(tests)
    kept = {source: sorted(tests) for source, tests in sorted(index.items()) if tests}
    INDEX.write_text(json.dumps(kept, indent=1) + "\n")
    return int(code)


def affected(reference: str) -> list[str]:
    """Files of tests of what has changed, and those that have changed themselves."""
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.check_output([*git, "diff", "--name-only", reference], text=True).split()
    new = ["ls-files", "--others", "--exclude-standard"]
    changed += subprocess.check_output([*git, *new], text=True).split()
    if not INDEX.exists():
        raise SystemExit(f"{INDEX} is not there: scripts/test_index.py makes it, in an hour or two")
    index = json.loads(INDEX.read_text())
    for name in changed:
        if name.startswith("infinity/") and name.endswith(".py") and name not in index:
            print(f"{name} is not in the index", file=sys.stderr)
    found = {tests for source in changed for tests in index.get(source, ())}
    found |= {name for name in changed if Path(name).name.startswith("test_")}
    return sorted(name for name in found if (ROOT / name).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--affected", nargs="?", const="main", metavar="REF")
    options, rest = parser.parse_known_args()
    if options.affected is None:
        return write(rest or [str(ROOT / "tests")])
    print(*affected(options.affected), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
