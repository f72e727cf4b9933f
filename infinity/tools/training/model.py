"""The model of `[model]`: read and checked first, built on meta, then streamed into its tiers."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.bounded import MAX_TEXT_NBYTES, MalformedError, read_json, table_of
from infinity.checkpoint import WeightSource, weight_source
from infinity.config import Model, SwapConfig
from infinity.config.extras import require_transformers
from infinity.config.paths import refuse_absent_model
from infinity.config.values import Capacity
from infinity.distributed.group import RankTopology
from infinity.errors import ConfigError
from infinity.tools.training.adapter import attach_adapter, refuse_tokens_of_head
from infinity.tools.training.tokenizers import MOST_TOKENS

_log = logging.getLogger("infinity")

# Keys that transformers accepts although no configuration class declares them.
_EXTRA_KEYS = frozenset({
    "attn_implementation", "experts_implementation", "num_labels", "partial_rotary_factor",
    "rope_scaling", "rope_theta", "torch_dtype",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A transformers configuration and, for a checkpoint, its weights, of which none is read
    yet."""

    hf_config: Any
    weights: WeightSource | None
    path: Path | None

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model has embeddings for."""
        return int(self.hf_config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the configuration allows, or None."""
        return getattr(self.hf_config.get_text_config(), "max_position_embeddings", None)


def plan_model(model: Model, *, reads_weights: bool = True) -> ModelPlan:
    """Reads the configuration and, with `reads_weights`, the headers of the weights.

    Raises ConfigError for a directory or table that transformers cannot use, and CorruptionError
    for weight files that contradict each other.
    """
    require_transformers("[model]")
    if model.path is None:
        assert model.config is not None
        return ModelPlan(hf_config=_config_of_table(model.config), weights=None, path=None)
    hf_config = _config_of_directory(model.path)
    weights = weight_source(model.path) if reads_weights else None
    if weights is not None:
        longest = max((side for name in weights.names() for side in weights.shape(name)), default=0)
        file = model.path / "config.json"
        check_sides(_table_of_file(file), longest, f"model.path: {file}: ")
    return ModelPlan(hf_config=hf_config, weights=weights, path=model.path)


def build_model(plan: ModelPlan, config: SwapConfig) -> Any:
    """Builds the causal LM on meta, with real buffers, for `infinity.offload`; with `[adapter]`,
    the adapter around it, which has memory and values.

    Checks every name and shape of the checkpoint against the model. Raises ConfigError if the
    architecture has no causal LM, cannot checkpoint activations, or does not match the weights.
    """
    from transformers import AutoModelForCausalLM

    assert config.train is not None and config.model is not None
    # Small parameters may keep the values of their constructors, so these are seeded, too.
    torch.manual_seed(config.model.seed)
    dtype = getattr(torch, config.precision.compute_dtype)
    try:
        with infinity.init_empty_weights(config):
            model = AutoModelForCausalLM.from_config(plan.hf_config, dtype=dtype)
    except Exception as error:  # Sizes that do not go together make a constructor raise anything.
        kind = plan.hf_config.model_type
        where = config.model.path / "config.json" if config.model.path else "[model.config]"
        raise ConfigError(
            f"model: no causal language model can be made of {kind!r} with the sizes of {where}: "
            f"{str(error) or type(error).__name__}"
        ) from error
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # The fallback of transformers, without its warning.
    if plan.weights is not None:
        plan.weights.plan(model, ignore=config.model.ignore)
        _take_generation_config(model, plan)
    if config.train.activation_checkpointing:
        checkpoint_activations(model)
    if config.adapter is not None:
        seed = config.model.seed
        model = attach_adapter(model, config.adapter, base=plan.weights, seed=seed)
        refuse_tokens_of_head(model)
    return model


def stream_weights(
    model: Any,
    plan: ModelPlan,
    config: SwapConfig,
    *,
    resume: Path | None = None,
    group: RankTopology | None = None,
) -> None:
    """Moves the model into its tiers, with the checkpoint's weights or seeded random ones.

    `resume` is the checkpoint that the run loads next. `group`: the ranks of the job.
    """
    assert config.model is not None
    infinity.offload(
        model, config, weights=plan.path, seed=config.model.seed, ignore=config.model.ignore,
        resume=resume, group=group,
    )  # fmt: skip


def _config_of_table(table: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    check_numbers(table, "model.config.")
    options = {key: value for key, value in table.items() if key != "model_type"}
    model_type = table["model_type"]
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        near = _nearest(model_type, _model_types())
        raise ConfigError(
            f"model.config.model_type: transformers has no {model_type!r}"
            + (f"; did you mean {near!r}?" if near else "")
        ) from None
    known = {key for key in dir(default) if not key.startswith("_")} | _EXTRA_KEYS
    unknown = [key for key in options if key not in known and key not in default.attribute_map]
    source = _source_of(default) if unknown else ""
    for key in unknown:
        if re.search(rf"\bconfig\.{re.escape(key)}\b|[\"']{re.escape(key)}[\"']", source):
            continue  # Read by getattr, with a default of the model.
        near = _nearest(key, sorted({*default.to_dict(), *default.attribute_map}))
        if near:
            raise ConfigError(
                f"model.config.{key}: a {model_type} configuration has no such key; "
                f"did you mean {near!r}?"
            )
        _log.warning("model.config.%s: nothing of %s is known to read it", key, model_type)
    try:
        return AutoConfig.for_model(model_type, **options)
    except Exception as error:  # transformers raises its own exceptions in validation.
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from error


def _config_of_directory(path: Path) -> Any:
    refuse_absent_model(path)
    file = path / "config.json"
    table = _table_of_file(file)
    check_numbers(table, f"model.path: {file}: ")
    try:
        return published_config(path)
    except Exception as error:  # A broken file makes transformers raise any exception.
        raise ConfigError(f"model.path: {file} cannot be used: {error}") from error


# Published with code of their own for an architecture that transformers has under another name.
_SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}


def published_config(path: Path) -> Any:
    """Returns the configuration of a directory. Runs no code of the directory.

    Raises what transformers raises for a broken file, or for an architecture that it does not have.
    """
    from transformers import AutoConfig

    table = _table_of_file(path / "config.json")
    same = _SAME_ARCHITECTURE.get(str(table.get("model_type")))
    if same is None:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    own = {key: value for key, value in table.items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(same, **{**own, "name_or_path": str(path)})


def _take_generation_config(model: Any, plan: ModelPlan) -> None:
    """Copies the checkpoint's generation settings, so that the export has them."""
    from transformers import GenerationConfig

    assert plan.path is not None
    file = plan.path / "generation_config.json"
    if not file.is_file():
        return
    check_numbers(_table_of_file(file), f"model.path: {file}: ")
    try:
        model.generation_config = GenerationConfig.from_pretrained(plan.path, local_files_only=True)
    except Exception as error:  # A broken file makes transformers raise any exception.
        raise ConfigError(f"model.path: {file} cannot be used: {error}") from error


def _table_of_file(file: Path) -> dict[str, Any]:
    """Reads a JSON table of bounded size, before transformers reads it again."""
    try:
        # Published configurations have numbers that are not finite, and repeated keys.
        content = read_json(file, max_nbytes=16 * MAX_TEXT_NBYTES, is_strict=False)
        return table_of(content, "it")
    except (OSError, MalformedError) as error:
        raise ConfigError(f"model.path: {file} cannot be used: {error}") from error


def checkpoint_activations(model: Any) -> None:
    """Makes the backward repeat the forward of every block. Raises ConfigError for a transformers
    model that cannot."""
    # transformers 5.23 renamed the method.
    options = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise ConfigError(f"train.activation_checkpointing: {error}") from None


def _source_of(config: Any) -> str:
    """Returns the source code of a configuration class and of its causal LM."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kinds: list[Any] = [type(config)]
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        kinds.append(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    try:
        return "".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds)
    except OSError:
        return ""


def _model_types() -> list[str]:
    from transformers import CONFIG_MAPPING

    return list(CONFIG_MAPPING.keys())


def _nearest(word: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


# -- The model before training, with which "dpo" compares ------------------------------------------
#
# An adapter needs no second model: TRL keeps the adapter's first values beside it. Where all
# weights are trained, the reference is a frozen model of its own, with an engine of its own. Its
# weights rest in the files of `model.path` and take next to no swap space. Policy and reference get
# half of the host budget and of the device budget each.


def build_reference(plan: ModelPlan, config: SwapConfig) -> Any:
    """Returns the reference on meta, or None where the run needs no model of its own for it.

    Raises ConfigError for random weights, which no file holds.
    """
    assert config.train is not None
    if config.train.method != "dpo" or config.adapter is not None:
        return None
    if plan.path is None:
        raise ConfigError(
            'train.method: "dpo" prefers against the weights of model.path; got [model.config], '
            "whose weights are random"
        )
    model = build_model(plan, config)
    model.requires_grad_(False)
    model._is_accelerate_prepared = True  # Trainer does not move it.
    return model.eval()


def share_budgets(config: SwapConfig) -> tuple[SwapConfig, SwapConfig]:
    """Returns the configurations of policy and reference."""
    tiers = config.tiers
    host = tiers.host.model_copy(update={"capacity": _half(tiers.host.capacity)})
    device = tiers.device.model_copy(update={"capacity": _half(tiers.device.capacity)})
    halved = tiers.model_copy(update={"host": host, "device": device})
    drives = [
        drive.model_copy(update={"path": drive.path.with_name(f"{drive.path.name}-reference")})
        for drive in tiers.nvme
    ]
    apart = halved.model_copy(update={"nvme": type(tiers.nvme)(drives)})
    policy = config.model_copy(update={"tiers": halved})
    return policy, config.model_copy(update={"tiers": apart})


def place_reference(model: Any, plan: ModelPlan, config: SwapConfig) -> Any:
    """Leaves the reference's weights in their files. Returns its engine, which the caller closes.

    config: the second of `share_budgets`
    """
    assert config.model is not None
    infinity.offload(model, config, weights=plan.path, ignore=config.model.ignore)
    return infinity.engine_of(model)


def _half(capacity: Capacity) -> Capacity:
    if capacity.nbytes is not None:
        return Capacity(nbytes=capacity.nbytes // 2)
    # "auto" takes half of what is free, so the second engine takes half of what the first leaves.
    return capacity if capacity.percent is None else Capacity(percent=capacity.percent / 2)


# -- Impossible numbers of a configuration ---------------------------------------------------------
#
# transformers builds one module after the other, and lists with one entry per layer, for any number
# in the file. A number that is negative, or larger than that of any model, is refused before that.


# Counts of modules that are built one by one, under every name used by architectures.
_COUNT = re.compile(
    r"(\w+_)?(n|num)_(\w+_)?(layers?|blocks?|heads?|experts?|kv)"
    r"|(\w+_)?(layers|heads|experts)|depth"
)
# Lengths of a side of a weight.
_SIZE = re.compile(
    r"(\w+_)?(vocab|hidden|intermediate|ffn|inner)_(size|dim)|d_model|d_ff|n_embd|n_inner|d_kv"
    r"|ffn_hidden_size|(encoder|decoder)_ffn_dim|head_dim|n_positions|max_position_embeddings"
)
_MOST_MODULES = 65_536
_MOST_LENGTH = 2**40
# A weight has a side of each of these lengths.
_SIDES = ("vocab_size", "hidden_size", "d_model", "n_embd")


def check_numbers(table: dict[str, Any], where: str) -> None:
    """Raises ConfigError that names the key of an impossible count, size or token id. `where` is
    put before the key."""
    for key, value in _leaves(table, ""):
        name = key.rpartition(".")[2]
        if name.endswith("_token_id"):
            _check_ids(value, f"{where}{key}")
            continue
        most = _MOST_MODULES if _COUNT.fullmatch(name) else _MOST_LENGTH
        if most == _MOST_LENGTH and not _SIZE.fullmatch(name):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # None, lists and words have their own meaning, which transformers checks.
        most = MOST_TOKENS - 1 if name.endswith("vocab_size") else most
        least = 1 if name in ("num_hidden_layers", "n_layer", "n_layers", "vocab_size") else 0
        if not least <= value <= most:
            raise _impossible(f"{where}{key}", f"{least} to {most}", value)


def check_sides(table: dict[str, Any], longest: int, where: str) -> None:
    """Raises ConfigError that names a length of the configuration that no stored weight has.

    longest: the longest side of all stored weights
    """
    for key, value in _leaves(table, ""):  # Other parts, such as vision, may not be stored.
        is_side = key.removeprefix("text_config.") in _SIDES
        if is_side and isinstance(value, int) and value > longest:
            raise _impossible(
                f"{where}{key}", f"at most {longest}, the longest side of the stored weights", value
            )


def _check_ids(value: Any, what: str) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not -MOST_TOKENS < token < MOST_TOKENS:
            raise _impossible(what, f"an id below {MOST_TOKENS}, or a list of these", token)


def _impossible(what: str, expected: str, value: Any) -> ConfigError:
    is_long = isinstance(value, (int, float)) and abs(value) >= 10**40
    shown = "a number of more than 40 digits" if is_long else repr(value)[:80]
    return ConfigError(
        f"{what}: expected {expected}, got {shown}; correct it, or get the model's configuration "
        "again"
    )


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
