"""Checkpoints made of checkpoints: `infinity merge`, `quantize`, `convert`, `export`, `spread`, and
`export-adapter` with its check, `verify-served`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from infinity.errors import ConfigError, refusing
from infinity.sizes import counted, format_nbytes, parse_nbytes
from infinity.tools.cli.options import PUSH, arg, flag, is_silent, opt, progress_bar, pushing, reply

if TYPE_CHECKING:
    from infinity.config import SwapConfig
    from infinity.tools.convert.rewrite import DirectoryPlan
    from infinity.tools.convert.spread import SpreadPlan
    from infinity.tools.serving.verify import Verdict

_OUT = opt("OUT", "The directory to write; a new one.", "--output", "-o", default=...)


def merge(
    base: Path = arg("BASE", "The directory of the base's weights."),
    adapter: Path = arg("ADAPTER", "The directory of an adapter, as PEFT saves."),
    out: Path = _OUT,
    to: Literal["bf16", "keep"] = opt(
        None,
        "bf16: quantised weights become numbers (float16 where their scales are). keep: "
        "changed ones are quantised again, in the format that they have; the others are "
        "copied.",
        default="bf16",
    ),
    any_base: bool = flag("--any-base", "Allow another base than that of the training."),
    push: str | None = PUSH,
) -> None:
    """Merge a LoRA or DoRA adapter into its base, as a checkpoint.

    One tensor is in memory at a time. Dense layers get the bits of PEFT's merge_and_unload.
    """
    from infinity.config.extras import require_release
    from infinity.config.paths import refuse_absent_adapter, refuse_no_directory

    require_release("transformers", "infinity merge")
    refuse_no_directory(base)
    refuse_absent_adapter(adapter)
    from infinity.tools.training.merge import plan_merge

    upload = pushing(push)
    _write(plan_merge(base, adapter, to=to, any_base=any_base), out)
    upload(out)


def quantize(
    directory: Path = arg("DIR", "A directory of bf16, fp16 or fp32 weights."),
    out: Path = _OUT,
    to: Literal["nf4", "int4", "fp8"] = opt(
        None,
        "nf4: as bitsandbytes stores it. int4: groups of 32, as compressed-tensors. fp8: "
        "E4M3 in blocks of 128x128, as DeepSeek-V3.",
        default=...,
    ),
) -> None:
    """Quantise the linear layers of a checkpoint, for a smaller base under an adapter.

    One tensor is in memory at a time. Embeddings, head, norms and routers stay as they are.
    """
    from infinity.config.paths import refuse_no_directory

    refuse_no_directory(directory)
    from infinity.tools.convert.quantize import plan_quantize

    _write(plan_quantize(directory, to), out)


def convert(
    source: Path = arg(
        "SOURCE",
        "A .gguf file (of a split the first one), or a directory: with pytorch_model.bin, tensors "
        "of torchao, experts of Llama 4 that modelopt has packed, or its pre_quant_scale.",
    ),
    out: Path = _OUT,
) -> None:
    """Make a directory of safetensors from other formats.

    Codes stay as they are. GGUF's IQ1 to IQ3 and TQ, torchao's tensors, and the weights whose
    inputs modelopt scales become plain numbers. One tensor is in memory at a time.
    """
    from infinity.config.extras import require_release

    if source.suffix == ".gguf":
        require_release("transformers", "infinity convert")
        from infinity.tools.convert.gguf import plan_gguf

        plan = plan_gguf(source, lambda line: typer.echo(line, err=True))
    else:
        from infinity.config.paths import refuse_no_directory
        from infinity.tools.convert.foreign import plan_foreign

        refuse_no_directory(source)
        plan = plan_foreign(source)
    _write(plan, out)


def _write(plan: DirectoryPlan, out: Path) -> None:
    from infinity.tools.convert.rewrite import check_target, write_directory

    check_target(out, plan.nbytes)
    with progress_bar(plan.source.name, plan.nbytes, has_bytes=True) as progress:
        write_directory(plan, out, progress)
    summary = {
        "directory": str(out),
        "shards": list(plan.shards),
        "nbytes": plan.nbytes,
        "source_nbytes": plan.source_nbytes,
    }
    sizes = f"{format_nbytes(plan.nbytes)} from {format_nbytes(plan.source_nbytes)}"
    reply(summary, f"wrote {out}: {sizes}, {counted(len(plan.shards), 'shards')}")


# -- Export: a checkpoint of a run in a format of other programs -----------------------------------


def export(
    checkpoint: Path = arg("CHECKPOINT", "A checkpoint of a run, or a directory of them."),
    out: Path = arg("OUT", "The directory to write."),
    to: Literal["hf", "fp32", "dcp"] = opt(
        None,
        "hf: safetensors in the compute dtype, as from_pretrained loads them. fp32: the "
        "same in float32, as the optimizer keeps it. dcp: weights, masters and the optimizer's "
        "state for torch.distributed.checkpoint.",
        default="hf",
    ),
    config: Path | None = opt(
        "FILE",
        "The configuration file of the run, for its [model]. Default: the copy in the "
        "output directory of the run, if the checkpoint is below it.",
    ),
    max_shard_size: str = opt("SIZE", "Largest safetensors file.", "--max-shard", default="2GiB"),
) -> None:
    """Convert a checkpoint of a run to a format of other programs.

    The checkpoint is read tensor by tensor, without a GPU and without the model in memory. In a
    directory of checkpoints the newest one is used.
    """
    from infinity.checkpoint.run.directory import find_checkpoint

    with refusing("--max-shard", ValueError):
        max_shard_nbytes = parse_nbytes(max_shard_size)
    found = find_checkpoint(checkpoint)
    loaded = _config_of(found, config)
    from infinity.checkpoint import export_checkpoint_dcp, export_checkpoint_safetensors

    if to == "dcp":
        model = None if loaded is None or loaded.model is None else _model_on_meta(loaded)
        files = list(export_checkpoint_dcp(found, out, model).iterdir())
    else:
        if loaded is None:
            raise ConfigError(
                f"{found}: the architecture is not known, as no infinity-run.json is above it; "
                "name the swap-tier file of the run with --config FILE"
            )
        from infinity.tools.training.tokenizers import open_tokenizer

        data = None if loaded.train and loaded.train.diffusion else loaded.data
        files = export_checkpoint_safetensors(
            found,
            out,
            _model_on_meta(loaded),
            master=to == "fp32",
            max_shard_nbytes=max_shard_nbytes,
            tokenizer=None if data is None else open_tokenizer(data.tokenizer).tokenizer,
        )
    nbytes = sum(file.stat().st_size for file in files)
    names = sorted(file.name for file in files)
    said = {"checkpoint": str(found), "directory": str(out), "files": names, "nbytes": nbytes}
    reply(said, f"wrote {format_nbytes(nbytes)} of {found.name} to {out}")


def _config_of(checkpoint: Path, file: Path | None) -> SwapConfig | None:
    """Returns the configuration in a file, or that of the run above a checkpoint, if there is
    one."""
    from infinity.config import SwapConfig
    from infinity.config.paths import refuse_absent_model_of
    from infinity.tools.training.output import config_of_run
    from infinity.tools.training.settle import settle

    if file is not None:
        found: SwapConfig | None = SwapConfig.load(file)
    else:
        runs = map(config_of_run, checkpoint.resolve().parents[:2])
        found = next((run for run in runs if run is not None), None)
    if found is None:
        return None
    refuse_absent_model_of(found)
    return settle(found)


def _model_on_meta(config: SwapConfig) -> Any:
    from infinity.tools.training.model import build_model, plan_model

    config.require("model", "train")
    assert config.model is not None
    return build_model(plan_model(config.model, config.train), config)


# -- Spread: the shards of a checkpoint over several drives ----------------------------------------


def spread(
    directory: Path = arg("DIR", "A directory with *.safetensors."),
    folders: list[Path] | None = arg("MORE", "Further directories of --over.", default=None),
    over: list[Path] | None = opt("A B C", "One directory on each drive."),
    copy: bool = flag(
        "--copy/--move", "Keep the shards, in DIR/.infinity-originals, or move them (default)."
    ),
    gather: bool = flag("--gather", "Undo: make the shards files of DIR again."),
    dry_run: bool = flag("--dry-run", "Tell what would be done, and do nothing."),
) -> None:
    """Lay the shards of a checkpoint over several drives, so that all of them are read at once.

    `infinity spread DIR --over /nvme0 /nvme1 /nvme2`. Consecutive shards go to different drives;
    DIR keeps links, and programs open it as before. What is interrupted, by a power cut too, loads
    as it is, and a repeated call continues.
    """
    from infinity.config.paths import refuse_no_directory

    places = [*(over or []), *(folders or [])]
    if gather and (places or copy):
        raise ConfigError("--gather takes DIR alone: the record in it names the drives")
    if not gather and not over:
        raise ConfigError("expected --over and the directories of the drives, or --gather")
    refuse_no_directory(directory)
    from infinity.tools.convert.spread import plan_gather, plan_spread, run_gather, run_spread

    if gather:
        plan = plan_gather(directory)
    else:
        plan = plan_spread(directory, places, "copy" if copy else "move")
    if not is_silent():
        _tell(plan, is_dry=dry_run)
    if not dry_run:
        name, nbytes = plan.directory.name, plan.moved_nbytes
        with progress_bar(name, nbytes, has_bytes=True) as progress:
            (run_gather if gather else run_spread)(plan, progress)
    reply(plan.to_dict() | {"is_done": not dry_run})


def _tell(plan: SpreadPlan, *, is_dry: bool) -> None:
    for move in plan.moves:
        how = "stays" if move.is_done else "moves" if move.moved_nbytes else "is linked"
        typer.echo(f"{move.name}  {format_nbytes(move.nbytes)}  {how}  {move.place.parent}")
    verb = "would be written" if is_dry else "to write"
    shards = counted(len(plan.moves), "shards")
    typer.echo(f"{shards}, {format_nbytes(plan.moved_nbytes)} {verb}")


# -- For a server ----------------------------------------------------------------------------------


def export_adapter(
    adapter: Path = arg("ADAPTER", "The directory of an adapter, as PEFT saves."),
    server: Literal["peft", "vllm", "sglang", "gguf"] = opt(
        None, "What loads the result; gguf is for llama.cpp.", "--for", default=...
    ),
    out: Path | None = opt("OUT", "A new directory. Default: ADAPTER-SERVER.", "--output", "-o"),
    base: Path | None = opt("DIR", "The base. Default: what the adapter names."),
    any_base: bool = flag("--any-base", "Allow another base than that of the training."),
    prompts: Path | None = opt(
        "FILE",
        "Text, one prompt a line. Default: the training data of the run, and sentences that "
        "are shipped.",
    ),
    locate: Literal["none", "kinds", "layers", "modules"] = opt(
        None,
        "The places of faults that the sheet tells apart. Each fault reads the base once.",
        default="layers",
    ),
    config: Path | None = opt(
        "FILE", "The tiers for the sheet. Default: those of the run; else memory."
    ),
    sheet: bool = flag("--sheet/--no-sheet", "Also compute infinity_sheet.json.", default=True),
    push: str | None = PUSH,
) -> None:
    """Write an adapter in the layout that a server reads, with a sheet to check what it serves.

    The sheet has log-probabilities of 64 prompts, by this engine, with the adapter, without it, and
    with typical faults. `infinity verify-served` compares a server with it.
    """
    from infinity.config.extras import require_release
    from infinity.config.paths import refuse_absent_adapter, refuse_no_directory

    require_release("transformers", "infinity export-adapter")
    refuse_absent_adapter(adapter)
    target = out if out is not None else adapter.with_name(f"{adapter.resolve().name}-{server}")
    from infinity.tools.serving.export import write_passport
    from infinity.tools.training.base_identity import base_of

    found_base = base if base is not None else base_of(adapter)
    refuse_no_directory(found_base)
    upload = pushing(push)
    with progress_bar("") as progress:
        said = write_passport(
            adapter, found_base, target, server, any_base=any_base, prompts=prompts,
            locate=locate if sheet else None, config=config, progress=progress,
        )  # fmt: skip
    text = f"wrote {target} for {said['for']}"
    if sheet:
        text += (
            f"\n{said['prompts']} prompts of {said['data']}, {said['faults']} faults. When it is "
            f"served: infinity verify-served URL --sheet {said['sheet']}"
        )
    reply(said, text)
    upload(target)


def verify_served(
    url: str = arg("URL", "The address of the server: http://HOST:PORT."),
    sheet: Path = opt("FILE", "Of `infinity export-adapter`.", default=...),
    model: str | None = opt("NAME", "The served adapter. Default: the only model."),
    base_model: str | None = opt(
        "NAME", "The base, if it is served, too: its numbers show how exact the server is."
    ),
    key: str | None = opt("NAME", "The environment variable with the API key."),
) -> None:
    """Compare what a server says with the sheet of an adapter, and name the fault.

    Asks /v1/completions of any OpenAI-compatible server for the log-probabilities of the sheet's
    tokens. The exit code is 0 if the adapter is served as it was trained, and 1 otherwise.
    """
    from infinity.integrations.sampler import Server
    from infinity.tools.serving.sheet import Sheet
    from infinity.tools.serving.verify import ask, judge

    read = Sheet.read(sheet)
    server = Server(url, key=key)
    with progress_bar("adapter", len(read.prompts)) as progress:
        served = ask(server, read, model, progress)
        base = None
        if base_model is not None:
            progress(description="base")
            base = ask(server, read, base_model, progress)
    verdict = judge(read, served, base)
    if verdict.outcome == "ignored" and model and ":" not in model and server.kind == "sglang":
        name, *others = server.models(is_base=True)
        if model != name and not others:
            remedy = f"SGLang takes each name without a colon for its base: --model {name}:{model}"
            verdict = replace(verdict, sentence=f"{verdict.sentence}; {remedy}")
    lines = _lines(verdict, server.method, read.groups)
    reply(asdict(verdict) | {"method": server.method}, "\n".join(lines))
    raise typer.Exit(0 if verdict.outcome == "served" else 1)


def _lines(verdict: Verdict, method: str | None, groups: dict[str, list[str]]) -> Iterator[str]:
    yield f"{verdict.outcome}: {verdict.sentence}"
    yield (
        f"{verdict.num_tokens} tokens by {method}: the adapter changes {verdict.effect:.3g} nats, "
        f"the server differs from it by {verdict.deviation:.3g}, noise is {verdict.noise:.3g}"
    )
    if verdict.outcome == "served":
        if verdict.hidden:
            yield f"too small to be seen: {', '.join(dict.fromkeys(verdict.hidden))}"
        return
    yield from (f"  {state.distance:8.3g} nats from {state}" for state in verdict.nearest)
    members = groups.get(verdict.nearest[0].group, [])
    if verdict.outcome == "faulty" and members:
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"modules: {members[0]}{more}"
