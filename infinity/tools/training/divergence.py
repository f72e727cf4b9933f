"""The loss of "distill": the divergence of a student's next token from that of its teacher.

The teacher is known by its likeliest tokens at each place. All other tokens are one more outcome of
both distributions, which has the rest of the probability. The loop, its masks and its counts of
tokens are those of SFTTrainer, whose log-probability of a token is replaced by the divergence at
its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch

from infinity.config.schema.train import Distill
from infinity.tools.logprobs import rows_at_once

_MOST_LOG_SUM = -1e-7  # Of the likeliest tokens, whose rounded sum may reach 1.


class Likeliest(NamedTuple):
    """The likeliest tokens of a teacher at the places of one sequence, or of a batch: int64 ids and
    fp32 log-probabilities (..., k)."""

    ids: torch.Tensor
    logprobs: torch.Tensor


def divergence(
    logits: torch.Tensor, teacher: Likeliest, options: Distill
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the divergence at each of n places, and the student's log-probabilities (n, V), both
    in fp32. `logits`: (n, V) of the student."""
    found = logits.float()
    if options.temperature != 1.0:
        found = found / options.temperature
    logprobs = found.log_softmax(-1)
    p = _with_rest(teacher.logprobs, logits.shape[-1])
    q = _with_rest(logprobs.gather(-1, teacher.ids), logits.shape[-1])
    total = torch.zeros(len(logits), device=logits.device)
    if options.forward_kl:
        total = total + options.forward_kl * (p.exp() * (p - q)).sum(-1)
    if options.reverse_kl:
        total = total + options.reverse_kl * (q.exp() * (q - p)).sum(-1)
    return total, logprobs


def _with_rest(logprobs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Appends the logarithm of the probability that all other tokens have together."""
    if logprobs.shape[-1] == vocab_size:
        return logprobs
    log_sum = logprobs.logsumexp(-1, keepdim=True).clamp(max=_MOST_LOG_SUM)
    return torch.cat([logprobs, (-log_sum.expm1()).log()], -1)


# The batch whose loss is computed: what the teacher says of its places, and which are learned.
_now: ContextVar[tuple[Likeliest, torch.Tensor, Distill]] = ContextVar("now")


@contextmanager
def taught(said: Likeliest, labels: torch.Tensor, options: Distill) -> Iterator[None]:
    """Makes the loss that SFTTrainer computes inside that of a batch with these labels."""
    token = _now.set((said, labels[:, 1:] != -100, options))
    try:
        yield
    finally:
        _now.reset(token)


class _DivergenceRows(torch.autograd.Function):
    """The divergence at each place, from hidden states and the head, in slices of rows: logits of
    all rows are never in memory. The backward computes them again.

    Takes the place of TRL's function of the same arguments, which returns log-probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any,
        _temperature: float, _chunk: int, softcap: float | None, scale: float, _outputs: Any,
    ) -> Any:  # fmt: skip
        said, is_learned, options = _now.get()
        # TRL projects all places, or those that are learned.
        places = is_learned if len(hidden) != is_learned.numel() else torch.ones_like(is_learned)
        teacher = Likeliest(said.ids[places], said.logprobs[places])
        ctx.save_for_backward(hidden, weight, bias, *teacher)
        ctx.options, ctx.how = options, (scale, softcap)
        parts = []
        for rows in _slices(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, bias, *ctx.how)
            found, logprobs = divergence(logits, _part(teacher, rows), options)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            parts.append((-found, entropy, logprobs.argmax(-1) == labels[rows]))
        values, entropy, is_top1 = map(torch.cat, zip(*parts, strict=True))
        ctx.mark_non_differentiable(entropy, is_top1)
        return values, entropy, None, None, is_top1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        hidden, weight, bias, *teacher = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        of_rows: list[torch.Tensor] = []
        sums: dict[int, torch.Tensor] = {}  # Of weight and bias, in fp32 if there are slices.
        for rows in _slices(len(hidden), len(weight)):
            inputs = dict(enumerate((hidden[rows], weight, bias)))
            leaves = {n: inputs[n].detach().requires_grad_() for n in inputs if needed[n]}
            of_head = (inputs | leaves).values()
            with torch.enable_grad():
                said = _part(Likeliest(*teacher), rows)
                found, _logprobs = divergence(_logits(*of_head, *ctx.how), said, ctx.options)
            grads = torch.autograd.grad(found, [*leaves.values()], -grad[rows])
            for number, one in zip(leaves, grads, strict=True):
                if number == 0:
                    of_rows.append(one)
                else:
                    sums[number] = sums[number].float() + one if number in sums else one
        of_weight, of_bias = (
            sums[n].to(t.dtype) if n in sums else None for n, t in ((1, weight), (2, bias))
        )
        return torch.cat(of_rows) if needed[0] else None, of_weight, of_bias, *[None] * 6


def _part(teacher: Likeliest, rows: slice) -> Likeliest:
    return Likeliest(teacher.ids[rows], teacher.logprobs[rows])


def _slices(count: int, vocab_size: int) -> list[slice]:
    most = rows_at_once(vocab_size)
    return [slice(start, start + most) for start in range(0, max(count, 1), most)]


def _logits(
    hidden: Any, weight: Any, bias: Any, scale: float, softcap: float | None
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def give_head(model: Any) -> None:
    """Makes TRL's fused head of a model return divergences for log-probabilities. What TRL does
    around its function (hidden states, masks, scales and caps of architectures) stays TRL's."""
    from trl.trainer import utils

    plain = utils.add_fused_lm_head
    names = plain.__globals__ | {"_ChunkedLogProbFunction": _DivergenceRows}
    add: Callable[..., None] = FunctionType(plain.__code__, names, argdefs=plain.__defaults__)
    add(model, outputs=("log_probs", "entropy", "is_top1"))
