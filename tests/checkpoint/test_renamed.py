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
