"""Measures this machine as a `Hardware`, in a few seconds.

The bandwidth of the drives is taken from the configuration file if `infinity tune` wrote it.
Everything else is measured as training uses it: the training thread while the engine trains two of
the model's own blocks (`rehearsal.py`), or a plain block of equal size and the optimizer's pass if
only shapes are known; and sums of fp32 arrays.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch

from infinity.bench.host import OptimizerPass
from infinity.bench.scratch import BenchDirectory
from infinity.bench.transfer import EngineTransfer, FileSet, TransferKind
from infinity.codecs import Int4Groups
from infinity.config import SwapConfig
from infinity.config.schema import NvmeTier
from infinity.errors import ConfigError, UnsupportedError
from infinity.plan.hardware import Device, Hardware, Host, Nvme
from infinity.plan.model import PlannedModel
from infinity.plan.rehearsal import Rehearsed, rehearse, timed_shape
from infinity.simulate.job import Batch, tuned_gb_per_s
from infinity.sizes import MIB
from infinity.storage.arena import Arena, available_host_nbytes
from infinity.storage.open import open_configured
from infinity.training.allocator import keep_freed_memory

_ARENA_NBYTES = 256 * MIB
_EXTENT_NBYTES = 16 * MIB
_NUM_ROUNDS = 3
_LEAST_S = 0.3
_MOST_FFN_RATIO = 16  # Stacked experts are far larger than the part that one token uses.
_HEAD_DIM = 64


def measure(config: SwapConfig, model: PlannedModel, batch: Batch) -> Hardware:
    """Measures this machine. Needs 256 MiB of memory, twice that on each drive, and space for two
    blocks.

    Raises UnsupportedError for a CUDA device, which has no measurement yet; use a hardware file.
    """
    kind = config.tiers.device.kind
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        raise UnsupportedError(
            "only a machine that computes on the CPU is measured here; describe the one with the "
            "CUDA device in a file and give it with --hardware (docs/PLAN.md)"
        )
    keep_freed_memory()  # As the training program does; otherwise page faults would be measured.
    if config.train is not None and config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)
    with Arena(_ARENA_NBYTES, huge_pages=config.tiers.host.huge_pages) as arena:
        nvme = _nvme(config, arena) if config.tiers.nvme else None
        found = rehearse(config, model, batch, [_existing(tier.path) for tier in config.tiers.nvme])
        if found is None:
            found = Rehearsed(
                flops=_flops_of_a_block_alike(
                    model, batch, getattr(torch, config.precision.compute_dtype)
                ),
                update=1e9
                * statistics.median(
                    OptimizerPass(arena).run().gb_per_s for _ in range(_NUM_ROUNDS)
                ),
                hold=None,
            )
    return Hardware(
        name=f"this machine, {torch.get_num_threads()} threads",
        source="measured now",
        host=Host(
            memory=available_host_nbytes(),
            update_gb_per_s=found.update / 1e9,
            sum_gb_per_s=_sum_gb_per_s(),
            hold_gb_per_s=None if found.hold is None else found.hold / 1e9,
        ),
        device=Device(
            count=1,
            tflops=found.flops / 1e12,
            decode_gb_per_s=None if model.frozen is None else _decode_gb_per_s(),
        ),
        nvme=nvme,
    )


def _nvme(config: SwapConfig, arena: Arena) -> Nvme:
    tiers = config.tiers.nvme
    read, write, mixed = tuned_gb_per_s(tiers) or _measured(config, arena)
    capacity = sum(_free_nbytes(tier) for tier in tiers)
    return Nvme(
        drives=len(tiers),
        capacity=capacity,
        read_gb_per_s=read,
        write_gb_per_s=write,
        mixed_gb_per_s=mixed,
    )


def _free_nbytes(tier: NvmeTier) -> int:
    return tier.capacity.resolve(shutil.disk_usage(_existing(tier.path)).free)


def _existing(path: Path) -> Path:
    """Returns the directory itself, or its existing parent."""
    if path.is_dir():
        return path
    if not path.parent.is_dir():
        raise ConfigError(f"tiers.nvme.path: {path.parent} is no directory; make it first")
    return path.parent


def _measured(config: SwapConfig, arena: Arena) -> tuple[float, float, float]:
    """Returns GB/s of reading, writing and both at the same time, over all paths together."""
    directories = [_existing(tier.path) for tier in config.tiers.nvme]
    with (
        BenchDirectory(arena, directories, _ARENA_NBYTES) as scratch,
        _files(config, scratch, arena) as files,
    ):
        rates = [
            statistics.median(
                EngineTransfer(
                    kind, files, kind, nbytes=_ARENA_NBYTES, extent_nbytes=_EXTENT_NBYTES
                ).run().gb_per_s
                for _ in range(_NUM_ROUNDS)
            )
            for kind in get_args(TransferKind)
        ]  # fmt: skip
    return rates[0], rates[1], rates[2]


@contextmanager
def _files(config: SwapConfig, scratch: BenchDirectory, arena: Arena) -> Iterator[FileSet]:
    engine = open_configured(config.io, arena)
    try:
        yield FileSet(engine, scratch, arena)
    finally:
        engine.close()


def _sum_gb_per_s() -> float:
    """Returns GB/s of adding one fp32 array to another: two are read, one is written."""
    total, part = torch.zeros(16 * MIB), torch.ones(16 * MIB)
    return 3 * part.nbytes / _median_s(lambda: total.add_(part)) / 1e9


def _decode_gb_per_s() -> float:
    """Returns GB/s of bfloat16 weights that are made of INT4 ones. Other formats are within a third
    of it (docs/formats/quantized.md)."""
    codec, shape = Int4Groups(), (4096, 4096)
    parts = [torch.zeros(part.nbytes, dtype=torch.uint8) for part in codec.parts(shape)]
    weights = torch.empty(shape, dtype=torch.bfloat16)
    return weights.nbytes / _median_s(lambda: codec.decode(parts, shape, weights)) / 1e9


def _flops_of_a_block_alike(model: PlannedModel, batch: Batch, dtype: torch.dtype) -> float:
    """Returns the FLOPs per second of forward and backward of a plain block with the width and size
    of the model's largest block. All work is timed; only products are counted."""
    count, length = timed_shape(batch)
    hidden = model.checkpoint_width
    blocks = {
        unit for hooked in model.hooked_modules if hooked.attention_width for unit in hooked.units
    }
    params = max((sum(t.numel for t in model.units[unit].tensors) for unit in blocks), default=0)
    ffn = min(max((params - 4 * hidden**2) // (2 * hidden), 1), _MOST_FFN_RATIO * hidden)
    heads = hidden // _HEAD_DIM if hidden % _HEAD_DIM == 0 else 1
    block = torch.nn.TransformerEncoderLayer(
        hidden, heads, ffn, dropout=0.0, batch_first=True, norm_first=True, activation="gelu",
        dtype=dtype,
    )  # fmt: skip
    inputs = torch.randn(count, length, hidden, dtype=dtype, requires_grad=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)

    def both_ways() -> None:
        block(inputs, src_mask=mask, is_causal=True).sum().backward()

    weights = sum(parameter.numel() for parameter in block.parameters())
    flops = 3 * 2.0 * count * length * (weights + hidden * length)
    return flops / _median_s(both_ways)


def _median_s(work: Callable[[], object]) -> float:
    """Returns the median time of one call, after a first call that is not counted; at least three
    calls and 0.3 s in all."""
    work()
    spent: list[float] = []
    while len(spent) < _NUM_ROUNDS or sum(spent) < _LEAST_S:
        start_s = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start_s)
    return statistics.median(spent)
