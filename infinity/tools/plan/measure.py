"""Measures this machine as a `Hardware`, in some ten seconds.

The bandwidth of the drives is taken from the configuration file if `infinity tune` wrote it.
Everything else is measured as training uses it: the training thread while the engine trains two of
the model's own blocks (`rehearsal.py`), or a plain block of its width and the optimizer's pass if
only shapes are known, or if the model computes on a CUDA device; sums and norms of fp32 arrays; and
the link to the device and its own updates.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from infinity.codecs import AffineGroups
from infinity.config import SwapConfig
from infinity.config.machine import norm_threads, threads_here
from infinity.engine.update_rates import time_updates
from infinity.errors import ConfigError, StorageError
from infinity.observe import Counters
from infinity.ops.host_sums import add_
from infinity.plan.hardware import UNSURE, Device, Hardware, Host, Nvme
from infinity.plan.layout import PlannedModel
from infinity.simulate.job import Batch, tuned_gb_per_s
from infinity.sizes import MIB, PAGE_NBYTES, align_down, format_nbytes
from infinity.storage.arena import Arena, available_host_nbytes
from infinity.storage.native_engine import open_configured
from infinity.storage.protocol import Priority, Segment, StorageEngine
from infinity.storage.shards import open_past_cache
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool
from infinity.tiers.open_device import device_kind, is_integrated
from infinity.tools.bench.measure import Contender, timed
from infinity.tools.bench.memory import arena_to_device, optimizer_pass
from infinity.tools.bench.scratch import bench_directory
from infinity.tools.bench.transfer import FileSet, TransferKind, engine_transfer
from infinity.tools.plan.data_facts import planned_batch
from infinity.tools.plan.rehearsal import Rehearsed, rehearse, timed_shape
from infinity.tools.training.process import keep_freed_memory

_ARENA_NBYTES = 256 * MIB
_EXTENT_NBYTES = 16 * MIB
_NUM_ROUNDS = 3
_LEAST_S = 0.3
_LONG_S = 1.0
_UNSURE = 2.0  # The fastest round of a drive by the slowest.
_UNSURE_COMPUTE = 1.3  # The usual step by a slow one; others use the processor.
_TELLING_NBYTES = 64 * MIB
_LEAST_GB_PER_S = 1e-3
_LEAST_TOKENS = 8
_MOST_PARAMS = 1 << 26  # Of the timed block: products of this size are as fast as larger ones.
_MOST_FFN_RATIO = 16  # Stacked experts are far larger than the part that one token uses.
_HEAD_DIM = 64


def measure(
    config: SwapConfig, model: PlannedModel, files: Sequence[Path], batch: Batch | None = None
) -> Hardware:
    """Measures this machine, and the current CUDA device if the model computes there. Needs 256 MiB
    of memory, twice that on each drive, and space for two blocks. `files` of a frozen model are
    read where they lie; `batch` is that of the file where it is None.

    Raises ConfigError for a CUDA device that is asked for and not there, and for a file that cannot
    be read.
    """
    is_cuda = device_kind(config.tiers.device) == "cuda"
    dtype = getattr(torch, config.precision.compute_dtype)
    batch = planned_batch(config) if batch is None else batch
    keep_freed_memory()  # As the training program does; otherwise page faults would be measured.
    if config.train is not None and config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)
    device = None
    with Arena(_ARENA_NBYTES, huge_pages=config.tiers.host.huge_pages) as arena:
        drives = _Drives(config, arena)
        nvme = drives.nvme(files if model.frozen is not None else ())
        found, alike = None, None
        if not is_cuda:
            places = [_existing(tier.path) for tier in config.tiers.nvme]
            found = rehearse(config, model, batch, places)
        if found is None:
            alike = flops_of_a_block_alike(
                model, batch, dtype, torch.device("cuda" if is_cuda else "cpu")
            )
            found = Rehearsed(
                flops=alike,
                slow_flops=alike,
                update=1e9
                * statistics.median(
                    optimizer_pass(arena).run().gb_per_s for _ in range(_NUM_ROUNDS)
                ),
                hold=None,
            )
        if found.flops > _UNSURE_COMPUTE * found.slow_flops:
            slow, usual = found.slow_flops / 1e9, found.flops / 1e9
            drives.unsure.append(f"computing {slow:.3g} to {usual:.3g} GFLOPS")
        if found.has_few_tokens:
            drives.unsure.append("computing, measured with few tokens")
        if is_cuda:
            device = measure_cuda(arena, model, found.flops)
    # One fp32 array is added to another: two are read, one is written.
    total, part = torch.zeros(16 * MIB), torch.ones(16 * MIB)
    own_threads = threads_here(torch.get_num_threads())
    num_norm_threads = norm_threads(own_threads) if is_cuda else 1  # As the engine does.
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    return Hardware(
        name="this machine, " + (torch.cuda.get_device_name() if is_cuda else threads),
        source=drives.source,
        host=Host(
            memory=available_host_nbytes(),
            update_gb_per_s=found.update / 1e9,
            sum_gb_per_s=3 * part.nbytes / _median_s(lambda: add_(total, part)) / 1e9,
            norm_gb_per_s=_norm_gb_per_s(num_norm_threads),
            norm_threads=num_norm_threads,
            hold_gb_per_s=None if found.hold is None else found.hold / 1e9,
        ),
        device=device
        or Device(
            count=1,
            tflops=found.flops / 1e12,
            float32_tflops=_float32_tflops(model, batch, dtype, found.flops, alike),
            decode_gb_per_s=None if model.frozen is None else _decode_gb_per_s(),
        ),
        nvme=nvme,
    )


def _existing(path: Path) -> Path:
    """Returns the directory itself, or its existing parent."""
    if path.is_dir():
        return path
    if not path.parent.is_dir():
        raise ConfigError(f"tiers.nvme.path: {path.parent} is no directory; make it first")
    return path.parent


class _Drives:
    """Measures drives through the engine of a run, as `infinity bench` does. `unsure` says which
    rates another moment would not repeat."""

    def __init__(self, config: SwapConfig, arena: Arena) -> None:
        self._config = config
        self._arena = arena
        self.unsure: list[str] = []

    @property
    def source(self) -> str:
        """`Hardware.source`: that it is measured, and what another moment may measure otherwise."""
        return "measured now" + (UNSURE + ", ".join(self.unsure) if self.unsure else "")

    def nvme(self, files: Sequence[Path]) -> Nvme | None:
        """Returns the drives of the swap directories, and the rate at which `files` are read. None
        without either."""
        tiers, read = self._config.tiers.nvme, None
        if files:
            read = self._of_files(files)
        if tiers:
            into, out, mixed = tuned_gb_per_s(tiers) or self._of_swap()
            capacity = sum(
                tier.capacity.resolve(shutil.disk_usage(_existing(tier.path)).free)
                for tier in tiers
            )
            return Nvme(
                drives=len(tiers),
                capacity=capacity,
                read_gb_per_s=into,
                write_gb_per_s=out,
                mixed_gb_per_s=mixed,
                checkpoint_read_gb_per_s=read,
            )
        if read is None:
            return None
        # No swap files: nothing is written.
        return Nvme(
            drives=1, capacity=0, read_gb_per_s=read, write_gb_per_s=read,
            checkpoint_read_gb_per_s=read,
        )  # fmt: skip

    def _of_swap(self) -> tuple[float, float, float]:
        """Returns GB/s of reading, writing and both at the same time, over all paths together."""
        directories, arena = [_existing(tier.path) for tier in self._config.tiers.nvme], self._arena
        with (
            bench_directory(arena, directories, _ARENA_NBYTES) as scratch,
            open_configured(self._config.io, arena) as engine,
        ):
            drives = FileSet(engine, scratch, arena)
            read, write, mixed = (
                self._rate(
                    kind,
                    engine_transfer(
                        kind, drives, kind, nbytes=_ARENA_NBYTES, extent_nbytes=_EXTENT_NBYTES
                    ),
                )
                for kind in get_args(TransferKind)
            )
        return read, write, mixed

    def _of_files(self, files: Sequence[Path]) -> float | None:
        """Returns GB/s of reading up to 256 MiB of these files with direct I/O, past the page
        cache, all drives at once. None for files that are too small to tell, where a swap
        directory on the same drive tells."""
        with open_configured(self._config.io, self._arena) as engine:
            try:
                segments = _segments(engine, files, self._arena.address)
            except StorageError as error:
                raise ConfigError(f"{error}; expected a readable file") from None
            nbytes = sum(segment.nbytes for segment in segments)
            if nbytes < _TELLING_NBYTES:
                places = {os.stat(_existing(tier.path)).st_dev for tier in self._config.tiers.nvme}
                if places == {os.stat(file).st_dev for file in files}:
                    return None
                self.unsure.append(f"reads of only {format_nbytes(nbytes)}")

            def read() -> None:
                tickets = [engine.submit("read", [part], Priority.STATE) for part in segments]
                for ticket in reversed(tickets):
                    ticket.wait()

            read()  # The first transfer finds cold metadata, and starts threads.
            return max(self._rate("read", timed("files", nbytes, read)), _LEAST_GB_PER_S)

    def _rate(self, what: str, transfer: Contender) -> float:
        """Returns GB/s, over a time in which a drive that others use changes its rate."""
        rates, begun_s = list[float](), time.perf_counter()
        while len(rates) < _NUM_ROUNDS or time.perf_counter() - begun_s < _LONG_S:
            rates.append(transfer.run().gb_per_s)
        low, middle, high = min(rates), statistics.median(rates), max(rates)
        if high > _UNSURE * low:
            self.unsure.append(f"{what} {low:.2g} to {high:.2g} GB/s")
        return middle


def _segments(engine: StorageEngine, files: Sequence[Path], address: int) -> list[Segment]:
    """Returns extents of 16 MiB, file by file in turn, so that all drives are read at once; at
    most as many bytes as the arena at `address` has."""
    sizes = [align_down(os.stat(file).st_size, PAGE_NBYTES) for file in files]
    opened = [open_past_cache(engine, str(file)) for file in files]
    segments, used_nbytes = list[Segment](), 0
    for at in range(0, max(sizes, default=0), _EXTENT_NBYTES):
        for file, size in zip(opened, sizes, strict=True):
            nbytes = min(_EXTENT_NBYTES, size - at, _ARENA_NBYTES - used_nbytes)
            if nbytes > 0:
                segments.append(Segment(file, at, address + used_nbytes, nbytes))
                used_nbytes += nbytes
    return segments


def _norm_gb_per_s(num_threads: int) -> float:
    """Returns GB/s of a thread that computes norms of fp32 arrays while as many others do."""
    arrays = [torch.ones(16 * MIB) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        spent_s = _median_s(lambda: list(pool.map(torch.linalg.vector_norm, arrays)))
    return arrays[0].nbytes / spent_s / 1e9


def _decode_gb_per_s() -> float:
    """Returns GB/s of bfloat16 weights that are made of INT4 ones. Other formats are within a third
    of it (docs/formats/quantized.md)."""
    codec, shape = AffineGroups(), (4096, 4096)
    parts = [torch.zeros(part.nbytes, dtype=torch.uint8) for part in codec.parts(shape)]
    weights = torch.empty(shape, dtype=torch.bfloat16)
    return weights.nbytes / _median_s(lambda: codec.decode(parts, shape, weights)) / 1e9


def flops_of_a_block_alike(
    model: PlannedModel, batch: Batch, dtype: torch.dtype, device: torch.device
) -> float:
    """Returns the FLOPs per second of forward and backward of a plain block with the width of the
    model's, and no larger than one of its blocks. All work is timed; only products are counted.

    Tokens are few at first and doubled as far as time allows: a slow machine needs fewer.
    """
    count, length = timed_shape(batch)
    block = _block_alike(model, dtype, device)
    weights = sum(parameter.numel() for parameter in block.parameters())
    num_tokens = min(_LEAST_TOKENS, length)
    while True:
        own = min(num_tokens, length)
        sequences = max(1, num_tokens // own)
        inputs = torch.randn(
            sequences, own, model.checkpoint_width, dtype=dtype, device=device, requires_grad=True
        )
        mask = torch.nn.Transformer.generate_square_subsequent_mask(own, device=device, dtype=dtype)
        spent_s = _median_s(partial(_both_ways, block, inputs, mask))
        if num_tokens >= count * length or spent_s > _LEAST_S:
            flops = 6.0 * sequences * own * (weights + model.checkpoint_width * own)
            return flops / spent_s
        num_tokens *= 2


def _float32_tflops(
    model: PlannedModel, batch: Batch, dtype: torch.dtype, flops: float, alike: float | None
) -> float | None:
    """Returns the TFLOPS of this processor in fp32, from its rate in `dtype`: that of a run, and,
    where it is known, that of a block alike. None if `dtype` is fp32. Many processors have no units
    for bf16."""
    if dtype is torch.float32:
        return None
    cpu = torch.device("cpu")
    wide = flops_of_a_block_alike(model, batch, torch.float32, cpu)
    return flops * wide / (alike or flops_of_a_block_alike(model, batch, dtype, cpu)) / 1e12


def _block_alike(
    model: PlannedModel, dtype: torch.dtype, device: torch.device
) -> torch.nn.TransformerEncoderLayer:
    hidden = model.checkpoint_width
    blocks = {
        unit for hooked in model.hooked_modules if hooked.attention_width for unit in hooked.units
    }
    params = max((sum(t.numel for t in model.units[unit].tensors) for unit in blocks), default=0)
    params = min(params, _MOST_PARAMS)
    ffn = min(max((params - 4 * hidden**2) // (2 * hidden), hidden), _MOST_FFN_RATIO * hidden)
    heads = hidden // _HEAD_DIM if hidden % _HEAD_DIM == 0 else 1
    return torch.nn.TransformerEncoderLayer(
        hidden, heads, ffn, dropout=0.0, batch_first=True, norm_first=True, activation="gelu",
        dtype=dtype, device=device,
    )  # fmt: skip


def _both_ways(
    block: torch.nn.TransformerEncoderLayer, inputs: torch.Tensor, mask: torch.Tensor
) -> None:
    block(inputs, src_mask=mask, is_causal=True).sum().backward()
    if inputs.is_cuda:
        torch.cuda.synchronize()


def _median_s(work: Callable[[], object]) -> float:
    """Returns the median time of one call, after a first call that is not counted; at least three
    calls, and 0.3 s in all. A call of more than a second is the last one."""
    work()
    spent: list[float] = []
    while len(spent) < _NUM_ROUNDS or sum(spent) < _LEAST_S:
        start_s = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start_s)
        if spent[-1] > _LONG_S:
            break
    return statistics.median_low(spent)


_COPY_NBYTES = 64 * MIB
_CHUNK_NBYTES = 16 * MIB  # Of fp32, as the updater's.


def measure_cuda(arena: Arena, model: PlannedModel, flops: float) -> Device:
    """Measures the current CUDA device; `flops` per second are known. The arena is pinned for it,
    and is at least 64 MiB."""
    from infinity.tiers.cuda import CudaDevice

    counters = Counters()
    host = HostPool(arena, counters)
    device = CudaDevice(host, counters)
    try:
        free_nbytes, _ = torch.cuda.mem_get_info()
        found = measure_device(device, host, model, flops, free_nbytes)
        return found.model_copy(update={"integrated": is_integrated("cuda")})
    finally:
        device.close()


def measure_device(
    device: DeviceAdapter,
    host: HostPool,
    model: PlannedModel,
    flops: float,
    memory_nbytes: int,
) -> Device:
    """Returns the device with `flops` per second and `memory_nbytes` free. A device that does not
    give the host's bits gets no rate of updates."""
    into, out = (
        arena_to_device(device, host.arena, direction, _COPY_NBYTES).run().gb_per_s
        for direction in ("in", "out")
    )
    trained = [unit for unit in model.units if unit.has_state]
    rates = None
    if trained:
        largest = max(trained, key=lambda unit: unit.state_numel)
        rates = time_updates(device, host, largest, _CHUNK_NBYTES, drives={})
    update = math.inf if rates is None else rates.device_update
    return Device(
        count=1,
        tflops=flops / 1e12,
        memory=memory_nbytes,
        h2d_gb_per_s=into,
        d2h_gb_per_s=out,
        update_gb_per_s=update / 1e9 if math.isfinite(update) else None,
    )
