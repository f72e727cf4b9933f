"""A question of gpu.py: where does the device wait in a step?

Steps of a model with all state on the host, in a window of a few blocks, under PyTorch's profiler,
which asks the device for its own clock (Kineto, CUPTI). Of the time of the steps: how long the
stream that computes has a kernel, how long copies go in and out, how long copies run beside a
kernel, and how long nothing runs at all. Only the device is recorded: the host is as fast as ever.

One more step is recorded with the host's operations, and written beside the results as a trace for
Perfetto (https://ui.perfetto.dev): what the host does where the device has nothing to do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import print_table, say
from gpu_common import (
    SETTLING,
    Sizes,
    batch_of,
    free_memory,
    growth,
    offloaded,
    on_host,
    step_of,
    synchronize,
)
from rich.console import Console

import infinity

_WARM, _STEPS = 2, 3
_COUNTED = (
    "update_s", "weights_s", "copy_wait_s", "early_updates_kept", "early_updates_undone",
    "device_in_nbytes", "device_out_nbytes",
)  # fmt: skip
Span = tuple[int, int]  # Begin and end, nanoseconds.


def profile(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    config = on_host("64MiB" if words.small else words.host)
    model = offloaded(sizes, sizes.layers, True, config, there).train()
    engine = infinity.engine_of(model)
    optimizer: Any = infinity.AdamW(model, lr=1e-5)
    rows = []
    for tokens in sizes.tokens:
        say(f"profile of {tokens:,} tokens")
        step = step_of(model, optimizer, batch_of(tokens, sizes.sequence, there))
        for _ in range(SETTLING):
            step()
        with growth(engine) as grown:
            row = {"tokens": tokens} | profiled(step, there)
        row["counted"] = {name: grown.get(name, 0) / (_WARM + _STEPS) for name in _COUNTED}
        rows.append(row)
        if words.save is not None:
            save_trace(step, words.save.with_suffix(f".{tokens}.trace.json.gz"), there)
    update_device = str(engine.update_device)
    engine.close()
    free_memory(there)
    show(rows, console, "where the device spends a step")
    return {"rows": rows, "update_device": update_device}


def profiled(step: Callable[[], None], there: torch.device) -> dict[str, Any]:
    for _ in range(_WARM):
        step()
    synchronize(there)
    with torch.profiler.profile(activities=_device_activities(there)) as profiler:
        begun_s = time.perf_counter()
        for _ in range(_STEPS):
            step()
        synchronize(there)
        taken_s = time.perf_counter() - begun_s
    return shares_of(_device_events(profiler), taken_s / _STEPS)


def _device_activities(there: torch.device) -> list[Any]:
    activity = torch.profiler.ProfilerActivity
    return [activity.CUDA if there.type == "cuda" else activity.CPU]


def _device_events(profiler: Any) -> list[tuple[str, int, Span]]:
    """Returns name, stream, and span of everything that ran on the device."""
    found = profiler.profiler.kineto_results.events()
    return [
        (event.name(), event.device_resource_id(), (event.start_ns(), event.end_ns()))
        for event in found
        if event.device_type() != torch.autograd.DeviceType.CPU
    ]


def shares_of(events: list[tuple[str, int, Span]], step_s: float) -> dict[str, Any]:
    """Returns seconds of a step of each kind of work, from the events of `_STEPS` of them."""
    spans: dict[str, list[Span]] = defaultdict(list)
    kernels: dict[int, list[Span]] = defaultdict(list)
    names: dict[str, float] = defaultdict(float)
    for name, stream, span in events:
        if "HtoD" in name:
            spans["in"].append(span)
        elif "DtoH" in name:
            spans["out"].append(span)
        else:
            kernels[stream].append(span)
            names[name.split("<")[0][-60:]] += (span[1] - span[0]) / 1e9 / _STEPS
    computing = max(kernels, key=lambda stream: length_s(kernels[stream]), default=None)
    spans["computing"] = kernels.pop(computing, [])
    spans["other kernels"] = [span for each in kernels.values() for span in each]
    copies = spans["in"] + spans["out"]
    everything = [*copies, *spans["computing"], *spans["other kernels"]]
    seconds = {name: length_s(each) / _STEPS for name, each in spans.items()}
    beside_s = (
        length_s(copies) + length_s(spans["computing"]) - length_s(copies + spans["computing"])
    )
    return {
        "step_s": step_s,
        "seconds": seconds,
        "copies_beside_computing_s": beside_s / _STEPS,
        "nothing_s": step_s - length_s(everything) / _STEPS,
        "longest": dict(sorted(names.items(), key=lambda item: -item[1])[:12]),
    }


def length_s(spans: Iterable[Span]) -> float:
    """Returns the seconds that at least one of the spans covers."""
    total_ns, end = 0, 0
    for begin, until in sorted(spans):
        total_ns += max(until - max(begin, end), 0)
        end = max(end, until)
    return total_ns / 1e9


def save_trace(step: Callable[[], None], path: Path, there: torch.device) -> None:
    activities = {torch.profiler.ProfilerActivity.CPU, *_device_activities(there)}
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        synchronize(there)
    profiler.export_chrome_trace(str(path))


def show(rows: list[dict[str, Any]], console: Console, title: str) -> None:
    def seconds(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['seconds'].get(name, 0):.3f}"

    columns = {
        "tokens": "{tokens:,}", "step s": "{step_s:.3f}", "computing s": seconds("computing"),
        "in s": seconds("in"), "out s": seconds("out"),
        "beside computing s": "{copies_beside_computing_s:.3f}", "nothing s": "{nothing_s:.3f}",
        "computing, share": lambda row: (
            f"{row['seconds'].get('computing', 0) / row['step_s']:.2f}"
        ),
    }  # fmt: skip
    print_table(title, columns, rows, console)
