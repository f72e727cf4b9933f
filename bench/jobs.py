"""A GPT-2-like model in training, and what some of its work takes: for benches of steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import moved_since, process_io
from transformers import GPT2Config, GPT2LMHeadModel

import infinity


class Job:
    """A model of `layers` x `width`, made on meta and offloaded, so that it is never whole in
    memory, and its optimizer."""

    def __init__(
        self,
        config: dict[str, Any],
        layers: int,
        width: int,
        sequence: int,
        *,
        vocabulary: int = 50257,
        checkpointing: bool = False,
        max_norm: float | None = 1.0,
    ) -> None:
        shape = GPT2Config(
            n_layer=layers, n_embd=width, n_head=width // 64, n_positions=sequence,
            vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        with infinity.init_empty_weights(config):
            model = GPT2LMHeadModel(shape)
        self.model = infinity.offload(model, config, seed=0).train()
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = infinity.AdamW(self.model, lr=1e-4, max_grad_norm=max_norm)
        self.engine = infinity.engine_of(self.model)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, micro_batches: Sequence[torch.Tensor]) -> float:
        """One step, one micro-batch after the other. Returns its loss."""
        losses = []
        for ids in micro_batches:
            loss = self.loss(ids) / len(micro_batches)
            loss.backward()
            losses.append(float(loss.detach()))
        self.update()
        return sum(losses)

    def layer_major_step(self, micro_batches: Sequence[torch.Tensor]) -> float:
        """One step, block by block for all micro-batches. Returns its loss."""
        losses = infinity.forward_backward(
            self.model, lambda ids: self.loss(ids) / len(micro_batches), micro_batches
        )
        self.update()
        return sum(map(float, losses))


@contextmanager
def measured(engine: Any, counters: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Gives a table that has, after the `with` block, what it took: seconds, seconds of processors,
    bytes from and to drives, and the growth of the engine's `counters`."""
    found: dict[str, Any] = {}
    before, io = engine.counters.snapshot(), process_io()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    yield found
    found |= {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
    after = engine.counters.snapshot()
    found |= moved_since(io)
    found |= {name: after.get(name, 0) - before.get(name, 0) for name in counters}


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}
