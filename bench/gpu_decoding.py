"""A question of gpu.py: at which rate are stored weights decoded?

Matrices as of Kimi K2's experts, of random bytes, are decoded to bf16 by one launch for each
format. The ceiling is the rate at which the device copies bf16, in bytes read and written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import print_table
from gpu_common import Sizes
from rich.console import Console

from infinity.codecs import AffineGroups, FloatBlocks, TableBlocks, mxfp4, nvfp4, on_device
from infinity.codecs.on_device import FusedCodec, WeightPlace, batches_of, places_on
from infinity.codecs.part import Shape

FORMATS: dict[str, FusedCodec] = {
    "INT4, groups of 32": AffineGroups(),
    "MXFP4": mxfp4(),
    "NVFP4": nvfp4(),
    "NF4, nested": TableBlocks(offset=0.04),
    "FP8, blocks of 128": FloatBlocks(),
    "FP8, a scale per row": FloatBlocks((1, 0)),
    "MXFP4 of gpt-oss": mxfp4(is_transposed=True),
}
_SHAPE = (2048, 7168)
_ROUNDS = 10


def decoding(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    count, shape = (2, (64, 128)) if there.type == "cpu" else (32, _SHAPE)
    numel = count * shape[0] * shape[1]
    memory, copy = torch.empty(2, numel, dtype=torch.bfloat16, device=there)
    copied = 4 * numel / _seconds(lambda: copy.copy_(memory), there)
    rows = [{"name": "copy", "gb_per_s": copied / 1e9, "share": 1.0}]
    rows += [rate_of(name, codec, shape, memory, copied) for name, codec in FORMATS.items()]
    columns = {
        "format": "{name}",
        "G weights/s": lambda row: f"{row['g_weights_per_s']:,.0f}" if len(row) > 3 else "-",
        "GB/s": "{gb_per_s:,.0f}", "share of the copy": "{share:.2f}",
    }  # fmt: skip
    print_table("decoding to bf16", columns, rows, console)
    return rows


def rate_of(
    name: str, codec: FusedCodec, shape: Shape, memory: torch.Tensor, copied: float
) -> dict[str, Any]:
    """Decodes weights of one shape that fill `memory`. `copied`: bytes per second of a copy."""
    numel, weights, stored_nbytes = shape[0] * shape[1], [], 0
    for start in range(0, memory.numel(), numel):
        parts = []
        for part in codec.parts(shape):
            parts.append((stored_nbytes, part.nbytes))
            stored_nbytes += part.nbytes
        place = WeightPlace(codec, shape, tuple(parts), memory.dtype, start, (shape[1], 1))
        weights.append(place)
    block = torch.randint(256, (stored_nbytes,), dtype=torch.uint8, device=memory.device)
    (batch,) = batches_of(weights)
    content = memory.view(torch.uint8)
    if on_device.runs(batch, memory.device):
        places = places_on(memory.device, batch.rows())
        seconds = _seconds(lambda: batch.decode_at_once(block, content, places), memory.device)
    else:
        seconds = _seconds(lambda: batch.decode_one_by_one(block, content), memory.device)
    rate = (stored_nbytes + 2 * memory.numel()) / seconds
    return {
        "name": name, "g_weights_per_s": memory.numel() / seconds / 1e9, "gb_per_s": rate / 1e9,
        "share": rate / copied, "variant": batch.launch.variant if batch.launch else "",
    }  # fmt: skip


def _seconds(work: Callable[[], object], there: torch.device) -> float:
    """Returns the time of one round."""
    wait = torch.cuda.synchronize if there.type == "cuda" else lambda: None
    for _ in range(2):
        work()
    wait()
    begun = time.perf_counter()
    for _ in range(_ROUNDS):
        work()
    wait()
    return (time.perf_counter() - begun) / _ROUNDS
