#!/usr/bin/env python3
"""Shows that a refactoring changes nothing: seeded runs, and digests of all that they leave.

    scripts/witness.py                compares with scripts/witness.json; status 1 for a difference
    scripts/witness.py --only NAME    runs with NAME in their names; may be repeated
    scripts/witness.py --write        writes the digests, after a change that is meant
    scripts/witness.py --dump DIR     also writes what was digested, a text file per run, for `diff`

A digest covers one thing, so a difference says what kind it is:

    losses, weights, masters, moments    bits; of an adapter and of ranks some are in the checkpoint
    checkpoint    every file of a checkpoint, less times, inodes and names of places
    bytes         counters: bytes by link, fetches, early updates kept and undone
    transfers     requests to the drives in their order: operation, priority, file, ranges

Every transfer is over when `submit` returns, copies of the simulated device too, and the clock
stands still. So no decision depends on the speed of the machine, and the order of requests is that
of the code. Ranks, and updates in both passes beside a device, leave the order to threads and have
no digest of it.

Bits depend on torch and on the vector instructions of the processor, by which MKL chooses its
kernels. The file of digests names both; where it names others, only bytes and transfers are
compared with it. Write the digests of the older commit first to compare two commits there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy
import torch
from torch import Tensor

import infinity
from infinity import api
from infinity.errors import InfinityError
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.testing import SimulatedDevice, simulated_device
from infinity.testing.faulty_engine import WrappedEngine
from tests.multirank import early_run, work
from tests.multirank.processes import run_ranks
from tests.parity import in_place
from tests.parity.harness import smallest_host_nbytes
from tests.support.exhaustive import covering
from tests.support.models import TinyDecoder
from tests.support.offloading import swap_config

VECTORS = [name for name, is_there in getattr(torch.cpu, "get_capabilities", dict)().items()
           if is_there is True and name.startswith(("avx", "amx"))]  # fmt: skip
MADE_BY = f"torch {torch.__version__} on {' '.join(sorted(VECTORS))}"
ON_ANY_PROCESSOR = ("bytes", "transfers")
RECORD = Path(__file__).with_suffix(".json")
STEPS, SAVED_AT, EVENT_AT = 7, 3, 5
LINKS = re.compile(r"nvme_|shard_|device_(in|out)|activation_|fetches$|early_")
LINKS_OF_RANKS = re.compile(r"ranks_reduced|fetches$")  # The others depend on who comes first.
Parts = dict[str, Any]

PLACES: dict[str, dict[str, Any]] = {
    "device": dict.fromkeys(("parameters", "master", "moments", "gradients"), "device"),
    "host": {},
    "nvme": dict.fromkeys(("parameters", "master", "moments", "gradients"), "nvme"),
    "mixed": {"parameters": ["host", "nvme"], "moments": "nvme", "gradients": "device"},
}
PROPERTIES: dict[str, list[Any]] = {
    "place": [*PLACES],
    "compute": ["float32", "bfloat16"],
    "moments": ["float32", "8bit"],
    "tile": [0, "64KiB"],
    "order": ["loop", "layers"],
    "device": ["cpu", "simulated"],
    "updates": ["at_step", "deferred", "both_passes"],
    "event": ["none", "clipped", "skipped", "looked", "again"],
    "budget": ["ample", "least"],
    "resume": ["no", "copied", "adopted"],
}
PLAIN = {name: values[0] for name, values in PROPERTIES.items()}
EARLY = PLAIN | {"place": "nvme", "compute": "bfloat16", "updates": "both_passes"}

# -- What a run leaves -----------------------------------------------------------------------------


class Recorder(WrappedEngine):
    """Notes every request, and lets no caller see one that is not over."""

    requests: list[tuple[Any, ...]] = []  # noqa: RUF012

    def __init__(self, engine: StorageEngine) -> None:
        super().__init__(engine, "recorder")

    def submit(
        self, operation: Operation, segments: Iterable[Segment], priority: Priority
    ) -> Ticket:
        segments = list(segments)
        places = [
            (swap_name(Path(self._paths[s.file]).name), s.offset_nbytes, s.nbytes) for s in segments
        ]
        self.requests.append((operation, priority.name, *places))
        ticket = super().submit(operation, segments, priority)
        while not ticket.done():
            time.sleep(0)
        return ticket


class AtOnce:
    """A stream of the simulated device whose tasks are over when they are issued."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, task: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(task())
        return future

    def close(self) -> None: ...

    def is_current(self) -> bool:
        return False


@contextmanager
def nothing_waits(*, has_clock: bool = False) -> Iterator[list[tuple[Any, ...]]]:
    """Engines made meanwhile have a Recorder; yields its requests."""
    real, worker = api.build, simulated_device.StreamWorker
    clocks = time.monotonic, time.monotonic_ns, time.perf_counter
    Recorder.requests = []
    api.build = partial(real, wrap_storage=Recorder)
    simulated_device.StreamWorker = AtOnce  # type: ignore[assignment,misc]
    if not has_clock:
        time.monotonic, time.monotonic_ns, time.perf_counter = lambda: 1.0, lambda: 1, lambda: 1.0
    try:
        yield Recorder.requests
    finally:
        api.build, simulated_device.StreamWorker = real, worker  # type: ignore[misc]
        time.monotonic, time.monotonic_ns, time.perf_counter = clocks


def tensors(named: Mapping[str, Tensor]) -> Iterator[tuple[Any, ...]]:
    for name, tensor in sorted(named.items()):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        yield name, tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(content).hexdigest()


VOLATILE = {"created", "path", "mtime_ns", "inode", "sha256"}  # Keys of JSON: times and places.


def lasting(value: Any) -> Any:
    """A JSON value without what differs between two equal runs."""
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if key not in VOLATILE}
    return [lasting(each) for each in value] if isinstance(value, list) else swap_name(str(value))


def swap_name(name: str) -> str:
    return re.sub("infinity-[0-9a-f]{16}", "infinity", name)


def files(directory: Path) -> Iterator[tuple[Any, ...]]:
    for path in sorted(p for p in directory.rglob("*") if p.suffix != ".sha256" and p.is_file()):
        content = path.read_bytes()
        if path.suffix == ".json":
            content = json.dumps(lasting(json.loads(content))).encode()
        yield swap_name(str(path.relative_to(directory))), hashlib.sha256(content).hexdigest()


def state_of(model: Any, optimizer: Any) -> Parts:
    engine = infinity.engine_of(model)
    names = engine.parameter_names()
    moments = {
        f"{name}.{key}": value
        for name, handle in model.named_parameters()
        if handle.requires_grad
        for key, value in optimizer.state[handle].items()
        if isinstance(value, Tensor)
    }
    return {
        "weights": [*tensors({name: engine.read_parameter(name) for name in names})],
        "masters": [*tensors({n: engine.read_parameter(n, master=True) for n in names})],
        "moments": [*tensors(moments)],
    }


def links_of(model: Any, names: re.Pattern[str] = LINKS) -> dict[str, int]:
    found = infinity.engine_of(model).counters.snapshot()
    return {name: int(value) for name, value in sorted(found.items()) if names.match(name)}


# -- One rank --------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), numpy.random.seed(seed), random.seed(seed)


def decoder(case: Mapping[str, Any]) -> TinyDecoder:
    seed_all(0)
    model = TinyDecoder(width=128, layers=3, heads=4, vocab=448).train()
    return model.to(getattr(torch, case["compute"]))


def configure(case: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    config = swap_config(
        directory / "swap", placement=PLACES[case["place"]], updates=case["updates"],
        compute=case["compute"], host_nbytes="24MiB",
        precision={"moments": case["moments"]}, schedule={"tile": case["tile"]},
    )  # fmt: skip
    if case["resume"] == "adopted":
        config["checkpoint"] = {"directory": str(directory / "checkpoints"), "durability": "step"}
    if case["budget"] == "least":
        needed = smallest_host_nbytes(partial(decoder, case), config, device_of(case))
        config["tiers"]["host"]["capacity"] = needed
    return config


def device_of(case: Mapping[str, Any]) -> SimulatedDevice | None:
    return SimulatedDevice(7) if case["device"] == "simulated" else None


def step(model: Any, optimizer: Any, case: Mapping[str, Any], number: int) -> list[Any]:
    """One step of two micro-batches. What is unlike the steps before comes at EVENT_AT."""
    event = case["event"] if number == EVENT_AT else "none"

    def loss_of(seed: int) -> Tensor:
        return model(**model.inputs(seed)) / 2

    seeds = [2 * number, 2 * number + 1]
    if case["order"] == "layers":
        losses = infinity.forward_backward(model, loss_of, seeds)
    else:
        losses = []
        for seed in seeds:
            losses.append(loss_of(seed))
            losses[-1].backward()
    seen = [loss.item() for loss in losses]
    if event == "again":  # One more backward than any step before.
        loss_of(99).backward()
    if event == "looked":
        engine = infinity.engine_of(model)
        for name in ("blocks.1.out.weight", "tokens.weight", "blocks.0.norm_1.weight"):
            seen += tensors({name: engine.read_parameter(name)})
            gradient = engine.read_gradient(name)
            assert gradient is not None
            seen += tensors({name: gradient})
    optimizer.max_grad_norm = 1e-3 if event == "clipped" else 1e6
    if event != "skipped":
        optimizer.step()
        seen.append(optimizer.grad_norm.item())
    optimizer.zero_grad()
    return seen


def one_rank(case: Mapping[str, Any], directory: Path) -> Parts:
    checkpoints, losses, counted = directory / "checkpoints", [], []
    with nothing_waits() as requests:
        config = configure(case, directory)
        requests.clear()
        model = infinity.offload(decoder(case), config, device=device_of(case))
        optimizer = infinity.AdamW(model, lr=1e-2)
        for number in range(STEPS):
            if number == SAVED_AT and case["resume"] != "no":
                saving = infinity.checkpoint.save(checkpoints, model, optimizer)
                counted.append(links_of(model))
                infinity.close(model)
                resume = saving if case["resume"] == "adopted" else None
                model = infinity.offload(
                    decoder(case), config, device=device_of(case), resume=resume
                )
                optimizer = infinity.AdamW(model, lr=1e-2)
                infinity.checkpoint.load(checkpoints, model, optimizer)
            losses += step(model, optimizer, case, number)
        counted.append(links_of(model))
        saved = infinity.checkpoint.save(directory / "last", model, optimizer)
        parts = state_of(model, optimizer)
        infinity.close(model)
        del model, optimizer
    parts |= {"losses": losses, "checkpoint": [*files(saved)]}
    if case["device"] == "simulated" and case["updates"] == "both_passes":
        return parts  # A thread updates beside the device: how far it comes is not told.
    return parts | {"bytes": counted, "transfers": requests}


# -- An adapter over a quantised base in its own files ---------------------------------------------

ADAPTERS = {
    "adapter-llama": ("llama-int4", {"order": "loop", "device": "cpu", "budget": "ample"}),
    "adapter-llama-least": ("llama-int4", {"order": "layers", "device": "cpu", "budget": "least"}),
    "adapter-kimi-layers": ("kimi-int4", {"order": "layers", "device": "cpu", "budget": "ample"}),
    "adapter-kimi-device": (
        "kimi-int4",
        {"order": "loop", "device": "simulated", "budget": "least"},
    ),
}


def adapter(base_name: str, case: Mapping[str, Any], directory: Path) -> Parts:
    architecture, layout = in_place.CASES[base_name]
    seed_all(0)
    base = in_place.Base.at(directory / "base")
    in_place.write_quantized(in_place.tiny_causal_lm(architecture), base.quantized, layout)
    with nothing_waits() as requests:
        config = in_place.config_of(directory, io={"engine": "threads"}, schedule={"tile": 0})
        if case["budget"] == "least":
            config["tiers"]["host"]["capacity"] = "least"
            config = in_place.at_least(base, config, case["device"] != "cpu")
        requests.clear()
        with in_place.over(base, config, device=device_of(case)) as (model, _):
            optimizer = infinity.AdamW(model, lr=1e-2)
            seen = in_place.train(model, optimizer, layer_major=case["order"] == "layers")
            saved = infinity.checkpoint.save(directory / "last", model, optimizer)
            parts = {"losses": [*tensors(seen)], "checkpoint": [*files(saved)],
                     "bytes": links_of(model)}  # fmt: skip
    return {**parts, "transfers": requests}


# -- Two ranks -------------------------------------------------------------------------------------

RANKS = {
    "ranks-1-host": work.Case(1, compute="bfloat16"),
    "ranks-1-nvme-8bit": work.Case(1, work.NVME, moments="8bit", accumulation=2),
    "ranks-2-mixed-layers": work.Case(2, work.MIXED, layer_major=True, accumulation=3),
    "ranks-2-tiles": work.Case(2, work.NVME, model="wide", tile=1 << 20, compute="bfloat16"),
    "ranks-3-nvme": work.Case(3, work.NVME, max_norm=0.5, optimizer="lion"),
    "ranks-3-skips": work.Case(3, work.MIXED, skips=True, model="experts", optimizer="momentum"),
    "ranks-3-layers": work.Case(3, layer_major=True, accumulation=2, simulated=True),
    "ranks-3-collective": work.Case(3, work.NVME, simulated=True, exchange="collective"),
    "ranks-3-early": work.Case(3, work.NVME, updates="both_passes", update_chunk="64KiB", steps=5),
    "ranks-3-early-taken-back": work.Case(
        3, work.NVME, updates="both_passes", compute="bfloat16", max_norm=0.5, steps=5
    ),
}


def one_of_ranks(rank: int, case: work.Case) -> Parts:
    directory = Path(tempfile.gettempdir())
    seed_all(rank)
    with nothing_waits(has_clock=True):
        if case.updates == "both_passes":
            early = early_run.EarlyRun(rank, case, directory)
            model, optimizer = early.model, early.optimizer
            losses: list[Any] = []  # `EarlyRun` shows none.
            early.ready()
            for number in range(case.steps):
                early.backward()
                early.await_early()
                clips = case.max_norm is not None and number % 2 == 1
                optimizer.max_grad_norm = 1e-3 if clips else None
                early.step()
        else:
            model = work.offload_case(case, directory / "swap")
            optimizer = work.make_optimizer(model, case, max_grad_norm=case.max_norm)
            losses = [work.one_step(model, optimizer, rank, case, n) for n in range(case.steps)]
        counted = links_of(model, LINKS_OF_RANKS)
        saved = infinity.checkpoint.save(directory / "last", model, optimizer)
        engine = infinity.engine_of(model)
        names = engine.parameter_names()
        weights = [*tensors({name: engine.read_parameter(name) for name in names})]
        infinity.close(model)
    return {"losses": losses, "weights": weights, "bytes": counted,
            "checkpoint": [*files(saved)] if not rank else []}  # fmt: skip


def ranks(case: work.Case, _: Path) -> Parts:
    of_ranks = run_ranks(2, one_of_ranks, case)
    return {part: [each[part] for each in of_ranks] for part in of_ranks[0]}


# -- All of them -----------------------------------------------------------------------------------


def runs() -> dict[str, Callable[[Path], Parts]]:
    found: dict[str, Callable[[Path], Parts]] = {}
    for number, case in enumerate(covering(PROPERTIES)):
        name = "-".join([f"one{number:02}", *map(str, case.values())])
        found[name] = partial(one_rank, case)
    for event in PROPERTIES["event"]:
        found[f"early-{event}"] = partial(one_rank, EARLY | {"event": event})
    for name, (base, options) in ADAPTERS.items():
        found[name] = partial(adapter, base, options)
    found |= {name: partial(ranks, case) for name, case in RANKS.items()}
    return found


def digests(name: str, run: Callable[[Path], Parts], dump: Path | None) -> Parts:
    with tempfile.TemporaryDirectory(prefix="infinity-witness-") as directory:
        try:
            parts = run(Path(directory))
        except InfinityError as error:
            parts = {"refused": f"{type(error).__name__}: {str(error).replace(directory, '...')}"}
    if dump is not None:
        lines = [f"{part} {each}" for part, value in parts.items()
                 for each in (value if isinstance(value, list) else [value])]  # fmt: skip
        dump.joinpath(f"{name}.txt").write_text("\n".join(lines) + "\n")
    return {
        part: value if part == "refused" else hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        for part, value in parts.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--dump", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = {n: run for n, run in runs().items()
              if not options.only or any(part in n for part in options.only)}  # fmt: skip
    record = (
        json.loads(RECORD.read_text()) if RECORD.exists() else {"made_by": "nothing", "runs": {}}
    )
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
    has_same_bits = options.write or record["made_by"] == MADE_BY
    if not has_same_bits:
        print(f"the digests are those of {record['made_by']}, this is {MADE_BY}: "
              "only bytes and transfers are compared")  # fmt: skip
    num_different = 0
    for name, run in chosen.items():
        begun_s = time.perf_counter()
        found = digests(name, run, options.dump)
        wanted = record["runs"].get(name, {})
        different = [
            part for part in {**wanted, **found}
            if wanted.get(part) != found.get(part) and (has_same_bits or part in ON_ANY_PROCESSOR)
        ]  # fmt: skip
        num_different += bool(different)
        said = f"DIFFERENT: {', '.join(different)}" if different else "equal"
        print(f"{name}: {said} ({time.perf_counter() - begun_s:.1f} s)", flush=True)
        record["runs"][name] = found
    if options.write:
        kept = {name: record["runs"][name] for name in runs() if name in record["runs"]}
        document = {"made_by": MADE_BY, "runs": kept}
        RECORD.write_text(json.dumps(document, indent=1) + "\n")
        return 0
    print(f"{len(chosen)} runs, {num_different} differ")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
