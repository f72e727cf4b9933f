"""`infinity merge` and `infinity quantize`: checkpoints made of checkpoints, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from infinity.sizes import format_nbytes
from infinity.tools.cli.progress import Quiet, bytes_bar

if TYPE_CHECKING:
    from infinity.checkpoint.convert.directory import DirectoryPlan

_Out = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT", help="The directory to write; a new one.")
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print a summary as JSON; progress is not shown.")
]


def merge(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="The directory of the base's weights.")
    ],
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="The directory of an adapter, as PEFT saves.")
    ],
    out: _Out,
    to: Annotated[
        Literal["bf16", "keep"],
        typer.Option(
            "--to",
            help="bf16: quantised weights become numbers. keep: changed ones are quantised again, "
            "in the format that they have; the others are copied.",
        ),
    ] = "bf16",
    any_base: Annotated[
        bool,
        typer.Option(
            "--any-base", help="Merge into another base than the adapter was trained over, too."
        ),
    ] = False,
    as_json: _Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge a LoRA or DoRA adapter into its base, as a checkpoint.

    One tensor is in memory at a time. Dense layers get the bits of PEFT's merge_and_unload.
    """
    from infinity.config.extras import require_transformers
    from infinity.config.paths import refuse_absent_adapter, refuse_no_directory

    require_transformers("infinity merge")
    refuse_no_directory(base)
    refuse_absent_adapter(adapter)
    from infinity.tools.training.merge import plan_merge

    _write(
        plan_merge(base, adapter, to=to, any_base=any_base), out, as_json=as_json, is_quiet=quiet
    )


def quantize(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory of bf16, fp16 or fp32 weights.")
    ],
    out: _Out,
    to: Annotated[
        Literal["nf4", "int4", "fp8"],
        typer.Option(
            "--to",
            help="nf4: as bitsandbytes stores it. int4: groups of 32, as compressed-tensors. fp8: "
            "E4M3 in blocks of 128x128, as DeepSeek-V3.",
        ),
    ],
    as_json: _Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantise the linear layers of a checkpoint, for a smaller base under an adapter.

    One tensor is in memory at a time. Embeddings, head, norms and routers stay as they are.
    """
    from infinity.config.paths import refuse_no_directory

    refuse_no_directory(directory)
    from infinity.checkpoint.convert.quantize import plan_quantize

    _write(plan_quantize(directory, to), out, as_json=as_json, is_quiet=quiet)


def _write(plan: DirectoryPlan, out: Path, *, as_json: bool, is_quiet: bool) -> None:
    from infinity.checkpoint.convert.directory import check_target, write_directory

    check_target(out, plan.nbytes)
    before_nbytes = plan.source.nbytes
    with bytes_bar(plan.source.path.name, plan.nbytes, is_quiet=is_quiet or as_json) as progress:
        write_directory(plan, out, progress)
    if as_json:
        summary = {
            "directory": str(out),
            "shards": list(plan.shards),
            "nbytes": plan.nbytes,
            "source_nbytes": before_nbytes,
        }
        typer.echo(json.dumps(summary, indent=2))
    elif not is_quiet:
        sizes = f"{format_nbytes(plan.nbytes)} from {format_nbytes(before_nbytes)}"
        typer.echo(f"wrote {out}: {sizes}, {len(plan.shards)} shard{'s' * (len(plan.shards) > 1)}")
