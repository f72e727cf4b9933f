"""Trains two of the model's own blocks for a few steps with the engine itself and a trace.

Only training loads a processor as training does: matrix products of the model's own shapes while
drives write to the same memory, updates in chunks, and the engine's own work at every block. Each
of these is timed by its track in the trace.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.api import offload
from infinity.config import SwapConfig
from infinity.engine.registry import engine_of
from infinity.errors import CapacityError
from infinity.observe.step_summary import summarize
from infinity.observe.timeline import laid_out
from infinity.observe.tracer import Span, Track
from infinity.optimizers.algorithms import AdamW
from infinity.plan.model import PlannedModel
from infinity.simulate.job import Batch, updated_nbytes
from infinity.sizes import MIB
from infinity.storage.arena import available_host_nbytes
from infinity.training.model import checkpoint_activations

_NUM_BLOCKS = 2
_VOCABULARY = 256
_MOST_TOKENS = 4096
_NUM_WARM_UPS = 2
_NUM_STEPS = 5
_STATE_NBYTES = 32  # Per parameter in any precision, and as much again as working memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Rates of the training thread: FLOPs; bytes that the optimizer's pass reads or writes; bytes
    of weights fetched for a forward or backward of their block."""

    flops: float
    update: float
    hold: float | None  # None if it was not measured.


def rehearse(
    config: SwapConfig, model: PlannedModel, batch: Batch, directories: Sequence[Path]
) -> Rehearsed | None:
    """Needs memory, and space in `directories`, one per path of the file, for two blocks. Returns
    None if the model is missing, its configuration cannot be reduced, or it does not fit."""
    own = _own_blocks(model, getattr(torch, config.precision.compute_dtype))
    if own is None:
        return None
    if batch.recomputes:
        checkpoint_activations(own)
    num_params = sum(parameter.numel() for parameter in own.parameters())
    host_nbytes = _STATE_NBYTES * num_params + 64 * MIB
    if host_nbytes > available_host_nbytes() // 2:
        return None
    count, length = timed_shape(batch)
    with ExitStack() as stack:
        table = config.to_dict()
        table = {key: table[key] for key in ("tiers", "placement", "precision", "io", "schedule")}
        table["tiers"]["host"]["capacity"] = host_nbytes
        for tier, directory in zip(table["tiers"]["nvme"], directories, strict=True):
            temporary = tempfile.TemporaryDirectory(dir=directory, prefix="infinity-plan-")
            tier |= {"path": stack.enter_context(temporary), "capacity": "100%"}
        try:
            offload(own, table)
        except CapacityError:
            return None
        engine = engine_of(own)
        stack.callback(engine.close)
        steps = _steps(own, torch.randint(_VOCABULARY, (count, length)))
        updated = sum(updated_nbytes(unit) for unit in engine.store.units)
    blocks = [hooked for hooked in model.hooked_modules if hooked.attention_width][:_NUM_BLOCKS]
    weight_nbytes = sum(
        model.units[unit].weight_nbytes for hooked in blocks for unit in hooked.units
    )
    passes = 1 + (3 if batch.recomputes else 2)
    flops = passes * sum(block.forward_flops(count * length, length) for block in blocks)
    flops += 3 * 2 * count * length * _VOCABULARY * model.checkpoint_width  # The head.
    return Rehearsed(
        flops=flops / steps[Track.COMPUTE],
        update=updated / steps[Track.UPDATES],
        hold=2 * weight_nbytes / steps[Track.ENGINE],
    )


def timed_shape(batch: Batch) -> tuple[int, int]:
    """Returns the sequences of a micro-batch and the tokens of each; a larger micro-batch is
    reduced to a sufficient number."""
    length = min(batch.sequence_length, _MOST_TOKENS)
    return max(1, min(batch.num_tokens, _MOST_TOKENS) // length), length


def _own_blocks(model: PlannedModel, dtype: torch.dtype) -> Any:
    """Returns the model reduced to its first blocks, with a small vocabulary."""
    if model.hf_config is None:
        return None
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.hf_config)
    text = config.get_text_config()
    text.vocab_size = _VOCABULARY
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    text.num_hidden_layers = min(_NUM_BLOCKS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    except Exception:  # An architecture may raise any exception.
        return None


def _steps(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Returns the median seconds per step of the training thread's tracks."""
    tracer = engine_of(model).counters.tracer
    optimizer = AdamW(model, lr=1e-6)
    for number in range(_NUM_WARM_UPS + _NUM_STEPS):
        if number == _NUM_WARM_UPS:
            tracer.start()
        with tracer.step(number):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    tracer.stop()
    spans: list[Span] = laid_out(tracer.spans())
    busy: dict[str, list[float]] = {}
    for step in summarize(spans, num_stalls=0):
        for use in step.tracks:
            busy.setdefault(use.track, []).append(use.busy_s)
    return {track: statistics.median(seconds) for track, seconds in busy.items()}
