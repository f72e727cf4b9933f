#!/usr/bin/env python3
"""The files of tests that a change touches: prints those of all files that differ from a commit.

    scripts/affected_tests.py [REF]    what has changed since REF, or since main

A file of tests belongs to the source files that it imports, itself or by a helper of the tests, and
to those that it is named after. A source file that no test imports has the tests of its folder.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imported(path: Path, known: dict[Path, set[Path]]) -> set[Path]:
    """Source files and packages that a file of tests imports, itself or by other such files."""
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
            if not file.is_file():
                file = place / "__init__.py"
            if file.is_relative_to(ROOT / "tests") and file.is_file():
                found |= imported(file, known)
            elif file.is_relative_to(ROOT / "infinity") and file.is_file():
                found.add(file)
    return found


def affected(changed: list[Path]) -> set[Path]:
    known: dict[Path, set[Path]] = {}
    of_file, of_folder = defaultdict[Path, set[Path]](set), defaultdict[Path, set[Path]](set)
    for tests in (ROOT / "tests").rglob("test_*.py"):
        for source in imported(tests, known):
            of_file[source].add(tests)
            of_folder[source.parent].add(tests)
    found = {path for path in changed if path.name.startswith("test_") and path.is_file()}
    for path in changed:
        if path.suffix == ".py" and path.is_relative_to(ROOT / "infinity"):
            tests = of_file.get(path) or of_folder.get(path.parent, set())
            found |= tests | set((ROOT / "tests").rglob(f"test_{path.stem}*.py"))
            if not tests:
                print(f"no test imports {path.relative_to(ROOT)} or its folder", file=sys.stderr)
    return found


def main() -> None:
    git, reference = ["git", "-C", str(ROOT)], sys.argv[1] if len(sys.argv) > 1 else "main"
    names = subprocess.check_output([*git, "diff", "--name-only", reference], text=True)
    names += subprocess.check_output(
        [*git, "ls-files", "--others", "--exclude-standard"], text=True
    )
    found = affected([ROOT / name for name in names.splitlines()])
    print(*sorted(str(path.relative_to(ROOT)) for path in found), sep="\n")


if __name__ == "__main__":
    main()
