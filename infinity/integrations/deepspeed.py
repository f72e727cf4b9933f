"""A loop written for DeepSpeed, with its model offloaded: one changed line, or none by
`infinity run`.

    import infinity.integrations.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Batch sizes, accumulation, clipping, optimizer and schedule are those of the JSON; where state rests
is translated (`infinity.config.deepspeed`). Losses and weights have the bits of the same loop in
plain PyTorch. What is not here is refused by its name. Facts are those of DeepSpeed 0.19: its
training API, `docs/_tutorials/getting-started.md` and `deepspeed/runtime/lr_schedules.py`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

import infinity
from infinity.api import offload
from infinity.checkpoint.durable import replace_file
from infinity.checkpoint.huggingface.export_weights import export_safetensors
from infinity.checkpoint.run.load import load
from infinity.config import SwapConfig
from infinity.config.deepspeed import refuse_lost, translate
from infinity.config.deepspeed_keys import Facts
from infinity.config.source import read_source
from infinity.config.swap import configuration_of
from infinity.engine.registry import engine_of, owner_of
from infinity.errors import ConfigError, UnsupportedError, reporting
from infinity.integrations.hf import (
    check_rule,
    is_offloaded,
    names_of,
    optimizer_like,
    save_over,
    stream_exports,
)

_log = logging.getLogger("infinity")

_LATEST = "latest"  # The file that names the newest checkpoint of a directory.


class DeepSpeedEngine(nn.Module):
    """The offloaded model, as DeepSpeed's training API shows it: `initialize` returns it first.

    A name that is not here is that of the model. Belongs to the thread that trains.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, micro: int, accumulation: int
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self._micro, self._accumulation = micro, accumulation
        self._is_boundary: bool | None = None
        self._has_backward = False  # Of this micro-batch.
        self.micro_steps = self.global_steps = self.global_samples = 0
        engine = engine_of(model)
        self.device = engine.device.torch_device
        self.global_rank, self.world_size = engine.rank, engine.num_ranks
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(self.module, name):
                return getattr(self.module, name)
        raise AttributeError(
            f"engine.{name}: neither the model nor infinity's DeepSpeedEngine has it; "
            "docs/DEEPSPEED.md lists what is there"
        )

    def forward(self, *args: Any, **options: Any) -> Any:
        """Calls the model."""
        return self.module(*args, **options)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Adds the gradients of the loss, divided by the steps of accumulation; returns it so."""
        if scale_wrt_gas and self._accumulation > 1:
            loss = loss / self._accumulation
        loss.backward(retain_graph=retain_graph)
        self._has_backward = True
        return loss

    def step(self) -> None:
        """Ends a micro-batch. The last of a step clips, updates, forgets the gradients, and moves
        the schedule on."""
        if self.optimizer is None:
            raise ConfigError(
                "engine.step(): there is no optimizer; give deepspeed.initialize one, or name it "
                "in the JSON"
            )
        if self._accumulation > 1 and not self._has_backward:
            raise UnsupportedError(
                "engine.step() after loss.backward(): expected engine.backward(loss), which "
                f"divides by the {self._accumulation} steps of accumulation"
            )
        self._has_backward = False
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        if self._is_boundary is not None:
            return self._is_boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decides in place of the count whether the next `step` updates the weights."""
        self._is_boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.module.zero_grad(set_to_none)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the samples of one forward."""
        return self._micro

    def gradient_accumulation_steps(self) -> int:
        """Returns the micro-batches of a step."""
        return self._accumulation

    def train_batch_size(self) -> int:
        """Returns the samples of a step on all ranks."""
        return self._micro * self._accumulation * self.world_size

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the last step's gradients before they were clipped; None without."""
        norm = self.optimizer.grad_norm
        return None if norm is None else float(norm)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/tag`, a checkpoint of `infinity.checkpoint`, whole or not at all, in
        place of an earlier one; then `latest`. All ranks call it. `client_state`: numbers, text,
        tensors, and lists and dicts of these."""
        if exclude_frozen_parameters:
            raise _refused("save_checkpoint(exclude_frozen_parameters=True)", "frozen weights that "
                           "rest in the directory's files are referred to, not copied")  # fmt: skip
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        counts = (self.micro_steps, self.global_steps, self.global_samples)
        save_over(
            Path(save_dir) / name, self.module, self.optimizer, step=self.global_steps,
            scheduler=self.lr_scheduler,
            extra={"client_state": dict(client_state or {}), "counts": list(counts)},
        )  # fmt: skip
        if save_latest and self.global_rank == 0:
            replace_file(Path(save_dir) / _LATEST, name)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, Any]:
        """Restores what `save_checkpoint` wrote. Returns its path and its client state; (None,
        None), with a warning, if no tag is given and the directory has no `latest`."""
        if not load_module_strict:
            raise _refused("load_checkpoint(load_module_strict=False)", "a checkpoint is that of "
                           "the whole model")  # fmt: skip
        latest = Path(load_dir) / _LATEST
        if tag is None and not latest.is_file():
            _log.warning("%s: there is no such file, so nothing is loaded", latest)
            return None, None
        with reporting("read", latest):
            path = Path(load_dir) / (latest.read_text().strip() if tag is None else str(tag))
        if any(path.glob("*model_states.pt")):
            raise _refused(
                f"load_checkpoint({str(path)!r})", "DeepSpeed wrote it, in pickles. Its script "
                f"makes weights of it, and moments begin anew: python {quote(f'{load_dir}')}"
                f"/zero_to_fp32.py {quote(f'{load_dir}')} OUT --safe_serialization --tag "
                f"{quote(path.name)}, then infinity.offload(model, config, weights='OUT')"
            )  # fmt: skip
        takes_state = load_optimizer_states and not load_module_only
        found = load(
            path, self.module, self.optimizer if takes_state else None,
            scheduler=self.lr_scheduler if takes_state and load_lr_scheduler_states else None,
        )  # fmt: skip
        if not load_module_only:
            self.micro_steps, self.global_steps, self.global_samples = found.extra["counts"]
        return str(path), found.extra["client_state"]

    def save_16bit_model(self, save_dir: str | os.PathLike[str]) -> bool:
        """Writes the weights as safetensors that `from_pretrained` reads, in their own dtype."""
        if self.global_rank == 0:  # All ranks call it.
            export_safetensors(self.module, save_dir)
        return True

    def destroy(self) -> None:
        """Releases memory and swap files. As there, a second call does nothing."""
        if is_offloaded(self.module):
            infinity.close(self.module)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Offloads the model by a DeepSpeed configuration. Returns (engine, optimizer, data loader,
    scheduler), of which the last three may be None.

    config: a file, or a dict; else `args.deepspeed_config`. Its keys are those that
        `infinity config import` takes
    optimizer: torch's AdamW or Adam, or a function from parameters to one; else that of the file
    model_parameters: what it trains, groups of them too; else all that need gradients
    training_data: a map-style data set, which is shuffled and divided as DeepSpeed does
    lr_scheduler: of the optimizer, or a function from an optimizer to one; else that of the file

    Raises ConfigError or UnsupportedError, by the name of what it cannot do, before the model is
    touched.
    """
    if mpu is not None or mesh_param is not None:
        raise _refused("initialize(mpu=, mesh_param=)", "tensor parallelism is given to "
                       "infinity.offload(model_parallel_group=)")  # fmt: skip
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    source = config or config_params or getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError(
            "config: expected a DeepSpeed file or a dict; give initialize one, or the program "
            "--deepspeed_config FILE"
        )
    if dist_init_required is not False:
        init_distributed()
    table, origin = read_source(source)
    found = translate(table)
    refuse_lost(found, origin)
    facts, swap = Facts(table), configuration_of(found, origin)
    world = dist.get_world_size() if dist.is_initialized() else 1
    micro, accumulation = _sizes(facts, world)
    chosen = [p for p in model.parameters() if p.requires_grad]
    params: list[Any] = chosen if model_parameters is None else list(model_parameters)
    theirs = _optimizer(optimizer, params, facts, swap)
    factor, names = _factor(facts), names_of(model)
    if factor is not None and (theirs is None or lr_scheduler is not None):
        raise ConfigError(
            "scheduler: the file has one; expected an optimizer, and no lr_scheduler beside it"
        )
    if theirs is not None:
        check_rule(theirs)
    offload(model, swap)
    stream_exports(model)
    mine: Any = None
    if theirs is not None:
        clipping = {"max_grad_norm": facts.get("gradient_clipping") or None}
        mine = optimizer_like(theirs, model, names, **clipping)
    lr_scheduler = _scheduler(lr_scheduler, mine, factor, facts, swap)
    engine = DeepSpeedEngine(model, mine, lr_scheduler, micro, accumulation)
    if training_data is None:
        return engine, mine, None, lr_scheduler
    drops_last = bool(facts.get("dataloader_drop_last", False))
    return engine, mine, _loader(engine, training_data, collate_fn, drops_last), lr_scheduler


def _scheduler(
    theirs: Any,
    optimizer: Any,
    factor: Callable[[int], float] | None,
    facts: Facts,
    swap: SwapConfig,
) -> Any:
    """Returns the scheduler of the file, or else that of the program, of infinity's optimizer."""
    if factor is not None:
        if facts.get("scheduler.type") != "WarmupCosineLR":  # The others have a peak of their own.
            for group in optimizer.param_groups:
                group["lr"] = swap.optimizer.lr
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if hasattr(theirs, "optimizer"):
        theirs.optimizer = optimizer
        return theirs
    return None if theirs is None else theirs(optimizer)


def _loader(engine: DeepSpeedEngine, data: Any, collate_fn: Any, drops_last: bool) -> Any:
    """Returns a loader of micro-batches, shuffled and divided over ranks."""
    sampler: Any = DistributedSampler(data, engine.world_size, engine.global_rank)
    size = engine.train_micro_batch_size_per_gpu()
    return DataLoader(data, size, sampler=sampler, collate_fn=collate_fn, drop_last=drops_last)


def _sizes(facts: Facts, world: int) -> tuple[int, int]:
    """Returns micro-batch and accumulation, where two of DeepSpeed's three numbers give the third.
    Raises ConfigError if they contradict each other."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, total = (facts.get(key) for key in keys)
    found = f"got {', '.join(f'{key}={facts.get(key)}' for key in keys)}, {world} ranks"
    if micro is None and total is None:
        raise ConfigError(f"expected {keys[0]} or {keys[2]} as a number, {found}")
    if steps is None:
        steps = 1 if micro is None or total is None else total // (micro * world)
    if micro is None:
        micro = total // (steps * world)
    if micro < 1 or steps < 1 or (total is not None and micro * steps * world != total):
        raise ConfigError(f"expected {keys[2]} = {keys[0]} * {keys[1]} * ranks, {found}")
    return micro, steps


def _optimizer(theirs: Any, params: list[Any], facts: Facts, swap: SwapConfig) -> Any:
    """Returns torch's optimizer of the program, or of the file, or None. It never makes a step."""
    if theirs is not None:
        return theirs if isinstance(theirs, torch.optim.Optimizer) else theirs(params)
    if facts.get("optimizer.type") is None:
        return None
    own = swap.optimizer
    kind = torch.optim.AdamW if own.name == "adamw" else torch.optim.Adam
    return kind(params, own.lr, own.betas, own.eps, own.weight_decay)


def _factor(facts: Facts) -> Callable[[int], float] | None:
    """Returns the part of the peak learning rate that DeepSpeed's schedule gives a step, counted
    from 0; None without a schedule. The first step has none: DeepSpeed moves on after a step, from
    iteration -1."""
    kind = facts.get("scheduler.type")
    if kind is None:
        return None
    if kind == "WarmupLR" and facts.get("scheduler.params.warmup_max_lr") is None:
        raise ConfigError(
            "scheduler.params.warmup_max_lr: expected the peak; releases of DeepSpeed differ in "
            "what they take without it"
        )
    place = "scheduler.params."
    warmup = max(2, int(facts.get(f"{place}warmup_num_steps", 1000)))
    total = facts.get(f"{place}total_num_steps")
    is_log = facts.get(f"{place}warmup_type", "log") == "log"
    least: float = facts.get(f"{place}cos_min_ratio", 1e-4)
    if total is None and kind != "WarmupLR":
        raise ConfigError(f"{place}total_num_steps: expected the number of steps of {kind}")
    end: int = total or 0

    def factor(step: int) -> float:
        done = step - 1
        if done < 0:
            return 0.0
        if done < warmup:
            return 1.0 / math.log(warmup) * math.log(done + 1) if is_log else done / warmup
        if kind == "WarmupLR":
            return 1.0
        if kind == "WarmupDecayLR":
            return max(0.0, (end - done) / max(1.0, end - warmup))
        progress = min(1.0, (done - warmup + 1) / max(1, end - warmup))
        return max(0.0, least + (1.0 - least) * ((1 + math.cos(math.pi * progress)) / 2))

    return factor


# -- What stands around a loop ---------------------------------------------------------------------


def init_distributed(dist_backend: str | None = None, *_: Any, **options: Any) -> None:
    """Joins the processes of a launcher, or this one alone, unless they have joined."""
    if not dist.is_initialized():
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        backend = dist_backend if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))


def add_config_arguments(parser: Any) -> Any:
    """Adds `--deepspeed` and `--deepspeed_config FILE` to a parser of argparse; returns it."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="Has no effect here.")
    group.add_argument("--deepspeed_config", help="A DeepSpeed configuration.")
    return parser


@contextmanager
def _init(*_: Any, **options: Any) -> Iterator[None]:
    _log.warning(
        "deepspeed.zero.Init: nothing to do; infinity.from_pretrained and `infinity run` build "
        "models of a directory without memory, others are built in memory"
    )
    yield


def _gathered(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Any:
    """`infinity.gather` of those that are offloaded."""
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    offloaded = [tensor for tensor in tensors if owner_of(tensor) is not None]
    if not enabled or not offloaded:
        return nullcontext()
    if modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
        raise _refused("zero.GatheredParameters(modifier_rank=)", "with several ranks all make the "
                       "same change inside infinity.gather(parameters, modify=True)")  # fmt: skip
    return infinity.gather(offloaded, modify=modifier_rank is not None)


_ADAM = {"bias_correction": True, "amsgrad": False, "set_grad_none": True,
         "fp32_optimizer_states": True}  # fmt: skip


def _adam(
    model_params: Iterable[Any], lr: float = 1e-3, *, adam_w_mode: bool = True,
    adamw_mode: bool = True, **options: Any,
) -> torch.optim.Optimizer:  # fmt: skip
    """FusedAdam and DeepSpeedCPUAdam: torch's AdamW or Adam, which `initialize` replaces with
    ours."""
    if {key: options.pop(key, value) for key, value in _ADAM.items()} != _ADAM:
        raise UnsupportedError(f"deepspeed.ops.adam: expected {_ADAM}; leave these options out")
    kind = torch.optim.AdamW if adam_w_mode and adamw_mode else torch.optim.Adam
    return kind(model_params, lr, **({"weight_decay": 0.0} | options))


def _fused_adam(params: Iterable[Any], lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    return _adam(params, lr, **options)


@cache
def get_accelerator() -> ModuleType:
    """Returns the device as DeepSpeed names it; its other names are those of torch's module."""
    has_gpu = torch.cuda.is_available()
    own_gpu = int(os.environ.get("LOCAL_RANK", 0)) % max(torch.cuda.device_count(), 1)
    kind, place = ("cuda", own_gpu) if has_gpu else ("cpu", None)

    def device_name(index: int | None = None) -> str:
        return kind if index is None or not has_gpu else f"{kind}:{index}"

    names = vars(torch.cuda) | ({} if has_gpu else vars(torch.cpu))
    own = {name: value for name, value in names.items() if name[0] != "_"}
    own |= {"device_name": device_name, "current_device_name": partial(device_name, place)}
    own["communication_backend_name"] = lambda: "nccl" if has_gpu else "gloo"
    return _module("accelerator.get_accelerator()", own)


_messages = logging.getLogger("DeepSpeed")  # Shows what is of use at run time, as there.
_messages.setLevel(logging.INFO)
_messages.propagate = False  # Or a program with handlers of its own shows each message twice.
_messages.addHandler(logging.StreamHandler())


def _log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks: -1 is every one, and without a list none does once they have joined."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank == -1 or {rank, -1} & {*(ranks or ())}:
        _messages.log(level, "[Rank %d] %s", rank, message)


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=False)


def _configure(mpu_: Any, *_: Any, **options: Any) -> None:
    if mpu_ is not None:
        raise _refused("checkpointing.configure(mpu_=)", "tensor parallelism is given to "
                       "infinity.offload(model_parallel_group=)")  # fmt: skip


# By the names under which they are imported, after "deepspeed.".
MODULES: dict[str, ModuleType] = {"comm": dist}


def _module(name: str, names: Mapping[str, Any]) -> ModuleType:
    """Returns a module of DeepSpeed that has these names and refuses others."""
    made = MODULES[name] = ModuleType(f"deepspeed.{name}")
    vars(made).update(names, __getattr__=partial(_refuse, f"{name}."), __path__=[])
    return made


def _refused(name: str, text: str) -> UnsupportedError:
    return UnsupportedError(f"deepspeed.{name} is not here: {text}")


def _refuse(place: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {place + name!r}")
    raise _refused(place + name, "docs/DEEPSPEED.md lists what is; pipelines, MoE layers and "
                   "inference engines have no translation")  # fmt: skip


def __getattr__(name: str) -> Any:
    return _refuse("", name)


__path__: list[str] = []  # Makes this a package: Python asks `refuse_import` for its submodules.
comm = dist
zero = MODULES["runtime.zero"] = _module("zero", {"Init": _init, "GatheredParameters": _gathered})
adam = _module("ops.adam", {"FusedAdam": _fused_adam, "DeepSpeedCPUAdam": _adam})
ops = _module("ops", {"adam": adam})
accelerator = _module("accelerator", {"get_accelerator": get_accelerator})
checkpointing = _module("checkpointing", {"checkpoint": _checkpoint, "configure": _configure})
utils = MODULES["utils.logging"] = _module("utils", {"logger": _messages, "log_dist": _log_dist})
_ACTIVATIONS = "runtime.activation_checkpointing"
MODULES[f"{_ACTIVATIONS}.checkpointing"] = checkpointing
_module(_ACTIVATIONS, {"checkpointing": checkpointing})
runtime = _module("runtime", {"zero": zero, "activation_checkpointing": MODULES[_ACTIVATIONS]})


def refuse_import(name: str, path: Any = None, target: Any = None) -> None:
    """The `find_spec` of a finder: refuses a module of DeepSpeed that is not among `MODULES`."""
    place, _, module = name.partition(".")
    if place == "deepspeed":
        try:
            _refuse("", module)
        except UnsupportedError as error:  # A program may import something else then.
            raise ModuleNotFoundError(str(error), name=name) from None
