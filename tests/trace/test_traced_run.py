"""A tiny run, traced: the file is what Perfetto reads, and it agrees with the counters."""

from __future__ import annotations

import io
import json
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import infinity
from infinity.config import SwapConfig
from infinity.engine.build import build
from infinity.errors import ConfigError
from infinity.observe import Counters, Track, chrome
from infinity.observe.step_summary import summarize
from infinity.testing.faulty_engine import Fault, FaultyEngine
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tools.cli.train import parse_steps
from infinity.tools.training import program
from infinity.tools.training.report import Tracing
from tests.support.forked import COMMAND, run_script
from tests.support.models import Mlp
from tests.train.jobs import GPT2, job_table, lines_of

THREAD = ("compute", "engine", "updates", "stalls")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> dict[str, Any]:
    """A small configuration, everything on two swap paths."""
    tmp_path = tmp_path_factory.mktemp("traced")
    return job_table(
        tmp_path,
        tiers={
            "host": {"capacity": "64MiB"},
            "nvme": [{"path": str(tmp_path / name), "weight": 1} for name in ("a", "b")],
        },
        io={"stripe": "64KiB"},
        placement={"gradients": "nvme"},
        model={"config": GPT2 | {"n_layer": 3, "n_embd": 64}},
        train={"steps": 5, "batch_size": 2},
        output={"directory": str(tmp_path / "output"), "export": False},
    )


def train(table: dict[str, Any], trace: Tracing | None) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    console = Console(file=io.StringIO())
    _, exit_code = program.train(SwapConfig.load(table), console=console, trace=trace)
    assert exit_code == 0
    return lines_of(table["output"]["directory"])


@pytest.fixture(scope="module")
def traced(table, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("trace") / "out.json"
    with pytest.MonkeyPatch.context() as patch:  # As `without_digests`.
        patch.setattr("infinity.tools.training.program._DIGEST_SHARE", 1e-12)
        return path, train(table, Tracing(path, 2, 4))


def test_the_file_keeps_the_trace_event_format(traced):
    """Catapult's "Trace Event Format": the fields of each phase, and pairs that nest."""
    document = json.loads(traced[0].read_text())
    threads, open_pairs, phases, named = set(), defaultdict(list), set(), Counter()
    last_us = 0.0
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        phases.add(event["ph"])
        if event["ph"] == "M":
            threads.add(event["tid"])
            named[event["name"], event["tid"]] += 1
            continue
        assert event["ts"] >= last_us, "sorted"
        last_us = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["tid"] in threads
        elif event["ph"] == "b":
            open_pairs[event["cat"], event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert open_pairs[event["cat"], event["id"]].pop() == event["name"]
            assert event["tid"] in threads
        else:
            assert event["ph"] == "C"
            assert isinstance(event["args"]["value"], (int, float))
    assert phases == {"M", "X", "b", "e", "C"}
    assert not any(open_pairs.values())
    assert set(named.values()) == {1}, "a thread has one name, and all come first"
    assert {name for name, _ in named} == {"process_name", "thread_name", "thread_sort_index"}
    assert {tid for name, tid in named if name == "thread_name"} == threads - {0}


def test_spans_of_a_track_nest_or_do_not_overlap(traced):
    by_track = defaultdict(list)
    for span in chrome.read(traced[0]):
        if span.transfer is None:
            by_track["thread" if span.track in THREAD else span.track].append(span)
    for track, spans in by_track.items():
        for index, outer in enumerate(spans):
            for inner in spans[index + 1 :]:
                if inner.start_ns >= outer.end_ns:
                    break
                assert track != "thread", f"{outer} and {inner}"
                assert inner.end_ns <= outer.end_ns, f"{outer} and {inner}"


def test_stalls_and_updates_are_the_seconds_of_the_counters(traced):
    path, metrics = traced
    steps = summarize(chrome.read(path))
    assert [step.step for step in steps] == ["step 2", "step 3", "step 4"]
    for step, line in zip(steps, metrics[1:4], strict=True):
        waited_s = sum(
            line[f"{what}_wait_s"] for what in ("read", "write", "copy", "ranks", "data")
        )
        assert step.stall_s == pytest.approx(waited_s, abs=1e-6)
        updates_s = {use.track: use.busy_s for use in step.tracks}.get("updates", 0.0)
        assert updates_s == pytest.approx(line["update_s"], abs=1e-6) and line["update_s"] > 0
        # What is counted lies in the step, and the step in the seconds that the loop has measured,
        # but for what the machine takes between two looks at the clock.
        assert waited_s + updates_s <= step.length_s + 1e-6 <= line["elapsed_s"] + 1e-3


def test_transfers_carry_the_bytes_of_the_counters_to_the_track_of_their_drive(table, traced):
    path, metrics = traced
    moved = defaultdict(int)
    for step in summarize(chrome.read(path)):
        for use in step.tracks:
            moved[use.track] += use.nbytes
    first, second = (tier["path"] for tier in table["tiers"]["nvme"])
    for track, counter in (("reads", "nvme_read_nbytes"), ("writes", "nvme_write_nbytes")):
        on_drives = [moved[f"{track} {first}"], moved[f"{track} {second}"]]
        assert all(on_drives)
        assert sum(on_drives) == sum(line[counter] for line in metrics[1:4])


def test_a_transfer_is_asked_for_then_issued_then_over(traced):
    transfers = [span for span in chrome.read(traced[0]) if span.transfer is not None]
    assert len(transfers) > 20
    for span in transfers:
        assert span.start_ns <= span.args["issued_ns"] <= span.end_ns
        assert " of " in span.name


def test_stalls_name_their_unit_and_the_transfers_in_the_trace(traced):
    spans = chrome.read(traced[0])
    known = defaultdict(set)  # A transfer has a span in the lane of each drive it touches.
    for span in spans:
        if span.transfer is not None:
            known[span.transfer].add(span.name)
    stalls = [span for span in spans if span.track == Track.STALLS]
    assert stalls and all(" " in span.name for span in stalls), "causes, not names of counters"
    for span in stalls:
        for number, name in zip(span.args["transfers"], span.args["waits_for"], strict=True):
            assert known[number] == {name}


def test_a_slow_read_is_what_the_stall_waits_for(tmp_path):
    """On a drive that needs 100 ms for a read, nothing that is needed at once can be there."""
    torch.manual_seed(0)
    model = Mlp(width=256, layers=12).train()
    config = {
        "tiers": {"host": {"capacity": "8MiB"}, "nvme": [{"path": str(tmp_path / "swap")}]},
        "placement": {"gradients": "nvme"},
        "schedule": {"prefetch": False},
    }
    slow = [Fault(nth, "read", delay_s=0.1) for nth in range(1, 50)]
    engine = build(
        model, SwapConfig.load(config), weights=None, seed=0, units="auto", device=None,
        wrap_storage=lambda storage: FaultyEngine(storage, slow),
    )  # fmt: skip
    with engine:
        tracer = engine.counters.tracer
        tracer.start()
        model(torch.ones(2, 256))
        tracer.stop()
        stalls = [span for span in tracer.spans() if span.track == Track.STALLS]
    causes = [name for span in stalls for name in span.args["waits_for"]]
    assert causes and all(name.startswith("parameters of ") for name in causes)


def test_compute_spans_have_the_names_of_hooked_modules(traced):
    names = {span.name for span in chrome.read(traced[0]) if span.track == Track.COMPUTE}
    assert {f"transformer.h.{layer}" for layer in range(3)} <= names


def test_tracing_changes_no_loss(table, traced):
    plain = train(table, None)
    assert [line["loss"] for line in plain] == [line["loss"] for line in traced[1]]


def test_a_run_that_ends_early_leaves_what_was_traced(table, tmp_path):
    short = {**table, "train": {**table["train"], "steps": 2}}
    train(short, Tracing(tmp_path / "out.json", 2, 9))
    assert [step.step for step in summarize(chrome.read(tmp_path / "out.json"))] == ["step 2"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    directory = tmp_path / "gone"
    said: list[str] = []
    tracing = Tracing(directory / "out.json", 1, 1)
    tracing.follow(Counters().tracer, said.append)
    with tracing.step(1):
        pass
    tracing.finish()
    assert len(said) == 1 and said[0].startswith("the trace was not written: ")
    assert str(directory) in said[0]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (("out.json", 0, 3), "expected 1 <= FIRST <= LAST"),
        (("out.json", 4, 3), "expected 1 <= FIRST <= LAST"),
        (("out.json", 6, 9), "FIRST at most train.steps, 5"),
        (("nowhere/out.json", 1, 2), "cannot be written"),
        ((".", 1, 2), "cannot be written"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_the_run(tmp_path, plan, says):
    name, first, last = plan
    with pytest.raises(ConfigError, match=says):
        Tracing(tmp_path / name, first, last).check(num_steps=5)


def test_steps_are_a_range_or_one():
    assert parse_steps("2:5") == (2, 5) and parse_steps("3") == (3, 3)
    for text in ("", ":", "2:", ":5", "a:b", "1:2:3", "-1:2"):
        with pytest.raises(ConfigError, match="--trace-steps"):
            parse_steps(text)


def test_the_trace_commands_read_what_train_wrote(table, tmp_path):
    config, trace, picture = tmp_path / "job.json", tmp_path / "out.json", tmp_path / "out.png"
    config.write_text(json.dumps(table))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_script(COMMAND, *arguments)

    done = command("train", str(config), "--trace", str(trace), "--trace-steps", "2:3")
    assert done.returncode == 0, done.stderr
    done = command("trace", "summary", str(trace), "--plot", str(picture), "--step", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 2  ") and "-bound: " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = command("trace", "summary", str(trace), "--json")
    assert [step["step"] for step in json.loads(done.stdout)] == ["step 2", "step 3"]

    done = command("train", str(config), "--trace", str(trace), "--trace-steps", "9")
    assert done.returncode == 2 and "at most train.steps, 5" in done.stderr
    done = command("trace", "summary", str(config))
    assert done.returncode == 2 and "is not a trace" in done.stderr


def test_copies_of_a_device_with_its_own_memory_have_their_tracks(tmp_path):
    torch.manual_seed(0)
    model = Mlp(width=32, layers=3).train()
    config = {"tiers": {"host": {"capacity": "8MiB"}, "nvme": [{"path": str(tmp_path / "swap")}]}}
    infinity.offload(model, config, device=SimulatedDevice())
    engine = infinity.engine_of(model)
    tracer = engine.counters.tracer
    optimizer = infinity.AdamW(model, lr=1e-3)
    before = engine.counters.snapshot()
    tracer.start()
    for number in (1, 2):
        with tracer.step(number):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    tracer.stop()
    after = engine.counters.snapshot()
    engine.close()

    for track, counter in (
        (Track.COPIES_IN, "device_in_nbytes"),
        (Track.COPIES_OUT, "device_out_nbytes"),
    ):
        spans = [span for span in tracer.spans() if span.track == track]
        moved_nbytes = after[counter] - before.get(counter, 0)
        assert spans and sum(s.args["nbytes"] for s in spans) == moved_nbytes
    assert {span.name for span in tracer.spans() if span.track == Track.PHASES} == {
        "forward (train)", "backward", "optimizer step"
    }  # fmt: skip
