"""The tables of the engine: `[io]`, `[schedule]`, `[distributed]`, `[precision]`, `[optimizer]`."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from infinity.config.schema import Section, one_or_more
from infinity.config.values import (
    Flag,
    auto_or,
    choice,
    fault,
    integer,
    number,
    or_off,
    refuse,
    refuse_all,
    size,
    some_text,
)
from infinity.sizes import GIB, KIB, MIB, PAGE_NBYTES

ComputeDtype = Literal["auto", "float32", "bfloat16"]
MomentFormat = Literal["float32", "8bit"]
UpdatesMode = Literal["auto", "both_passes", "deferred", "at_step"]
UpdateOn = Literal["auto", "host", "device"]
ExpertProducts = Literal["auto", "grouped", "exact"]
RankBudgets = Literal["node", "rank"]
ReduceDtype = Literal["auto", "bfloat16"]
RankExchange = Literal["auto", "collective", "one_sided"]
ShardOver = Literal["all", "node"]
IoEngineName = Literal["auto", "io_uring", "threads"]
_TUNED_BEFORE = {"rings", "flags"}  # Earlier releases of `infinity tune` wrote them.

_log = logging.getLogger("infinity")


class Io(Section):
    """Requests to the drives."""

    engine: Annotated[IoEngineName, choice(IoEngineName)] = "auto"
    """ "auto" takes io_uring, or threads with a warning if io_uring is forbidden. The environment
    variable INFINITY_IO_ENGINE decides an "auto"."""
    block_size: Annotated[int, size(minimum=64 * KIB, maximum=GIB, multiple=PAGE_NBYTES)] = 4 * MIB
    """Largest single request to a drive."""
    queue_depth: Annotated[Literal["auto"] | int, auto_or(integer(1, 1024))] = "auto"
    """Requests of `block_size` in flight on one drive. "auto" finds the number while the drive
    works, with 8 to 32 MiB in flight; an urgent read waits behind them."""
    threads: Annotated[int, integer(1, 1024)] = 4
    """Workers of the thread engine."""
    stripe: Annotated[int, size(minimum=PAGE_NBYTES, multiple=PAGE_NBYTES)] = 4 * MIB
    """Consecutive bytes on one path."""
    verify: Flag = True
    """Keep a CRC32C of every written page and compare it when the page is read; a difference ends
    training with an error that names the place. This costs 1 MiB of memory per GiB on the drives,
    and processor time."""

    @model_validator(mode="before")
    @classmethod
    def _without_rings(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.keys() & _TUNED_BEFORE:
            _log.info("io.rings and io.flags are ignored: each drive has one ring")
            return {key: of_key for key, of_key in value.items() if key not in _TUNED_BEFORE}
        return value


class Schedule(Section):
    """The order in which bytes move. Only `micro_batch`, `tile` and `experts` may change a
    result."""

    prefetch: Flag = True
    """Fetch parameters ahead of their use."""
    window: Annotated[Literal["auto"] | int, auto_or(size())] = "auto"
    """Host bytes that parameters fetched ahead may take."""
    updates: Annotated[UpdatesMode, choice(UpdatesMode)] = "auto"
    """When the work of `optimizer.step()` is done: "at_step" at once; "deferred" before the next
    use of each unit; "both_passes" in part in the backward, for which state on NVMe takes its space
    twice; "auto" as "both_passes" if the weights still fit, else as "deferred"."""
    update_on: Annotated[UpdateOn, choice(UpdateOn)] = "auto"
    """The processor that computes the update: the "host", or the "device", to which state travels
    unless it rests there. "auto" measures both and takes the device if it is clearly faster.
    Moments of 8 bits are updated on the host."""
    micro_batch: Annotated[int, integer(1)] | None = None
    """Sequences of one micro-batch. All micro-batches of a batch of `[train]` pass one block before
    the next one, so a block is fetched twice a step, and its forward is repeated in the backward.
    In stages 2 and 3 the host budget then reserves memory for sums of gradients."""
    tile: Annotated[Literal["auto"] | int | None, auto_or(or_off(size(minimum=64 * KIB)))] = "auto"
    """Largest tile, in bytes. Linear layers and embeddings with a larger weight, and packed experts
    that are larger together, run as tiles (of at least one expert), fetched one after the other.
    "auto" makes tiles only if the model does not fit otherwise, or if a device cannot decode the
    next layer's experts meanwhile. Results agree to rounding."""
    tile_micro_batches: Annotated[int, integer(1)] = 4
    """Micro-batches of `infinity.forward_backward` that pass a block with tiles of linear layers
    together: one fetch of a tile serves them, and memory holds the block's activations for all of
    them."""
    experts: Annotated[ExpertProducts, choice(ExpertProducts)] = "auto"
    """How a tile of experts computes. "exact" runs the forward of the experts' class, one
    micro-batch after the other, with the bits of `experts_implementation="eager"`. "grouped" is one
    product for all experts of a tile, where possible for all micro-batches; its rows have the bits
    of transformers' `grouped_mm`. It makes one tile of experts that `tile` does not cut. "auto" is
    "grouped" on a GPU for models that use `grouped_mm` (the default of transformers), else
    "exact"."""
    update_chunk: Annotated[int, size(minimum=2 * PAGE_NBYTES, multiple=2 * PAGE_NBYTES)] = 16 * MIB
    """Bytes of each kind of state in one chunk of the optimizer's update; four times as many if no
    state travels."""


class Distributed(Section):
    """Sharding over the ranks of torch.distributed. Has no effect with one rank."""

    zero_stage: Annotated[int, integer(1, 3)] = 3
    """The sharded state, as in ZeRO: 1 that of the optimizer, 2 gradients too, 3 parameters too."""
    budgets: Annotated[RankBudgets, choice(RankBudgets)] = "node"
    """ "node" divides the capacities of host and nvme evenly among the ranks of a node; "rank"
    gives each rank all of them. The capacity of the device is always per rank."""
    reduce_dtype: Annotated[ReduceDtype, choice(ReduceDtype)] = "auto"
    """Dtype in which gradients are sent. "auto": their own dtype, and float32 for sums of several.
    "bfloat16" rounds them, and halves the bytes of float32 gradients. The sum is always computed in
    float32."""
    exchange: Annotated[RankExchange, choice(RankExchange)] = "auto"
    """How weights (stage 3) and gradients (stages 2 and 3) move between ranks: "collective" between
    the devices, "one_sided" by request between the hosts. "auto": "collective" between CUDA
    devices. The bits are the same."""
    shard_over: Annotated[ShardOver, choice(ShardOver)] = "all"
    """The ranks that divide frozen weights in stage 3: "all" ranks, or those of each "node", which
    then reads all frozen weights and sends none over the network. Nodes must have equally many
    ranks. The bits are the same."""
    timeout_s: Annotated[int, integer(1)] = 600
    """Seconds that a rank waits, until the model is offloaded, for a living rank that does not
    come. In training that wait has no limit. A rank that dies is named within seconds, one that
    hangs after this time, at least 5 and at most 20 seconds."""
    reduce_buffer: Annotated[Literal["auto"] | int, auto_or(size())] = "auto"
    """Host bytes of a rank's budget for gradients of other ranks that wait to be summed. When the
    buffer is full, gradients wait on nvme if state rests there; otherwise their sender waits.
    "auto" takes up to an eighth of the budget."""


class Precision(Section):
    """Number formats. Master weights and accumulated gradients are always float32."""

    compute: Annotated[ComputeDtype, choice(ComputeDtype)] = "auto"
    """Dtype of weights and arithmetic. "auto" is the dtype in the config.json of `model.path`, and
    float32 for a model in float16; `infinity.offload` keeps the dtypes of
    its model. "bfloat16" narrows a float32 model as transformers does; a model of mixed dtypes
    keeps them."""
    moments: Annotated[MomentFormat, choice(MomentFormat)] = "float32"
    """Format of the optimizer's moments. "8bit" is approximate (docs/formats/moments_8bit.md) and
    saves 6 bytes per parameter in each direction of a step."""

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype of float32 parameters while training: float32, unless `compute` is bfloat16."""
        return "bfloat16" if self.compute == "bfloat16" else "float32"


OptimizerName = Literal["adamw", "adam", "sgd", "lion"]

_BETA = number(minimum=0, below=1)
_Name = Annotated[str, some_text("a name or a pattern")]


def _pair(betas: Any) -> Any:
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise refuse("two numbers, such as [0.9, 0.999]", betas)
    return betas


_ADAM_KEYS = ("betas", "eps")
_SGD_KEYS = ("momentum", "dampening", "nesterov")
# Keys that not every optimizer has, with their defaults.
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "adamw": _ADAM_KEYS, "adam": _ADAM_KEYS, "sgd": _SGD_KEYS, "lion": ("betas",)
}  # fmt: skip
_DERIVED: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.01},
    "adam": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "sgd": {"weight_decay": 0.0},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}


class Optimizer(Section):
    """The optimizer of `infinity train`.

    In a loop of your own, `name` and `momentum` decide the state that a model reserves: that of the
    `infinity.AdamW`, `Adam`, `SGD` or `Lion` that will train it.
    """

    name: Annotated[OptimizerName, choice(OptimizerName)] = "adamw"
    """The update rule. It decides which moments are kept per trainable parameter: two for "adamw"
    and "adam", one for "lion", one for "sgd" with `momentum`, none for "sgd" without."""
    lr: Annotated[float, number(minimum=0)] = 1e-4
    """Peak learning rate."""
    betas: Annotated[
        tuple[Annotated[float, _BETA], Annotated[float, _BETA]], BeforeValidator(_pair)
    ] = Field(
        (0.9, 0.999), json_schema_extra={"x-default": "`[0.9, 0.999]`, for lion `[0.9, 0.99]`"}
    )
    """Decay of the first and second moment; of Lion the weight of its momentum in the step, and the
    momentum's decay. Not of sgd."""
    eps: Annotated[float, number(minimum=0)] = 1e-8
    """Added to the denominator of the update. Of adamw and adam only."""
    momentum: Annotated[float, number(minimum=0)] = 0.0
    """Decay of the momentum; 0 keeps none. Of sgd only, as the next two."""
    dampening: Annotated[float, number()] = 0.0
    """Part of a gradient that the momentum does not take."""
    nesterov: Flag = False
    """Nesterov's momentum; without dampening."""
    weight_decay: Annotated[float, number(minimum=0)] = Field(
        0.01, json_schema_extra={"x-default": "`0.01`, for others than adamw `0.0`"}
    )
    """Weight decay of the parameters that `no_decay` leaves: decoupled in adamw and lion, added to
    the gradient in adam and sgd."""
    max_grad_norm: Annotated[float | None, or_off(number(above=0))] = 1.0
    """Clip the global norm of the gradients to this."""
    no_decay: Annotated[
        tuple[_Name, ...],
        one_or_more(_Name),
    ] = ("bias", "norm")
    """Parameters without weight decay, by name, upper and lower case alike: a pattern with *, ? or
    [ matches the full name, any other text matches anywhere in it."""

    @model_validator(mode="after")
    def _keys_of_the_rule(self) -> Optimizer:
        """Refuses keys of other rules; fills in what the rule takes where the file is silent."""
        named, own = self.model_fields_set, _OWN_KEYS[self.name]
        fields = type(self).model_fields
        foreign = [
            key
            for key in (*_ADAM_KEYS, *_SGD_KEYS)
            if key not in own and getattr(self, key) != fields[key].default
        ]
        text = f'optimizer.name = "{self.name}" has no such setting; leave it out'
        faults = [fault(text, key) for key in foreign]
        if self.nesterov and not foreign and (not self.momentum or self.dampening):
            text = "expected false, or a momentum above 0 and a dampening of 0; got true"
            faults.append(fault(text, "nesterov"))
        refuse_all(faults)
        for key, value in _DERIVED[self.name].items():
            if key not in named:
                self.__dict__[key] = value
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that this rule's numbers depend on."""
        foreign = {*_ADAM_KEYS, *_SGD_KEYS} - set(_OWN_KEYS[self.name])
        return tuple(key for key in type(self).model_fields if key not in foreign)

    @property
    def num_moments(self) -> int:
        """The number of moments of a trainable parameter."""
        if self.name == "sgd":
            return 1 if self.momentum else 0
        return 1 if self.name == "lion" else 2

    def has_decay(self, parameter_name: str) -> bool:
        """Whether weight decay applies to the parameter of this name."""
        name = parameter_name.lower()
        for pattern in map(str.lower, self.no_decay):
            is_glob = any(sign in pattern for sign in "*?[")
            if fnmatch.fnmatchcase(name, pattern) if is_glob else pattern in name:
                return False
        return True
