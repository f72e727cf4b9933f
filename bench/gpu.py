"""What does a GPU lose when its model's state lives elsewhere?

    python bench/gpu.py --path /mnt/nvme0 --save bench/results/gpu.json

The questions, each beside a ceiling or a counterpart of the same run:

* *pinning*: seconds to page-lock an arena, and the device's memory before and after
  (gpu_pinning.py).
* *copies*: host to device, device to host and both at once, arena against PyTorch's pinned memory.
* *steps*: forward and backward, and whole steps with the update, of a model whose weights live on
  the host in a window of a few blocks, against the same model in the device's memory, by the
  number of tokens; and the number from which the computation should be what binds: where it takes
  as long as the bytes at the bandwidth that was just measured.
* *updates*: the same step with the host's updates and with the device's, and which of the two
  `update_on = "auto"` takes, by what figures.
* the device's memory, as a part of *steps*: the peak in such a step, against the window and what
  the model in memory takes, and what the allocator keeps for the weights of the window.
* *clipping*: the same step with and without `max_grad_norm`, with state on the host, with moments
  on the device, with all state there, and in memory (gpu_clipping.py).
* *trainer*: tokens per second under transformers.Trainer with 1 and 8 micro-batches a step, beside
  Trainer with the model in memory (gpu_trainer.py).
* *profile*: how much of a step the device computes, copies, or has nothing to do (gpu_profile.py).
* *fsdp*: the same step with the offload of PyTorch's FSDP2 (gpu_fsdp.py).
* *experts*: a LoRA step over a frozen INT4 mixture of experts, with its stored bytes on the device
  and over the link (gpu_experts.py).
* *decoding*: weights made of stored ones per second, by format, against a copy (gpu_decoding.py).
* *large*: tokens per second, and share of the peak of large matrix products, of a model that is
  larger than the device would hold with its state.
* *largest*: the most layers that device, host and drive hold together, and a step of them.

Half an hour is expected on an H200 with 128 GiB of host memory. `--short` measures with half of the
layers. Everything is tiny with `--small`, which also runs without a GPU, to try the program and not
to measure.
`--only` asks some of the questions. bench/README.md has them in the order of a first day.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import arguments, environment
from gpu_clipping import clipping
from gpu_common import (
    FULL,
    KINDS,
    SETTLING,
    SHORT,
    SMALL,
    WINDOW_BLOCKS,
    Sizes,
    batch_of,
    device_for,
    free_memory,
    in_memory,
    kept_for_weights_nbytes,
    llama,
    offloaded,
    on_host,
    peak_nbytes,
    step_of,
    timed_s,
)
from gpu_decoding import decoding
from gpu_experts import experts
from gpu_fsdp import fsdp
from gpu_pinning import pinning
from gpu_profile import profile
from gpu_trainer import trainer
from rich.console import Console
from rich.table import Table

import infinity
from infinity.config import SwapConfig
from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import GIB
from infinity.storage.arena import Arena, available_host_nbytes
from infinity.tiers.host import HostPool
from infinity.tools.bench.measure import GB, Effort, Lab
from infinity.tools.bench.memory import device_copies
from infinity.tools.bench.report import rows_of, to_json
from infinity.tools.cli.bench import print_tables


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--host", default="85%", help="host budget of the large model")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="half of the layers, fewer rounds")
    size.add_argument("--small", action="store_true", help="tiny shapes, on any machine")
    words = parser.parse_args()
    # One device, before CUDA starts: Trainer would divide a batch over all that it sees.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if not torch.cuda.is_available() and not words.small:
        raise SystemExit("needs a CUDA device; `--small` tries the program without")
    sizes = SMALL if words.small else SHORT if words.short else FULL
    there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    document: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(words).items()}}
    document["environment"] = environment() | {
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if there.type == "cuda" else "simulated",
    }
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-gpu-") as scratch:
        for part in words.only:
            begun_s = time.monotonic()
            document[part] = PARTS[part](sizes, words, Path(scratch), there, document, console)
            console.print(f"{part}: {time.monotonic() - begun_s:.0f} s")
            if words.save is not None:  # Each part as it comes: minutes are not lost.
                words.save.write_text(json.dumps(document, indent=1) + "\n")


# -- Copies ----------------------------------------------------------------------------------------


def copies(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    effort = Effort(nbytes=sizes.copied_nbytes, rounds=sizes.rounds)
    counters = Counters()
    with Arena(effort.nbytes) as arena:
        lab = Lab(arena, (), SwapConfig.load({}).io, effort, with_fio=False)
        host = HostPool(arena, counters)
        device = device_for(there)
        if device is None:
            from infinity.tiers.cuda import CudaDevice

            device = CudaDevice(host, counters)
        else:
            device.open(host, counters)
        try:
            results = list(device_copies(lab, device))
        finally:
            device.close()
    print_tables(rows_of(results))
    return to_json(results, {})


# -- Steps -----------------------------------------------------------------------------------------


def steps(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    """Our side and the one in memory one after the other: both do not fit beside each other."""
    found: dict[str, dict[int, Any]] = {"offloaded": {}, "in memory": {}}
    config = on_host("64MiB" if words.small else words.host, schedule={"update_on": "host"})
    model = offloaded(sizes, sizes.layers, True, config, there).train()
    engine = infinity.engine_of(model)
    optimizer: Any = infinity.AdamW(model, lr=1e-5)
    num_params = sum(p.numel() for p in model.parameters())
    for tokens in sizes.tokens:
        found["offloaded"][tokens] = _sides(model, optimizer, tokens, sizes, there)
        found["offloaded"][tokens]["waits_s"] = {
            name: value for name, value in engine.counters.snapshot().items() if "wait" in name
        }
    kept_nbytes = kept_for_weights_nbytes(engine, there)
    window_nbytes = engine.config.tiers.device.capacity.nbytes
    engine.close()
    del model, optimizer, engine
    gc.collect()
    if kept_nbytes is not None:
        console.print(
            f"the allocator keeps {kept_nbytes / GIB:.2f} GiB for weights, whose window has "
            f"{window_nbytes / GIB:.2f}"
        )
    plain, optimizer = in_memory(sizes.layers, sizes, there)
    for tokens in sizes.tokens:
        found["in memory"][tokens] = _sides(plain, optimizer, tokens, sizes, there)
    del plain, optimizer
    free_memory(there)
    report = _report_steps(found, num_params, sizes, document, console)
    return report | {"window_nbytes": window_nbytes, "kept_for_weights_nbytes": kept_nbytes}


def _sides(model: Any, optimizer: Any, tokens: int, sizes: Sizes, there: torch.device) -> Any:
    ids = batch_of(tokens, sizes.sequence, there)

    def passes() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.zero_grad()

    step = step_of(model, optimizer, ids)
    return {
        "passes_s": timed_s(passes, sizes.rounds, there),
        "step_s": timed_s(step, max(sizes.rounds // 2, 1), there, num_before=SETTLING),
        "peak_nbytes": peak_nbytes(step, there),
    }


def _report_steps(
    found: Any, num_params: int, sizes: Sizes, document: Any, console: Console
) -> Any:
    most = max(sizes.tokens)
    flops = 6 * num_params * most / found["in memory"][most]["passes_s"]
    bandwidth = _inward_bandwidth(document)
    # A block's weights, 2 bytes each, come twice; forward and backward take 6 operations a token.
    binds_at = None if bandwidth is None else round(4 / bandwidth * flops / 6)
    table = Table(
        "tokens", "in memory s", "offloaded s", "share", "step in memory s", "step s", "share",
        "peak GiB (in memory)",
        title=f"{num_params:,} parameters, window of {WINDOW_BLOCKS} of {sizes.layers} blocks; the "
        f"computation should bind from {binds_at} tokens on",
    )  # fmt: skip
    for tokens in sizes.tokens:
        ours, theirs = found["offloaded"][tokens], found["in memory"][tokens]
        peaks = [(side["peak_nbytes"] or 0) / GIB for side in (ours, theirs)]
        table.add_row(
            f"{tokens:,}",
            f"{theirs['passes_s']:.3f}",
            f"{ours['passes_s']:.3f}",
            f"{theirs['passes_s'] / ours['passes_s']:.2f}",
            f"{theirs['step_s']:.3f}",
            f"{ours['step_s']:.3f}",
            f"{theirs['step_s'] / ours['step_s']:.2f}",
            f"{peaks[0]:.1f} ({peaks[1]:.1f})",
        )
    console.print(table)
    return {"num_params": num_params, "flops": flops, "binds_at_tokens": binds_at, "sides": found}


def _inward_bandwidth(document: Any) -> float | None:
    """Bytes per second into the device, of the part that was measured before."""
    for row in document.get("copies", {}).get("rows", ()):
        if row["labels"].get("operation") == "in":
            return float(row["gb_per_s"]["median"]) * GB
    return None


# -- Updates ---------------------------------------------------------------------------------------


def updates(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    """Steps of the fewest and the most tokens. The choice knows nothing of them."""
    found: dict[str, Any] = {}
    for place in ("auto", "host", "device"):
        config = on_host("64MiB" if words.small else words.host, schedule={"update_on": place})
        model = offloaded(sizes, sizes.layers, True, config, there).train()
        engine = infinity.engine_of(model)
        if place == "auto":
            found["auto"] = asdict(engine.update_device)
            console.print(f"auto: updates {engine.update_device}")
        else:
            optimizer: Any = infinity.AdamW(model, lr=1e-5)
            tokens = (min(sizes.tokens), max(sizes.tokens))
            found[place] = {
                each: _sides(model, optimizer, each, sizes, there)["step_s"] for each in tokens
            }
            del optimizer
            told = ", ".join(f"{n:,} tokens {s:.3f} s" for n, s in found[place].items())
            console.print(f"updates on the {place}: a step of {told}")
        engine.close()
        del model, engine
        gc.collect()
    return found


# -- Large -----------------------------------------------------------------------------------------


def large(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    """Steps of many micro-batches, layer by layer, with moments where there is room."""
    config = {
        "tiers": {
            "host": {"capacity": words.host if not words.small else "64MiB"},
            "nvme": [{"path": str(scratch / "large")}],
        },
        "placement": {
            "parameters": "host", "master": "host", "gradients": "host",
            "moments": ["host", "nvme"], "activations": "host",
        },
    }  # fmt: skip
    model = offloaded(sizes, sizes.large_layers, True, config, there).train()
    engine = infinity.engine_of(model)
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)
    ids = batch_of(sizes.large_tokens, sizes.sequence, there)
    micro_batches = list(ids.split(max(sizes.micro_batch_tokens // sizes.sequence, 1)))

    def step() -> None:
        infinity.forward_backward(
            model,
            lambda each: model(input_ids=each, labels=each).loss / len(micro_batches),
            micro_batches,
        )
        optimizer.step()
        optimizer.zero_grad()

    step_s = timed_s(step, 2, there)
    peak = peak_nbytes(step, there)
    counters = engine.counters.snapshot()
    engine.close()
    tokens_per_s = sizes.large_tokens / step_s
    share = 6 * num_params * tokens_per_s / _peak_flops(there, sizes)
    console.print(
        f"{num_params:,} parameters: {step_s:.2f} s a step of {sizes.large_tokens:,} tokens, "
        f"{tokens_per_s:,.0f} tokens/s, {share:.0%} of the peak without the repeated forward "
        f"({share * 4 / 3:.0%} with), device peak {(peak or 0) / GIB:.1f} GiB"
    )
    return {
        "num_params": num_params, "step_s": step_s, "tokens_per_s": tokens_per_s, "share": share,
        "peak_nbytes": peak, "counters": counters,
    }  # fmt: skip


# -- Largest ---------------------------------------------------------------------------------------


def largest(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    """Everything on host and drive, one sequence: from what would fill both down to what fits."""
    room = (
        {"host": words.host, "nvme": "90%"} if not words.small else {"host": "8MiB", "nvme": "8MiB"}
    )
    config = {
        "tiers": {
            "host": {"capacity": room["host"]},
            "nvme": [{"path": str(scratch / "largest"), "capacity": room["nvme"]}],
        },
        "placement": {kind: ["host", "nvme"] for kind in KINDS},
        "checkpoint": {"durability": "none"},  # No second generation of anything.
    }
    loaded = SwapConfig.load(config)
    (tier,) = loaded.tiers.nvme
    total_nbytes = tier.capacity.resolve(shutil.disk_usage(scratch).free)
    total_nbytes += loaded.tiers.host.capacity.resolve(available_host_nbytes())
    with torch.device("meta"):
        block = llama(1, sizes.hidden, sizes.sequence).model.layers[0]
    layers = total_nbytes // (16 * sum(p.numel() for p in block.parameters()))
    while True:
        try:
            model = offloaded(sizes, layers, True, config, there).train()
            break
        except CapacityError as error:
            console.print(f"{layers} layers do not fit: {error}")
            layers = min(int(layers * 0.95), layers - 1)
    engine = infinity.engine_of(model)
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = infinity.AdamW(model, lr=1e-5)
    ids = batch_of(sizes.sequence, sizes.sequence, there)
    step_s = timed_s(step_of(model, optimizer, ids), 1, there)
    engine.close()
    console.print(f"{num_params:,} parameters in {layers} layers: {step_s:.1f} s a step")
    return {"num_params": num_params, "layers": layers, "step_s": step_s}


PARTS: dict[str, Callable[..., Any]] = {
    "pinning": pinning, "copies": copies, "steps": steps, "updates": updates,
    "clipping": clipping, "trainer": trainer, "profile": profile, "fsdp": fsdp,
    "experts": experts, "decoding": decoding, "large": large, "largest": largest,
}  # fmt: skip


def _peak_flops(there: torch.device, sizes: Sizes) -> float:
    """Of a large product in bfloat16, here and now."""
    width = 256 if sizes is SMALL else 8192
    one, other = (torch.randn(width, width, device=there, dtype=torch.bfloat16) for _ in range(2))
    seconds = timed_s(lambda: [one @ other for _ in range(10)], 3, there) / 10
    return 2 * width**3 / seconds


if __name__ == "__main__":
    main()
