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

import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from transformers import set_seed

import infinity
from infinity.bounded import MalformedError
from infinity.checkpoint import export_safetensors, weight_source
from infinity.checkpoint.durable import replace_file
from infinity.checkpoint.run.contents import digest_of_state
from infinity.checkpoint.run.references import reference_to_bytes
from infinity.config import JobConfig, SwapConfig
from infinity.config.paths import RUN_NAMES
from infinity.config.schema import changed
from infinity.config.schema.inputs import AdapterConfig
from infinity.engine.build import fits
from infinity.errors import CapacityError, ConfigError, InfinityError, NonFiniteError
from infinity.integrations.hf import prepare_trainer
from infinity.integrations.windows import why_plain
from infinity.sizes import counted
from infinity.tools.training.adapter import save_adapter, without_renaming_notice
from infinity.tools.training.checkpoints import TRAINER_STATE, RunCheckpoints, plan_resume
from infinity.tools.training.embedding import save_modules
from infinity.tools.training.ending import Event, model_card, next_commands, notify
from infinity.tools.training.job import Job, prepare
from infinity.tools.training.methods import batch_of
from infinity.tools.training.metrics import MetricsReader
from infinity.tools.training.model import generate, reference_path, sharing_budgets, with_own_drives
from infinity.tools.training.output import BEST_NAME, MARKER_NAME, SUMMARY_NAME
from infinity.tools.training.process import expand_segments, give_back, keep_freed_memory
from infinity.tools.training.ranks import job_rank
from infinity.tools.training.report import (
    Line,
    Reporter,
    Step,
    Summary,
    Tracing,
    compared,
    line_of,
    summary_of,
    tracked,
    write_summary,
)
from infinity.tools.training.settle import choices, lines_of, settle
from infinity.tools.training.trainer import require_trackers

_STOP_NOTICE = "\nstopping after this step, then writing {}; once more to stop at once\n"
_DIGEST_SHARE = 0.01  # Of the time: what digests of the state may take.
_DIGESTED_PER_S = 1e9  # Bytes, before the first digest has shown it.


class Run:
    """One run, from the first byte in a tier to the summary. `close` releases the tiers."""

    def __init__(
        self, config: JobConfig, job: Job, console: Console, tracing: Tracing | None
    ) -> None:
        self._config = config
        self._job = job
        self.summary = Summary(steps=job.num_steps, num_parameters=job.num_parameters)
        self._reporter = Reporter(
            console, steps=job.num_steps, log_every=config.train.log_every, name=self._name
        )
        self.checkpoints = RunCheckpoints(config, job, self._reporter, self.summary)
        self.interrupt = job.rank.interrupt
        self._is_output_lost = False  # A warning was printed.
        self._engine: Any = None
        self._reference_engine: Any = None
        self._before: Mapping[str, float] = {}
        self._began_s = 0.0
        self._line: Line = {}  # Of the newest step.
        self._digest_due_s = math.inf  # When the state is digested next.
        self._tracing = tracing
        self._traced = ExitStack()  # The step that is traced now.

    @property
    def _name(self) -> str:
        """The name of an adapter that is one of several."""
        return (self._config.adapter and self._config.adapter.name) or ""

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._job.model

    @property
    def num_steps(self) -> int:
        """The steps that are done, with those before a resumed run."""
        return int(self._job.trainer.state.global_step)

    def set_up(self, *, is_first: bool = True) -> None:
        """Makes the tiers and streams the weights into them, unless another run has done so."""
        self._reporter.note(self._description())
        self.checkpoints.clear_way()
        if is_first:
            self._offload()
        self._engine, train = infinity.engine_of(self._job.model), self._config.train
        is_divided = self._config.schedule.micro_batch is not None
        is_layer_major = None if is_divided or train.grpo is not None else False
        if (why := why_plain(self._job.trainer)) and self._name:
            raise ConfigError(
                f"adapters: several adapters cannot share the reads of the base: {why}"
            )
        if is_layer_major is None and why is None:
            is_layer_major = True  # Its order is that of `infinity train` itself.
        # With an adapter all micro-batches of a step pass a block together, else those of a batch.
        window = None
        if self._config.adapter is None:
            window = train.batch_size // batch_of(self._config)[0]
        prepare_trainer(
            self._job.trainer, layer_major=is_layer_major, window=window, sampler=self._job.sampler
        )

    def _offload(self) -> None:
        resume = self._job.resume.path if self._job.resume is not None else None
        config = self._config
        if self._name:  # Checkpoints hold one adapter each; none is linked.
            resume = None
            if config.checkpoint is not None:
                config = changed(config, {"checkpoint.durability": "none"})
        model, options, reference = self._job.model, self._config.model, self._job.reference
        assert options is not None
        with sharing_budgets(config, has_second=reference is not None) as config:
            try:
                infinity.offload(
                    model, config, weights=options.path, seed=options.seed, ignore=options.ignore,
                    resume=resume, group=self._job.rank.topology,
                )  # fmt: skip
            except CapacityError as error:
                if self._name:
                    error.args = (f"{error}; {_how_many_fit(model, config)}",)
                raise
            if reference is not None:
                apart = changed(with_own_drives(config, "reference"), {"adapter": None})
                path = reference_path(config)
                infinity.offload(reference, apart, weights=path, ignore=options.ignore)
                self._reference_engine = infinity.engine_of(reference)
        engine = self._engine = infinity.engine_of(model)
        self.summary.update_on = engine.update_device.place
        if not engine.device.shares_host_memory:
            self._reporter.note(f"updates {engine.update_device}")
        if self._tracing is not None:
            self._tracing.follow(engine.counters.tracer, self._reporter.note)
        give_back()

    def _description(self) -> str:
        length, held_out = self._config.data.sequence_length, self._job.data.held_out
        num_rows, shown = len(self._job.trainer.train_dataset), self._config.train.diffusion
        most = "" if self._job.data.is_ready else "at most "
        what = f"{counted(num_rows, 'sequences')} of {most}{length}"
        what = what if shown is None else shown.described(num_rows)
        return (
            f"{self._job.plan.kind}, {self.summary.num_parameters:,} parameters; "
            f"{self._job.num_tokens:,} tokens in {what}, "
            f"{0 if held_out is None else len(held_out):,} held out"
        )

    def _begin(self) -> None:
        """Marks the output directory as that of a run, with the facts that its bits depend on, and
        begins the metrics, with those before a resumed step."""
        output, after, path = self._job.output, self.summary.resumed_at, None
        if output is not None:
            if output.is_unmarked:
                self._reporter.note(f"{MARKER_NAME} is missing in {output.path}; added")
            has_accepted = bool(self.checkpoints.accepted)
            output.mark(self._job.receipt(), after=after, has_accepted=has_accepted)
            path = self._config.output.metrics_path
        self._reporter.start(path, resumed_at=after)
        now_s = time.perf_counter()
        self.summary.phases_s["setup_s"] = now_s - self._job.started_s
        placed = self._engine.placed_nbytes().values()
        nbytes = sum(n for tiers in placed for tier, n in tiers.items() if tier != "checkpoint")
        self._digest_due_s = now_s + nbytes / _DIGESTED_PER_S / _DIGEST_SHARE
        if self._tracing is not None or self._job.rank.count > 1:
            # A digest makes updates early, which a trace is to show; ranks have a part each.
            self._digest_due_s = math.inf

    def _resume(self) -> None:
        self.checkpoints.resume(self._engine)
        self._begin()

    def train(self) -> None:
        """Makes steps until the last one or until a signal requests an end; then a checkpoint."""
        resume, interrupt = self._job.resume, self.interrupt
        self._job.model.train()
        if self._name:  # As the trainer did before others were made.
            set_seed(self._config.train.seed)
        # Dropout starts alike for every source of weights, and differs on every rank.
        torch.manual_seed(self._config.train.seed + self._job.rank.rank)
        try:
            if resume is None:
                self._begin()
            if not self._is_stopped():
                state = resume.extra[TRAINER_STATE] if resume is not None else None
                restore = self._resume if resume is not None else None
                self._job.trainer.run(self, state=state, restore=restore)
        except NonFiniteError:
            self._reporter.end_of_steps()
            if self.num_steps and self._config.output.export:
                if self._job.rank.is_first:
                    self._export("the weights of the last good step")
                    self._write_summary()
                self._wait_for_all("the export")
            raise
        finally:
            self._job.trainer.report_unevaluated()
            self._reporter.end_of_steps()
        if interrupt.received is not None:
            self.summary.interrupted_by = interrupt.received.name
        elif self.num_steps < self._job.num_steps:
            self.summary.stopped_early = True
            if not self.summary.steps_s:
                patience = self._config.train.early_stopping_patience
                self._reporter.note(
                    "no step was made: the run that is resumed ended with at least "
                    f"train.early_stopping_patience={patience} evaluations in a row without a "
                    "new lowest loss; a larger one makes it go on, and so does 0, which is none"
                )
        self.checkpoints.end(self.num_steps)

    def _is_stopped(self) -> bool:
        """Whether any rank was asked to end. A signal reaches ranks at different times."""
        interrupt = self.interrupt
        if self._job.rank.count > 1:
            [received] = max(
                self._engine.ranks.all_gather_numbers("whether to stop", interrupt.received or 0)
            )
            if interrupt.received is None and received:
                interrupt.received = signal.Signals(int(received))
        return interrupt.received is not None

    def _wait_for_all(self, what: str) -> None:
        """Waits for all ranks: they need this rank's shards as long as they read weights."""
        self._engine.ranks.barrier(what)

    def finish(self) -> None:
        """Completes the run after its steps; rank 0 exports."""
        if self._job.rank.is_first:
            self._finish()
            text = "all steps are done"
            if self.num_steps < self._job.num_steps:
                text = f"ended after step {self.num_steps} of {self._job.num_steps}"
            self._notify("end", text)
        self._wait_for_all("the end of the run")

    def compare(self, runs: Mapping[str, Run]) -> None:
        """Prints how the runs of several adapters have ended."""
        if not self._job.rank.is_first:
            return
        try:
            rows = compared({name: run.all_steps() for name, run in runs.items()})
        except MalformedError as error:
            rows = [f"warning: the adapters are not compared: {error}"]
        for row in rows:
            self._reporter.note(row, of_all=True)

    def all_steps(self) -> Summary:
        """Returns the summary with the steps before a resume, where their lines can be read. Raises
        MalformedError for lines of another program."""
        metrics = MetricsReader(self._config.output.metrics_path)
        if self.summary.resumed_at:  # The lines may be many.
            with suppress(OSError):
                metrics.read()
        if len(metrics.lines) > len(self.summary.steps_s):  # Else some were not written.
            return summary_of(metrics.lines)
        return self.summary

    def fail(self, error: BaseException) -> None:
        """Tells whom the file names that the run has failed."""
        if self._job.rank.is_first:
            begun = 0 if self._job.resume is None else self._job.resume.step
            step = max(self.num_steps, begun)
            self._notify("failure", f"failed after step {step}: {error}")

    def _notify(self, event: Event, text: str) -> None:
        notify(self._config, self.summary, self._reporter, event, text)

    def _finish(self) -> None:
        """Exports, samples and writes the summary; the summary also if another part has failed."""
        self._restore()
        self._keep_reference()
        try:
            goes_on = self.interrupt.received is not None and self._config.checkpoint is not None
            if self._config.output.export and self.num_steps and not goes_on:
                what = "the model" if self._config.adapter is None else "the adapter"
                self._export(what)
            self._sample()
        finally:
            self._write_summary()
            self._reporter.summary(self.summary)
        for command in next_commands(self._config, self.summary):
            self._reporter.note(command)

    def close(self) -> None:
        """Releases the tiers and the swap directory, and closes the metrics. Idempotent."""
        self._reporter.close()
        self.checkpoints.close()
        for engine in filter(None, (self._reference_engine, self._engine)):
            engine.close()
        self._reference_engine = self._engine = None
        self._traced.close()
        if self._tracing is not None:
            self._tracing.finish()

    def begin_step(self) -> None:
        """Called by the trainer before the batches of a step are made."""
        if self._tracing is not None:
            self._traced.enter_context(self._tracing.step(self.num_steps + 1))
        self._before = self._counted()
        self._began_s = time.perf_counter()

    def _counted(self) -> Counter[str]:
        """Returns the counters of the run's engines, added up."""
        found = Counter[str]()
        for engine in filter(None, (self._engine, self._reference_engine)):
            found.update(engine.counters.snapshot())
        return found

    def end_step(self, step: Step, *, is_evaluated: bool) -> dict[str, float]:
        """Ends the work of the step. Returns its numbers for trackers."""
        is_last = step.number == self._job.num_steps
        ended_s = time.perf_counter()
        is_digested = ended_s >= self._digest_due_s
        if is_evaluated or is_last or is_digested or self.checkpoints.commits_steps:
            self._engine.flush()  # The work belongs to this step; no later step does it.
        elapsed_s = time.perf_counter() - self._began_s
        self._traced.close()
        self._line = line_of(step, self._before, self._counted(), elapsed_s)
        if step.number == self.summary.resumed_at + 1:  # All of the base has been read.
            self._keep_reference()
        if is_digested:
            with self._engine.at_rest("the digest of a step", self.checkpoints.units()) as state:
                self._line["state"] = digest_of_state(state)
            now_s = time.perf_counter()
            self._digest_due_s = now_s + (now_s - ended_s) / _DIGEST_SHARE
        return tracked(self._line)

    def after_step(self, step: Step, *, is_best: bool) -> bool:
        """Called after evaluation and trackers. Writes the metrics and what is to be kept of the
        step. Returns whether the run ends."""
        self.report_step(step)
        if is_best and self._config.train.keep_best:
            with self.checkpoints.full_drive_spared(f"best weights of step {step.number}"):
                if self._job.rank.is_first:
                    self._write_weights(self._config.output.directory / BEST_NAME)
                self._wait_for_all("the best weights")
                self.summary.best_step = step.number
        if step.held_out_loss is not None and self.summary.is_on_plateau:
            self._notify("plateau", "the held-out loss falls no more")
        self.checkpoints.after_step(step.number)
        return self._is_stopped()

    def is_followed(self, step: int) -> bool:
        """Whether what follows this step, before the next one, needs its evaluation."""
        is_kept = self._config.train.keep_best or self.checkpoints.is_due(step)
        return is_kept or self._is_stopped()

    def report_step(self, step: Step) -> None:
        """Writes the metrics of the step."""
        self._line |= {"adapter": self._name} if self._name else {}
        self._line |= {
            "held_out_loss": step.held_out_loss,
            "steps": self._job.num_steps,
            "resumed_at": self.summary.resumed_at,
            "checkpoint": self.summary.checkpoint,
        }
        self.summary.add(self._line)
        self._restore()
        self._reporter.step(self._line, self.summary.left_s)

    # -- What a run leaves in its output directory; one rank writes --------------------------------

    def _keep_reference(self) -> None:
        """Writes the names of the base's files, and the checksums that first reads have taken."""
        shards = self._engine.store.shards
        if self._job.output is None or shards is None:
            return
        path = self._job.output.path / RUN_NAMES[3]
        try:
            replace_file(path, reference_to_bytes(shards, is_first_rank=True).decode())
        except OSError as error:
            self._reporter.note(f"warning: {path} is not written: {error.strerror or error}")

    def _restore(self) -> None:
        """Makes the output directory again if it was removed."""
        if self._job.output is None:
            return
        try:
            if self._job.output.restore():
                self._reporter.note(f"{self._job.output.path} was removed; it was made again")
        except InfinityError as error:
            if not self._is_output_lost:
                self._reporter.note(f"warning: {error}; the run goes on")
            self._is_output_lost = True

    def _export(self, what: str) -> None:
        output = self._config.output.directory
        self._write_weights(output)
        self.summary.export_directory = str(output)
        self._reporter.note(f"wrote {what} to {output}")

    def _write_weights(self, directory: Path) -> None:
        job = self._job
        tokenizer = job.data.processor or (job.tokenizer and job.tokenizer.tokenizer)
        if self._config.train.embed is not None:
            save_modules(job.trainer.model, directory)
            tokenizer = None
        with self.summary.phase("export_s"):
            if self._config.adapter is not None:
                name = self._config.adapter.peft_name
                save_adapter(self._job.model, directory, tokenizer=tokenizer, adapter=name)
            else:
                export_safetensors(
                    self._job.model,
                    directory,
                    max_shard_nbytes=self._config.output.max_shard_size,
                    tokenizer=tokenizer,
                )
        try:
            card = model_card(self._config, self.all_steps(), job.plan.kind)
            replace_file(directory / "README.md", card)
        except (OSError, MalformedError) as error:
            self._reporter.note(f"warning: the model card is not written: {error}")

    def _sample(self) -> None:
        """Lets the model write the text of `[train.sample]`."""
        sample, interrupt = self._config.train.sample, self.interrupt
        if sample is None or interrupt.received is not None:
            return
        with self.summary.phase("sample_s"):
            torch.manual_seed(self._config.train.seed)
            ids = generate(
                self._job.model,
                self._job.prompt_ids,
                num_tokens=sample.new_tokens,
                temperature=sample.temperature,
                top_k=sample.top_k or 0,
                should_stop=lambda: interrupt.received is not None,
            )
        assert self._job.tokenizer is not None
        self.summary.sample = self._job.tokenizer.decode(ids)
        self._reporter.note(f"sample:\n{self.summary.sample}")

    def _write_summary(self) -> None:
        """Writes summary.json; a failure is reported and does not end the run."""
        path = self._config.output.directory / SUMMARY_NAME
        self.summary.lost = self._reporter.lost()
        try:
            write_summary(path, self.summary)
        except OSError as error:
            self.summary.lost.append(f"{path}: {error.strerror or error}")
            self._reporter.note(f"warning: {path} cannot be written: {error.strerror or error}")


RunT = TypeVar("RunT", bound=Run)


def train(
    config: SwapConfig, *, console: Console | None = None, trace: Tracing | None = None,
    resume: bool = False, resume_from: Path | None = None, accept_changes: bool = False,
) -> tuple[Summary, int]:  # fmt: skip
    """Runs the main job. Returns (summary, exit code). Raises InfinityError.

    `trace` writes a timeline of some steps, also if the run ends early. `resume` continues from the
    newest checkpoint of `[checkpoint]`, or begins if there is none. `resume_from` continues from
    one checkpoint, or from the newest in a directory. `accept_changes` continues also with another
    learning rate, schedule, number of steps, held-out data or config.json of the base, and prints
    what differs. With `[[adapter]]` the summary is the first one's, and has those of all.
    """
    config = JobConfig.of(config)
    require_trackers(config.train.report_to)
    configs = config.of_adapters()
    if len(configs) > 1 and resume_from is not None:
        raise ConfigError("--resume-from is for one adapter; go on with all of them by --resume")
    console = console or Console()
    with opened(
        configs, Run, console, trace=trace, resume=resume, resume_from=resume_from,
        accept_changes=accept_changes,
    ) as runs:  # fmt: skip
        for run in runs:
            try:
                run.set_up(is_first=run is runs[0])
            except Exception as error:
                run.fail(error)
                raise
        written = "the export" if config.checkpoint is None else "a checkpoint"
        with runs[0].interrupt as interrupt:
            interrupt.notice = _STOP_NOTICE.format(written)
            _train_all(runs, [found.adapter for found in configs])
            return runs[0].summary, interrupt.exit_code


@contextmanager
def opened(
    configs: Sequence[JobConfig], make: Callable[[JobConfig, Job, Console, Tracing | None], RunT],
    console: Console, *, trace: Tracing | None = None, resume: bool = False,
    resume_from: Path | None = None, accept_changes: bool = False,
) -> Iterator[list[RunT]]:  # fmt: skip
    """Yields runs of these configurations over one model, checked and before a tier is touched.
    `make` is called for each. Raises as `train`."""
    settled = choices(configs[0])
    configs = [settle(found) for found in configs]
    keep_freed_memory()
    # So long a thread that runs Python holds up a launch of a kernel; it is 5 ms without this. On
    # an H200 a launch beside such a thread takes 0.9 ms in the place of 8.
    sys.setswitchinterval(5e-4)
    expand_segments()
    with ExitStack() as stack:
        stack.enter_context(without_renaming_notice())
        rank = stack.enter_context(job_rank(configs[0]))
        if not rank.is_first:
            console, trace = Console(quiet=True), None
        reporter = Reporter(console, steps=0, log_every=1)
        for text in lines_of(settled):  # Before data is counted by a tokenizer that is not meant.
            reporter.note(text)
        runs: list[RunT] = []
        try:
            resumed = [plan_resume(c, resume=resume, resume_from=resume_from) for c in configs]
            jobs = prepare(configs, stack, resumed, rank)
            if trace is not None:
                trace.check(num_steps=jobs[0].num_steps)
            for found, job in zip(configs, jobs, strict=True):
                runs.append(run := make(found, job, console, trace if not runs else None))
                stack.callback(run.close)
                run.checkpoints.check(accept_changes=accept_changes)
        except Exception as error:
            if rank.is_first:
                told, text = Summary(steps=0, num_parameters=0), f"failed before a step: {error}"
                notify(configs[0], told, reporter, "failure", text)
            raise
        yield runs


def _how_many_fit(model: Any, config: JobConfig) -> str:
    """Returns which adapter does not fit the budgets. Deletes adapters of the model."""
    assert config.model.path is not None
    names = list(model.peft_config)
    for count in range(len(names) - 1, 0, -1):
        model.delete_adapter(names[count])
        plan = weight_source(config.model.path).plan(model, ignore=config.model.ignore)
        if fits(model, config, plan):
            return (
                f"adapter {names[count]!r} does not fit: the first {count} of {len(names)} would, "
                "in a run of their own"
            )
    return f"not even the first adapter, {names[0]!r}, would fit alone"


def _train_all(runs: Sequence[Run], adapters: Sequence[AdapterConfig | None]) -> None:
    """Trains and finishes the runs, those of several adapters together. One whose loss is not
    finite ends without the others; its error is raised when they have ended."""
    failed: list[NonFiniteError] = []

    def go(run: Run) -> None:
        try:
            run.train()
            run.finish()
        except Exception as error:
            run.fail(error)
            if len(runs) == 1 or not isinstance(error, NonFiniteError):
                raise
            failed.append(error)

    if len(runs) == 1:
        go(runs[0])
        return
    names = [adapter.peft_name for adapter in adapters if adapter]
    loops = {name: partial(go, run) for name, run in zip(names, runs, strict=True)}
    runs[0].summary.others = {n: run.summary for n, run in list(zip(names, runs, strict=True))[1:]}
    infinity.together(runs[0].model, loops)
    runs[0].compare(dict(zip(names, runs, strict=True)))
    for error in failed:
        raise error
