"""A run of `infinity score`: opens the model frozen, scores what is left, writes as it goes.

The rows of a sweep are written together and synced before the next sweep. A run that was killed
goes on behind the last complete row, if model, adapter, data and options are the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infinity.api import close
from infinity.bounded import MalformedError, parse_json, read_json, table_of
from infinity.checkpoint import weight_source
from infinity.checkpoint.durable import replace_file, sync_directory, sync_file
from infinity.config import SwapConfig
from infinity.config.hub import in_hub_cache
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, refusing, reporting
from infinity.modules.reading.configuration import config_of_directory, end_of_head, names_scorer
from infinity.modules.tiling.layers import Tiled
from infinity.modules.tiling.split import modules_of
from infinity.sizes import counted
from infinity.tools.logprobs import (
    TokenScores,
    check,
    check_options,
    in_sweeps,
    labels_of_sequence,
    score_sequence,
)
from infinity.tools.pretrained import (
    choose_config,
    for_directory,
    from_pretrained,
    with_saved_adapter,
)
from infinity.tools.scoring import census
from infinity.tools.scoring.sequences import ScoredSequence, name_in, read_sequences
from infinity.tools.training.adapter import num_labels_of
from infinity.tools.training.base_identity import BaseIdentity, identify, sha256_of
from infinity.tools.training.output import locked, unlock
from infinity.tools.training.report import finite
from infinity.tools.training.settle import tokenizer_of
from infinity.tools.training.tokenizers import open_tokenizer

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The texts that a run scores, and how. `output` ends with .jsonl or .parquet."""

    model: Path
    data: tuple[Path, ...]
    output: Path
    adapter: Path | None = None
    config: Path | None = None
    dtype: str | None = None
    top_k: int = 0
    layers: tuple[int, ...] = ()
    max_length: int | None = None
    sweep_tokens: int | None = None
    routing: Path | None = None  # Of a census of the experts.
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The result of a run. Log-probabilities are natural logarithms, of scored tokens."""

    num_records: int
    num_tokens: int
    mean_logprob: float
    perplexity: float
    seconds: float
    read_nbytes: int  # From drives, by this process.
    resumed_at: int  # Records that were there already.

    def __str__(self) -> str:
        return (
            f"{counted(self.num_records, 'records')}, {counted(self.num_tokens, 'tokens')}, "
            + ("" if math.isnan(self.perplexity) else f"perplexity {self.perplexity:.4g}, ")
            + f"in {self.seconds:,.0f} s"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers by name, None for one that is not finite."""
        found: dict[str, Any] = finite(asdict(self))
        return found


class ScoreRows:
    """The rows of a run in `<output>.rows.jsonl`, of which `end` makes the output, and beside them
    in `<output>.made-of.json` what they follow from."""

    def __init__(self, request: Request, made_of: dict[str, Any]) -> None:
        self._target = request.output
        name = request.output.name
        self._rows = request.output.with_name(name + ".rows.jsonl")
        self._layers = request.output.with_name(name + ".layers")  # Of hidden states.
        self._note = request.output.with_name(name + ".made-of.json")
        self._made_of = made_of
        self.sums: list[tuple[float, int]] = []  # Of each row, and how many tokens are in it.

    @contextmanager
    def open(self) -> Iterator[None]:
        """Finds the rows of a run that was ended, and cuts what the next sweep writes again. No
        other process writes rows during the block. Raises ConfigError for rows of another run, of a
        complete one, and of one that another process makes."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(self._target)
        try:
            self._refuse_others()
            for left in self._layers.glob(".tmp*"):  # Of a file that was being written.
                left.unlink()
            self._cut()
            yield
        finally:
            unlock(lock, self._target)

    def begin(self, tiling: str | None) -> None:
        """Notes what the next rows follow from: the tiling of the opened model, too. Raises
        ConfigError for rows of a model with other tiles."""
        self._made_of["tiling"] = tiling
        self._refuse_others()
        replace_file(self._note, json.dumps(self._made_of, indent=2))

    def _refuse_others(self) -> None:
        there = next((path for path in (self._target, self._rows) if path.exists()), None)
        if there is None:
            return
        if not self._note.is_file():
            raise ConfigError(
                f"{there} exists, and not from `infinity score`, which leaves {self._note.name} "
                "beside it; move it away"
            )
        remedy = "; give another --output, or remove it and the rows beside it"
        with refusing(f"{self._note} cannot be read", MalformedError, OSError, remedy=remedy):
            before = table_of(read_json(self._note), "it")
        differing = [k for k, value in self._made_of.items() if before.get(k) != value]
        if unknown := [key for key in differing if key not in before]:
            raise ConfigError(
                f"{there} was made by another release, which did not note {', '.join(unknown)}; "
                "give another --output, or remove it"
            )
        if differing:
            raise ConfigError(
                f"{there} was made with another {' and another '.join(differing)}; give another "
                "--output, or remove it"
                + ("; tiles follow from schedule.tile and the budgets" * ("tiling" in differing))
            )
        if there == self._target:
            raise ConfigError(f"{there} is complete; remove it to score again")

    def _cut(self) -> None:
        if not self._rows.exists():
            return
        ends = [0]
        with self._rows.open("rb+") as file:
            # A crash may leave any bytes behind the rows that were synced.
            with suppress(ValueError, TypeError):
                for line in file:
                    row = table_of(parse_json(line[: line.index(b"\n")]), "it")
                    self.sums.append(_sum_of(row))
                    ends.append(ends[-1] + len(line))
            if self._made_of["routing"]:
                del self.sums[census.num_counted(self._target, len(self.sums)) :]
            file.truncate(ends[len(self.sums)])

    def keep_states(self, rows: Sequence[dict[str, Any]], scores: Sequence[TokenScores]) -> None:
        """Writes the hidden states of each row to a file of its own, and its name to the row. They
        are on the drive before the row."""
        self._layers.mkdir(exist_ok=True)
        for row, found in zip(rows, scores, strict=True):
            path = self._layers / f"{row['record']:08}.safetensors"
            states = {f"layer.{layer}": state for layer, state in found.hidden_states.items()}
            save_file({name: state.contiguous() for name, state in states.items()}, path)
            sync_file(path)
            row["hidden_states"] = f"{self._layers.name}/{path.name}"
        sync_directory(self._layers)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows, and waits until they are on the drive."""
        with self._rows.open("a", encoding="utf-8") as file:
            lines = (json.dumps(finite(row), ensure_ascii=False) for row in rows)
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        self.sums += map(_sum_of, rows)

    def end(self) -> None:
        """Makes the output of the rows."""
        if self._target.suffix == ".parquet":
            partial = self._target.with_name(self._target.name + ".partial")
            with self._rows.open(encoding="utf-8") as file:
                _write_table(partial, map(json.loads, file))
            partial.replace(self._target)
            self._rows.unlink()
        else:
            self._rows.replace(self._target)
        sync_directory(self._target.parent)


def _sum_of(row: dict[str, Any]) -> tuple[float, int]:
    found = row.get("sum_logprob", 0.0)
    return math.nan if found is None else float(found), int(row.get("num_scored", 0))


def _perplexity(mean: float) -> float:
    return math.inf if mean < -700 else math.exp(-mean)  # e^709 is the last power below infinity.


def _write_table(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Writes rows as Parquet, with the numbers that Python reads: readers of JSON for tables round
    some to a neighbour. An `id` is a text there."""
    import pyarrow as pa
    from pyarrow import parquet

    numbers, tokens = pa.list_(pa.float64()), pa.list_(pa.int64())
    kinds = {
        "record": pa.int64(), "id": pa.string(), "tokens": tokens, "logprobs": numbers,
        "num_scored": pa.int64(), "sum_logprob": pa.float64(), "mean_logprob": pa.float64(),
        "perplexity": pa.float64(), "is_answer": pa.list_(pa.int8()),
        "top_tokens": pa.list_(tokens), "top_logprobs": pa.list_(numbers),
        "scores": numbers, "hidden_states": pa.string(),
    }  # fmt: skip
    writer: Any = None
    while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        for row in batch:
            row["id"] = None if row["id"] is None else str(row["id"])
        schema = writer.schema if writer else pa.schema([(name, kinds[name]) for name in batch[0]])
        writer = writer or parquet.ParquetWriter(path, schema)
        writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    if writer is not None:
        writer.close()
    sync_file(path)


def run(request: Request, *, note: Callable[[int, int, int], None] = lambda *_: None) -> Total:
    """Scores all records. `note(tokens done, tokens in all, bytes read)` is called behind each
    sweep. Raises InfinityError; what cannot be scored is refused before weights are read."""
    begun_s = time.perf_counter()
    directory = in_hub_cache(request.model.expanduser())
    hf_config = config_of_directory(directory, trusts_code=request.trust_remote_code)
    vocab_size = int(hf_config.get_text_config().vocab_size)
    # Options first: it takes minutes to tokenise many records.
    if request.output.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--output {request.output}: expected a .jsonl or .parquet file")
    routing = request.routing
    if routing is not None and (
        (routing.exists() and not census.is_begun(request.output))
        or routing.resolve() == request.output.resolve()
    ):
        raise ConfigError(f"--routing {routing} exists, or is --output; give another name")
    if routing is not None and not routing.resolve().parent.is_dir():
        raise ConfigError(f"--routing {routing}: its directory does not exist; make it first")
    chosen: Any = request.config
    config = SwapConfig.load(chosen) if chosen else choose_config(directory, is_frozen=True)
    config = for_directory(with_saved_adapter(config, request.adapter), directory, request.dtype)
    num_labels = None if request.adapter is None else num_labels_of(request.adapter)
    if names_scorer(hf_config):
        num_labels = hf_config.num_labels
    if num_labels is not None and (request.top_k or request.layers):
        raise ConfigError(
            f"{request.adapter or directory} scores sequences, not tokens; leave out --top-k and "
            "--layers"
        )
    check_options(hf_config, request.top_k, request.layers)
    sequences = read_sequences(request.data, directory, vocab_size, request.max_length)
    texts, has_head = [sequence.ids for sequence in sequences], num_labels is not None
    check(
        hf_config, texts,
        end=end_of_head(hf_config) if has_head else None,
        name_of=lambda number: name_in(request.data, sequences[number]),
    )  # fmt: skip
    base = identify(weight_source(directory))
    output = ScoreRows(request, _made_of(request, directory, config, base, sequences))
    num_tokens, read_nbytes = sum(len(sequence.ids) for sequence in sequences), 0
    with reporting("write", request.output), output.open():
        resumed_at = len(output.sums)
        counts = None if routing is None else census.counts_after(request.output, resumed_at)
        if left := sequences[resumed_at:]:
            model = _open(request, directory, config, num_labels)
            try:
                output.begin(_tiling_of(model))
                read_nbytes = _score(model, left, request, output, counts, note)
            finally:
                close(model)
        if counts is not None and routing is not None:
            census.write_census(routing, counts, base, len(sequences), num_tokens)
        output.end()
        if counts is not None:
            census.forget(request.output)
    total, count = map(sum, zip(*output.sums, strict=True))
    mean = total / count if count else math.nan
    return Total(
        num_records=len(sequences), num_tokens=num_tokens, mean_logprob=mean,
        perplexity=_perplexity(mean), seconds=time.perf_counter() - begun_s,
        read_nbytes=read_nbytes, resumed_at=resumed_at,
    )  # fmt: skip


def _open(request: Request, directory: Path, config: SwapConfig, num_labels: int | None) -> Any:
    """Returns the frozen model in eval mode, with its adapter; with `num_labels` one that scores
    sequences."""
    from transformers import AutoModelForSequenceClassification

    options: dict[str, Any] = {}
    if num_labels is not None:
        options = {"model_class": AutoModelForSequenceClassification, "num_labels": num_labels}
    if num_labels is not None and request.adapter is not None:
        fast = open_tokenizer(tokenizer_of(directory).value).for_records()  # As in training.
        ids = (fast.pad_token_id, fast.eos_token_id)
        options["pad_token_id"] = next((token for token in ids if token is not None), None)
    model = from_pretrained(
        directory, config, is_frozen=True, trust_remote_code=request.trust_remote_code, **options
    )
    return model.eval()


def _tiling_of(model: Any) -> str | None:
    """Returns a digest of where the weights of the model are cut, and of how tiles of experts
    compute; None without tiles. These decide bits, and `schedule.tile = "auto"` does not name
    them."""
    cuts = [
        (name, module.starts, vars(module.tiles[0])["products"])
        for name, module in modules_of(model)
        if isinstance(module, Tiled)
    ]
    return hashlib.sha256(json.dumps(cuts).encode()).hexdigest() if cuts else None


def _score(
    model: Any,
    left: Sequence[ScoredSequence],
    request: Request,
    output: ScoreRows,
    counts: census.Counts | None,
    note: Callable[[int, int, int], None],
) -> int:
    """Returns the bytes read. `counts`: of experts so far, for a census."""
    counters, following, done = engine_of(model).counters, iter(left), 0
    texts = [sequence.ids for sequence in left]
    num_tokens = sum(map(len, texts))

    def read_nbytes() -> int:
        return int(counters.snapshot().get("nvme_read_nbytes", 0))

    call: Callable[[Sequence[int]], Any] = partial(labels_of_sequence, model)
    if model.get_output_embeddings() is not None:
        call = partial(score_sequence, model, top_k=request.top_k, layers=request.layers)
    with nullcontext() if counts is None else census.watching(model):
        for found in in_sweeps(model, census.counted(call), texts, request.sweep_tokens):
            scores, of_records = zip(*found, strict=True)
            scored = list(itertools.islice(following, len(scores)))
            rows = [row_of(*pair) for pair in zip(scored, scores, strict=True)]
            if request.layers:
                output.keep_states(rows, scores)
            if counts is not None:
                census.add(counts, of_records, request.output, len(output.sums))
            output.write(rows)
            done += sum(len(sequence.ids) for sequence in scored)
            note(done, num_tokens, read_nbytes())
    return read_nbytes()


def row_of(sequence: ScoredSequence, scores: TokenScores | torch.Tensor) -> dict[str, Any]:
    """Returns the row of a sequence. Entry i of `logprobs` is that of token i; the first token has
    none. Sums and means are over the answer where the record has one. A reward model has `scores`
    of the whole sequence, one for each label."""
    row: dict[str, Any] = {
        "record": sequence.record, "id": sequence.name, "tokens": sequence.ids
    }  # fmt: skip
    if isinstance(scores, torch.Tensor):
        return row | {"scores": scores.tolist()}
    logprobs = scores.logprobs.tolist()
    mask = sequence.mask[1:] if sequence.mask is not None else [1] * len(logprobs)
    scored = [value for value, is_scored in zip(logprobs, mask, strict=True) if is_scored]
    mean = sum(scored) / len(scored) if scored else None
    row |= {
        "logprobs": [None, *logprobs],
        "num_scored": len(scored),
        "sum_logprob": sum(scored, 0.0),
        "mean_logprob": mean,
        "perplexity": None if mean is None else _perplexity(mean),
    }
    if sequence.mask is not None:
        row["is_answer"] = sequence.mask
    if scores.top_ids is not None and scores.top_logprobs is not None:
        row["top_tokens"] = [[], *scores.top_ids.tolist()]
        row["top_logprobs"] = [[], *scores.top_logprobs.tolist()]
    return row


def _made_of(
    request: Request,
    directory: Path,
    config: SwapConfig,
    base: BaseIdentity,
    sequences: Sequence[ScoredSequence],
) -> dict[str, Any]:
    """Returns what the rows follow from, but for how many pass together."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(json.dumps([sequence.ids, sequence.mask, sequence.name]).encode())
    return {
        "model": str(directory),
        "weights": [base.table_sha256, base.samples_sha256],
        "config.json": sha256_of(directory / "config.json"),
        "adapter": request.adapter and sha256_of(*sorted(request.adapter.glob("adapter_*"))),
        "tokens": digest.hexdigest(),
        "dtype": config.precision.compute_dtype,
        "top_k": request.top_k,
        "layers": list(request.layers) or None,
        "routing": request.routing is not None or None,
    }
