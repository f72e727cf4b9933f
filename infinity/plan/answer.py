"""The answer to "does it fit, and how long does it take": first in a plan, before its tables. Pure.

Sizes and rates here are decimal, as drives and networks are sold.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.predict import Forecast
from infinity.simulate.log import CHECKPOINT_READ, READ, WRITE

_BOUND = {
    "compute": "computing binds",
    "decode": "the decoding of stored weights binds",
    "update": "the optimizer's pass on the host binds",
    "norms": "the norms of gradients bind",
    "nvme": "the drives bind",
    "h2d": "the link to the device binds",
    "d2h": "the link from the device binds",
    "gather": "the exchange between devices binds",
    "sockets": "the exchange between hosts binds",
    "network": "the network between nodes binds",
}
_BINDING_SHARE = 0.85
_WORTH_SAYING = 1.05


@dataclass(frozen=True, slots=True)
class DataRun:
    """A pass over the user's data. `written_nbytes` are those of the drives, in all."""

    num_tokens: int
    num_steps: int
    seconds: float
    written_nbytes: int


@dataclass(frozen=True, slots=True)
class OtherDrives:
    """The step if the checkpoint lay on `drives` of the drives instead."""

    drives: int
    step_s: float


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """The copy of a frozen base before the first step: bytes at rest, decoded, of all ranks, and
    the least time to read the checkpoint on every rank and to write the copy."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes are of one step and all ranks. `obstacles` say by name what does not fit."""

    fits: bool
    obstacles: tuple[str, ...]
    step_s: float
    tokens_per_s: float
    binding: str
    binding_share: float
    read_nbytes: int
    written_nbytes: int
    endurance_steps: float | None
    data: DataRun | None
    checkpoint_drives: int | None
    other_drives: OtherDrives | None
    base_copy: BaseCopy | None


def answer(
    forecast: Forecast, data_tokens: int | None = None, other: Forecast | None = None
) -> Answer:
    """Returns the answer of a forecast. `data_tokens` of data are passed once. `other` is the same
    with the checkpoint on another number of drives."""
    step, ranks = forecast.step, forecast.num_ranks
    moved = step.moved_nbytes
    written_nbytes = ranks * moved.get(WRITE, 0)
    data = None
    if data_tokens is not None:
        num_steps = -(-data_tokens // (ranks * forecast.batch.tokens_per_step))
        data = DataRun(data_tokens, num_steps, num_steps * step.step_s, num_steps * written_nbytes)
    return Answer(
        fits=not forecast.obstacles,
        obstacles=forecast.obstacles,
        step_s=step.step_s,
        tokens_per_s=forecast.tokens_per_s,
        binding=step.binding,
        binding_share=step.busy_s[step.binding] / step.step_s,
        read_nbytes=ranks * (moved.get(READ, 0) + moved.get(CHECKPOINT_READ, 0)),
        written_nbytes=written_nbytes,
        endurance_steps=forecast.endurance_steps,
        data=data,
        checkpoint_drives=_drives(forecast),
        other_drives=None if other is None else _other(other),
        base_copy=_base_copy(forecast),
    )


def sentences(forecast: Forecast, found: Answer) -> list[str]:
    """Returns the answer in words: what fits, a step and what binds it, the data and the drives."""
    tokens = forecast.num_ranks * forecast.batch.tokens_per_step
    if found.fits:
        first = f"Yes: {_what(forecast)} fits {_where(forecast)}."
    else:
        first = f"No: {_what(forecast)} does not fit {_where(forecast)}: "
        first += "; ".join(found.obstacles)
    bound = _BOUND[found.binding]
    if found.binding_share < _BINDING_SHARE:
        bound = "nothing binds alone"
    reads = f"; it reads {decimal(found.read_nbytes)}" if found.read_nbytes else ""
    second = (
        f"A step of {tokens:,} tokens takes {duration(found.step_s)} "
        f"({found.tokens_per_s:,.4g} tokens/s): {bound}{reads}."
    )
    return [
        first,
        second,
        *_of_copy(forecast, found),
        _of_data(found),
        *_of_drives(found),
        *_of_experts(forecast),
    ]


def _of_experts(forecast: Forecast) -> list[str]:
    """Returns what a measured rate leaves out. Under an adapter a dense block is timed, and on a
    processor the product of an expert with few tokens takes as long as reading its weights."""
    model = forecast.model
    is_timed_alike = model.frozen is None or not forecast.hardware.shares_host_memory
    if is_timed_alike or not any(
        work.is_experts or work.expert_params for work in model.hooked_modules
    ):
        return []
    return [
        "Computing was timed on a dense block: on a processor, routed experts with few tokens each "
        "take several times as long."
    ]


def count(number: float) -> str:
    """Returns a number of parameters in words."""
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(int(number))


def flops(per_s: float) -> str:
    """Returns floating-point operations per second in words."""
    for size, unit in ((1e15, "PFLOPS"), (1e12, "TFLOPS"), (1e9, "GFLOPS")):
        if per_s >= size:
            return f"{per_s / size:.3g} {unit}"
    return f"{per_s / 1e6:.3g} MFLOPS"


def decimal(nbytes: float) -> str:
    """Returns bytes in decimal units."""
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Returns a time in the unit that a reader would use."""
    for unit_s, unit, least in ((365 * 86400, "years", 2), (86400, "days", 2), (3600, "hours", 2),
                                (60, "min", 10)):  # fmt: skip
        if seconds >= least * unit_s:
            return f"{seconds / unit_s:,.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _what(forecast: Forecast) -> str:
    frozen = forecast.model.frozen
    if frozen is None:
        return f"training all weights of {forecast.model.name}"
    adapter = frozen.adapter
    method = "LoRA" if adapter.method == "lora" else "DoRA"
    where = ", experts included" if adapter.experts else ""
    return (
        f"{method} of rank {adapter.rank}{where} ({count(frozen.trained_params)} parameters) "
        f"over {forecast.model.name} ({decimal(frozen.stored.nbytes)} as stored)"
    )


def _where(forecast: Forecast) -> str:
    """Returns the name of the machine, with its number if there are several."""
    ranks, name = forecast.ranks, forecast.hardware.name
    return name if ranks is None or ranks.num_nodes == 1 else f"{ranks.num_nodes} nodes of {name}"


def _base_copy(forecast: Forecast) -> BaseCopy | None:
    frozen, ranks = forecast.model.frozen, forecast.num_ranks
    if frozen is None or not frozen.is_copied:
        return None
    placed = forecast.placed_nbytes["base"]
    rates = forecast.hardware.rates(forecast.shard_drives)
    per_node = 1 if forecast.ranks is None else forecast.ranks.per_node
    read_s = per_node * frozen.stored.nbytes / rates.checkpoint_read
    write_s = per_node * placed.get("nvme", 0) / rates.nvme_write
    return BaseCopy(ranks * sum(placed.values()), read_s + write_s)


def _of_copy(forecast: Forecast, found: Answer) -> list[str]:
    copy = found.base_copy
    if copy is None:
        return []
    tiers = " and ".join(sorted(forecast.placed_nbytes["base"]))
    return [
        "The base is not read in place, because [placement] says so: before the first step it is "
        f"copied, decoded, {decimal(copy.nbytes)} to {tiers}, in {duration(copy.seconds)} or more."
    ]


def _of_data(found: Answer) -> str:
    lines = []
    if found.data is not None:
        data = found.data
        lines.append(
            f"{data.num_tokens:,} tokens of data take {duration(data.seconds)} "
            f"({data.num_steps:,} steps)"
        )
    if not found.written_nbytes:
        lines.append("nothing is written to the drives")
    else:
        worn = ""
        if found.endurance_steps is not None:
            worn = f", which wears them out after {found.endurance_steps:,.0f} steps"
            worn += f" ({duration(found.endurance_steps * found.step_s)} of training)"
        lines.append(f"a step writes {decimal(found.written_nbytes)} to the drives{worn}")
    text = "; ".join(lines)
    return text[0].upper() + text[1:] + "."


def _of_drives(found: Answer) -> list[str]:
    other, drives = found.other_drives, found.checkpoint_drives
    if other is None or drives is None:
        return []
    ratio = max(other.step_s, found.step_s) / min(other.step_s, found.step_s)
    if ratio < _WORTH_SAYING:
        return []
    if other.drives > drives:
        return [
            f"The checkpoint is on {_number(drives)}; spread over {other.drives} "
            f"(infinity spread) a step takes {duration(other.step_s)}."
        ]
    return [
        f"The checkpoint is spread over {_number(drives)} (infinity spread); on "
        f"{_number(other.drives)} a step takes {duration(other.step_s)}."
    ]


def _number(drives: int) -> str:
    return "one drive" if drives == 1 else f"{drives} drives"


def _drives(forecast: Forecast) -> int | None:
    nvme = forecast.hardware.nvme
    if forecast.model.frozen is None or nvme is None:
        return None
    return nvme.drives if forecast.shard_drives is None else forecast.shard_drives


def _other(forecast: Forecast) -> OtherDrives:
    drives = _drives(forecast)
    assert drives is not None
    return OtherDrives(drives, forecast.step.step_s)
