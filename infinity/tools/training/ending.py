"""The end of a run for the person behind it: commands that follow, a model card, a message."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from shlex import quote
from typing import Literal

from infinity.config import JobConfig
from infinity.config.hub import published_name
from infinity.config.schema.train import Purpose
from infinity.integrations.card import base_in_words, card_of
from infinity.integrations.server_layouts import CONFIG_NAME, LOADERS
from infinity.sizes import clock_of, counted
from infinity.tools.training.report import Reporter, Summary, bars

Event = Literal["end", "failure", "plateau"]

_CURVE_WIDTH = 32
_PATIENCE_S = 30  # For a command of the user's.
_TASKS: dict[Purpose, str] = {
    "generates text": "text-generation",
    "scores sequences": "text-classification",
    "embeds text": "sentence-similarity",
}


def next_commands(config: JobConfig, summary: Summary) -> list[str]:
    """Returns lines of commands that go on from what the run has left."""
    output = quote(str(config.output.directory))
    found: list[tuple[str, str]] = []
    if summary.interrupted_by and config.checkpoint is not None:
        file = config.source.name if config.source.kind == "file" else "CONFIG"
        again = "".join(f" --set {quote(text)}" for text in config.source.overrides)
        ranks = os.environ.get("LOCAL_WORLD_SIZE")  # Of torchrun.
        launcher = f"torchrun --nproc-per-node {ranks} -m " if ranks else ""
        found.append((f"{launcher}infinity train {quote(file)}{again} --resume", "go on"))
    base = quote(str(config.model.path))
    if summary.export_directory and config.train.diffusion is not None:
        call = "load_lora_weights" if config.adapter else "transformer.from_pretrained"
        options, part = repr(str(config.output.directory)), "transformer_2"
        if config.model.path is not None and config.model.path.name == part:
            call = call.replace("transformer", part)
            options += f", load_into_{part}=True" * bool(config.adapter)
        found.append((f"pipeline.{call}({options})", "in diffusers"))
    elif summary.export_directory and config.train.embed is not None:
        found.append((f"SentenceTransformer({str(config.output.directory)!r})", "in Python"))
    elif summary.export_directory:
        writes, has_adapter = config.train.facts.purpose == "generates text", bool(config.adapter)
        if writes and config.data.tokenizer != "bytes":  # These have no chat template.
            found.append((f"infinity chat {output}", "talk to it"))
        if writes:
            found.append((f'infinity generate {output} "..."', "let it continue a text"))
        if writes and has_adapter:
            found.append((f"infinity merge {base} {output} -o merged", "base and adapter as one"))
        if writes and config.adapter and not config.adapter.experts_full:
            own = config.output.directory / CONFIG_NAME
            saved = own.read_text() if own.exists() else ""
            server = "sglang" if any(map(saved.__contains__, LOADERS["vllm"].dropped)) else "vllm"
            found.append((f"infinity export-adapter {output} --for {server}", "serve it"))
        model = f"{base} --adapter {output}" if has_adapter else output
        found.append((f"infinity score {model} DATA -o scores.jsonl", "score texts"))
    if summary.checkpoint is not None:
        place = quote(str(Path(summary.checkpoint).parent))  # It may be on another drive.
        found.append((f"infinity inspect {place}", "its checkpoints"))
    width = max((len(command) for command, _ in found), default=0)
    return [
        f"{'' if number else 'next:':<6}{command:<{width}}  # {what}"
        for number, (command, what) in enumerate(found)
    ]


def model_card(config: JobConfig, summary: Summary, kind: str) -> str:
    """Returns README.md of the export: base, data, settings, losses, hardware and versions. `kind`
    is the model type; `summary` has the steps before a resume, too. The base has its name on the
    hub if it is in the hub's cache, for the hub refuses a path."""
    from huggingface_hub import ModelCardData

    path, adapter, shown = config.model.path, config.adapter, config.train.diffusion
    name = None if path is None else published_name(path)
    library = "diffusers" if shown else "transformers" if adapter is None else "peft"
    if config.train.embed is not None:
        library = "sentence-transformers"
    tags = ["infinity", kind, *([] if adapter is None else [adapter.method])]
    data = ModelCardData(
        base_model=name,
        library_name=library,
        pipeline_tag="text-to-image" if shown else _TASKS[config.train.facts.purpose],
        tags=tags,
    )
    base = "random weights" if path is None else base_in_words(path)
    how = "all weights" if adapter is None else f"{adapter.method} of rank {adapter.rank}"
    if adapter is not None and adapter.experts_full:
        how = f"{how} and " if adapter.targets else ""
        how += f"{len(adapter.experts_full)} experts in full"
    steps, train = summary.resumed_at + len(summary.steps_s), config.train
    numbers = summary.to_dict()
    files = ", ".join(source.location.name for source in config.data.paths)
    batch = train.batch_size * train.gradient_accumulation_steps
    what = f"{counted(batch, 'sequences')} of at most {config.data.sequence_length} tokens"
    if shown is not None:
        what = shown.described(batch)
    rows = {
        "base": base,
        "trained": how,
        "labels": ", ".join(train.labels),  # In the order of their numbers.
        "data": f"{files}; {numbers['num_tokens']:,.0f} tokens",
        "steps": f"{steps:,} of {what}",
        "optimizer": f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}, "
        f"schedule {train.schedule}",
        "loss": "{loss_first:.3f} to {loss_last_mean:.3f} ".format_map(numbers)
        + bars(summary.losses, _CURVE_WIDTH)
        if summary.losses
        else "",
        "held-out loss": ", ".join(
            f"{loss:.3f} at {step}" for step, loss in summary.held_out_losses
        ),
        "time": clock_of(numbers["time"]["steps_s"]),
    }
    return card_of(data, f"# {base.partition(',')[0]}: {how}\n\n", rows)


def notify(
    config: JobConfig, summary: Summary, reporter: Reporter, event: Event, text: str
) -> None:
    """Runs the command of `output.notify`, once for each event, with a JSON object on its input. A
    command that fails is reported and ends nothing."""
    command = config.output.notify
    if command is None or event in summary.notified:
        return
    summary.notified.add(event)
    content = {
        "event": event,
        "text": f"{config.output.directory.name}: {text}",
        "output": str(config.output.directory),
        "steps": summary.resumed_at + len(summary.steps_s),
        "loss": summary.losses[-1] if summary.losses else None,
    }
    try:
        subprocess.run(
            command, shell=True, input=json.dumps(content), text=True, timeout=_PATIENCE_S,
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        reporter.note(f"warning: output.notify failed: {error}")
