"""The checkpoints of a run: the one to resume from, and those that it writes.

A run may continue with other placements, budgets, engines and output. The settings that its numbers
depend on must not change. The text is compared by its tokens, not by its paths. With another number
of ranks, each step must use as many batches as before; then they are the same batches in the same
order.

Checkpoints are begun between steps, copied behind them, and awaited at the end of the run.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from infinity.bounded import table_of, text_of
from infinity.checkpoint.run.copy import Saving
from infinity.checkpoint.run.directory import give_up, list_checkpoints, prune, set_aside, step_of
from infinity.checkpoint.run.format import PROGRAM_NAME
from infinity.checkpoint.run.inspection import damaged_after
from infinity.checkpoint.run.load import Loaded, believing, chosen_units, load, read_program
from infinity.checkpoint.run.save import async_save, commit, copy_behind
from infinity.config import JobConfig
from infinity.config.schema import numbers
from infinity.config.swap import COMMITS_NAME, COPYING_NAME
from infinity.errors import ConfigError, CorruptionError, InfinityError, StorageError
from infinity.tools.training.job import BASE_CONFIG, HELD_OUT, Job
from infinity.tools.training.output import BEST_NAME
from infinity.tools.training.report import Reporter, Summary
from infinity.tools.training.trainer import check_state

_HELD_OUT = f"the SHA-256 of the {HELD_OUT}"
_BASE = f"the {BASE_CONFIG}"
_LENGTHS = ("train.steps", "train.epochs")  # 0 where the other one is set.
# The learning rate over the run, its length, and the held-out data: what a continuation may change
# on request, as it may the settings of the base (`_BASE`).
_ACCEPTED = frozenset((
    *_LENGTHS, "optimizer.lr", "train.schedule", "train.warmup_steps", "train.min_lr_ratio",
    _HELD_OUT,
))  # fmt: skip
_BATCHES_KEY = "train.gradient_accumulation_steps"
_NAMES = {
    _BATCHES_KEY: "train.gradient_accumulation_steps times the number of ranks",
    "adapter.name": "adapter.name, which [[adapter]] has and [adapter] has not,",
}
_IDENTITY = "run"
# Keys, or how they begin, that older checkpoints may lack, or have and nobody compares.
_LATER = ("model.", "adapter.name", "train.labels", "train.diffusion.", "the SHA-256 of")
_EARLIER = frozenset((
    "precision.gradients", "train.grpo.reward_model", f"the SHA-256 of {_BASE}"
))  # fmt: skip
TRAINER_STATE = "trainer"  # The key of TRL's state in `extra`.


def plan_resume(
    config: JobConfig, *, resume: bool = False, resume_from: Path | None = None
) -> Loaded | None:
    """Returns the checkpoint to continue from, or None to begin a run. Reads its small state only.

    `resume` selects the newest of `[checkpoint]`, or a later step that the swap directory has
    committed, and begins if there is neither. Raises ConfigError if existing checkpoints conflict
    with those of this run, and CorruptionError for a damaged one, with the name of one to continue
    from. Damaged checkpoints do not conflict.
    """
    if config.checkpoint is None and resume and resume_from is None:
        raise ConfigError("--resume needs a section [checkpoint], or --resume-from DIRECTORY")
    places = config.commit_directories
    if config.checkpoint is not None:
        # Last, so that the checkpoint wins if both are of one step.
        places.append(config.checkpoint_directory)
    if resume_from is not None:
        loaded = read_program(resume_from)
        for place in places:  # Complete checkpoints after it conflict, damaged ones do not.
            _, complete = damaged_after(place, loaded.step)
            if complete is not None:
                raise ConfigError(
                    f"{complete} already exists and is whole, expected none later than step "
                    f"{loaded.step}: resume from it, {_way_round(complete)}"
                )
        return loaded
    there = sorted(chain(*map(list_checkpoints, places)), key=step_of)
    if not there:
        return None
    newest = there[-1]
    if not resume:
        raise ConfigError(
            f"{newest.parent} has checkpoints up to step {step_of(newest)}; go on from it with "
            f"--resume, {_way_round(newest)}"
        )
    with naming_older(config, newest):
        return read_program(newest)


def _way_round(path: Path) -> str:
    """Returns what to do about a checkpoint that is not to be continued."""
    if path.parent.name not in (COMMITS_NAME, COPYING_NAME):
        return "remove it, or use another directory"
    return (
        "give this run its own swap directory, or remove it with `infinity inspect "
        f"{path.parent.parent} --remove-stale`"
    )


@contextmanager
def naming_older(config: JobConfig, path: Path) -> Iterator[None]:
    """Adds to the error of a damaged checkpoint `path` the name of one to continue from."""
    try:
        yield
    except CorruptionError as error:
        hint, older = "; there is none before it", _newest_before(config, path)
        if older is not None:
            way = f"go on from it with --resume-from {older}"
            if config.adapter is not None and config.adapter.name is not None:  # Maybe of several.
                way = f"remove {path}, and --resume goes on from it"
            hint = f"; the one before it is {older}: {way}"
        raise error.with_detail(f"{error.detail} (in the checkpoint {path}){hint}") from error


def _newest_before(config: JobConfig, path: Path) -> Path | None:
    """Returns the newest checkpoint before `path` whose small state can be read."""
    places = [*config.commit_directories, config.checkpoint_directory]
    there = [*chain(*map(list_checkpoints, places))]
    last = step_of(path) if path in there else math.inf
    for directory in sorted(there, key=step_of, reverse=True):
        if step_of(directory) <= last and directory != path:
            try:
                read_program(directory)
            except InfinityError:
                continue
            return directory
    return None


def identity_of(
    config: JobConfig, receipt: Mapping[str, Any], base_settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns what the numbers of a run depend on, for `extra` of a checkpoint: settings, by dotted
    key, the digests of a receipt (`Job.receipt`), of which an empty one has none, and the settings
    of the base."""
    table = config.to_dict()
    facts = {f"optimizer.{key}": table["optimizer"][key] for key in config.optimizer.keys}
    for name in ("precision", "model", "adapter", "data", "train"):
        if (section := getattr(config, name)) is not None:
            facts |= {f"{name}.{key}": v for key, v in numbers(section, table[name]).items()}
    facts[_BATCHES_KEY] *= receipt.get("ranks", 1)
    if config.train.schedule == "constant":  # Then a run may be made longer.
        del facts["train.steps"], facts["train.epochs"]
    if table["schedule"]["micro_batch"] is not None:  # It decides which random numbers are drawn.
        facts["schedule.micro_batch"] = table["schedule"]["micro_batch"]
    base = receipt.get("base") or {}
    digests = {"tokens": receipt.get("tokens_sha256"), **receipt.get("others", {})}
    digests |= {"base's table": base.get("table_sha256"), "base": base.get("samples_sha256")}
    facts |= {f"the SHA-256 of the {what}": digest for what, digest in digests.items() if digest}
    if base_settings:
        facts[_BASE] = dict(base_settings)
    return {_IDENTITY: facts}


def check_same_run(
    loaded: Loaded, identity: dict[str, Any], *, accept_changes: bool = False
) -> dict[str, str]:
    """Raises ConfigError that names every changed key.

    With `accept_changes` those of `_ACCEPTED` and the settings of the base may change; then returns
    how they have, by their keys.
    """
    before, now = _settings_of(loaded), identity[_IDENTITY]
    changed = _changes(before, now)
    can_accept = all(key in _ACCEPTED or key.startswith(_BASE) for key in changed)
    if changed and not (accept_changes and can_accept):
        has_others = now.get(_BATCHES_KEY) != before.get(_BATCHES_KEY)
        raise ConfigError(
            f"{loaded.path} is of another run, so this would be no continuation: "
            + "; ".join(changed.values())
            + (". Each step has to see as many batches as before" if has_others else "")
            + (". To go on with it nevertheless, add --accept-changes" if can_accept else "")
            + (f". To begin beside it, {_way_round(loaded.path)}" if not can_accept else "")
        )
    return changed


def _settings_of(loaded: Loaded | JobConfig) -> dict[str, Any]:
    """Returns what `identity_of` has said. Raises ConfigError, CorruptionError for a checkpoint."""
    if isinstance(loaded, JobConfig):
        return dict(identity_of(loaded, {})[_IDENTITY])
    found = loaded.extra.get(_IDENTITY)
    if not isinstance(found, dict) or TRAINER_STATE not in loaded.extra:
        raise ConfigError(f"{loaded.path} was not written by `infinity train`")
    with believing(loaded.path / PROGRAM_NAME, "the state of the run"):
        check_state(loaded.extra[TRAINER_STATE], loaded.step)
        settings = {text_of(key, "a key of its settings"): v for key, v in found.items()}
        table_of(settings.get(_BASE, {}), _BASE)
        return {key: value for key, value in settings.items() if key not in _EARLIER}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    knows_base = _BASE in before and _BASE in now
    before, now = _by_key(before, knows_base=knows_base), _by_key(now, knows_base=knows_base)
    return {
        key: f"{_NAMES.get(key, key)} is {_said(key, now)} and was {_said(key, before)}"
        for key in sorted({*now, *before})
        if now.get(key) != before.get(key)
        and (key not in _LENGTHS or (key in before and key in now))  # Else the schedule differs.
        and (key in before or not key.startswith(_LATER))
        and (key in now or key != _HELD_OUT)  # No evaluation: none differs.
    }


def _said(key: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(key) or None if key in _LENGTHS else settings.get(key)
    return "not set" if value is None else repr(value)


def _by_key(settings: Mapping[str, Any], *, knows_base: bool) -> dict[str, Any]:
    """Returns settings with each of the base by a key of its own, or without these."""
    found = dict(settings)
    of_base = found.pop(_BASE, {})
    return found | {f"{_BASE}: {key}": v for key, v in of_base.items() if knows_base}


def is_of_run(path: Path, identity: dict[str, Any]) -> bool:
    """Returns whether a checkpoint is of the run that `identity_of` describes, changes aside that
    --accept-changes allows. A damaged one is: where it is used, its damage is reported."""
    try:
        check_same_run(read_program(path), identity, accept_changes=True)
    except (ConfigError, CorruptionError) as error:
        return isinstance(error, CorruptionError)
    return True


def changes_of_settings(before: JobConfig | Loaded, config: JobConfig) -> dict[str, str]:
    """Returns how the settings that the numbers of a run depend on have changed since a checkpoint
    or another configuration, by their keys; without data and ranks."""
    return {
        key: text
        for key, text in _changes(_settings_of(before), _settings_of(config)).items()
        if key != _BATCHES_KEY and not key.startswith("the SHA-256")
    }


def follow(scheduler: Any, optimizer: Any, lr: float) -> None:
    """Makes a restored schedule go on with the peak `lr`, from the step that it has reached."""
    rates = [lr * factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    state = scheduler.state_dict()
    scheduler.load_state_dict(state | {"base_lrs": [lr] * len(rates), "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["initial_lr"], group["lr"] = lr, rate


class RunCheckpoints:
    """Saves and loads the state of a run, if its file has `[checkpoint]`."""

    def __init__(self, config: JobConfig, job: Job, reporter: Reporter, summary: Summary) -> None:
        self._config = config
        self._job = job
        self._reporter = reporter
        self._summary = summary
        self._identity = identity_of(config, job.receipt(), job.base_settings)
        # The checkpoint of one of several adapters holds no other.
        self._has_all_state = config.adapter is None or config.adapter.name is None
        # Changes since the checkpoint, by their keys, which the user has allowed.
        self.accepted: dict[str, str] = {}
        self._saved_step = 0  # The step of the newest complete checkpoint.
        self._saving: Saving | None = None  # The checkpoint that is being copied.

    def check(self, *, accept_changes: bool) -> None:
        """Compares the run with the one that it resumes, and with those that have committed steps
        in its swap directory, which it would remove: see `check_same_run`. Says what differs."""
        if self._job.resume is not None:
            with naming_older(self._config, self._job.resume.path):
                self.accepted = check_same_run(
                    self._job.resume, self._identity, accept_changes=accept_changes
                )
            for change in self.accepted.values():
                self._reporter.note(f"accepted since {self._job.resume.path.name}: {change}")
            if _HELD_OUT in self.accepted:
                # Losses of other data are not comparable: the lowest one begins anew.
                state = self._job.resume.extra[TRAINER_STATE]
                state["best_metric"] = None
                state["stateful_callbacks"].pop("EarlyStoppingCallback", None)
            for path in chain(*map(list_checkpoints, self._config.commit_directories)):
                with suppress(CorruptionError):
                    check_same_run(read_program(path), self._identity, accept_changes=True)

    def units(self) -> frozenset[int] | None:
        """Returns the units whose state is the run's; None for all."""
        optimizer = self._job.trainer.offloaded_optimizer
        return chosen_units(optimizer, all_state=self._has_all_state)

    @property
    def commits_steps(self) -> bool:
        """Whether every step is committed."""
        checkpoint = self._config.checkpoint
        return checkpoint is not None and checkpoint.durability == "step"

    def is_due(self, step: int) -> bool:
        """Whether the step is saved or committed."""
        return self.commits_steps or self._is_saved(step)

    def _is_saved(self, step: int) -> bool:
        every = self._config.checkpoint.every if self._config.checkpoint is not None else 0
        return bool(every) and step % every == 0

    def clear_way(self) -> None:
        """Moves damaged checkpoints after the resumed one out of the way, as `plan_resume` allows,
        and removes what a crash has left."""
        if self._job.resume is None or not self._job.rank.is_first:
            return
        checkpoint, directory = self._config.checkpoint, self._config.checkpoint_directory
        if checkpoint is None:
            return
        for place in filter(Path.is_dir, (directory, *self._config.commit_directories)):
            for path in damaged_after(place, self._job.resume.step)[0]:
                if place in self._config.commit_directories:
                    give_up(path)
                    self._reporter.note(f"{path} is damaged and was given up")
                else:
                    self._reporter.note(f"{path} is damaged; it is {set_aside(path).name} now")
        if directory.is_dir():
            prune(directory, checkpoint.keep)  # A crash may have prevented it.

    def resume(self, engine: Any) -> None:
        """Loads all state. The optimizer and the schedule exist."""
        assert self._job.resume is not None
        path, trainer = self._job.resume.path, self._job.trainer
        scheduler, optimizer = trainer.lr_scheduler, trainer.offloaded_optimizer
        with naming_older(self._config, path):
            loaded = load(
                path, self._job.model, optimizer, scheduler=scheduler, all_state=self._has_all_state
            )
        if self.accepted:
            follow(scheduler, optimizer, self._config.optimizer.lr)
        self._summary.resumed_at = loaded.step
        if (self._config.output.directory / BEST_NAME).is_dir():
            self._summary.best_step = loaded.extra[TRAINER_STATE]["best_global_step"]
        if loaded.path.parent not in self._config.commit_directories:
            self._saved_step = loaded.step
            self._summary.checkpoint = str(loaded.path)
        elif loaded.path.parent == self._config.copying_directory and self._job.rank.count == 1:
            checkpoint, directory = self._config.checkpoint, self._config.checkpoint_directory
            if checkpoint is not None and engine.store.volume is not None:
                # The copy of this step was interrupted.
                self._saving = copy_behind(engine, loaded.path, directory, keep=checkpoint.keep)
                self._saved_step = loaded.step
        self._reporter.note(f"going on from {loaded.path}, after step {loaded.step}")

    def after_step(self, step: int) -> None:
        """Saves or commits the step, if its turn has come."""
        with self.full_drive_spared(f"checkpoint of step {step}"):
            if self._saving is not None and self._saving.done():
                self._note_saved(self._saving)
            if self._is_saved(step):
                self.save(step)
            elif self.commits_steps:
                with self._summary.phase("commit_s"):
                    self._reporter.sync()
                    trainer = self._job.trainer
                    commit(self._job.model, trainer.offloaded_optimizer, **self._position(step))

    def end(self, step: int) -> None:
        """Saves the last step, and waits for its copy, an interrupted run for the grace period
        only: it has nothing else."""
        is_last = self._job.rank.interrupt.received is not None
        with nullcontext() if is_last else self.full_drive_spared(f"checkpoint of step {step}"):
            self.save(step)
            saving, checkpoint = self._saving, self._config.checkpoint
            if saving is None or checkpoint is None:
                return
            with self._summary.phase("copy_s"):
                self._await_copy(grace_s=checkpoint.grace_s or math.inf)
            if saving.is_abandoned:
                self._summary.checkpoint = str(saving.source)
                self._reporter.note(
                    f"gave up copying {saving.path} after {checkpoint.grace_s} s; --resume goes on "
                    f"from {saving.source}"
                )

    @contextmanager
    def full_drive_spared(self, what: str) -> Iterator[None]:
        """Leaves out files for which the drive has no space, with a warning: what was trained is
        worth more. With a swap directory, which keeps the step, the run ends."""
        try:
            yield
        except StorageError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or self._job.rank.count > 1 or self._config.tiers.nvme:
                raise
            self._reporter.note(f"warning: no {what}: {error}; the run goes on")

    def save(self, step: int) -> None:
        """Saves a checkpoint of this step, if the file has `[checkpoint]` and none exists yet."""
        checkpoint = self._config.checkpoint
        if checkpoint is None or step == self._saved_step:
            return
        with self._summary.phase("checkpoint_s"):
            self._reporter.sync()
            self._await_copy(grace_s=0)  # One copy at a time; this checkpoint is newer.
            self._saving = async_save(
                self._config.checkpoint_directory,
                self._job.model,
                self._job.trainer.offloaded_optimizer,
                keep=checkpoint.keep,
                all_state=self._has_all_state,
                **self._position(step),
            )
        self._saved_step = step

    def close(self) -> None:
        """Gives up a copy that is not complete."""
        if self._saving is not None:
            self._saving.abandon()

    def _await_copy(self, *, grace_s: float) -> None:
        """Waits for the copy in progress; an interrupted run waits for `grace_s` seconds at
        most."""
        saving, give_up_s = self._saving, math.inf
        if saving is None:
            return
        saving.hurry()
        while not saving.done():
            now_s = time.monotonic()
            if self._job.rank.interrupt.received is not None:
                give_up_s = min(give_up_s, now_s + grace_s)
            if now_s >= give_up_s:
                saving.abandon()
            else:
                time.sleep(0.01)
        if not saving.is_abandoned:
            self._note_saved(saving)

    def _note_saved(self, saving: Saving) -> None:
        """Waits until the checkpoint is durable; raises its error."""
        self._saving = None
        self._summary.checkpoint = str(saving.wait())

    def _position(self, step: int) -> dict[str, Any]:
        """Returns the part of a checkpoint that is neither model nor optimizer."""
        return {
            "scheduler": self._job.trainer.lr_scheduler,
            "step": step,
            "extra": self._identity | {TRAINER_STATE: self._job.trainer.position()},
        }
