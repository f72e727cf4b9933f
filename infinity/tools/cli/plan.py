"""`infinity plan`: the command around `infinity.plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.errors import CapacityError, ConfigError
from infinity.plan.shipped import refuse_no_model, refuse_unknown
from infinity.tools.cli.plan_inputs import parse_count, refuse_inputs

if TYPE_CHECKING:
    from infinity.config import SwapConfig

# The tiers of a model by name without a file: state that fits stays in host memory.
_DEFAULTS: dict[str, Any] = {
    "tiers": {"host": {"capacity": "85%"}},
    "precision": {"compute": "bfloat16"},
}
_ADAPTER_MICRO_BATCH = 8  # Sequences; of 2,048 tokens, enough for each of some hundred experts.
_KINDS = ("parameters", "master", "moments", "gradients")


_Config = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="A configuration file; optional with --model."),
]
_Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="A shipped model, a .toml of shapes, or a model directory."
    ),
]
_Params = Annotated[
    str | None,
    typer.Option("--params", metavar="N", help="A GPT-like model of this size, such as 1T."),
]
_Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="NAME", help="A shipped machine, or a .toml. Default: this one."
    ),
]
_Lora = Annotated[
    int | None,
    typer.Option(
        "--lora",
        metavar="RANK",
        min=1,
        help="Freeze the model; train a LoRA adapter of this rank. Default: all weights.",
    ),
]
_Experts = Annotated[
    bool, typer.Option("--experts", help="With an adapter: adapt the routed experts, too.")
]
_Drives = Annotated[
    int | None,
    typer.Option(
        "--drives",
        metavar="N",
        min=1,
        help="Drives of the frozen checkpoint. Default: those of its files, or all.",
    ),
]
_Tokens = Annotated[int | None, typer.Option(
    "--tokens", metavar="N", min=1, help="Tokens of a micro-batch (of a rank); with an adapter, of "
    "a step. Default: as the file, or 16 sequences."
)]  # fmt: skip
_Sequence = Annotated[int | None, typer.Option(
    "--sequence", metavar="N", min=1, help="Tokens of a sequence. Default: as the file, or 2,048."
)]  # fmt: skip
_Accumulation = Annotated[int | None, typer.Option(
    "--accumulation", metavar="N", min=1, help="Micro-batches a step. Default: the file's, or 1."
)]  # fmt: skip
_DataTokens = Annotated[
    str | None,
    typer.Option("--data-tokens", metavar="N", help="Tokens of all data, such as 10M: how long?"),
]
_Examples = Annotated[
    str | None,
    typer.Option("--examples", metavar="N", help="Sequences of all data, such as 50k: how long?"),
]
_Ranks = Annotated[
    int,
    typer.Option(
        "--ranks", metavar="N", min=1, help="Ranks on the node that state is divided over."
    ),
]
_Nodes = Annotated[
    int, typer.Option("--nodes", metavar="N", min=1, help="Such machines, each with --ranks.")
]
_Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the file."),
]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="PNG", help="Draw the simulated step.")
]
_Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write a page for the browser: the simulated step, idle time by cause, bytes by link.",
    ),
]
_Show = Annotated[
    bool, typer.Option("--list", help="List the machines and models that are shipped.")
]
_Table = Annotated[
    bool,
    typer.Option(
        "--table", help="Which model on which machine: all shipped ones, or --model, --hardware."
    ),
]
_Full = Annotated[bool, typer.Option("--full", help="With --table: all weights, no adapter.")]
_Write = Annotated[
    Path | None,
    typer.Option(
        "--write",
        metavar="FILE",
        help="Write the file that `infinity new` writes for --model DIR, .toml; with --table, the "
        "table, .md or .json.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def plan(
    config: _Config = None,
    model: _Model = None,
    params: _Params = None,
    hardware: _Hardware = None,
    lora: _Lora = None,
    experts: _Experts = False,
    drives: _Drives = None,
    tokens: _Tokens = None,
    sequence: _Sequence = None,
    accumulation: _Accumulation = None,
    data_tokens: _DataTokens = None,
    examples: _Examples = None,
    ranks: _Ranks = 1,
    nodes: _Nodes = 1,
    overrides: _Overrides = None,
    plot: _Plot = None,
    html: _Html = None,
    show: _Show = False,
    table: _Table = False,
    full: _Full = False,
    write: _Write = None,
    as_json: _AsJson = False,
) -> None:
    """Predict a training step without running it: what fits, how long, and what would help.

    The model is that of CONFIG, one given by its shapes, or a directory that was downloaded. The
    machine is this one, measured in some ten seconds, or one described in a file. Nothing is
    trained and nothing stays on the drives.
    """
    if show:
        _list(as_json=as_json)
        return
    if table:
        _refuse_beside_table(config, params, data_tokens, examples, tokens, plot)
        from infinity.tools.cli.plan_table import print_table

        print_table(model, hardware, None if full else lora or 16, write, as_json=as_json)
        return
    if full:
        raise ConfigError("--full is for --table; a plan without --lora is one of all weights")
    refuse_inputs(config, model, params, data_tokens, examples)
    if write is not None:
        _write(write, config, model, lora, hardware, sequence, experts=experts, as_json=as_json)
        return
    by_name = model is not None or params is not None
    frozen_by = _adapter_settings(lora, experts)
    if hardware is not None:
        refuse_unknown("hardware", hardware)
    subject = Subject.of(config, model, params)
    loaded = _load(subject, [*(overrides or []), *frozen_by], hardware)
    shape, shard_drives = subject.model(loaded, drives)
    batch = _batch(loaded, tokens, sequence, accumulation, by_name=by_name)
    machine = _machine(hardware, loaded, shape, batch, subject)
    count = data_tokens or examples
    data = None if count is None else parse_count(count, "--data-tokens")
    if data is not None and examples is not None:
        data *= batch.sequence_length
    request = Request(loaded, shape, machine, batch, ranks, nodes, shard_drives, data)
    _show(request, Pictures(plot, html), as_json=as_json)


def _list(*, as_json: bool) -> None:
    from infinity.plan.shipped import shipped_in

    found = {folder: shipped_in(folder) for folder in ("hardware", "models")}
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for folder, names in found.items():
        typer.echo(f"{folder}: {', '.join(names)}")


def _refuse_beside_table(*others: object) -> None:
    if any(other is not None for other in others):
        raise ConfigError(
            "--table takes --model, --hardware, --lora or --full, --write and --json; leave the "
            "others out"
        )


def _write(
    file: Path,
    config: Path | None,
    model: str | None,
    lora: int | None,
    hardware: str | None,
    sequence: int | None,
    *,
    experts: bool,
    as_json: bool,
) -> None:
    """Writes the file of `infinity new` for a directory."""
    from infinity.tools.cli.new import Asked, write_new

    if config is not None or model is None or not Path(model).is_dir():
        raise ConfigError(
            f"--write {file}: expected --model and the directory of a model, because the file "
            "names it; config.json alone is enough"
        )
    asked = Asked(
        Path(model), rank=lora, experts=experts, sequence=sequence, hardware=hardware, out=file
    )
    write_new(asked, as_json=as_json, is_quiet=False)


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that a plan is made of. `data_tokens` of data are passed once."""

    config: SwapConfig
    model: Any
    hardware: Any
    batch: Any
    num_ranks: int  # Of each node.
    num_nodes: int
    shard_drives: int | None
    data_tokens: int | None


@dataclass(frozen=True, slots=True)
class Pictures:
    """Files to draw the simulated step into."""

    plot: Path | None
    page: Path | None


def _show(request: Request, pictures: Pictures, *, as_json: bool) -> None:
    from infinity.plan import advise, report
    from infinity.plan.answer import answer

    found = _forecast(request, request.shard_drives)
    said = answer(found, request.data_tokens, _on_other_drives(request))
    advice = advise(request.config, request.model, found)
    if as_json:
        typer.echo(json.dumps(report.to_dict(found, said, advice), indent=1))
    else:
        typer.echo(report.to_text(found, said, advice))
    if pictures.plot is not None or pictures.page is not None:
        from infinity.plan import gantt

        if pictures.plot is not None:
            gantt.save(found, pictures.plot)
        if pictures.page is not None:
            gantt.save_page(found, said, pictures.page)


def _forecast(request: Request, shard_drives: int | None) -> Any:
    from infinity.plan import forecast

    return forecast(
        request.config,
        request.model,
        request.hardware,
        request.batch,
        num_ranks=request.num_ranks,
        num_nodes=request.num_nodes,
        shard_drives=shard_drives,
    )


def _on_other_drives(request: Request) -> Any:
    """Returns the forecast with the checkpoint on all drives if it is on fewer, else on one; None
    where that makes no difference or does not fit."""
    nvme = request.hardware.nvme
    if request.model.frozen is None or nvme is None or nvme.drives == 1:
        return None
    if nvme.checkpoint_read_gb_per_s is not None:
        return None  # It is on drives of its own, whose number is not known.
    is_spread = request.shard_drives in (None, nvme.drives)
    try:
        return _forecast(request, 1 if is_spread else None)
    except CapacityError:
        return None


def _adapter_settings(lora: int | None, experts: bool) -> list[str]:
    settings = [] if lora is None else [f"adapter.rank={lora}"]
    return settings + (["adapter.experts=true"] if experts else [])


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a plan is about. `directory` is one that was downloaded."""

    file: Path | None
    name: str | None
    params: str | None
    directory: Any

    @classmethod
    def of(cls, file: Path | None, name: str | None, params: str | None) -> Subject:
        """Reads the directory, if the name is one. Raises ConfigError as `read_directory`."""
        if name is None or name.endswith(".toml") or not Path(name).is_dir():
            if name is not None:
                refuse_unknown("models", name)
            return cls(file, name, params, None)
        refuse_no_model(Path(name))
        from infinity.plan.directory import read_directory

        return cls(file, name, params, read_directory(Path(name)))

    def model(self, config: SwapConfig, drives: int | None) -> tuple[Any, int | None]:
        """Returns the planned model, and the drives that hold its checkpoint (None: all)."""
        import torch

        from infinity.plan import load_model, scaled_gpt
        from infinity.plan.model import model_of_config, model_of_shape
        from infinity.state.moments import moments_of

        dtype = getattr(torch, config.precision.compute_dtype)
        moments = moments_of(config)
        if config.adapter is not None:
            return self._frozen(config, dtype, drives)
        if drives is not None:
            raise ConfigError("--drives is for an adapter's frozen checkpoint; add --lora RANK")
        if self.directory is not None:
            return model_of_shape(self.directory.shape, dtype, moments), None
        if self.name is not None:
            return load_model(self.name, dtype, moments), None
        if self.params is not None:
            shape = scaled_gpt(parse_count(self.params))
            return model_of_shape(shape, dtype, moments), None
        from infinity.config.extras import require_transformers

        config.require("model", "data", "train")
        require_transformers("infinity plan of a file's [model]")
        return model_of_config(config), None

    def directory_of(self, config: SwapConfig) -> Any:
        """Returns the directory that was named, or that of the file's frozen model; None for a
        model by its shapes."""
        if self.file is None or self.name is not None or self.params is not None:
            return self.directory
        return None if config.adapter is None else _directory_of_file(config)

    def _frozen(self, config: SwapConfig, dtype: Any, drives: int | None) -> tuple[Any, int | None]:
        from infinity.plan import scaled_gpt
        from infinity.plan.frozen import frozen_model
        from infinity.plan.model import load_shape
        from infinity.plan.stored import stored_of_shape
        from infinity.state.moments import moments_of

        assert config.adapter is not None
        directory = self.directory_of(config)
        if directory is not None:
            shape, stored = directory.shape, directory.stored
            drives = drives or directory.num_drives or None  # None before it is downloaded.
        else:
            shape = (
                load_shape(self.name)
                if self.name is not None
                else scaled_gpt(parse_count(str(self.params)))
            )
            stored = stored_of_shape(shape)
        planned = frozen_model(shape, stored, config.adapter, dtype, moments_of(config))
        return planned, drives


def _directory_of_file(config: SwapConfig) -> Any:
    from infinity.plan.directory import read_directory

    if config.model is None or config.model.path is None:
        raise ConfigError(
            "adapter: expected model.path, the directory of the frozen model; got none. Without a "
            "directory, plan a shipped model with --model"
        )
    return read_directory(config.model.path)


def _machine(name: str | None, config: SwapConfig, model: Any, batch: Any, subject: Subject) -> Any:
    from infinity.plan import load_hardware

    if name is not None:
        return load_hardware(name)
    from infinity.plan.measure import measure
    from infinity.plan.measure_files import with_checkpoint_drives

    directory = subject.directory_of(config)
    if directory is not None and not directory.files:
        config = _with_drive_of(config, directory.path)
    machine = measure(config, model, batch)
    if config.adapter is None or directory is None or not directory.files:
        return machine
    return with_checkpoint_drives(machine, directory.files)


def _with_drive_of(config: SwapConfig, directory: Path) -> SwapConfig:
    """Returns the configuration with a tier on the drive that a checkpoint will be on."""
    from infinity.config import NvmeTier

    if config.tiers.nvme:
        return config
    tier = NvmeTier.model_validate({"path": directory})
    return config.model_copy(update={"tiers": config.tiers.model_copy(update={"nvme": (tier,)})})


def _has_nvme(hardware: str | None) -> bool:
    from infinity.plan import load_hardware

    return hardware is not None and load_hardware(hardware).nvme is not None


def _load(subject: Subject, overrides: list[str], hardware: str | None) -> SwapConfig:
    from infinity.config import SwapConfig
    from infinity.config.paths import refuse_absent_model_of
    from infinity.config.source import ConfigSource, read_file
    from infinity.tools.cli.train import override
    from infinity.tools.training.settle import settle

    if subject.file is not None:
        table, source = read_file(subject.file)
    else:
        import copy

        table, source = copy.deepcopy(_DEFAULTS), ConfigSource()
        if _has_nvme(hardware):
            table["tiers"]["nvme"] = [{"path": "/mnt/nvme"}]
            table["placement"] = {kind: ["host", "nvme"] for kind in _KINDS}
    for text in overrides:
        override(table, text)
    if subject.directory is not None and subject.directory.is_quantised:
        table.setdefault("adapter", {})  # Codes cannot be trained.
    if subject.file is None and "adapter" in table:
        _train_by_layers(table)
    config = SwapConfig.from_table(table, source)
    if subject.name is None and subject.params is None:
        refuse_absent_model_of(config)
    return settle(config)


def _train_by_layers(table: dict[str, Any]) -> None:
    """Sets the order in which adapters train: all micro-batches pass a block together."""
    schedule = table.setdefault("schedule", {})
    schedule.setdefault("micro_batch", _ADAPTER_MICRO_BATCH)
    tiers = ["host", "nvme"] if "nvme" in table["tiers"] else ["host"]
    table.setdefault("placement", {}).setdefault("activations", tiers)


def _batch(
    config: SwapConfig,
    tokens: int | None,
    sequence: int | None,
    accumulation: int | None,
    *,
    by_name: bool,
) -> Any:
    """Returns the batch of the file if it trains the file's model; options take precedence."""
    from infinity.plan import Batch
    from infinity.simulate.job import UNKNOWN_BATCH, batch_of

    own = UNKNOWN_BATCH if by_name else batch_of(config)
    if own == UNKNOWN_BATCH:
        sequence = sequence or 2048
        num_tokens = tokens or 16 * sequence
        if config.adapter is not None and config.schedule.micro_batch is not None:
            return Batch(num_tokens * (accumulation or 1), sequence)
        return Batch(num_tokens, sequence, accumulation or 1)
    sequence = sequence or own.sequence_length
    return replace(
        own,
        num_tokens=tokens or own.num_tokens // own.sequence_length * sequence,
        sequence_length=sequence,
        num_micro_batches=accumulation or own.num_micro_batches,
    )
