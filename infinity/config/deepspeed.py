"""A DeepSpeed configuration as a swap-tier file, every key of it accounted for.

    translation = translate(table)
    translation.entries    one for every key of the file: same, mapped, ignored, refused or unknown
    translation.settings   the swap-tier file that comes of it

Pure. What each key means is in `infinity.config.deepspeed_keys`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from infinity.config.deepspeed_keys import RULES, Facts, Outcome, Rule
from infinity.config.problems import InvalidConfigError, Problem
from infinity.config.source import ConfigSource, read_file
from infinity.config.values import nearest
from infinity.errors import ConfigError

_log = logging.getLogger("infinity")

_BY_KEY = {rule.key: rule for rule in RULES}
# Sections that only hold other keys; they need no entry of their own.
_SECTIONS = {
    place.rpartition(".")[0] for place in _BY_KEY if "." in place
} | {"zero_optimization", "optimizer", "scheduler", "checkpoint"}  # fmt: skip
# Written first: keys elsewhere in the file override it.
_FIRST = ("zero_optimization.stage", "optimizer.type", "scheduler.type")
_LAST = ("scheduler.params.warmup_max_lr", "zero_optimization.offload_optimizer.ratio")


@dataclass(frozen=True, slots=True)
class Translation:
    """Entries in the file's order, and the table of a swap-tier file.

    `settings` has `[train]` only if the file has the number of steps, without which the section is
    not complete; otherwise its keys are in `train`.
    """

    entries: tuple[Outcome, ...]
    settings: dict[str, Any]
    train: dict[str, Any]

    @property
    def lost(self) -> tuple[Outcome, ...]:
        """The entries without an equal here."""
        return tuple(entry for entry in self.entries if entry.is_lost)


def table_of_deepspeed(table: Mapping[str, Any], source: ConfigSource) -> dict[str, Any] | None:
    """Returns the DeepSpeed configuration that a table is, or that an accelerate configuration
    names or describes; None for any other table.

    Raises ConfigError for a file that accelerate's table names and that cannot be read, and for an
    accelerate configuration of something else.
    """
    if "zero_optimization" in table or "train_micro_batch_size_per_gpu" in table:
        return dict(table)
    if "compute_environment" not in table and "distributed_type" not in table:
        return None
    kind, plugin = table.get("distributed_type"), table.get("deepspeed_config")
    if kind != "DEEPSPEED" or not isinstance(plugin, Mapping):
        raise ConfigError(
            f"{source.name}: an accelerate configuration of {kind}; expected DEEPSPEED with "
            "deepspeed_config, or a file that `infinity new` writes"
        )
    if "deepspeed_config_file" in plugin:
        return read_file(source.directory / str(plugin["deepspeed_config_file"]))[0]
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        device = plugin.get(f"offload_{part}_device", "none")
        if device != "none":
            path = plugin.get(f"offload_{part}_nvme_path")
            on_drive = {"nvme_path": path} if device == "nvme" else {}
            zero[f"offload_{part}"] = {"device": device, **on_drive}
    found: dict[str, Any] = {"zero_optimization": zero}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if plugin.get(key) not in (None, "auto"):
            found[key] = plugin[key]
    precision = table.get("mixed_precision", "no")
    if precision != "no":
        found[str(precision)] = {"enabled": True}
    return found


def translated(table: Mapping[str, Any], source: ConfigSource) -> Translation | None:
    """Returns the translation of a table of DeepSpeed's or accelerate's, and logs it; None for any
    other table. Raises ConfigError that names the keys without an equal here."""
    theirs = table_of_deepspeed(table, source)
    if theirs is None:
        return None
    found = translate(theirs)
    refuse_lost(found, source)
    num_set = sum(bool(entry.settings) for entry in found.entries)
    _log.warning(
        "%s is a DeepSpeed configuration: %d of its %d keys are set here, the others need nothing "
        "(`infinity config import` says why)",
        source.name, num_set, len(found.entries),
    )  # fmt: skip
    return found


def refuse_lost(found: Translation, source: ConfigSource) -> None:
    """Raises ConfigError for keys that are refused here or unknown to DeepSpeed."""
    if found.lost:
        raise InvalidConfigError(
            (Problem(entry.key, entry.reason) for entry in found.lost), name=source.name
        )


def translate(table: Mapping[str, Any]) -> Translation:
    """Walks every key of a DeepSpeed configuration through the table of rules."""
    if isinstance(is_on := table.get("zero_optimization"), bool):  # The spelling of its first page.
        table = {**table, "zero_optimization": {"stage": int(is_on)}}
    facts = Facts(table)
    entries = tuple(_entry(key, value, facts) for key, value in _leaves(table, ""))
    settings: dict[str, Any] = {}
    for entry in sorted(entries, key=lambda found: (found.key in _LAST) - (found.key in _FIRST)):
        for key, value in entry.settings.items():
            _put(settings, key, value)
    train = settings.get("train", {})
    is_complete = "steps" in train and "batch_size" in train
    if not is_complete:
        settings.pop("train", None)
    return Translation(entries, settings, {} if is_complete else train)


def naming_theirs(found: Translation, error: InvalidConfigError) -> InvalidConfigError:
    """Returns the error with the keys of both files."""
    theirs = {place: entry.key for entry in found.entries for place in entry.settings}
    return InvalidConfigError(
        (
            Problem(f"{theirs[problem.place]}, our {problem.place}", problem.text)
            if problem.place in theirs
            else problem
            for problem in error.problems
        ),
        name=error.name,
    )


def rule_of(key: str) -> Rule | None:
    """The rule of a dotted key, its own or that of the section around it."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    around = key
    while around:
        around = around.rpartition(".")[0]
        if around in _BY_KEY and _BY_KEY[around].nested:
            return _BY_KEY[around]
    return None


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and (key in _SECTIONS or key not in _BY_KEY):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _entry(key: str, value: Any, facts: Facts) -> Outcome:
    rule = rule_of(key)
    if rule is not None:
        found = rule.outcome(value, facts)
    elif key not in _SECTIONS:
        found = Outcome("unknown", _unknown(key))
    elif value is None or value == {}:
        found = Outcome("ignored", "it is empty")
    else:
        found = Outcome("refused", "expected a table")
    return replace(found, key=key, value=value)


def _unknown(key: str) -> str:
    section, _, name = key.rpartition(".")
    siblings = [
        rule.key.rpartition(".")[2] for rule in RULES if rule.key.rpartition(".")[0] == section
    ]
    near = nearest(name, siblings)
    where = f" in {section}" if section else ""
    return f"DeepSpeed has no such key{where}" + (f"; did you mean {near!r}?" if near else "")


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key. `tiers.nvme[].path` adds an entry, once for each path."""
    if key == "tiers.nvme[].path":
        drives = settings.setdefault("tiers", {}).setdefault("nvme", [])
        if {"path": value} not in drives:
            drives.append({"path": value})
        return
    section, _, name = key.rpartition(".")
    settings.setdefault(section, {})[name] = value


def to_markdown() -> str:
    """The table of keys, which the site shows. Neighbours that share a reason share a row."""
    rows = ["| DeepSpeed | | swap-tier file | |", "| --- | --- | --- | --- |"]
    for (usual, ours, reason), rules in groupby(
        RULES, lambda rule: (rule.usual, rule.ours, rule.reason)
    ):
        keys = ", ".join(
            f"`{rule.key}{'.*' * (rule.nested and (rule.usual == 'refused' or '.' in rule.key))}`"
            for rule in rules
        )
        rows.append(f"| {keys} | {usual} | {f'`{ours}`' if ours else ''} | {reason} |")
    return "\n".join(rows) + "\n"
