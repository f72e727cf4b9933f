"""A run that resumes continues in the swap files of the one that was killed, and copies nothing."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.errors import CorruptionError
from infinity.storage import volume_paths
from infinity.storage.volume_paths import measure_bandwidth
from infinity.testing import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.exhaustive import in_turn
from tests.support.forked import context

from .harness import Run, durable, flip, is_intact, run, table
from .killed_run import ROOM, section, train, two_drives

MIXED = {"parameters": "nvme", "moments": ["host", "nvme"], "master": "host", "gradients": "nvme"}


def killed(
    directory: Path, *, kind: str = "bf16", steps: int = 4, placement: Any = "nvme", **options: Any
) -> None:
    """Leaves in a directory what `killed_run` states."""
    process = context().Process(
        target=train, args=(directory, kind, steps, placement), kwargs=options
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def expected(directory: Path, kind: str, first: int, stop: int) -> tuple[Any, Any]:
    with run(kind, directory / "plain") as whole:
        whole.steps(0, first)
        return whole.steps(first, stop), whole.state()


def commits(directory: Path) -> Path:
    return directory / "swap" / "commits"


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "swap").glob("*.swap")}


def volume_of(each: Run) -> Any:
    return infinity.engine_of(each.model).store.volume


def resumed(
    directory: Path, kind: str = "bf16", path: Path | None = None, **options: Any
) -> AbstractContextManager[Run]:
    """A run that continues from the last commit of the one that was killed, or from `path`."""
    return run(
        kind, directory / "swap", seed=7, resume=path or commits(directory),
        checkpoint=section(directory), **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "placement"), in_turn(["bf16", "conv", "frozen"], [MIXED, "nvme"])
)
def test_a_resumed_run_continues_in_the_existing_swap_files(tmp_path, kind, placement):
    options = {"placement": placement, "nvme_nbytes": ROOM} if placement != "nvme" else {}
    killed(tmp_path, kind=kind, placement=placement)
    left = names(tmp_path)
    with resumed(tmp_path, kind, **{"nvme_nbytes": ROOM, **options}) as each:
        assert names(tmp_path) == left
        volume = volume_of(each)
        frozen = {Path(one.label).name: one for one in volume.frozen}
        assert set(frozen) == {"step-00000002", "step-00000004"}
        assert each.load(commits(tmp_path)).step == 4
        assert len(volume.frozen) == 2
        got = []
        for step in range(4, 9):
            got.append(each.step(step))
            _ = each.save(tmp_path / "c", keep=1) if step == 6 else each.commit()
        state = each.state()
    wanted = expected(tmp_path, kind, 4, 9)
    assert got == wanted[0]
    assert_same(wanted[1], state)
    assert is_intact(tmp_path / "c")


def test_no_byte_of_the_state_is_copied(tmp_path):
    """Nothing is read by the engine, nothing written, when a checkpoint is restored in place."""
    killed(tmp_path)
    with resumed(tmp_path, nvme_nbytes=ROOM) as each:
        engine = infinity.engine_of(each.model)
        before = engine.counters.snapshot()
        each.load(commits(tmp_path))
        after = engine.counters.snapshot()
        for name in ("nvme_read_nbytes", "nvme_write_nbytes"):
            assert after[name] == before[name]


@pytest.mark.parametrize("device", [False, True])
def test_a_run_goes_back_to_a_checkpoint_of_its_own(tmp_path, device):
    """In the same process: the map of the checkpoint is restored, other copies are forgotten."""
    options = {"device": SimulatedDevice(1)} if device else {}
    with run("bf16", tmp_path / "swap", checkpoint=durable(tmp_path / "c"), **options) as each:
        each.steps(0, 2)
        each.save(tmp_path / "c")
        state = each.state()
        first = each.steps(2, 5), each.state()
        each.model(77).backward()  # Never used.
        before = infinity.engine_of(each.model).counters.snapshot()
        each.load(tmp_path / "c")
        after = infinity.engine_of(each.model).counters.snapshot()
        assert after["nvme_write_nbytes"] - before["nvme_write_nbytes"] < 1 << 20, "no moments"
        assert_same(state, each.state())
        again = each.steps(2, 5), each.state()
        assert first[0] == again[0]
        assert_same(first[1], again[1])


@pytest.mark.parametrize(("capacity", "is_measured"), [(ROOM, False), ("64MiB", True)])
def test_a_run_on_several_drives_continues_in_its_files(
    tmp_path, monkeypatch, capacity, is_measured
):
    """Their rates are measured behind the ends of the files, and other rates are another layout."""
    tiers = two_drives(tmp_path, capacity)
    killed(tmp_path, tiers=tiers)
    measured: list[float] = []

    def measure(engine: Any, file: int, start_nbytes: int) -> float:
        measured.append(measure_bandwidth(engine, file, start_nbytes))
        return 1e9 * 3 ** len(measured)

    monkeypatch.setattr(volume_paths, "measure_bandwidth", measure)
    drives = [tmp_path / "swap", tmp_path / "swap-2"]
    left = [sorted(drive.glob("*.swap")) for drive in drives]
    with resumed(tmp_path, tiers=tiers) as each:
        assert [sorted(drive.glob("*.swap")) for drive in drives] == left and all(left)
        assert bool(measured) == is_measured
        assert each.load(commits(tmp_path)).step == 4
        got = each.steps(4, 7), each.state()
    wanted = expected(tmp_path, "bf16", 4, 7)
    assert got[0] == wanted[0]
    assert_same(wanted[1], got[1])


# What is not taken over is streamed, with the same result.


def link_elsewhere(directory: Path) -> None:
    for name in names(directory):
        os.link(directory / "swap" / name, directory / name)


def damage_a_neighbour(directory: Path) -> None:
    (path,) = (directory / "c").iterdir()
    (path / "linked.json").write_bytes(b"{}")


def lose_a_file(directory: Path) -> None:
    for name in names(directory):
        os.unlink(directory / "swap" / name)


def copy_the_commit(directory: Path) -> None:
    shutil.copytree(commits(directory), directory / "copy")
    shutil.rmtree(commits(directory))
    (directory / "copy").rename(commits(directory))


@pytest.mark.parametrize(
    "change", [link_elsewhere, damage_a_neighbour, lose_a_file, copy_the_commit]
)
def test_files_that_differ_from_the_table_are_streamed(tmp_path, change):
    killed(tmp_path)
    left = names(tmp_path)
    change(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.swap")}
    with resumed(tmp_path) as each:
        assert not names(tmp_path) & left
        assert each.load(commits(tmp_path)).step == 4
        got = each.steps(4, 7), each.state()
    wanted = expected(tmp_path, "bf16", 4, 7)
    assert got[0] == wanted[0]
    assert_same(wanted[1], got[1])
    assert kept == {path: path.read_bytes() for path in tmp_path.glob("*.swap")}


def test_another_layout_is_streamed_into_the_files_that_are_there(tmp_path):
    """What the checkpoints need is frozen there, so nothing is written over it meanwhile."""
    killed(tmp_path)
    left = names(tmp_path)
    with resumed(tmp_path, placement=MIXED) as each:
        assert names(tmp_path) == left
        assert each.load(commits(tmp_path)).step == 4
        got = [each.step(4)]
        each.commit()
        got += each.steps(5, 7)
        state = each.state()
    wanted = expected(tmp_path, "bf16", 4, 7)
    assert got == wanted[0]
    assert_same(wanted[1], state)


def test_a_damaged_page_is_found_before_anything_changes(tmp_path):
    killed(tmp_path)
    (path,) = commits(tmp_path).iterdir()
    name, offset, _ = table(path)[2]["runs"][0]
    flip(path / name, offset + 100)
    with resumed(tmp_path, path=path, nvme_nbytes=ROOM) as each:
        before = each.state()
        with pytest.raises(CorruptionError) as caught:
            each.load(path)
        assert caught.value.path == str(path / name) and caught.value.offset_nbytes == offset
        assert_same(before, each.state())
        older = each.load(tmp_path / "c")  # The one before is whole, and in the same files.
        assert older.step == 2
        got = each.steps(2, 5)
    assert got == expected(tmp_path, "bf16", 2, 5)[0]


def test_half_made_files_of_a_crash_are_removed_first(tmp_path):
    killed(tmp_path)
    (path,) = commits(tmp_path).iterdir()
    shutil.copytree(path, path.parent / ".step-00000005.partial", copy_function=os.link)
    older = path.parent / "step-00000003"
    shutil.copytree(path, older, copy_function=os.link)
    left = names(tmp_path)
    with resumed(tmp_path, path=path, nvme_nbytes=ROOM) as each:
        assert names(tmp_path) == left
        assert list(commits(tmp_path).iterdir()) == [path]
        each.load(path)
        got = each.steps(4, 6)
    assert got == expected(tmp_path, "bf16", 4, 6)[0]


def test_checkpoints_of_the_user_are_never_removed(tmp_path):
    """More of them than there are spare generations: the state is streamed, and all of them stay."""
    killed(tmp_path)
    (only,) = (tmp_path / "c").iterdir()
    for step in (1, 0):
        shutil.copytree(only, only.parent / f"step-0000000{step}", copy_function=os.link)
    left = names(tmp_path)
    with resumed(tmp_path) as each:
        assert not names(tmp_path) & left
        assert len(list((tmp_path / "c").iterdir())) == 3
        each.load(commits(tmp_path))
        got = each.steps(4, 6)
    assert got == expected(tmp_path, "bf16", 4, 6)[0]
    assert is_intact(tmp_path / "c")
