"""The teacher of "distill", its likeliest tokens at each place of a sequence, and the loss.

They are those of a file of `infinity score --top-k`, or of a second, frozen model, which scores the
sequences of a step in one sweep before the student's pass. All other tokens are one more outcome of
both distributions, which has the rest of the probability. The loop, its masks and its counts of
tokens are those of SFTTrainer, whose log-probability of a token is replaced by the divergence of
the student at its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from infinity.checkpoint import weight_source
from infinity.config.hub import in_hub_cache
from infinity.config.schema.train import Distill
from infinity.errors import ConfigError, refusing, reporting
from infinity.tools.logprobs import check_options, in_sweeps, rows_at_once, score_sequence
from infinity.tools.training.base_identity import identify
from infinity.tools.training.tokenizers import Tokenizer, open_same

_ROWS_AT_ONCE = 64  # Of a Parquet file.
_MOST_SUM = 1.001  # Of rounded probabilities.


class Teacher:
    """The probabilities of a teacher for sequences, by token ids. Made before a tier is touched.

    vocab_size, tokenizer: those of the student
    model: on meta, and offloaded before the first step; None reads the file
    directory: where a copy of what a file says lies, by places, as long as this object

    Raises ConfigError for a teacher of another tokenizer, and for a file of another kind.
    """

    def __init__(
        self,
        options: Distill,
        vocab_size: int,
        tokenizer: Tokenizer,
        model: Any = None,
        directory: Path | None = None,
    ) -> None:
        self.options = options
        self._model = model
        self._vocab_size = vocab_size
        # By digest: what a model has said, or the place in the file and the number of places.
        self._said: dict[bytes, Likeliest | tuple[int, int]] = {}
        if model is not None:
            check_options(model.config, options.top_k)
            if options.top_k > vocab_size:
                raise ConfigError(
                    f"train.distill.top_k: expected at most {vocab_size}, the student's "
                    f"vocabulary; got {options.top_k}"
                )
            path = in_hub_cache(options.teacher)
            open_same(tokenizer, path, "train.distill.teacher")
            self.sha256 = identify(weight_source(path)).samples_sha256
            return
        if options.temperature != 1.0:
            raise ConfigError(
                f"train.distill.temperature: {options.teacher} has log-probabilities at a "
                "temperature of 1, and at another the rest beside the likeliest tokens is unknown; "
                "expected 1.0, or the directory of the teacher"
            )
        self._width = 0  # Of the likeliest tokens at each place of the file.
        self._file: Any = tempfile.TemporaryFile(dir=directory, prefix=".teacher-")  # noqa: SIM115
        self.sha256 = self._read()

    # -- A file ------------------------------------------------------------------------------------

    def _read(self) -> str:
        """Copies what the file says to one that is read by places. Returns its digest."""
        path, start, largest, digest = self.options.teacher, 0, 0, hashlib.sha256()
        what = f"train.distill.teacher: {path} cannot be read"
        remedy = (
            "; expected a directory, or a .jsonl or .parquet file of `infinity score --top-k N`"
        )
        with refusing(what, Exception, remedy=remedy):  # A foreign table makes pyarrow raise any.
            for number, (tokens, ids, logprobs) in enumerate(_rows_of(path)):
                count = len(tokens) - 1
                if ids.ndim != 2 or ids.shape != logprobs.shape or not 0 < count == len(ids):
                    raise ValueError(f"record {number + 1} has no likeliest tokens")
                is_known = ((-np.inf < logprobs) & (logprobs <= 0)).all()
                if ids.min() < 0 or not is_known or (np.exp(logprobs).sum(-1) > _MOST_SUM).any():
                    raise ValueError(
                        f"record {number + 1} has a token below 0, a log-probability that is no "
                        "finite number up to 0, or probabilities of more than 1 at a place"
                    )
                if number and ids.shape[1] != self._width:
                    raise ValueError(f"record {number + 1} is of another --top-k than record 1")
                largest = max(largest, int(ids.max()))
                self._width = ids.shape[1]
                content, key = np.stack([ids, logprobs.view(np.int32)]).tobytes(), _key(tokens)
                digest.update(key + content)
                if key not in self._said:
                    self._write(content)
                    self._said[key] = start, count
                    start += 8 * ids.size
                elif self._content(self._said[key]) != content:
                    raise ValueError(f"record {number + 1} says other things of an earlier one")
        if largest >= self._vocab_size:
            raise ConfigError(
                f"train.distill.teacher: {path} has token {largest}, and the student "
                f"{self._vocab_size} tokens; expected a teacher with the student's tokenizer"
            )
        self._write(b"")
        return digest.hexdigest()

    def _content(self, place: Any) -> bytes:
        self._write(b"")
        return os.pread(self._file.fileno(), 8 * place[1] * self._width, place[0])

    def _write(self, content: bytes) -> None:
        with reporting("copy", self.options.teacher):
            self._file.write(content)
            if not content:
                self._file.flush()

    def refuse_unknown(self, datasets: Sequence[Any]) -> None:
        """Raises ConfigError for a sequence that the teacher's file does not have."""
        if self._model is not None:
            return
        for dataset in filter(None, datasets):
            is_plain = "input_ids" in dataset.column_names
            rows = dataset.select_columns("input_ids") if is_plain else dataset
            for number, row in enumerate(rows):
                if _key(row["input_ids"]) not in self._said:
                    raise ConfigError(
                        f"train.distill.teacher: {self.options.teacher} says nothing of sequence "
                        f"{number + 1} of the data, which has {len(row['input_ids'])} tokens. "
                        "Score what this file learns: infinity score TEACHER FILE.toml --top-k N "
                        "-o SCORES.parquet"
                    )

    # -- A model -----------------------------------------------------------------------------------

    def listen(self, batches: Sequence[Any]) -> None:
        """Scores the sequences of these batches together, if the teacher is a model, and forgets
        all others."""
        if self._model is None:
            return
        sequences = [ids for batch in batches for ids in _sequences(batch)]
        wanted = {_key(ids): ids for ids in sequences}
        self._said = {key: self._said[key] for key in wanted.keys() & self._said.keys()}
        missing = [ids for key, ids in wanted.items() if key not in self._said]
        options, following = self.options, iter(missing)
        call = partial(
            score_sequence, self._model, top_k=options.top_k, top_below=self._vocab_size,
            temperature=options.temperature,
        )  # fmt: skip
        for scores in in_sweeps(self._model, call, missing, None):
            for found in scores:
                assert found.top_ids is not None and found.top_logprobs is not None
                self._said[_key(next(following))] = Likeliest(found.top_ids, found.top_logprobs)

    def of(self, batch: Any) -> Likeliest:
        """Returns what the teacher says of a batch, (sequences, places, k), on its device. Places
        of padding have any numbers."""
        sequences = _sequences(batch)
        if self._model is not None and any(_key(ids) not in self._said for ids in sequences):
            self.listen([batch])  # Of an evaluation.
        said = [self._likeliest(self._said[_key(ids)]) for ids in sequences]
        length, device = batch["input_ids"].shape[1] - 1, batch["input_ids"].device
        ids = torch.zeros(len(said), length, said[0].ids.shape[-1], dtype=torch.int64)
        logprobs = torch.full(ids.shape, -100.0)
        for row, one in enumerate(said):
            ids[row, : len(one.ids)], logprobs[row, : len(one.ids)] = one
        return Likeliest(ids.to(device), logprobs.to(device))

    def _likeliest(self, said: Likeliest | tuple[int, int]) -> Likeliest:
        if isinstance(said, Likeliest):
            return said
        start, count = said
        shape = (2, count, self._width)
        mapped = np.memmap(self._file, np.int32, mode="r", offset=start, shape=shape)
        return Likeliest(
            torch.from_numpy(mapped[0].astype(np.int64)),
            torch.from_numpy(mapped[1].view(np.float32).copy()),
        )


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).digest()


def _sequences(batch: Any) -> list[list[int]]:
    """Returns the sequences of a batch without their padding, which is behind them."""
    mask = batch.get("attention_mask")
    rows: list[list[int]] = batch["input_ids"].tolist()
    if mask is None:
        return rows
    return [ids[:count] for ids, count in zip(rows, mask.sum(-1).tolist(), strict=True)]


def _rows_of(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the tokens, and int32 ids and fp32 log-probabilities (n - 1, k), of each record."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        names = ["tokens", "top_tokens", "top_logprobs"]
        for batch in parquet.ParquetFile(path).iter_batches(_ROWS_AT_ONCE, columns=names):
            for row in range(len(batch)):
                tokens, ids, logprobs = (batch.column(name)[row].values for name in names)
                count = len(tokens) - 1
                flat = (ids.flatten().to_numpy(), logprobs.flatten().to_numpy())
                yield tokens.to_numpy(), *_rows(*flat, count)
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield row["tokens"], *_rows(row["top_tokens"][1:], row["top_logprobs"][1:], None)


def _rows(ids: Any, logprobs: Any, count: int | None) -> tuple[Any, Any]:
    found = np.asarray(ids, np.int32), np.asarray(logprobs, np.float32)
    return found if count is None else (found[0].reshape(count, -1), found[1].reshape(count, -1))


# -- The loss: the divergence of a student's next token from that of its teacher -------------------


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
