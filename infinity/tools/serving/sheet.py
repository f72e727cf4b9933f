"""The sheet of an adapter: log-probabilities of prompts, and of what faults would make of them.

A server is asked for the log-probabilities of the same tokens. Its fault is not known beforehand,
but most are one of a few: a kind of module, or a layer, is dropped or scaled, or factors are read
in another order. For each of these the sheet has the log-probabilities of a few prompts, computed
by this engine with factors that are changed accordingly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from infinity.api import close, gather, offload
from infinity.bounded import MalformedError, read_json, table_of
from infinity.checkpoint.durable import replace_file
from infinity.checkpoint.huggingface.import_weights import WeightSource
from infinity.errors import ConfigError, refusing
from infinity.integrations.card import versions
from infinity.integrations.server_layouts import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    adapter_layers,
    factors_of,
)
from infinity.tools.logprobs import TokenScores, causal_of, check, score_sequence, together
from infinity.tools.training.base_identity import identify, sha256_of

Locate = Literal["none", "kinds", "layers", "modules"]
SHEET_NAME = "infinity_sheet.json"
SCHEMA = 1
ALL = "all modules"
MISSING, HALVED, DOUBLED = "missing", "halved", "doubled"
NUM_PROMPTS, PROMPT_TOKENS = 64, 64
_FAULT_PROMPTS = 8  # For each fault.
_DIGITS = 5

LogProbs = list[list[float]]  # Of the second and later tokens of each prompt.
Pair = tuple[torch.Tensor, torch.Tensor]  # A and B of a layer, as PEFT stores them.
Change = Callable[[torch.Tensor, torch.Tensor, int], Pair]  # The int is the number of experts.


@dataclass(frozen=True, slots=True)
class FaultSignature:
    """The log-probabilities of the first prompts where the modules of a group have a fault."""

    group: str
    fault: str
    log_probs: LogProbs


@dataclass(frozen=True, slots=True)
class Sheet:
    """Token ids of prompts, and log-probabilities of their tokens, in nats, teacher forced.

    digests: SHA-256 of the adapter's files, of the prompts, and of the tokens of its run; of the
        base as in `infinity_base.json`
    groups: the modules of each group that `faults` names
    """

    versions: dict[str, str]
    digests: dict[str, str]
    prompts: list[list[int]]
    adapter: LogProbs
    base: LogProbs
    groups: dict[str, list[str]]
    faults: list[FaultSignature]

    def write(self, path: Path) -> None:
        """Writes the sheet durably. Raises OSError."""
        replace_file(path, json.dumps({"schema": SCHEMA, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, path: Path) -> Sheet:
        """Raises ConfigError if there is no such file, or if it is no sheet."""
        expectation = (
            f"expected the {SHEET_NAME} that `infinity export-adapter` writes beside an adapter"
        )
        if not path.is_file():
            raise ConfigError(f"{path} is no file; {expectation}")
        what, kinds = f"{path} is no sheet of log-probabilities", (TypeError, KeyError)
        with refusing(what, MalformedError, *kinds, remedy=f"; {expectation}"):
            table = table_of(read_json(path), "it")
            if table.pop("schema", None) != SCHEMA:
                raise MalformedError(f"it has no schema {SCHEMA}")
            table["faults"] = [FaultSignature(**fault) for fault in table["faults"]]
            sheet = cls(**table)
            expected = [len(prompt) - 1 for prompt in sheet.prompts]
            rows = [sheet.adapter, sheet.base, *(fault.log_probs for fault in sheet.faults)]
            for values in rows:
                if [len(row) for row in values] != expected[: len(values)] or not values:
                    raise MalformedError("its numbers are not those of its prompts")
        return sheet


def _log_probs(model: Any, rows: Sequence[tuple[Sequence[int], bool]]) -> LogProbs:
    """Returns the log-probability of every token of a prompt but the first, given those before it,
    of pairs of a prompt and whether it is asked with the adapter. The base is read once for all."""

    def call(row: tuple[Sequence[int], bool]) -> TokenScores:
        with nullcontext() if row[1] else model.disable_adapter():
            return score_sequence(model, row[0], top_k=0)

    scores = together(model, call, rows)
    return [[round(value, _DIGITS) for value in found.logprobs.tolist()] for found in scores]


def make_sheet(
    adapter: Path, source: WeightSource, adapted: Any, prompts: list[list[int]], *,
    data: dict[str, str], config: Any = None, locate: Locate = "layers",
    progress: Callable[..., None] = lambda **_: None,
) -> Sheet:  # fmt: skip
    """Computes the sheet of a saved adapter over its offloaded base.

    source, adapted: as `read_changes` gives them; the model is offloaded here, and closed
    prompts: token ids, at least two for each prompt
    data: digests of what the adapter has learned
    config: of the tiers, as `infinity.offload` takes it
    locate: the groups whose faults the sheet tells apart: "kinds" of modules, also "layers", also
        single "modules". Each fault takes one forward, which reads the base once
    progress: takes `description`, what is computed, and the passes over the base: `completed` ones,
        and `total`
    """
    identity, layers = identify(source), _faulty_layers(adapted)
    release = table_of(read_json(adapter / CONFIG_NAME), CONFIG_NAME).get("peft_version")
    groups = _groups(list(layers), locate)
    planned = [
        (group, fault)
        for group, names in groups.items()
        for fault in _faults_of(group, [layers[name] for name in names], names)
    ]
    check(causal_of(adapted).config, prompts)
    asked = [(prompt, True) for prompt in prompts]
    total = 1 + len(planned)
    offload(adapted, config, weights=source.path)
    try:
        adapted.eval()
        progress(description="adapter and base", completed=0, total=total)
        both = _log_probs(adapted, [*asked, *((prompt, False) for prompt in prompts)])
        faults = []
        for number, (group, fault) in enumerate(planned, start=1):
            progress(description=f"{group}: {fault}", completed=number)
            with _changed([layers[name] for name in groups[group]], FAULTS[fault][1]):
                values = _log_probs(adapted, asked[:_FAULT_PROMPTS])
                faults.append(FaultSignature(group, fault, values))
    finally:
        close(adapted)
    return Sheet(
        versions=versions() | {"adapter_of_peft": str(release or "before 0.18")},
        digests={
            "adapter": sha256_of(adapter / CONFIG_NAME, adapter / WEIGHTS_NAME),
            "base_table": identity.table_sha256,
            "base_samples": identity.samples_sha256,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            **data,
        },
        prompts=prompts,
        adapter=both[: len(prompts)],
        base=both[len(prompts) :],
        groups=groups,
        faults=faults,
    )


# -- Which modules, and which faults ---------------------------------------------------------------


def _faulty_layers(adapted: Any) -> dict[str, Any]:
    """Returns the layers of two factors, by the name of the weight that they change."""
    from peft.tuners.lora.layer import Linear, ParamWrapper

    return {
        name.removesuffix(".weight"): parts[0]
        for name, parts in adapter_layers(adapted).items()
        if isinstance(parts[0], (Linear, ParamWrapper)) and not parts[0].use_dora["default"]
    }


def _groups(names: list[str], locate: Locate) -> dict[str, list[str]]:
    """Returns the modules of each group, every set of modules once."""
    groups: dict[str, list[str]] = {ALL: names} if names and locate != "none" else {}
    for name in names if locate != "none" else []:
        place = re.match(r"(.*?\.(\d+))\.(.*)", name)
        if place is None:
            continue
        groups.setdefault(place[3], []).append(name)
        if "experts." in name and "shared" not in name:
            groups.setdefault("routed experts", []).append(name)
        if locate in ("layers", "modules"):
            groups.setdefault(f"layer {place[2]}", []).append(name)
        if locate == "modules":
            groups.setdefault(name, []).append(name)
    found: dict[str, list[str]] = {}
    for group, members in groups.items():
        if members not in found.values():
            found[group] = members
    return found


def _faults_of(group: str, layers: list[Any], names: list[str]) -> list[str]:
    """Returns the faults that change something in a group. Without all modules there is the
    base."""
    kinds, most = ["scale"], max(getattr(layer, "num_experts", 1) for layer in layers)
    if group != ALL and not group.startswith("layer "):
        kinds += ["experts" if most > 1 else "matrix", *["more than ten"] * (most > 10)]
        kinds += ["halves"] * (most > 1 and all(name.endswith("gate_up_proj") for name in names))
    found = [fault for fault, (kind, _) in FAULTS.items() if kind in kinds]
    return found[1:] if group == ALL else found


def _in_order(order: Callable[[int], list[int]]) -> Change:
    def change(a: torch.Tensor, b: torch.Tensor, count: int) -> Pair:
        index = order(count)
        return a.reshape(count, -1, a.shape[-1])[index], b.reshape(len(b), -1, count)[..., index]

    return change


def _without_last_half(a: torch.Tensor, b: torch.Tensor, count: int) -> Pair:
    kept = torch.arange(count, device=b.device) < (count + 1) // 2
    return a, b.reshape(len(b), -1, count) * kept


# What each fault is one of, and what it makes of A and B, in any shape of theirs.
FAULTS: dict[str, tuple[str, Change]] = {
    MISSING: ("scale", lambda a, b, _: (a, b * 0.0)),
    HALVED: ("scale", lambda a, b, _: (a, b * 0.5)),
    DOUBLED: ("scale", lambda a, b, _: (a, b * 2.0)),
    "B read as its transpose": ("matrix", lambda a, b, _: (a, b.T)),
    "rows of B read as its columns": ("matrix", lambda a, b, _: (a, b.reshape(*b.T.shape).T)),
    "columns of B read by expert, then rank": (
        "experts", lambda a, b, count: (a, b.reshape(len(b), count, -1).transpose(1, 2)),
    ),
    "experts shifted by one": ("experts", _in_order(lambda n: [*range(1, n), 0])),
    "experts shifted back by one": ("experts", _in_order(lambda n: [n - 1, *range(n - 1)])),
    "experts in reverse order": ("experts", _in_order(lambda n: [*range(n)][::-1])),
    "last half of the experts missing": ("experts", _without_last_half),
    "experts in the order of their numbers as text": (
        "more than ten", _in_order(lambda n: sorted(range(n), key=str)),
    ),
    "gate and up swapped": ("halves", lambda a, b, _: (a, torch.cat(b.chunk(2)[::-1]))),
    "gate and up interleaved": (
        "halves", lambda a, b, _: (a, b.reshape(2, -1, b.shape[-1]).transpose(0, 1)),
    ),
}  # fmt: skip


@contextmanager
def _changed(layers: list[Any], change: Change) -> Iterator[None]:
    """Gives layers of an offloaded model other factors for a block, one layer in memory at a
    time."""
    kept = []
    for layer in layers:
        with _factors_of(layer) as pair:
            kept.append((pair[0].clone(), pair[1].clone()))
            _copy(change(*kept[-1], getattr(layer, "num_experts", 1)), pair)
    try:
        yield
    finally:
        for layer, before in zip(layers, kept, strict=True):
            with _factors_of(layer) as pair:
                _copy(before, pair)


@contextmanager
def _factors_of(layer: Any) -> Iterator[Pair]:
    weights = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad(), gather(weights, modify=True):
        yield factors_of(layer)


def _copy(values: Pair, targets: Pair) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value.reshape(target.shape))
