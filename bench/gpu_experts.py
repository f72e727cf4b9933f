"""A question of gpu.py: how long is a LoRA step over a frozen INT4 mixture of experts?

Some layers of Kimi-K2's real shape, in the names and layout of its INT4 checkpoint, as files of
holes: routers, norms and the rows of the embedding that are used are real, so tokens choose experts
of their own; the other weights are zeros (trillion.py has all layers). The host holds every stored
byte, and so does the device in the first window; in the second one the experts come over the link
in each pass, and are decoded on the device.

Then micro-batches of a step layer by layer, in the first window, with a router that uses all
experts: each micro-batch by itself (`schedule.experts = "exact"`), and all in one product a tile
("grouped"), beside the same tokens in one micro-batch.

Beside the seconds of a step: the bytes that came over the link, and how long the device computed,
copied, and had nothing to do, by PyTorch's profiler (gpu_profile.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from common import say
from gpu_common import (
    Sizes,
    device_for,
    free_memory,
    growth,
    step_of,
    synchronize,
    timed_s,
)
from gpu_profile import profiled, save_trace, show
from quantized_base import (
    KIMI_K2,
    Fill,
    Shape,
    lora_over,
    random_fill,
    sparse_fill,
    write_base,
)
from rich.console import Console

import infinity
from infinity.sizes import GIB, MIB

_SMALL = Shape(
    layers=3, hidden=256, experts=8, expert_width=128, dense_width=512, heads=4, vocabulary=2048,
    q_rank=64, kv_rank=32, nope=32, rope=16, value=32, chosen=2,
)  # fmt: skip

_COUNT = 8  # Micro-batches of a step.


def experts(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    is_small = sizes.hidden < KIMI_K2.hidden // 2
    shape = _SMALL if is_small else dataclasses.replace(KIMI_K2, layers=sizes.expert_layers)
    # Windows that hold every stored byte, and a fraction of them.
    windows = ("8MiB", "2MiB") if is_small else ("auto", 10 * GIB)
    base = scratch / "base"
    base_nbytes = write_base(shape, base, sparse_fill(list(range(max(sizes.tokens))), shape.hidden))
    say(f"base: {shape.num_parameters / 1e9:.1f} B parameters, {base_nbytes / 1e9:.1f} GB stored")
    host_nbytes = base_nbytes + (32 * MIB if is_small else 6 * GIB)
    rows = []
    for window in windows:
        rows += _of_window(window, host_nbytes, base, scratch, sizes, words, there)
        free_memory(there)
    rows += _together(host_nbytes, shape, scratch, sizes, there)
    show(rows, console, "a LoRA step over a frozen mixture of experts")
    for row in rows:
        console.print(
            f"window {row['window']}, {row['tokens']:,} tokens {row.get('products', '')}: "
            f"{row['step_s']:.3f} s a step, {row['in_nbytes'] / 1e9:.1f} GB over the link"
        )
    return {"parameters": shape.num_parameters, "base_nbytes": base_nbytes, "rows": rows}


def _of_window(
    window: Any, host_nbytes: int, base: Path, scratch: Path, sizes: Sizes, words: Any, there: Any
) -> list[dict[str, Any]]:
    model, engine, optimizer = _model_of(window, host_nbytes, base, scratch, there)
    rows = []
    for tokens in (each for each in sizes.tokens if each <= sizes.micro_batch_tokens):
        say(f"a LoRA step, window {window}, {tokens:,} tokens")
        ids = torch.arange(tokens, device=there).view(-1, sizes.sequence)
        step = step_of(model, optimizer, ids, use_cache=False)
        step()  # Reads what the host does not have.
        step_s = timed_s(step, 2, there)
        with growth(engine) as grown:
            step()
            synchronize(there)
        in_nbytes = grown.get("device_in_nbytes", 0)
        row = {"tokens": tokens, "window": str(window), "in_nbytes": in_nbytes}
        rows.append(row | profiled(step, there) | {"unprofiled_step_s": step_s})
        if words.save is not None:
            save_trace(step, words.save.with_suffix(f".experts.{window}.{tokens}.json.gz"), there)
    infinity.close(model)
    return rows


def _model_of(
    window: Any, host_nbytes: int, base: Path, scratch: Path, there: Any, **schedule: Any
) -> tuple[Any, Any, Any]:
    model = lora_over(base)
    settings = {
        "tiers": {
            "host": {"capacity": host_nbytes},
            "device": {"capacity": window},
            "nvme": [{"path": str(scratch / "swap")}],
        },
        "placement": {"master": "host", "moments": "host", "gradients": "host"},
        "schedule": schedule,
    }
    own = device_for(there)
    infinity.offload(model, settings, weights=base, **({} if own is None else {"device": own}))
    return model, infinity.engine_of(model), infinity.AdamW(model, lr=1e-4)


def _together(
    host_nbytes: int, shape: Shape, scratch: Path, sizes: Sizes, there: Any
) -> list[dict[str, Any]]:
    window = "8MiB" if shape is _SMALL else "auto"
    base, tokens = scratch / "even", max(sizes.tokens)
    write_base(shape, base, _even(list(range(tokens)), shape.hidden))
    rows = []
    for products, count in (("exact", _COUNT), ("grouped", _COUNT), ("grouped", 1)):
        say(f"a LoRA step, {count} x {tokens // count:,} tokens, {products}")
        model, engine, optimizer = _model_of(
            window, host_nbytes, base, scratch, there, experts=products
        )
        length = min(tokens // count, sizes.sequence)
        ids = torch.arange(tokens, device=there).view(count, -1, length)

        def loss_of(ids: torch.Tensor, model: Any = model) -> Any:
            return model(input_ids=ids, labels=ids, use_cache=False).loss / _COUNT

        def step(
            model: Any = model, optimizer: Any = optimizer, ids: Any = ids, loss_of: Any = loss_of
        ) -> None:
            infinity.forward_backward(model, loss_of, ids)
            optimizer.step()
            optimizer.zero_grad()

        step()
        step_s = timed_s(step, 2, there)
        with growth(engine) as grown:
            step()
            synchronize(there)
        in_nbytes = grown.get("device_in_nbytes", 0)
        row = {"tokens": tokens, "window": window, "in_nbytes": in_nbytes}
        row |= {"products": f"{count} x {tokens // count:,} {products}"}
        rows.append(row | profiled(step, there) | {"unprofiled_step_s": step_s})
        infinity.close(model)
        free_memory(there)
    return rows


def _even(tokens: list[int], hidden: int) -> Fill:
    """As `sparse_fill`, with a router whose scores are not saturated: it uses all experts."""
    others, small = sparse_fill(tokens, hidden), random_fill(0, std=hidden**-0.5)

    def fill(name: str, dtype: str, shape: tuple[int, ...]) -> bytes | None:
        if dtype == "F32":
            return None
        return (small if name.endswith("gate.weight") else others)(name, dtype, shape)

    return fill
