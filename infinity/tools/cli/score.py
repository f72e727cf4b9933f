"""`infinity score`: the command around `infinity.tools.scoring`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from infinity.errors import ConfigError
from infinity.tools.cli.options import arg, flag, opt, progress_bar, reply


def score(
    model: Annotated[Path, arg("MODEL", "A directory of weights, or the hub's name.")],
    data: Annotated[list[Path], arg("DATA", "Texts, or records as `infinity train` reads them.")],
    output: Annotated[Path, opt("FILE", "A .jsonl or .parquet file.", "--output", "-o")],
    adapter: Annotated[Path | None, opt("DIR", "An adapter in PEFT's format.")] = None,
    config: Annotated[
        Path | None, opt("FILE", "A swap-tier file. Default: what suits this machine.")
    ] = None,
    dtype: Annotated[str | None, opt("NAME", "float32 or bfloat16. Default: the model's.")] = None,
    top_k: Annotated[int, opt("N", "Also the N likeliest tokens at each place.")] = 0,
    layers: Annotated[
        str | None, opt("N,N", "Also the hidden states of these layers; 0 is the first input.")
    ] = None,
    max_length: Annotated[
        int | None, opt("N", "Tokens of a piece of a text file. A longer record is refused.")
    ] = None,
    sweep_tokens: Annotated[
        int | None,
        opt("N", "Tokens that pass the weights together. Default: 32768, on a GPU 131072."),
    ] = None,
    routing: Annotated[
        Path | None,
        opt("FILE", "Also a census of the experts that are chosen, for adapter.experts_full."),
    ] = None,
    trust_remote_code: Annotated[
        bool, flag("--trust-remote-code", "Run the directory's own code.")
    ] = False,
) -> None:
    """Write the log-probability of every token of texts under a model of any size.

    Every weight is read once for many texts. Each record is one row, written when its sweep is
    over. The same command goes on where a run was ended.
    """
    from infinity.config.extras import require_transformers
    from infinity.tools.scoring import program

    require_transformers("infinity score")
    request = program.Request(
        model=model, data=tuple(data), output=output, adapter=adapter, config=config, dtype=dtype,
        top_k=top_k, layers=_numbers(layers), max_length=max_length, sweep_tokens=sweep_tokens,
        routing=routing, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with progress_bar("reading the model and the data") as update:
        begun_s = time.perf_counter()

        def show(done: int, total: int, read_nbytes: int) -> None:
            elapsed_s = time.perf_counter() - begun_s
            rates = f"{done / elapsed_s:,.0f} tokens/s, {read_nbytes / elapsed_s / 1e9:.2f} GB/s"
            what = f"{done:,} of {total:,} tokens, {rates}"
            update(total=total, completed=done, description=what)

        found = program.run(request, note=show)
    reply(found.to_dict(), f"{output}: {found}")


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--layers {text}: expected numbers such as 4,8") from None
