"""`infinity run`: a program for transformers' Trainer or TRL, as it is, with its models offloaded.

While installed, `from_pretrained` of transformers builds models without memory, and a Trainer
offloads its model, with the adapter that TRL has attached, before it first trains or evaluates.
What the program has written into the model until then is kept; the files give the rest.
`TrainingArguments(deepspeed=...)` gives the configuration where there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn

import infinity
from infinity.config import SwapConfig
from infinity.config.hub import download_remedy, in_hub_cache
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, InfinityError
from infinity.integrations.hf import OffloadedTrainer, prepare_accelerator, prepare_trainer
from infinity.modules.reading.adapters import values_of_adapters
from infinity.modules.reading.empty_weights import Provisional, is_to_come
from infinity.tools.pretrained import (
    choose_config,
    empty_pretrained,
    for_directory,
    refuse_options,
)
from infinity.tools.training.model import with_own_drives

_log = logging.getLogger("infinity")

_MOVE = "_move_model_to_device"  # Of Trainer.
# What transformers downloads for a model, and what only says how.
_WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_OF_HUB = (
    "cache_dir", "force_download", "local_files_only", "token", "use_auth_token", "revision",
    "code_revision", "commit_hash", "subfolder", "_from_auto", "adapter_kwargs", "_commit_hash",
    "low_cpu_mem_usage", "use_safetensors", "variant", "ignore_mismatched_sizes", "weights_only",
)  # fmt: skip


class DropIn:
    """Offloads the models of a program. `config` is what `infinity.offload` takes, or None."""

    def __init__(self, config: Any = None) -> None:
        self._config = config
        self._directories: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
        self.offloaded: list[str] = []  # The directories, in the order of the models.

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Has transformers build and train by this object for the time of a `with` block."""
        from accelerate import Accelerator
        from transformers import PreTrainedModel, Trainer, TrainingArguments

        models: Any = PreTrainedModel
        plain_move, plain_load = getattr(Trainer, _MOVE), models.from_pretrained.__func__
        plain_to: Any = nn.Module.to
        plain_prepare: Any = Accelerator.prepare
        plain_post_init: Any = TrainingArguments.__post_init__

        def load(cls: Any, path: Any = None, *args: Any, **options: Any) -> Any:
            is_foreign = path is None or bool(args) or options.get("gguf_file")
            directory = None if is_foreign else _directory_of(path, options)
            if directory is None:
                return plain_load(cls, path, *args, **options)
            return self._empty(cls, directory, options)

        def move(trainer: Any, model: nn.Module, device: Any) -> None:
            if self._directory_in(model) is None:
                plain_move(trainer, model, device)

        def to(module: nn.Module, *args: Any, **options: Any) -> Any:
            """Moves no model without memory to a device, whatever it is in."""
            is_cast = any(isinstance(value, torch.dtype) for value in (*args, *options.values()))
            if is_cast or self._directory_in(module) is None or _is_offloaded_around(module):
                return plain_to(module, *args, **options)
            return module

        def post_init(args: Any) -> None:
            if args.deepspeed:
                self._config, args.deepspeed = self._config or args.deepspeed, None
            plain_post_init(args)

        def prepare(accelerator: Any, *parts: Any, **options: Any) -> Any:
            made = self._for_loop(accelerator, parts)
            left = [part for part in parts if id(part) not in made]
            found = plain_prepare(accelerator, *left, **options) if left else ()
            rest = iter((found,) if len(left) == 1 else found)
            every = [made[id(part)] if id(part) in made else next(rest) for part in parts]
            return every[0] if len(every) == 1 else tuple(every)

        def preparing(plain: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(plain)
            def method(trainer: Any, *args: Any, **options: Any) -> Any:
                if not isinstance(trainer, OffloadedTrainer) and self._prepare(trainer):
                    return getattr(trainer, plain.__name__)(*args, **options)
                return plain(trainer, *args, **options)

            return method

        with ExitStack() as stack:
            stack.enter_context(patch.object(models, "from_pretrained", classmethod(load)))
            stack.enter_context(patch.object(TrainingArguments, "__post_init__", post_init))
            stack.enter_context(patch.object(Trainer, _MOVE, move))
            stack.enter_context(patch.object(nn.Module, "to", to))
            stack.enter_context(patch.object(Accelerator, "prepare", prepare))
            for name in ("train", "evaluate", "predict"):
                stack.enter_context(patch.object(Trainer, name, preparing(getattr(Trainer, name))))
            yield

    def _empty(self, cls: Any, directory: Path, options: dict[str, Any]) -> Any:
        """Returns the model without memory."""
        own = {key: value for key, value in options.items() if key not in _OF_HUB}
        own.pop("device_map", None)  # TRL asks for "auto" by itself.
        refuse_options(own)
        dtype = own.pop("dtype", own.pop("torch_dtype", None))
        hf_config = own.pop("config", None)
        config = for_directory(SwapConfig(), directory, dtype)
        with torch.random.fork_rng(devices=[]):  # transformers' own draws nothing here.
            model = empty_pretrained(directory, config, cls, own, hf_config)
        self._directories[model] = directory

        def refuse(module: nn.Module, *_: Any) -> None:
            if not _is_offloaded_around(module):
                raise ConfigError(
                    f"the {type(module).__name__} of {directory} is used before a Trainer trains "
                    "it; `infinity run` offloads the models of Trainers. In a loop of your own "
                    "take infinity.from_pretrained"
                )

        model.register_forward_pre_hook(refuse)
        return model

    def _directory_in(self, model: nn.Module) -> Path | None:
        found = (self._directories.get(module) for module in model.modules())
        return next((directory for directory in found if directory is not None), None)

    def _prepare(self, trainer: Any) -> bool:
        """Offloads the models of a Trainer. Returns whether it has one that waits for it."""
        directory = self._directory_in(trainer.model)
        if directory is None:
            return False
        reference: Any = getattr(trainer, "ref_model", None)
        its = None if reference is None else self._directory_in(reference)
        if its is not None and not _is_offloaded_around(reference):
            reference.requires_grad_(False)
            with _written_values(reference):
                infinity.offload(reference, self._config_for(its, reference), weights=its)
            reference._is_accelerate_prepared = True
        if _is_offloaded_around(trainer.model):  # By an earlier Trainer.
            prepare_trainer(trainer)
            return True
        config = self._config_for(directory, trainer.model)
        with _written_values(trainer.model):
            prepare_trainer(trainer, config, weights=directory)
        return True

    def _for_loop(self, accelerator: Any, parts: tuple[Any, ...]) -> dict[int, Any]:
        """Offloads the models that `accelerator.prepare` got, with their optimizers. Returns both
        as they are prepared, by the ids of those that were passed. Schedulers follow."""
        made: dict[int, Any] = {}
        for model in parts:
            directory = self._directory_in(model) if isinstance(model, nn.Module) else None
            if directory is None or _is_offloaded_around(model):
                continue
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            plain = next((p for p in parts if isinstance(p, torch.optim.Optimizer) and any(
                id(parameter) in names for group in p.param_groups for parameter in group["params"]
            )), None)  # fmt: skip
            if plain is None:
                continue
            with _written_values(model):
                infinity.offload(model, self._config_for(directory, model), weights=directory)
            optimizer = optimizer_like(plain, dict(model.named_parameters()), names)
            made[id(model)], made[id(plain)] = prepare_accelerator(accelerator, model, optimizer)
            for scheduler in parts:
                if getattr(scheduler, "optimizer", None) is plain:
                    scheduler.optimizer = optimizer
        return made

    def _config_for(self, directory: Path, model: Any) -> SwapConfig:
        """Returns the configuration of the next model, whose swap directories are its own."""
        if self._config is None:
            adapters = getattr(model, "peft_config", {})
            config = choose_config(directory, next(iter(adapters.values()), None))
        else:
            config = SwapConfig.load(self._config)
        number = len(self.offloaded)
        self.offloaded.append(str(directory))
        return with_own_drives(config, str(number)) if number else config


def optimizer_like(
    plain: torch.optim.Optimizer, parameters: Mapping[str, Any], names: Mapping[int, str]
) -> infinity.AdamW:
    """Returns the optimizer of an offloaded model with the groups of one of torch, whose parameters
    have `names` by their ids. Raises ConfigError for another rule."""
    kind = type(plain).__name__
    unlike = [
        key for group in plain.param_groups for key, value in group.items()
        if value and key in ("amsgrad", "maximize", "capturable", "differentiable")
    ]  # fmt: skip
    if kind not in ("AdamW", "Adam") or unlike:
        raise ConfigError(
            f"the loop has {kind} {' '.join(unlike)}; `infinity run` takes torch.optim.AdamW and "
            "Adam. For another rule take infinity.from_pretrained and its optimizers"
        )
    kept = ("lr", "initial_lr", "betas", "eps", "weight_decay")
    groups = [
        {"params": [parameters[names[id(p)]] for p in group["params"]]}
        | {key: group[key] for key in kept if key in group}
        for group in plain.param_groups
    ]
    made: infinity.AdamW = getattr(infinity, kind)(groups)
    return made


@contextmanager
def _written_values(model: nn.Module) -> Iterator[None]:
    """Writes the values of a model built empty again, after the files have been read over them in
    the block. Raises ConfigError for a small parameter that was changed without its value."""
    kept, values = values_of_adapters(model), {}
    for name, parameter in model.named_parameters():
        if is_to_come(parameter) or id(parameter) in kept:
            continue
        if isinstance(parameter, Provisional):
            raise ConfigError(
                f"{name!r} was changed before its value was read from the files; write all of it "
                "(copy_, load_state_dict), or change it after infinity.from_pretrained, inside "
                "`with infinity.gather(module, modify=True):`"
            )
        values[name] = parameter.detach().clone()
    yield
    for name, value in values.items():
        parameter = model.get_parameter(name)
        with infinity.gather(parameter, modify=True), torch.no_grad():
            parameter.copy_(value)


def _is_offloaded_around(model: nn.Module) -> bool:
    """Whether the model, or a model around it, is offloaded."""
    try:
        engine_of(model)
    except InfinityError:
        return False
    return True


def _directory_of(path: Any, options: dict[str, Any]) -> Path | None:
    """Returns the directory of a model of safetensors, which is downloaded if it is the hub's; None
    for any other."""
    directory = in_hub_cache(Path(path))
    if not directory.exists() and download_remedy(path):
        from huggingface_hub import snapshot_download

        known = ("revision", "cache_dir", "token", "force_download", "local_files_only")
        own = {key: options[key] for key in known if options.get(key) is not None}
        directory = Path(snapshot_download(str(path), allow_patterns=list(_WANTED_FILES), **own))
    has_weights = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    return directory if has_weights else None
