"""The notebooks run, and show the tables of memory that are in their files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def tables_of(cell: dict) -> list[str]:
    shown = "".join(each.get("data", {}).get("text/html", "") for each in cell.get("outputs", ()))
    return re.findall(r"<table>.*?</table>", shown)


def test_notebooks_run_and_show_the_memory_by_tier_of_their_files(tmp_path: Path) -> None:
    """In one kernel, because most of the time is that of imports; names do not stay."""
    shutil.copytree(
        ROOT / "examples",
        tmp_path / "examples",
        ignore=shutil.ignore_patterns("run", "__pycache__"),
    )
    folder = tmp_path / "notebooks"
    folder.mkdir()
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), timeout=240, resources={"metadata": {"path": str(folder)}}
    )
    assert len(NOTEBOOKS) == 3
    with client.setup_kernel():
        for path in NOTEBOOKS:
            kept, run = nbformat.read(path, 4), nbformat.read(path, 4)
            client.nb.cells = [nbformat.v4.new_code_cell("%reset -f"), *run.cells]
            for index, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, index)  # Raises for an error of the cell.
            assert any(tables_of(cell) for cell in kept.cells), path.name
            for cell, again in zip(kept.cells, run.cells, strict=True):
                assert tables_of(again) == tables_of(cell), path.name
