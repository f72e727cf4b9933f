"""`infinity spread`: the shards of a directory over several drives, and back."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from infinity.errors import ConfigError, StorageError
from infinity.tools.cli import app
from infinity.tools.convert import spread as module
from infinity.tools.convert.spread import (
    ORIGINALS_NAME,
    RECORD_NAME,
    plan_gather,
    plan_spread,
    run_gather,
    run_spread,
)

NAMES = [f"model-{index:05d}-of-00011.safetensors" for index in range(1, 12)]


@pytest.fixture
def drives() -> Iterator[list[Path]]:
    """Directories on two file systems: one of the test's, two in memory."""
    temporary = tempfile.TemporaryDirectory
    with temporary(dir="/dev/shm") as memory, temporary() as other:
        found = [Path(memory) / "a", Path(memory) / "b", Path(other) / "c"]
        for path in found:
            path.mkdir()
        assert found[0].stat().st_dev != found[2].stat().st_dev
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for index, name in enumerate(NAMES):
        save_file({f"w{index}": torch.full((64, 16), float(index))}, directory / name)
    (directory / "config.json").write_text("{}")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in NAMES}


def listing(*directories: Path) -> list[str]:
    return sorted(str(path) for each in directories for path in each.rglob("*"))


def spread(directory: Path, over: list[Path], mode: Any = "move") -> None:
    run_spread(plan_spread(directory, over, mode))


@pytest.mark.parametrize("mode", ["move", "copy"])
def test_shards_take_turns_over_the_drives_and_come_back(model, drives, mode) -> None:
    before, files = contents(model), listing(model)
    times = [(model / name).stat().st_mtime_ns for name in NAMES]
    spread(model, drives, mode)
    assert contents(model) == before
    assert [(model / name).stat().st_mtime_ns for name in NAMES] == times
    for index, name in enumerate(NAMES):
        assert (model / name).resolve() == drives[index % 3] / "model" / name
    assert (model / ORIGINALS_NAME).exists() == (mode == "copy")
    assert not (model / "config.json").is_symlink()
    run_gather(plan_gather(model))
    assert contents(model) == before and listing(model) == files
    assert not any((model / name).is_symlink() for name in NAMES)
    assert listing(*drives) == []


def test_again_is_nothing_to_do(model, drives) -> None:
    spread(model, drives)
    facts = [(model / name).stat().st_ino for name in NAMES]
    plan = plan_spread(model, drives, "move")
    assert plan.moved_nbytes == 0 and all(move.is_done for move in plan.moves)
    run_spread(plan)
    assert [(model / name).stat().st_ino for name in NAMES] == facts


def test_over_other_drives_the_former_places_are_left(model, drives) -> None:
    before = contents(model)
    spread(model, drives[:2])
    spread(model, [drives[2], model])
    assert contents(model) == before
    assert listing(*drives[:2]) == []
    assert {(model / name).is_symlink() for name in NAMES[1::2]} == {False}
    run_gather(plan_gather(model))
    assert contents(model) == before and listing(*drives) == []


def test_uneven_shards_are_balanced_by_bytes(tmp_path, drives) -> None:
    for index, rows in enumerate([100, 10, 10, 10]):
        save_file({"w": torch.zeros(rows, 64)}, tmp_path / f"{index}.safetensors")
    moves = plan_spread(tmp_path, drives[:2], "move").moves
    assert [drives.index(move.place.parents[1]) for move in moves] == [0, 1, 1, 1]


class Killed(BaseException):
    """What no `except` of the program catches: the process is gone."""


@pytest.mark.parametrize("mode", ["move", "copy"])
@pytest.mark.parametrize("direction", ["spread", "gather"])
def test_killed_between_any_two_calls_it_loads_and_goes_on(
    model, drives, mode, direction, monkeypatch
) -> None:
    """Every call that changes a file system may be the last one."""
    for name in NAMES[3:]:
        (model / name).unlink()
    names = NAMES[:3]
    before = {name: (model / name).read_bytes() for name in names}
    if direction == "gather":
        spread(model, drives, mode)
    saved = model.parent / "saved"
    calls = {"left": 0, "made": 0}

    def counted(plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if calls["left"] == 0:
                raise Killed
            calls["left"] -= 1
            calls["made"] += 1
            return plain(*args, **options)

        return call

    def act() -> None:
        if direction == "spread":
            spread(model, drives, mode)
        elif (model / RECORD_NAME).exists():
            run_gather(plan_gather(model))

    shutil.copytree(model, saved, symlinks=True)
    for limit in range(1000):
        with monkeypatch.context() as patch:
            for name in ("replace", "link", "symlink", "fsync", "unlink", "rmdir", "mkdir"):
                patch.setattr(module.os, name, counted(getattr(os, name)))
            calls["left"] = limit
            try:
                act()
                is_whole = True
            except Killed:
                is_whole = False
        assert {name: (model / name).read_bytes() for name in names} == before, limit
        act()
        assert {name: (model / name).read_bytes() for name in names} == before, limit
        hidden = [path for path in listing(model, *drives) if "partial" in path]
        assert hidden == [], limit
        is_spread = [(model / name).is_symlink() for name in names]
        assert is_spread == [direction == "spread"] * 3, limit
        if is_whole:
            break
        if direction == "spread":
            run_gather(plan_gather(model))
            assert listing(*drives) == []
        else:
            spread(model, drives, mode)
    assert limit > 10


def test_a_drive_that_is_too_small_is_named_before_anything_is_touched(
    model, drives, monkeypatch
) -> None:
    before = listing(model, *drives)

    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(module.os, "statvfs", lambda path: Full)
    with pytest.raises(StorageError, match="12.0 KiB free") as caught:
        plan_spread(model, drives, "move")
    assert str(caught.value.path) in {str(drives[0]), str(drives[1])}
    assert listing(model, *drives) == before


def test_bad_folders_and_directories_are_refused_by_name(model, drives, tmp_path) -> None:
    before = listing(model, *drives)
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        plan_spread(model, [tmp_path / "nowhere"], "move")
    with pytest.raises(ConfigError, match="named twice"):
        plan_spread(model, [drives[0], drives[0]], "move")
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        plan_spread(drives[0], drives[1:], "move")
    with pytest.raises(ConfigError, match="was not spread"):
        plan_gather(model)
    (drives[0] / "model").mkdir()
    (drives[0] / "model" / NAMES[0]).write_bytes(b"another")
    with pytest.raises(ConfigError, match="is another file"):
        plan_spread(model, drives, "move")
    (drives[0] / "model" / NAMES[0]).unlink()
    (drives[0] / "model").rmdir()
    assert listing(model, *drives) == before


def test_links_of_somebody_else_are_copied_but_not_moved(model, drives, tmp_path) -> None:
    """As in the cache of the Hugging Face hub: the files are links to blobs."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in NAMES:
        (model / name).rename(blobs / name)
        (model / name).symlink_to(Path("..") / "blobs" / name)
    before = contents(model)
    with pytest.raises(ConfigError, match="use --copy"):
        plan_spread(model, drives, "move")
    spread(model, drives, "copy")
    assert contents(model) == before and (model / NAMES[0]).resolve().parent.name == "model"
    run_gather(plan_gather(model))
    assert contents(model) == before
    assert os.readlink(model / NAMES[0]) == f"../blobs/{NAMES[0]}"
    assert listing(*drives) == []


def test_the_command_prints_the_plan_and_carries_it_out(model, drives) -> None:
    over = [str(path) for path in drives]
    before = listing(model, *drives)
    told = CliRunner().invoke(app, ["spread", str(model), "--over", *over, "--dry-run"])
    assert told.exit_code == 0, told.output
    assert f"{NAMES[0]}  4.1 KiB  moves  {drives[0]}/model" in told.stdout
    assert listing(model, *drives) == before
    done = CliRunner().invoke(app, ["spread", str(model), "--over", *over, "--json"])
    table = json.loads(done.stdout)
    assert table["is_done"] and [row["name"] for row in table["shards"]] == NAMES
    assert len(table["folders"]) == 3
    assert load_file(model / NAMES[4])["w4"][0, 0] == 4
    again = CliRunner().invoke(app, ["spread", str(model), "--gather"])
    assert again.exit_code == 0 and listing(model, *drives) == before
    wrong = CliRunner().invoke(app, ["spread", str(model), *over])
    assert wrong.exit_code == 2 and "expected --over" in wrong.stderr
