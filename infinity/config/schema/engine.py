"""The tables of the engine: `[io]`, `[schedule]`, `[distributed]` and `[precision]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infinity.config.schema.section import Section
from infinity.config.values import AutoOr, Choice, Flag, Integer, OrOff, Size
from infinity.sizes import GIB, KIB, MIB, PAGE_NBYTES

ComputeDtype = Literal["auto", "float32", "bfloat16"]
MomentFormat = Literal["float32", "8bit"]
UpdatesMode = Literal["auto", "both_passes", "deferred", "at_step"]
UpdateOn = Literal["auto", "host", "device"]
RankBudgets = Literal["node", "rank"]
ReduceDtype = Literal["auto", "bfloat16"]
RankExchange = Literal["auto", "collective", "one_sided"]
ShardOver = Literal["all", "node"]
IoEngineName = Literal["auto", "io_uring", "threads"]
RingFlagsName = Literal["auto", "defer_taskrun", "coop_taskrun", "none"]


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
    queue_depth: Annotated[Literal["auto"] | int, AutoOr(Integer(1, 1024))] = Field(
        "auto",
        description='Requests of `block_size` in flight on one drive. "auto" finds the number '
        "while the drive works, between 8 and 32 MiB in flight: more only where it is more than "
        "3 % faster, because an urgent read waits behind what is in flight.",
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
        "auto",
        description='When the work of `optimizer.step()` is done. "deferred" updates a unit '
        'right before its next use, overlapped with the forward. "both_passes" updates a part of '
        "the units in the backward already, as soon as their gradients are complete, and keeps "
        "the old state in a spare generation of the swap files until the step has decided; what "
        "the step did not expect (clipping, other settings, a second backward) is undone. That "
        "is for units whose state rests on NVMe (over ranks in stage 3), and takes the space of "
        "their state once more; beside a device also for state on the host, which is copied to "
        "free memory. "
        '"auto" is "both_passes" where the weights still fit beside it, '
        'else "deferred". "at_step" updates all units at once. Over ranks a thread of each rank '
        "makes these updates, of its shards, in stage 3; stages 1 and 2 update at the step. "
        'On one rank all but "at_step" take host memory that is free for state on its way: the '
        "backward writes what the forward has updated, and reads what the next forward needs. "
        "Never changes a result.",
    )
    update_on: Annotated[UpdateOn, Choice(UpdateOn)] = Field(
        "auto",
        description='Which processor computes the update: the "host", or the "device", to '
        'which state is streamed unless it rests there. "auto" measures both, and the link, for '
        "half a second when a model is offloaded to a device with memory of its own, and takes the "
        "device if it is clearly faster. Updates with 8-bit moments run on the host. Never changes "
        "a result.",
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
        '"auto" makes tiles only if the model does not fit otherwise, or if experts are decoded on '
        "a device that has no space for the next layer's; 0 makes none. Results "
        "agree to rounding: the gradient of a linear layer's input is summed over its tiles.",
    )
    tile_micro_batches: Annotated[int, Integer(1)] = Field(
        4,
        description="Micro-batches of `infinity.forward_backward` that pass a block with "
        "tiles of linear layers together. One fetch of a tile serves all of them; the "
        "activations of that block are in memory for all of them. Tiles of experts always serve "
        "all micro-batches; of a block with such tiles, up to this many keep their graph between "
        "two parts of the backward. Never changes a result.",
    )
    update_chunk: Annotated[int, Size(minimum=2 * PAGE_NBYTES, multiple=2 * PAGE_NBYTES)] = Field(
        16 * MIB,
        description="Bytes of each kind of state in one chunk of the optimizer's update; four "
        "times as many where no state travels.",
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
    shard_over: Annotated[ShardOver, Choice(ShardOver)] = Field(
        "all",
        description='Which ranks divide frozen weights in stage 3: "all" ranks, or those of each '
        '"node", so that every node reads all of them and none passes the network. What is '
        "trained, weights too, is divided over all ranks either way. Nodes have equally many "
        "ranks. The bits are the same.",
    )
    timeout_s: Annotated[int, Integer(1)] = Field(
        600,
        description="Seconds that a rank waits, from its start until the model is offloaded, for a "
        "rank that lives and does not come: it compiles, or its file system is slow. Ranks that "
        "train wait for one that lives without a limit. A rank that dies is named within seconds, "
        "a process that hangs after this time, but after 5 seconds at least and 20 at most.",
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
