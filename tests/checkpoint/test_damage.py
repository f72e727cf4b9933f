"""A damaged checkpoint is refused: the error names the file, and the place where it is known."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity.checkpoint.state_manifest import DIGEST_NAME, MANIFEST_NAME, SCHEMA, digest_line
from infinity.errors import ConfigError, CorruptionError, InfinityError, UnsupportedError

from .harness import assert_same, content, run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """One checkpoint of step 1, not to be changed; tests change copies."""
    directory = tmp_path_factory.mktemp("saved")
    with run("conv", directory / "swap") as each:
        each.steps(0, 1)
        each.model(5).backward()
        return each.save(directory / "checkpoints")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)
    return tmp_path / "checkpoints" / saved.name


def verified(path: Path) -> list[str]:
    (found,) = infinity.checkpoint.inspect(path, verify=True)
    assert found.is_whole == (found.faults == ())
    return list(found.faults)


def test_any_flipped_byte_is_found(saved, copy):
    """Every byte of the small files and a sample of the others, one at a time."""
    assert verified(copy) == []
    drawn = random.Random(0)
    for name, whole in content(saved).items():
        places = set(drawn.sample(range(len(whole)), min(len(whole), 40)))
        places |= {0, len(whole) - 1}
        for place in places:
            changed = bytearray(whole)
            changed[place] ^= 1 << drawn.randrange(8)
            (copy / name).write_bytes(changed)
            faults = verified(copy)
            assert faults and all(str(copy) in fault for fault in faults), (name, place)
        (copy / name).write_bytes(whole)
    assert verified(copy) == []


def test_any_flipped_byte_stops_a_load(saved, copy, tmp_path):
    """Of the manifest, headers and small state before anything has changed."""
    drawn = random.Random(1)
    with run("conv", tmp_path / "swap", seed=3) as each:
        before = each.state()
        for name, whole in content(saved).items():
            for place in (3, len(whole) // 2, len(whole) - 1):
                changed = bytearray(whole)
                changed[place] ^= 1 << drawn.randrange(8)
                (copy / name).write_bytes(changed)
                with pytest.raises(CorruptionError) as caught:
                    each.load(copy)
                assert str(copy) in str(caught.value)
                if "mixture" not in str(caught.value):
                    assert_same(before, each.state())
                else:
                    assert name.endswith(".safetensors") and place != 3
                    assert f"at offset {caught.value.offset_nbytes}" in str(caught.value)
                    (copy / name).write_bytes(whole)
                    each.load(copy)  # A good one makes it whole again.
                    before = each.state()
            (copy / name).write_bytes(whole)


@pytest.mark.parametrize("how", ["truncated", "longer", "missing", "empty"])
def test_files_of_another_length_are_found_without_reading_them(saved, copy, tmp_path, how):
    with run("conv", tmp_path / "swap", seed=3) as each:
        before = each.state()
        for name, whole in content(saved).items():
            if how == "missing":
                (copy / name).unlink()
            else:
                changes = {"truncated": whole[:-1], "longer": whole + b"\0", "empty": b""}
                (copy / name).write_bytes(changes[how])
            with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
                each.load(copy)
            (found,) = infinity.checkpoint.inspect(copy)
            assert not found.is_whole
            (copy / name).write_bytes(whole)
        assert_same(before, each.state())
        each.load(copy)


def test_a_newer_one_is_refused(copy, tmp_path):
    body = json.loads((copy / MANIFEST_NAME).read_text())
    body["schema"] = SCHEMA + 1
    changed = json.dumps(body).encode()
    (copy / MANIFEST_NAME).write_bytes(changed)
    (copy / DIGEST_NAME).write_bytes(digest_line(changed))
    with run("conv", tmp_path / "swap") as each, pytest.raises(UnsupportedError, match="upgrade"):
        each.load(copy)


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_bytes(b"x")
    with run("fp32", tmp_path / "swap") as each, pytest.raises(ConfigError, match="no checkpoint"):
        each.load(tmp_path / "foreign")
    with pytest.raises(InfinityError):
        infinity.checkpoint.inspect(tmp_path / "foreign")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from infinity.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "inspect", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_inspect_command(copy):
    done = command(str(copy.parent), "--verify")
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout and "moments" in done.stdout and "verified" in done.stdout
    (row,) = json.loads(command(str(copy), "--json").stdout)
    files = content(copy)
    size = sum(len(files[name]) for name in files if "manifest" not in name)
    assert row["step"] == 1 and row["is_whole"] and not row["is_verified"]
    assert row["nbytes"] == sum(row["nbytes_by_kind"].values()) == size
    assert {"parameters", "moments", "gradients", "buffers"} <= set(row["nbytes_by_kind"])

    name = "unit-00000.safetensors"
    (copy / name).write_bytes(files[name][:-1] + bytes([files[name][-1] ^ 1]))
    assert command(str(copy)).returncode == 0, "its length is right"
    done = command(str(copy), "--verify")
    assert done.returncode == 1 and name in done.stderr and "offset" in done.stderr
    assert command(str(copy / "nowhere")).returncode == 2
