"""`infinity train`: from a configuration file to a fine-tuned checkpoint.

The program first refuses everything that can be refused, by reading configurations, headers and
sizes. Then it makes the swap directory and streams the weights. Then it makes the steps. However
the run ends, the engine is closed, which releases the swap directory.

How a run ends:
  all steps done       export, sample, summary; exit code 0
  a signal             the step is finished, then export and summary, or where the file has
                       [checkpoint] a checkpoint and no export; its copy to another file system
                       has `checkpoint.grace_s` seconds; exit code 128 and the signal's number: 130
                       for SIGINT, 143 for SIGTERM, 129 for SIGHUP (`training.interrupt` has all)
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity
from infinity.checkpoint import export_safetensors
from infinity.checkpoint.huggingface.export_weights import check_space, plan_export
from infinity.checkpoint.run.copy import Saving
from infinity.checkpoint.run.directory import prune
from infinity.checkpoint.run.load import Loaded, load
from infinity.checkpoint.run.save import async_save, commit, copy_behind
from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError, NonFiniteError
from infinity.training.adapter import adapter_nbytes, save_adapter
from infinity.training.allocator import give_back, keep_freed_memory
from infinity.training.data import Batches, Tokenizer, open_batches, open_tokenizer
from infinity.training.interrupt import Interrupt
from infinity.training.loop import Loop, make_optimizer
from infinity.training.model import ModelPlan, build_model, plan_model, stream_weights
from infinity.training.output import MARKER_NAME, SUMMARY_NAME, OutputDirectory
from infinity.training.ranks import JobRank, job_rank
from infinity.training.report import MetricsRecord, Reporter, Summary, write_summary
from infinity.training.resume import (
    check_same_run,
    clear_way,
    identity_of,
    naming_older,
    plan_resume,
)
from infinity.training.sample import encode_prompt, generate
from infinity.training.settle import AutoValue, choices, settle
from infinity.training.tracing import TracePlan, Tracing

_STOP_NOTICE = "\nstopping after this step, then writing {}; once more to stop at once\n"


def train(
    config: SwapConfig,
    *,
    console: Console | None = None,
    trace: TracePlan | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
) -> tuple[Summary, int]:
    """Runs the main job. Returns (summary, exit code). Raises InfinityError.

    `trace` writes a timeline of some steps, also if the run ends early. `resume` continues from the
    newest checkpoint of `[checkpoint]`, or begins if there is none. `resume_from` continues from
    one checkpoint, or from the newest in a directory.
    """
    config.require("model", "data", "train")
    settled = choices(config)
    config = settle(config)
    keep_freed_memory()
    console = console or Console()
    with ExitStack() as stack:
        rank = stack.enter_context(job_rank(config))
        if not rank.is_first:
            console, trace = Console(quiet=True), None
        resumed = plan_resume(config, resume=resume, resume_from=resume_from)
        job = _prepare(config, stack, resumed, rank)
        run = _Run(config, job, console, trace)
        stack.callback(run.close)
        run.note(settled)
        run.set_up()
        written = "the export" if config.checkpoint is None else "a checkpoint"
        with Interrupt(_STOP_NOTICE.format(written)) as interrupt:
            run.train(interrupt)
            run.finish(interrupt)
            return run.summary, interrupt.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The result of the preparation, which has not touched a tier."""

    plan: ModelPlan
    tokenizer: Tokenizer
    batches: Batches
    model: Any
    prompt_ids: list[int]
    output: OutputDirectory | None  # None on ranks that write nothing there.
    identity: dict[str, Any]
    resume: Loaded | None
    rank: JobRank
    started_s: float


def _prepare(config: SwapConfig, stack: ExitStack, resume: Loaded | None, rank: JobRank) -> _Job:
    """Checks everything that can be refused without making a swap file."""
    assert config.model and config.data and config.train
    started_s = time.perf_counter()
    train, data = config.train, config.data
    if train.threads != "auto":
        torch.set_num_threads(train.threads)
    plan = plan_model(config.model)
    if plan.max_positions is not None and data.sequence_length > plan.max_positions:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} exceeds the model's "
            f"{plan.max_positions} positions"
        )
    tokenizer = open_tokenizer(data.tokenizer)
    prompt_ids = []
    if train.sample is not None:
        prompt_ids = encode_prompt(
            train.sample,
            tokenizer,
            vocab_size=plan.vocab_size,
            max_positions=plan.max_positions,
        )
    model = build_model(plan, config)
    output = None
    if rank.is_first:
        output = OutputDirectory(config, resumed=resume.path if resume is not None else None)
        stack.callback(output.close)
    if config.output.export and output is not None:
        if config.adapter is not None:
            export_nbytes = adapter_nbytes(model)
        else:
            export_nbytes = plan_export(model, max_shard_nbytes=config.output.max_shard_size).nbytes
        check_space(output.path, export_nbytes)
    batches = open_batches(
        data,
        tokenizer,
        batch_size=train.batch_size,
        vocab_size=plan.vocab_size,
        directory=output.path if output is not None else None,
    )
    stack.callback(batches.close)
    identity = identity_of(config, batches, num_ranks=rank.count)
    if resume is not None:
        check_same_run(resume, identity)
    return _Job(
        plan=plan,
        tokenizer=tokenizer,
        batches=batches,
        model=model,
        prompt_ids=prompt_ids,
        output=output,
        identity=identity,
        resume=resume,
        rank=rank,
        started_s=started_s,
    )


class _Run:
    """One run, from the first byte in a tier to the summary. `close` releases the tiers."""

    def __init__(
        self, config: SwapConfig, job: _Job, console: Console, trace: TracePlan | None
    ) -> None:
        assert config.train is not None
        self._config = config
        self._job = job
        self._train = config.train
        self._model = job.model
        self.summary = Summary(
            steps=self._train.steps,
            num_parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        )
        self._reporter = Reporter(console, steps=self._train.steps, log_every=self._train.log_every)
        self._engine: Any = None
        self._trace_plan = trace
        self._tracing: Tracing | None = None
        self._saved_step = 0  # The step of the newest complete checkpoint.
        self._saving: Saving | None = None  # The checkpoint that is being copied.
        self._is_output_lost = False  # A warning was printed.

    def note(self, settled: list[AutoValue]) -> None:
        """Prints the choices that the model made for "auto" values of the file."""
        for choice in settled:
            self._reporter.note(str(choice))

    def set_up(self) -> None:
        """Makes the tiers, streams the weights into them and builds the optimizer."""
        split = self._job.batches.split
        self._reporter.note(
            f"{self._job.plan.hf_config.model_type}, {self.summary.num_parameters:,} parameters; "
            f"{self._job.batches.num_tokens:,} tokens in {len(split.train):,} sequences of "
            f"{self._job.batches.sequence_length}, {len(split.held_out):,} held out"
        )
        resume = self._job.resume.path if self._job.resume is not None else None
        checkpoint, directory = self._config.checkpoint, self._config.checkpoint_directory
        is_cleared = resume is not None and self._job.rank.is_first and directory.is_dir()
        if self._job.resume is not None and self._job.rank.is_first:
            for each in clear_way(self._config, self._job.resume):
                self._reporter.note(each)
        if checkpoint is not None and is_cleared:
            prune(directory, checkpoint.keep)  # A crash may have prevented it.
        stream_weights(self._model, self._job.plan, self._config, resume=resume)
        self._engine = infinity.engine_of(self._model)
        engine = self._engine
        self.summary.update_on = engine.update_device.place
        if not engine.device.shares_host_memory:
            self._reporter.note(f"updates {engine.update_device}")
        if self._trace_plan is not None:
            self._tracing = Tracing(
                self._trace_plan, self._engine.counters.tracer, self._reporter.note
            )
        give_back()
        self._optimizer = make_optimizer(self._model, self._config.optimizer)
        self._loop = Loop(
            self._model,
            self._optimizer,
            self._job.batches,
            train=self._train,
            device=next(self._model.parameters()).device,
            micro_batch=self._config.schedule.micro_batch,
            is_step_at_once=self._config.adapter is not None,
            job=self._job.rank,
        )
        self._model.train()
        # Dropout starts alike for every source of weights, and differs on every rank.
        torch.manual_seed(self._train.seed + self._job.rank.rank)
        if self._job.resume is not None:
            self._resume(self._job.resume.path)
        metrics_path = None
        if self._job.output is not None:
            if self._job.output.is_unmarked:
                self._reporter.note(f"{MARKER_NAME} is missing in {self._job.output.path}; added")
            self._job.output.mark()
            metrics_path = self._config.output.metrics_path
        self._reporter.start(metrics_path, resumed_at=self.summary.resumed_at)
        self.summary.phases_s["setup_s"] = time.perf_counter() - self._job.started_s

    def _resume(self, path: Path) -> None:
        with naming_older(self._config, path):
            loaded = load(path, self._model, self._optimizer, scheduler=self._loop.scheduler)
        self._loop.num_steps = self.summary.resumed_at = loaded.step
        if loaded.path.parent not in self._config.commit_directories:
            self._saved_step = loaded.step
        elif loaded.path.parent == self._config.copying_directory and self._job.rank.count == 1:
            self._go_on_copying(loaded)
        self._reporter.note(f"going on from {loaded.path}, after step {loaded.step}")

    def _go_on_copying(self, loaded: Loaded) -> None:
        """Copies the checkpoint of this step again, whose copy was interrupted."""
        checkpoint, volume = self._config.checkpoint, self._engine.store.volume
        if checkpoint is not None and volume is not None:
            directory = self._config.checkpoint_directory
            self._saving = copy_behind(self._engine, loaded.path, directory, keep=checkpoint.keep)
            self._saved_step = loaded.step

    def train(self, interrupt: Interrupt) -> None:
        """Makes steps until the last one or until `interrupt` requests an end; then a
        checkpoint."""
        try:
            while self._loop.num_steps < self._train.steps and not self._is_stopped(interrupt):
                self._step(interrupt)
        except NonFiniteError:
            self._reporter.end_of_steps()
            if self._loop.num_steps and self._config.output.export:
                if self._job.rank.is_first:
                    self._export("the weights of the last good step")
                    self._write_summary()
                self._wait_for_all("the export")
            raise
        finally:
            self._reporter.end_of_steps()
        if interrupt.received is not None:
            self.summary.interrupted_by = interrupt.received.name
        self._save_checkpoint(interrupt)
        self._end_copy(interrupt)

    def _is_stopped(self, interrupt: Interrupt) -> bool:
        """Whether any rank was asked to end. A signal reaches ranks at different times."""
        if self._job.rank.count > 1:
            received = self._engine.all_gather_numbers("whether to stop", interrupt.received or 0)
            if interrupt.received is None and max(received):
                interrupt.received = signal.Signals(int(max(received)))
        return interrupt.received is not None

    def _wait_for_all(self, what: str) -> None:
        """Waits for all ranks: they need this rank's shards as long as they read weights."""
        self._engine.all_gather_numbers(what, 0)

    def finish(self, interrupt: Interrupt) -> None:
        """Completes the run after its steps; rank 0 exports."""
        if self._job.rank.is_first:
            self._finish(interrupt)
        self._wait_for_all("the end of the run")

    def _finish(self, interrupt: Interrupt) -> None:
        """Exports, samples and writes the summary; the summary also if another part has failed."""
        self._keep_output()
        try:
            self._export_and_sample(interrupt)
        finally:
            self._write_summary()
            self._reporter.summary(self.summary)

    def _export_and_sample(self, interrupt: Interrupt) -> None:
        goes_on = interrupt.received is not None and self._config.checkpoint is not None
        if self._config.output.export and self._loop.num_steps and not goes_on:
            self._export("the model" if self._config.adapter is None else "the adapter")
        sample = self._train.sample
        if sample is not None and interrupt.received is None:
            with self._phase("sample_s"):
                ids = generate(
                    self._model,
                    self._job.prompt_ids,
                    sample,
                    seed=self._train.seed,
                    should_stop=lambda: interrupt.received is not None,
                )
            self.summary.sample = self._job.tokenizer.decode(ids)
            self._reporter.note(f"sample:\n{self.summary.sample}")

    def close(self) -> None:
        """Releases the tiers and the swap directory, and closes the metrics. Idempotent."""
        self._reporter.close()
        if self._saving is not None:
            self._saving.abandon()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._tracing is not None:
            self._tracing.finish()

    def _step(self, interrupt: Interrupt) -> None:
        before = self._engine.counters.snapshot()
        start_s = time.perf_counter()
        with self._tracing.step(self._loop.num_steps + 1) if self._tracing else nullcontext():
            outcome = self._loop.step()
            every = self._train.eval_every
            is_last = outcome.step == self._train.steps
            is_evaluated = bool(every) and (outcome.step % every == 0 or is_last)
            is_evaluated &= self._job.rank.is_first
            if is_evaluated or is_last or self._commits_steps():
                self._engine.flush()  # The work belongs to this step; no later step does it.
        elapsed_s = time.perf_counter() - start_s
        record = MetricsRecord.between(
            before,
            self._engine.counters.snapshot(),
            outcome=outcome,
            elapsed_s=elapsed_s,
        )
        held_out_loss = None
        if is_evaluated:
            with self._phase("evaluation_s"):
                held_out_loss = self._loop.evaluate()
            self.summary.held_out_losses.append((outcome.step, held_out_loss))
        self.summary.records.append(record)
        self._keep_output()
        self._reporter.step(record, held_out_loss)
        if self._saving is not None and self._saving.done():
            self._note_saved(self._saving)
        checkpoint = self._config.checkpoint
        if checkpoint and checkpoint.every and outcome.step % checkpoint.every == 0:
            self._save_checkpoint(interrupt)
        elif self._commits_steps():
            with self._phase("commit_s"):
                self._reporter.sync()
                commit(self._model, self._optimizer, **self._position())

    def _commits_steps(self) -> bool:
        checkpoint = self._config.checkpoint
        return checkpoint is not None and checkpoint.durability == "step"

    def _save_checkpoint(self, interrupt: Interrupt) -> None:
        """Saves a checkpoint of this step, if the file has `[checkpoint]` and none exists yet."""
        step, checkpoint = self._loop.num_steps, self._config.checkpoint
        if checkpoint is None or step == self._saved_step:
            return
        with self._phase("checkpoint_s"):
            self._reporter.sync()
            self._await_copy(interrupt, grace_s=0)  # One copy at a time; this checkpoint is newer.
            self._saving = async_save(
                self._config.checkpoint_directory,
                self._model,
                self._optimizer,
                keep=checkpoint.keep,
                **self._position(),
            )
        self._saved_step = step

    def _note_saved(self, saving: Saving) -> None:
        """Waits until the checkpoint is durable; raises its error."""
        self.summary.checkpoint = str(saving.wait())
        self._saving = None

    def _end_copy(self, interrupt: Interrupt) -> None:
        """Waits for the copy of the last checkpoint; an interrupted run waits for the grace period
        only."""
        saving, checkpoint = self._saving, self._config.checkpoint
        if saving is None or checkpoint is None:
            return
        with self._phase("copy_s"):
            self._await_copy(interrupt, grace_s=checkpoint.grace_s or math.inf)
        if saving.is_abandoned:
            self.summary.checkpoint = str(saving.source)
            self._reporter.note(
                f"gave up copying {saving.path} after {checkpoint.grace_s} s; --resume goes on "
                f"from "
                f"{saving.source}"
            )

    def _await_copy(self, interrupt: Interrupt, *, grace_s: float) -> None:
        """Waits for the copy in progress; an interrupted run waits for `grace_s` seconds at
        most."""
        saving, give_up_s = self._saving, math.inf
        if saving is None:
            return
        saving.hurry()
        while not saving.done():
            now_s = time.monotonic()
            if interrupt.received is not None:
                give_up_s = min(give_up_s, now_s + grace_s)
            if now_s >= give_up_s:
                saving.abandon()
            else:
                time.sleep(0.01)
        if not saving.is_abandoned:
            self._note_saved(saving)

    def _position(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that is neither model nor optimizer."""
        return {
            "scheduler": self._loop.scheduler,
            "step": self._loop.num_steps,
            "extra": self._job.identity,
        }

    def _export(self, what: str) -> None:
        output = self._config.output.directory
        tokenizer = getattr(self._job.tokenizer, "tokenizer", None)
        shard_nbytes = self._config.output.max_shard_size
        with self._phase("export_s"):
            if self._config.adapter is not None:
                save_adapter(self._model, output, tokenizer=tokenizer)
            else:
                export_safetensors(
                    self._model, output, max_shard_nbytes=shard_nbytes, tokenizer=tokenizer
                )
        self.summary.export_directory = str(output)
        self._reporter.note(f"wrote {what} to {output}")

    def _keep_output(self) -> None:
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

    def _write_summary(self) -> None:
        path = self._config.output.directory / SUMMARY_NAME
        self.summary.lost = self._reporter.lost()
        try:
            write_summary(path, self.summary)
        except OSError as error:
            self.summary.lost.append(f"{path}: {error.strerror or error}")
            self._reporter.note(f"warning: {path} cannot be written: {error.strerror or error}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            self.summary.phases_s[name] = self.summary.phases_s.get(name, 0.0) + spent_s
