"""A file for `infinity train`, decided from a model, its data and a machine.

`draft` writes the file down; `fit` tries drafts from the simplest on, everything in host memory,
until the planner says that one fits the machine. `decide` does so for a directory: for
`infinity new`, and for `infinity.from_pretrained` without a file.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from infinity.config import JobConfig, SwapConfig, render
from infinity.config.hub import model_name
from infinity.config.schema import changed
from infinity.config.schema.train import METHODS, MethodFacts
from infinity.config.source import ConfigSource
from infinity.config.values import PLACED_KINDS
from infinity.errors import CapacityError
from infinity.plan.directory import ModelDirectory
from infinity.plan.hardware import UNSURE, Device, Hardware, Host, Nvme
from infinity.plan.layout import PlannedModel
from infinity.plan.model import model_for
from infinity.plan.predict import Forecast, forecast
from infinity.sizes import GIB, MIB, align_up, counted, format_nbytes
from infinity.storage.arena import available_host_nbytes
from infinity.tiers.open_device import device_kind, is_integrated
from infinity.tools.plan.data_facts import CAPTIONED, IMAGES, DataFacts, Table, planned_batch
from infinity.tools.plan.report import duration, flops, sentences
from infinity.tools.plan.subject import files_of, has_reference, model_of_config
from infinity.tools.training.model import sharing_budgets
from infinity.tools.training.settle import settle

Forecaster = Callable[[SwapConfig], Forecast]

_WIDTH = 97  # Of a line of the file's head, without the mark of a comment.
# What is in output.directory.
_ADAPTER = "the adapter, in PEFT's format; metrics.jsonl, summary.json"
_EACH = "for each adapter a directory, with metrics.jsonl, summary.json"
_MODEL = "the model, in Hugging Face's layout; metrics.jsonl, summary.json"
_LONGEST = 4096  # Tokens of a sequence, unless more are asked for.
_LENGTH_STEP = 128
_TEXT_LENGTH = 2048
_BATCH_TOKENS = 4096  # Of one micro-batch: enough work for each of some hundred experts.
_CAPTION_LENGTH = 512  # What FLUX and Stable Diffusion 3 take.
_SEQUENCES_A_STEP = 16
_LEAST_STEPS_A_PASS = 20  # With little data, steps are smaller.
_STEPS_WITHOUT_DATA = 100
_LEAST_HELD_OUT = 50  # Sequences; of fewer none is held out.
_CHECKPOINT_EVERY_S = 600
# Of available memory. A model that computes on the host needs the rest for activations.
_HOST_PERCENT = {True: 75, False: 50}
_EVALUATIONS = 5
_OF_METHODS = {
    "classify": 'of labels, by a head; "sft" learns the texts, without train.labels',
    "dpo": '"reward" learns a head from the same records',
}
_SPARE_NBYTES = 256 * MIB
_MLP_TOKENS = 8192
_MUCH_FASTER = 1.5  # From which ratio fp32 is worth its memory.
_SMALL_WINDOW = "15%"
_OF_DENOISING = {
    "train.diffusion.resolution": "pixels of a side; 1024 takes four times as long",
    "train.diffusion.frames": "from the beginning of each video, 2 s; Wan generates 81",
    "train.batch_size": "of a micro-batch, which has sides of its own",
    "train.gradient_accumulation_steps": "micro-batches of a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The wanted training, and where files go. `rank` is that of an adapter, None for all
    weights; `sweep` has the tables of several. `length` and `sequences` (of a step, a multiple of
    `num_ranks`) are None where the data decide. `is_here`: whether the machine is this one, so that
    measured rates belong into the file. `float32_why` is why to compute in fp32, "" to compute in
    the model's dtype."""

    model: Path
    max_positions: int | None
    rank: int | None
    experts: bool
    data: DataFacts | None
    data_paths: tuple[Path, ...]
    swap: tuple[Path, ...]
    output: Path
    length: int | None = None
    sequences: int | None = None
    passes: int = 1
    num_ranks: int = 1
    is_here: bool = True
    sweep: tuple[Table, ...] = ()
    float32_why: str = ""

    @property
    def noun(self) -> str:
        """The kind of the data, "" without any."""
        return "" if self.data is None else self.data.noun

    @property
    def facts(self) -> MethodFacts:
        """The facts of the method by which the data are learned."""
        return METHODS["sft" if self.data is None else self.data.train.get("method", "sft")]

    @property
    def program(self) -> str:
        """The program that the file is for."""
        if self.num_ranks == 1:
            return "infinity"
        return f"torchrun --nproc-per-node {self.num_ranks} -m infinity"


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration, and a remark for each dotted key that needs one."""

    config: SwapConfig
    notes: Mapping[str, str]

    @property
    def steps(self) -> int:
        """The optimizer steps of the run."""
        train = self.config.train
        assert train is not None and train.steps is not None, "a draft counts in steps"
        return train.steps


@dataclass(frozen=True, slots=True)
class _Batch:
    """`sequences` of a step of one rank, `size` of them in a micro-batch."""

    length: int
    size: int
    sequences: int
    steps: int


def draft(wish: Wish, hardware: Hardware | None, *, spills: bool, inputs_on: str = "host") -> Draft:
    """Returns the file. `hardware` is None before the machine is measured. With `spills`, state
    that does not fit host memory goes to the swap directories. `inputs_on` is the first tier of
    layer inputs."""
    is_gpu = hardware is not None and not hardware.shares_host_memory
    batch, why = _batch(wish)
    num_sequences = _num_sequences(wish.data, batch.length)
    percent = _HOST_PERCENT[is_gpu]
    table: Table = {
        "schema": 1,
        "tiers": {"host": {"capacity": f"{percent}%"}},
        "placement": _placement(wish, spills=spills, is_gpu=is_gpu, inputs_on=inputs_on),
        "schedule": {"micro_batch": batch.size},
        "optimizer": {"lr": 2e-4 if wish.rank else 1e-5, "max_grad_norm": 1.0},
        "model": {"path": str(wish.model)},
        "data": {
            "paths": [str(path) for path in wish.data_paths],
            "sequence_length": batch.length,
            "held_out": 0.01 if num_sequences is None else _share_held_out(num_sequences),
        },
        "train": {
            "steps": batch.steps,
            "batch_size": batch.size,
            "gradient_accumulation_steps": batch.sequences // batch.size,
            "schedule": "cosine",
            "warmup_steps": batch.steps * 3 // 100,
        },
        "output": {"directory": str(wish.output)},
        "checkpoint": {"every": 0},
    }
    notes = {
        "tiers.host.capacity": "of the memory available at the start; the rest is for "
        + ("programs" if is_gpu else "activations"),
        "model.path": "read where it lies, never written" if wish.rank else "",
        "data.held_out": "part that is evaluated on, not trained",
        "output.directory": _EACH if wish.sweep else _ADAPTER if wish.rank else _MODEL,
        "checkpoint.every": "steps; 0: at the end, and when it is stopped. --resume goes on",
    } | why
    if spills:
        table["tiers"]["nvme"] = _drives(wish, hardware)
        notes["tiers.nvme[0].path"] = "state that host memory has no space for"
    if wish.rank is not None:
        table["adapter"] = _adapter(wish, wish.rank)
        notes["adapter.rank"] = "of an adapter on attention and dense layers; the base is frozen"
    if wish.float32_why:
        table["precision"] = {"compute": "float32"}
        notes["precision.compute"] = wish.float32_why
    if wish.facts.key == "embed":
        del table["schedule"]
    if wish.data is not None:
        table["train"] |= wish.data.train
        said = _OF_METHODS.get(wish.data.train.get("method", ""), "")
        if wish.facts.has_reference and wish.rank is None:
            said += "; the time of the model before training is not counted"
        notes["train.method"] = said
    if wish.noun in CAPTIONED:
        notes |= _OF_DENOISING
    if table["data"]["held_out"]:
        table["train"] |= {"eval_every": max(1, batch.steps // _EVALUATIONS), "eval_batches": 2}
    return Draft(
        SwapConfig.from_table(table, ConfigSource()),
        {key: said for key, said in notes.items() if said},
    )


def _candidates(wish: Wish, hardware: Hardware) -> Iterator[Draft]:
    """Yields drafts, and for long sequences the same with a smaller window, which changes no
    result, and then with MLPs in slices."""
    yield from _plain_candidates(wish, hardware)
    for has_slices in () if hardware.shares_host_memory else (False, True):
        for found in _plain_candidates(wish, hardware):
            table, notes = _set_keys(found.config), dict(found.notes)
            table["tiers"]["device"] = {"capacity": _SMALL_WINDOW}
            notes["tiers.device.capacity"] = "for weights; the rest is for long sequences"
            if has_slices:
                table["train"]["mlp_tokens"] = _MLP_TOKENS
                notes["train.mlp_tokens"] = "that an MLP computes at a time, so that a block fits"
            yield Draft(SwapConfig.from_table(table, ConfigSource()), notes)


def _set_keys(config: SwapConfig) -> Table:
    return config.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _plain_candidates(wish: Wish, hardware: Hardware) -> Iterator[Draft]:
    yield draft(wish, hardware, spills=False)
    if wish.swap and hardware.nvme is not None:
        yield draft(wish, hardware, spills=True)
        if not hardware.shares_host_memory:
            yield draft(wish, hardware, spills=True, inputs_on="nvme")
        sequences = _batch(wish)[0].sequences
        while sequences > 1:
            sequences //= 2
            smaller = replace(wish, sequences=sequences * wish.num_ranks)
            yield draft(smaller, hardware, spills=True, inputs_on="nvme")


def _settled(found: Draft, said: Forecast, forecaster: Forecaster) -> tuple[Draft, Forecast]:
    """Returns the draft with a budget of host memory no larger than what can be used, and with
    checkpoints every ten minutes."""
    every = max(1, int(_CHECKPOINT_EVERY_S / said.step.step_s))
    table, notes = _set_keys(found.config), dict(found.notes)
    if every < found.steps:
        table["checkpoint"]["every"] = every
        notes["checkpoint.every"] = "steps, about ten minutes; --resume goes on after any end"
    enough_nbytes = _enough_nbytes(said)
    if enough_nbytes < said.host_nbytes:
        capacity_nbytes = enough_nbytes * said.num_ranks  # The file has that of all ranks,
        capacity_nbytes *= 1 + has_reference(found.config)  # and of both models.
        smaller = {**table["tiers"], "host": {"capacity": capacity_nbytes}}
        lean = SwapConfig.from_table({**table, "tiers": smaller}, ConfigSource())
        try:
            on_less = forecaster(lean)
        except CapacityError:
            on_less = None
        if on_less is not None and not on_less.obstacles and not on_less.is_tight:
            notes["tiers.host.capacity"] = "enough to keep everything in memory"
            return Draft(lean, notes), on_less
    return Draft(SwapConfig.from_table(table, ConfigSource()), notes), said


def _enough_nbytes(said: Forecast) -> int:
    """Returns host memory of a rank in which nothing is read twice: all state, the frozen
    checkpoint, what is decoded, and layer inputs."""
    resting = said.host_nbytes - said.working_nbytes
    frozen = said.model.frozen
    weights = 0 if frozen is None else frozen.stored.nbytes
    in_use = 2 * (said.model.held_nbytes + said.model.most_decoded_nbytes)
    needed = resting + weights + 2 * in_use + said.saved.get("host", 0) + _SPARE_NBYTES
    return align_up(needed, GIB if needed > 16 * GIB else 64 * MIB)


def _adapter(wish: Wish, rank: int) -> Table | list[Table]:
    """Returns the section of an adapter, or one for each of a sweep, which has no experts."""
    experts = {"experts": True} if wish.experts else {}
    tables = [
        {"rank": rank, "alpha": 2.0 * chosen.get("rank", rank)} | experts | chosen
        for chosen in wish.sweep or ({},)
    ]
    return tables if wish.sweep else tables[0]


def _placement(wish: Wish, *, spills: bool, is_gpu: bool, inputs_on: str) -> Table:
    tiers = ["host", "nvme"] if spills else ["host"]
    placed: Table = dict.fromkeys(PLACED_KINDS, tiers)
    if is_gpu or (spills and wish.rank is not None):
        placed["activations"] = tiers if inputs_on == "host" else [inputs_on]
    return placed


def _drives(wish: Wish, hardware: Hardware | None) -> list[Table]:
    drives: list[Table] = [{"path": str(path)} for path in wish.swap]
    nvme = hardware.nvme if hardware is not None else None
    if wish.is_here and nvme is not None and len(drives) == 1:
        rates = {"read": nvme.read_gb_per_s, "write": nvme.write_gb_per_s}
        if nvme.mixed_gb_per_s is not None:
            rates["mixed"] = nvme.mixed_gb_per_s
        drives[0] |= {f"{name}_gb_per_s": round(rate, 2) for name, rate in rates.items() if rate}
    return drives


def _batch(wish: Wish) -> tuple[_Batch, dict[str, str]]:
    """Returns the batch and the reasons, by key."""
    length, why_length = _length(wish)
    num_sequences = _num_sequences(wish.data, length)
    most_a_step = _SEQUENCES_A_STEP * wish.num_ranks
    compares = wish.facts.key == "embed"  # The records of a batch.
    of_a_record = length * wish.facts.num_sequences
    these = "sequences" if of_a_record == length else "records"
    least = 2 if compares else 1
    of_all = wish.sequences or min(
        most_a_step,
        max(least, (num_sequences or most_a_step * _LEAST_STEPS_A_PASS) // _LEAST_STEPS_A_PASS),
    )
    wanted = max(1, of_all // wish.num_ranks)
    of_all = wanted * wish.num_ranks
    most = wanted
    if not compares:
        most = min(wanted, _BATCH_TOKENS // of_a_record, num_sequences or wanted)
    most = 1 if wish.noun in CAPTIONED else max(1, most)
    size = next(number for number in range(most, 0, -1) if wanted % number == 0)
    steps, why_steps = _STEPS_WITHOUT_DATA, "no data was given to count (infinity new --data)"
    if num_sequences is not None:
        trained = num_sequences - int(num_sequences * _share_held_out(num_sequences))
        steps = max(1, -(-wish.passes * trained // of_all))
        passes = "one pass" if wish.passes == 1 else f"{wish.passes} passes"
        kind = wish.data.noun if wish.data and wish.data.num_records else "sequences"
        why_steps = f"{passes} over {counted(trained, kind)}"
    return _Batch(length, size, wanted, steps), {
        "data.sequence_length": why_length,
        "train.steps": why_steps,
        "train.batch_size": f"{these} of a micro-batch: {size * of_a_record:,} tokens",
        "train.gradient_accumulation_steps": "micro-batches"
        + (f" of each of {wish.num_ranks} ranks" if wish.num_ranks > 1 else "")
        + f"; a step has {counted(of_all, these)}, {of_all * of_a_record:,} tokens",
        "schedule.micro_batch": "all micro-batches of a step pass a block while it is in memory",
    }


def _length(wish: Wish) -> tuple[int, str]:
    limit = wish.max_positions or _LONGEST
    if wish.length is not None:
        return wish.length, "tokens, as asked"
    if wish.noun in CAPTIONED:
        return _CAPTION_LENGTH, "tokens of a caption"
    data = wish.data
    if data is None or not data.num_records:
        return min(_TEXT_LENGTH, limit), "tokens"
    longest = align_up(max(data.longest, 1), _LENGTH_STEP)
    most = _LONGEST
    if data.noun == IMAGES:  # They are not cut, and were read with as many positions.
        most, longest = limit, min(longest, limit)
    if longest <= min(most, limit):
        return longest, f"tokens; the longest of the {data.noun} has about {data.longest:,}"
    length = min(_LONGEST, limit)
    return (
        length,
        f"tokens; some {data.noun} have more (up to about {data.longest:,}) and are cut",
    )


def _num_sequences(data: DataFacts | None, length: int) -> int | None:
    if data is None:
        return None
    return max(1, data.num_records or data.num_tokens // length)


def _share_held_out(num_sequences: int) -> float:
    if num_sequences < _LEAST_HELD_OUT:
        return 0.0
    return 0.05 if num_sequences < 20 * _LEAST_HELD_OUT else 0.01


# -- The file and the answer -----------------------------------------------------------------------


def file_of(wish: Wish, found: Draft, forecast: Forecast, name: str, today: str = "") -> str:
    """Returns the text of the file: what it is for, the plan's answer, commands, and each key with
    its remark. `name` is the file's, as the commands have it; `today` a date."""
    how = "all weights" if wish.rank is None else f"LoRA of rank {wish.rank}"
    how = f"{len(wish.sweep)} LoRA adapters over one base" if wish.sweep else how
    said = [
        f"{model_name(wish.model)}: {how}. Written by `infinity new`{today and f' on {today}'}"
        f" for {describe_machine(forecast.hardware)}.",
        *answer_lines(wish, found, forecast),
    ]
    head = [line for text in said for line in textwrap.wrap(text, _WIDTH)]
    ranks = "" if wish.num_ranks == 1 else f" --ranks {wish.num_ranks}"
    told = {
        f"{wish.program} train {name}": "with --resume it goes on after any end, to the bit",
        f"infinity plan {name}{ranks}": "what a step takes, and what would help",
        f"infinity config show {name}": "every key, its value and where it came from",
        "docs/CONFIG.md": "the meaning of every key",
    }
    width = max(map(len, told))
    head += ["", *(f"  {command:<{width}}  {what}" for command, what in told.items())]
    lines = [f"# {line}".rstrip() for line in head]
    return "\n".join(lines) + "\n" + render.to_toml(found.config, found.notes, only_set=True)


def answer_lines(wish: Wish, found: Draft, forecast: Forecast) -> list[str]:
    """Returns plan's sentences, and how long the data take."""
    said = sentences(forecast)
    if wish.data is None:
        return [*said, "How long your data take: infinity new with --data FILE."]
    data, took = wish.data, found.steps * forecast.step.step_s
    what = f"{'' if data.is_exact else 'about '}{data.num_tokens:,} tokens"
    if data.num_records:
        what = counted(data.num_records, data.noun) + f" ({what})" * bool(data.num_tokens)
    what = what if wish.passes == 1 else f"{wish.passes} times {what}"
    return [*said, f"Your data, {what}: {counted(found.steps, 'steps')}, {duration(took)}."]


def describe_machine(hardware: Hardware) -> str:
    """Returns the machine in one line."""
    host, device, nvme = hardware.host, hardware.device, hardware.nvme
    parts = [f"{format_nbytes(host.memory)} of memory"]
    if device.integrated:
        parts[0] += " for host and device"
    elif device.memory is not None:
        many = f"{device.count} devices of " if device.count > 1 else "device memory "
        parts.append(f"{many}{format_nbytes(device.memory)}")
    parts.append(flops(1e12 * device.tflops))
    if nvme is not None:
        read = nvme.checkpoint_read_gb_per_s or nvme.read_gb_per_s
        parts.append(f"drives that read {read:.3g} GB/s")
    unsure = hardware.source.partition(UNSURE)[2]
    return f"{hardware.name}: {', '.join(parts)}" + (f" (unsure: {unsure})" if unsure else "")


# -- The draft that suits a model and a machine ----------------------------------------------------


# The machine on which the first draft of a wish runs a model, whose weights are in these files.
Machine: TypeAlias = Callable[[SwapConfig, PlannedModel, Sequence[Path]], Hardware]


def decide(
    wish: Wish, directory: ModelDirectory | None, machine_of: Machine
) -> tuple[Draft, Forecast]:
    """Returns the first draft that fits the machine, and its forecast; if none fits, the last draft
    with its obstacles. A processor that is slow in the model's dtype computes in fp32 where memory
    keeps all of it. `directory` is None for the transformer of a pipeline of diffusers. Raises
    CapacityError if the state fits in no way."""
    first, model = _first(wish, directory)
    files = files_of(first, directory)
    drives = None
    if directory is not None and files and not wish.is_here:
        drives = directory.num_drives
    machine = machine_of(first, model, files)
    wide_tflops = machine.device.float32_tflops or 0.0
    ratio = wide_tflops / machine.device.tflops
    if ratio > _MUCH_FASTER:
        why = f"{ratio:.0f} times as fast on this processor as the dtype of the model"
        wide = replace(wish, float32_why=why)
        in_float32 = changed(machine, {"device.tflops": wide_tflops})
        with suppress(CapacityError):
            found, said = fit(wide, _first(wide, directory)[1], in_float32, drives)
            if not said.obstacles and not said.is_tight:
                return found, said
    return fit(wish, model, machine, drives)


def _first(wish: Wish, directory: ModelDirectory | None) -> tuple[SwapConfig, PlannedModel]:
    """Returns the first draft's file and its model, before the machine is known."""
    first = settle(draft(wish, None, spills=bool(wish.swap)).config)
    if directory is None:
        return first, model_of_config(JobConfig.of(first))
    has_images = wish.noun == IMAGES
    return first, model_for(first, directory.shape, directory.stored, has_images=has_images)


def fit(
    wish: Wish, model: PlannedModel, machine: Hardware, shard_drives: int | None = None
) -> tuple[Draft, Forecast]:
    """Returns the first draft that fits, and its forecast: in host memory, then with a swap
    directory, then with layer inputs there, then with fewer sequences a step, then with a
    smaller window, then with MLPs in slices, too. If none fits, returns the last one without
    slices, with its obstacles. Raises CapacityError if the state fits in no way."""

    def forecaster(config: SwapConfig) -> Forecast:
        settled = settle(config)
        with sharing_budgets(settled, has_second=has_reference(settled)) as shared:
            return forecast(
                shared, model, machine, planned_batch(settled), num_ranks=wish.num_ranks,
                shard_drives=shard_drives,
            )  # fmt: skip

    failure: CapacityError | None = None
    last: tuple[Draft, Forecast] | None = None
    for found in _candidates(wish, machine):
        try:
            said = forecaster(found.config)
        except CapacityError as error:
            failure = error
            if found.config.tiers.nvme:
                break  # A smaller batch has the same state.
            continue
        if not said.obstacles:
            return _settled(found, said, forecaster)
        if found.config.train and found.config.train.mlp_tokens is None:
            last = found, said
    if last is not None:
        return last
    assert failure is not None
    raise failure


def sizes_here(config: SwapConfig, *_: object) -> Hardware:
    """Returns this machine with its sizes, which take no time to read. The rates are round numbers:
    whether a draft fits does not depend on them."""
    kind = device_kind(config.tiers.device)
    memory = torch.cuda.mem_get_info()[0] if kind == "cuda" else None
    free_nbytes = min(
        (shutil.disk_usage(tier.path.parent).free for tier in config.tiers.nvme), default=0
    )
    return Hardware(
        name="this machine",
        source="sizes only",
        host=Host(
            memory=available_host_nbytes(), update_gb_per_s=10, sum_gb_per_s=10, norm_threads=1
        ),
        device=Device(
            count=1, tflops=10, memory=memory, integrated=is_integrated(kind), h2d_gb_per_s=20,
            d2h_gb_per_s=20,
        ),
        nvme=Nvme(drives=1, capacity=free_nbytes, read_gb_per_s=3, write_gb_per_s=2),
    )  # fmt: skip
