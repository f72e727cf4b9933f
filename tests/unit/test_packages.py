"""What the package asks for, and what is told to people who install it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from infinity.config.extras import TRIED, release_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def floors(requirements: list[str]) -> dict[str, str]:
    found = (re.match(r"([\w-]+)(?:>=|==)([\d.]+)", each) for each in requirements)
    return {each[1]: each[2].rstrip(".") for each in found if each}


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The lower bounds of each environment of the matrix."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import matrix

    return {name: floors(needed) for name, needed in matrix.ENVIRONMENTS.items()}


def test_every_lower_bound_is_one_that_the_matrix_installs(
    environments: dict[str, dict[str, str]],
) -> None:
    for name, bound in floors(PROJECT["project"]["dependencies"]).items():
        if name == "typing-extensions":  # Others of the list ask for a newer one.
            continue
        assert (environments["bare"][name] + ".").startswith(bound + "."), name


def test_the_releases_that_are_called_tried_are_those_of_the_matrix(
    environments: dict[str, dict[str, str]],
) -> None:
    for package, tried in TRIED.items():
        releases = {release_of(each[package]) for each in environments.values() if package in each}
        assert (min(releases), max(releases)) == (tried.oldest, tried.newest), package


def test_every_dependency_is_imported() -> None:
    modules = {"pyyaml": "yaml", "cffi": "_cffi_backend", "typing-extensions": "typing_extensions"}
    sources = "\n".join(each.read_text() for each in (ROOT / "infinity").rglob("*.py"))
    for requirement in PROJECT["project"]["dependencies"]:
        name = re.split(r"[<>=]", requirement)[0]
        if name == "cffi":
            continue  # By the compiled binding (infinity.uring).
        module = modules.get(name, name.replace("-", "_"))
        assert re.search(rf"^\s*(import|from) {module}\b", sources, re.MULTILINE), name


def test_the_name_on_the_index_is_said_where_people_would_guess_wrong() -> None:
    for document in ("README.md", "docs/TROUBLESHOOTING.md"):
        file = ROOT / document
        if file.exists():
            assert "infinity-offload" in file.read_text(), document


@pytest.mark.skipif(not Path("/usr/bin/cmake").exists(), reason="no cmake outside an environment")
def test_a_build_without_a_compiler_names_the_remedy(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cmake", "make", "ninja"):
        if (Path("/usr/bin") / name).exists():
            (tools / name).symlink_to(f"/usr/bin/{name}")
    found = subprocess.run(
        [tools / "cmake", "-S", ROOT, "-B", tmp_path / "build"],
        env={"PATH": str(tools), "HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode != 0
    assert "apt-get install g++" in found.stderr and "infinity-offload" in found.stderr
