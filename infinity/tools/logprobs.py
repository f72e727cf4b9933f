"""Log-probabilities of the tokens of sequences, many sequences in one sweep over the weights.

A sequence is a forward of its own, without padding, so its numbers have the bits of
`model(ids).logits.float().log_softmax(-1)` whatever else passes the blocks with it. The head of a
long sequence runs in slices of rows, which round as products of that many rows do: logits of all
rows are never in memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from infinity.api import forward
from infinity.config.extras import release_of
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, UnsupportedError
from infinity.modules.accumulate.module_state import evaluating
from infinity.modules.reading.configuration import positions_of
from infinity.simulate.job import MOST_SEQUENCES

_log = logging.getLogger("infinity")

# Elements of the logits of a slice. fp32 logits and their logarithms take 8 bytes each.
MOST_LOGITS = 1 << 27

T = TypeVar("T")
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """The log-probabilities of one sequence of n tokens, each given the tokens before it.

    logprobs: fp32 (n - 1,) on the host; entry i is that of token i + 1
    top_ids, top_logprobs: int64 and fp32 (n - 1, k), the likeliest first; None without `top_k`
    hidden_states: (n, hidden size) on the host by layer, in the dtype of the computation
    """

    logprobs: torch.Tensor
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)


def rows_at_once(vocab_size: int) -> int:
    """Returns how many rows of logits a slice has."""
    return max(1, MOST_LOGITS // vocab_size)


def score(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    *,
    top_k: int = 0,
    layers: Sequence[int] = (),
    sweep_tokens: int | None = None,
) -> Iterator[TokenScores]:
    """Yields the log-probabilities of each sequence of token ids, in their order.

    Sequences pass the blocks of the offloaded causal language model together, `sweep_tokens` tokens
    at a time (None: 32,768, or 131,072 on a device with memory of its own), so each weight is read
    once a sweep. Hidden states of one sweep are in the memory of the device. A sweep runs in eval
    mode, without gradients. What is yielded first comes after the first sweep.

    sequences: one token id or more each, all below the vocabulary; the first one is not scored
    top_k: as many of the likeliest tokens at each place
    layers: whose hidden states are kept, as transformers counts them: 0 is the input of the first
        block, n the output of block n, and the last one has passed the final norm

    Raises ConfigError, which names the sequence, before anything is read.
    """
    hf_config = causal_of(model).config
    check_options(hf_config, top_k, layers)
    check(hf_config, sequences)
    call = partial(score_sequence, model, top_k=top_k, layers=layers)
    for scores in in_sweeps(model, call, sequences, sweep_tokens):
        yield from scores


def in_sweeps(
    model: nn.Module,
    call: Callable[[Sequence[int]], T],
    sequences: Sequence[Sequence[int]],
    sweep_tokens: int | None,
) -> Iterator[list[T]]:
    """Calls a function with each sequence, in eval mode and without gradients; yields the results
    of each sweep when it is over, and the modes of all modules are as before."""
    for start, end in sweeps([len(ids) for ids in sequences], sweep_tokens, model):
        with evaluating(model):
            found = together(model, call, sequences[start:end])
        yield found


def together(model: nn.Module, call: Callable[[Batch], T], batches: Sequence[Batch]) -> list[T]:
    """As `infinity.forward`; one batch after the other where the model's blocks cannot be passed
    together, with one line that says why."""
    try:
        return forward(model, call, batches)
    except UnsupportedError as error:
        _log.warning("each sequence reads all weights again: %s", error)
    with torch.no_grad():
        return [call(batch) for batch in batches]


def sweeps(
    lengths: Sequence[int], sweep_tokens: int | None, model: nn.Module
) -> Iterator[tuple[int, int]]:
    """Yields the ranges of sequences that pass together. A sequence that is longer than a sweep
    passes alone."""
    if sweep_tokens is None:
        sweep_tokens = engine_of(model).sweep_tokens
    start = count = 0
    for end, length in enumerate(lengths):
        if end > start and (count + length > sweep_tokens or end - start == MOST_SEQUENCES):
            yield start, end
            start, count = end, 0
        count += length
    if start < len(lengths):
        yield start, len(lengths)


def check_options(hf_config: Any, top_k: int, layers: Sequence[int] = ()) -> None:
    """Raises ConfigError for options that a model of this configuration cannot follow."""
    config = hf_config.get_text_config()
    most = config.vocab_size
    if not 0 <= top_k <= most:
        raise ConfigError(f"top_k: expected 0 to {most}, the model's vocabulary; got {top_k}")
    if not set(layers) <= set(range(config.num_hidden_layers + 1)):
        raise ConfigError(
            f"layers: expected numbers from 0 to {config.num_hidden_layers}, the blocks of the "
            f"model; got {', '.join(map(str, layers))}"
        )


def check(
    hf_config: Any,
    sequences: Sequence[Sequence[int]],
    *,
    end: int | None = None,
    name_of: Callable[[int], str] = "sequence {}".format,
) -> None:
    """Raises ConfigError, which names the sequence, for what a model of this configuration of
    transformers cannot score. `end`: the token at which a head reads a sequence, if it has one and
    reads at a certain token."""
    config = hf_config.get_text_config()
    most, positions = config.vocab_size, positions_of(config)
    for number, ids in enumerate(sequences):
        if not ids:
            raise ConfigError(f"{name_of(number)} has no token; expected one or more")
        if end is not None and end not in ids:
            raise ConfigError(
                f"{name_of(number)} has no end token ({end}), at which the head reads a text; "
                "expected a tokenizer that ends each text"
            )
        if not 0 <= min(ids) <= max(ids) < most:
            raise ConfigError(f"{name_of(number)} has a token outside the vocabulary of {most}")
        if positions is not None and len(ids) > positions:
            raise ConfigError(
                f"{name_of(number)} has {len(ids)} tokens, and the model {positions} positions; "
                "cut it"
            )


def causal_of(model: Any) -> Any:
    """Returns the causal language model of transformers, which an adapter may be around."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def score_sequence(
    model: nn.Module,
    ids: Sequence[int],
    *,
    top_k: int,
    layers: Sequence[int] = (),
    temperature: float = 1.0,
    top_below: int | None = None,
) -> TokenScores:
    """Returns the scores of one sequence, of logits that are divided by `temperature`. Only tokens
    below `top_below` are among the likeliest. Runs in the sweep, or alone."""
    device = next(model.parameters()).device
    row, num_rows = torch.tensor([list(ids)], device=device), len(ids) - 1
    scored = partial(_scores, top_k=top_k, temperature=temperature, top_below=top_below)
    causal = causal_of(model)
    options: dict[str, Any] = {}
    if layers:
        import transformers

        # Before 5.23 it gave the state of the next layer for a chosen one.
        is_old = release_of(transformers.__version__) < (5, 23)
        options["output_hidden_states"] = is_old or list(layers)
    at_once = rows_at_once(int(causal.config.get_text_config().vocab_size))
    if num_rows <= at_once or "logits_to_keep" not in inspect.signature(causal.forward).parameters:
        found = model(input_ids=row, use_cache=False, **options)
        scores = scored(found.logits[0, :-1], row[0, 1:])
        return replace(scores, hidden_states=_states(found, layers))
    parts: list[TokenScores] = []
    states: dict[int, torch.Tensor] = {}
    with _run_once(causal):
        for first in range(0, num_rows, at_once):
            rows = torch.arange(first, min(first + at_once, num_rows), device=device)
            found = model(input_ids=row, use_cache=False, logits_to_keep=rows, **options)
            parts.append(scored(found.logits[0], row[0, 1:][rows]))
            states = states or _states(found, layers)
            del found
    names = ("logprobs", "top_ids", "top_logprobs") if top_k else ("logprobs",)
    joined: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in names
    }
    return TokenScores(**joined, hidden_states=states)


def _states(found: Any, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    return {layer: found.hidden_states[layer][0].cpu() for layer in layers}


def labels_of_sequence(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Returns what the head of a reward model or a classifier says of a sequence: fp32 logits
    (labels,) on the host."""
    row = torch.tensor([list(ids)], device=next(model.parameters()).device)
    logits: torch.Tensor = model(input_ids=row, use_cache=False).logits[0]
    return logits.float().cpu()


@contextmanager
def _run_once(causal: Any) -> Iterator[None]:
    """Lets further calls of the model use the hidden states of its first one, so that its own head,
    with its scales and caps, runs in slices."""
    backbone = getattr(causal, causal.base_model_prefix)
    plain = backbone.forward
    made: list[Any] = []

    def run(*args: Any, **options: Any) -> Any:
        if not made:
            made.append(plain(*args, **options))
        return made[0]

    with patch.object(backbone, "forward", run):
        yield


def _scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    top_k: int,
    temperature: float,
    top_below: int | None,
) -> TokenScores:
    found = logits.float()
    if temperature != 1.0:
        found = found / temperature
    found = found.log_softmax(-1)
    logprobs = found.gather(-1, targets[:, None])[:, 0].cpu()
    if not top_k:
        return TokenScores(logprobs=logprobs)
    top = found[:, :top_below].topk(top_k, -1)
    return TokenScores(logprobs=logprobs, top_ids=top.indices.cpu(), top_logprobs=top.values.cpu())
