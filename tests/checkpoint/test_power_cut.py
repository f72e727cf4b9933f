"""A power cut at any moment, whatever was not flushed lost or reordered, leaves a committed step.

The long form, INFINITY_POWER_CUTS=5000, cuts that often.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint import Saving
from infinity.checkpoint.run.directory import list_checkpoints, step_of
from infinity.checkpoint.run.format import MANIFEST_NAME
from infinity.state.undecided import UndecidedState
from infinity.state.units import Unit
from infinity.storage.volume import Volume
from infinity.streaming.updates.early import EarlyUpdates
from tests.support.bits import assert_same
from tests.support.file_systems import seem_elsewhere
from tests.support.two_sides import idle_drives

from .harness import EARLY, durable, run
from .power_cut import Disk, Event, Named, Recorder, Renamed, Returned, Synced, Wrote
from .test_copy import save

STEPS = 9
CUTS = int(os.environ.get("INFINITY_POWER_CUTS", "100"))
PLACEMENT = {"parameters": "nvme", "moments": "nvme", "master": "host", "gradients": "nvme"}


class Recording:
    """A run of a tiny model, every step committed and every third kept as a checkpoint: linked, or
    copied behind the next step. `options` are those of `run`."""

    def __init__(self, root: Path, *, is_copied: bool = False, **options: Any) -> None:
        root.mkdir()
        recorder = Recorder(root)
        saving: Saving | None = None
        self.losses: list[tuple[float, float]] = []
        self.early: list[int] = []  # Events between an early update and the decision of its step.
        with (
            recorder.recording(),
            noting_early(recorder, self.early),
            self._run(root, recorder, options) as each,
        ):
            for step in range(STEPS):
                self.losses.append(each.step(step))
                if step % 3 != 2:
                    each.commit()
                elif is_copied:
                    saving = save(each, root / "checkpoints", keep=2)
                else:
                    each.save(root / "checkpoints", keep=2)
                recorder.returned(step + 1)
                if saving is not None and step % 3 == 0:
                    saving.wait()
            self.state = each.state()
            self.counters = infinity.engine_of(each.model).counters.snapshot()
            if saving is not None:
                saving.wait()
        self.events = recorder.events
        manifests = {
            each.inode for each in self.events if isinstance(each, Named) and each.name == MANIFEST_NAME
        }  # fmt: skip
        self.manifests = [
            each.content
            for each in self.events
            if isinstance(each, Wrote) and each.inode in manifests
        ]

    @staticmethod
    def _run(root: Path, recorder: Recorder, options: dict[str, Any]):
        return run(
            "bf16-tiny", root / "swap", wrap_storage=recorder.wrap, placement=PLACEMENT,
            checkpoint=durable(root / "checkpoints", durability="step", keep=2), **options,
        )  # fmt: skip


@contextmanager
def noting_early(recorder: Recorder, noted: list[int]) -> Iterator[None]:
    """Adds the numbers of the events between the first early update of a step and its decision."""
    first: list[int] = []
    begin, decide = UndecidedState.begin, EarlyUpdates.take_back_others

    def noting_begin(undecided: UndecidedState, unit: Unit) -> Any:
        first.append(len(recorder.events))
        return begin(undecided, unit)

    def noting_decide(updates: EarlyUpdates, *decision: Any) -> Any:
        if first:
            noted.extend(range(first[0], len(recorder.events)))
        first.clear()
        return decide(updates, *decision)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UndecidedState, "begin", noting_begin)
        patch.setattr(EarlyUpdates, "take_back_others", noting_decide)
        yield


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Recording:
    return Recording(tmp_path_factory.mktemp("recorded") / "root")


@pytest.fixture
def place(tmp_path) -> Iterator[Path]:
    """Where what a cut leaves is looked at: in memory where that is possible, it is much."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def cut_often(
    events: Sequence[Event],
    recording: Recording,
    place: Path,
    cuts: int,
    *,
    behind: Sequence[int] | None = None,
) -> list[str]:
    """What is wrong after the first of so many power cuts that leaves something wrong; empty when
    none does. The moments are behind events of these numbers, or behind any."""
    drawn = random.Random(0)
    numbers = range(len(events)) if behind is None else behind
    moments = Counter(drawn.choice(numbers) for _ in range(cuts))
    disk = Disk()
    returned = 0
    for index, event in enumerate(events):
        disk.apply(event)
        if isinstance(event, Returned):
            returned = event.step
        for _ in range(moments[index]):
            target = place / "cut"
            disk.cut(drawn, target, lambda path: path.parts[0] != "swap" or len(path.parts) > 2)
            faults = faults_of(target, returned, recording)
            shutil.rmtree(target)
            if faults:
                return [f"cut after event {index} of {len(events)}, {event}", *faults]
    return []


def places_of(root: Path) -> list[Path]:
    return [root / "checkpoints", root / "swap" / "commits", root / "swap" / "copying"]


def faults_of(root: Path, returned: int, recording: Recording) -> list[str]:
    faults, newest = [], 0
    for directory in places_of(root):
        there = list_checkpoints(directory)
        for found in infinity.checkpoint.inspect(directory, verify=True) if there else ():
            faults += found.faults
            step = step_of(found.path)
            newest = max(newest, step)
            if found.is_intact:
                content = (found.path / MANIFEST_NAME).read_bytes()
                if content not in recording.manifests or json.loads(content)["step"] != step:
                    faults.append(f"step {step} is not what was committed")
    if newest < returned:
        faults.append(f"step {returned} was committed, and {newest} is the last one there")
    return faults


def test_every_cut_leaves_a_committed_step(recording, place):
    """Everything that has a name is whole, and nothing is older than the last commit."""
    assert cut_often(recording.events, recording, place, CUTS) == []


def test_a_run_continues_from_the_files_that_a_power_cut_leaves(recording, tmp_path):
    """Not only whole: the continuation has the bits of the uninterrupted run."""
    second_half = range(len(recording.events) // 2, len(recording.events))
    continue_after_cuts(recording, second_half, tmp_path)


def continue_after_cuts(
    recording: Recording, behind: Sequence[int], tmp_path: Path, **options: Any
) -> None:
    """Cuts the power behind three of the events, and compares what the continuations come to."""
    drawn = random.Random(1)
    moments = {drawn.choice(behind) for _ in range(3)}
    disk, resumed = Disk(), 0
    for index, event in enumerate(recording.events):
        disk.apply(event)
        if index in moments:
            target = tmp_path / f"cut-{index}"
            disk.cut(drawn, target, lambda path: True)
            there = (path for place in places_of(target) for path in list_checkpoints(place))
            newest = max(there, key=step_of)
            with run("bf16-tiny", target / "swap", seed=9, **options) as each:
                first = each.load(newest).step
                assert each.steps(first, STEPS) == recording.losses[first:]
                assert_same(recording.state, each.state())
            resumed += 1
    assert resumed == len(moments)


@pytest.fixture(scope="module")
def early_recording(tmp_path_factory) -> Recording:
    with idle_drives():
        return Recording(tmp_path_factory.mktemp("recorded") / "root", **EARLY)


def test_every_cut_among_updates_in_the_backward_leaves_a_committed_step(early_recording, place):
    """Early updates come about in most steps, and the cuts are between them and the decision."""
    assert early_recording.counters["early_updates_kept"] > STEPS // 2
    assert not early_recording.counters.get("early_updates_undone")
    writes = [at for at in early_recording.early if isinstance(early_recording.events[at], Wrote)]
    assert len(writes) > STEPS
    behind = early_recording.early
    assert cut_often(early_recording.events, early_recording, place, CUTS, behind=behind) == []


def test_a_run_continues_from_a_power_cut_among_updates_in_the_backward(early_recording, tmp_path):
    second_half = early_recording.early[len(early_recording.early) // 2 :]
    with idle_drives():
        continue_after_cuts(early_recording, second_half, tmp_path, **EARLY)
    with run("bf16-tiny", tmp_path / "deferred", max_norm=EARLY["max_norm"]) as each:
        assert each.steps(0, STEPS) == early_recording.losses
        assert_same(early_recording.state, each.state())


def test_updates_in_the_backward_that_overwrite_a_commit_are_found(tmp_path, place, monkeypatch):
    """The mutation check: early updates write where the last commit and the old state are."""
    real = Volume._targets

    def overwriting(volume, extent, *, is_undecided):
        return volume._sources(extent) if is_undecided else real(volume, extent, is_undecided=False)

    monkeypatch.setattr(Volume, "_targets", overwriting)
    with idle_drives():
        mutated = Recording(tmp_path / "root", **EARLY)
    assert cut_often(mutated.events, mutated, place, 2000, behind=mutated.early)


def test_every_cut_of_a_copy_leaves_a_committed_step(tmp_path, place, monkeypatch):
    """Checkpoints on another file system, and the mutation check of what only they need."""
    seem_elsewhere(tmp_path / "root" / "checkpoints", monkeypatch.setattr)
    copied = Recording(tmp_path / "root", is_copied=True)
    assert cut_often(copied.events, copied, place, CUTS) == []
    for what in ("copied.pages", "copying"):
        assert cuts_without(what, copied, place)


def cuts_without(what: str, recording: Recording, place: Path) -> list[str]:
    """What is wrong after power cuts of a run that leaves out the flushes of this name. Up to the
    first of them the run is the recorded one, and no cut is made."""
    left_out = [
        index
        for index, event in enumerate(recording.events)
        if isinstance(event, Synced) and event.what == what
    ]
    assert left_out
    events = [event for index, event in enumerate(recording.events) if index not in left_out]
    return cut_often(events, recording, place, 2000, behind=range(left_out[0], len(events)))


def flushes(events: Sequence[Event]) -> Counter[str]:
    return Counter(event.what for event in events if isinstance(event, Synced))


FLUSHES = [
    "swap files", "a partial directory", "checkpoints", "above them",
    "unit-00000.safetensors", "buffers.safetensors", "program.pt", "linked.json", "linked.crc32c",
    "manifest.json", "manifest.sha256",
]  # fmt: skip


def test_every_flush_is_known(recording):
    found = flushes(recording.events)
    assert set(found) - {f"unit-{n:05d}.safetensors" for n in range(9)} == set(FLUSHES) - {
        "unit-00000.safetensors"
    }


@pytest.mark.parametrize("what", FLUSHES)
def test_without_any_one_flush_a_cut_is_found(recording, place, what):
    """The mutation check: each kind of flush is needed, and the simulator notices."""
    assert cuts_without(what, recording, place)


def test_a_name_before_its_content_is_found(recording, place):
    """The rename before the sync of what is renamed."""
    events = list(recording.events)
    for index, event in enumerate(recording.events):
        before = recording.events[index - 1]
        if isinstance(event, Renamed) and isinstance(before, Synced):
            events[index - 1], events[index] = event, before
    assert events != recording.events
    assert cut_often(events, recording, place, 2000)


def test_writes_that_nobody_waits_for_are_found(recording, place):
    """Completions are seen one sync too late."""
    events: list[Event] = []
    late: list[Event] = []
    for event in recording.events:
        if type(event).__name__ == "Completed":
            late.append(event)
            continue
        events.append(event)
        if isinstance(event, Named) and event.name.endswith(".swap"):
            events += late
            late = []
    assert cut_often(events, recording, place, 2000)


@pytest.mark.parametrize("mutation", ["freeze", "thaw"])
def test_overwriting_what_a_commit_needs_is_found(tmp_path, place, monkeypatch, mutation):
    """Without freezing, writes reach what was committed; thawed at once, too."""

    def thaw_at_once(self, label="", real=Volume.freeze):
        frozen = real(self, label)
        self.thaw(frozen)
        return frozen

    if mutation == "freeze":
        monkeypatch.setattr(
            "infinity.storage.volume.choose_targets",
            lambda current, frozen, *, offset_nbytes, nbytes, num_generations: current.of(
                offset_nbytes, nbytes
            ),
        )
    else:
        monkeypatch.setattr(Volume, "freeze", thaw_at_once)
    mutated = Recording(tmp_path / "root")
    assert cut_often(mutated.events, mutated, place, 2000)
