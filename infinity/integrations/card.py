"""Model cards: the base by its name on the hub, which refuses a path, hardware and versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.config.extras import installed
from infinity.config.hub import downloaded_commit, model_name, published_name
from infinity.sizes import counted

_PACKAGES = ("infinity-offload", "torch", "transformers", "trl", "peft", "diffusers")
_HEADING, _NAMELESS = "\n## The run\n\n", "[None](https://huggingface.co/None)"
# What is in the cards of programs: of PEFT, which nobody has filled, of TRL, and of this module.
_OF_PEFT, _OF_TRL, _OURS = "# Model Card for Model ID", "trained using [TRL]", "| versions | infin"


def versions() -> dict[str, str]:
    """Returns the installed releases of the packages that compute a run."""
    return {name: release for name in _PACKAGES if (release := installed(name))}


def base_in_words(path: Path) -> str:
    """Returns a base by its name on the hub, or as its directory and its commit there: `hf download
    --local-dir` records no name."""
    commit = downloaded_commit(path)
    named = model_name(path) + (f", commit {commit} of the hub" if commit else "")
    return published_name(path) or named


def card_of(data: Any, text: str, rows: Mapping[str, str]) -> str:
    """Returns README.md: a `ModelCardData`, a text, and a table of the rows that say something,
    with hardware and versions."""
    hardware = f"{os.cpu_count()} processors, no GPU"
    if torch.cuda.is_available():
        hardware = str(torch.cuda.get_device_name())
    releases = ", ".join(f"{name} {release}" for name, release in versions().items())
    known = {**rows, "hardware": hardware, "versions": releases}
    table = "".join(f"| {row} | {said} |\n" for row, said in known.items() if said)
    return f"---\n{data.to_yaml()}\n---\n\n{text}| | |\n| --- | --- |\n{table}"


def fill(file: Path, trainer: Any) -> None:
    """Writes what a Trainer knows into a card of PEFT, whose template it replaces, or of TRL. A
    card that somebody else has written stays."""
    from huggingface_hub import ModelCard

    card: Any = ModelCard.load(file) if file.is_file() else None
    if card is None or not any(mark in card.text for mark in (_OF_PEFT, _OF_TRL, _OURS)):
        return
    data, args, state = card.data, trainer.args, trainer.state
    base = str(data.get("base_model") or "")
    if base and Path(base).is_dir():
        data.base_model, base = published_name(Path(base)), base_in_words(Path(base))
        data.tags = [tag for tag in data.tags or () if not tag.startswith("base_model:")]
    [adapter, *_] = trainer.model.peft_config.values()
    rank = f" of rank {adapter.r}" if hasattr(adapter, "r") else ""
    keys = "loss", "train_runtime"
    losses, times_s = ([row[key] for row in state.log_history if key in row] for key in keys)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    how = f"{str(adapter.peft_type.value).lower()}{rank}"
    rows = {
        "base": base,
        "trained": how,
        "steps": f"{state.global_step:,} of {counted(batch, 'sequences')}",
        "optimizer": f"learning rate {args.learning_rate:g}, "
        f"schedule {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}",
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "",
        "time": f"{times_s[-1]:,.0f} s" if times_s else "",
    }
    text = f"# {base.partition(',')[0] or 'adapter'}: {how}\n\n"
    if _OF_TRL in card.text:
        text = card.text.partition(_HEADING)[0].strip().replace(_NAMELESS, base) + "\n" + _HEADING
    file.write_text(card_of(data, text, rows), encoding="utf-8")
