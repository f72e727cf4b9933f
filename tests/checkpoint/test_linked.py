"""Checkpoints that link to state on NVMe: exact, cheap, checked, and never at another's expense."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from itertools import count
from pathlib import Path

import pytest

import infinity
from infinity.checkpoint.run.format import CHECKSUMS_NAME, TABLE_NAME
from infinity.errors import CapacityError, ConfigError, CorruptionError, StorageError
from infinity.testing.faulty_engine import Fault, FaultyEngine
from tests.support.bits import assert_same
from tests.support.file_systems import ext4_on_loop
from tests.support.offloading import units_in_use

from .harness import (
    Run,
    content,
    durable,
    flip,
    goes_on,
    has_state,
    is_intact,
    is_linked,
    run,
    table,
)
from .test_exact import ELSEWHERE
from .test_faults import EFFECTS, Ladder

MIXTURE = ELSEWHERE["mixture"]


# Exact: see also `test_exact.py`.


def test_state_outside_nvme_is_written_beside_the_links(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints), **MIXTURE) as each:
        each.steps(0, 2)
        path = each.save(checkpoints)
        plain = each.save(tmp_path / "plain", linked=False)
        expected = each.steps(2, 4)
    linked = {tensor[0] for state_kind in table(path) for tensor in state_kind["tensors"]}
    copied = set()
    for file in path.glob("unit-*.safetensors"):
        names = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")
        copied |= set(names) - {"__metadata__"}
    assert linked and copied and not linked & copied
    assert any(name.endswith(".exp_avg") for name in linked)
    assert any(name.endswith(".residual") for name in copied)
    assert not is_linked(plain)
    for place in (path, plain):
        goes_on(tmp_path / "swap", place, 2, expected)


def test_saving_changes_nothing_and_every_kept_one_stays_as_it_was(tmp_path):
    """Weights are changed by hand between steps, too, and commits come and go."""
    checkpoints = tmp_path / "checkpoints"
    section = durable(checkpoints, keep=3, durability="step")

    def work(each, step):
        with infinity.gather(each.model.inner.blocks[1], modify=True):
            each.model.inner.blocks[1][0].weight.data[0, 0] += step
        return each.step(step)

    with run("bf16", tmp_path / "plain") as one:
        expected = [work(one, step) for step in range(8)]
    states = {}
    with run("bf16", tmp_path / "swap", checkpoint=section) as other:
        for step in range(8):
            assert work(other, step) == expected[step]
            other.commit()
            if step % 2:
                path = other.save(checkpoints, keep=3)
                assert is_linked(path)
                states[path] = other.state()
        kept = sorted(checkpoints.iterdir())
        assert [path.name for path in kept] == [f"step-{n:08d}" for n in (4, 6, 8)]
    for path in kept:
        has_state(tmp_path / "again", path, states[path])
    assert is_intact(checkpoints)


# Cheap.


class Counter:
    """Counts the bytes that reach files: through the storage engine and through `os`."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        for name in ("write", "pwrite"):
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real):
        def call(*args):
            done = real(*args)
            self.nbytes += done
            return done

        return call

    def engine(self, inner):
        submit = inner.submit

        def counted(operation, segments, priority):
            if operation == "write":
                self.nbytes += sum(segment.nbytes for segment in segments)
            return submit(operation, segments, priority)

        inner.submit = counted
        return inner


def test_a_checkpoint_does_not_grow_with_the_model(tmp_path, monkeypatch):
    """Bytes written by a save: four times the state costs its checksums more, 1 of 1024."""
    spent, state = {}, {}
    for kind in ("bf16", "bf16-large"):
        counter = Counter(monkeypatch)
        directory = tmp_path / kind
        directory.mkdir()
        with run(
            kind, directory / "swap", wrap_storage=counter.engine, host_nbytes="16MiB",
            checkpoint=durable(directory / "checkpoints"),
        ) as each:  # fmt: skip
            each.steps(0, 1)
            infinity.engine_of(each.model).flush()  # What the step itself has still to write.
            before = counter.nbytes
            path = each.save(directory / "checkpoints")
            spent[kind] = counter.nbytes - before
            state[kind] = sum(run[2] for state_kind in table(path) for run in state_kind["runs"])
            before = counter.nbytes
            each.save(directory / "plain", linked=False)
            assert counter.nbytes - before >= state[kind] * 0.9
        monkeypatch.undo()
    grown = state["bf16-large"] - state["bf16"]
    assert grown > 5 << 20
    assert spent["bf16-large"] - spent["bf16"] <= grown / 1024 + 1000


def test_without_the_section_there_is_nothing_to_pay(tmp_path, monkeypatch):
    """No spare file, no byte more, and the same writes at the same places."""
    seen = {}
    for name, section in (("none", None), ("off", durable(tmp_path, durability="none"))):
        writes = []

        def record(inner, writes=writes):
            submit = inner.submit

            def recorded(operation, segments, priority):
                writes.extend((operation, s.offset_nbytes, s.nbytes) for s in segments)
                return submit(operation, segments, priority)

            inner.submit = recorded
            return inner

        with run(
            "bf16", tmp_path / name, prefetch=False, checkpoint=section, wrap_storage=record
        ) as each:
            each.steps(0, 2)
            assert len(list((tmp_path / name).glob("*.swap"))) == 1
            assert infinity.engine_of(each.model).store.volume.num_spares == 0
        seen[name] = writes
    assert seen["none"] == seen["off"]


# Where links are not possible, or there is no room for more of them.


def test_more_than_the_spares_hold_are_copies(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=2)) as each:
        paths = []
        for step in range(4):
            each.step(step)
            paths.append(each.save(checkpoints))  # All are kept.
        assert [is_linked(path) for path in paths] == [True, True, False, False]
        shutil.rmtree(paths[0])  # By hand: its generation is free again.
        each.steps(4, 5)
        assert is_linked(each.save(checkpoints))
        expected = each.steps(5, 6)
    assert is_intact(checkpoints)
    goes_on(tmp_path / "swap", checkpoints, 5, expected)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch, code):
    def refuse(*args, **options):
        raise OSError(code, os.strerror(code))

    with run("bf16", tmp_path / "swap", checkpoint=durable(tmp_path / "c")) as each:
        each.steps(0, 1)
        monkeypatch.setattr(os, "link", refuse)
        path = each.save(tmp_path / "c", keep=1)
        assert not is_linked(path)
        assert infinity.engine_of(each.model).store.volume.frozen == ()
        each.steps(1, 2)
        assert is_intact(path)


def test_commit_needs_its_section(tmp_path):
    with (
        run("fp32", tmp_path / "swap", checkpoint=durable(tmp_path)) as each,
        pytest.raises(ConfigError, match="durability"),
    ):
        each.commit()


def test_spares_are_refused_with_numbers_before_anything_is_taken(tmp_path):
    section = durable(tmp_path / "c", keep=5)
    with (
        pytest.raises(CapacityError, match="5 spare generations") as refused,
        run("bf16", tmp_path / "swap", checkpoint=section, nvme_nbytes="8MiB"),
    ):
        pass
    assert refused.value.needed_nbytes > refused.value.available_nbytes == 8 << 20
    assert list((tmp_path / "swap").iterdir()) == []


# Damage.


def test_a_flipped_bit_is_found_in_every_page_and_every_small_file(linked, tmp_path):
    """In every 4096 bytes of linked state once, and in every 97th byte of all other files."""
    copy = shutil.copytree(linked, tmp_path / linked.name)
    places = [
        (run[0], run[1] + page * 4096 + (page * 977) % 4096)
        for state_kind in table(linked)
        for run in state_kind["runs"]
        for page in range(run[2] // 4096)
    ]
    assert len({name for name, _ in places}) == 2, "two generations hold the state"
    for path in linked.iterdir():
        if path.suffix != ".swap":
            places += [(path.name, at) for at in range(0, path.stat().st_size, 97)]
    for name, at in places:
        flip(copy / name, at)
        (found,) = infinity.checkpoint.inspect(copy, verify=True)
        assert any(name in fault or "manifest" in fault for fault in found.faults), (name, at)
        flip(copy / name, at)
    assert is_intact(copy)


def test_other_ranges_of_a_linked_file_are_no_part_of_it(linked, tmp_path):
    copy = shutil.copytree(linked, tmp_path / linked.name)
    used: dict[str, set[int]] = {}
    for run_ in (run_ for state_kind in table(linked) for run_ in state_kind["runs"]):
        pages = range(run_[1] // 4096, (run_[1] + run_[2]) // 4096)
        used.setdefault(run_[0], set()).update(pages)
    for name, pages in used.items():
        size = (copy / name).stat().st_size
        other = set(range(size // 4096)) - pages
        assert other
        for page in other:
            flip(copy / name, page * 4096)
    assert is_intact(copy)


def test_a_damaged_page_stops_a_load(linked, tmp_path):
    copy = shutil.copytree(linked, tmp_path / linked.name)
    state_kind = next(p for p in table(linked) if p["piece"] == "exp_avg")
    name, offset, _ = state_kind["runs"][0]
    flip(copy / name, offset + 10)
    with (
        run("frozen", tmp_path / "swap", seed=4) as each,
        pytest.raises(CorruptionError, match="mixture") as caught,
    ):
        each.load(copy)
    assert caught.value.path == str(copy / name)
    assert caught.value.offset_nbytes == offset


def test_a_load_whose_reads_fail_changes_nothing_or_says_what_the_model_is(
    linked, tmp_path, monkeypatch
):
    ladder, told = Ladder(monkeypatch, linked, ("pread", "preadv")), set()
    with run("frozen", tmp_path / "swap", seed=4) as each:
        for rung in count(1):
            each.step(rung)
            before = each.state()
            ladder.left, ladder.failed = rung, None
            try:
                each.load(linked)
            except StorageError as error:
                told.add((ladder.failed, is_mixture := "mixture" in str(error)))
                if not is_mixture:
                    assert_same(before, each.state())
            else:
                break
    assert ladder.failed is None
    assert {("pread", False), ("pread", True), ("preadv", True)} <= told


@pytest.mark.parametrize("name", [TABLE_NAME, CHECKSUMS_NAME])
def test_tables_are_under_the_manifest(linked, name):
    names = {file["name"] for file in json.loads((linked / "manifest.json").read_text())["files"]}
    assert name in names


# Faults.


def test_whatever_fails_the_commits_before_are_untouched(tmp_path, monkeypatch):
    """The ladder of test_faults, for links: and no generation is lost on the way."""
    checkpoints = tmp_path / "checkpoints"
    seen = []
    with run("bf16", tmp_path / "swap", checkpoint=durable(checkpoints, keep=1)) as each:
        each.steps(0, 1)
        each.save(checkpoints, keep=1)
        first = state_of(checkpoints)
        ladder = Ladder(monkeypatch, checkpoints)
        real = os.link
        links = {"left": 0}

        def link(source, target):
            if links["left"]:
                links["left"] -= 1
                if not links["left"]:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(source, target)

        monkeypatch.setattr(os, "link", link)
        for rung in range(1, 1000):
            each.steps(rung, rung + 1)
            ladder.left, ladder.failed = rung, None
            links["left"] = rung if rung <= 2 else 0
            try:
                each.save(checkpoints, keep=1, step=2)
            except StorageError as error:
                assert error.errno == errno.EIO
                if (checkpoints / "step-00000002").exists():
                    break  # What failed is the removal of the old one; see below.
                assert state_of(checkpoints) == first, f"after {ladder.failed} failed"
                assert is_intact(checkpoints)
                seen.append(ladder.failed or "link")
            else:
                break
        assert ladder.failed == "open", "the lock of the directory, to remove the old one"
        ladder.left = 0
        newest = state_of(checkpoints)
        assert is_intact(checkpoints)
        expected = each.state()
        with pytest.raises(StorageError, match="2 commits are kept and there are 1 spare") as full:
            each.steps(1000, 1002)
            infinity.engine_of(each.model).flush()
        assert full.value.errno == errno.ENOSPC
        assert state_of(checkpoints) == newest
    assert set(seen) >= set(EFFECTS) - {"posix_fallocate", "pwrite", "replace", "mkdir"}, seen
    monkeypatch.undo()
    has_state(tmp_path / "swap", checkpoints, expected)


def state_of(directory: Path) -> dict[str, bytes]:
    """Every file of the whole checkpoints; of linked files what belongs to them."""
    found = {}
    for path in directory.glob("[!.]*"):
        for name, data in content(path).items():
            if not name.endswith(".swap"):
                found[f"{path.name}/{name}"] = data
        for number, state_kind in enumerate(table(path)):
            parts = [
                (path / file).read_bytes()[offset : offset + nbytes]
                for file, offset, nbytes in state_kind["runs"]
            ]
            found[f"{path.name}/{number}"] = b"".join(parts)
    return found


def causes_of(each: Run, steps: range) -> list[StorageError]:
    """Takes and commits steps on a drive that fails; returns the first causes of the errors."""
    causes = []
    for step in steps:
        try:
            each.step(step)
            each.commit()
        except infinity.errors.InfinityError as error:
            causes.append(error if isinstance(error, StorageError) else error.__cause__)
    return causes


@pytest.mark.parametrize(
    ("operation", "code"), [("write", errno.ENOSPC), ("write", errno.EROFS), ("sync", errno.EIO)]
)
def test_a_drive_that_fills_up_or_fails_keeps_the_last_commit(tmp_path, operation, code):
    """The first cause is the error, again and again; what was committed can be gone on with."""
    faults: list[FaultyEngine] = []

    def wrap(inner):
        faults.append(FaultyEngine(inner))
        return faults[-1]

    section = durable(tmp_path / "checkpoints", durability="step", keep=1)
    with run("bf16", tmp_path / "swap", checkpoint=section, wrap_storage=wrap) as each:
        each.steps(0, 2)
        path = each.commit()
        kept = state_of(path.parent)
        expected = each.steps(2, 3)
        (engine,) = faults
        nth = engine._counts.get(operation, 0) + (1 if operation == "sync" else 5)
        engine._faults = (Fault(nth=nth, operation=operation, errno=code),)
        causes = causes_of(each, range(3, 6))
        assert causes and all(cause.errno == code for cause in causes)
        assert all("infinity-" in cause.path for cause in causes)
        assert state_of(path.parent) == kept
    assert is_intact(path)
    goes_on(tmp_path / "swap", path.parent, 2, expected)


def test_a_file_system_that_turns_read_only_keeps_the_last_commit(tmp_path):
    """As ext4 does when it meets an error. Without the right to mount, the test above has EROFS."""
    with ext4_on_loop(tmp_path / "image", tmp_path / "drive", 64 << 20) as drive:
        section = durable(drive / "c", durability="step", keep=1)
        with run("bf16", drive / "swap", checkpoint=section) as each:
            each.steps(0, 2)
            path = each.commit()
            kept = state_of(path.parent)
            expected = each.steps(2, 3)
            subprocess.run(["mount", "-o", "remount,abort", str(drive)], check=False)
            causes = causes_of(each, range(3, 5))
            assert len(causes) == 2 and {c.errno for c in causes} <= {errno.EROFS, errno.EIO}
            assert all(str(drive) in cause.path for cause in causes)
            assert state_of(path.parent) == kept
        assert is_intact(path)
        goes_on(tmp_path / "swap", path.parent, 2, expected)


@pytest.mark.parametrize("nth", [1, 4])
def test_host_memory_that_runs_out_in_a_step_keeps_the_last_commit(tmp_path, monkeypatch, nth):
    """No unit stays in use, and the same process continues from the commit."""
    section = durable(tmp_path / "c", durability="step", keep=1)
    with run("bf16", tmp_path / "swap", checkpoint=section) as each:
        each.steps(0, 2)
        path = each.commit()
        kept = state_of(path.parent)
        engine = infinity.engine_of(each.model)
        left = nth

        def require(nbytes, label, real=engine.pool.require, **options):
            nonlocal left
            left -= 1
            if left <= 0:
                raise CapacityError(
                    "host", needed_nbytes=nbytes, available_nbytes=0, key="key", detail=label
                )
            return real(nbytes, label, **options)

        with monkeypatch.context() as patched:
            patched.setattr(engine.pool, "require", require)
            with pytest.raises(CapacityError):
                each.step(2)
                each.commit()
        assert units_in_use(engine) == [] and state_of(path.parent) == kept
        each.optimizer.zero_grad()
        each.load(path)
        got = each.steps(2, 4)
    with run("bf16", tmp_path / "plain") as plain:
        assert plain.steps(0, 4)[2:] == got


def test_deleted_swap_files_are_named_and_the_last_commit_stays(tmp_path):
    section = durable(tmp_path / "c", durability="step", keep=1)
    with run("bf16", tmp_path / "swap", checkpoint=section) as each:
        each.steps(0, 1)
        path = each.commit()
        for file in (tmp_path / "swap").glob("*.swap"):
            file.unlink()
        each.steps(1, 2)  # They are open; training does not need their names.
        with pytest.raises(StorageError, match="the swap file is gone"):
            each.commit()
        each.steps(2, 3)
        assert is_intact(path)
    with run("bf16", tmp_path / "swap", seed=5) as resumed:
        assert resumed.load(path).step == 1


def test_a_second_job_gets_an_error_not_the_state(tmp_path):
    section = durable(tmp_path / "c", durability="step", keep=1)
    with run("bf16", tmp_path / "swap", checkpoint=section) as each:
        each.steps(0, 1)
        path = each.commit()
        with (
            pytest.raises(infinity.errors.SwapLockedError, match=str(os.getpid())),
            run("bf16", tmp_path / "swap", checkpoint=section),
        ):
            pass
        each.steps(1, 2)
        each.commit()
    assert not path.exists() and is_intact(path.parent)
