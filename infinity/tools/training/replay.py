"""`infinity replay`: steps of a run, computed again and compared with what the run has noted.

A run leaves receipts: a line of metrics.jsonl for each step, facts in its marker, the checksums of
a frozen base in shards.json, checkpoints and exported weights. A replay goes on from the nearest
checkpoint before a step, or from the beginning, by the code of `infinity train`. It writes to
directories of its own, which it removes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from rich.console import Console
from typing_extensions import override

from infinity.checkpoint.durable import make_directory
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, tensor_bytes
from infinity.checkpoint.run.directory import find_checkpoint, list_checkpoints, step_of
from infinity.checkpoint.run.load import Loaded, first_difference, read_program
from infinity.checkpoint.run.references import SHARDS_NAME, check_reference
from infinity.config import JobConfig, SwapConfig
from infinity.config.paths import runs_remedy
from infinity.config.schema import changed
from infinity.errors import ConfigError, CorruptionError, InfinityError, NonFiniteError
from infinity.tools.training.checkpoints import changes_of_settings, identity_of, is_of_run
from infinity.tools.training.job import Job
from infinity.tools.training.latents import cache_of
from infinity.tools.training.metrics import OF_RANKS, RECEIPT, MetricsReader, differences
from infinity.tools.training.output import SUMMARY_NAME, config_of_run, locked, receipts_of_run
from infinity.tools.training.program import Run, opened
from infinity.tools.training.report import Line, Step, finite, read_summary

_NAME = ".replay"  # The directory of a replay in that of the run, and in its swap directories.
_PLACES = ("tiers", "placement", "io", "schedule", "distributed")

Found = dict[str, Any]  # Of `replay`.


def replay(
    directory: Path, step: int | None = None, *, overrides: Sequence[str] = (),
    places: SwapConfig | None = None, begin: str | None = None, console: Console,
) -> Found:  # fmt: skip
    """Computes steps of the run in `directory` up to `step`, by default its last, again.

    Returns for JSON the `differences` from what the run has noted, causes first: `step` (None for
    the run as a whole), `what` and `text`; the number of comparisons by what was `compared`; and
    `notes` of what may differ here without a fault. Ends after the first step that differs.

    overrides: KEY=VALUE, in place of the run's settings
    places: has the tiers, placement, io, schedule and ranks, in place of the run's
    begin: a checkpoint, or "start"; by default the nearest one before the step

    Raises ConfigError for a directory of no run, and for a step that it has not made.
    """
    directory = directory.resolve()
    settings = _of_run(directory)
    reader = MetricsReader(settings.output.metrics_path)
    reader.read()
    lines = {line["step"]: line for line in reader.lines}
    last = max(lines, default=0) if step is None else step
    identity = identity_of(settings, (receipts_of_run(directory) or [{}])[-1])
    commits = chain(*map(list_checkpoints, settings.commit_directories))
    saved = {step_of(path): path for path in commits if is_of_run(path, identity)}
    saved |= {step_of(path): path for path in list_checkpoints(settings.checkpoint_directory)}
    found: Found = {"run": str(directory), "step": last, "differences": [], "notes": []}
    found |= {"after": 0, "compared": {}}
    try:
        loaded = _start_of(last, saved, begin)
        found["after"] = after = 0 if loaded is None else loaded.step
        _refuse_missing(lines, after + 1, last)
        receipts = _receipts_of(directory, after, last)
        has_accepted = any(r["after"] == after and r["has_accepted"] for r in receipts)
        config = _of_run(directory, overrides, places, receipts[0])
        if config.placement.reads_in_place != settings.placement.reads_in_place:
            # Checkpoints, and digests of the state, hold another part of the weights.
            saved = {}
            for line in lines.values():
                line.pop("state", None)
        before: Any = settings if loaded is None or has_accepted else loaded
        for text in changes_of_settings(before, config).values():
            _note(found, None, "settings", text)
        make = partial(Replay, lines=lines, saved=saved, receipts=receipts, found=found)
        if not found["differences"]:
            _compute(config, make, loaded, directory, console, has_accepted=has_accepted)
    except CorruptionError as error:
        _note(found, None, "bytes", str(error))
    except NonFiniteError as error:
        _note(found, error.step, "loss", str(error))
    except ConfigError:  # Another file of settings, base or data may not even load: that is said.
        if not any(row["what"] in ("settings", "base", "data") for row in found["differences"]):
            raise
    return found | {"is_equal": not found["differences"]}


def _note(found: Found, step: int | None, what: str, text: str) -> None:
    found["differences"].append({"step": step, "what": what, "text": text})


def _of_run(
    directory: Path,
    overrides: Sequence[str] = (),
    places: SwapConfig | None = None,
    receipt: Mapping[str, Any] | None = None,
) -> JobConfig:
    """Returns the settings of the run, whose directory may have been moved; with the `receipt` of
    its steps those of its replay."""
    config = config_of_run(directory, overrides)
    if config is None:
        raise ConfigError(
            f"{directory} is no output directory of a run of `infinity train`"
            f"{runs_remedy(directory)}"
        )
    config = changed(config, {"output.directory": directory})
    if receipt is None:
        return config
    if config.train.grpo is not None and config.train.grpo.is_served:
        raise ConfigError(
            f"train.grpo.sampler: {config.train.grpo.sampler} samples other tokens each time, so "
            "this run cannot be computed again; expected one that generates by itself"
        )
    if places is not None:
        keys = ("micro_batch", "tile", "experts")  # These change bits, and so does the last one.
        kept = {f"schedule.{key}": getattr(config.schedule, key) for key in keys}
        kept["distributed.reduce_dtype"] = config.distributed.reduce_dtype
        config = changed(config, {name: getattr(places, name) for name in _PLACES})
        config = changed(config, kept)
    nvme = [changed(tier, {"path": tier.path / _NAME}) for tier in config.tiers.nvme]
    own: dict[str, Any] = {"tiers.nvme": tuple(nvme), "checkpoint": None, "output.notify": None}
    own |= {"output.directory": directory / _NAME / "run", "output.export": False}
    own |= {"train.report_to": (), "train.keep_best": False, "train.sample": None}
    if config.train.diffusion is not None:  # What the run has encoded is used again.
        own["train.diffusion.cache"] = cache_of(config)
    if config.train.threads == "auto":
        own["train.threads"] = receipt["threads"]
    if config.schedule.tile == "auto" and receipt.get("tile"):  # Other budgets may cut otherwise.
        own["schedule.tile"] = receipt["tile"]
    return changed(config, own)


def _refuse_missing(lines: Mapping[int, Line], first: int, last: int) -> None:
    missing = sorted({first, last} - lines.keys())
    if missing:
        made = f"{min(lines)} to {max(lines)}" if lines else "none"
        raise ConfigError(
            f"the run has no line of step {missing[0]}; expected one of its steps, {made}. A run "
            "that went on from a checkpoint in another directory is replayed --from that one"
        )


def _start_of(last: int, saved: Mapping[int, Path], begin: str | None) -> Loaded | None:
    """Returns the checkpoint that a replay goes on from, None for the start of the run."""
    if begin == "start":
        return None
    nearest = max((step for step in saved if step < last), default=None)
    if begin is None:
        return None if nearest is None else read_program(saved[nearest])
    if not Path(begin).is_dir():
        raise ConfigError(f"--from {begin}: expected the directory of a checkpoint, or start")
    loaded = read_program(find_checkpoint(Path(begin)))
    if loaded.step >= last:
        raise ConfigError(f"{loaded.path} is not before step {last}; expected an earlier one")
    return loaded


def _receipts_of(directory: Path, after: int, last: int) -> list[dict[str, Any]]:
    """Returns the receipts of the processes that have made the steps between."""
    of_run = receipts_of_run(directory)
    changes = [r["after"] for r in of_run if r["after"] > after and r["has_accepted"]]
    if changes:
        raise ConfigError(
            f"the settings before step {changes[0]} are lost: the run went on with others, by "
            "--accept-changes; expected a later step, from a checkpoint of that one or later"
        )
    found = [receipt for receipt in of_run if receipt["after"] < last]
    ends = [*(receipt["after"] for receipt in found[1:]), last]
    found = [receipt for receipt, end in zip(found, ends, strict=False) if end > after]
    if not found:
        raise ConfigError(f"{directory}: the run left no receipt; an older infinity has made it")
    return found


def _compute(
    config: JobConfig, make: Any, loaded: Loaded | None, directory: Path, console: Console, *,
    has_accepted: bool,
) -> None:  # fmt: skip
    """Makes the steps, by `make`, and compares them."""
    start, places = None if loaded is None else loaded.path, [t.path for t in config.tiers.nvme]
    made = [path.parent for path in places if not path.parent.is_dir()]
    place = config.output.directory.parent
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":  # Other ranks write nothing there.
            make_directory(place)
            stack.callback(os.close, locked(place))
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            shutil.rmtree(config.output.directory, ignore_errors=True)  # A killed replay left it.
        try:
            for swap in made:
                swap.mkdir(exist_ok=True)
            with opened(
                [config], make, console, resume_from=start, accept_changes=has_accepted
            ) as (run,):
                run.go(directory)
        finally:
            for swap in (*places, *made):
                with suppress(OSError):  # Another rank uses it, or has removed it.
                    swap.rmdir()


class Replay(Run):
    """A run that compares each step with its line, and ends after one of them, or after the first
    that differs.

    lines, saved: of the run that is replayed: its lines and its checkpoints, by step
    receipts: of the processes that have made them
    found: is added to
    """

    def __init__(
        self, config: JobConfig, job: Job, console: Console, _: Any, *,
        lines: Mapping[int, Line], saved: Mapping[int, Path], receipts: Sequence[dict[str, Any]],
        found: Found,
    ) -> None:  # fmt: skip
        super().__init__(config, job, console, None)
        self._lines, self._saved, self._found = lines, saved, found
        self._receipts = receipts
        now = job.receipt()
        self._left_out = OF_RANKS if any(r["ranks"] != now["ranks"] for r in receipts) else ()
        for was in receipts:
            self._compare_facts(was, now)

    def _compare_facts(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in sorted(was["versions"].keys() | now["versions"].keys()):
            here, there = (table["versions"].get(name) for table in (now, was))
            self._compare(None, "versions", here, there, f"{name} is {{}} and was {{}}")
        for key, text in (
            ("table_sha256", "its tensors have other names, dtypes or shapes"),
            ("samples_sha256", "tensors of equal names and shapes have other values"),
        ):
            here, there = ((table["base"] or {}).get(key) for table in (now, was))
            self._compare(None, "base", here, there, f"{self._job.plan.path}: {text}")
        here, there = ({"tokens": of["tokens_sha256"], **of.get("others", {})} for of in (now, was))
        for key in there:
            text = f"the SHA-256 of the {key} is {{}} and was {{}}"
            self._compare(None, "data", here.get(key), there[key], text)

    def _compare(self, step: int | None, what: str, now: Any, was: Any, text: str) -> None:
        compared = self._found["compared"]
        compared[what] = compared.get(what, 0) + 1
        if now != was:
            _note(self._found, step, what, text.format(now, was))

    def _has_difference(self) -> bool:
        """Whether a step differs, or a fact without which none is worth computing, on any rank.
        All ranks call it, and have the differences of all of them afterwards."""
        of_all = chain(*self._of_all_ranks("what differs", self._found["differences"]))
        rows = self._found["differences"] = [*{str(row): row for row in of_all}.values()]
        return any(row["step"] or row["what"] in ("base", "data") for row in rows)

    def _of_all_ranks(self, what: str, own: Any) -> list[Any]:
        topology = self._job.rank.topology
        return [own] if topology is None else topology.links.all_gather_objects(what, own)

    def go(self, directory: Path) -> None:
        """Makes the steps, and compares them with those of the run in `directory`."""
        for steps in self._of_all_ranks("the checkpoints", sorted(self._saved)):
            self._saved = {step: self._saved[step] for step in steps if step in self._saved}
        if self._has_difference():
            return
        self.set_up()
        now = self._job.receipt()
        for was, key in product(self._receipts, ("device", "threads", "ranks", "tiles")):
            if now[key] != was.get(key, now[key]):  # An earlier version has noted no tiles.
                self._found["notes"].append(
                    f"{key}: {now[key]} here, {was[key]} in the run; bits are promised on one kind "
                    "of device, with one number of threads, of ranks and of tiles"
                )
        shards = self._engine.store.shards
        if shards is not None and (directory / SHARDS_NAME).is_file():
            check_reference(directory, shards)
        self.train()
        is_compared = not self._has_difference() and self._job.rank.is_first
        step, summary = read_summary(directory / SUMMARY_NAME)
        if is_compared and summary.get("export_directory") and step == self._found["step"]:
            self._export("the weights, to compare them,")
            for file in sorted(self._config.output.directory.glob("*.safetensors")):
                self._compare_tensors(file.name, _first_other(file, directory / file.name))
        self._has_difference()  # Waits for rank 0, which may need this rank's shards.

    @override
    def _is_stopped(self) -> bool:
        is_over = self._has_difference() or self.num_steps >= self._found["step"]
        return super()._is_stopped() or is_over

    @override
    def is_followed(self, step: int) -> bool:
        return step in self._saved or super().is_followed(step)

    @override
    def end_step(self, step: Step, *, is_evaluated: bool) -> dict[str, float]:
        # Ranks have a part of the state each.
        has_digest = "state" in self._lines.get(step.number, ()) and self._job.rank.count == 1
        self._digest_due_s = 0.0 if has_digest else math.inf
        return super().end_step(step, is_evaluated=is_evaluated)

    @override
    def report_step(self, step: Step) -> None:
        super().report_step(step)
        if self._job.rank.is_first and step.number in self._lines:
            was, now = self._lines[step.number], json.loads(json.dumps(finite(self._line)))
            found = differences(was, now)
            for key in RECEIPT:
                if key in was and key in now and key not in self._left_out:
                    self._compare(step.number, key, found.get(key), None, "{}")
        path = self._saved.get(step.number)
        if path and all(self._of_all_ranks("whether a checkpoint is there", path.is_dir())):
            try:
                self._compare_tensors(path.name, first_difference(path, self.model))
            except InfinityError:
                if path.is_dir():  # Else the run has removed it meanwhile.
                    raise

    def _compare_tensors(self, what: str, name: str | None) -> None:
        self._compare(self.num_steps, what, name, None, "{} is not what the run has written")


def _first_other(file: Path, other: Path) -> str | None:
    """Returns the name of the first tensor that two files have not alike."""
    with SafetensorsReader(file) as first, SafetensorsReader(other) as second:
        for name in sorted(first.tensors.keys() | second.tensors.keys()):
            infos = [reader.tensors.get(name) for reader in (first, second)]
            if infos[0] is None or infos[1] is None or infos[0].shape != infos[1].shape:
                return name
            if tensor_bytes(first.read(name)) != tensor_bytes(second.read(name)):
                return name
    return None
