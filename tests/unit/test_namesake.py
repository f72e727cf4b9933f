"""Another distribution whose package is called `infinity`, in the environment of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity import namesake
from infinity.tools.doctor.accelerator import check_namesakes, examine_packages

PACKAGE = Path(infinity.__file__).parent
# An editable installation finds its package before the path.
WITHOUT_EDITABLE = (
    "import sys; sys.meta_path[:] = "
    "[finder for finder in sys.meta_path if '_editable_' not in type(finder).__module__]"
)


def install(site: Path, name: str, files: dict[str, str]) -> None:
    """A distribution of some files, as pip leaves it."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    information = site / f"{name.lower()}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def copied(site: Path) -> None:
    """The package of this tree, without what is compiled, as if it were installed at `site`."""
    (site / "infinity").mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.suffix in (".py", "") and entry.name != "__pycache__":
            (site / "infinity" / entry.name).symlink_to(entry)


def python(site: Path, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True, text=True,
    )  # fmt: skip


def test_the_own_entries_are_those_of_the_package() -> None:
    found = {entry.stem for entry in PACKAGE.iterdir() if entry.suffix in (".py", "")}
    assert {name for name in found if not name.startswith(("_", "."))} == namesake.OWN
    assert namesake.strange_entries([str(PACKAGE)]) == []


def test_an_import_names_the_other_distribution_whose_files_lie_in_the_package(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    copied(site)
    code = f"{WITHOUT_EDITABLE}; import infinity; print(infinity.__file__)"
    clean = python(site, code, tmp_path)
    assert str(site) in clean.stdout and "lie in the package" not in clean.stderr, clean.stderr
    files = {"infinity/data/datasets.py": "", "infinity/model/cpu_master.py": ""}
    install(site, "MegaTrain", files)
    mixed = python(site, code, tmp_path)
    assert "files of MegaTrain lie in the package `infinity` (data, model)" in mixed.stderr
    assert "pip uninstall MegaTrain infinity-offload" in mixed.stderr


def test_the_command_names_the_other_distribution_whose_package_python_found(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    copied(site)
    (site / "infinity" / "__init__.py").unlink()
    install(site, "MegaTrain", {"infinity/__init__.py": "", "infinity/model/cpu_master.py": ""})
    code = f"{WITHOUT_EDITABLE}; from infinity.tools.cli import main; main()"
    found = python(site, code, tmp_path)
    assert found.returncode == 1
    assert "files of MegaTrain lie in the package `infinity`, which" in found.stderr


def test_the_doctor_names_other_distributions_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    install(site, "MegaTrain", {"infinity/model/cpu_master.py": ""})
    install(site, "infinity_offload", {"infinity/api.py": ""})
    install(site, "others", {"infinite/model.py": ""})
    (here / "infinity").mkdir(parents=True)
    (here / "infinity" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(here)
    assert namesake.other_distributions() == ["MegaTrain"]
    assert namesake.other_places(PACKAGE) == [str(here / "infinity" / "__init__.py")]
    findings = {finding.subject: finding for finding in examine_packages()}
    assert findings["package infinity"].status == "missing"
    assert "MegaTrain" in findings["package infinity"].found
    assert "pip uninstall MegaTrain infinity-offload" in findings["package infinity"].remedy
    elsewhere = check_namesakes([], namesake.other_places(PACKAGE))
    assert elsewhere.status == "degraded" and str(here) in elsewhere.found
    assert check_namesakes([], []).status == "ok"
