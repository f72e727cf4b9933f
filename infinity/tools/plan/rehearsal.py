"""Trains two of the model's own blocks, or the adapter over them, with the engine and a trace.

Only training loads a processor as training does: matrix products of the model's own shapes while
drives write to the same memory, updates in chunks, and the engine's own work at every block. Each
of these is timed by its track in the trace.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from infinity.api import forward_backward, offload
from infinity.config import SwapConfig
from infinity.engine.registry import engine_of
from infinity.errors import CapacityError, ConfigError
from infinity.observe.step_summary import summarize
from infinity.observe.timeline import laid_out
from infinity.observe.tracer import Span, Track
from infinity.optimizers.algorithms import AdamW
from infinity.plan.layout import PlannedModel
from infinity.plan.predict import with_base
from infinity.simulate.job import Batch, touched_nbytes
from infinity.sizes import MIB
from infinity.state.budgets import MachineSizes, WeightsInUse, compute_budgets
from infinity.storage.arena import available_host_nbytes
from infinity.tools.mlp_slices import slice_mlps
from infinity.tools.training.adapter import with_new_adapters
from infinity.tools.training.model import checkpoint_activations

_NUM_BLOCKS = 2
_VOCABULARY = 256
_MOST_TOKENS = 4096
_FEWEST_TOKENS = 8
_LONG_S = 3.0  # More than a step of the fewest tokens takes: they are not doubled again.
# The speed of a machine that others use changes within a second.
_LEAST_STEPS, _LEAST_S = 5, 3.0
_STATE_NBYTES = 32  # Per parameter in any precision, and as much again as working memory.
_FROZEN_NBYTES = 8
_MOST_FLOPS = 1.5e11  # Of a step over a frozen base: a few seconds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Rates of the training thread: FLOPs, and those of a slow step (the third quartile of time);
    bytes that the optimizer's pass reads or writes; bytes of weights fetched for a forward or
    backward of their block. `has_few_tokens`: those of a micro-batch would have taken too long."""

    flops: float
    slow_flops: float
    update: float
    hold: float | None  # None if it was not measured.
    has_few_tokens: bool = False


def rehearse(
    config: SwapConfig, model: PlannedModel, batch: Batch, directories: Sequence[Path]
) -> Rehearsed | None:
    """Needs memory, and space in `directories`, one per path of the file, for two blocks. Returns
    None if the model is missing, its configuration cannot be reduced or take the adapter, or it
    does not fit."""
    (count, length), micro_batch = timed_shape(batch), config.schedule.micro_batch
    blocks = [hooked for hooked in model.hooked_modules if hooked.attention_width][:_NUM_BLOCKS]

    def flops_of(count: int, length: int) -> float:
        """As the simulated step counts them."""
        is_sliced = batch.slices_mlps((micro_batch or count) * length)
        return sum(
            (1 + batch.recomputes + block.gradient_ratio(length, slices_mlps=is_sliced))
            * block.forward_flops(count * length, length)
            for block in blocks
        )

    if model.frozen is not None and flops_of(count, length) > _MOST_FLOPS:
        return None
    own = _own_blocks(model, getattr(torch, config.precision.compute_dtype))
    if own is None:
        return None
    if batch.recomputes and micro_batch is None:
        checkpoint_activations(own)
    if batch.mlp_tokens is not None:
        slice_mlps(own, batch.mlp_tokens)
    with ExitStack() as stack:
        table = config.to_dict()
        table = {key: table[key] for key in ("tiers", "placement", "precision", "io", "schedule")}
        for tier, directory in zip(table["tiers"]["nvme"], directories, strict=True):
            temporary = tempfile.TemporaryDirectory(dir=directory, prefix="infinity-plan-")
            tier |= {"path": stack.enter_context(temporary), "capacity": "100%"}
        if not _offload(own, table, _host_capacities(config, model, own)):
            return None
        engine = engine_of(own)
        stack.callback(engine.close)
        try:
            steps, timed = _steps(own, torch.randint(_VOCABULARY, (count, length)), micro_batch)
        except Exception:  # Of the architecture, or of blocks that cannot be repeated: a run says.
            return None
        updated = sum(touched_nbytes(unit) for unit in engine.store.units)
    units = [model.units[unit] for hooked in blocks for unit in hooked.units]
    weight_nbytes = sum(
        unit.weight_nbytes if unit.stored is None else unit.stored.nbytes for unit in units
    )
    passes = 3 if model.frozen is None else 2
    head_flops = passes * 2 * timed[0] * timed[1] * _VOCABULARY * model.checkpoint_width
    flops = flops_of(*timed) + head_flops
    compute_s = steps[Track.COMPUTE]
    return Rehearsed(
        flops=flops / statistics.median(compute_s),
        slow_flops=flops / statistics.quantiles(compute_s)[-1],
        update=updated / statistics.median(steps[Track.UPDATES]),
        hold=2 * weight_nbytes / statistics.median(steps[Track.ENGINE]),
        has_few_tokens=timed != (count, length),
    )


def _host_capacities(config: SwapConfig, model: PlannedModel, own: Any) -> list[int]:
    """Returns the host memory to try for the reduced model, in order.

    Without memory to keep anything a training thread fetches all weights anew, and is slower for
    that. So where the model has none, the reduced one gets none.
    """
    num_params = sum(parameter.numel() for parameter in own.parameters())
    ample_nbytes, available_nbytes = _ample_nbytes(own), available_host_nbytes()
    config, model = with_base(config, model)
    try:
        in_use = WeightsInUse(model.held_nbytes, model.held_nbytes)
        machine = MachineSizes(True, None, available_nbytes)
        budgets = compute_budgets(config, model.units, in_use, machine)
    except CapacityError:
        # What is too large to be fetched whole under an adapter is divided as in the run.
        asked_nbytes = config.tiers.host.capacity.resolve(available_nbytes)
        return [min(asked_nbytes, ample_nbytes), ample_nbytes][model.frozen is None :]
    if not budgets.is_tight:
        return [ample_nbytes]
    resting_nbytes = budgets.placement.placed_nbytes["host"] * num_params // model.num_params
    return [min(ample_nbytes, budgets.working_nbytes + resting_nbytes), ample_nbytes]


def _ample_nbytes(own: torch.nn.Module) -> int:
    return 64 * MIB + sum(
        of.numel() * (_STATE_NBYTES if of.requires_grad else _FROZEN_NBYTES)
        for of in own.parameters()
    )


def _offload(own: Any, table: dict[str, Any], capacities: Sequence[int]) -> bool:
    """Offloads with the first of these capacities that suffices. Returns whether one does."""
    for nbytes in capacities:
        table["tiers"]["host"]["capacity"] = nbytes
        try:
            offload(own, table)
        except (CapacityError, ConfigError):  # Of a chunk that is larger than the budget.
            continue
        return True
    return False


def timed_shape(batch: Batch) -> tuple[int, int]:
    """Returns the sequences of a micro-batch and the tokens of each; a larger micro-batch is
    reduced to a sufficient number."""
    length = min(batch.sequence_length, _MOST_TOKENS)
    return max(1, min(batch.num_tokens, _MOST_TOKENS) // length), length


def _own_blocks(model: PlannedModel, dtype: torch.dtype) -> Any:
    """Returns the model reduced to its first blocks, with a small vocabulary and the first of the
    adapters that are trained. None if it does not fit."""
    adapters = () if model.frozen is None else model.frozen.adapters[:1]
    is_only_read = model.frozen is not None and not adapters
    if model.hf_config is None or is_only_read or any(of.experts_full for of in adapters):
        return None
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.hf_config)
    text = config.get_text_config()

    def made() -> Any:
        own = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        return with_new_adapters(own, adapters).train()

    try:
        text.vocab_size = _VOCABULARY
        text.pad_token_id = text.bos_token_id = text.eos_token_id = None
        text.num_hidden_layers = min(_NUM_BLOCKS, text.num_hidden_layers)
        # Some configurations, such as that of Falcon-H1, compute the list.
        if len(getattr(text, "layer_types", None) or ()) > text.num_hidden_layers:
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        with torch.device("meta"):
            is_small = _ample_nbytes(made()) <= available_host_nbytes() // 2
        return made() if is_small else None
    except Exception:  # An architecture may raise any exception.
        return None


def _steps(
    model: Any, ids: torch.Tensor, micro_batch: int | None
) -> tuple[dict[str, list[float]], tuple[int, int]]:
    """Returns the seconds of each step of the training thread's tracks, and its sequences and the
    tokens of each: few at first and doubled as far as time allows, as a product in bf16 may take a
    hundred times as long as in fp32."""
    tracer = engine_of(model).counters.tracer
    optimizer = AdamW(model, lr=1e-6)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", model(input_ids=ids, labels=ids, use_cache=False).loss)

    def train(number: int, count: int, length: int) -> float:
        begun_s = time.perf_counter()
        # Products of new numbers of rows, as routing makes them, take longer than repeated ones.
        tokens = torch.randint_like(ids[:count, :length], _VOCABULARY)
        with tracer.step(number):
            if micro_batch is None:
                loss(tokens).backward()
            else:
                forward_backward(model, loss, tokens.split(micro_batch))
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begun_s

    most_count, most_length = ids.shape
    count, length = 1, min(_FEWEST_TOKENS, most_length)
    train(0, count, length)
    spent_s = least_s = train(0, count, length)  # An update takes as long with any tokens.
    while spent_s - least_s < _LONG_S and (count, length) != (most_count, most_length):
        if length < most_length:
            length = min(2 * length, most_length)
        else:
            count = min(2 * count, most_count)
        spent_s = train(0, count, length)
    tracer.start()
    number, left_s = 0, _LEAST_S
    while number < (_LEAST_STEPS if spent_s < _LONG_S else 2) or left_s > 0:
        left_s -= train(number, count, length)
        number += 1
    tracer.stop()
    spans: list[Span] = laid_out(tracer.spans())
    busy: dict[str, list[float]] = {}
    for step in summarize(spans, num_stalls=0):
        for use in step.tracks:
            busy.setdefault(use.track, []).append(use.busy_s)
    return busy, (count, length)
