"""The sections of the swap-tier file: every key, its kind of value, its default and its meaning.

All are frozen. Sizes are bytes, paths are absolute once read, an unknown key is an error. What
concerns more than one section is in `infinity.config.swap`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from infinity.config.values import (
    AutoOr,
    Budget,
    Capacity,
    Choice,
    FileName,
    Flag,
    Integer,
    Location,
    Number,
    OrOff,
    Size,
    Text,
    conflict,
    fault,
    nearest,
    refuse,
    refuse_all,
    show_value,
)
from infinity.sizes import GIB, KIB, MIB, PAGE_NBYTES

SCHEMA = 1
PYTHON_STDLIB = "python-stdlib"
# The part of the free memory that "auto" takes, on the host and on a device. The rest is for what
# the engine does not allocate: activations, gradients of autograd, the program's own tensors.
_AUTO_PERCENT = 50.0
_SEED = Integer(maximum=2**63 - 1)

TierName = Literal["device", "host", "nvme"]
DeviceKind = Literal["auto", "cpu", "cuda"]
DirectIo = Literal["auto", "always", "never"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
MomentFormat = Literal["float32", "8bit"]
UpdatesMode = Literal["deferred", "at_step"]
UpdateOn = Literal["auto", "host", "device"]
RankBudgets = Literal["node", "rank"]
ReduceDtype = Literal["auto", "bfloat16"]
RankExchange = Literal["auto", "collective", "one_sided"]
OptimizerName = Literal["adamw", "adam", "sgd", "lion"]
Nonfinite = Literal["error", "skip"]
LrSchedule = Literal["constant", "linear", "cosine"]
IoEngineName = Literal["auto", "io_uring", "threads"]
RingFlagsName = Literal["auto", "defer_taskrun", "coop_taskrun", "none"]
Durability = Literal["none", "checkpoint", "step"]


class Section(BaseModel):
    """One table of the swap-tier file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"
    )


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, os.PathLike)) else value


def _distinct(tiers: tuple[str, ...]) -> tuple[str, ...]:
    if not tiers or len(set(tiers)) < len(tiers):
        raise refuse("a list of tiers, not empty, each named once", tiers)
    return tiers


_Tier = Annotated[TierName, Choice(TierName)]
TierList = Annotated[
    tuple[_Tier, ...],
    BeforeValidator(_one_as_list, json_schema_input_type=tuple[_Tier, ...] | _Tier),
    AfterValidator(_distinct),
]


def defaults() -> Any:
    """A section that may be left out: read from an empty table, so that its own rules apply."""
    return Field(default_factory=dict, validate_default=True)


def null_as_empty(value: Any, *, is_list: bool = False) -> Any:
    """A section of YAML whose every key is commented out is null; it means the defaults."""
    return ([] if is_list else {}) if value is None else value


class DeviceTier(Section):
    """The memory that computes."""

    kind: Annotated[DeviceKind, Choice(DeviceKind)] = Field(
        "auto", description='Where the model computes. "auto" takes CUDA where there is one.'
    )
    capacity: Annotated[Capacity, Budget()] = Field(
        Capacity(),
        description="Device memory for resident parameters, the fetch window and state placed on "
        "the device. A share is of the device memory that is free when the model is "
        'offloaded; "auto" takes half of that. On cpu the capacity bounds only the state placed on '
        'the device; "auto" means no bound there.',
    )

    def budget_nbytes(self, free_nbytes: int) -> int:
        """Returns the budget on a device with memory of its own, `free_nbytes` of it free."""
        return self.capacity.resolve(free_nbytes, auto_percent=_AUTO_PERCENT)


class HostTier(Section):
    """Host memory: one arena, preallocated to its budget, pinned where the device is CUDA."""

    capacity: Annotated[Capacity, Budget()] = Field(
        Capacity(),
        description="Bytes of the arena. A share is of the memory available when the run starts "
        '(inside a container: under its limit). "auto" takes half of that.',
    )
    huge_pages: Annotated[bool, Flag()] = Field(
        True, description="Back the arena with huge pages where the kernel has them."
    )

    def budget_nbytes(self, available_nbytes: int) -> int:
        """Returns the bytes of the arena on a machine with `available_nbytes` of free memory."""
        return self.capacity.resolve(available_nbytes, auto_percent=_AUTO_PERCENT)


class NvmeTier(Section):
    """One directory on a drive. Several are striped."""

    path: Annotated[Path, Location()] = Field(
        description="Directory for swap files. Its parent must exist; the directory is made."
    )
    capacity: Annotated[Capacity, Budget()] = Field(
        Capacity(),
        description="Most bytes that swap files may take here. A share is of the free space "
        'of the file system; "auto" is the free space less a reserve.',
    )
    direct: Annotated[DirectIo, Choice(DirectIo)] = Field(
        "auto",
        description='Direct I/O, past the page cache. "auto" falls back to buffered I/O with a '
        'warning where the file system refuses it; "always" makes that an error.',
    )
    weight: Annotated[Literal["auto"] | float, AutoOr(Number(above=0))] = Field(
        "auto",
        description="Share of the stripes on this path: its bandwidth in GB/s, or a number "
        'proportional to it if every path has one. "auto" measures the bandwidth if there are '
        "several paths.",
    )
    read_gb_per_s: Annotated[float | None, OrOff(Number(above=0))] = Field(
        None,
        description="Bandwidth of reading in decimal GB/s, as `infinity tune` found it. 0: not "
        "measured.",
    )
    write_gb_per_s: Annotated[float | None, OrOff(Number(above=0))] = Field(
        None, description="Bandwidth of writing, likewise."
    )
    mixed_gb_per_s: Annotated[float | None, OrOff(Number(above=0))] = Field(
        None, description="Bandwidth of reading and writing at once, in sum, likewise."
    )


class Tiers(Section):
    """The places that training state may live in."""

    device: DeviceTier = defaults()
    host: HostTier = defaults()
    nvme: tuple[NvmeTier, ...] = Field((), description="One entry per mounted drive.")

    @field_validator("device", "host", "nvme", mode="before")
    @classmethod
    def _empty(cls, value: Any, info: ValidationInfo) -> Any:
        return null_as_empty(value, is_list=info.field_name == "nvme")

    @field_validator("nvme")
    @classmethod
    def _each_path_once(cls, entries: tuple[NvmeTier, ...]) -> tuple[NvmeTier, ...]:
        seen: dict[str, int] = {}
        faults = []
        for index, entry in enumerate(entries):
            first = seen.setdefault(os.path.realpath(entry.path), index)
            if first != index:
                text = f"the same directory as tiers.nvme[{first}].path; give each drive one entry"
                faults.append(fault(text, index, "path"))
        refuse_all(faults)
        return entries


_NVME_DEFAULT: dict[str, Any] = {"x-default": '`["nvme"]` with an nvme tier, else `["host"]`'}


class Placement(Section):
    """The tiers of each kind of training state.

    Each key is one tier or a list of tiers, filled in that order: a kind that does not fit the
    first tier continues in the next.
    """

    parameters: TierList = Field(
        ("host",),
        description="The weights that forward and backward read.",
        json_schema_extra=_NVME_DEFAULT,
    )
    master: TierList = Field(
        ("host",),
        description="The fp32 weights that the optimizer updates.",
        json_schema_extra=_NVME_DEFAULT,
    )
    moments: TierList = Field(
        ("host",),
        description="The optimizer's first and second moments.",
        json_schema_extra=_NVME_DEFAULT,
    )
    gradients: TierList = Field(("host",), description="Accumulated gradients.")
    activations: TierList = Field(
        ("device",),
        description="Layer inputs that wait for the backward of `schedule.micro_batch`. "
        "Without a GPU, host and device are the same memory, and these inputs are outside the "
        "host budget.",
    )


class Io(Section):
    """Requests to the drives."""

    engine: Annotated[IoEngineName, Choice(IoEngineName)] = Field(
        "auto",
        description='"auto" takes io_uring, or threads with a warning if io_uring is '
        'forbidden. The environment variable INFINITY_IO_ENGINE decides an "auto".',
    )
    block_size: Annotated[int, Size(minimum=64 * KIB, maximum=GIB, multiple=PAGE_NBYTES)] = Field(
        4 * MIB, description="Largest single request to a drive."
    )
    queue_depth: Annotated[int, Integer(1, 1024)] = Field(
        2, description="Requests in flight on one path. More adds latency, seldom bandwidth."
    )
    rings: Annotated[int, Integer(1, 16)] = Field(
        1,
        description="For experts: io_uring instances per drive, each with a thread, that share its "
        "queue and depth. More than one pays only where one thread cannot feed the drive; each "
        "pins the arena once more against the memlock limit.",
    )
    flags: Annotated[RingFlagsName, Choice(RingFlagsName)] = Field(
        "auto",
        description='For experts: the flags of the rings. "auto" takes the first of the '
        "others, in this order, that the kernel grants. Flags that are named and refused are "
        "an error.",
    )
    threads: Annotated[int, Integer(1, 1024)] = Field(
        4, description="Workers of the thread engine."
    )
    stripe: Annotated[int, Size(minimum=PAGE_NBYTES, multiple=PAGE_NBYTES)] = Field(
        4 * MIB,
        description="Consecutive bytes on one path before the bytes continue on the next path.",
    )
    verify: Annotated[bool, Flag()] = Field(
        True,
        description="Keep a CRC32C of every page that is written, and compare it when the "
        "page is read. A page that has changed on the drive ends training with an error that "
        "names its place. The checksums cost 1 MiB of memory per GiB on the drives, and time "
        "to compute. Without them a changed page is trained on and saved unnoticed; only the "
        "contents of commits are still checked.",
    )


class Schedule(Section):
    """The order in which bytes move."""

    prefetch: Annotated[bool, Flag()] = Field(
        True, description="Fetch parameters ahead of their use. Never changes a result."
    )
    window: Annotated[Literal["auto"] | int, AutoOr(Size())] = Field(
        "auto", description="Host bytes that parameters fetched ahead may take."
    )
    updates: Annotated[UpdatesMode, Choice(UpdatesMode)] = Field(
        "deferred",
        description='When the work of `optimizer.step()` is done. "deferred" updates a unit '
        'right before its next use, overlapped with the forward; "at_step" updates all units '
        "at once. Never changes a result.",
    )
    update_on: Annotated[UpdateOn, Choice(UpdateOn)] = Field(
        "auto",
        description='Which processor computes the update: the "host", or the "device", to '
        'which state is streamed. "auto" measures both, and the link, for half a second when '
        "a model is offloaded to a device with memory of its own, and takes the device if it "
        "is clearly faster. Updates with 8-bit moments run on the host. Never changes a "
        "result.",
    )
    micro_batch: Annotated[int, Integer(1)] | None = Field(
        None,
        description="Sequences of one micro-batch. All micro-batches of a batch of `[train]` "
        "pass one block before the next block, so a block is fetched once per forward and "
        "once per backward, whatever the number of micro-batches; its forward is repeated in "
        "the backward. Over ranks, in stages 2 and 3, the host budget then reserves memory "
        "for the gradients that are summed.",
    )
    tile: Annotated[Literal["auto"] | int | None, AutoOr(OrOff(Size(minimum=64 * KIB)))] = Field(
        "auto",
        description="Largest tile, in bytes. A linear layer or an embedding with a larger "
        "weight, and packed experts that are larger together, run as tiles of at most this "
        "size (at least one expert), which are fetched and released one after the other. "
        '"auto" makes tiles only if the model does not fit otherwise; 0 makes none. Results '
        "agree to rounding: the gradient of a linear layer's input is summed over its tiles.",
    )
    tile_micro_batches: Annotated[int, Integer(1)] = Field(
        4,
        description="Micro-batches of `infinity.forward_backward` that pass a block with "
        "tiles together. One fetch of a tile serves all of them; the activations of that "
        "block are in memory for all of them. Never changes a result.",
    )
    update_chunk: Annotated[int, Size(minimum=2 * PAGE_NBYTES, multiple=2 * PAGE_NBYTES)] = Field(
        16 * MIB, description="Bytes of each kind of state in one chunk of the optimizer's update."
    )


class Distributed(Section):
    """Sharding over the ranks of torch.distributed. Has no effect with one rank."""

    zero_stage: Annotated[int, Integer(1, 3)] = Field(
        3,
        description="What is sharded, as in ZeRO: 1 the state of the optimizer, 2 gradients "
        "too, 3 parameters too.",
    )
    budgets: Annotated[RankBudgets, Choice(RankBudgets)] = Field(
        "node",
        description='Whether the capacities of host and nvme are per node or per rank: "node" '
        'divides them evenly among the ranks of a node, "rank" gives each rank all of them. '
        "The capacity of the device is always per rank.",
    )
    reduce_dtype: Annotated[ReduceDtype, Choice(ReduceDtype)] = Field(
        "auto",
        description='Dtype of gradients on the way to the rank that sums them. "auto": their '
        'own dtype, and float32 for sums of several. "bfloat16" rounds them before they are '
        "sent, which is approximate and halves the bytes of float32 gradients. The sum is "
        "always computed in float32.",
    )
    exchange: Annotated[RankExchange, Choice(RankExchange)] = Field(
        "auto",
        description="How weights (stage 3) and gradients (stages 2 and 3) move between ranks. "
        '"collective": between the devices, by a collective operation, if all ranks need the '
        'same unit, otherwise one by one. "one_sided": one by one, between the hosts. "auto": '
        '"collective" between CUDA devices. The bits are the same.',
    )
    reduce_buffer: Annotated[Literal["auto"] | int, AutoOr(Size())] = Field(
        "auto",
        description="Host bytes, out of the budget of a rank, for gradients of other ranks "
        "that wait to be summed. When the buffer is full, gradients wait on nvme if state "
        'rests there, otherwise their sender waits. "auto" takes up to an eighth of the '
        "budget.",
    )


class Precision(Section):
    """Number formats. Master weights and accumulated gradients are always float32."""

    compute: Annotated[ComputeDtype, Choice(ComputeDtype)] = Field(
        "auto",
        description='Dtype of weights and of arithmetic in forward and backward. "auto" is '
        "the dtype in the config.json of `model.path`, and float32 for a model in float16, "
        "which cannot be trained; `infinity.offload` keeps the dtypes of its model. "
        '"bfloat16" narrows a float32 model as transformers does; a model of mixed dtypes '
        "keeps them.",
    )
    moments: Annotated[MomentFormat, Choice(MomentFormat)] = Field(
        "float32",
        description='Format of the optimizer\'s moments. "8bit" is approximate: blocks of 256 '
        "elements share a scale, and a step reads and writes 6 bytes per parameter less. "
        "Chunks of the update are then whole MiB.",
    )

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype of float32 parameters while training: float32, unless `compute` is bfloat16."""
        return "bfloat16" if self.compute == "bfloat16" else "float32"


_BETA = Number(minimum=0, below=1)
_Name = Annotated[str, Text("a name or a pattern")]


def _pair(betas: Any) -> Any:
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise refuse("two numbers, such as [0.9, 0.999]", betas)
    return betas


_ADAM_KEYS = ("betas", "eps")
_SGD_KEYS = ("momentum", "dampening", "nesterov")
# Keys that not every optimizer has, and what it takes where the file is silent.
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
    """The optimizer of `infinity train`. For a loop of your own, `name` and `momentum` decide which
    state a model has room for: those of the `infinity.AdamW`, `Adam`, `SGD` or `Lion` it gets."""

    name: Annotated[OptimizerName, Choice(OptimizerName)] = Field(
        "adamw",
        description="The update rule. It decides which moments are kept per trainable "
        'parameter: two for "adamw" and "adam", one for "lion", one for "sgd" with '
        '`momentum`, none for "sgd" without.',
    )
    lr: Annotated[float, Number(minimum=0)] = Field(1e-4, description="Peak learning rate.")
    betas: Annotated[
        tuple[Annotated[float, _BETA], Annotated[float, _BETA]], BeforeValidator(_pair)
    ] = Field(
        (0.9, 0.999),
        description="Decay of the first and second moment; of Lion the weight of its momentum in "
        "the step, and the momentum's decay. Not of sgd.",
        json_schema_extra={"x-default": "`[0.9, 0.999]`, for lion `[0.9, 0.99]`"},
    )
    eps: Annotated[float, Number(minimum=0)] = Field(
        1e-8, description="Added to the denominator of the update. Of adamw and adam only."
    )
    momentum: Annotated[float, Number(minimum=0)] = Field(
        0.0, description="Decay of the momentum; 0 keeps none. Of sgd only, as the next two."
    )
    dampening: Annotated[float, Number()] = Field(
        0.0, description="Part of a gradient that the momentum does not take."
    )
    nesterov: Annotated[bool, Flag()] = Field(
        False, description="Nesterov's momentum; without dampening."
    )
    weight_decay: Annotated[float, Number(minimum=0)] = Field(
        0.01,
        description="Weight decay of the parameters that `no_decay` leaves: decoupled in adamw and "
        "lion, added to the gradient in adam and sgd.",
        json_schema_extra={"x-default": "`0.01`, for others than adamw `0.0`"},
    )
    max_grad_norm: Annotated[float | None, OrOff(Number(above=0))] = Field(
        1.0, description="Clip the global norm of the gradients to this."
    )
    no_decay: Annotated[
        tuple[_Name, ...],
        BeforeValidator(_one_as_list, json_schema_input_type=tuple[_Name, ...] | _Name),
    ] = Field(
        ("bias", "norm"),
        description="Parameters without weight decay, by name, upper and lower case alike: a "
        "pattern with *, ? or [ matches the full name, any other text matches anywhere in it.",
    )

    @model_validator(mode="after")
    def _keys_of_the_rule(self) -> Optimizer:
        """Refuses keys of other rules; fills in what the rule takes where the file is silent."""
        given, own = self.model_fields_set, _OWN_KEYS[self.name]
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
            if key not in given:
                self.__dict__[key] = value
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that this rule's numbers depend on."""
        foreign = {*_ADAM_KEYS, *_SGD_KEYS} - set(_OWN_KEYS[self.name])
        return tuple(key for key in type(self).model_fields if key not in foreign)

    @property
    def num_moments(self) -> int:
        """How many moments are kept of a trainable parameter."""
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


def _plain(value: Any, place: str, depth: int = 0) -> None:
    """Refuses what JSON could not hold: `config` is handed to transformers as it is."""
    if depth > 16:
        raise conflict(f"{place} is nested too deeply")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise conflict(f"{place} has the key {show_value(key)}: keys are text")
            _plain(inner, f"{place}.{key}" if place else key, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _plain(inner, f"{place}[{index}]", depth + 1)
    elif not (value is None or isinstance(value, (str, bool, int, float))):
        raise conflict(f"{place}: expected text, a number, true or false; got {show_value(value)}")


def _model_type_present(config: dict[str, Any] | None) -> dict[str, Any] | None:
    if config is not None:
        _plain(config, "")
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            expected = 'expected the name of an architecture in transformers, such as "gpt2"'
            if "model_type" in config:
                text = f"{expected}; got {show_value(model_type)}"
            else:
                near = nearest("model_type", list(config), cutoff=0.7)
                hint = f'; "{near}" is near' if near else ""
                text = f"a required key is missing; {expected}{hint}"
            refuse_all([fault(text, "model_type")])
    return config


class Model(Section):
    """The model that `infinity train` trains: exactly one of `path` and `[model.config]`."""

    path: Annotated[Path, Location()] | None = Field(
        None, description="A local Hugging Face directory: config.json and safetensors."
    )
    config: Annotated[dict[str, Any] | None, AfterValidator(_model_type_present)] = Field(
        None,
        description="A transformers configuration for seeded random weights: `model_type` and any "
        "key of that architecture.",
    )
    seed: Annotated[int, _SEED] = Field(
        0, description="Seed of weights that no checkpoint holds. Same seed, same weights."
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="Name patterns of tensors of the checkpoint that the model has no place for "
        "and that are to be left out. Others are refused.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.config is None):
            came = "neither" if self.path is None else "both"
            raise conflict(f"expected exactly one of path and [model.config]; got {came}")
        return self


class DataSource(Section):
    """One place that text is read from."""

    path: Annotated[Path | Literal["python-stdlib"], Location((PYTHON_STDLIB,))] = Field(
        description="A directory or one file; "
        '"python-stdlib" is the running interpreter\'s standard library.'
    )
    pattern: Annotated[str, Text("a glob pattern")] = Field(
        "**/*.txt",
        description="Files to take, below a directory; one file is taken whatever its name.",
        json_schema_extra={"x-default": '`"**/*.txt"`, for python-stdlib `"**/*.py"`'},
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, (str, os.PathLike)) else value

    @model_validator(mode="after")
    def _python_files(self) -> DataSource:
        if self.path == PYTHON_STDLIB and "pattern" not in self.model_fields_set:
            self.__dict__["pattern"] = "**/*.py"
        return self

    @property
    def location(self) -> Path:
        """The directory or file that `path` stands for on this machine."""
        if isinstance(self.path, str):
            import sysconfig

            return Path(sysconfig.get_path("stdlib"))
        return self.path


def _not_empty(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
    if not sources:
        raise refuse("at least one path", sources)
    return sources


class Data(Section):
    """The text that `infinity train` reads: files in UTF-8. JSON, tables, archives and other
    formats are refused by name."""

    paths: Annotated[
        tuple[DataSource, ...],
        BeforeValidator(_one_as_list, json_schema_input_type=tuple[DataSource | str, ...] | str),
        AfterValidator(_not_empty),
    ] = Field(description="Files and directories: each a path, or a table with path and pattern.")
    tokenizer: Annotated[
        Path | Literal["auto", "bytes"],
        Location(("auto", "bytes"), "the directory of a local Hugging Face tokenizer"),
    ] = Field(
        "auto",
        description='"auto" takes the tokenizer in `model.path`, and bytes where there is none. '
        '"bytes" takes UTF-8 bytes as tokens (vocabulary 256). A directory of the name bytes is '
        'written "./bytes".',
    )
    sequence_length: Annotated[int, Integer(2)] = Field(512, description="Tokens per sequence.")
    held_out: Annotated[float, Number(minimum=0, maximum=0.5)] = Field(
        0.05, description="Fraction of the sequences kept for evaluation."
    )
    max_bytes: Annotated[int | None, OrOff(Size())] = Field(
        None, description="Most bytes of text to read."
    )
    seed: Annotated[int, _SEED] = Field(0, description="Seed of the split and the order.")
    shuffle: Annotated[bool, Flag()] = Field(True, description="Shuffle the sequences.")


class Sample(Section):
    """A text that the trained model writes at the end."""

    prompt: Annotated[str, Text("the text to go on from")] = Field(description="How it begins.")
    new_tokens: Annotated[int, Integer(1)] = Field(200, description="Tokens to generate.")
    temperature: Annotated[float, Number(minimum=0)] = Field(
        0.8, description="Randomness of the choice; 0 always takes the likeliest token."
    )
    top_k: Annotated[int | None, OrOff(Integer(1))] = Field(
        None, description="Choose among this many likeliest tokens."
    )


class Train(Section):
    """The main job: `infinity train`."""

    steps: Annotated[int, Integer(1)] = Field(description="Optimizer steps.")
    batch_size: Annotated[int, Integer(1)] = Field(
        description="Sequences in one forward. A step sees batch_size * "
        "gradient_accumulation_steps of them."
    )
    gradient_accumulation_steps: Annotated[int, Integer(1)] = Field(
        1, description="Backward passes whose gradients make one step."
    )
    schedule: Annotated[LrSchedule, Choice(LrSchedule)] = Field(
        "constant", description="Course of the learning rate after the warm-up."
    )
    warmup_steps: Annotated[int, Integer(0)] = Field(
        0, description="Steps over which the learning rate rises from 0; at most `steps`."
    )
    min_lr_ratio: Annotated[float, Number(minimum=0, maximum=1)] = Field(
        0.0, description="Learning rate at the end of linear and cosine, relative to the peak."
    )
    eval_every: Annotated[int, Integer(0)] = Field(
        0, description="Evaluate on held-out data every so many steps; 0 is never."
    )
    eval_batches: Annotated[int, Integer(1)] = Field(8, description="Batches per evaluation.")
    activation_checkpointing: Annotated[bool, Flag()] = Field(
        False, description="Recompute activations in the backward."
    )
    nonfinite: Annotated[Nonfinite, Choice(Nonfinite)] = Field(
        "error",
        description='What becomes of a step whose loss or norm is not finite: "error" ends the run '
        'with the weights of the step before; "skip" leaves the weights as they are, says so and '
        "goes on with the next batches. More than 16 such steps in a row are an error.",
    )
    seed: Annotated[int, _SEED] = Field(0, description="Seed of dropout and other randomness.")
    log_every: Annotated[int, Integer(1)] = Field(1, description="Steps between log lines.")
    threads: Annotated[Literal["auto"] | int, AutoOr(Integer(1, 4096))] = Field(
        "auto", description="CPU threads that compute."
    )
    sample: Sample | None = Field(None, description="Generate a sample at the end.")

    @field_validator("warmup_steps")
    @classmethod
    def _warmup_ends(cls, warmup_steps: int, info: ValidationInfo) -> int:
        steps = info.data.get("steps")
        if steps is not None and warmup_steps > steps:
            raise refuse(f"at most train.steps, {steps}", warmup_steps)
        return warmup_steps


class Output(Section):
    """What a run leaves behind."""

    directory: Annotated[Path, Location()] = Field(
        "output", validate_default=True, description="Directory of everything a run writes."
    )
    metrics: Annotated[str, FileName()] = Field(
        "metrics.jsonl", description="One JSON object per step, inside the directory."
    )
    max_shard_size: Annotated[int, Size()] = Field(
        2 * GIB, description="Largest safetensors file of the export."
    )
    export: Annotated[bool, Flag()] = Field(
        True, description="Write a Hugging Face checkpoint at the end."
    )

    @property
    def metrics_path(self) -> Path:
        return self.directory / self.metrics


class Checkpoint(Section):
    """Copies of the whole state of a run, from which `infinity train --resume` goes on exactly.

    Written only where the file has this section. One is written at the end of the steps, and when
    SIGTERM or Ctrl-C stops them.
    """

    every: Annotated[int, Integer(0)] = Field(
        0, description="Steps between checkpoints; 0 writes none in between."
    )
    keep: Annotated[int, Integer(1)] = Field(
        2, description="Newest checkpoints that are kept. One more fits the drive for a moment."
    )
    durability: Annotated[Durability, Choice(Durability)] = Field(
        "checkpoint",
        description='"checkpoint" keeps `keep` spare generations of what training rewrites on '
        "NVMe: a checkpoint on the same file system is then links to it instead of a copy. "
        'On another one it is copied behind training, which takes one spare generation. "step" '
        "also commits every step of `infinity train`, for one more generation and a flush "
        'per step. "none" takes no spare space; checkpoints are copies, and training waits.',
    )
    grace_s: Annotated[int, Integer(0)] = Field(
        0,
        description="Seconds that a copy behind training may still take when SIGTERM or Ctrl-C "
        "has stopped the steps. Then it is given up; `--resume` goes on from the swap directory, "
        "which has the step. 0 waits until it is done.",
    )
    directory: Annotated[Path, Location()] | None = Field(
        None,
        description="Directory of the checkpoints of this run and no other.",
        json_schema_extra={"x-default": "`checkpoints` inside output.directory"},
    )
