"""The reference of a checkpoint to the files of its base is under the manifest, and is ours."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint.run.directory import remove_own
from infinity.checkpoint.run.references import SHARDS_NAME, directory_of_base
from infinity.errors import CorruptionError
from tests.parity.in_place import Base, config_of, over, train
from tests.support.damaged import edit_manifest

FORGOTTEN = "the manifest does not name it"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base("deepseek-int4", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def saved(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with over(base, config_of(directory)) as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-2)
        train(model, optimizer)
        return infinity.checkpoint.save(directory / "runs", model, optimizer)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "runs" / saved.name)


def loaded(copy: Path, base: Base, directory: Path) -> None:
    with over(base, config_of(directory)) as (model, _):
        infinity.checkpoint.load(copy, model, infinity.AdamW(model, lr=1e-2))


def other_digit(copy: Path) -> None:
    """One digit of a checksum, or of a length where there are none."""
    content = (copy / SHARDS_NAME).read_text()
    at = [match.start() for match in re.finditer(r"[0-9](?=\s*\])", content)][-1]
    digit = str((int(content[at]) + 1) % 10)
    (copy / SHARDS_NAME).write_text(content[:at] + digit + content[at + 1 :])


def forget(copy: Path) -> None:
    """Another manifest, which has a right digest and does not name the reference."""

    def edit(body: dict[str, Any]) -> None:
        body["files"] = [file for file in body["files"] if file["name"] != SHARDS_NAME]

    edit_manifest(copy, edit)


def test_a_reference_that_is_whole_is_loaded(copy: Path, base: Base, tmp_path: Path) -> None:
    loaded(copy, base, tmp_path)
    assert directory_of_base(copy) is not None


@pytest.mark.parametrize(("change", "said"), [(other_digit, "SHA-256"), (forget, FORGOTTEN)])
def test_a_reference_that_is_not_the_manifests_is_refused(
    copy: Path, base: Base, tmp_path: Path, change, said: str
) -> None:
    change(copy)
    with pytest.raises(CorruptionError, match=said) as caught:
        loaded(copy, base, tmp_path)
    assert caught.value.path == str(copy / SHARDS_NAME)
    with pytest.raises(CorruptionError, match=said):
        directory_of_base(copy)
    (found,) = infinity.checkpoint.inspect(copy, verify=True)
    assert any(SHARDS_NAME in fault for fault in found.faults)


def test_the_reference_of_a_rank_that_is_not_named_is_refused(copy: Path) -> None:
    (copy / "rank-00000").mkdir()
    shutil.copy(copy / SHARDS_NAME, copy / "rank-00000")
    with pytest.raises(CorruptionError, match=FORGOTTEN):
        directory_of_base(copy)


def test_removal_takes_the_reference(copy: Path) -> None:
    assert remove_own(copy.parent) == []
    assert not copy.parent.exists()
