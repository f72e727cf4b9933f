"""A model in the hub's local cache: links to blobs, by repository id or by its folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.config.hub import in_hub_cache
from infinity.tools.cli import app

from .test_text_of_images import saved, trained


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of links, as `hf download` leaves it."""
    folder = tmp_path / "hub" / "models--owner--tiny"
    snapshot, blobs = folder / "snapshots" / "0a1b2c", folder / "blobs"
    for made in (snapshot, blobs, folder / "refs"):
        made.mkdir(parents=True)
    (folder / "refs/main").write_text("0a1b2c")
    saved("qwen3_vl", tmp_path / "made")
    for number, file in enumerate(sorted((tmp_path / "made").iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_snapshot_is_found_by_its_id_and_by_its_folder(snapshot: Path, tmp_path: Path) -> None:
    assert in_hub_cache(Path("owner/tiny")) == in_hub_cache(tmp_path / "owner/tiny") == snapshot
    assert in_hub_cache(snapshot.parents[1]) == snapshot
    for path in (snapshot, Path("owner/other"), Path("tiny"), tmp_path):
        assert in_hub_cache(path) == path
    (snapshot.parents[1] / "refs/main").write_text("../../elsewhere")
    assert in_hub_cache(Path("owner/tiny")) == Path("owner/tiny")
    (tmp_path / "owner/tiny").mkdir(parents=True)
    assert in_hub_cache(Path("owner/tiny")) == Path("owner/tiny"), "what exists is what is meant"


def test_a_repository_id_is_planned_and_trained_from_the_cache(
    snapshot: Path, tmp_path: Path
) -> None:
    said = CliRunner().invoke(
        app, ["plan", "--model", "owner/tiny", "--hardware", "dgx-2", "--json"]
    )
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["model"]["num_params"] > 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The PEFT config's `base_model_name_or_path` was renamed")
        output = trained(Path("owner/tiny"), tmp_path)
    saved_config = json.loads((output / "adapter_config.json").read_text())
    assert saved_config["base_model_name_or_path"] == "owner/tiny", "which others can find"
    assert saved_config["revision"] == snapshot.name
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace(str(snapshot), "owner/tiny"))
    assert (
        CliRunner().invoke(app, ["plan", str(file), "--hardware", "rtx4090-1nvme"]).exit_code == 0
    )
