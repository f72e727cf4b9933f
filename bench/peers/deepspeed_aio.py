"""How fast is DeepSpeed's asynchronous I/O handle beside this engine, on the same file?

    python bench/peers/deepspeed_aio.py --install          makes bench/peers/.venv-deepspeed, once
    python bench/peers/deepspeed_aio.py --path /mnt/nvme0   compares, prints a table

DeepSpeed runs in its own environment and process, on its own locked buffer, 1 GiB in one call,
which suits it best; its settings are searched first. The two take turns, round by round.
`--install` needs pip, apt (for the headers of libaio, unpacked into the environment) and a C++
compiler; torch is the one that is installed here. Exit code 2 says what is missing.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peer import VENV, Peer, answer, stop

PACKAGES = ("setuptools", "wheel", "ninja", "hjson", "py-cpuinfo", "msgpack", "einops")
VERSION = "0.19.8"
# (block bytes, queue depth, threads of the handle)
SETTINGS = (
    (256 << 10, 32, 1), (1 << 20, 8, 1), (1 << 20, 32, 1), (1 << 20, 32, 2), (8 << 20, 4, 1),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--path", type=Path, default=Path.cwd())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        serve(words.worker)
    elif words.install:
        install(words.venv)
    else:
        compare(words)


def install(venv: Path) -> None:
    """The environment: this interpreter's packages below, DeepSpeed and libaio's headers above."""
    run = subprocess.check_call
    run([sys.executable, "-m", "venv", str(venv)])
    python = venv / "bin/python"
    purelib = subprocess.check_output(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    torch_home = _torch_home()
    Path(purelib, "below.pth").write_text(f"{torch_home}\n")
    try:
        run([str(python), "-m", "pip", "install", "-q", *PACKAGES])
        run([str(python), "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps",
             f"deepspeed=={VERSION}"])  # fmt: skip
    except subprocess.CalledProcessError as error:
        stop(f"DeepSpeed cannot be installed here: pip ended with code {error.returncode}")
    if not Path("/usr/include/libaio.h").exists():
        _fetch_headers(venv / "libaio")
    with start(venv, 1 << 20) as peer:  # Compiles the extension, which takes minutes.
        print(f"ready: {peer.hello}")


def _fetch_headers(headers: Path) -> None:
    """libaio's headers and its library to link with, unpacked below the environment."""
    shutil.rmtree(headers, ignore_errors=True)  # Two versions of the package would be one too many.
    headers.mkdir()
    run = subprocess.check_call
    try:
        run(["apt-get", "download", "-q", "libaio-dev"], cwd=headers)
        (package,) = headers.glob("libaio-dev*.deb")
        run(["dpkg", "-x", str(package), str(headers)])
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        stop(f"the headers of libaio cannot be had ({error}); install libaio-dev yourself")


def _torch_home() -> Path:
    import torch

    return Path(torch.__file__).parents[1]


def start(venv: Path, nbytes: int) -> Peer:
    """DeepSpeed in its own process. `nbytes` is the size of its locked buffer."""
    return Peer(__file__, ["--worker", str(nbytes)], venv=venv)


def serve(nbytes: int) -> None:
    """The worker, in DeepSpeed's environment: answers one JSON line with another."""
    import deepspeed
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load(verbose=False)
    keeper = module.aio_handle(1 << 20, 32, False, True, 1)
    buffer = keeper.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 255)
    handles: dict[tuple[int, ...], Any] = {}
    answer({"peer": "deepspeed", "version": deepspeed.__version__})
    for line in sys.stdin:
        question = json.loads(line)
        block, depth, threads = key = tuple(question["settings"])
        if key not in handles:
            handles[key] = module.aio_handle(block, depth, False, True, threads)
        work = handles[key].sync_pread if question["is_read"] else handles[key].sync_pwrite
        cpu_s, start_s = -_cpu_s(), time.perf_counter()
        work(buffer, question["path"], question["offset_nbytes"])
        seconds = time.perf_counter() - start_s
        spent = {"seconds": seconds, "cpu_s": cpu_s + _cpu_s()}
        # What was read must be the pattern: the first word of each MiB is told apart by its place.
        heads = buffer.view(torch.int64)[:: (1 << 20) // 8].tolist() if question["is_read"] else []
        answer({**spent, "heads": heads})


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare(words: argparse.Namespace) -> None:
    """Searches DeepSpeed's best settings per direction, then lets the two take turns."""
    import numpy as np

    from infinity.config.schema.engine import Io
    from infinity.storage.arena import Arena
    from infinity.tools.bench import nvme, pattern
    from infinity.tools.bench.measure import (
        Comparison,
        Contender,
        Effort,
        Lab,
        Measurement,
        bandwidth_of,
        run_rounds,
        verdict,
    )
    from infinity.tools.bench.report import environment_of, rows_of, to_json
    from infinity.tools.bench.transfer import engine_transfer
    from infinity.tools.cli.bench import parse_size, print_tables

    nbytes = parse_size(words.size)

    def turn(peer: Peer, share: Any, kind: str, settings: tuple[int, ...]) -> Contender:
        """One direction at one setting."""
        block, depth, threads = settings
        question = {
            "is_read": kind == "read", "settings": settings, "path": share.path,
            "offset_nbytes": share.offset_nbytes,
        }  # fmt: skip

        def run() -> Measurement:
            spent = peer.ask(question)
            ok = spent["heads"] == wanted if spent["heads"] else None
            return Measurement(nbytes, spent["seconds"], spent["cpu_s"], ok=ok)

        return Contender(f"deepspeed {block >> 10} KiB x {depth}, {threads} threads", run)

    effort = Effort(nbytes=nbytes, rounds=words.rounds)
    results = []
    with Arena(nbytes) as arena, start(words.venv, nbytes) as peer:
        lab = Lab(arena, (words.path.resolve(),), Io(), effort, with_fio=False)
        environment = {**environment_of(lab.directories, arena), "deepspeed": peer.hello}
        with nvme.open_drives(lab, lab.directories) as drives, drives.files() as files:
            memory = arena.memory(0, nbytes)
            pattern.fill(memory, offset_nbytes=0, seed=0)
            wanted = np.frombuffer(memory, np.int64)[:: (1 << 20) // 8].tolist()
            for kind, region in (("read", "still"), ("write", "busy")):
                (share,) = drives.scratch.shares(region)
                tried = [turn(peer, share, kind, settings) for settings in SETTINGS]
                search = run_rounds(Comparison("search", kind, tried), rounds=2, warm_ups=0)
                best = max(tried, key=lambda each: bandwidth_of(search.samples[each.name]).median)
                subject = engine_transfer(
                    nvme.engine_label(lab, files.engine), files, kind,
                    nbytes=nbytes, extent_nbytes=nvme.EXTENT_NBYTES,
                )  # fmt: skip
                case = f"{words.size} beside DeepSpeed {peer.hello['version']}"
                labels = {"operation": kind}
                compared = Comparison(f"nvme {kind}", case, [subject], [best], labels)
                results.append(run_rounds(compared, rounds=words.rounds))
    for result in results:
        if any(verdict(samples) is False for samples in result.samples.values()):
            print("WRONG BYTES were read; the figures are void", file=sys.stderr)
    print_tables(rows_of(results))
    if words.save:
        words.save.write_text(json.dumps(to_json(results, environment), indent=1) + "\n")


if __name__ == "__main__":
    main()
