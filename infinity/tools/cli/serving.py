"""`infinity export-adapter` and `verify-served`: an adapter for a server, and its check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from infinity.tools.cli.options import Json, Quiet

if TYPE_CHECKING:
    from infinity.tools.serving.verify import Verdict


_AnyBase = Annotated[
    bool, typer.Option("--any-base", help="Use another base than that of the training, too.")
]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Text, one prompt a line. Default: the training data of the run, and sentences that "
        "are shipped.",
    ),
]
_Locate = Annotated[
    Literal["none", "kinds", "layers", "modules"],
    typer.Option(
        "--locate",
        help="The places of faults that the sheet tells apart. Each fault reads the base once.",
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The tiers for the sheet. Default: those of the run; else memory.",
    ),
]


def export_adapter(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="The directory of an adapter, as PEFT saves.")
    ],
    server: Annotated[
        Literal["peft", "vllm", "sglang", "gguf"],
        typer.Option("--for", help="What loads the result; gguf is for llama.cpp."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="A new directory. Default: ADAPTER-SERVER."
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="DIR", help="Default: the base that the adapter names."),
    ] = None,
    any_base: _AnyBase = False,
    prompts: _Prompts = None,
    locate: _Locate = "layers",
    config: _Config = None,
    sheet: Annotated[
        bool, typer.Option("--sheet/--no-sheet", help="Compute infinity_sheet.json beside it.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an adapter in the layout that a server reads, with a sheet to check what it serves.

    The sheet has log-probabilities of 64 prompts, by this engine, with the adapter, without it, and
    with typical faults. `infinity verify-served` compares a server with it.
    """
    from infinity.config.extras import require_transformers
    from infinity.config.paths import refuse_absent_adapter, refuse_no_directory

    require_transformers("infinity export-adapter")
    refuse_absent_adapter(adapter)
    target = out if out is not None else adapter.with_name(f"{adapter.resolve().name}-{server}")
    from infinity.tools.serving import passport

    found_base = base if base is not None else passport.base_of(adapter)
    refuse_no_directory(found_base)
    with _bar(is_quiet=quiet or as_json) as progress:
        said = passport.write_passport(
            adapter, found_base, target, server, any_base=any_base, prompts=prompts,
            locate=locate if sheet else None, config=config, progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    elif not quiet:
        typer.echo(f"wrote {target} for {said['for']}")
        if sheet:
            typer.echo(
                f"{said['prompts']} prompts of {said['data']}, {said['faults']} faults. When it is "
                f"served: infinity verify-served URL --sheet {said['sheet']}"
            )


def verify_served(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The address of the server: http://HOST:PORT.")
    ],
    sheet: Annotated[
        Path, typer.Option("--sheet", metavar="FILE", help="Of `infinity export-adapter`.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="The served adapter. Default: the only model."
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="NAME",
            help="The base, if it is served, too: its numbers show how exact the server is.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="NAME", help="The environment variable with the API key."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare what a server says with the sheet of an adapter, and name the fault.

    Asks /v1/completions of any OpenAI-compatible server for the log-probabilities of the sheet's
    tokens. The exit code is 0 if the adapter is served as it was trained, and 1 otherwise.
    """
    from infinity.tools.serving.sheet import Sheet
    from infinity.tools.serving.verify import Server, ask, judge

    read = Sheet.read(sheet)
    server = Server(url, key=key)
    total = len(read.prompts)
    with _bar(is_quiet=quiet or as_json) as progress:
        served = ask(server, read, model, lambda done: progress("adapter", done, total))
        base = None
        if base_model is not None:
            base = ask(server, read, base_model, lambda done: progress("base", done, total))
    verdict = judge(read, served, base)
    if as_json:
        typer.echo(json.dumps(asdict(verdict) | {"method": server.method}, indent=2))
    elif not quiet:
        _tell(verdict, server.method, read.groups)
    raise typer.Exit(0 if verdict.outcome == "served" else 1)


def _tell(verdict: Verdict, method: str | None, groups: dict[str, list[str]]) -> None:
    typer.echo(f"{verdict.outcome}: {verdict.sentence}")
    typer.echo(
        f"{verdict.num_tokens} tokens by {method}: the adapter changes {verdict.effect:.3g} nats, "
        f"the server differs from it by {verdict.deviation:.3g}, noise is {verdict.noise:.3g}"
    )
    if verdict.outcome == "served":
        if verdict.hidden:
            typer.echo(f"too small to be seen: {', '.join(dict.fromkeys(verdict.hidden))}")
        return
    for state in verdict.nearest:
        typer.echo(f"  {state.distance:8.3g} nats from {state}")
    members = groups.get(verdict.nearest[0].group, [])
    if verdict.outcome == "faulty" and members:
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        typer.echo(f"modules: {members[0]}{more}")


@contextmanager
def _bar(*, is_quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function of (what is done, how many are done, how many there are)."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=is_quiet) as bar:
        task = bar.add_task("", total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield advance
