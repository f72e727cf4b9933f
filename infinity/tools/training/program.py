"""`infinity train`: from a configuration file to a fine-tuned checkpoint.

The program first refuses everything that can be refused, by reading configurations, headers and
sizes. Then it makes the swap directory and streams the weights. Then it makes the steps. However
the run ends, the engine is closed, which releases the swap directory.

How a run ends:
  all steps done       export, sample, summary; exit code 0
  a signal             the step is finished, then export and summary, or where the file has
                       [checkpoint] a checkpoint and no export; its copy to another file system
                       has `checkpoint.grace_s` seconds; exit code 128 and the signal's number: 130
                       for SIGINT, 143 for SIGTERM, 129 for SIGHUP (`process.Interrupt` has all)
  a second SIGINT      KeyboardInterrupt at once; no export; exit code 130
  NonFiniteError       the weights of the last good step are exported, then the error; exit code 2
  any other error      nothing is exported; exit code 2

The exit code reports on the weights only. A failure to print, or to write metrics.jsonl or
summary.json, does not end the run or change the exit code: it is reported when it happens, and in
the summary.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from infinity.config import SwapConfig
from infinity.tools.training.adapter import without_renaming_notice
from infinity.tools.training.arguments import require_trackers
from infinity.tools.training.job import prepare
from infinity.tools.training.process import Interrupt, expand_segments, keep_freed_memory
from infinity.tools.training.ranks import job_rank
from infinity.tools.training.report import Summary
from infinity.tools.training.resume import plan_resume
from infinity.tools.training.run import Run
from infinity.tools.training.settle import choices, settle
from infinity.tools.training.tracing import TracePlan

_STOP_NOTICE = "\nstopping after this step, then writing {}; once more to stop at once\n"


def train(
    config: SwapConfig,
    *,
    console: Console | None = None,
    trace: TracePlan | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    accept_changes: bool = False,
) -> tuple[Summary, int]:
    """Runs the main job. Returns (summary, exit code). Raises InfinityError.

    `trace` writes a timeline of some steps, also if the run ends early. `resume` continues from the
    newest checkpoint of `[checkpoint]`, or begins if there is none. `resume_from` continues from
    one checkpoint, or from the newest in a directory. `accept_changes` continues also with another
    learning rate, schedule or number of steps, and prints what differs.
    """
    config.require("model", "data", "train")
    assert config.train is not None
    require_trackers(config.train.report_to)
    settled = choices(config)
    config = settle(config)
    keep_freed_memory()
    # So long a thread that runs Python holds up a launch of a kernel; it is 5 ms without this. On
    # an H200 a launch beside such a thread takes 0.9 ms in the place of 8.
    sys.setswitchinterval(5e-4)
    expand_segments()
    console = console or Console()
    with ExitStack() as stack:
        stack.enter_context(without_renaming_notice())
        rank = stack.enter_context(job_rank(config))
        if not rank.is_first:
            console, trace = Console(quiet=True), None
        resumed = plan_resume(config, resume=resume, resume_from=resume_from)
        job = prepare(config, stack, resumed, rank, accept_changes=accept_changes)
        if trace is not None:
            trace.check(num_steps=job.num_steps)
        run = Run(config, job, console, trace)
        stack.callback(run.close)
        run.note([*map(str, settled), *job.accepted])
        run.set_up()
        written = "the export" if config.checkpoint is None else "a checkpoint"
        with Interrupt(_STOP_NOTICE.format(written)) as interrupt:
            run.train(interrupt)
            run.finish(interrupt)
            return run.summary, interrupt.exit_code
