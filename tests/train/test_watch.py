"""A run seen from another shell, and its last words."""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.config import SwapConfig
from infinity.config.render import to_toml
from infinity.config.source import read_file
from infinity.tools.cli.watch import numbers_of, screen
from infinity.tools.training.ending import next_commands, notify
from infinity.tools.training.metrics import MetricsReader
from infinity.tools.training.report import Reporter, Step, Summary, line_of
from tests.support.commands import imported_by, run_command
from tests.support.forked import COMMAND

BEGUN_S = 1.8e9
AFTER = {"nvme_write_nbytes": 1e9, "read_wait_s": 0.5, "copy_wait_s": 0.25, "update_s": 0.25,
         "host_in_use_nbytes": 1 << 30}  # fmt: skip


def line(step: int, **more: Any) -> dict[str, Any]:
    """A step of 2 s; every third second one ends, every fifth is evaluated."""
    held_out = 2.0 + 1 / step if step % 5 == 0 else None
    found = line_of(
        Step(number=step, loss=2.0 + 4 / step, grad_norm=0.5, num_tokens=1000, learning_rate=1e-4,
             held_out_loss=held_out), {}, AFTER, 2.0,
    )  # fmt: skip
    state = {"steps": 1000, "resumed_at": 0, "checkpoint": None, "ended_s": BEGUN_S + 3 * step}
    return found | state | more


def write(file: Path, lines: list[dict[str, Any]], torn: str = "") -> None:
    file.write_text("".join(json.dumps(each) + "\n" for each in lines) + torn)


def text_of(
    lines: list[dict[str, Any]], age_s: float = 0.0, width: int = 80, life_nbytes: int = 0
) -> str:
    """The screen `age_s` after the newest step."""
    console = Console(file=io.StringIO(), width=width)
    now_s = lines[-1]["ended_s"] + age_s
    console.print(screen(lines, Path("metrics.jsonl"), width, now_s, "", life_nbytes))
    return console.file.getvalue()


def test_the_screen_has_what_a_person_asks_and_fits_a_terminal() -> None:
    long = "/nvme0/" + "x" * 90
    text = text_of([line(step, checkpoint=long) for step in range(1, 301)])
    rows = text.rstrip("\n").split("\n")
    assert len(rows) <= 24 and max(map(len, rows)) <= 80
    assert rows[0].startswith("step 300 of 1,000, ETA 35:00, 500 tokens/s")
    said = ("held-out", "least 2.003 at step 300", "rate 1.00e-04", "norm 0.5", "compute 50%",
            "drives 25%", "link 12%", "update 12%", "host 1.0 GiB", "written 279.4 GiB",
            "931.3 GiB by the end", "/nvme0/xxx")  # fmt: skip
    assert [word for word in said if word not in text] == []
    assert "--endurance SIZE" in text  # Unless it is told, the life of the drives is not known.
    worn = text_of([line(step) for step in range(1, 301)], life_nbytes=10**14)
    assert "0.30% of the drives' life so far, 1.00% by the end" in worn


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """Over a mount a reader sees any part of a file. A resumed run replaces the file."""
    file = tmp_path / "metrics.jsonl"
    whole = json.dumps(line(3))
    write(file, [line(1), line(2)], torn=whole[:40])
    reader = MetricsReader(file)

    def steps() -> list[int]:
        reader.read()
        return [each["step"] for each in reader.lines]

    assert steps() == steps() == [1, 2]
    with file.open("a") as more:
        more.write(whole[40:] + "\n")
    assert steps() == [1, 2, 3]
    (tmp_path / "new").write_text(json.dumps(line(1)) + "\n")
    (tmp_path / "new").rename(file)
    assert steps() == [1]


def test_a_file_of_another_program_is_refused_by_its_line(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    refused = run_command("watch", tmp_path)
    assert refused.exit_code == 2 and "step 1 has no 'copy_wait_s'; expected" in refused.output
    for other in ({"loss": "2"}, {"steps": [9]}, {"update_s": None}, {"held_out_loss": {}}):
        write(tmp_path / "metrics.jsonl", [line(1), line(2) | other])
        refused = run_command("watch", tmp_path)
        assert refused.exit_code == 2 and f"step 2 has no {next(iter(other))!r}; " in refused.output


def test_a_resumed_run_has_the_pace_of_its_own_steps() -> None:
    """The night between both runs is no part of it; the losses and bytes of both count."""
    before = [line(step, ended_s=BEGUN_S - 50_000 + step) for step in range(1, 11)]
    after = [line(step, ended_s=BEGUN_S + 4 * step, resumed_at=10) for step in range(11, 21)]
    numbers = numbers_of(before + after, BEGUN_S + 80)
    assert numbers["left_s"] == pytest.approx(4 * 980) and numbers["steps_done"] == 20


def test_a_run_that_is_over_or_stands_still_is_called_so(tmp_path: Path) -> None:
    over = [line(step, steps=20, peak_rss_nbytes=step) for step in range(1, 21)]
    assert "all steps are done" in text_of(over).splitlines()[0]
    assert "no step for 1:00:00" in text_of([line(1), line(2)], age_s=3600).splitlines()[0]
    write(tmp_path / "metrics.jsonl", over)
    result = run_command("watch", tmp_path, env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "all steps are done" in result.output
    found = json.loads(run_command("watch", tmp_path, "--json").output)
    assert found["newest"]["step"] == 20 and "num_parameters" not in found
    assert found["peak_rss_nbytes"] == over[-1]["peak_rss_nbytes"]
    assert "output.directory" in run_command("watch", tmp_path / "nothing").output
    code = "from infinity.tools.cli.watch import numbers_of; numbers_of([], 0.0)"
    assert imported_by(code, ("torch", "transformers")) == ([], "")


def test_several_adapters_have_a_row_each_and_other_commands_name_their_directories(
    tmp_path: Path,
) -> None:
    for name, loss in (("a-longer-name", 2.0), ("b", 1.5)):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "infinity-run.json").write_text("{}")
        lines = [line(step, loss=loss, held_out_loss=loss, adapter=name) for step in (1, 2)]
        write(tmp_path / "sweep" / name / "metrics.jsonl", lines)
    (tmp_path / "sweep" / "c").mkdir()  # Has made no step yet.
    (tmp_path / "sweep" / "c" / "infinity-run.json").write_text("{}")
    rows = run_command("watch", str(tmp_path / "sweep")).stdout.splitlines()
    assert rows[0].startswith("3 adapters: step 2 of 1,000")
    assert rows[2] == "b              step 2  loss 1.500  held-out 1.500, least 1.500 at step 1"
    assert rows[3].startswith("a-longer-name  step 2  loss 2.000") and max(map(len, rows)) <= 80
    found = json.loads(run_command("watch", str(tmp_path / "sweep"), "--json").stdout)
    assert {name: each["steps_done"] for name, each in found["adapters"].items()} == {
        "a-longer-name": 2, "b": 2, "c": 0,
    }  # fmt: skip
    words = ("inspect",), ("replay",), ("generate", "a"), ("export-adapter", "--for", "vllm")
    for command in words:
        done = run_command(command[0], str(tmp_path / "sweep"), *command[1:])
        assert done.exit_code == 2
        said = " ".join(done.output.split())
        assert f"It holds 3 runs: give one, such as {tmp_path}/sweep/a-longer-name" in said
    write(tmp_path / "sweep" / "b" / "metrics.jsonl", [line(1)])
    done = run_command("watch", str(tmp_path / "sweep"))
    assert done.exit_code == 2 and "is no output directory of a run" in done.output, "of its own"


def test_the_end_of_a_run_is_that_of_its_summary(tmp_path: Path) -> None:
    """The last checkpoint comes after the last line; the summary of a run before says nothing."""
    lines = [line(step, steps=20) for step in range(1, 21)]
    summary = Summary(steps=20, num_parameters=1, resumed_at=20)
    summary.checkpoint, summary.export_directory = "checkpoints/step-20", "out"
    summary.sample = "Once\nupon"
    (tmp_path / "summary.json").write_text(json.dumps(summary.to_dict()))
    file = tmp_path / "metrics.jsonl"
    # Times over SFTP are in whole seconds.
    for ended_s, found in ((BEGUN_S - 1, None), (BEGUN_S + 59, "checkpoints/step-20")):
        os.utime(tmp_path / "summary.json", (ended_s, ended_s))
        assert numbers_of(lines, BEGUN_S, file)["checkpoint"] == found
    numbers, *_, last = numbers_of(lines, BEGUN_S, file), *screen(lines, file, 80, 0).renderables
    assert numbers["export_directory"] == "out" and numbers["steps_done"] == 20
    assert str(last) == "sample      Once upon"
    assert numbers_of(lines[:-1], BEGUN_S, file)["checkpoint"] is None
    summary = Summary(steps=20, num_parameters=1, resumed_at=19, interrupted_by="SIGINT")
    (tmp_path / "summary.json").write_text(json.dumps(summary.to_dict()))
    os.utime(tmp_path / "summary.json", (BEGUN_S + 61, BEGUN_S + 61))
    heading, trouble, *_ = screen(lines[:-1], file, 80, BEGUN_S, "away").renderables
    assert "ended early" in str(heading) and str(trouble) == "away"


@pytest.mark.parametrize(("steps", "said"), [(1, "all steps are done"), (2, "step 1 of 2")])
def test_on_a_terminal_the_screen_waits_for_the_first_step_and_for_the_last_checkpoint(
    steps: int, said: str, tmp_path: Path
) -> None:
    """Also of a run that stops before its last step."""
    run, (own, theirs) = tmp_path / "out", pty.openpty()
    words = [sys.executable, "-c", COMMAND, "watch", str(run), "--every", "0.1"]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(own, 4096).decode(errors="ignore")

    show("waiting for the first step")
    run.mkdir()
    write(run / "metrics.jsonl", [line(1, steps=steps, ended_s=time.time())])
    show(said)
    assert process.poll() is None
    summary = Summary(steps=steps, num_parameters=1, resumed_at=1, stopped_early=steps > 1)
    summary.checkpoint = "out/step-1"
    (run / "summary.json").write_text(json.dumps(summary.to_dict()))
    show("out/step-1")
    assert process.wait(timeout=60) == 0
    os.close(own)


def settings(tmp_path: Path, tokenizer: str = "tokens", **output: Any) -> SwapConfig:
    return SwapConfig.load({
        "output": {"directory": str(tmp_path / "out"), **output},
        "model": {"path": str(tmp_path / "base")}, "adapter": {}, "checkpoint": {},
        "train": {"steps": 1, "batch_size": 1}, "data": {"paths": "a", "tokenizer": tokenizer},
    })  # fmt: skip


def test_the_last_lines_are_commands(tmp_path: Path) -> None:
    summary = Summary(steps=3, num_parameters=1)
    assert next_commands(settings(tmp_path), summary) == []
    summary.interrupted_by, summary.checkpoint = "SIGINT", "out/checkpoints/step-2"
    go_on, look = next_commands(settings(tmp_path), summary)
    assert go_on.startswith("next: infinity train CONFIG --resume")
    assert look.split()[:3] == ["infinity", "inspect", "out/checkpoints"]
    summary.interrupted_by, summary.export_directory = None, str(tmp_path / "out")
    text = "\n".join(next_commands(settings(tmp_path), summary))
    assert f"infinity merge {tmp_path / 'base'} {tmp_path / 'out'} -o merged" in text
    assert f"infinity chat {tmp_path / 'out'}" in text
    assert f"infinity export-adapter {tmp_path / 'out'} --for vllm" in text
    assert f"infinity score {tmp_path / 'base'} --adapter {tmp_path / 'out'} DATA" in text
    text = "\n".join(next_commands(settings(tmp_path, tokenizer="bytes"), summary))
    assert "infinity generate" in text and "infinity chat" not in text
    (tmp_path / "out").mkdir()
    (tmp_path / "out/adapter_config.json").write_text('{"target_modules": ["kv_b_proj"]}')
    text = "\n".join(next_commands(settings(tmp_path), summary))
    assert "--for sglang" in text and "vllm" not in text, "which does not load these factors"
    in_full = SwapConfig.load({
        **settings(tmp_path).to_dict(), "adapter": {"experts_full": ["experts.1"]},
    })  # fmt: skip
    assert "export-adapter" not in "\n".join(next_commands(in_full, summary))


def test_the_command_that_goes_on_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its overrides and its ranks; and the checkpoints are looked for where they are."""
    file = tmp_path / "a run.toml"
    file.write_text(to_toml(settings(tmp_path), only_set=True))
    overrides = ("output.directory=other", f'checkpoint.directory="{tmp_path}/else where"')
    config = SwapConfig.from_table(*read_file(file, overrides))
    summary = Summary(steps=3, num_parameters=1, interrupted_by="SIGINT")
    summary.checkpoint = str(config.checkpoint_directory / "step-2")
    go_on, look = (shlex.split(text, comments=True) for text in next_commands(config, summary))
    sets = [word for text in overrides for word in ("--set", text)]
    assert go_on == ["next:", "infinity", "train", str(file), *sets, "--resume"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    go_on, _ = next_commands(config, summary)
    assert go_on.startswith("next: torchrun --nproc-per-node 2 -m infinity train ")
    assert look == ["infinity", "inspect", f"{tmp_path}/else where"]


def test_the_command_of_the_file_is_told_each_event_once(tmp_path: Path) -> None:
    """One that fails is reported and raises nothing."""
    console = Console(file=io.StringIO(), width=200)
    reporter, summary = Reporter(console, steps=9, log_every=1), Summary(steps=9, num_parameters=1)
    for step in range(1, 41):
        summary.add(line(step, held_out_loss=1.0 if step == 1 or step % 6 == 0 else None))
        assert summary.is_on_plateau is (step >= 30)
    told = tmp_path / "told"
    code = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')"
    config = settings(tmp_path, notify=f'{sys.executable} -c "{code}"')
    notify(config, summary, reporter, "plateau", "the loss falls no more")
    notify(config, summary, reporter, "plateau", "again")
    notify(config, summary, reporter, "end", "done")
    found = [json.loads(text) for text in told.read_text().splitlines()]
    assert [each["event"] for each in found] == ["plateau", "end"] and found[0]["steps"] == 40
    assert found[0]["text"] == "out: the loss falls no more"
    notify(settings(tmp_path, notify="exit 3"), summary, reporter, "failure", "it ended")
    assert "output.notify failed" in console.file.getvalue()
