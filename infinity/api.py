"""The public functions of the package, composed of the layers below."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from infinity.checkpoint.huggingface.import_weights import refuse_codes, weight_source
from infinity.checkpoint.run.directory import find_checkpoint
from infinity.checkpoint.run.links import plan_adoption
from infinity.checkpoint.run.references import directory_of_base
from infinity.config import SwapConfig
from infinity.distributed.group import find_group
from infinity.engine.build import build
from infinity.engine.describe import Residence
from infinity.engine.describe import describe as residence_of
from infinity.engine.engine import Engine
from infinity.engine.registry import (
    calling_place,
    engine_of,
    free_swap_directories,
    owner_of,
    remember,
)
from infinity.errors import ConfigError
from infinity.modules.reading.discover import UnitRule
from infinity.modules.reading.empty_weights import init_empty_weights
from infinity.modules.reading.load_plan import LoadPlan, TileRows
from infinity.modules.tiling.expert_adapters import factor_adapters
from infinity.optimizers.algorithms import SGD, Adam, AdamW, Lion
from infinity.state.stored import StoredTensor
from infinity.storage.shards import ShardIdentity
from infinity.storage.volume import Adopted
from infinity.tiers.device import DeviceAdapter

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Engine",
    "Lion",
    "beside",
    "close",
    "engine_of",
    "factored_experts",
    "forward",
    "forward_backward",
    "gather",
    "init_empty_weights",
    "offload",
    "shrink",
    "together",
]  # fmt: skip

T = TypeVar("T")


def offload(
    model: nn.Module,
    config: Any = None,
    *,
    weights: str | os.PathLike[str] | Callable[[str], torch.Tensor] | None = None,
    seed: int = 0,
    ignore: Sequence[str] = (),
    units: UnitRule = "auto",
    device: DeviceAdapter | None = None,
    resume: str | os.PathLike[str] | None = None,
    group: Any = None,
    model_parallel_group: Any = None,
) -> nn.Module:
    """Moves the model's parameters to the tiers of `config`, in place, and returns the model.

    Afterwards the model is used as before: forward, backward, `eval()`, `generate()`. A module
    shows its parameters only while it runs. At other times it shows handles, which have the shape
    and dtype of the parameters and no bytes.

    Attach adapters, freeze parameters and tie weights before the call. With several ranks, build
    the same model with the same weights on every rank and call `optimizer.step()` equally often on
    every rank; see docs/RANKS.md. `infinity.close(model)` releases memory and swap files.

    model: any module. Its parameters have values, or are on meta (`infinity.init_empty_weights`)
    config: the path of a configuration file, a dict, a SwapConfig, or None for the defaults
    weights: a directory of safetensors in Hugging Face layout, read tensor by tensor; or a function
        from a parameter's name to its value, called once for every parameter
    seed: initialises parameters on meta if `weights` is None, and the parameters of a head that
        `weights` lacks because it was saved from a class without that head. The names are logged.
        Any other parameter that `weights` lacks raises ConfigError
    ignore: name patterns (fnmatch) of tensors in `weights` that are skipped although the model has
        no parameter for them. Other such tensors raise ConfigError: they may be quantisation scales
    units: "auto", or class names or name patterns of the modules that move as one unit
    device: a device adapter instead of the configured one (infinity.testing.SimulatedDevice)
    resume: the checkpoint, or the directory of checkpoints, that is passed to
        `infinity.checkpoint.load` next. The engine continues in the swap files that the checkpoint
        links to, if it can, and copies them otherwise. Without `weights`, frozen weights that the
        checkpoint refers to are found where they were
    group: the data-parallel ranks that share the state: a process group, or a slice of a device
        mesh (`mesh["dp"]`). None means all ranks of torch.distributed, if it is initialized
    model_parallel_group: ranks that compute every layer together from the same inputs, such as
        `mesh["tp"]`. Each rank keeps a part of the layer inputs that `infinity.forward_backward`
        saves

    Raises ConfigError, CapacityError, StorageError or UnsupportedError before anything changes.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"expected a torch.nn.Module to offload, got {type(model).__name__}; put several "
            "models in an nn.ModuleList, or offload each with its own swap directory"
        )
    resolved = SwapConfig.load(config)
    plan = _load_plan(model, weights, resume, ignore)
    place, adopted = calling_place(), None
    if resume is not None:
        group, adopted = _plan_adoption(resolved, resume, group)
    if group is None and not dist.is_initialized():  # Every rank has its own swap directory.
        free_swap_directories(resolved.tiers.nvme, place)
    build(
        model, resolved, weights=plan, seed=seed, units=units, device=device, group=group,
        model_parallel_group=model_parallel_group, adopted=adopted,
    )  # fmt: skip
    remember(engine_of(model), place)
    return model


def _plan_adoption(
    config: SwapConfig, resume: str | os.PathLike[str], group: Any
) -> tuple[Any, Adopted | None]:
    """Returns the group, connected where it has several ranks, and `plan_adoption` of it."""
    ranks = find_group(group, timeout_s=config.distributed.timeout_s)
    try:
        return ranks or group, plan_adoption(config, resume, ranks)
    except BaseException:
        if ranks is not None:
            ranks.links.close()
        raise


def _load_plan(
    model: nn.Module,
    weights: str | os.PathLike[str] | Callable[[str], torch.Tensor] | None,
    resume: str | os.PathLike[str] | None,
    ignore: Sequence[str],
) -> LoadPlan | None:
    """Plans the reads of `weights`, or of the base of the checkpoint to resume; checks headers."""
    if callable(weights):
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        return _FunctionLoadPlan(weights, dtypes)
    if weights is None and resume is not None:
        weights = directory_of_base(find_checkpoint(Path(resume)))
    if weights is None:
        return None
    return weight_source(weights).plan(model, ignore=ignore)


@dataclass(frozen=True, slots=True)
class _FunctionLoadPlan(LoadPlan):
    """A LoadPlan that calls the caller's function for every parameter."""

    value_of: Callable[[str], torch.Tensor]
    dtypes: dict[str, torch.dtype]
    identities: Sequence[ShardIdentity] = ()

    def stored(self) -> Mapping[str, StoredTensor]:
        return {}

    @override
    def load(
        self,
        write: Callable[[str, torch.Tensor], None],
        tile_rows: TileRows | None = None,
        in_place: Set[str] = frozenset(),
    ) -> None:
        for name, dtype in self.dtypes.items():
            value = self.value_of(name)
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"expected weights({name!r}) to return a tensor, got {type(value).__name__}; "
                    "the function is called for every parameter of the model"
                )
            refuse_codes("weights", name, dtype, [("the value", value.dtype)])
            write(name, value)


def factored_experts(model: nn.Module) -> nn.Module:
    """Makes PEFT's adapters on packed experts compute `W x + s B (A x)`; returns the model.

    `infinity.offload` does the same to a model with `LoraConfig(target_parameters=...)`. Call this
    function on a model that stays in memory to get the bits of the offloaded one. PEFT itself
    computes `(W + s B A) x`: it builds the sum for all experts of a layer, and a gradient as large.
    The two differ by rounding (`modules/tiling/expert_adapters.py`). Names, shapes and files of
    the adapter are PEFT's. A model without such adapters does not change.
    """
    factor_adapters(model)
    return model


def forward_backward(
    model: nn.Module, loss_fn: Callable[[Any], torch.Tensor], micro_batches: Iterable[Any]
) -> list[torch.Tensor]:
    """Runs forward and backward of several micro-batches, block by block, and returns the losses.

    The effect is that of `for batch in micro_batches: loss_fn(batch).backward()`. Each block is
    fetched once for its forward and once for its backward, for any number of micro-batches. Between
    forward and backward the inputs of the blocks rest on the tier that `[placement] activations`
    names. The backward repeats the forward of a block, so activations take the memory of one block
    and one micro-batch (`schedule.tile_micro_batches` micro-batches in a block with tiles).

    loss_fn: returns a scalar loss. For a mean over the micro-batches it divides the loss by their
        number. It may call the model several times, one call after the other: each call is one more
        fetch of every block, for all micro-batches together. Calls that do not need each other's
        results share the fetches of one call (`infinity.beside`)
    micro_batches: the arguments of `loss_fn`; all of them are kept until the end

    Buffers, attributes and generators of blocks end as in the loop. The outputs of repeated
    forwards are compared with those of the first ones.

    Returns the losses, detached, in the order of the micro-batches.

    In fp32 without dropout the gradients have the bits of the plain loop with `use_cache=False`:
    blocks cache no keys and values here, and some architectures (mT5, NLLB-MoE) round differently
    with a cache. Two sums have another order: the gradient of a parameter with several uses in one
    micro-batch (tied weights, shared blocks), and that of a block which some micro-batches skip.
    With several ranks, each rank sums its micro-batches first and sends every gradient once.

    Raises UnsupportedError for a model whose blocks cannot be repeated: blocks that fill a cache of
    keys and values, change arguments in place, pass tensors on by other means than outputs, or are
    no functions of their arguments and their own state; for forward hooks of a program; and for a
    model that is called in a backward (docs/LIMITS.md). Router logits that transformers records for
    an auxiliary loss are outputs in this sense.

    Micro-batches run in threads. glibc gives each thread a heap that keeps its freed memory, so set
    MALLOC_ARENA_MAX=1 in the environment of a program; `infinity train` sets it.
    """
    return engine_of(model).sweep([partial(_loss, loss_fn, batch) for batch in micro_batches])[0]


def forward(model: nn.Module, function: Callable[[Any], T], batches: Iterable[Any]) -> list[T]:
    """Runs `function(batch)` for several batches without gradients, block by block.

    The effect is that of `with torch.no_grad(): [function(batch) for batch in batches]`, and the
    results have the bits of that loop. Each block is fetched once for all batches: an evaluation,
    or the scoring of many texts, reads every weight once. Between two blocks the hidden states of
    all batches are in the memory of the device.

    function: calls the model, once or several times, and returns any object. Keep what is needed of
        the logits only: those of one batch exist at a time
    batches: the arguments of `function`; all of them are kept until the end

    Returns the results in the order of the batches. Raises UnsupportedError as `forward_backward`
    does.
    """
    return engine_of(model).sweep([], [partial(function, batch) for batch in batches])[1]


def together(model: nn.Module, loops: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Runs several training loops over one model, each with an adapter of its own; returns their
    results.

        model.add_adapter("other", LoraConfig(...))  # Beside "default", before infinity.offload.
        infinity.together(model, {"default": train_default, "other": train_other})

    A loop is any function that trains its adapter: batches, optimizer, clipping and schedule are
    its own. It runs until it calls `infinity.forward_backward` or `infinity.forward`. When every
    loop has come that far, or has ended, the calls of all pass the blocks together, so the base is
    read as often as for one loop. Losses, gradients and weights have the bits of each loop run
    alone with the same seed. Loops may have any number of steps. Call `forward_backward` once a
    step: a pass that a loop makes by itself (`model(...)`) reads the base for this loop alone.

    loops: by the name of the adapter that is active in the loop. Only these adapters are trained;
        PEFT's `set_adapter` is not called, because it freezes all other adapters.
        `model.zero_grad()` drops the gradients of the loop's own

    Each loop begins with the caller's generators of random numbers, which are as before in the
    end. Loops run in threads, one at a time and in their order. An error in one ends all.

    Raises ConfigError, before a loop begins, for a name that is no adapter and for a trained
    parameter of no loop.
    """
    return engine_of(model).together(loops)


def beside(model: nn.Module, call: Callable[[], T]) -> Callable[[], T]:
    """Starts a call of the model that shares the fetches of the next call; returns its result.

    For losses that need a second call of the same model, such as that of a reference whose adapters
    are disabled:

        def loss_fn(batch):
            reference = infinity.beside(model, lambda: log_probs_without_adapters(model, batch))
            log_probs = log_probs_of(model(**batch), batch)
            return dpo_loss(log_probs, reference())

    Inside `infinity.forward_backward` the call runs in a fiber of its own: it and the rest of the
    loss pass each block together, so the block is fetched once for both. The returned function
    waits for the result. Elsewhere the call runs at once. `model.train()`, `model.eval()`, and
    PEFT's active and disabled adapters are those of the call, also while the other call runs.

    call: draws its own random numbers, as each micro-batch does. Its gradients, if it has any, are
        added in another order than in plain accumulation

    Raises InfinityError inside a block of the model.
    """
    return engine_of(model).beside(call)


def _loss(loss_fn: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
    loss = loss_fn(batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = (
            f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        )
        raise ConfigError(
            f"expected loss_fn(batch) to return the loss, a scalar tensor, got {got}; "
            "return outputs.loss, or a mean"
        )
    return loss


@contextmanager
def gather(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, modify: bool = False
) -> Iterator[None]:
    """Fetches the parameters of a module, or the given parameters, for the time of a `with` block.

    Inside the block the parameters can be read, and `.grad` is the gradient so far, or None. A
    change of `.grad` is kept. With `modify=True` changes of parameters are kept and the fp32
    masters follow. With `modify=False` a changed parameter raises a warning, the change is kept,
    and its master is rounded to the changed weights. Blocks may be nested.

    The parameters must fit the host and device budgets together. Tensors made from parameters
    inside the block are not valid after it; clone them to keep them.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if isinstance(tensors, nn.Module):
        engine = engine_of(tensors)
    else:
        tensors = list(tensors)
        owners = {owner_of(tensor) for tensor in tensors}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None:
            raise ConfigError("gather expects parameters of one offloaded model")
        engine = owner
    with engine.gather(engine.params_of(tensors), modify=modify):
        yield


def describe(model: nn.Module) -> Residence:
    """Says where the state of an offloaded model rests, and what of it is in memory now.

    The result prints as a table, and a notebook shows it as one; its fields are bytes and counts of
    this rank. Nothing moves. Raises InfinityError if the model is not offloaded.
    """
    return residence_of(engine_of(model))


def shrink(model: nn.Module) -> int | None:
    """Gives device memory back, and keeps fewer weights there for the rest of the run.

    For a batch that has met `torch.OutOfMemoryError`: call `zero_grad()` and this, and try again.
    Weights that are not in use leave the device, and the window for weights becomes what modules
    need at once. No result changes. Returns the bytes of the window; None if the device is the
    host. A fetch of weights that finds no memory does the same.
    """
    return engine_of(model).shrink()


def close(model: nn.Module) -> None:
    """Ends the engine of a model: waits for transfers, releases memory and the swap directory.

    The values of the parameters are gone afterwards, so export the model or save a checkpoint
    first. Raises InfinityError if the model is not offloaded, or closed already.
    """
    engine_of(model).close()
