"""One run, from the first byte in a tier to the summary."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity
from infinity.checkpoint import export_safetensors
from infinity.checkpoint.run.copy import Saving
from infinity.checkpoint.run.directory import prune
from infinity.checkpoint.run.load import Loaded, load
from infinity.checkpoint.run.save import async_save, commit, copy_behind
from infinity.config import SwapConfig
from infinity.errors import InfinityError, NonFiniteError
from infinity.integrations.hf import prepare_trainer
from infinity.integrations.windows import why_plain
from infinity.tools.training.adapter import save_adapter
from infinity.tools.training.arguments import batch_of
from infinity.tools.training.job import Job
from infinity.tools.training.model import place_reference, share_budgets, stream_weights
from infinity.tools.training.output import MARKER_NAME, SUMMARY_NAME
from infinity.tools.training.process import Interrupt, give_back
from infinity.tools.training.report import MetricsRecord, Reporter, Summary, write_summary
from infinity.tools.training.resume import TRAINER_STATE, clear_way, follow, naming_older
from infinity.tools.training.sample import generate
from infinity.tools.training.tracing import TracePlan, Tracing
from infinity.tools.training.trainer import StepOutcome

BEST_NAME = "best"  # The directory of the lowest held-out loss, in output.directory.


class Run:
    """One run, from the first byte in a tier to the summary. `close` releases the tiers."""

    def __init__(
        self, config: SwapConfig, job: Job, console: Console, trace: TracePlan | None
    ) -> None:
        assert config.train is not None
        self._config = config
        self._job = job
        self._train = config.train
        self._model = job.model
        self._trainer = job.trainer
        self.summary = Summary(steps=job.num_steps, num_parameters=job.num_parameters)
        self._reporter = Reporter(console, steps=job.num_steps, log_every=self._train.log_every)
        self._engine: Any = None
        self._beside: Any = None  # The engine of the reference.
        self._interrupt: Interrupt | None = None
        self._before: dict[str, float] = {}
        self._began_s = 0.0
        self._record: MetricsRecord | None = None
        self._trace_plan = trace
        self._tracing: Tracing | None = None
        self._traced: AbstractContextManager[None] | None = None  # The step that is traced now.
        self._saved_step = 0  # The step of the newest complete checkpoint.
        self._saving: Saving | None = None  # The checkpoint that is being copied.
        self._is_output_lost = False  # A warning was printed.

    @property
    def num_steps(self) -> int:
        """The steps that are done, with those before a resumed run."""
        return int(self._trainer.state.global_step)

    def note(self, choices: list[str]) -> None:
        """Prints the choices that the model made for "auto" values of the file, and accepted
        changes."""
        for choice in choices:
            self._reporter.note(choice)

    def set_up(self) -> None:
        """Makes the tiers and streams the weights into them."""
        self._reporter.note(self._description())
        resume = self._job.resume.path if self._job.resume is not None else None
        checkpoint, directory = self._config.checkpoint, self._config.checkpoint_directory
        is_cleared = resume is not None and self._job.rank.is_first and directory.is_dir()
        if self._job.resume is not None and self._job.rank.is_first:
            for line in clear_way(self._config, self._job.resume):
                self._reporter.note(line)
        if checkpoint is not None and is_cleared:
            prune(directory, checkpoint.keep)  # A crash may have prevented it.
        config = self._config
        if self._job.reference is not None:
            config, apart = share_budgets(config)
        group = self._job.rank.topology
        stream_weights(self._model, self._job.plan, config, resume=resume, group=group)
        if self._job.reference is not None:
            self._beside = place_reference(self._job.reference, self._job.plan, apart)
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
        is_layer_major = None if self._config.schedule.micro_batch is not None else False
        if is_layer_major is None and why_plain(self._trainer) is None:
            is_layer_major = True  # Its order is that of `infinity train` itself.
        # With an adapter all micro-batches of a step pass a block together, else those of a batch.
        window = None
        if self._config.adapter is None:
            window = self._train.batch_size // batch_of(self._config)[0]
        prepare_trainer(self._trainer, layer_major=is_layer_major, window=window)
        self._model.train()
        # Dropout starts alike for every source of weights, and differs on every rank.
        torch.manual_seed(self._train.seed + self._job.rank.rank)

    def _description(self) -> str:
        assert self._config.data is not None
        length, held_out = self._config.data.sequence_length, self._job.data.held_out
        return (
            f"{self._job.plan.hf_config.model_type}, {self.summary.num_parameters:,} parameters; "
            f"{self._job.tokens.count:,} tokens in {len(self._trainer.train_dataset):,} sequences "
            f"of {length if self._job.data.is_ready else f'at most {length}'}, "
            f"{0 if held_out is None else len(held_out):,} held out"
        )

    def _begin(self) -> None:
        """Begins the metrics, with those before a resumed step."""
        metrics_path = None
        if self._job.output is not None:
            if self._job.output.is_unmarked:
                self._reporter.note(f"{MARKER_NAME} is missing in {self._job.output.path}; added")
            self._job.output.mark()
            metrics_path = self._config.output.metrics_path
        self._reporter.start(metrics_path, resumed_at=self.summary.resumed_at)
        self.summary.phases_s["setup_s"] = time.perf_counter() - self._job.started_s

    def _resume(self) -> None:
        """Loads all state. The optimizer and the schedule exist."""
        assert self._job.resume is not None
        path, trainer = self._job.resume.path, self._trainer
        scheduler, optimizer = trainer.lr_scheduler, trainer.offloaded_optimizer
        with naming_older(self._config, path):
            loaded = load(path, self._model, optimizer, scheduler=scheduler)
        if self._job.accepted:
            follow(scheduler, optimizer, self._config.optimizer.lr)
        self.summary.resumed_at = loaded.step
        if loaded.path.parent not in self._config.commit_directories:
            self._saved_step = loaded.step
        elif loaded.path.parent == self._config.copying_directory and self._job.rank.count == 1:
            self._go_on_copying(loaded)
        self._reporter.note(f"going on from {loaded.path}, after step {loaded.step}")
        self._begin()

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
        self._interrupt, resume = interrupt, self._job.resume
        try:
            if resume is None:
                self._begin()
            if not self._is_stopped(interrupt):
                state = resume.extra[TRAINER_STATE] if resume is not None else None
                restore = self._resume if resume is not None else None
                self._trainer.run(self, state=state, restore=restore)
        except NonFiniteError:
            self._reporter.end_of_steps()
            if self.num_steps and self._config.output.export:
                if self._job.rank.is_first:
                    self._export("the weights of the last good step")
                    self._write_summary()
                self._wait_for_all("the export")
            raise
        finally:
            self._reporter.end_of_steps()
        if interrupt.received is not None:
            self.summary.interrupted_by = interrupt.received.name
        elif self.num_steps < self._job.num_steps:
            self.summary.stopped_early = True
            if not self.summary.records:
                assert self._config.train is not None
                patience = self._config.train.early_stopping_patience
                self._reporter.note(
                    "no step was made: the run that is resumed ended with at least "
                    f"train.early_stopping_patience={patience} evaluations in a row without a "
                    "new lowest loss; a larger one makes it go on, and so does 0, which is none"
                )
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
        if self._config.output.export and self.num_steps and not goes_on:
            self._export("the model" if self._config.adapter is None else "the adapter")
        sample = self._train.sample
        if sample is not None and interrupt.received is None:
            with self.phase("sample_s"):
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
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._end_traced()
        if self._tracing is not None:
            self._tracing.finish()

    def begin_step(self) -> None:
        """Called by the trainer before a step, as the others below."""
        if self._tracing is not None:
            self._traced = self._tracing.step(self.num_steps + 1)
            self._traced.__enter__()
        self._before = self._engine.counters.snapshot()
        self._began_s = time.perf_counter()

    def end_step(self, outcome: StepOutcome, *, is_evaluated: bool) -> dict[str, float]:
        """Records the step. Returns its numbers for trackers."""
        is_last = outcome.step == self._job.num_steps
        if is_evaluated or is_last or self._commits_steps():
            self._engine.flush()  # The work belongs to this step; no later step does it.
        elapsed_s = time.perf_counter() - self._began_s
        self._end_traced()
        self._record = MetricsRecord.between(
            self._before,
            self._engine.counters.snapshot(),
            outcome=outcome,
            elapsed_s=elapsed_s,
        )
        self.summary.records.append(self._record)
        return self._record.tracked()

    def _end_traced(self) -> None:
        if self._traced is not None:
            self._traced.__exit__(None, None, None)
            self._traced = None

    def after_step(
        self, outcome: StepOutcome, held_out_loss: float | None, *, is_best: bool
    ) -> bool:
        """Writes the metrics and what is to be kept of the step. Returns whether the run ends."""
        assert self._record is not None and self._interrupt is not None
        if held_out_loss is not None:
            self.summary.held_out_losses.append((outcome.step, held_out_loss))
        self._keep_output()
        self._reporter.step(self._record, held_out_loss)
        if is_best and self._train.keep_best:
            self._keep_best(outcome.step)
        if self._saving is not None and self._saving.done():
            self._note_saved(self._saving)
        checkpoint = self._config.checkpoint
        if checkpoint and checkpoint.every and outcome.step % checkpoint.every == 0:
            self._save_checkpoint(self._interrupt)
        elif self._commits_steps():
            with self.phase("commit_s"):
                self._reporter.sync()
                commit(self._model, self._trainer.offloaded_optimizer, **self._position())
        return self._is_stopped(self._interrupt)

    def _keep_best(self, step: int) -> None:
        """Exports the weights of the lowest held-out loss so far; rank 0 writes."""
        if self._job.rank.is_first:
            self._write_weights(self._config.output.directory / BEST_NAME)
        self._wait_for_all("the best weights")
        self.summary.best_step = step

    def _commits_steps(self) -> bool:
        checkpoint = self._config.checkpoint
        return checkpoint is not None and checkpoint.durability == "step"

    def _save_checkpoint(self, interrupt: Interrupt) -> None:
        """Saves a checkpoint of this step, if the file has `[checkpoint]` and none exists yet."""
        step, checkpoint = self.num_steps, self._config.checkpoint
        if checkpoint is None or step == self._saved_step:
            return
        with self.phase("checkpoint_s"):
            self._reporter.sync()
            self._await_copy(interrupt, grace_s=0)  # One copy at a time; this checkpoint is newer.
            self._saving = async_save(
                self._config.checkpoint_directory,
                self._model,
                self._trainer.offloaded_optimizer,
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
        with self.phase("copy_s"):
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
            "scheduler": self._trainer.lr_scheduler,
            "step": self.num_steps,
            "extra": self._job.identity | {TRAINER_STATE: self._trainer.position()},
        }

    def _export(self, what: str) -> None:
        output = self._config.output.directory
        self._write_weights(output)
        self.summary.export_directory = str(output)
        self._reporter.note(f"wrote {what} to {output}")

    def _write_weights(self, directory: Path) -> None:
        tokenizer = getattr(self._job.tokenizer, "tokenizer", None)
        shard_nbytes = self._config.output.max_shard_size
        with self.phase("export_s"):
            if self._config.adapter is not None:
                save_adapter(self._model, directory, tokenizer=tokenizer)
            else:
                export_safetensors(
                    self._model, directory, max_shard_nbytes=shard_nbytes, tokenizer=tokenizer
                )

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
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of a `with` block as part of a phase of the run."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            self.summary.phases_s[name] = self.summary.phases_s.get(name, 0.0) + spent_s
