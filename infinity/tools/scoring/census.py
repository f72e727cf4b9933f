"""A census of the router over records: how often each expert is chosen, and with what weight.

The two numbers of an expert are the scores of Wang et al., "Let the Expert Stick to His Last"
(ESFT), 2024 (arXiv 2407.01906): its share of the choices in its layer ("tokens", the token
selection ratio), and of the router's weights in it ("gate", the average gate score, relative to the
sum over the layer). They are over all tokens, as are those of the paper, whose samples are of one
length.
"""

from __future__ import annotations

import inspect
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from infinity.checkpoint.durable import replace_file, sync_directory, sync_file
from infinity.errors import ConfigError
from infinity.modules.tiling.experts import is_packed
from infinity.modules.tiling.split import modules_of
from infinity.tools.training.base_identity import BaseIdentity

T = TypeVar("T")

# By name of a module of experts: float64 (2, experts), the number of choices and sum of weights.
Counts = dict[str, torch.Tensor]

_now = threading.local()  # Sequences that pass a block together run in threads of their own.


def counted(call: Callable[[Sequence[int]], T]) -> Callable[[Sequence[int]], tuple[T, Counts]]:
    """Returns `call`, which calls a model, with the counts of that call beside its result. There
    are some inside of `watching` alone."""

    def both(ids: Sequence[int]) -> tuple[T, Counts]:
        _now.counts = {}
        return call(ids), _now.counts

    return both


@contextmanager
def watching(model: nn.Module) -> Iterator[None]:
    """Counts the choices of the router. Raises ConfigError for a model without experts whose module
    gets these."""

    def note(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args
        chosen, count = taken[2].flatten().cpu(), int(module.num_experts)
        sums = [torch.ones(len(chosen)), taken[3].flatten().cpu()]
        rows = [chosen.bincount(numbers.double(), count) for numbers in sums]
        _now.counts[name] = _now.counts.get(name, 0) + torch.stack(rows)

    prefix = "base_model.model." if hasattr(model, "peft_config") else ""
    hooks = [
        module.register_forward_pre_hook(partial(note, name.removeprefix(prefix)), with_kwargs=True)
        for name, module in modules_of(model)
        if is_packed(module) and len(inspect.signature(type(module).forward).parameters) == 4
    ]
    if not hooks:
        raise ConfigError(
            f"--routing: {type(model).__name__} has no packed experts that get the router's "
            "choice; leave it out"
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_begun(output: Path) -> bool:
    """Whether there are sums of a run that was ended, whose census may be there, too."""
    return _file_of(output, 0).parent.is_dir()


def num_counted(output: Path, num_rows: int) -> int:
    """Returns for how many of the first rows of a run that was ended there are sums."""
    found = (int(file.stem) for file in _file_of(output, 0).parent.glob("*.safetensors"))
    return max((number for number in found if number <= num_rows), default=0)


def counts_after(output: Path, num_rows: int) -> Counts:
    """Returns the sums over as many records, of a run that was ended."""
    return load_file(_file_of(output, num_rows)) if num_rows else {}


def add(totals: Counts, records: Sequence[Counts], output: Path, num_rows: int) -> None:
    """Adds the counts of further records to those of `num_rows`, in the order of the records, and
    puts the sums on the drive, before the rows of these; those of `num_rows` stay until then."""
    for counts in records:
        for name, own in counts.items():
            totals[name] = totals.get(name, 0) + own
    before, file = _file_of(output, num_rows), _file_of(output, num_rows + len(records))
    file.parent.mkdir(exist_ok=True)
    for other in {*file.parent.iterdir()} - {before}:
        other.unlink()
    save_file(totals, file)
    sync_file(file)
    sync_directory(file.parent)


def forget(output: Path) -> None:
    """Removes the sums of a run whose output is there."""
    shutil.rmtree(_file_of(output, 0).parent, ignore_errors=True)


def _file_of(output: Path, num_rows: int) -> Path:
    return output.with_name(output.name + ".routing") / f"{num_rows:08}.safetensors"


def write_census(
    file: Path, totals: Counts, base: BaseIdentity, num_records: int, num_tokens: int
) -> None:
    """Writes the census: for each module of experts the shares of its experts, which add up to
    one. Raises ConfigError for a file with other content."""
    from infinity.private.transformers import dot_natural_key

    experts = {}
    for name, (choices, weights) in sorted(
        totals.items(), key=lambda item: dot_natural_key(item[0])
    ):
        shares = {"tokens": choices / choices.sum(), "gate": weights / weights.sum()}
        experts[name] = {key: share.tolist() for key, share in shares.items()}
    counts = {"schema": 1, "records": num_records, "tokens": num_tokens}
    text = json.dumps(counts | {"base": asdict(base), "experts": experts}, indent=1)
    if file.exists() and file.read_text() != text:
        raise ConfigError(f"--routing {file} exists; give another name")
    replace_file(file, text)
