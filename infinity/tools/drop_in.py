"""`infinity run`: a program for transformers' Trainer or TRL, as it is, with its models offloaded.

While installed, `from_pretrained` of transformers builds models without memory, and a Trainer
offloads its model, with the adapter that TRL has attached, before it first trains or evaluates.
What the program has written into the model until then is kept; the files give the rest.
`TrainingArguments(deepspeed=...)` gives the configuration where there is none, and `import
deepspeed` is `infinity.integrations.deepspeed`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn

import infinity
from infinity.checkpoint import weight_source
from infinity.checkpoint.huggingface.safetensors_file import tensor_bytes
from infinity.config import SwapConfig
from infinity.config.deepspeed_keys import SCHEDULE_OF_TYPE, Facts
from infinity.config.hub import download_remedy, in_hub_cache
from infinity.config.source import read_source
from infinity.errors import ConfigError
from infinity.integrations import deepspeed
from infinity.integrations.hf import OffloadedTrainer, is_offloaded, prepare_parts, prepare_trainer
from infinity.modules.reading.adapters import values_of_adapters
from infinity.modules.reading.empty_weights import Provisional, is_to_come
from infinity.tools.pretrained import choose_config, empty_pretrained, for_directory, refuse_options
from infinity.tools.training.model import with_own_drives

_log = logging.getLogger("infinity")

_MOVE = "_move_model_to_device"  # Of Trainer.
# A tensor by its id: itself, its first value, and whether no file has it.
FirstValues = dict[int, tuple[torch.Tensor, torch.Tensor, bool]]
# What transformers downloads for a model, and what only says how.
_WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_OF_HUB = (
    "cache_dir", "force_download", "local_files_only", "token", "use_auth_token", "revision",
    "code_revision", "commit_hash", "subfolder", "_from_auto", "adapter_kwargs", "_commit_hash",
    "low_cpu_mem_usage", "use_safetensors", "variant", "ignore_mismatched_sizes", "weights_only",
)  # fmt: skip
# What a DeepSpeed file and TrainingArguments both say: transformers, too, wants it to be equal.
_SAID_TWICE = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm", "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 adam_beta2", "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}  # fmt: skip
# The same of steps, which are known when the data is.
_STEPS = {"total_num_steps": "max_steps or num_train_epochs", "warmup_num_steps": "warmup_steps"}
_FACTS = "_said_by_deepspeed"  # The attribute of TrainingArguments, which Trainer pickles.


class DropIn:
    """Offloads the models of a program. `config` is what `infinity.offload` takes, or None."""

    def __init__(self, config: Any = None) -> None:
        self._config = config
        self._directories: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
        self._first: WeakKeyDictionary[nn.Module, FirstValues] = WeakKeyDictionary()
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
            is_foreign = path is None or args or any(map(options.get, ("gguf_file", "subfolder")))
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
            if is_cast or self._directory_in(module) is None or is_offloaded(module):
                return plain_to(module, *args, **options)
            return module

        def post_init(args: Any) -> None:
            if args.deepspeed:
                vars(args)[_FACTS] = dict(_take_schedule(args).table)
                self._config, args.deepspeed = self._config or args.deepspeed, None
            plain_post_init(args)
            _refuse_other_batch(args)

        def prepare(accelerator: Any, *parts: Any, **options: Any) -> Any:
            plain = partial(plain_prepare, accelerator)
            return prepare_parts(accelerator, plain, self._offload_waiting, parts, options)

        def preparing(plain: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(plain)
            def method(trainer: Any, *args: Any, **options: Any) -> Any:
                if not isinstance(trainer, OffloadedTrainer) and self._prepare(
                    trainer, trains=plain.__name__ == "train"
                ):
                    return getattr(trainer, plain.__name__)(*args, **options)
                return plain(trainer, *args, **options)

            return method

        with ExitStack() as stack:
            stack.enter_context(patch.object(models, "from_pretrained", classmethod(load)))
            stack.enter_context(patch.object(TrainingArguments, "__post_init__", post_init))
            stack.enter_context(patch.object(Trainer, _MOVE, move))
            stack.enter_context(patch.object(nn.Module, "to", to))
            stack.enter_context(patch.object(Accelerator, "prepare", prepare))
            stack.enter_context(patch.object(deepspeed, "offload", self._offload))
            stack.enter_context(_in_place_of_deepspeed())
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
        self._directories[model], self._first[model] = directory, _small_values(model, directory)

        def refuse(module: nn.Module, *_: Any) -> None:
            if not is_offloaded(module):
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

    def _prepare(self, trainer: Any, *, trains: bool) -> bool:
        """Offloads the models of a Trainer. Returns whether it has one that waits for it."""
        if trains:
            _refuse_other_steps(trainer)
        directory = self._directory_in(trainer.model)
        if directory is None:
            return False
        reference: Any = getattr(trainer, "ref_model", None)
        if reference is not None and self._directory_in(reference) is not None:
            reference.requires_grad_(False)
            if self._offload_waiting(reference):
                reference._is_accelerate_prepared = True
        if is_offloaded(trainer.model):  # By an earlier Trainer.
            prepare_trainer(trainer)
            return True
        config = self._config_for(directory, trainer.model)
        with self._written_values(trainer.model):
            prepare_trainer(trainer, config, weights=directory)
        return True

    def _offload_waiting(self, model: nn.Module) -> bool:
        """Offloads a model that was built without memory, or is one of diffusers. Returns whether
        it is one."""
        # Scripts of diffusers prepare the transformer or UNet that they train.
        diffusers: Any = sys.modules.get("diffusers")
        is_waiting = self._directory_in(model) is not None
        is_waiting |= diffusers is not None and isinstance(model, diffusers.ModelMixin)
        if not is_waiting or is_offloaded(model):
            return False
        self._offload(model)
        return True

    def _offload(self, model: nn.Module, config: SwapConfig | None = None) -> None:
        """Offloads a model by the configuration of this object, or else `config`."""
        directory = self._directory_in(model)
        own = self._config_for(directory, model, config)
        with nullcontext() if directory is None else self._written_values(model):
            infinity.offload(model, own, weights=directory)

    @contextmanager
    def _written_values(self, model: nn.Module) -> Iterator[None]:
        """Writes what the program has written into a model built empty again, after the files have
        been read over it in the block. Raises ConfigError for a small parameter that no file has,
        and that was changed without its value."""
        kept, buffers = values_of_adapters(model), dict(model.named_buffers())
        first = dict(chain(*(self._first.get(of, {}).items() for of in model.modules())))
        values: dict[str, torch.Tensor] = {}
        for name, tensor in (*model.named_parameters(), *buffers.items()):
            if tensor.is_meta or id(tensor) in kept:
                continue
            _, before, is_new = first.get(id(tensor), (None, None, False))
            is_written = before is None or not _have_same_bytes(tensor, before)
            if is_new and isinstance(tensor, Provisional):
                if is_written or not is_to_come(tensor):
                    raise ConfigError(
                        f"{name!r} was changed before it had a value, which no file has; write all "
                        "of it (copy_, load_state_dict), or change it after "
                        "infinity.from_pretrained, inside `with infinity.gather(module, "
                        "modify=True):`"
                    )
            elif is_written:
                values[name] = tensor.detach().clone()
        yield
        for of in model.modules():
            self._first.pop(of, None)
        for name, value in values.items():
            if name in buffers:
                model.get_buffer(name).copy_(value)
                continue
            parameter = model.get_parameter(name)
            with infinity.gather(parameter, modify=True), torch.no_grad():
                parameter.copy_(value)

    def _config_for(
        self, directory: Path | None, model: Any, config: SwapConfig | None = None
    ) -> SwapConfig:
        """Returns the configuration of the next model, whose swap directories are its own."""
        if self._config is not None or directory is None:
            config = SwapConfig.load(self._config or config)
        elif config is None:
            adapters = getattr(model, "peft_config", {})
            config = choose_config(directory, next(iter(adapters.values()), None))
        number = len(self.offloaded)
        self.offloaded.append(str(directory or type(model).__name__))
        return with_own_drives(config, str(number)) if number else config


def _take_schedule(args: Any) -> Facts:
    """Gives TrainingArguments the schedule of their DeepSpeed file, which goes before their own.
    Returns what the file says. Raises ConfigError for numbers that are others than theirs."""
    facts = Facts(read_source(args.deepspeed)[0])
    for key, names in _SAID_TWICE.items():
        first, *rest = [getattr(args, name) for name in names.split()]
        _refuse_other(facts, key, [first, *rest] if rest else first, names)
    kind = facts.get("scheduler.type")
    if kind in SCHEDULE_OF_TYPE:
        schedule = SCHEDULE_OF_TYPE[kind]
        args.lr_scheduler_type = "constant_with_warmup" if schedule == "constant" else schedule
        text = "args.deepspeed: %s is lr_scheduler_type=%r, with a linear warm-up"
        _log.warning(text, kind, args.lr_scheduler_type)
    return facts


def _refuse_other_batch(args: Any) -> None:
    """Raises ConfigError for a DeepSpeed file with another batch than that of the arguments."""
    if _FACTS in vars(args):
        own = args.per_device_train_batch_size * args.gradient_accumulation_steps
        names = "per_device_train_batch_size * gradient_accumulation_steps * ranks"
        _refuse_other(Facts(vars(args)[_FACTS]), "train_batch_size", args.world_size * own, names)


def _refuse_other_steps(trainer: Any) -> None:
    """Raises ConfigError for a DeepSpeed file with other steps than those of the trainer."""
    facts, place = Facts(vars(trainer.args).get(_FACTS, {})), "scheduler.params"
    if {facts.get(f"{place}.{key}") for key in _STEPS} == {None}:
        return
    args, loader = trainer.args, trainer.get_train_dataloader()
    steps = trainer.set_initial_training_values(args, loader)[-1]
    warmup = args.get_warmup_steps(steps)
    if not warmup and facts.get(f"{place}.warmup_num_steps") == 1:  # transformers writes 1 for 0.
        warmup = 1
    for key, own in zip(_STEPS, (steps, warmup), strict=True):
        _refuse_other(facts, f"{place}.{key}", own, _STEPS[key])


def _refuse_other(facts: Facts, key: str, own: Any, names: str) -> None:
    theirs = facts.get(key)
    if theirs not in (None, own):
        raise ConfigError(
            f"args.deepspeed: {key} is {theirs}, and {names} of the arguments is {own}; expected "
            'the same, or "auto" in the file'
        )


@contextmanager
def _in_place_of_deepspeed() -> Iterator[None]:
    """Has `import deepspeed`, and imports of its modules, give what is here. Other modules that are
    imported stay."""
    ours: dict[str, Any] = {"deepspeed": deepspeed}
    ours |= {f"deepspeed.{name}": module for name, module in deepspeed.MODULES.items()}
    before = {name: sys.modules[name] for name in ours if name in sys.modules}
    finder: Any = SimpleNamespace(find_spec=deepspeed.refuse_import)
    sys.modules.update(ours)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in ours:
            del sys.modules[name]
        sys.modules.update(before)


def _small_values(model: nn.Module, directory: Path) -> FirstValues:
    """Gives small parameters and buffers the values of the files, so that a program may change a
    part of them. Parameters still wait for those that `offload` gives them. Returns the values of
    all of them, by the id of each."""
    plan = weight_source(directory).plan(model, strict=False)

    def is_small(name: str) -> bool:
        target = plan.view.targets.get(name)
        return target is not None and all(
            isinstance(model.get_parameter(own), Provisional) for own in target.parameter_names
        )

    def write(name: str, value: torch.Tensor) -> None:
        model.get_parameter(name).data.copy_(value)

    small = [of for of in plan.groups if all(map(is_small, of.targets))]
    replace(plan, groups=small, missing=[], unexpected=[]).load(write)
    is_new = {id(model.get_parameter(name)) for name in plan.missing}
    tensors = (of for of in (*model.parameters(), *model.buffers()) if not of.is_meta)
    return {id(of): (of, of.detach().clone(), id(of) in is_new) for of in tensors}


def _have_same_bytes(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    own, other = (
        tensor_bytes(of.detach().to("cpu", tensor.dtype).contiguous()) for of in (tensor, before)
    )
    return own == other


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
