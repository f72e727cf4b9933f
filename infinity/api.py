"""The public functions: what `import infinity` offers, put together from the layers below."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.config import SwapConfig
from infinity.engine.build import LoadPlan, OwnDevice, TileRows, build
from infinity.engine.engine import Engine
from infinity.engine.meta_init import init_empty_weights
from infinity.engine.optimizers import SGD, Adam, AdamW, Lion
from infinity.engine.registry import engine_of, owner_of
from infinity.engine.replace import calling_place, make_room, remember
from infinity.errors import ConfigError
from infinity.modules.discover import UnitRule

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Engine",
    "Lion",
    "engine_of",
    "forward_backward",
    "gather",
    "init_empty_weights",
    "offload",
]  # fmt: skip


def offload(
    model: nn.Module,
    config: Any = None,
    *,
    weights: str | os.PathLike[str] | Callable[[str], torch.Tensor] | None = None,
    seed: int = 0,
    ignore: Sequence[str] = (),
    units: UnitRule = "auto",
    device: OwnDevice | None = None,
    resume: str | os.PathLike[str] | None = None,
    group: Any = None,
    model_parallel_group: Any = None,
) -> nn.Module:
    """Moves the model's parameters to the tiers of `config`, in place, and returns the model.

    From then on the model is used as before: forward, backward, `eval()`, `generate()`. Parameters
    appear in a module only while it runs; elsewhere they are handles of true shape and dtype.

    model: any module; its parameters real, or on meta as `infinity.init_empty_weights` leaves them
    config: a swap-tier file's path, a dict, a SwapConfig, or None for the defaults
    weights: a directory of safetensors in Hugging Face layout, streamed in tensor by tensor; or a
        function from a parameter's name to its value, asked once for every parameter
    seed: initialises parameters that are on meta, where there is no `weights`, and a head that the
        model has and the class that `weights` was saved of has not (a classifier over a language
        model); the names are logged. Anything else that `weights` lacks is refused
    ignore: name patterns (fnmatch) of tensors in `weights` that the model has no place for and that
        are to be left out; others are refused, for they may be scales of quantised weights
    units: "auto", or class names or name patterns of the modules that move as one
    device: a device adapter of your own (infinity.testing.SimulatedDevice)
    resume: the checkpoint, or directory of them, that `infinity.checkpoint.load` is called with
        next; the swap files it links to are gone on with where that is possible, not copied
    group: the data-parallel ranks that state is divided over: a process group, or the slice of a
        device mesh, `mesh["dp"]`; None takes all ranks of torch.distributed, if it is initialized
    model_parallel_group: ranks that compute every layer together, from the same inputs, such as
        `mesh["tp"]`: each keeps a part of the layer inputs that `infinity.forward_backward` puts
        aside

    With several ranks, build the same model with the same weights on each of them and call
    `optimizer.step()` equally often; see docs/RANKS.md.

    Attach adapters, freeze parameters and tie weights before. Raises ConfigError, CapacityError,
    StorageError or UnsupportedError before anything was touched.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"expected a torch.nn.Module to offload, got {type(model).__name__}; put several "
            "models in an nn.ModuleList, or offload each with a swap directory of its own"
        )
    resolved = SwapConfig.load(config)
    plan: LoadPlan | None = None
    if callable(weights):
        plan = _Asked(weights, {name: p.dtype for name, p in model.named_parameters()})
    elif weights is not None:
        from infinity.checkpoint import weight_source

        plan = weight_source(weights).plan(model, ignore=ignore)
    adopted = None
    if resume is not None:
        from infinity.checkpoint.run.adopt import plan_adoption

        adopted = plan_adoption(resolved, resume, group)
    place = calling_place()
    if group is None and not dist.is_initialized():  # Ranks have a directory of their own each.
        make_room(resolved, place)
    build(
        model, resolved, weights=plan, seed=seed, units=units, device=device, group=group,
        model_parallel_group=model_parallel_group, adopted=adopted,
    )  # fmt: skip
    remember(engine_of(model), place)
    return model


@dataclass(frozen=True, slots=True)
class _Asked:
    """A LoadPlan over a function of the caller's."""

    value_of: Callable[[str], torch.Tensor]
    dtypes: dict[str, torch.dtype]

    def load(
        self, write: Callable[[str, torch.Tensor], None], tile_rows: TileRows | None = None
    ) -> None:
        from infinity.checkpoint.huggingface.import_checks import refuse_codes

        for name, dtype in self.dtypes.items():
            value = self.value_of(name)
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"expected weights({name!r}) to give a tensor, got {type(value).__name__}; it "
                    "is asked for every parameter of the model"
                )
            refuse_codes("weights", name, dtype, [("the value", value.dtype)])
            write(name, value)


def forward_backward(
    model: nn.Module,
    loss_of: Callable[[Any], torch.Tensor],
    micro_batches: Iterable[Any],
) -> list[torch.Tensor]:
    """Forward and backward of several micro-batches, all of them through one block before the next.

    Does what `for batch in micro_batches: loss_of(batch).backward()` does, and fetches each block
    once for its forward and once for its backward, however many micro-batches there are. Between
    the two the inputs of the blocks wait where `[placement] activations` says; the forward of a
    block is repeated in its backward, so memory for activations is that of one block and one
    micro-batch, or `schedule.tile_micro_batches` of them where the block has tiles.

    loss_of: calls the model, once, and returns a scalar loss, already divided by the number of
        micro-batches if their mean is wanted
    micro_batches: what `loss_of` takes, one after the other; all are kept until the end

    Returns the losses, detached, in order. The gradients are those of the plain loop, bit for bit
    in fp32 without dropout, if that calls the model with `use_cache=False`: nothing caches keys and
    values here, and some architectures (mT5, NLLB-MoE) round otherwise with a cache. Those of a
    parameter with several uses in one micro-batch (tied weights, shared blocks), or of a block that
    some micro-batches leave out, are summed in another order. With several ranks each sums its
    micro-batches first and sends a gradient once.
    Raises UnsupportedError for a model whose blocks cannot be repeated: caches of keys and values,
    arguments changed in place, tensors that leave a block otherwise than by its outputs.

    Micro-batches run in threads, and glibc gives each thread a heap that keeps what it once needed:
    a program of your own wants MALLOC_ARENA_MAX=1 in its environment; `infinity train` sees to it.
    """
    engine = engine_of(model)
    return engine.forward_backward([partial(_loss, loss_of, batch) for batch in micro_batches])


def _loss(loss_of: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
    loss = loss_of(batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = (
            f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        )
        raise ConfigError(
            f"expected loss_of(batch) to return a scalar tensor, the loss, got {got}; "
            "return outputs.loss, or a mean"
        )
    return loss


@contextmanager
def gather(
    what: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, modify: bool = False
) -> Iterator[None]:
    """Within, the parameters of a module (or given parameters) are real and may be read.

    `.grad` of each is its gradient so far, or None; a change of it is kept. With `modify` true,
    changes of parameters are kept: the fp32 master follows. Without, they are kept with a warning,
    and a master is rounded to them. May be nested. Parameters must fit the host and device budgets
    together. Tensors taken from parameters inside are not valid after; clone what is to be kept.
    """
    tensors = [what] if isinstance(what, torch.Tensor) else what
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
