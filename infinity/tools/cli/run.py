"""`infinity run`: a program for transformers' Trainer or TRL with its models offloaded."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from infinity.errors import ConfigError
from infinity.tools.cli.options import Quiet, arg, flag, opt

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    script: Annotated[Path, arg("SCRIPT", "A Python program.")],
    arguments: Annotated[list[str] | None, arg("ARGS", "Arguments of the program.")] = None,
    config: Annotated[
        Path | None,
        opt(
            "FILE",
            "A swap-tier file, or one of DeepSpeed or accelerate. Default: the program's "
            "`deepspeed=`, or else what suits the model and this machine.",
        ),
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print what was offloaded to stderr, at the end.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a program for transformers' Trainer or TRL as it is, with its models offloaded.

    Models that `from_pretrained` loads are built without memory. A Trainer offloads its model, with
    its adapter, before it trains. Options of this command stand before SCRIPT.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such file; expected a Python program")
    if quiet:
        import logging

        logging.getLogger("infinity").setLevel(logging.ERROR)
    from infinity.config import SwapConfig
    from infinity.config.extras import require_release, require_transformers

    require_transformers("infinity run")
    require_release("torch", "infinity")
    loaded = None if config is None else SwapConfig.load(config)
    from infinity.tools.drop_in import DropIn

    drop_in = DropIn(loaded)
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.resolve().parent))
    with drop_in.installed():
        runpy.run_path(str(script), run_name="__main__")
    if as_json:
        typer.echo(json.dumps({"offloaded": drop_in.offloaded}, indent=2), err=True)
