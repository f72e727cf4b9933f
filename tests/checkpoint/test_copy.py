"""Checkpoints on another file system: committed at once, copied behind training, lost in no case."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint import Saving
from infinity.checkpoint.run.copy import Pace
from infinity.errors import ConfigError, CorruptionError, InfinityError, StorageError
from infinity.state import spare_generations
from infinity.storage.protocol import Priority
from infinity.testing.faulty_engine import WrappedEngine
from tests.support.bits import assert_same
from tests.support.file_systems import seem_elsewhere

from .harness import Run, content, durable, flip, goes_on, has_state, is_intact, run, table


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as one of another file system."""
    directory = tmp_path / "far"
    seem_elsewhere(directory, monkeypatch.setattr)
    return directory


@pytest.fixture
def farther(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "farther"
    seem_elsewhere(directory, monkeypatch.setattr)
    return directory


class Drive(WrappedEngine):
    """Requests of a copy wait while `open_to_copies` is not set, and the nth of them fails."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, "drive")
        self.open_to_copies = threading.Event()
        self.fail_at = 0
        self.num_copies = 0

    def submit(self, operation, segments, priority):
        if priority is Priority.COPY:
            self.open_to_copies.wait()
            self.num_copies += 1
            if self.num_copies == self.fail_at:
                path = self._paths[segments[0].file]
                raise StorageError(errno.EIO, operation=operation, path=path)
        return super().submit(operation, segments, priority)


@pytest.fixture
def drives() -> Iterator[list[Drive]]:
    made: list[Drive] = []
    yield made
    for drive in made:
        drive.open_to_copies.set()


def save(each: Run, directory: Path, **options: Any) -> Saving:
    return infinity.checkpoint.async_save(
        directory, each.model, each.optimizer, scheduler=each.scheduler, **options
    )


def started(
    tmp_path: Path, far: Path, drives: list[Drive], durability: str = "checkpoint", **options: Any
):
    def wrap(engine):
        drives.append(Drive(engine))
        return drives[-1]

    section = durable(far, keep=2, durability=durability)
    return run("bf16", tmp_path / "swap", checkpoint=section, wrap_storage=wrap, **options)


def frozen(each: Run) -> list[str]:
    volume = infinity.engine_of(each.model).store.volume
    assert volume is not None
    return [Path(one.label).parent.name for one in volume.frozen]


@pytest.mark.parametrize("mode", ["checkpoint", "step"])
def test_training_goes_on_while_a_checkpoint_is_copied(tmp_path, far, drives, mode):
    """Three steps are taken, and committed, before the first block of the copy is read."""
    with run("bf16", tmp_path / "plain") as plain:
        expected = plain.steps(0, 8), plain.state()
    with started(tmp_path, far, drives, durability=mode) as each:
        got = each.steps(0, 2)
        saving = save(each, far)
        assert infinity.checkpoint.inspect(tmp_path / "swap" / "copying")[0].manifest.step == 2
        for step in range(2, 5):
            got.append(each.step(step))
            _ = each.commit() if mode == "step" else infinity.engine_of(each.model).flush()
        assert not saving.done() and not list(far.glob("step-*"))
        with pytest.raises(TimeoutError):
            saving.wait(0.01)
        drives[0].open_to_copies.set()
        path = saving.wait()
        assert path == far / "step-00000002" and frozen(each) == ["commits"] * (mode == "step")
        assert not (tmp_path / "swap" / "copying").exists()
        for step in range(5, 8):
            got.append(each.step(step))
            save(each, far, keep=2)  # Each waits for the one before.
        assert (got, each.state().keys()) == (expected[0], expected[1].keys())
        assert_same(expected[1], each.state())
        each.save(far, step=9, keep=2)
    assert [each.name for each in sorted(far.iterdir())] == ["step-00000008", "step-00000009"]
    assert is_intact(far)
    has_state(tmp_path / "again", far / "step-00000008", expected[1])


def test_a_copy_has_a_tenth_of_a_busy_drive_and_all_of_an_idle_one():
    pace, block, moved = Pace(0), 4 << 20, 0
    assert pace.allows(block, 0, 0.0), "idle"
    copied = 0
    for turn in range(1000):  # 5 GB in 10 seconds, which come in bursts.
        moved += (turn % 4 == 0) * (20 << 20)
        copied += block if pace.allows(block, moved, turn / 100) else 0
    assert 0.08 < copied / moved <= 0.1
    assert not pace.allows(block, moved, 10.0)
    assert all(pace.allows(block, moved, 10.06 + turn / 1000) for turn in range(100))
    assert not pace.allows(block, moved + 1, 11.0)
    pace.rest(12.0, 12.01)
    assert not pace.allows(block, moved + 1, 12.04) and pace.allows(block, moved + 1, 12.06)


def test_whatever_fails_the_checkpoint_before_is_untouched(tmp_path, far, drives):
    """Requests of a copy in turn, each in a copy of another step. The first cause is raised once,
    to whoever asks first; the step is in the swap directory until the next one takes its place."""
    causes = []
    with started(tmp_path, far, drives) as each:
        (drive,) = drives
        drive.open_to_copies.set()
        each.steps(0, 1)
        each.save(far)
        before = content(far)
        for last, rung in enumerate((1, 2, 3, *range(4, 200, 9)), 2):
            each.step(last - 1)
            drive.fail_at, drive.num_copies = rung, 0
            saving = save(each, far)
            try:
                saving.wait()
            except StorageError as error:
                with pytest.raises(StorageError) as again:
                    saving.wait()
                assert again.value is error and error.errno == errno.EIO
                causes.append((error.operation, Path(error.path).parent.name))
                assert content(far) == before
                assert is_intact(saving.source)
            else:
                break
        assert {operation for operation, _ in causes} == {"read", "write"}
        assert all(place.strip(".").startswith("step-") for _, place in causes)
        assert is_intact(far)
        each.step(last)
        drive.fail_at, drive.num_copies = 1, 0
        save(each, far).close()
        each.step(last + 1)
        with pytest.raises(StorageError, match="Input/output"):
            save(each, far)  # Nobody has asked yet.
        assert save(each, far).wait().name == f"step-{last + 2:08}"
        expected = each.steps(last + 2, last + 4)
    goes_on(tmp_path / "again", far, last + 2, expected)


def test_a_page_that_a_drive_has_changed_is_not_copied(tmp_path, far, drives):
    with started(tmp_path, far, drives) as each:
        each.steps(0, 1)
        saving = save(each, far)
        name, offset, _ = table(saving.source)[3]["runs"][0]
        flip(saving.source / name, offset + 100)
        drives[0].open_to_copies.set()
        with pytest.raises(CorruptionError) as caught:
            saving.wait()
        assert (Path(caught.value.path).name, caught.value.offset_nbytes) == (name, offset)
    assert list(far.iterdir()) == []


def test_a_copy_that_is_given_up_leaves_its_step_in_the_swap_directory(tmp_path, far, drives):
    """A run goes on from it. Closing an engine waits for a copy, and a later step is refused."""
    with started(tmp_path, far, drives) as each:
        each.steps(0, 2)
        saving = save(each, far)
        each.steps(2, 3)
        # The copy stands before its first block until it has been told to end.
        stop = saving.stop_order
        told = threading.Thread(target=lambda: (stop.wait(), drives[0].open_to_copies.set()))
        told.start()
        saving.abandon()
        told.join()
        assert saving.is_abandoned and list(far.iterdir()) == []
        with pytest.raises(InfinityError, match="given up"):
            saving.wait()
        assert save(each, far).wait().name == "step-00000003"  # The newer one takes its place.
        expected = each.steps(3, 4)
        last = save(each, far)
        with pytest.raises(ConfigError, match="already exists"):
            save(each, far, step=3)
    assert last.done() and last.wait().exists()
    goes_on(tmp_path / "again", far / "step-00000003", 3, expected)


def same_state(tmp_path: Path, path: Path, expected: dict[str, Any]) -> None:
    assert is_intact(path)
    has_state(tmp_path / "again", path, expected)


def change(each: Run) -> None:
    """Changes weights by hand, which no count of steps shows."""
    with infinity.gather(each.model.inner.blocks[1], modify=True):
        each.model.inner.blocks[1][0].weight.data.add_(1.0)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_step_is_copied_to_two_places(tmp_path, far, farther, drives, is_changed):
    """The commit of the first copy is gone when the second one begins."""
    with started(tmp_path, far, drives) as each:
        drives[0].open_to_copies.set()
        each.steps(0, 2)
        first = save(each, far).wait()
        before = each.state()
        if is_changed:
            change(each)
        after = each.state()
        second = save(each, farther).wait()
        assert (first, second) == (far / "step-00000002", farther / "step-00000002")
        assert frozen(each) == [] and not (tmp_path / "swap" / "copying").exists()
        each.steps(2, 3)
        assert save(each, far).wait().name == "step-00000003"
    same_state(tmp_path, first, before)
    same_state(tmp_path, second, after)


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_a_step_whose_copy_failed_is_written_at_once_as_the_run_has_it_then(
    tmp_path, far, farther, drives, place
):
    """Weights and `extra` are others than in the commit, which the checkpoint supersedes."""
    placement = {"parameters": place, "master": place, "moments": "nvme", "gradients": "nvme"}
    with started(tmp_path, far, drives, placement=placement, host_nbytes="8MiB") as each:
        drives[0].open_to_copies.set()
        each.steps(0, 2)
        drives[0].fail_at = 2
        failed = save(each, far, extra={"position": 1})
        with pytest.raises(StorageError, match="Input/output"):
            failed.wait()
        change(each)
        state = each.state()
        drives[0].open_to_copies.clear()
        saving = save(each, farther, extra={"position": 2})
        assert saving.done()
        drives[0].open_to_copies.set()
        path = saving.wait()
        assert path == farther / "step-00000002" and not (tmp_path / "swap" / "copying").exists()
        each.steps(2, 3)
        assert save(each, farther).wait().name == "step-00000003"
    same_state(tmp_path, path, state)
    assert infinity.checkpoint.run.load.read_program(path).extra == {"position": 2}


def test_spares_are_for_the_copy_and_the_last_step(tmp_path, far):
    for mode, count in (("none", 0), ("checkpoint", 1), ("step", 2)):
        section = durable(far, durability=mode, keep=5)
        with run("bf16", tmp_path / "swap", checkpoint=section) as each:
            engine = infinity.engine_of(each.model)
            assert engine.store.volume.num_spares == count
            ranked = spare_generations.count_spares(engine.config, num_ranks=2)
            assert ranked == max(0, count - 1), "several ranks do not copy behind training"
