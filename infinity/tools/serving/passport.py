"""An adapter for a server with its sheet, over the prompts of a file, of the run, or that are
shipped: what `infinity export-adapter` does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from infinity.checkpoint.durable import new_directory, sync_file
from infinity.config import JobConfig, SwapConfig
from infinity.errors import ConfigError, UnsupportedError, reporting
from infinity.tools.convert.rewrite import check_target
from infinity.tools.serving.export import LOADERS, Server, plan_export
from infinity.tools.serving.sheet import (
    NUM_PROMPTS,
    PROMPT_TOKENS,
    SHEET_NAME,
    Locate,
    make_sheet,
)
from infinity.tools.training.adapter import WEIGHTS_NAME
from infinity.tools.training.base_identity import IDENTITY_NAME
from infinity.tools.training.data_files import read_utf8, texts_in
from infinity.tools.training.job_data import open_data, refuse_stranger
from infinity.tools.training.merge import read_changes
from infinity.tools.training.output import config_of_run
from infinity.tools.training.own_experts import names_in
from infinity.tools.training.settle import settle, tokenizer_of
from infinity.tools.training.tokenizers import Tokenizer, open_tokenizer

_SHIPPED = "prompts.txt"


def write_passport(
    adapter: Path,
    base: Path,
    out: Path,
    server: Server,
    *,
    any_base: bool = False,
    prompts: Path | None = None,
    locate: Locate | None = "layers",
    config: Path | None = None,
    progress: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:
    """Writes `out`, whole or not at all, and returns what it is in words and numbers.

    locate: what the sheet tells apart; None leaves the sheet out
    config: a file with the tiers in which the sheet is computed; by default those of the run whose
        output directory `adapter` is

    Raises ConfigError for an adapter of another base, an `out` that is there already, and prompts
    that cannot be read; UnsupportedError for what the server does not load; StorageError.
    """
    if names_in(adapter):
        raise UnsupportedError(
            f"{adapter} has experts that are trained in full, which servers do not load with an "
            f"adapter; merge them: infinity merge {base} {adapter} -o DIR"
        )
    check_target(out, 2 * (adapter / WEIGHTS_NAME).stat().st_size)
    run = config_of_run(adapter)
    tiers = SwapConfig.load(config) if config is not None else run
    source, adapted, changes = read_changes(base, adapter, any_base=any_base, is_merged=False)
    write = plan_export(adapter, adapted, changes, server)
    said: dict[str, Any] = {"directory": str(out), "for": "PEFT"}
    if server != "peft":
        said["for"] = LOADERS[server].release
    rows: list[list[int]] = []
    if locate is not None:
        vocab_size = adapted.get_base_model().config.get_text_config().vocab_size
        rows, said["data"] = _read_prompts(prompts, run, base, vocab_size)
    with new_directory(out.absolute()) as partial:
        with reporting("write", out):
            write(partial)
            if (adapter / IDENTITY_NAME).is_file():
                shutil.copyfile(adapter / IDENTITY_NAME, partial / IDENTITY_NAME)
        if locate is not None:
            sheet = make_sheet(
                adapter, source, adapted, rows, config=tiers, locate=locate, progress=progress
            )
            said |= {"prompts": len(rows), "faults": len(sheet.faults)}
            said["sheet"] = str(out / SHEET_NAME)
            with reporting("write", out):
                sheet.write(partial / SHEET_NAME)
        with reporting("write", out):
            for file in partial.iterdir():
                sync_file(file)
    return said


# -- Prompts ---------------------------------------------------------------------------------------


def _read_prompts(
    file: Path | None, run: JobConfig | None, base: Path, vocab_size: int
) -> tuple[list[list[int]], str]:
    """Returns the token ids of at most 64 prompts, each of 2 to 64 tokens, and where they are from.

    Raises ConfigError for a file without a prompt, and for tokens that the model does not have.
    """
    settled = settle(run) if run is not None else None
    which = settled.data.tokenizer if settled else tokenizer_of(base).value
    tokenizer = open_tokenizer(which)
    rows: list[list[int]] = []
    if file is not None:
        text, source = b"".join(read_utf8(file)).decode(), str(file)
    else:
        shipped = resources.files("infinity.tools.serving") / _SHIPPED
        text, source = shipped.read_text(encoding="utf-8"), "shipped sentences"
        if settled is not None:
            rows = _rows_of(settled, tokenizer, vocab_size)
            source = "the training data" + f" and {source}" * (len(rows) < NUM_PROMPTS)
    rows += [tokenizer.encode(line) for line in text.splitlines() if line.strip()]
    prompts = [row[:PROMPT_TOKENS] for row in rows if len(row) > 1][:NUM_PROMPTS]
    if not prompts:
        raise ConfigError(f"{source}: no prompt has two tokens; expected one text a line")
    refuse_stranger(max(map(max, prompts)), tokenizer, vocab_size, source)
    return prompts, source


def _rows_of(run: JobConfig, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    with ExitStack() as stack:
        data = open_data(run, tokenizer, stack, vocab_size=vocab_size)
        rows = [data.train[index] for index in range(min(NUM_PROMPTS, len(data.train)))]
    return [
        list(map(int, row["input_ids"])) if "input_ids" in row
        else tokenizer.encode("\n".join(texts_in(row, but="role")))
        for row in rows
    ]  # fmt: skip
