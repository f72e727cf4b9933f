"""What the questions of gpu.py and gpu_ranks.py share: sizes, models, clocks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.sizes import GIB, MIB
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.host import MAX_REGISTERED_NBYTES

KINDS = ("parameters", "master", "moments", "gradients")
SEQUENCE = 2048
WINDOW_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured with. `tokens` per step, of the growing steps."""

    layers: int
    hidden: int
    large_layers: int
    large_tokens: int
    micro_batch_tokens: int
    tokens: tuple[int, ...]
    copied_nbytes: int
    rounds: int
    resting_layers: int  # Of the model whose state may rest on the device.
    resting_host: str  # Host budget of that model: 16 bytes a parameter, and copies on their way.
    accumulated: int  # Micro-batches of a step of Trainer.
    arenas_nbytes: tuple[int, ...]
    arena_step_nbytes: int  # What an arena that fills the host is a multiple of.
    registered_nbytes: int = MAX_REGISTERED_NBYTES
    sequence: int = SEQUENCE
    expert_layers: int = 4  # Of the mixture of experts; the first of them has no experts.


FULL = Sizes(
    12, 4096, 32, 64 << 10, 8 << 10, (2048, 4096, 8192, 16384, 32768), 4 * GIB, 5, 8, "48GiB", 8,
    (64 * GIB, 256 * GIB, 600 * GIB), GIB,
)  # fmt: skip
SHORT = Sizes(
    6, 4096, 8, 32 << 10, 8 << 10, (2048, 8192, 32768), 2 * GIB, 3, 4, "20GiB", 8,
    (16 * GIB,), GIB,
)  # fmt: skip
SMALL = Sizes(
    3, 64, 4, 256, 128, (64, 128), 16 * MIB, 2, 2, "64MiB", 8,
    (16 * MIB, 64 * MIB), 2 * MIB, 32 * MIB, 32,
)  # fmt: skip


def on_host(capacity: Any, **more: Any) -> dict[str, Any]:
    """Returns a configuration with all state on the host."""
    placement = dict.fromkeys(KINDS, "host")
    return {"tiers": {"host": {"capacity": capacity}}, "placement": placement, **more}


def in_memory(layers: int, sizes: Sizes, there: torch.device) -> tuple[Any, Any]:
    """Returns a plain model in bfloat16 on the device, and its optimizer."""
    torch.manual_seed(0)
    with there:
        model = llama(layers, sizes.hidden, sizes.sequence)
    model = model.to(torch.bfloat16).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=there.type == "cuda")


def device_for(there: torch.device) -> Any:
    """The engine's own for CUDA, else the simulated one."""
    return None if there.type == "cuda" else SimulatedDevice(1, delay_s=1e-5)


def llama(layers: int, hidden: int, sequence: int) -> LlamaForCausalLM:
    """The shapes of Llama 2 7B at 4096, with a small vocabulary: blocks are what moves."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 43 // 16, num_hidden_layers=layers,
            num_attention_heads=max(hidden // 128, 1), vocab_size=2048, use_cache=False,
            max_position_embeddings=sequence, tie_word_embeddings=False,
        )
    )  # fmt: skip


def offloaded(
    sizes: Sizes, layers: int, window: bool, config: Any, there: torch.device, *,
    own: Any = None, spare_nbytes: int = 64 * MIB,
) -> Any:  # fmt: skip
    """A model without the values of its weights, offloaded. `own`: a device instead of
    `device_for`. `spare_nbytes`: of device memory beside the blocks of the window."""
    table = {"precision": {"compute": "bfloat16"}, **config}
    shape = sizes.hidden, sizes.sequence
    torch.manual_seed(0)  # Of the first values, which several ranks must have in common.
    with infinity.init_empty_weights(table):
        model = llama(layers, *shape)
    if window:
        block_nbytes = 2 * sum(p.numel() for p in model.model.layers[0].parameters())
        table["tiers"]["device"] = {"capacity": WINDOW_BLOCKS * block_nbytes + spare_nbytes}
    own = own or device_for(there)
    return infinity.offload(model, table, seed=0, **({} if own is None else {"device": own}))


def batch_of(tokens: int, sequence: int, there: torch.device) -> torch.Tensor:
    source = torch.Generator().manual_seed(tokens)
    return torch.randint(2048, (tokens // sequence, sequence), generator=source).to(there)


@contextmanager
def growth(engine: Any) -> Iterator[dict[str, float]]:
    """Gives a table that has, after the `with` block, by how much each counter grew in it."""
    found: dict[str, float] = {}
    before = engine.counters.snapshot()
    yield found
    after = engine.counters.snapshot()
    found.update({name: value - before.get(name, 0) for name, value in after.items()})


def step_of(model: Any, optimizer: Any, ids: torch.Tensor, **options: Any) -> Callable[[], None]:
    """Returns a step of training: passes, update, gradients dropped."""

    def step() -> None:
        model(input_ids=ids, labels=ids, **options).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def synchronize(there: torch.device) -> None:
    if there.type == "cuda":
        torch.cuda.synchronize()


def free_memory(there: torch.device) -> None:
    """After a model: engines and models are in cycles."""
    gc.collect()
    if there.type == "cuda":
        torch.cuda.empty_cache()


# Steps before the first that is counted: until then the engine has found out which units are
# updated in the backward.
SETTLING = 8


def timed_s(
    run: Callable[[], object], rounds: int, there: torch.device, *, num_before: int = 1
) -> float:
    """The median of some rounds, after `num_before` that are not counted."""
    times_s = []
    for _ in range(num_before + rounds):
        synchronize(there)
        begun_s = time.perf_counter()
        run()
        synchronize(there)
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s[num_before:])


def kept_for_weights_nbytes(engine: Any, there: torch.device) -> int | None:
    """What PyTorch's allocator keeps for the stream that weights take their memory on: at the
    least the window's bytes that were in use at once, and what it has no use for between them."""
    if there.type != "cuda":
        return None
    stream = engine.device._in.cuda_stream
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if each["stream"] == stream)


def peak_nbytes(run: Callable[[], object], there: torch.device) -> int | None:
    if there.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_reserved())
