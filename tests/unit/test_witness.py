"""`make witness` finds a difference, and none where there is none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "witness.py"


@pytest.fixture(scope="module")
def witness() -> Any:
    spec = importlib.util.spec_from_file_location("witness", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_is_equal_to_itself_and_a_digest_that_differs_is_named(
    witness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(witness, "RECORD", tmp_path / "witness.json")
    names = ("early-clipped", "one05")
    arguments = [word for name in names for word in ("--only", name)]
    assert witness.main([*arguments, "--write"]) == 0
    record = json.loads(witness.RECORD.read_text())
    assert len(record["runs"]) == len(names)
    record["runs"]["early-clipped"]["transfers"] = "another order"
    witness.RECORD.write_text(json.dumps(record))
    capsys.readouterr()
    assert witness.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "early-clipped: DIFFERENT: transfers (" in printed
    assert printed.count(": equal (") == 1 and printed.endswith("2 runs, 1 differ\n")
    record["runs"]["early-clipped"]["losses"] = "those of another processor"
    witness.RECORD.write_text(json.dumps(record | {"made_by": "another processor"}))
    assert witness.main(arguments[:2]) == 1, "its bits are not compared, the order of requests is"
    printed = capsys.readouterr().out
    assert "those of another processor" in printed
    assert "early-clipped: DIFFERENT: transfers (" in printed
