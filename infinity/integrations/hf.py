"""Hugging Face: an offloaded model under `transformers.Trainer`, or in a loop with accelerate.

    infinity.offload(model, "swap.toml")                      # then attach no more adapters
    trainer = prepare_trainer(Trainer(model=model, args=args, train_dataset=...))
    trainer.train()                                           # and evaluate, predict, save_model

Trainer works on the offloaded model as it is, but for a few places where it would do by itself what
the engine does: wrap the model, build the optimizer, clip gradients, and save or load state that
does not fit in memory. `OffloadedTrainer` answers those, and runs accumulation windows layer-major
(`windows.py`). Under torchrun every process is a rank of the engine, which averages gradients and
divides the state; Trainer and accelerate divide the data. Written against transformers 5.24 and
accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

import infinity
from infinity.checkpoint import weight_source
from infinity.checkpoint.durable import sync_directory, sync_file
from infinity.checkpoint.huggingface.export_weights import export_safetensors
from infinity.checkpoint.run.links import label_of, relabel
from infinity.checkpoint.run.load import load
from infinity.checkpoint.run.save import save
from infinity.config import SwapConfig
from infinity.config.extras import TRIED, require_release
from infinity.config.schema import changed
from infinity.engine.registry import AGAIN, engine_of, find_engine, owner_of
from infinity.errors import ConfigError, UnsupportedError, listed, reporting
from infinity.integrations.card import fill
from infinity.integrations.sampler import ServerSampler
from infinity.integrations.windows import LayerMajorSteps, choose_order
from infinity.modules.reading.adapters import values_of_adapters
from infinity.optimizers.algorithms import AdamW
from infinity.optimizers.clipping import clip_grad_norm_, engines_of
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.private.transformers import TRAINER_METHODS
from infinity.sizes import GIB, parse_nbytes

_PREPARED = "offloaded_optimizers"  # An accelerator's attribute.
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
# Arguments that conflict with an offloaded model where they are set.
_CONFLICTS = {
    "fp16": "the precision is the model's: load it in bfloat16",
    "deepspeed": "give this file to infinity.from_pretrained, or run the program by `infinity run`",
    "fsdp": "state is offloaded by infinity.offload already",
    "torch_compile": "compile the model's blocks before offloading",
}
_ONE_GPU = "one process uses one GPU: set CUDA_VISIBLE_DEVICES"
_OTHER_OPTIMIZER = f"the optimizer is infinity.AdamW; expected one of {', '.join(_OPTIMIZERS)}"

T = TypeVar("T")

_log = logging.getLogger("infinity")


def prepare_trainer(
    trainer: T,
    config: Any = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    layer_major: bool | None = None,
    window: int | None = None,
    sampler: ServerSampler | str | None = None,
) -> T:
    """Makes a Trainer of any subclass train its model offloaded; returns the same object.

    The model is offloaded already, or is offloaded now with `config`. The optimizer is
    infinity.AdamW with the groups, learning rate and betas of `trainer.args`, and clips to
    `args.max_grad_norm`; an optimizer of infinity that the Trainer already has is kept. The
    precision is that of the model, without autocast. `args.bf16`, which TRL sets by itself, is
    taken for a model in bfloat16, and gives a model that is offloaded now this precision.

    weights: the directory that `infinity.offload` reads, for a model on meta
    layer_major: the micro-batches of an optimizer step pass each block together
        (`infinity.forward_backward`), so bytes do not grow with `gradient_accumulation_steps`. None
        does so where the results have the bits of the plain order: the first optimizer step runs in
        the plain order and is looked at, and what speaks against it (dropout, tied weights, hooks,
        a model class or a loss of the program's own) is logged. True takes it from the first step
        on, with other random numbers and roundings, and raises UnsupportedError where it would be
        wrong. False keeps the plain loop
    window: the most micro-batches that pass a block together; None takes all of a step. Their layer
        inputs wait on the tiers that `[placement] activations` names
    sampler: the server, or its address, that samples for TRL's GRPO trainer; it is asked first. The
        model's adapter is written for it after each step

    Checkpoints contain, beside Trainer's files, `infinity/` with everything that an exact
    continuation needs. `save_model` and checkpoints export weights shard by shard. With several
    processes, all of them call `prepare_trainer`; the model is offloaded after they have joined.
    Raises ConfigError for arguments that conflict with an offloaded model, before anything changes.
    """
    require_release("transformers", "prepare_trainer")
    if any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__):
        require_release("trl", f"prepare_trainer of {type(trainer).__name__}")
    missing = [name for name in TRAINER_METHODS if not hasattr(trainer, name)]
    if missing:
        raise UnsupportedError(
            f"{type(trainer).__name__} has no {', '.join(missing)}; this works with transformers "
            f"{TRIED['transformers']}, install one of these"
        )
    target: Any = trainer
    _check_arguments(target.args)
    _check_optimizer(target.optimizer)
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ConfigError(f"expected window to be a number of micro-batches or None, got {window}")
    sampler = ServerSampler(sampler) if isinstance(sampler, str) else sampler
    if sampler is not None:
        sampler.check(target)
    offload_once(target.model, config, weights=weights, is_bf16=target.args.bf16)
    if target.args.bf16:
        target.args.bf16 = False  # Another accelerator of this trainer would ask for autocast.
        _end_autocast(target.accelerator, "args.bf16", target.model)
    _check_ranks(target.model, target.args.world_size)
    _take_adapter(target.model, target.optimizer)
    stream_exports(target.model)
    for model in filter(None, (target.model, getattr(target, "ref_model", None))):
        name_parts(model)
    target.is_layer_major, target.most_together = choose_order(target, layer_major), window
    target.is_asked_for = layer_major is True
    cls = type(target)
    if not issubclass(cls, OffloadedTrainer):
        own = {"__module__": cls.__module__}
        target.__class__ = type(cls.__name__, (OffloadedTrainer, cls), own)
    if sampler is not None:
        sampler.attach(target)
    return trainer


def _check_arguments(args: Any) -> None:
    """Raises ConfigError that names arguments for tasks of the engine, or for tasks it cannot
    do."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    wrong = [f"args.{name}: {text}" for name, text in _CONFLICTS.items() if getattr(args, name)]
    wrong += [f"args.n_gpu: {_ONE_GPU}"] * (args.n_gpu > 1)
    wrong += [f"args.optim: {_OTHER_OPTIMIZER}"] * (optimizer not in _OPTIMIZERS)
    if wrong:
        raise ConfigError("an offloaded model cannot be trained so: " + "; ".join(wrong))


def _check_optimizer(optimizer: Any) -> None:
    """Raises ConfigError for an optimizer that a Trainer has, unless it is offloaded."""
    if optimizer is not None and not isinstance(optimizer, OffloadedOptimizer):
        raise ConfigError(
            f"expected infinity.AdamW, Adam, SGD or Lion as the Trainer's optimizer, got "
            f"{type(optimizer).__name__}; leave `optimizers` out, or give (infinity.AdamW(model, "
            "...), scheduler)"
        )


def _check_ranks(model: nn.Module, num_processes: int) -> None:
    """Raises ConfigError unless the engines of all processes train one model together."""
    num_ranks = engine_of(model).num_ranks
    if num_ranks != num_processes:
        raise ConfigError(
            f"expected a model that {num_processes} processes have offloaded together, got one of "
            f"{num_ranks}; call infinity.offload after the processes have joined: after "
            "TrainingArguments, Accelerator() or torch.distributed.init_process_group. Without a "
            "GPU these join under use_cpu=True (TrainingArguments) or cpu=True (Accelerator)"
        )


def _take_adapter(model: nn.Module, optimizer: Any) -> None:
    """Offloads a model again if TRL has attached the adapter of `peft_config` since: with the bits
    of `infinity.from_pretrained(peft_config=)`. Raises ConfigError for other trainable parameters
    that were added after `infinity.offload`, and where weights no longer are those of the files or
    have an optimizer. Frozen ones stay in memory and work as they are: TRL adds a reference adapter
    in this way."""
    strays = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and owner_of(parameter) is None
    }
    if not strays:
        return
    engine, adapters = engine_of(model), values_of_adapters(model)
    again, own = AGAIN.get(engine), {id(parameter) for parameter in strays.values()}
    has_older = any(id(p) in adapters and owner_of(p) for p in model.parameters())
    is_in_use = optimizer is not None or has_older
    if again is None or is_in_use or not own <= adapters or not engine.leave_empty():
        raise ConfigError(
            f"{listed([*strays])} came into the model after infinity.offload, which does not know "
            "them. Give the adapter to infinity.from_pretrained(path, config, peft_config), and "
            "the trainer no peft_config; or run the program as it is: `infinity run`"
        )
    _log.warning(
        "the trainer's peft_config came after the model was offloaded, so the model is offloaded a "
        "second time, with its base frozen; give peft_config to infinity.from_pretrained to "
        "offload it once"
    )
    again(model)


def offload_once(
    model: nn.Module,
    config: Any,
    *,
    weights: str | os.PathLike[str] | None = None,
    is_bf16: bool = False,
) -> None:
    """Offloads a model that is not yet. Raises ConfigError for one that is, if a configuration is
    given or if bfloat16 is asked for and the model computes in another dtype."""
    if not is_offloaded(model):
        if config is None:
            engine_of(model)  # Raises.
        resolved = SwapConfig.load(config)
        if is_bf16 and resolved.precision.compute == "auto":
            resolved = changed(resolved, {"precision.compute": "bfloat16"})
        _refuse_other_precision(is_bf16, resolved.precision.compute_dtype)
        target, parts = model, _parts(model)
        if len(parts) == 1 and isinstance(weights, (str, os.PathLike)):
            ((place, part),) = parts.items()
            stored = weight_source(weights).names()
            if not any(name.startswith(f"{place}.") for name in stored):
                target = part  # The directory has its weights, as in sentence-transformers.
        infinity.offload(target, resolved, weights=weights)
    else:
        if config is not None:
            raise ConfigError("the model is offloaded already; leave `config` out")
        dtypes = {parameter.dtype for parameter in model.parameters()}
        _refuse_other_precision(is_bf16 and torch.bfloat16 not in dtypes, "float32")
    # Accelerate does not wrap, move or autocast a prepared model.
    model._is_accelerate_prepared = True  # type: ignore[assignment]


def _refuse_other_precision(is_bf16: bool, name: str) -> None:
    if is_bf16 and name != "bfloat16":
        raise ConfigError(
            f"args.bf16 asks for bfloat16, and the model computes in {name}: set bf16=False, or "
            'infinity.from_pretrained(..., dtype="bfloat16"). The fp32 master is kept'
        )


def _end_autocast(accelerator: Any, name: str, model: nn.Module) -> None:
    """Ends autocast, which would keep a copy of each weight, and says so once."""
    accelerator.native_amp = False
    _log.warning("%s: %s computes in bfloat16, without autocast", name, type(model).__name__)


def name_parts(model: Any) -> None:
    """Gives a causal LM of transformers the names by which TRL's loss finds its backbone and the
    number of its experts, where the classes lack them (Llama 4's text model, PhiMoE, GraniteMoE
    with shared experts). No configuration that is saved has them."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, PreTrainedModel):
        return
    backbones = [
        name for name, child in model.named_children() if isinstance(child, PreTrainedModel)
    ]
    if model.base_model is model and len(backbones) == 1:
        model.base_model_prefix = backbones[0]
    elif model.base_model is model and hasattr(model, "language_model"):
        # Llama 4's backbone lies in a causal LM. A second name of a module is no second module.
        vars(model)["text_backbone"] = model.get_submodule("language_model.model")
        model.base_model_prefix = "text_backbone"
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        kind = type(config)  # Of the object itself, the name would be saved.
        name = kind.attribute_map.get("num_local_experts", "num_local_experts")
        kind.attribute_map = kind.attribute_map | {"num_experts": name}


def _parts(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Returns the models of transformers, by name, that a model of another library holds, such as
    sentence-transformers; none for one of transformers or PEFT."""
    found: dict[str, PreTrainedModel] = {}
    if isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return found
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{place}.") for place in found)
        if isinstance(module, PreTrainedModel) and not is_inside:
            found[name] = module
    return found


def stream_exports(model: Any) -> None:
    """Makes `save_pretrained` write shard by shard, also that of parts of a model. PEFT's own
    method, which writes adapters only, stays."""
    parts = _parts(model)
    for part in parts.values():
        stream_exports(part)
    if parts or hasattr(model, "peft_config") or not hasattr(model, "save_pretrained"):
        return
    plain = model.save_pretrained

    def save_pretrained(
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        max_shard_size: int | str = 2 * GIB,
        **options: Any,
    ) -> None:
        options.pop("safe_serialization", None)  # It is always so.
        if state_dict is not None or options:
            plain(
                save_directory,
                is_main_process=is_main_process,
                state_dict=state_dict,
                max_shard_size=max_shard_size,
                **options,
            )
        elif is_main_process:
            nbytes = parse_nbytes(max_shard_size)
            export_safetensors(model, save_directory, max_shard_nbytes=nbytes)

    model.save_pretrained = save_pretrained


class OffloadedTrainer(LayerMajorSteps):
    """The methods in which a Trainer differs for an offloaded model. `prepare_trainer` mixes
    them in."""

    _writes_in: Path | None = None  # In place of the run's directory, while a checkpoint is made.

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Returns infinity.AdamW; Trainer makes the groups."""
        options = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }
        return AdamW, options

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return clip_grad_norm_(model.parameters(), None) if grad_norm is None else grad_norm

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Makes a checkpoint under a name that no run is resumed from, and renames it when all of
        its files are there and synced."""
        engine, directory = engine_of(self.model), Path(self._get_output_dir(trial=trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        partial, target = directory / f".{name}.partial", directory / name
        with engine.ranks.collective_section("remove checkpoints that a crash has left"):
            if self.args.should_save:
                remove_partials(directory)
        try:
            with patch.object(self, "_writes_in", partial):
                super()._save_checkpoint(model, trial)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        best = directory / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_global_step and (best == target or best.exists()):
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(partial / name / TRAINER_STATE_NAME))
        with engine.ranks.collective_section("write a checkpoint"):
            pass  # All ranks have written their files.
        label = label_of(partial / name)
        with engine.ranks.collective_section("give a checkpoint its name"):
            if self.args.should_save:
                give_name(partial / name, target)
        if engine.store.volume is not None:
            relabel(engine.store.volume, label, target)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        if self.args.should_save:
            rotate(directory, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        where: str = super()._get_output_dir(trial)
        return where if self._writes_in is None else str(self._writes_in)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes when the checkpoint has its name: a push goes on in a thread."""
        if self._writes_in is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save and hasattr(self.model, "peft_config"):
            fill(Path(output_dir or self.args.output_dir) / "README.md", self)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        save_over(Path(output_dir) / STATE_NAME, self.model, self.optimizer, step=step)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads nothing: weights come with the rest of the state, after the optimizer exists."""
        if not (Path(resume_from_checkpoint) / STATE_NAME).is_dir():
            raise ConfigError(
                f"{resume_from_checkpoint} has no {STATE_NAME}/ and so no state to go on from: it "
                "was written by another trainer, with save_only_model, or not to its end. Resume "
                "from another checkpoint, or load its weights with infinity.offload(model, config, "
                "weights=...) and begin anew"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(Path(checkpoint) / STATE_NAME, self.model, self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)


def prepare_accelerator(
    accelerator: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    config: Any = None,
) -> Any:
    """Replaces `accelerator.prepare(model, ...)` in a user's own loop with accelerate.

    Pass data loaders, schedulers and plain models to `accelerator.prepare` as usual, and call this
    for each offloaded model that is trained. `accumulate`, `backward`, `clip_grad_norm_` of any
    parameters, `save_state` and `load_state` work; the latter two keep the state of the first
    offloaded model in `infinity/` of their directory, that of the second in `infinity_1/`, in the
    order of these calls. With several processes, all of them make these calls. An optimizer is one
    of infinity, or torch's AdamW or Adam. Returns model and optimizer.

    Without a model it returns the accelerator, whose own `prepare` then takes offloaded models.
    """
    if model is None or optimizer is None:
        plain = accelerator.prepare
        accelerator.prepare = lambda *parts, **options: prepare_parts(
            accelerator, plain, is_offloaded, parts, options
        )
        return accelerator
    precision = accelerator.mixed_precision
    if precision not in ("no", "bf16"):
        raise ConfigError(
            f"expected mixed_precision 'no' or 'bf16', got {precision!r}; the precision is the "
            "model's: load it in bfloat16"
        )
    check_rule(optimizer)
    names = names_of(model)
    offload_once(model, config, is_bf16=precision == "bf16")
    if precision == "bf16":
        _end_autocast(accelerator, "mixed_precision", model)
    _check_ranks(model, accelerator.num_processes)
    stream_exports(model)
    mine = optimizer_like(optimizer, model, names)
    wrapped = AcceleratedOptimizer(mine, device_placement=False)
    wrapped._is_accelerate_prepared = True
    accelerator.prepare(model, wrapped)
    if not hasattr(accelerator, _PREPARED):
        setattr(accelerator, _PREPARED, weakref.WeakKeyDictionary())
        _extend(accelerator, getattr(accelerator, _PREPARED))
    getattr(accelerator, _PREPARED)[model] = weakref.ref(mine)
    return model, wrapped


def prepare_parts(
    accelerator: Any,
    plain_prepare: Callable[..., Any],
    takes: Callable[[nn.Module], bool],
    parts: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Does what `accelerator.prepare(*parts)` does, with models that `takes` offloads, or finds
    offloaded, and that come with their optimizers. Schedulers follow these."""
    made: dict[int, Any] = {}
    for model in parts:
        names = names_of(model) if isinstance(model, nn.Module) else {}
        theirs = next((p for p in parts if isinstance(p, torch.optim.Optimizer) and any(
            id(parameter) in names for group in p.param_groups for parameter in group["params"]
        )), None)  # fmt: skip
        if theirs is None or isinstance(theirs, AcceleratedOptimizer) or not takes(model):
            continue
        mine = optimizer_like(theirs, model, names)
        made[id(model)], made[id(theirs)] = prepare_accelerator(accelerator, model, mine)
        for scheduler in parts:
            if getattr(scheduler, "optimizer", None) is theirs:
                scheduler.optimizer = mine
                ConstantLR(mine, factor=1.0)  # `mine` notes its steps, which the scheduler checks.
    left = [part for part in parts if id(part) not in made]
    found = plain_prepare(*left, **options) if left else ()
    rest = iter((found,) if len(left) == 1 else found)
    every = [made[id(part)] if id(part) in made else next(rest) for part in parts]
    return every[0] if len(every) == 1 else tuple(every)


def is_offloaded(model: nn.Module) -> bool:
    """Returns whether the model, or a model around it, is offloaded."""
    return find_engine(model) is not None


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the names of the model's parameters by their ids."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def optimizer_like(
    theirs: torch.optim.Optimizer, model: nn.Module, names: Mapping[int, str], **options: Any
) -> OffloadedOptimizer:
    """Returns the optimizer of an offloaded model with the groups of one of torch, whose parameters
    had `names` by their ids; one of infinity as it is. Raises as `check_rule`."""
    if isinstance(theirs, OffloadedOptimizer):
        return theirs
    check_rule(theirs)
    kept = ("lr", "initial_lr", "betas", "eps", "weight_decay")
    parameters = dict(model.named_parameters())
    try:
        groups = [
            {"params": [parameters[names[id(p)]] for p in group["params"] if p.requires_grad]}
            | {key: group[key] for key in kept if key in group}
            for group in theirs.param_groups
        ]
    except KeyError:
        text = "the optimizer has parameters of another model, too; make one for each model"
        raise ConfigError(text) from None
    made: OffloadedOptimizer = getattr(infinity, type(theirs).__name__)(groups, **options)
    return made


def check_rule(theirs: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer of torch whose rule infinity lacks."""
    if isinstance(theirs, OffloadedOptimizer):
        return
    unlike = [
        key for group in theirs.param_groups for key, value in group.items()
        if value and key in ("amsgrad", "maximize", "capturable", "differentiable")
    ]  # fmt: skip
    kind = type(theirs).__name__
    if kind not in ("AdamW", "Adam") or unlike:
        raise ConfigError(
            f"the loop has {kind} {' '.join(unlike)}; expected torch.optim.AdamW or Adam. For "
            "another rule take infinity.from_pretrained and its optimizers"
        )


def _extend(accelerator: Any, prepared: Mapping[nn.Module, Callable[[], Any]]) -> None:
    """Makes an accelerator clip gradients of offloaded models, and save and load their state.
    `prepared`: references to the optimizers of these models."""
    plain = accelerator.clip_grad_norm_

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        single = isinstance(parameters, torch.Tensor)
        chosen = [parameters] if single else list(parameters)
        do = clip_grad_norm_ if engines_of(chosen) else plain
        norm: torch.Tensor = do(chosen, max_norm, norm_type)
        return norm

    def places_of(models: list[Any], directory: str) -> list[tuple[int, OffloadedOptimizer, Path]]:
        """Returns (index, optimizer, directory of the state) of each offloaded model."""
        own = [index for index, model in enumerate(models) if model in prepared]
        names = [STATE_NAME, *(f"{STATE_NAME}_{number}" for number in range(1, len(own)))]
        return [
            (index, prepared[models[index]](), Path(directory) / name)
            for index, name in zip(own, names, strict=False)
        ]

    def keep_state(models: list[Any], weights: list[Any], output_dir: str) -> None:
        places = places_of(models, output_dir)
        if len(weights) == len(models):  # Else another hook has taken some of them out.
            for index, _, _ in reversed(places):
                del weights[index]  # Accelerate would write these.
        for index, optimizer, place in places:
            save_over(place, models[index], optimizer)

    def bring_state(models: list[Any], input_dir: str) -> None:
        places = places_of(models, input_dir)
        missing = [place for _, _, place in places if not place.is_dir()]
        if missing:
            raise ConfigError(
                f"{input_dir} has no {missing[0].name}/: expected the state of {len(places)} "
                "offloaded models. Prepare the models that the state was saved of, in their order"
            )
        for index, optimizer, place in places:
            load(place, models[index], optimizer)
        for index, _, _ in reversed(places):
            del models[index]

    accelerator.clip_grad_norm_ = clip
    accelerator.register_save_state_pre_hook(keep_state)
    accelerator.register_load_state_pre_hook(bring_state)


# -- Directories of a Trainer's checkpoints: each has its name only when it is whole ---------------


STATE_NAME = "infinity"  # The directory inside a Trainer's checkpoint.
# Not a name that `get_last_checkpoint` takes for a checkpoint.
_PARTIAL = re.compile(rf"\.{PREFIX_CHECKPOINT_DIR}-\d+\.partial")


def save_over(
    directory: Path, model: nn.Module, optimizer: OffloadedOptimizer, **more: Any
) -> None:
    """Replaces the state of an earlier run, as Trainer does with the rest of a checkpoint. If
    writing fails, the earlier state is restored. All ranks call it, and rank 0 replaces. `more`:
    what `infinity.checkpoint.save` takes besides."""
    engine, has_before = engine_of(model), False
    before = directory.with_name(f".{directory.name}.replaced")
    with engine.ranks.collective_section("replace a saved state"):
        if engine.rank == 0:
            with reporting("replace", before):
                if before.exists():
                    shutil.rmtree(before)
                if has_before := directory.exists():
                    directory.rename(before)
    own = _frozen_in(model, directory)
    try:
        save(directory, model, optimizer, **more)
    except BaseException:
        # Released files of this engine are shared with swap files that training rewrites.
        if has_before and own == _frozen_in(model, directory):
            shutil.rmtree(directory, ignore_errors=True)
            before.rename(directory)
        raise
    with engine.ranks.collective_section("remove the saved state that was replaced"):
        if engine.rank == 0:
            shutil.rmtree(before, ignore_errors=True)


def remove_partials(directory: Path) -> None:
    """Removes what a Trainer that was killed has left of checkpoints, in the making or in their
    removal."""
    for path in directory.glob(f".{PREFIX_CHECKPOINT_DIR}-*"):
        if _PARTIAL.fullmatch(path.name):
            with reporting("remove", path):
                shutil.rmtree(path)
            _log.warning("%s is removed: a run was killed while it wrote or removed it", path)


def rotate(directory: Path, limit: int | None, best: str | None) -> None:
    """Removes the checkpoints that `transformers.trainer_utils.rotate_checkpoints` does, each of
    which loses its name before its files."""
    checkpoints = sort_checkpoints(str(directory), use_mtime=True) if limit and limit > 0 else []
    protected = {*checkpoints[-1:], *([] if best is None else [str(Path(best))])}
    num_surplus = max(0, len(checkpoints) - max(limit or 0, len(protected)))
    removable = [path for path in checkpoints if path not in protected]
    for checkpoint in removable[:num_surplus]:
        partial = directory / f".{Path(checkpoint).name}.partial"
        with contextlib.suppress(OSError):  # As in Trainer, what cannot be removed stays.
            os.rename(checkpoint, partial)
            sync_directory(directory)
            shutil.rmtree(partial)


def give_name(made: Path, target: Path) -> None:
    """Syncs a checkpoint and renames it to its final name, in place of an earlier one. What a
    subclass has written under that name by itself goes with it."""
    replaced = made.parent / f"{target.name}.replaced"
    with reporting("write", target):
        for path in (made, *made.rglob("*")):
            if STATE_NAME not in path.relative_to(made).parts:  # That is synced already.
                (sync_directory if path.is_dir() else sync_file)(path)
        if target.exists() and not (target / TRAINER_STATE_NAME).exists():
            for path in target.iterdir():
                if not (made / path.name).exists():
                    path.rename(made / path.name)
        if target.exists():
            target.rename(replaced)
        made.rename(target)
        sync_directory(target.parent)
        shutil.rmtree(made.parent)


def _frozen_in(model: nn.Module, directory: Path) -> set[str]:
    """Returns the checkpoints there whose content this engine protects from being overwritten."""
    volume = engine_of(model).store.volume
    place = os.path.realpath(directory)
    labels = (extent.label for extent in volume.frozen) if volume is not None else ()
    return {label for label in labels if os.path.dirname(label) == place}
