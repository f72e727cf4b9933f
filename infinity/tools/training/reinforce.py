"""What "grpo" and "rloo" have that other methods lack: prompts, rewards and a sampler.

Written against TRL 1.16.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infinity.config.schema.train import Grpo
from infinity.config.swap import JobConfig
from infinity.errors import ConfigError
from infinity.integrations.rollouts import generates
from infinity.integrations.sampler import ServerSampler
from infinity.tools.training.chat import CHATML
from infinity.tools.training.conversation import check_values, messages_of, text_of
from infinity.tools.training.data_files import Row, read_rows


def load_prompts(paths: Sequence[Path], tokenizer: Any) -> Any:
    """Returns a `datasets.Dataset` of the rows of all files: `prompt`, a text or messages, and
    columns for rewards. Gives a tokenizer without a chat template ChatML. Raises ConfigError that
    names the first record without a prompt."""
    import datasets
    import pyarrow

    rows: list[Row] = []
    for path in paths:
        for number, row in enumerate(read_rows(path, list), 1):
            at, prompt = f"data.paths: {path}: record {number}", row.get("prompt")
            check_values(row, at)
            if isinstance(prompt, list):
                tokenizer.chat_template = tokenizer.chat_template or CHATML
                rows.append(row | {"prompt": messages_of(prompt, at, "prompt")})
            else:
                rows.append(row | {"prompt": text_of(prompt, f"{at}: prompt")})
    names = dict.fromkeys(name for row in rows for name in row)  # Not each record has all.
    try:
        return datasets.Dataset.from_dict({n: [row.get(n) for row in rows] for n in names})
    except (TypeError, pyarrow.ArrowInvalid) as error:
        raise ConfigError(
            f"data.paths: the records of {paths[0]} have columns of several kinds: {error}"
        ) from error


def measure_prompts(trainer: Any, config: JobConfig) -> tuple[int, int, str]:
    """Returns what `job_data.measure` does of other data: of the prompts the number of tokens and
    the largest id, and of all columns a digest. Raises ConfigError for too few prompts, and for one
    that leaves no space for a completion."""
    assert config.train.grpo is not None
    rows, length = trainer.train_dataset, config.data.sequence_length
    needed = trainer.args.generation_batch_size // trainer.num_generations
    if len(rows) < needed:
        raise ConfigError(
            f"the data has too little to train on: {len(rows)} prompts, and a step learns {needed} "
            "(train.batch_size * train.gradient_accumulation_steps / train.grpo.num_generations)"
        )
    most = length - config.train.grpo.max_completion_length
    digest, count, largest = hashlib.sha256(), 0, 0
    for number, row in enumerate(rows, 1):
        at = f"data.paths: prompt {number} of those that are learned"
        try:
            [ids], *_ = trainer._tokenize_prompts([row["prompt"]])  # noqa: SLF001
        except Exception as error:  # A chat template raises any.
            raise ConfigError(f"{at}: the chat template cannot write it: {error}") from error
        if not 0 < len(ids) <= most:
            raise ConfigError(
                f"{at} has {len(ids)} tokens; expected 1 to {most}: data.sequence_length={length} "
                "less train.grpo.max_completion_length"
            )
        count, largest = count + len(ids), max(largest, *ids)
        digest.update(json.dumps([ids, row], sort_keys=True, default=str).encode())
    return count, largest, digest.hexdigest()


def arguments_of(options: Grpo, config: JobConfig) -> dict[str, Any]:
    """Returns arguments of trl.GRPOConfig or trl.RLOOConfig."""
    return {
        "num_generations": options.num_generations,
        "max_completion_length": options.max_completion_length,
        "temperature": options.temperature,
        # Of all weights, TRL would load a reference itself.
        "beta": options.beta if config.adapter is not None else 0.0,
        "shuffle_dataset": config.data.shuffle,
        "remove_unused_columns": False,
    }


def give_reference(trainer: Any, reference: Any, beta: float) -> None:
    """Gives a trainer of all weights its reference, a second model."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(reference, temperature=trainer.temperature)
    trainer.ref_model, trainer.beta = reference, beta


def measuring(trainer: Any) -> Callable[[], dict[str, float]]:
    """Returns a call for the means of what a trainer that generates measures from now on: rewards,
    divergences, lengths, differences of log-probabilities."""
    if not generates(trainer):
        return dict
    metrics = trainer._metrics["train"]  # noqa: SLF001
    before = {name: len(values) for name, values in metrics.items()}

    def means() -> dict[str, float]:
        found = {}
        for name, values in metrics.items():
            new = [value for value in values[before.get(name, 0) :] if math.isfinite(value)]
            if new and name not in ("step_time", "num_tokens"):  # The run has its own.
                found[name] = sum(new) / len(new)
        return found

    return means


def rewards_of(options: Grpo) -> list[Any]:
    """Returns reward functions, and the directory of a reward model, which TRL loads into memory.
    Raises ConfigError for one that is not there."""
    found: list[Any] = []
    sys.path.append(os.getcwd())  # Where `python -m` finds modules, too.
    for name in options.rewards:
        try:
            found.append(pkgutil.resolve_name(name))
            if not callable(found[-1]):
                raise TypeError(f"it is a {type(found[-1]).__name__}")
        except Exception as error:  # The module may raise any.
            raise ConfigError(
                f"train.grpo.rewards: {name}: {error}; expected module:function, of a module that "
                f"Python finds from {os.getcwd()}"
            ) from error
    path = options.reward_model
    if path is not None and not (path / "config.json").is_file():
        raise ConfigError(f"train.grpo.reward_model: expected a directory of a model; got {path}")
    return found if path is None else [*found, str(path)]


def sampler_of(config: JobConfig) -> ServerSampler | None:
    """Returns the server of `train.grpo.sampler`, which is asked now; None where the model itself
    samples. Raises ConfigError."""
    options = config.train.grpo
    if options is None or not options.is_served:
        return None
    if config.adapter is None:
        raise ConfigError(
            f"train.grpo.sampler: {options.sampler} would get an adapter after each step, and this "
            'run trains all weights; expected [adapter], or sampler = "transformers"'
        )
    directory = options.sampler_directory or config.output.directory / "sampler"
    return ServerSampler(options.sampler, directory=directory)
