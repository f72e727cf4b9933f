"""A question of gpu.py: how much longer is a step that clips gradients?

The same model steps with `max_grad_norm` on and off in turns: with all state on the host, with
moments on the device, with all state there, and as a plain model in the device's memory with
`torch.nn.utils.clip_grad_norm_`. A norm of a gradient that rests on the device is measured on the
host, of a copy in spare host memory. Without clipping is the ceiling of with; the plain model says
what clipping costs where no gradient travels. The norms of all placements are equal to the last
digit. The plain model starts from other weights, and has other norms.

The rows without clipping also compare the placements with each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import print_table, progress, say
from gpu_common import (
    KINDS,
    Sizes,
    batch_of,
    free_memory,
    growth,
    in_memory,
    offloaded,
    timed_s,
)
from rich.console import Console

import infinity

MAX_NORM = 1.0
PLACES = {
    "host": dict.fromkeys(KINDS, "host"),
    "moments on device": dict.fromkeys(KINDS, "host") | {"moments": "device"},
    "device": dict.fromkeys(KINDS, "device"),
}
_TURNS = 3

Clip = Callable[[bool], object]


def clipping(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    tokens = (min(sizes.tokens), sizes.micro_batch_tokens)
    found = {}
    for place in PLACES:
        found[place] = _offloaded(place, tokens, sizes, there)
        free_memory(there)
    found["in memory"] = _in_memory(tokens, sizes, there)
    free_memory(there)
    columns = {
        "state": "{place}", "tokens": "{tokens:,}", "without s": "{off_s:.3f}",
        "with s": "{on_s:.3f}", "clipping s": lambda row: f"{row['on_s'] - row['off_s']:.3f}",
        "share": lambda row: f"{row['off_s'] / row['on_s']:.2f}", "last norm": "{norm:.9g}",
    }  # fmt: skip
    lines = [{"place": place, **row} for place, rows in found.items() for row in rows]
    title = f"steps without and with clipping, {sizes.resting_layers} layers"
    print_table(title, columns, lines, console)
    return found


def _offloaded(place: str, tokens: Any, sizes: Sizes, there: torch.device) -> Any:
    config = {
        "tiers": {"host": {"capacity": sizes.resting_host}},
        "placement": PLACES[place],
    }
    say(f"clipping, state: {place}")
    model = offloaded(sizes, sizes.resting_layers, place == "host", config, there).train()
    engine = infinity.engine_of(model)
    optimizer: Any = infinity.AdamW(model, lr=1e-5)

    def step(ids: torch.Tensor, clips: bool) -> None:
        optimizer.max_grad_norm = MAX_NORM if clips else None
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = []
    for count in tokens:
        ids = batch_of(count, sizes.sequence, there)
        with growth(engine) as grown:
            row = _in_turns(count, lambda clips, ids=ids: step(ids, clips), sizes, there)
        row["waits_s"] = {name: value for name, value in grown.items() if "wait" in name}
        rows.append(row | {"norm": float(optimizer.grad_norm)})
    rows[0]["update_device"] = str(engine.update_device)
    engine.close()
    return rows


def _in_memory(tokens: Any, sizes: Sizes, there: torch.device) -> Any:
    say("clipping of the model in memory")
    plain, optimizer = in_memory(sizes.resting_layers, sizes, there)
    norm = torch.tensor(0.0)

    def step(ids: torch.Tensor, clips: bool) -> None:
        nonlocal norm
        plain(input_ids=ids, labels=ids).loss.backward()
        if clips:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    rows = []
    for count in tokens:
        ids = batch_of(count, sizes.sequence, there)
        row = _in_turns(count, lambda clips, ids=ids: step(ids, clips), sizes, there)
        rows.append(row | {"norm": float(norm)})
    return rows


def _in_turns(tokens: int, step: Clip, sizes: Sizes, there: torch.device) -> dict[str, Any]:
    """The first step after a change is not counted: the engine expects what the last one needed."""
    found: dict[bool, list[float]] = {False: [], True: []}
    rounds = max(sizes.rounds // 2, 1)
    with progress(f"{tokens:,} tokens", lambda: f"{len(found[True])} of {_TURNS} turns"):
        for _ in range(_TURNS):
            for clips in (False, True):
                found[clips].append(timed_s(lambda clips=clips: step(clips), rounds, there))
    return {
        "tokens": tokens, "off_s": statistics.median(found[False]),
        "on_s": statistics.median(found[True]), "off_turns_s": found[False],
        "on_turns_s": found[True],
    }  # fmt: skip
