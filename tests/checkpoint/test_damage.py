"""A damaged checkpoint is refused: the error names the file, and the place where it is known."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import infinity
from infinity.checkpoint.run.directory import find_checkpoint, remove_own
from infinity.checkpoint.run.format import DIGEST_NAME, MANIFEST_NAME, SCHEMA
from infinity.checkpoint.run.load import read_program
from infinity.errors import ConfigError, CorruptionError, InfinityError, UnsupportedError
from tests.support.bits import assert_same
from tests.support.damaged import edit_manifest, replace_file
from tests.support.forked import COMMAND, run_script

from .harness import content, run, table


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
    assert found.is_intact == (found.faults == ())
    return list(found.faults)


def test_state_in_a_checkpoint_is_as_private_as_in_swap_files(saved):
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in saved.rglob("*")}
    assert modes and set(modes.values()) == {0o600}
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    assert stat.S_IMODE(saved.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["file", "dangling link", "FIFO"])
def test_an_entry_named_as_a_checkpoint_that_is_no_directory_is_a_fault(copy, kind):
    fake = copy.parent / "step-00000009"
    if kind == "FIFO":
        os.mkfifo(fake)
    else:
        fake.touch() if kind == "file" else fake.symlink_to("nowhere")
    whole, found = infinity.checkpoint.inspect(copy.parent)
    assert whole.is_intact and not found.is_intact
    assert found.path == fake and "expected a directory" in found.faults[0]


@pytest.mark.parametrize("name", [MANIFEST_NAME, DIGEST_NAME, "program.pt", "buffers.safetensors"])
def test_a_fifo_in_place_of_a_file_is_a_fault_and_is_not_waited_for(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    (fault,) = verified(copy)
    assert name in fault and "FIFO" in fault


def test_small_state_with_a_right_digest_that_torch_cannot_load_is_a_fault(copy):
    """A forger knows how to compute a SHA-256."""
    replace_file(copy, "program.pt", b"no program")
    (fault,) = verified(copy)
    assert "program.pt" in fault and "torch" in fault
    with pytest.raises(CorruptionError, match=r"program\.pt.*torch"):
        read_program(copy)


def test_removal_takes_what_is_ours_and_leaves_the_rest(copy):
    directory = copy.parent
    shutil.copytree(copy, directory / ".step-00000009.partial")
    shutil.copytree(copy, directory / "step-00000012")
    (directory / "step-00000012" / "notes.txt").write_text("mine")
    (directory / "mine").mkdir()
    (directory / "step-00000013").symlink_to(directory / "mine")
    (directory / "mine" / MANIFEST_NAME).write_text("a copy")
    stays = remove_own(directory)
    assert sorted(each.name for each in stays) == [
        "mine", "step-00000012.foreign", "step-00000013"
    ]  # fmt: skip
    assert sorted(path.name for path in directory.rglob("*")) == [
        MANIFEST_NAME, "mine", "notes.txt", "step-00000012.foreign", "step-00000013"
    ]  # fmt: skip


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
@pytest.mark.parametrize("form", ["copied", "linked"])
def test_files_of_another_length_are_found_without_reading_them(saved, linked, tmp_path, form, how):
    """Of a linked file what counts is where the state in it ends."""
    original, kind = (saved, "conv") if form == "copied" else (linked, "frozen")
    copy = shutil.copytree(original, tmp_path / "checkpoints" / original.name)
    runs = [run for row in table(linked) for run in row["runs"]] if form == "linked" else []
    with run(kind, tmp_path / "swap", seed=3) as each:
        before = each.state()
        for name, whole in content(original).items():
            end = max((run[1] + run[2] for run in runs if run[0] == name), default=len(whole))
            if how == "missing":
                (copy / name).unlink()
            elif how == "longer" and name.endswith(".swap"):
                continue
            else:
                changes = {"truncated": whole[: end - 1], "longer": whole + b"\0", "empty": b""}
                (copy / name).write_bytes(changes[how])
            with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
                each.load(copy)
            (found,) = infinity.checkpoint.inspect(copy)
            assert not found.is_intact
            (copy / name).write_bytes(whole)
        assert_same(before, each.state())
        each.load(copy)


def test_a_newer_one_is_refused(copy, tmp_path):
    edit_manifest(copy, lambda body: body.update(schema=SCHEMA + 1))
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
    return run_script(COMMAND, "inspect", *arguments)


def test_the_output_of_a_run_stands_for_the_checkpoints_in_it(copy, tmp_path):
    with pytest.raises(ConfigError, match="is no checkpoint and has none"):
        find_checkpoint(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="It is a model, which `infinity plan --model"):
        find_checkpoint(tmp_path)
    (tmp_path / "infinity-run.json").touch()
    assert find_checkpoint(tmp_path) == copy


def test_inspect_command(copy):
    done = command(str(copy.parent), "--verify")
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout and "moments" in done.stdout and "verified" in done.stdout
    (row,) = json.loads(command(str(copy), "--json").stdout)
    files = content(copy)
    size = sum(len(files[name]) for name in files if "manifest" not in name)
    assert row["step"] == 1 and row["is_intact"] and not row["is_verified"]
    assert row["nbytes"] == sum(row["nbytes_by_kind"].values()) == size
    assert {"parameters", "moments", "gradients", "buffers"} <= set(row["nbytes_by_kind"])

    name = "unit-00000.safetensors"
    (copy / name).write_bytes(files[name][:-1] + bytes([files[name][-1] ^ 1]))
    assert command(str(copy)).returncode == 0, "its length is right"
    done = command(str(copy), "--verify")
    assert done.returncode == 1 and name in done.stderr and "offset" in done.stderr
    assert command(str(copy / "nowhere")).returncode == 2
