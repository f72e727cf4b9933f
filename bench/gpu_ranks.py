"""How long is a step with one process for each GPU, on which cores, and how soon is a death named?

    python bench/gpu_ranks.py --save bench/results/gpu_ranks.json
    python bench/gpu_ranks.py --small                  two ranks over gloo, on simulated devices

torchrun starts the ranks, which train some steps of stage 3 over nccl with all state on the host:
with OMP_NUM_THREADS unset (torchrun sets 1 then), 1 and 12, with the engine's NUMA binding; then
without a binding, and with torchrun's own. One rank alone, with as many tokens, is the counterpart:
what its step takes less, the ranks take for each other. But it updates all of the state, and one
of N ranks updates 1/N.

In the last run one rank kills itself with SIGKILL in a forward. A line for each other rank has
the seconds until an error names that rank, beside the seconds until torchrun, which ends the job,
sends SIGTERM, which these ranks ignore.

In the tables, of a rank and step: "together" are operations of all ranks at once
(`ranks_collectives`), "cancelled" those that were not made (`ranks_cancelled`), whose bytes go from
host to host. Three minutes with `--small`; ten are expected of 8 GPUs, which have not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import environment, progress, say

WARM_UP = 3  # Ranks that exchange between devices play the log of a step from the third one on.
COUNTED = ("ranks_cancelled", "ranks_stand_ins", "ranks_control_messages", "ranks_collectives")
WAITED = ("ranks_wait_s", "copy_wait_s", "update_s")
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "OMP_", "INFINITY_")
_DEATH_STEPS = 20  # Of the others, who notice long before.


@dataclass(frozen=True, slots=True)
class Launch:
    """How torchrun starts the ranks. `threads`: OMP_NUM_THREADS, or "unset". `binding`: "engine",
    "none", or "torchrun" for its --numa-binding=node."""

    count: int
    threads: str
    binding: str = "engine"
    dies: bool = False

    @property
    def name(self) -> str:
        ranks = f"{self.count} rank{'s' if self.count > 1 else ''}"
        return f"{ranks}, OMP {self.threads}, binding {self.binding}" + self.dies * ", one dies"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: the GPUs of this machine")
    parser.add_argument("--threads", nargs="+", default=["unset", "1", "12"])
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank and step")
    parser.add_argument("--host", default="auto", help="host budget of the machine")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--path", type=Path, help="where ranks write what they found")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a run")
    parser.add_argument("--small", action="store_true", help="a small model, on any machine")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        work(argparse.Namespace(**json.loads(words.worker)))
        return
    if words.small:
        words.ranks, words.tokens, words.steps = words.ranks or 2, 64, 2
        words.host = "256MiB"
    else:
        words.ranks = words.ranks or _devices()
        if not 2 <= words.ranks <= _devices():
            raise SystemExit(f"needs a CUDA device for each of at least two ranks, and there are "
                             f"{_devices()}; `--small` tries the program without")  # fmt: skip
    document: dict[str, Any] = {
        "settings": {k: str(v) for k, v in vars(words).items() if k != "worker"},
        "environment": environment(),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        "runs": [],
    }
    for launch in launches(words):
        document["runs"].append(run(launch, words))
        show(document["runs"][-1], document["runs"][0])
        if words.save:  # Each run as it comes: minutes are not lost.
            words.save.write_text(json.dumps(document, indent=1) + "\n")


def launches(words: argparse.Namespace) -> list[Launch]:
    found = [Launch(1, "unset")]
    found += [Launch(words.ranks, threads) for threads in words.threads]
    found.append(Launch(words.ranks, "unset", "none"))
    if not words.small:  # torchrun asks CUDA for the node of a rank.
        found.append(Launch(words.ranks, "unset", "torchrun"))
    return [*found[:-1], replace(found[-1], dies=True)]


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


def run(launch: Launch, words: argparse.Namespace) -> dict[str, Any]:
    """What each rank has found; ranks that said nothing are absent."""
    say(launch.name)
    settings = {
        name: getattr(words, name) for name in ("small", "tokens", "steps", "host")
    } | asdict(launch)  # fmt: skip
    variables = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if launch.threads != "unset":
        variables["OMP_NUM_THREADS"] = launch.threads
    variables["INFINITY_NUMA_BINDING"] = "none" if launch.binding == "none" else "node"
    with tempfile.TemporaryDirectory(prefix="infinity-gpu-ranks-", dir=words.path) as scratch:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(launch.count),
            *(["--numa-binding=node"] if launch.binding == "torchrun" else []),
            str(Path(__file__).resolve()), "--worker", json.dumps(settings | {"scratch": scratch}),
        ]  # fmt: skip
        log = Path(scratch, "log")
        with log.open("w") as stream:
            process = subprocess.Popen(command, env=variables, stdout=stream, stderr=stream)
            try:
                with progress(launch.name, lambda: _last_line(log), every_s=10):
                    code = process.wait(words.limit)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks.
                code = process.wait()
        names = [f"{rank}.json" for rank in range(launch.count)]
        there = [Path(scratch, name) for name in names if Path(scratch, name).exists()]
        ranks = [json.loads(path.read_text()) for path in there]
        if len(ranks) < launch.count or (code and not launch.dies):
            say(f"torchrun ended with {code}:\n" + _errors(log))
    return {"name": launch.name, **asdict(launch), "code": code, "ranks": ranks}


def _last_line(log: Path) -> str:
    lines = log.read_text().splitlines()
    return lines[-1] if lines else "nothing said yet"


def _errors(log: Path) -> str:
    """The last lines of the ranks, without torchrun's summary of them."""
    lines = log.read_text().splitlines()
    return "\n".join([line for line in lines if line.startswith("[rank")][-20:] or lines[-20:])


# -- A rank ----------------------------------------------------------------------------------------


def work(words: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from gpu_common import batch_of

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    terminated_s: list[float] = []
    # Only noted: torchrun ends all ranks when one has died, and these shall say what they noticed.
    signal.signal(signal.SIGTERM, lambda *unused: terminated_s.append(time.monotonic()))
    is_cuda = not words.small
    if is_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    # Of the hosts: another communicator on the devices would be in all times.
    hosts = dist.new_group(backend="gloo")
    there = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    model, engine, optimizer, sequence = _model(words, rank, there)
    ids = batch_of(words.tokens, sequence, there)

    def step() -> float:
        begun_s = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    times_s: list[float] = []
    before: dict[str, float] = {}
    for number in range(WARM_UP + words.steps):
        if number == WARM_UP:
            before = engine.counters.snapshot()
        dist.barrier(hosts)
        times_s.append(step())
        if rank == 0:
            print(f"step {number}: {times_s[-1]:.3f} s", flush=True)
    after = engine.counters.snapshot()
    answer = {
        "rank": rank, "warm_up_s": times_s[:WARM_UP], "steps_s": times_s[WARM_UP:],
        "per_step": {
            name: (after.get(name, 0) - before.get(name, 0)) / words.steps
            for name in COUNTED + WAITED
        },
        "binding": _binding(there),
    }  # fmt: skip
    _write(words, rank, answer)
    dist.barrier(hosts)
    if words.dies:
        answer["death"] = _death(model, step, rank, words, terminated_s)
        _write(words, rank, answer)
        os._exit(1)  # The groups of a dead rank are not waited for.
    engine.close()
    dist.destroy_process_group()


def _model(words: argparse.Namespace, rank: int, there: Any) -> tuple[Any, Any, Any, int]:
    from gpu_common import FULL, KINDS, SMALL, offloaded

    import infinity
    from infinity.sizes import MIB
    from infinity.testing.simulated_device import SimulatedDevice

    sizes = SMALL if words.small else FULL
    config: dict[str, Any] = {
        "distributed": {"zero_stage": 3},
        "tiers": {"host": {"capacity": words.host}},
        "placement": dict.fromkeys(KINDS, "host"),
    }
    if words.count > 1:
        config["distributed"]["exchange"] = "collective"
    own = SimulatedDevice(rank, delay_s=1e-5) if words.small else None
    # Beside the window: buffers of the exchange, of at most some rounds of 32 MiB.
    model = offloaded(
        sizes, sizes.layers, True, config, there, own=own, spare_nbytes=512 * MIB
    ).train()
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)
    return model, infinity.engine_of(model), optimizer, sizes.sequence


def _write(words: argparse.Namespace, rank: int, answer: dict[str, Any]) -> None:
    part = Path(words.scratch, f"{rank}.part")
    part.write_text(json.dumps(answer))
    part.replace(part.with_suffix(".json"))


def _binding(there: Any) -> dict[str, Any]:
    """Threads, cores and NUMA nodes of this rank, and the nodes that its memory lies on."""
    import torch

    from infinity.config.machine import cores_by_node, threads_here

    cores = os.sched_getaffinity(0)
    nodes = {node: own & cores for node, own in cores_by_node().items() if own & cores}
    return {
        "device": str(there),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "torch_threads": torch.get_num_threads(),
        "engine_threads": threads_here(torch.get_num_threads()),
        "cores": sorted(cores),
        "nodes": sorted(nodes),
        "memory_nbytes": _memory_by_node(),
    }


def _memory_by_node() -> dict[str, int]:
    """Pages of this process by NUMA node; proc(5), numa_maps. Empty where the kernel has none."""
    found: dict[str, int] = {}
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields = [field.partition("=") for field in line.split()]
        page_nbytes = next((int(v) * 1024 for n, _, v in fields if n == "kernelpagesize_kB"), 0)
        for name, _, value in fields:
            if name[:1] == "N" and name[1:].isdigit():
                found[name[1:]] = found.get(name[1:], 0) + int(value) * page_nbytes
    return found


def _death(
    model: Any, step: Any, rank: int, words: argparse.Namespace, terminated_s: list[float]
) -> dict[str, Any]:
    """The last rank dies in the forward of a step; what the others see of it."""
    note, victim = Path(words.scratch, "death"), words.count - 1

    def die(*unused: Any) -> None:
        note.with_suffix(".part").write_text(str(time.monotonic()))
        note.with_suffix(".part").replace(note)  # One clock for all processes of a machine.
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        model.model.layers[1].register_forward_pre_hook(die)
    found: dict[str, Any] = {"victim": victim, "error": None}
    try:
        for _ in range(_DEATH_STEPS):
            step()
    except Exception as error:  # Whatever it is, it is what a user sees.
        named_s = time.monotonic()
        found |= {"error": f"{type(error).__name__}: {error}", "rank": getattr(error, "rank", None)}
        found["named_s"] = named_s - float(note.read_text())
    deadline_s = time.monotonic() + 5
    while not terminated_s and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if terminated_s:
        found["terminated_s"] = terminated_s[0] - float(note.read_text())
    return found


# -- Tables ----------------------------------------------------------------------------------------


def show(run: dict[str, Any], alone: dict[str, Any]) -> None:
    """The ranks of a run, and its step beside that of one rank."""
    if not run["ranks"]:
        print(f"{run['name']}: no rank has answered")
        return
    step_s, alone_s = _step_s(run), _step_s(alone) if alone["ranks"] else float("nan")
    print(f"{run['name']}: {step_s:.3f} s a step, {step_s / alone_s:.2f} of one rank alone")
    header = (
        f"{'rank':>6} {'step s':>8} {'ranks_wait_s':>13} {'update_s':>9} {'together':>9} "
        f"{'cancelled':>10} {'stand-ins':>10} {'words':>7} {'torch':>6} {'engine':>7}  "
        "cores, nodes, memory by node"
    )
    print(header)
    for rank in run["ranks"]:
        counted, binding = rank["per_step"], rank["binding"]
        memory = ", ".join(f"{n}: {v / 2**30:.1f} GiB" for n, v in binding["memory_nbytes"].items())
        print(
            f"{rank['rank']:>6} {statistics.median(rank['steps_s']):8.3f} "
            f"{counted['ranks_wait_s']:13.3f} {counted['update_s']:9.3f} "
            f"{counted['ranks_collectives']:9.1f} {counted['ranks_cancelled']:10.1f} "
            f"{counted['ranks_stand_ins']:10.1f} "
            f"{counted['ranks_control_messages']:7.1f} {binding['torch_threads']:6d} "
            f"{binding['engine_threads']:7d}  {_ranges(binding['cores'])}; {binding['nodes']}; "
            + (memory or "-")
        )
    for rank in run["ranks"]:
        if "death" in rank:
            _show_death(rank["rank"], rank["death"])
        elif run.get("dies") and rank["rank"] != run["count"] - 1:
            print(f"  rank {rank['rank']} ended, and said nothing of the rank that was killed")
    sys.stdout.flush()


def _step_s(run: dict[str, Any]) -> float:
    """The median over steps, each of which is as long as its slowest rank's."""
    of_ranks = [rank["steps_s"] for rank in run["ranks"]]
    return statistics.median(max(at) for at in zip(*of_ranks, strict=True))


def _show_death(rank: int, death: dict[str, Any]) -> None:
    if death["error"] is None:
        print(f"  rank {rank} did NOT notice the end of rank {death['victim']}")
        return
    named = "names it" if death["rank"] == death["victim"] else "does NOT name it"
    later = death.get("terminated_s")
    print(
        f"  rank {rank}, {death['named_s']:.2f} s after rank {death['victim']} was killed, "
        f"{named}: {death['error'].splitlines()[0]}\n"
        f"    torchrun sent SIGTERM after {'-' if later is None else format(later, '.2f')} s"
    )


def _ranges(cores: list[int]) -> str:
    """As in a kernel list: "0-3,8"."""
    found: list[list[int]] = []
    for core in cores:
        if found and core == found[-1][1] + 1:
            found[-1][1] = core
        else:
            found.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


if __name__ == "__main__":
    main()
