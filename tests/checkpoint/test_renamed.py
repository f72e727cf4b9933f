"""A checkpoint that its user renames or copies by links keeps its bytes, although the run no longer
knows its name."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import infinity

from .harness import Run, durable, has_state, is_intact, is_linked, run


@contextmanager
def saving(tmp_path: Path, keep: int = 2, **options: Any) -> Iterator[tuple[Run, Path]]:
    """A run of two steps, and its directory of checkpoints."""
    checkpoints = tmp_path / "checkpoints"
    section = durable(checkpoints, keep=keep, **options)
    with run("bf16", tmp_path / "swap", checkpoint=section) as each:
        each.steps(0, 2)
        yield each, checkpoints


def go_on(
    each: Run, checkpoints: Path, steps: Iterable[int], watched: Path, **options: Any
) -> None:
    """Takes and saves each of the steps, after which `watched` is intact."""
    for step in steps:
        each.step(step)
        each.save(checkpoints, **options)
        infinity.engine_of(each.model).flush()
        assert is_intact(watched), step


def frozen(each: Run) -> list[str]:
    volume = infinity.engine_of(each.model).store.volume
    assert volume is not None
    return [Path(content.label).name for content in volume.frozen]


def copy_by_links(path: Path, copy: Path) -> Path:
    """`cp -al`."""
    return shutil.copytree(path, copy, copy_function=os.link)


@pytest.mark.parametrize("leaves_link", [False, True])
def test_a_renamed_checkpoint_stays_intact(
    leaves_link: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path) as (each, checkpoints):
        path = each.save(checkpoints, keep=2)
        best = path.rename(checkpoints / "best")
        if leaves_link:
            path.symlink_to(best)
        with caplog.at_level(logging.WARNING, "infinity"):
            go_on(each, checkpoints, range(2, 7), best, keep=2)
        warned = [record for record in caplog.records if "has lost its name" in record.message]
        assert len(warned) == 1 and "step-00000002" in warned[0].message
        assert is_intact(checkpoints) and "step-00000002" in frozen(each)
        shutil.rmtree(best)
        each.step(7)
        each.save(checkpoints, keep=1)
        assert frozen(each) == ["step-00000008"], "its links are gone, and so is its content"
        assert is_linked(each.save(checkpoints, step=9, keep=2))


def test_the_state_of_a_renamed_checkpoint_is_that_of_its_step(tmp_path: Path) -> None:
    """Checkpoints beside it are released: the kernel tells where it is, so its links are known."""
    with saving(tmp_path) as (each, checkpoints):
        expected = each.state()
        best = each.save(checkpoints, keep=2).rename(tmp_path / "best")
        for step in range(2, 6):
            go_on(each, checkpoints, [step], best, keep=1 + (step < 4))
            assert len(frozen(each)) <= 2 + (step < 4), step
    has_state(tmp_path / "again", best, expected)


def test_a_later_checkpoint_of_the_same_name_goes_alone(tmp_path: Path) -> None:
    with saving(tmp_path) as (each, checkpoints):
        best = each.save(checkpoints).rename(tmp_path / "best")
        each.step(2)
        each.save(checkpoints, step=2)
        for step in range(3, 6):
            go_on(each, checkpoints, [step], best, step=step, keep=1)


def test_a_checkpoint_that_cannot_be_examined_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(tmp_path) as (each, checkpoints):
        path = each.save(checkpoints, keep=2)
        real = os.lstat

        def refused(name: Any, **options: Any) -> os.stat_result:
            if Path(name) == path:
                raise PermissionError(13, "Permission denied")
            return real(name, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", refused)
            each.step(2)
            each.save(checkpoints, step=3)
        assert path.name in frozen(each)
        each.step(3)
        infinity.engine_of(each.model).flush()
        assert is_intact(path)


@pytest.mark.parametrize(("keep", "is_commit"), [(1, False), (2, False), (2, True)])
def test_a_copy_by_hard_links_stays_intact_when_the_original_is_pruned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int, is_commit: bool
) -> None:
    durability = "step" if is_commit else "checkpoint"
    with saving(tmp_path, keep, durability=durability) as (each, checkpoints):
        path = each.commit() if is_commit else each.save(checkpoints, keep=keep)
        backup = copy_by_links(path, tmp_path / "backup")
        with caplog.at_level(logging.WARNING, "infinity"):
            go_on(each, checkpoints, range(2, 8), backup, keep=keep)
        assert [r for r in caplog.records if "copy by hard links" in r.message]
        assert is_intact(checkpoints)
        shutil.rmtree(backup)
        each.step(8)
        each.save(checkpoints, step=9, keep=keep)
        each.step(9)
        path = each.save(checkpoints, step=10, keep=keep)
        assert is_linked(path), "the space is free again"
        copy_by_links(path, backup)
        expected = each.state()
    has_state(tmp_path / "again", backup, expected)


def test_a_backup_that_follows_the_newest_checkpoint_is_intact_at_every_step(
    tmp_path: Path,
) -> None:
    """The links of one copy go when those of the next come, so their number says nothing."""
    with saving(tmp_path, 1) as (each, checkpoints):
        backup = copy_by_links(each.save(checkpoints, keep=1), tmp_path / "backup")
        for step in range(2, 8):
            go_on(each, checkpoints, [step], backup if backup.exists() else checkpoints, keep=1)
            shutil.rmtree(backup, ignore_errors=True)
            if step % 2 == 0:
                copy_by_links(checkpoints / f"step-{step + 1:08d}", backup)


def test_a_copy_of_a_checkpoint_that_was_renamed_stays_intact_without_it(tmp_path: Path) -> None:
    with saving(tmp_path) as (each, checkpoints):
        best = each.save(checkpoints, keep=2).rename(tmp_path / "best")
        backup = copy_by_links(best, tmp_path / "backup")
        shutil.rmtree(best)
        go_on(each, checkpoints, range(2, 7), backup, keep=2)
