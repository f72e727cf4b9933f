"""The summary of a step, from spans made by hand. One millisecond is 10**6 ns."""

from __future__ import annotations

import pytest

from infinity.errors import ConfigError
from infinity.observe import Count, Span, Track, chrome
from infinity.observe.step_summary import summarize
from infinity.tools.cli.trace import lines_of
from infinity.tools.pictures.steps import choose

MS = 10**6
DRIVE = "/mnt/nvme0"


def span(track: str, name: str, start_ms: float, end_ms: float, **args) -> Span:
    return Span(track, name, round(start_ms * MS), round(end_ms * MS), args)


def transfer(track: str, number: int, asked_ms: float, issued_ms: float, end_ms: float) -> Span:
    args = {"nbytes": 4096, "issued_ns": round(issued_ms * MS)}
    return Span(
        f"{track} {DRIVE}", "state of h.0", round(asked_ms * MS), round(end_ms * MS), args, number
    )


STEP = [
    span(Track.STEPS, "step 3", 100, 200, step=3),
    span(Track.COMPUTE, "h.0", 100, 130),
    span(
        Track.STALLS,
        "h.1 needs its parameters",
        130,
        170,
        waits_for=["state of h.0"],
        transfers=[1, 2],
    ),
    span(Track.STALLS, "h.1 needs its parameters", 171, 172),
    span(Track.UPDATES, "update of h.0", 172, 180),
    span(Track.STALLS, "state must be written", 180, 182),
    transfer(Track.READS, 1, 90, 95, 150),
    transfer(Track.READS, 2, 120, 140, 170),
    transfer(Track.WRITES, 3, 150, 160, 230),
]


def test_shares_are_of_the_step_and_count_no_moment_twice():
    (step,) = summarize(STEP)
    shares = {use.track: use.share for use in step.tracks}
    assert shares == pytest.approx(
        {
            "compute": 0.30, "updates": 0.08, "stalls": 0.43,
            f"reads {DRIVE}": 0.70, f"writes {DRIVE}": 0.40,
        }
    )  # fmt: skip
    assert step.length_s == pytest.approx(0.1)
    assert step.stall_s == pytest.approx(0.043)
    assert step.other_s == pytest.approx(0.1 - 0.03 - 0.08 * 0.1 - 0.043)
    assert {use.track: use.nbytes for use in step.tracks}[f"reads {DRIVE}"] == 4096, (
        "begun in the step"
    )


def test_the_bound_is_the_busiest_resource_and_its_busiest_track():
    (step,) = summarize(STEP)
    assert step.bound.name == "read-bound" and step.bound.resource == DRIVE
    assert step.bound.share == pytest.approx(1.0), "reads and writes of one drive together"

    thread = [
        span(Track.STEPS, "step 1", 0, 10),
        span(Track.COMPUTE, "h", 0, 4),
        span(Track.UPDATES, "u", 4, 9),
    ]
    (step,) = summarize(thread)
    assert step.bound.name == "update-bound" and step.bound.share == pytest.approx(0.9)
    assert [use.track for use in step.tracks] == ["compute", "updates"]


def test_the_largest_stall_comes_first_with_what_it_waited_for():
    (step,) = summarize(STEP, num_stalls=2)
    first, second = step.largest
    assert first.cause == "h.1 needs its parameters" and first.stall_s == pytest.approx(0.040)
    assert first.start_s == pytest.approx(0.030)
    assert first.waits_for == ("state of h.0",)
    assert first.asked_before_s == pytest.approx(0.010), "transfer 2 was the last to complete"
    assert first.queued_s == pytest.approx(0.010), "until 140 ms it waited for its turn"
    assert second.cause == "state must be written" and second.asked_before_s is None
    assert [(c.cause, c.count, round(c.stall_s, 6)) for c in step.causes] == [
        ("h.1 needs its parameters", 2, 0.041),
        ("state must be written", 1, 0.002),
    ]


def test_a_person_reads_the_bound_the_stall_and_its_transfer():
    (step,) = summarize(STEP)
    text = "\n".join(lines_of(step))
    assert text.startswith(f"step 3  100.0 ms, stalled 43%, read-bound: {DRIVE} busy 100%")
    assert "40.0 ms  at 30.0 ms: h.1 needs its parameters" in text
    assert (
        "waiting for state of h.0; asked for 10.0 ms before, then 10.0 ms in the drive's queue"
        in text
    )


def test_without_steps_the_whole_trace_is_one_and_an_empty_one_none():
    (whole,) = summarize(STEP[1:])
    assert whole.step == "all" and whole.length_s == pytest.approx(0.14)
    assert summarize([]) == []


def test_a_step_is_chosen_by_its_number():
    steps = summarize([*STEP, span(Track.STEPS, "step 4", 200, 300)])
    assert choose(steps, None).step == "step 4" and choose(steps, 3).step == "step 3"
    with pytest.raises(ConfigError, match="step 9 is not in the trace; it has step 3, step 4"):
        choose(steps, 9)
    with pytest.raises(ConfigError, match="the trace is empty"):
        choose([], None)


def test_what_is_written_is_read_back(tmp_path):
    chrome.write(tmp_path / "t.json", STEP, [Count("host_in_use_nbytes", 110 * MS, 7.0)])
    found = chrome.read(tmp_path / "t.json")
    # Times in a file count from its first event.
    (before,), (after,) = summarize(STEP), summarize(found)
    assert [(s.track, s.name, s.end_ns - s.start_ns, s.transfer) for s in found] == [
        (s.track, s.name, s.end_ns - s.start_ns, s.transfer)
        for s in sorted(STEP, key=lambda each: (each.start_ns, -each.end_ns))
    ]
    assert lines_of(after) == lines_of(before)
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "'infinity train FILE --trace OUT.json' writes one"),
        ("[]", "not a trace of this version"),
        ("{", "is not a trace"),
        ("{}", "infinity-trace/1"),
    ],
)
def test_another_file_is_refused(tmp_path, content, says):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        chrome.read(tmp_path / "t.json")
