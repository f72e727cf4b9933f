"""`infinity export-adapter` and `verify-served`: an adapter for a server, and its check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from infinity.tools.cli.options import PUSH, arg, flag, opt, progress_bar, pushing, reply

if TYPE_CHECKING:
    from infinity.tools.serving.verify import Verdict


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
