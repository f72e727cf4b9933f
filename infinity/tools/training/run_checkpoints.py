"""The checkpoints of a run: begun between steps, copied behind them, awaited at its end."""

from __future__ import annotations

import math
import time
from typing import Any

from infinity.checkpoint.run.copy import Saving
from infinity.checkpoint.run.directory import prune
from infinity.checkpoint.run.load import Loaded, load
from infinity.checkpoint.run.save import async_save, commit, copy_behind
from infinity.config import SwapConfig
from infinity.tools.training.job import Job
from infinity.tools.training.process import Interrupt
from infinity.tools.training.report import Reporter, Summary
from infinity.tools.training.resume import TRAINER_STATE, clear_way, follow, naming_older


class RunCheckpoints:
    """Saves and loads the state of a run, if its file has `[checkpoint]`."""

    def __init__(self, config: SwapConfig, job: Job, reporter: Reporter, summary: Summary) -> None:
        self._config = config
        self._job = job
        self._reporter = reporter
        self._summary = summary
        self._saved_step = 0  # The step of the newest complete checkpoint.
        self._saving: Saving | None = None  # The checkpoint that is being copied.

    @property
    def commits_steps(self) -> bool:
        """Whether every step is committed."""
        checkpoint = self._config.checkpoint
        return checkpoint is not None and checkpoint.durability == "step"

    def clear_way(self) -> None:
        """Removes what a resumed run does not go on from, and what a crash has left."""
        if self._job.resume is None or not self._job.rank.is_first:
            return
        checkpoint, directory = self._config.checkpoint, self._config.checkpoint_directory
        is_there = directory.is_dir()
        for line in clear_way(self._config, self._job.resume):
            self._reporter.note(line)
        if checkpoint is not None and is_there:
            prune(directory, checkpoint.keep)  # A crash may have prevented it.

    def resume(self, engine: Any) -> None:
        """Loads all state. The optimizer and the schedule exist."""
        assert self._job.resume is not None
        path, trainer = self._job.resume.path, self._job.trainer
        scheduler, optimizer = trainer.lr_scheduler, trainer.offloaded_optimizer
        with naming_older(self._config, path):
            loaded = load(path, self._job.model, optimizer, scheduler=scheduler)
        if self._job.accepted:
            follow(scheduler, optimizer, self._config.optimizer.lr)
        self._summary.resumed_at = loaded.step
        if loaded.path.parent not in self._config.commit_directories:
            self._saved_step = loaded.step
        elif loaded.path.parent == self._config.copying_directory and self._job.rank.count == 1:
            self._go_on_copying(loaded, engine)
        self._reporter.note(f"going on from {loaded.path}, after step {loaded.step}")

    def _go_on_copying(self, loaded: Loaded, engine: Any) -> None:
        """Copies the checkpoint of this step again, whose copy was interrupted."""
        checkpoint, directory = self._config.checkpoint, self._config.checkpoint_directory
        if checkpoint is not None and engine.store.volume is not None:
            self._saving = copy_behind(engine, loaded.path, directory, keep=checkpoint.keep)
            self._saved_step = loaded.step

    def after_step(self, step: int, interrupt: Interrupt) -> None:
        """Saves or commits the step, if its turn has come."""
        if self._saving is not None and self._saving.done():
            self._note_saved(self._saving)
        checkpoint = self._config.checkpoint
        if checkpoint and checkpoint.every and step % checkpoint.every == 0:
            self.save(step, interrupt)
        elif self.commits_steps:
            with self._summary.phase("commit_s"):
                self._reporter.sync()
                trainer = self._job.trainer
                commit(self._job.model, trainer.offloaded_optimizer, **self._position(step))

    def save(self, step: int, interrupt: Interrupt) -> None:
        """Saves a checkpoint of this step, if the file has `[checkpoint]` and none exists yet."""
        checkpoint = self._config.checkpoint
        if checkpoint is None or step == self._saved_step:
            return
        with self._summary.phase("checkpoint_s"):
            self._reporter.sync()
            self._await_copy(interrupt, grace_s=0)  # One copy at a time; this checkpoint is newer.
            self._saving = async_save(
                self._config.checkpoint_directory,
                self._job.model,
                self._job.trainer.offloaded_optimizer,
                keep=checkpoint.keep,
                **self._position(step),
            )
        self._saved_step = step

    def end_copy(self, interrupt: Interrupt) -> None:
        """Waits for the copy of the last checkpoint; an interrupted run waits for the grace period
        only."""
        saving, checkpoint = self._saving, self._config.checkpoint
        if saving is None or checkpoint is None:
            return
        with self._summary.phase("copy_s"):
            self._await_copy(interrupt, grace_s=checkpoint.grace_s or math.inf)
        if saving.is_abandoned:
            self._summary.checkpoint = str(saving.source)
            self._reporter.note(
                f"gave up copying {saving.path} after {checkpoint.grace_s} s; --resume goes on "
                f"from {saving.source}"
            )

    def close(self) -> None:
        """Gives up a copy that is not complete."""
        if self._saving is not None:
            self._saving.abandon()

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

    def _note_saved(self, saving: Saving) -> None:
        """Waits until the checkpoint is durable; raises its error."""
        self._summary.checkpoint = str(saving.wait())
        self._saving = None

    def _position(self, step: int) -> dict[str, Any]:
        """Returns the part of a checkpoint that is neither model nor optimizer."""
        return {
            "scheduler": self._job.trainer.lr_scheduler,
            "step": step,
            "extra": self._job.identity | {TRAINER_STATE: self._job.trainer.position()},
        }
