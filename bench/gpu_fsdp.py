"""A question of gpu.py: how long is the same step with FSDP2's offload to the host?

PyTorch's own `fully_shard` with `CPUOffloadPolicy`, one rank: fp32 weights, gradients and moments
on the host, page-locked, compute in bfloat16, the update by torch's fused AdamW on the host. Ours
has the same state on the host (weights and residual, 4 bytes; moments, 8; gradients, 4) and the
same kernels on the device. Each steps in its own turn of the run, ours first: the host's memory
does not hold both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from common import print_table, say
from gpu_common import (
    SETTLING,
    Sizes,
    batch_of,
    free_memory,
    llama,
    offloaded,
    on_host,
    step_of,
    timed_s,
)
from rich.console import Console

import infinity


def fsdp(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    say("ours, state on the host")
    config = on_host(sizes.resting_host)
    model = offloaded(sizes, sizes.resting_layers, True, config, there).train()
    engine = infinity.engine_of(model)
    ours = _steps(model, infinity.AdamW(model, lr=1e-5), sizes, there, SETTLING)
    update_device = str(engine.update_device)
    engine.close()
    del model, engine
    free_memory(there)
    theirs = _of_fsdp(sizes, there)
    free_memory(there)
    rows = [{"tokens": count, "ours": ours[count], "theirs": theirs[count]} for count in ours]
    columns = {
        "tokens": "{tokens:,}", "FSDP2 s": "{theirs:.3f}", "ours s": "{ours:.3f}",
        "FSDP2 / ours": lambda row: f"{row['theirs'] / row['ours']:.2f}",
    }  # fmt: skip
    title = f"a step with all state on the host, {sizes.resting_layers} layers"
    print_table(title, columns, rows, console)
    return {"ours_s": ours, "fsdp2_s": theirs, "update_device": update_device}


def _of_fsdp(sizes: Sizes, there: torch.device) -> dict[int, float]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    say("FSDP2, state on the host")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    backend = "cpu:gloo,cuda:nccl" if there.type == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        # Drawn on the device, which takes no time, and kept on the host.
        with there:
            model = llama(sizes.resting_layers, sizes.hidden, sizes.sequence)
        model = model.cpu().train()
        options: dict[str, Any] = {
            "mesh": init_device_mesh(there.type, (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=there.type == "cuda"),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            ),
        }
        for block in model.model.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        return _steps(model, optimizer, sizes, there)
    finally:
        distributed.destroy_process_group()


def _steps(
    model: Any, optimizer: Any, sizes: Sizes, there: torch.device, num_before: int = 1
) -> dict[int, float]:
    found = {}
    for count in sizes.tokens:
        step = step_of(model, optimizer, batch_of(count, sizes.sequence, there))
        found[count] = timed_s(step, sizes.rounds, there, num_before=num_before)
    return found
