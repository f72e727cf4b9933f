"""`infinity.from_pretrained`: from a directory of weights to an offloaded model, in one call."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infinity.api import offload
from infinity.checkpoint import weight_source
from infinity.config import SwapConfig
from infinity.config.extras import require_release
from infinity.config.hub import base_name, in_hub_cache, model_name
from infinity.config.schema import changed
from infinity.engine.registry import AGAIN, engine_of
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import config_of_directory, empty_model
from infinity.tools.training.adapter import attach_adapter, without_renaming_notice
from infinity.tools.training.model import take_generation_config
from infinity.tools.training.own_experts import freeze
from infinity.tools.training.settle import settle

_log = logging.getLogger("infinity")

# Options of transformers for tasks of the engine.
_OF_ENGINE = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "tp_plan")
_OF_CODES = ("quantization_config", "load_in_4bit", "load_in_8bit")
_RANK = 16  # Of an adapter without a rank, where memory is planned.


def from_pretrained(
    path: str | os.PathLike[str],
    config: Any = None,
    peft_config: Any = None,
    *,
    model_class: Any = None,
    is_frozen: bool = False,
    ignore: Sequence[str] = (),
    seed: int = 0,
    **model_options: Any,
) -> Any:
    """Returns a model of a Hugging Face directory, offloaded and ready: `Auto*.from_pretrained`.

    The weights are never in memory together. What is frozen stays in the directory's files.

    path: the directory, or the hub's name of a model that `hf download` has fetched
    config: what `infinity.offload` takes, files of DeepSpeed and accelerate included. A file with
        `[adapter]` gives the model that adapter. None: memory first, then a swap directory in the
        working directory, as `infinity new` decides; the choice is logged
    peft_config: an adapter, attached by PEFT; its first values are drawn from `seed`
    model_class: of transformers; by default the class that config.json names, if it generates text
    is_frozen: train nothing, adapter included: for texts and evaluation. Frozen weights need no
        space for masters, moments and gradients
    ignore: names of stored tensors to leave out, as in `infinity.offload`
    seed: of the adapter, and of a head that the directory lacks. The global generator stays
    model_options: `dtype` ("auto" or None: that of the directory), keys of the configuration such
        as `num_labels`, `attn_implementation`, `trust_remote_code`

    Raises ConfigError, CapacityError, StorageError or UnsupportedError, and leaves no file behind.
    """
    require_release("transformers", "infinity.from_pretrained")
    directory = in_hub_cache(Path(path).expanduser())
    refuse_options(model_options)
    dtype = model_options.pop("dtype", model_options.pop("torch_dtype", None))
    if config is None:
        config = choose_config(directory, peft_config, is_frozen=is_frozen)
    resolved = for_directory(SwapConfig.load(config), directory, dtype)
    adapters = [*filter(None, [resolved.adapter]), *resolved.adapters]
    if peft_config is not None and adapters:
        raise ConfigError("peft_config: the file has [adapter]; leave one of them out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # Small parameters may keep the values of their constructors.
        model = empty_pretrained(directory, resolved, model_class, model_options)
        if peft_config is not None:
            require_release("peft", "infinity.from_pretrained")
            import peft

            torch.manual_seed(seed)
            with without_renaming_notice():
                model = peft.get_peft_model(model, peft_config)
        elif adapters:
            seeded = [(a, seed if a.seed is None else a.seed) for a in adapters]
            model = attach_adapter(model, seeded, weight_source(directory))
    if is_frozen:
        freeze(model)
    do = partial(offload, config=resolved, weights=directory, seed=seed, ignore=ignore)
    do(model)
    AGAIN[engine_of(model)] = do
    return model


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options of `from_pretrained` that contradict the engine."""
    found = [name for name in (*_OF_ENGINE, *_OF_CODES) if options.get(name)]
    if found:
        remedy = "the configuration places the weights"
        if found[0] in _OF_CODES:
            remedy = "name a directory that is quantised already (`infinity quantize` makes one)"
        raise ConfigError(f"{found[0]}: leave it out; {remedy}")


def for_directory(config: SwapConfig, directory: Path, dtype: Any = None) -> SwapConfig:
    """Returns the configuration with `model.path`, and with what it leaves to the model decided.
    `dtype` of the caller goes before `precision.compute`. Raises ConfigError for another one."""
    if dtype not in (None, "auto"):
        name = str(dtype).removeprefix("torch.")
        if name not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype: expected float32, bfloat16 or 'auto', got {name}")
        config = changed(config, {"precision.compute": name})
    if config.model is None:
        named = SwapConfig.load({"model": {"path": str(directory.resolve())}})
        config = config.model_copy(update={"model": named.model})
    return settle(changed(config, {"model.path": directory}))


def empty_pretrained(
    directory: Path,
    config: SwapConfig,
    model_class: Any,
    options: Mapping[str, Any],
    hf_config: Any = None,
) -> Any:
    """Returns the model on meta, with the name and the settings of generation of its directory.
    `hf_config` is that of the directory unless one is passed. Raises ConfigError if transformers
    cannot build the model."""
    rest = dict(options)
    trusts_code = bool(rest.pop("trust_remote_code", False))
    hf_config = hf_config or config_of_directory(directory, trusts_code=trusts_code)
    for key in [key for key in rest if hasattr(hf_config, key)]:
        setattr(hf_config, key, rest.pop(key))
    hf_config.name_or_path = base_name(directory)
    dtype = getattr(torch, config.precision.compute_dtype)
    where = str(directory / "config.json")
    model = empty_model(hf_config, dtype, where, trusts_code=trusts_code, kind=model_class, **rest)
    take_generation_config(model, directory)
    return model


def with_saved_adapter(config: SwapConfig, adapter: Path | None) -> SwapConfig:
    """Returns the configuration of a model with an adapter that was saved, or with none."""
    saved = adapter and SwapConfig.load({"adapter": {"resume": str(adapter.resolve())}}).adapter
    return config.model_copy(update={"adapter": saved, "adapters": ()})


def choose_config(
    directory: Path, peft_config: Any = None, *, is_frozen: bool = False
) -> SwapConfig:
    """Returns tiers and placement for a model on this machine, as `infinity new` decides them, by
    sizes alone; logs them. A frozen model is planned as the base of the smallest adapter. Raises
    CapacityError if the model does not fit."""
    from infinity.plan.directory import read_directory
    from infinity.tools.plan.draft import Wish, decide, sizes_here

    found = read_directory(directory)
    rank = 1 if is_frozen else None
    if peft_config is not None:
        rank = int(getattr(peft_config, "r", None) or _RANK)
    swap = Path(f"{model_name(directory)}-swap").resolve()
    wish = Wish(
        model=directory,
        max_positions=found.shape.max_positions,
        rank=rank,
        experts=bool(getattr(peft_config, "target_parameters", None)),
        data=None,
        data_paths=(directory,),
        swap=(swap,),
        output=swap,
        is_here=False,
    )
    draft, said = decide(wish, found, sizes_here)
    config = draft.config
    where = ", ".join(config.placement.parameters)
    _log.warning(
        "no configuration was given: %s of host memory, state on %s%s; `infinity new %s` writes a "
        "file with what was chosen",
        config.tiers.host.capacity, where, f" ({swap})" if config.tiers.nvme else "", directory,
    )  # fmt: skip
    if said.obstacles:
        _log.warning("it may not fit: %s", "; ".join(said.obstacles))
    table = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return SwapConfig.load({key: table[key] for key in ("tiers", "placement")})
