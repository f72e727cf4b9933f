"""A forecast as text and as JSON. GB/s are 10^9 bytes per second; sizes are in binary units."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infinity.plan.predict import Forecast
from infinity.simulate.clock import Timeline
from infinity.simulate.log import CHECKPOINT_READ, COMPUTE, READ, WRITE
from infinity.sizes import format_nbytes
from infinity.tools.plan.advice import Advice

# Of each track its title, and the words for a step that it binds.
_TRACKS = {
    "compute": ("compute", "computing binds"),
    "update": ("the optimizer's pass on the host", "the optimizer's pass on the host binds"),
    "norms": ("norms of gradients", "the norms of gradients bind"),
    "nvme": ("NVMe", "the drives bind"),
    "h2d": ("host to device", "the link to the device binds"),
    "d2h": ("device to host", "the link from the device binds"),
    "gather": ("between devices", "the exchange between devices binds"),
    "sockets": ("between hosts of ranks", "the exchange between hosts binds"),
    "network": ("between nodes", "the network between nodes binds"),
}
TRACK_TITLES = {track: title for track, (title, _) in _TRACKS.items()}
TIERS = ("device", "host", "nvme", "checkpoint")
# Below this share of the step no single track explains it: the tracks wait for each other.
_BINDING_SHARE = 0.85
_LEAST_GAIN = 1.02


def to_dict(forecast: Forecast, advice: Sequence[Advice]) -> dict[str, Any]:
    """Returns everything in `to_text`, in plain bytes and seconds."""
    step, batch = forecast.step, forecast.batch
    frozen = forecast.model.frozen
    adapters = [adapter.model_dump(mode="json") for adapter in (frozen.adapters if frozen else ())]
    return {
        "answer": answer(forecast) | {"text": " ".join(sentences(forecast))},
        "model": {
            **_named(forecast.model, "name", "num_params", "active_params"),
            "units": len(forecast.model.units),
            "trained_params": frozen.trained_params if frozen else forecast.model.num_params,
            "stored_nbytes": frozen and frozen.stored.nbytes,
            "formats": frozen and frozen.stored.formats,
            "adapter": adapters if len(adapters) > 1 else next(iter(adapters), None),
        },
        "hardware": forecast.hardware.model_dump(),
        "batch": asdict(batch) | {"tokens_per_step": batch.tokens_per_step},
        **_named(
            forecast, "placed_nbytes", "host_nbytes", "working_nbytes", "num_spares",
            "spare_nbytes", "is_tight", "tokens_per_s", "flops_per_s", "endurance_steps",
        ),
        "memory_nbytes": memory_by_tier(forecast),
        "suspended_nbytes": forecast.saved,
        "updates": asdict(forecast.update_place),
        **_named(step, "moved_nbytes", "busy_s", "step_s", "binding", "binding_share"),
        "idle_s": dict(idle_of_compute(forecast)),
        "advice": [asdict(item) for item in advice],
        "warnings": list(forecast.warnings),
        "ranks": None if forecast.ranks is None else asdict(forecast.ranks),
    }  # fmt: skip


def _named(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def to_text(forecast: Forecast, advice: Sequence[Advice]) -> str:
    """Returns the answer in a few sentences, then one or two dozen lines for a reader."""
    model, batch, step = forecast.model, forecast.batch, forecast.step
    hardware, place, name = forecast.hardware, forecast.update_place, forecast.batch.name
    is_updated = batch.has_backward and not hardware.shares_host_memory
    short, params = None, f"{count(model.num_params)} parameters"
    if (found := forecast.of_data) is not None:
        length, seconds = found.batch.sequence_length, duration(found.step.step_s)
        short = f"records of {length:,} tokens on average: {seconds} a step"
    if model.active_params < 0.9 * model.num_params:
        params += f", {count(model.active_params)} of them at work on a token"
    lines = [
        *sentences(forecast),
        "",
        f"{model.name}: {params}",
        *_frozen(forecast),
        f"on {hardware.name}",
        *_ranks(forecast),
        f"{batch.tokens_per_step:,} tokens a {name}: {batch.num_micro_batches} x "
        f"{batch.num_tokens:,} in sequences of {batch.sequence_length:,}"
        + (", activations recomputed" if batch.recomputes and batch.has_backward else ""),
        "",
        "where state rests" + _of_a_rank(forecast),
        *_places(forecast),
        *_taken(forecast),
        "",
        f"bytes a {name:<22}busy, of the {name}" + _of_a_rank(forecast),
        *_links(forecast),
        *_idle(forecast),
        "",
        f"{name:<10}{duration(step.step_s)}, {_rate(forecast.tokens_per_s)} tokens/s"
        + (" of all ranks" if forecast.ranks else "")
        + f", {flops(forecast.flops_per_s)} of the model",
        *([] if short is None else [f"data      {short}"]),
        *_generated(forecast),
        f"binding   {_binding(forecast)}",
        *([f"updates   on the {place.place}: {place.why}"] if is_updated else []),
        *_helps(advice),
        *_endurance(forecast),
        *(f"warning   {text}" for text in forecast.warnings),
    ]
    return "\n".join(lines)


def _generated(forecast: Forecast) -> list[str]:
    """Returns the lines of what is done before a step that learns what was generated."""
    found = _generation(forecast)
    if found is None:
        return []
    lines = ["generates on the server of train.grpo.sampler, whose time is not counted"]
    if found["token_s"] is not None:
        sweep, seconds = duration(found["token_s"]), duration(found["seconds"])
        lines = [
            f"generates up to {found['num_tokens']:,} tokens, each a sweep of {sweep}: at most "
            f"{seconds} before a step; keys and values are not counted"
        ]
    if found["score_s"] is not None:
        lines.append(f"scores    what was generated: {duration(found['score_s'])} before a step")
    return lines


def _generation(forecast: Forecast) -> dict[str, Any] | None:
    token, scores, num_tokens = forecast.of_token, forecast.of_scores, forecast.num_generated
    if not num_tokens:
        return None
    return {
        "num_tokens": num_tokens,
        "token_s": token and token.step.step_s,
        "seconds": token and num_tokens * token.step.step_s,
        "score_s": scores and scores.step.step_s,
    }


def _frozen(forecast: Forecast) -> list[str]:
    frozen, nvme = forecast.model.frozen, forecast.hardware.nvme
    if frozen is None or nvme is None:
        return []
    where = f"on {_drives(forecast)} of {nvme.drives} drives"
    if nvme.checkpoint_read_gb_per_s is not None:
        where = f"read at {nvme.checkpoint_read_gb_per_s:.3g} GB/s"
    bits = 8 * frozen.stored.nbytes / forecast.model.num_params
    return [
        f"frozen, {format_nbytes(frozen.stored.nbytes)} in its checkpoint "
        f"({frozen.stored.formats}; {bits:.3g} bits a parameter), {where}"
        + (f"; {count(frozen.trained_params)} parameters trained" if frozen.adapters else "")
    ]


def _ranks(forecast: Forecast) -> list[str]:
    ranks, hardware = forecast.ranks, forecast.hardware
    if ranks is None:
        return []
    rates = hardware.of_rank(ranks.per_node).rates()
    between = (
        f"between devices at {rates.peers / 1e9:,.3g} GB/s where they can"
        if ranks.is_collective
        else "between hosts"
    )
    nodes = f" on {ranks.num_nodes} nodes" if ranks.num_nodes > 1 else ""
    estimated = "" if hardware.host.sockets_gb_per_s else ", an estimate by host.sum_gb_per_s"
    nodes += ", each with all frozen weights" if ranks.is_over_node else ""
    return [
        f"{ranks.count} ranks{nodes}, stage {ranks.stage}, each with a batch of its own; exchange "
        f"{between}; sockets {rates.sockets / 1e9:,.3g} GB/s a rank{estimated}"
        + (f"; network {rates.network / 1e9:,.3g} GB/s a rank" if nodes else "")
    ]


def _of_a_rank(forecast: Forecast) -> str:
    """Names the rank in headings. Ranks differ by the remainder of units that do not divide
    evenly."""
    return "" if forecast.ranks is None else ", of one rank"


def _taken(forecast: Forecast) -> list[str]:
    if forecast.ranks is None:
        return []
    parts = [
        f"{tier} {format_nbytes(taken)}" + ("" if of is None else f" of {format_nbytes(of)}")
        for tier, (taken, of) in forecast.ranks.taken_nbytes.items()
    ]
    return ["  " + f"{'a rank takes':<14}" + ", ".join(parts)]


def _by_tier(tiers: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in tiers.items())


def memory_by_tier(forecast: Forecast) -> dict[str, dict[str, int]]:
    """Returns the bytes of everything that takes memory or drives, by kind and tier. Layer inputs
    are the most at a time; host memory in all is the sum of its column."""
    found = {kind: dict(tiers) for kind, tiers in forecast.placed_nbytes.items()}
    if forecast.saved:
        found["layer inputs"] = dict(forecast.saved)
    inputs_nbytes = forecast.saved.get("host", 0)
    found["working memory"] = {"host": max(0, forecast.working_nbytes - inputs_nbytes)}
    if forecast.spare_nbytes:
        found["spare generations"] = {"nvme": forecast.spare_nbytes}
    return found


def _places(forecast: Forecast) -> list[str]:
    lines = [f"  {kind:<12}{_by_tier(tiers)}" for kind, tiers in forecast.placed_nbytes.items()]
    if forecast.saved:
        lines.append(f"  {'activations':<12}{_by_tier(forecast.saved)} at the most")
    if forecast.spare_nbytes:
        lines.append(
            f"  {'spare':<12}nvme {format_nbytes(forecast.spare_nbytes)} in "
            f"{forecast.num_spares} spare generations, for commits, checkpoints on the same file "
            "system and updates in both passes"
        )
    tight = ", tight: nothing is kept or read ahead" if forecast.is_tight else ""
    lines.append(
        f"  {'host':<12}{format_nbytes(forecast.host_nbytes)} in all, "
        f"{format_nbytes(forecast.working_nbytes)} to work in{tight}"
    )
    return lines


def _links(forecast: Forecast) -> list[str]:
    step = forecast.step
    lines = []
    for track, title in TRACK_TITLES.items():
        busy_s = step.busy_s.get(track, 0.0)
        if not busy_s:
            continue
        # "nvme_read" belongs to the track "nvme", "h2d" to its own track.
        moved = [
            f"{name.removeprefix(track).lstrip('_')} {format_nbytes(nbytes)}".lstrip()
            for name, nbytes in step.moved_nbytes.items()
            if name == track or name.startswith(f"{track}_")
        ]
        if track == "nvme" and CHECKPOINT_READ in step.moved_nbytes:
            moved.insert(0, f"checkpoint {format_nbytes(step.moved_nbytes[CHECKPOINT_READ])}")
        share = f"{duration(busy_s)}, {busy_s / step.step_s:.0%}"
        lines.append(f"  {title:<34}{share:<16}{', '.join(moved)}".rstrip())
    return lines


def idle_of_compute(forecast: Forecast) -> list[tuple[str, float]]:
    """Returns what the device waits for while it computes nothing, in words, with seconds of a
    step; the longest first."""
    step = forecast.step
    found = idle_by_cause(step.timeline, COMPUTE, step.step_s)
    return [
        (f"{TRACK_TITLES[track]}: {kind}" if kind else track, idle_s)
        for (track, kind), idle_s in sorted(found.items(), key=lambda item: -item[1])
    ]


def _idle(forecast: Forecast) -> list[str]:
    """Returns a line with the causes that take a hundredth of the step or more."""
    step_s = forecast.step.step_s
    causes = [
        f"{idle_s / step_s:.0%} for {cause}"
        for cause, idle_s in idle_of_compute(forecast)
        if idle_s >= step_s / 100
    ]
    return ["", f"idle      compute waits {', '.join(causes)}"] if causes else []


def _binding(forecast: Forecast) -> str:
    step = forecast.step
    share = step.binding_share
    if share >= _BINDING_SHARE:
        return f"{TRACK_TITLES[step.binding]}, busy {share:.0%} of the {forecast.batch.name}"
    return (
        f"nothing alone; {TRACK_TITLES[step.binding]} most, busy {share:.0%} of the "
        f"{forecast.batch.name}. The rest "
        "is waiting for one another"
    )


def _helps(advice: Sequence[Advice]) -> list[str]:
    useful = [item for item in advice if item.ratio >= _LEAST_GAIN]
    if not useful:
        return ["helps     none of what was tried: more memory, drives, links, compute, tokens"]
    return [
        f"{'helps' if number == 0 else '':<10}{item.change}: {item.ratio - 1:+.0%} tokens/s"
        for number, item in enumerate(useful[:5])
    ]


def _endurance(forecast: Forecast) -> list[str]:
    written = forecast.num_ranks * forecast.step.moved_nbytes.get("nvme_write", 0)
    if not written:
        return ["drives    nothing is written"]
    steps = forecast.endurance_steps
    per_step = f"{decimal(written)} written a step"
    if steps is None:
        return [f"drives    {per_step}: {1e15 / written:,.0f} steps for each PB of endurance"]
    days = steps * forecast.step.step_s / 86400
    return [
        f"drives    {per_step}; worn out after "
        + (f"{steps:,.0f}" if steps < 1e7 else f"{steps:.1e}")
        + f" steps, {days:,.0f} days of this run"
    ]


_WORTH_SAYING = 1.05


def answer(forecast: Forecast) -> dict[str, Any]:
    """Returns the answer in numbers. Bytes are of one step and all ranks, those of `data` of the
    whole pass. `obstacles` say by name what does not fit; `other_drives` has the step with the
    checkpoint on another number of drives, `of_data` that with sequences as long as the data's;
    `generation` the most tokens of a completion and the seconds before a step, None of a server."""
    step, ranks, other = forecast.step, forecast.num_ranks, forecast.other
    of_data = forecast.of_data
    moved, drives = step.moved_nbytes, _drives(forecast)
    written_nbytes = ranks * moved.get(WRITE, 0)
    data = None
    if forecast.data_tokens is not None:
        num_steps = -(-forecast.data_tokens // (ranks * forecast.batch.tokens_per_step))
        data = {
            "num_tokens": forecast.data_tokens,
            "num_steps": num_steps,
            "seconds": num_steps * step.step_s,
            "written_nbytes": num_steps * written_nbytes,
        }
    return {
        "fits": not forecast.obstacles,
        "obstacles": forecast.obstacles,
        **_named(step, "step_s", "binding", "binding_share"),
        **_named(forecast, "tokens_per_s", "endurance_steps"),
        "read_nbytes": ranks * (moved.get(READ, 0) + moved.get(CHECKPOINT_READ, 0)),
        "written_nbytes": written_nbytes,
        "data": data,
        "checkpoint_drives": drives,
        "other_drives": other and {"drives": _drives(other), "step_s": other.step.step_s},
        "of_data": of_data
        and {"sequence_length": of_data.batch.sequence_length, "step_s": of_data.step.step_s},
        "generation": _generation(forecast),
        "base_copy": _base_copy(forecast),
    }


def sentences(forecast: Forecast) -> list[str]:
    """Returns the answer in words: what fits, a step and what binds it, the data and the drives."""
    tokens, found = forecast.num_ranks * forecast.batch.tokens_per_step, answer(forecast)
    if found["fits"]:
        first = f"Yes: {_what(forecast)} fits {_where(forecast)}."
    else:
        first = f"No: {_what(forecast)} does not fit {_where(forecast)}: "
        first += "; ".join(found["obstacles"])
    bound = _TRACKS[found["binding"]][1]
    if found["binding_share"] < _BINDING_SHARE:
        bound = "nothing binds alone"
    reads = f"; it reads {decimal(found['read_nbytes'])}" if found["read_nbytes"] else ""
    second = (
        f"A {forecast.batch.name} of {tokens:,} tokens takes {duration(found['step_s'])} "
        f"({_rate(found['tokens_per_s'])} tokens/s): {bound}{reads}."
    )
    return [
        first,
        second,
        *_of_copy(forecast, found["base_copy"]),
        _of_data(found, forecast.batch.name),
        *_of_drives(forecast, found["checkpoint_drives"]),
        *_of_experts(forecast),
    ]


def _of_experts(forecast: Forecast) -> list[str]:
    """Returns what a measured rate leaves out where a dense block was timed: on a processor the
    product of an expert with few tokens takes as long as reading its weights."""
    model, machine = forecast.model, forecast.hardware
    is_timed_alike = model.frozen is None or not machine.shares_host_memory
    if is_timed_alike or machine.host.hold_gb_per_s is not None or not model.has_experts:
        return []
    return [
        "Computing was timed on a dense block: on a processor, routed experts with few tokens each "
        "take several times as long."
    ]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def count(number: float) -> str:
    """Returns a number of parameters in words."""
    return _scaled(number, " kMBT") or str(int(number))


def flops(per_s: float) -> str:
    """Returns floating-point operations per second in words."""
    return _scaled(per_s / 1e6, "MGTP", "FLOPS") or f"{per_s / 1e6:.3g} MFLOPS"


def decimal(nbytes: float) -> str:
    """Returns bytes in decimal units."""
    return _scaled(nbytes, " kMGTP", "B") or f"{nbytes:.0f} bytes"


def _scaled(number: float, prefixes: str, unit: str = "") -> str:
    """Returns a number with the largest prefix, each of which is 1000 times the one before; "" if
    it needs none."""
    power = max((p for p in range(1, len(prefixes)) if number >= 1000**p), default=0)
    return f"{number / 1000**power:.3g} {prefixes[power]}{unit}" if power else ""


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
    adapters, stored = frozen.adapters, f"{decimal(frozen.stored.nbytes)} as stored"
    if not adapters:
        return f"scoring under {forecast.model.name} ({stored})"
    methods = {"lora": "LoRA", "dora": "DoRA"}
    kinds = dict.fromkeys(f"{methods[of.method]} of rank {of.rank}" for of in adapters)
    how = f"{len(adapters)} adapters, " * (len(adapters) > 1) + " and ".join(kinds)
    how += ", experts included" * any(of.experts for of in adapters)
    if experts := adapters[0].experts_full:
        how = f"{how} and " * bool(adapters[0].targets) + f"{len(experts)} experts in full"
    return (
        f"{how} ({count(frozen.trained_params)} parameters) over {forecast.model.name} ({stored})"
    )


def _where(forecast: Forecast) -> str:
    """Returns the name of the machine, with its number if there are several."""
    ranks, name = forecast.ranks, forecast.hardware.name
    return name if ranks is None or ranks.num_nodes == 1 else f"{ranks.num_nodes} nodes of {name}"


def _base_copy(forecast: Forecast) -> dict[str, Any] | None:
    """Returns the copy of a frozen base before the first step: bytes at rest, decoded, of all
    ranks, and the least time to read the checkpoint on every rank and to write the copy."""
    frozen, ranks = forecast.model.frozen, forecast.num_ranks
    if frozen is None or not frozen.is_copied:
        return None
    placed = forecast.placed_nbytes["base"]
    rates = forecast.hardware.rates(forecast.shard_drives)
    per_node = 1 if forecast.ranks is None else forecast.ranks.per_node
    read_s = per_node * frozen.stored.nbytes / rates.checkpoint_read
    write_s = per_node * placed.get("nvme", 0) / rates.nvme_write
    return {"nbytes": ranks * sum(placed.values()), "seconds": read_s + write_s}


def _of_copy(forecast: Forecast, copy: dict[str, Any] | None) -> list[str]:
    if copy is None:
        return []
    tiers = " and ".join(sorted(forecast.placed_nbytes["base"]))
    return [
        "The base is not read in place, because [placement] says so: before the first step it is "
        f"copied, decoded, {decimal(copy['nbytes'])} to {tiers}, in {duration(copy['seconds'])} "
        "or more."
    ]


def _of_data(found: dict[str, Any], name: str) -> str:
    lines = []
    if (data := found["data"]) is not None:
        lines.append(
            f"{data['num_tokens']:,} tokens of data take {duration(data['seconds'])} "
            f"({data['num_steps']:,} {name}s)"
        )
    if not found["written_nbytes"]:
        lines.append("nothing is written to the drives")
    else:
        worn, steps = "", found["endurance_steps"]
        if steps is not None:
            worn = f", which wears them out after {steps:,.0f} steps"
            worn += f" ({duration(steps * found['step_s'])} of training)"
        lines.append(f"a {name} writes {decimal(found['written_nbytes'])} to the drives{worn}")
    text = "; ".join(lines)
    return text[0].upper() + text[1:] + "."


def _of_drives(forecast: Forecast, drives: int | None) -> list[str]:
    if forecast.other is None or drives is None:
        return []
    step_s, other_s, name = forecast.step.step_s, forecast.other.step.step_s, forecast.batch.name
    other_drives = _drives(forecast.other)
    if other_drives is None or max(other_s, step_s) / min(other_s, step_s) < _WORTH_SAYING:
        return []
    if other_drives > drives:
        return [
            f"The checkpoint is on {_number(drives)}; spread over {other_drives} "
            f"(infinity spread) a {name} takes {duration(other_s)}."
        ]
    return [
        f"The checkpoint is spread over {_number(drives)} (infinity spread); on "
        f"{_number(other_drives)} a {name} takes {duration(other_s)}."
    ]


def _number(drives: int) -> str:
    return "one drive" if drives == 1 else f"{drives} drives"


def _drives(forecast: Forecast) -> int | None:
    nvme = forecast.hardware.nvme
    if forecast.model.frozen is None or nvme is None:
        return None
    return nvme.drives if forecast.shard_drives is None else forecast.shard_drives


# -- The operations that an idle track of a simulated step waits for -------------------------------


EARLIER = "the step before"


def idle_by_cause(timeline: Timeline, track: str, step_s: float) -> Mapping[tuple[str, str], float]:
    """Returns the idle seconds of `track` between 0 and `step_s`, by (track, what it moves).

    An operation that starts after a gap started because another one ended at that moment, which in
    turn was started by the end of a third: the path to the gap's end. The gap is counted for the
    track on this path that was busiest since the operation before the gap began, because a faster
    one of the others would only wait for it; of equally busy ones for the last on the path. A gap
    without such a path is counted for the step before. The simulated clock starts an operation at
    the very time of an end, so times are compared for equality.
    """
    loads = _Loads(timeline)
    idle_s: dict[tuple[str, str], float] = defaultdict(float)
    for begin_s, start_s, end_s in _gaps(timeline, track, step_s):
        on_path = [other for other in loads.path(end_s, begin_s) if other != track]
        busy_s = loads.between(begin_s, end_s, on_path)
        if busy_s:
            slowest = max(on_path, key=lambda other: sum(busy_s[other].values()))
            cause = slowest, max(busy_s[slowest], key=lambda what: busy_s[slowest][what])
        else:
            cause = EARLIER, ""
        idle_s[cause] += end_s - start_s
    return dict(idle_s)


class _Loads:
    """The operations of a timeline that take time, by track and by the time of their end."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ended_at: dict[float, list[int]] = defaultdict(list)
        self._of_track: dict[str, list[int]] = defaultdict(list)
        order = sorted(range(len(timeline.operations)), key=lambda index: timeline.finish_s[index])
        for index in order:
            operation = timeline.operations[index]
            if operation.duration_s:
                self._ended_at[timeline.finish_s[index]].append(index)
                self._of_track[operation.track].append(index)
        self._ends = {
            track: [timeline.finish_s[index] for index in indexes]
            for track, indexes in self._of_track.items()
        }

    def path(self, at_s: float, from_s: float) -> Iterable[str]:
        """Returns the tracks of the operations that led, one after the other, to `at_s`, the last
        first."""
        tracks: dict[str, None] = {}
        while at_s > from_s and (ended := self._ended_at.get(at_s)):
            tracks.setdefault(self._timeline.operations[ended[0]].track)
            at_s = self._timeline.start_s[ended[0]]
        return tracks

    def between(
        self, from_s: float, to_s: float, tracks: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """Returns the busy seconds of tracks in a time, by what they moved."""
        busy_s: dict[str, dict[str, float]] = {track: defaultdict(float) for track in tracks}
        for track in tracks:
            first = bisect_left(self._ends[track], from_s)
            for index in self._of_track[track][first:]:
                start_s = max(self._timeline.start_s[index], from_s)
                if start_s >= to_s:
                    break
                name = _moved(self._timeline.operations[index].name)
                busy_s[track][name] += min(self._timeline.finish_s[index], to_s) - start_s
        return busy_s


def _gaps(timeline: Timeline, track: str, step_s: float) -> Iterator[tuple[float, float, float]]:
    """Yields the stretches of the step in which no operation of the track runs, as (start of the
    operation before, start, end)."""
    busy = sorted(
        (timeline.start_s[index], timeline.finish_s[index])
        for index, operation in enumerate(timeline.operations)
        if operation.track == track and operation.duration_s
    )
    begin_s = free_s = 0.0
    for start_s, finish_s in [*busy, (step_s, step_s)]:
        if min(start_s, step_s) > free_s:
            yield begin_s, free_s, min(start_s, step_s)
        if finish_s > free_s:
            begin_s, free_s = max(start_s, 0.0), finish_s


def _moved(name: str) -> str:
    """Returns "weights" of "backward: weights of block 3", "backward" of "backward: block 3"."""
    before, _, what = name.partition(": ")
    word, found, _ = what.partition(" of ")
    return word if found else before
