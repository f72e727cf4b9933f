"""The fault ladder: the 1st, 2nd, ... effect on files fails until a save succeeds.

Every time the checkpoint before is untouched, the error names what failed, and the run goes on.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal

import pytest

import infinity
from infinity.errors import ConfigError, StorageError

from .harness import content, goes_on, is_intact, run

EFFECTS = ("mkdir", "open", "posix_fallocate", "pwrite", "write", "fsync", "rename", "replace")


class Ladder:
    """Makes the nth call of these functions of os fail, while it is armed. Behind it nothing is
    removed, as on a file system that has turned read-only."""

    def __init__(self, monkeypatch, directory, functions=EFFECTS):
        self.left = 0
        self.failed = None
        self._directory = os.fspath(directory)
        for name in (*functions, "unlink"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(first, *rest, **options):
            if name == "unlink" and self.failed and self._is_ours(first):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if name != "unlink" and self.left and self._is_ours(first):
                self.left -= 1
                if self.left == 0:
                    self.failed = name
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(first, *rest, **options)

        return call

    def _is_ours(self, first):
        """Only of the checkpoint directory: the swap files are another test's."""
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
        return path.startswith(self._directory)


def test_whatever_fails_the_checkpoint_before_is_untouched(tmp_path, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    seen = []
    with run("bf16", tmp_path / "swap") as each:
        each.steps(0, 1)
        each.save(checkpoints)
        first = content(checkpoints)
        each.steps(1, 2)
        ladder = Ladder(monkeypatch, checkpoints)
        for rung in range(1, 1000):
            ladder.left, ladder.failed = rung, None
            try:
                each.save(checkpoints)
            except StorageError as error:
                assert ladder.failed is not None
                assert error.errno == errno.EIO and str(checkpoints) in str(error)
                assert content(checkpoints) == first, f"after {ladder.failed} failed"
                assert is_intact(checkpoints)
                seen.append(ladder.failed)
            else:
                assert ladder.failed is None, f"{ladder.failed} failed and nobody noticed"
                break
        ladder.left = 0
        expected = each.steps(2, 4)
    assert set(seen) == set(EFFECTS), seen
    assert len(seen) > 20

    monkeypatch.undo()
    goes_on(tmp_path / "swap", checkpoints, 2, expected)  # Failed saves changed nothing.


def test_removing_the_old_ones_fails_at_any_place(tmp_path, monkeypatch):
    """The new checkpoint is whole and is the newest whatever becomes of the old."""
    checkpoints = tmp_path / "checkpoints"
    with run("conv", tmp_path / "swap") as each:
        each.save(checkpoints)
        each.steps(0, 1)
        real = shutil.rmtree

        def half(path, *args, **options):
            for child in sorted(os.listdir(path))[:2]:
                os.unlink(os.path.join(path, child))
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

        monkeypatch.setattr(shutil, "rmtree", half)
        with pytest.raises(StorageError, match="remove"):
            each.save(checkpoints, keep=1)
        monkeypatch.setattr(shutil, "rmtree", real)
        (only,) = infinity.checkpoint.inspect(checkpoints, verify=True)
        assert only.is_intact and only.manifest.step == 1
        each.steps(1, 2)
        each.save(checkpoints, keep=1)
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    with run("fp32", tmp_path / "swap") as each:
        real = os.statvfs

        def full(path):
            stats = list(real(path))
            stats[4] = 0  # f_bavail
            return os.statvfs_result(stats)

        monkeypatch.setattr(os, "statvfs", full)
        with pytest.raises(StorageError, match="free"):
            each.save(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_two_writers_are_kept_apart(tmp_path):
    from infinity.checkpoint.run import directory as state_directory

    with run("fp32", tmp_path / "swap") as each:
        with (
            state_directory.writing(tmp_path / "checkpoints", 7),
            pytest.raises(ConfigError, match="another process"),
        ):
            each.save(tmp_path / "checkpoints")
        with pytest.raises(ConfigError, match="keep"):
            each.save(tmp_path / "checkpoints", step=8, keep=0)
        with state_directory.writing(tmp_path / "checkpoints", 9):
            child = os.fork()  # As a worker of a DataLoader beside a copy in the background.
            if not child:
                signal.pause()
        try:
            each.save(tmp_path / "checkpoints", step=10)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
