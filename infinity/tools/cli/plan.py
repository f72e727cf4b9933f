"""`infinity plan`: the command around `infinity.tools.plan`."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from infinity.errors import ConfigError
from infinity.plan.files import refuse_model_as_file, refuse_no_model, refuse_unknown, shipped_in
from infinity.tools.cli.options import (
    HARDWARE,
    arg,
    flag,
    note,
    opt,
    progress_bar,
    reply,
    wants_json,
    with_options,
)

if TYPE_CHECKING:
    from infinity.config import SwapConfig
    from infinity.plan.directory import ModelDirectory

_RANK = 16  # Of the adapter of a table.
# The tiers of a model by name without a file: state that fits stays in host memory.
_DEFAULTS: dict[str, Any] = {
    "tiers": {"host": {"capacity": "85%"}},
    "precision": {"compute": "bfloat16"},
}
_ADAPTER_MICRO_BATCH = 8  # Sequences; of 2,048 tokens, enough for each of some hundred experts.


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of the command line."""

    config: Path | None = arg(
        "CONFIG", "A configuration file; optional with --model.", default=None
    )
    model: str | None = opt("NAME", "A shipped model, a .toml of shapes, or a model directory.")
    params: str | None = opt("N", "A GPT-like model of this size, such as 1T.")
    hardware: str | None = HARDWARE
    lora: int | None = opt(
        "RANK", "Freeze the model; train a LoRA adapter of this rank. Default: all weights.", min=1
    )
    score: bool = flag(
        "--score", "Plan `infinity score`: sweeps over frozen weights, without a backward."
    )
    experts: bool = flag("--experts", "With an adapter: adapt the routed experts, too.")
    drives: int | None = opt(
        "N", "Drives of the frozen checkpoint. Default: those of its files, or all.", min=1
    )
    tokens: int | None = opt(
        "N",
        "Tokens of a micro-batch (of a rank); with an adapter, of a step. "
        "Default: as the file, or 16 sequences.",
        min=1,
    )
    sequence: int | None = opt("N", "Tokens of a sequence. Default: as the file, or 2,048.", min=1)
    accumulation: int | None = opt("N", "Micro-batches a step. Default: the file's, or 1.", min=1)
    data_tokens: str | None = opt("N", "Tokens of all data, such as 10M, to predict the whole run.")
    examples: str | None = opt("N", "Sequences of all data, such as 50k, to predict the whole run.")
    ranks: int | None = opt(
        "N", "Ranks on the node. Default: one for each device of --hardware.", min=1
    )
    nodes: int = opt("N", "Machines, each with --ranks.", default=1, min=1)
    overrides: list[str] | None = opt("KEY=VALUE", "Replace one value of the file.", "--set")
    plot: Path | None = opt("PNG", "Draw the simulated step.")
    html: Path | None = opt(
        "FILE",
        "Write a page for the browser: the simulated step, idle time by cause, bytes by link.",
    )
    show: bool = flag("--list", "List the machines and models that are shipped.")
    table: bool = flag(
        "--table", "Which model on which machine: all shipped ones, or --model, --hardware."
    )
    full: bool = flag("--full", "With --table: all weights, no adapter.")
    write: Path | None = opt(
        "FILE",
        "Write the file that `infinity new` writes for --model DIR, .toml; "
        "with --table, the table, .md or .json.",
    )

    @property
    def by_name(self) -> bool:
        """Whether the model is another than that of the file."""
        return self.model is not None or self.params is not None


@with_options(PlanOptions)
def plan(asked: PlanOptions) -> None:
    """Predict a training step without running it: what fits, how long, and what would help.

    The model is that of CONFIG, one given by its shapes, or a directory that was downloaded. The
    machine is this one, measured in some ten seconds, or one described in a file. Nothing is
    trained and nothing stays on the drives.
    """
    if asked.show:
        found = {folder: shipped_in(folder) for folder in ("hardware", "models")}
        lines = [f"{folder}: {', '.join(names)}" for folder, names in found.items()]
        reply(found, "\n".join(lines))
        return
    if asked.model is not None:
        from infinity.config.hub import in_hub_cache  # Slow to import.

        asked = replace(asked, model=str(in_hub_cache(Path(asked.model))))
    if asked.table:
        _print_table(asked)
    elif asked.full:
        raise ConfigError("--full is for --table; a plan without --lora is one of all weights")
    else:
        _refuse(asked)
        if asked.write is not None:
            _write(asked, asked.write)
        else:
            _predict(asked)


def _refuse(asked: PlanOptions) -> None:
    """Raises ConfigError for inputs that exclude each other, or that name no model, and for a model
    in the place of a file."""
    config, has_name = asked.config, asked.model is not None
    if has_name and asked.params is not None:
        raise ConfigError("expected --model or --params, got both; leave one out")
    if config is None and not has_name and asked.params is None:
        raise ConfigError(
            "expected CONFIG, --model or --params; `infinity plan --list` has names, and --table "
            "says which model trains on which machine"
        )
    if asked.score and (asked.lora, asked.experts, asked.accumulation) != (None, False, None):
        raise ConfigError("--score trains nothing; leave out --lora, --experts and --accumulation")
    if asked.score and (asked.ranks not in (None, 1) or asked.nodes > 1 or asked.write):
        raise ConfigError("--score is for one rank; leave out --ranks, --nodes and --write")
    if asked.data_tokens is not None and asked.examples is not None:
        raise ConfigError("expected --data-tokens or --examples, got both; leave one out")
    if config is not None and not config.is_file():
        refuse_model_as_file(config)


def _write(asked: PlanOptions, file: Path) -> None:
    """Writes the file of `infinity new` for a directory."""
    from infinity.tools.cli.new import new

    if asked.config is not None or asked.model is None or not Path(asked.model).is_dir():
        raise ConfigError(
            f"--write {file}: expected --model and the directory of a model, because the file "
            "names it; config.json alone is enough"
        )
    new(
        directory=Path(asked.model), rank=asked.lora, experts=asked.experts,
        sequence=asked.sequence, ranks=asked.ranks, hardware=asked.hardware, out=file,
    )  # fmt: skip


def _directory_of(asked: PlanOptions) -> ModelDirectory | None:
    """Returns the directory that --model names, if it is one. Raises ConfigError for a name that is
    neither a directory nor shipped."""
    if asked.hardware is not None:
        refuse_unknown("hardware", asked.hardware)
    if asked.model is None:
        return None
    if not Path(asked.model).is_dir():
        refuse_unknown("models", asked.model)
        return None
    refuse_no_model(Path(asked.model))
    from infinity.plan.directory import read_directory

    return read_directory(Path(asked.model))


def _config_of(asked: PlanOptions, directory: ModelDirectory | None) -> SwapConfig:
    """Returns the configuration of the file, or of the defaults, with the options."""
    from infinity.config import SwapConfig
    from infinity.config.paths import refuse_absent_model_of, with_located_model
    from infinity.config.source import ConfigSource, override, read_file
    from infinity.config.values import PLACED_KINDS
    from infinity.plan.hardware import load_hardware
    from infinity.tools.training.settle import settle

    if asked.config is not None:
        table, source = read_file(asked.config)
    else:
        table, source = copy.deepcopy(_DEFAULTS), ConfigSource()
        if asked.hardware is not None and load_hardware(asked.hardware).nvme is not None:
            table["tiers"]["nvme"] = [{"path": "/mnt/nvme"}]
            table["placement"] = {kind: ["host", "nvme"] for kind in PLACED_KINDS}
    for text in asked.overrides or []:
        override(table, text)
    if asked.lora is not None:
        override(table, f"adapter.rank={asked.lora}")
    if asked.experts:
        override(table, "adapter.experts=true")
    if not asked.score and directory is not None and directory.stored.is_quantised:
        table.setdefault("adapter", {})  # Codes cannot be trained.
    if asked.config is None and "adapter" in table:
        # The order in which adapters train: all micro-batches pass a block together.
        table.setdefault("schedule", {}).setdefault("micro_batch", _ADAPTER_MICRO_BATCH)
        tiers = ["host", "nvme"] if "nvme" in table["tiers"] else ["host"]
        table.setdefault("placement", {}).setdefault("activations", tiers)
    config = with_located_model(SwapConfig.from_table(table, source))
    if not asked.by_name:
        refuse_absent_model_of(config)
    return settle(config)


def _predict(asked: PlanOptions) -> None:
    # Before torch is imported: a wrong path is named at once.
    directory = _directory_of(asked)
    config = _config_of(asked, directory)
    from infinity.config.schema import changed
    from infinity.plan import forecast
    from infinity.plan.predict import forecast_again
    from infinity.tools.plan import report
    from infinity.tools.plan.advice import advise
    from infinity.tools.plan.data_facts import batch_of_data
    from infinity.tools.plan.subject import (
        batch_for,
        frozen_directory_of,
        has_reference,
        machine_for,
        on_other_drives,
        parse_count,
        planned_model,
        sweep_for,
        with_generation,
    )
    from infinity.tools.training.model import sharing_budgets

    if directory is not None or not asked.by_name:
        directory = frozen_directory_of(config, directory, is_scored=asked.score)
    model, drives = planned_model(
        config, directory, asked.model, asked.params, asked.drives, is_scored=asked.score
    )
    if asked.score:
        batch = sweep_for(config, asked.hardware, asked.tokens, asked.sequence)
        config = changed(config, {"adapter": None, "adapters": (), "schedule.micro_batch": 1})
    else:
        batch = batch_for(config, asked.tokens, asked.sequence, asked.accumulation)
    machine = machine_for(asked.hardware, config, model, batch, directory)
    count = asked.data_tokens or asked.examples
    data = None if count is None else parse_count(count, "--data-tokens")
    if data is not None and asked.examples is not None:
        data *= batch.sequence_length
    is_as_filed = not (asked.by_name or asked.score or asked.tokens or asked.sequence)
    own = batch_of_data(config, batch) if is_as_filed else None
    has_second = not asked.by_name and not asked.score and has_reference(config)
    with sharing_budgets(config, has_second=has_second) as config:
        found = forecast(
            config, model, machine, batch,
            num_ranks=asked.ranks or (1 if asked.score else machine.device.count),
            num_nodes=asked.nodes, shard_drives=drives,
        )  # fmt: skip
        of_data = None if own is None else forecast_again(found, config, model, batch=own)
        if is_as_filed:
            found = with_generation(config, model, found)
    other = on_other_drives(config, model, found)
    found = replace(found, data_tokens=data, of_data=of_data, other=other)
    advice = advise(config, model, found)
    second = "half of the budgets is for the second model, whose reads and time are not counted"
    found = replace(found, warnings=(*found.warnings, *[second] * has_second))
    reply(report.to_dict(found, advice), report.to_text(found, advice))
    if asked.plot is not None or asked.html is not None:
        from infinity.tools.pictures.timeline import paint
        from infinity.tools.plan import gantt

        if asked.plot is not None:
            paint(asked.plot, gantt.picture_of(found))
        if asked.html is not None:
            gantt.save_page(found, asked.html)


def _print_table(asked: PlanOptions) -> None:
    """Plans the shipped models on the shipped machines, or one of them, and prints or writes the
    table."""
    others = (asked.config, asked.params, asked.data_tokens, asked.examples, asked.tokens)
    if any(other is not None for other in (*others, asked.plot)):
        raise ConfigError(
            "--table takes --model, --hardware, --lora or --full, --write and --json; leave the "
            "others out"
        )
    file = asked.write
    if file is not None and file.suffix not in (".md", ".json"):
        raise ConfigError(f"--write {file}: expected a name that ends in .md or .json")
    if file is not None and file.exists():
        raise ConfigError(f"{file} already exists; give another name, or remove it")
    from infinity.plan.hardware import load_hardware
    from infinity.tools.plan import catalogue

    rank = None if asked.full else asked.lora or _RANK
    names = catalogue.published_models() if asked.model is None else [asked.model]
    machines = shipped_in("hardware") if asked.hardware is None else [asked.hardware]
    found = {machine: load_hardware(machine) for machine in machines}
    wanted = [(name, machine) for name in names for machine in machines]
    cells = []
    with progress_bar("planning", len(wanted)) as update:
        for name, machine in wanted:
            cells.append(catalogue.plan_cell(name, machine, found[machine], rank))
            update(advance=1)
    if wants_json() or (file is not None and file.suffix == ".json"):
        text = json.dumps([asdict(cell) for cell in cells], indent=1)
    else:
        text = catalogue.page_of(cells, rank, is_markdown=file is not None)
    if file is None:
        typer.echo(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")
        note(f"wrote {file}")
