"""Going on from a checkpoint: which one, and that it is of the same run.

A run may go on with other placements, budgets, engines and output; what its numbers depend on must
be as it was. The text is compared by its tokens, not by its paths. With another number of ranks
each step must see as many batches as before: then they are the same ones, in the same order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.checkpoint.state_directory import list_checkpoints, refuse_later, step_of
from infinity.checkpoint.state_load import Loaded, read_program
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.training.data import Batches

_DATA_KEYS = ("sequence_length", "held_out", "seed", "shuffle")
_TRAIN_KEYS = ("batch_size", "schedule", "warmup_steps", "min_lr_ratio", "seed")
_BATCHES_KEY = "train.accumulation"
_IDENTITY = "run"


def plan_resume(
    config: SwapConfig, *, resume: bool = False, resume_from: Path | None = None
) -> Loaded | None:
    """The checkpoint to go on from; None begins a run. Reads its small state only.

    `resume` takes the newest of `[checkpoint]`, or the step that the swap directory has committed
    if that is later, and begins where there is neither. Raises ConfigError where they would be in
    the way of this run's own, and errors of a damaged one.
    """
    if config.checkpoint is None and resume and resume_from is None:
        raise ConfigError("--resume needs a section [checkpoint], or --resume-from DIRECTORY")
    places = config.commit_directories
    if config.checkpoint is not None:
        places.append(config.checkpoint_directory)  # Last: of two of one step, the checkpoint.
    if resume_from is not None:
        loaded = read_program(resume_from)
        for place in places:
            refuse_later(place, loaded.step + 1)
        return loaded
    there = sorted((each for place in places for each in list_checkpoints(place)), key=step_of)
    if not there:
        return None
    newest = there[-1]
    if not resume:
        if newest.parent in config.commit_directories:
            raise ConfigError(
                f"{newest.parent}: the swap directory has committed step {step_of(newest)} of a "
                "run; go on from it with --resume, give this run a swap directory of its own, or "
                f"remove it with `infinity inspect {newest.parent.parent} --remove-stale`"
            )
        raise ConfigError(
            f"checkpoint.directory: {newest.parent} has checkpoints up to step {step_of(newest)}; "
            "go on from it with --resume, remove them, or name another directory"
        )
    return read_program(newest)


def identity_of(config: SwapConfig, batches: Batches, *, num_ranks: int = 1) -> dict[str, Any]:
    """What the numbers of a run depend on, by dotted key: goes into `extra` of a checkpoint."""
    table = config.to_dict()
    facts = {f"optimizer.{key}": table["optimizer"][key] for key in config.optimizer.keys}
    facts |= {f"precision.{key}": value for key, value in table["precision"].items()}
    facts |= {f"data.{key}": table["data"][key] for key in _DATA_KEYS}
    facts |= {f"train.{key}": table["train"][key] for key in _TRAIN_KEYS}
    facts[_BATCHES_KEY] = table["train"]["accumulation"] * num_ranks
    if table["train"]["schedule"] != "constant":  # Else a run may be made longer.
        facts["train.steps"] = table["train"]["steps"]
    if table["schedule"]["micro_batch"] is not None:  # It decides which random numbers are drawn.
        facts["schedule.micro_batch"] = table["schedule"]["micro_batch"]
    facts["model.config"] = table["model"]["config"]
    facts["the SHA-256 of the tokens"] = batches.tokens_sha256
    return {_IDENTITY: facts}


def check_same_run(loaded: Loaded, identity: dict[str, Any]) -> None:
    """Raises ConfigError naming every key that is not as it was."""
    before = loaded.extra.get(_IDENTITY)
    if not isinstance(before, dict):
        raise ConfigError(f"{loaded.path} was not written by `infinity train`")
    now = identity[_IDENTITY]
    changed = [
        f"{_name(key)} is {now.get(key)!r} and was {before.get(key)!r}"
        for key in sorted({*now, *before})
        if now.get(key) != before.get(key)
    ]
    if changed:
        has_others = now.get(_BATCHES_KEY) != before.get(_BATCHES_KEY)
        raise ConfigError(
            f"{loaded.path} is of another run, so this would be no continuation: "
            + "; ".join(changed)
            + (". Each step has to see as many batches as before" if has_others else "")
        )


def _name(key: str) -> str:
    return "train.accumulation times the number of ranks" if key == _BATCHES_KEY else key
