"""A checkpoint that its user renames keeps its bytes, although the run no longer knows its name."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

import infinity

from .harness import Run, durable, run
from .test_linked import is_linked


def frozen(each: Run) -> list[str]:
    volume = infinity.engine_of(each.model).store.volume
    assert volume is not None
    return [Path(content.label).name for content in volume.frozen]


def test_a_renamed_checkpoint_stays_intact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, best = tmp_path / "checkpoints", tmp_path / "checkpoints" / "best"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        each.steps(0, 2)
        each.save(checkpoints, keep=2).rename(best)
        with caplog.at_level(logging.WARNING, "infinity"):
            for step in range(2, 7):
                each.step(step)
                each.save(checkpoints, keep=2)
                assert infinity.checkpoint.inspect(best, verify=True)[0].is_intact, step
        warned = [record for record in caplog.records if "has lost its name" in record.message]
        assert len(warned) == 1 and "step-00000002" in warned[0].message
        assert all(
            found.is_intact for found in infinity.checkpoint.inspect(checkpoints, verify=True)
        )
        assert "step-00000002" in frozen(each)
        shutil.rmtree(best)
        each.step(7)
        each.save(checkpoints, keep=1)
        assert frozen(each) == ["step-00000008"], "its links are gone, and so is its content"
        assert is_linked(each.save(checkpoints, step=9, keep=2))


def test_the_state_of_a_renamed_checkpoint_is_that_of_its_step(tmp_path: Path) -> None:
    checkpoints, best = tmp_path / "checkpoints", tmp_path / "best"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        each.steps(0, 2)
        path = each.save(checkpoints, keep=2)
        expected = each.state()
        path.rename(best)
        for step in range(2, 5):
            each.step(step)
            each.save(checkpoints, keep=2)
    with run("bf16", tmp_path / "again", seed=4) as resumed:
        resumed.load(best)
        state = resumed.state()
    assert all((value == state[name]).all() for name, value in expected.items())


def test_a_later_checkpoint_of_the_same_name_goes_alone(tmp_path: Path) -> None:
    checkpoints, best = tmp_path / "checkpoints", tmp_path / "best"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        each.steps(0, 2)
        each.save(checkpoints).rename(best)
        each.step(2)
        each.save(checkpoints, step=2)
        for step in range(3, 6):
            each.step(step)
            each.save(checkpoints, step=step, keep=1)
            infinity.engine_of(each.model).flush()
            assert infinity.checkpoint.inspect(best, verify=True)[0].is_intact, step


def test_a_checkpoint_that_cannot_be_examined_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        each.steps(0, 1)
        path = each.save(checkpoints, keep=2)
        real = os.lstat

        def refused(name, **options):
            if Path(name) == path:
                raise PermissionError(13, "Permission denied")
            return real(name, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", refused)
            each.step(1)
            each.save(checkpoints, step=2)
        assert path.name in frozen(each)
        each.step(2)
        infinity.engine_of(each.model).flush()
        assert infinity.checkpoint.inspect(path, verify=True)[0].is_intact


def copy_by_links(path: Path, copy: Path) -> Path:
    """`cp -al`."""
    shutil.copytree(path, copy, copy_function=os.link)
    return copy


@pytest.mark.parametrize("keep", [1, 2])
def test_a_copy_by_hard_links_stays_intact_when_the_original_is_pruned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    checkpoints, backup = tmp_path / "checkpoints", tmp_path / "backup"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=keep)) as each:
        each.steps(0, 2)
        copy_by_links(each.save(checkpoints, keep=keep), backup)
        expected = each.state()
        with caplog.at_level(logging.WARNING, "infinity"):
            for step in range(2, 8):
                each.step(step)
                each.save(checkpoints, keep=keep)
                infinity.engine_of(each.model).flush()
                assert infinity.checkpoint.inspect(backup, verify=True)[0].is_intact, step
        assert [r for r in caplog.records if "copy by hard links" in r.message]
        assert all(
            found.is_intact for found in infinity.checkpoint.inspect(checkpoints, verify=True)
        )
        shutil.rmtree(backup)
        each.step(8)
        each.save(checkpoints, step=9, keep=keep)
        each.step(9)
        assert is_linked(each.save(checkpoints, step=10, keep=keep)), "the space is free again"
        copy_by_links(checkpoints / "step-00000010", backup)
        expected = each.state()
    with run("bf16", tmp_path / "again", seed=4) as resumed:
        resumed.load(backup)
        state = resumed.state()
    assert all((value == state[name]).all() for name, value in expected.items())


def test_a_backup_that_follows_the_newest_checkpoint_is_intact_at_every_step(
    tmp_path: Path,
) -> None:
    """The links of one copy go when those of the next come, so their number says nothing."""
    checkpoints, backup = tmp_path / "checkpoints", tmp_path / "backup"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=1)) as each:
        for step in range(8):
            each.step(step)
            path = each.save(checkpoints, keep=1)
            infinity.engine_of(each.model).flush()
            if backup.exists():
                assert infinity.checkpoint.inspect(backup, verify=True)[0].is_intact, step
                shutil.rmtree(backup)
            if step % 2 == 0:
                copy_by_links(path, backup)


def test_a_copy_of_a_checkpoint_that_was_renamed_stays_intact_without_it(tmp_path: Path) -> None:
    checkpoints, best, backup = (tmp_path / name for name in ("checkpoints", "best", "backup"))
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        each.steps(0, 2)
        each.save(checkpoints, keep=2).rename(best)
        copy_by_links(best, backup)
        shutil.rmtree(best)
        for step in range(2, 7):
            each.step(step)
            each.save(checkpoints, keep=2)
            infinity.engine_of(each.model).flush()
            assert infinity.checkpoint.inspect(backup, verify=True)[0].is_intact, step


def test_checkpoints_beside_a_renamed_one_are_released(tmp_path: Path) -> None:
    """Their own links are all known, because the kernel tells where the renamed one is."""
    checkpoints, best = tmp_path / "checkpoints", tmp_path / "best"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        each.steps(0, 2)
        each.save(checkpoints, keep=2).rename(best)
        for step in range(2, 6):
            each.step(step)
            each.save(checkpoints, keep=1)
            assert len(frozen(each)) <= 2, step
            assert infinity.checkpoint.inspect(best, verify=True)[0].is_intact, step
