"""Processes that cost milliseconds: forked from one server, which has imported torch once.

For tests whose subject is a process of its own (its signals, its death, its peak memory), not how an
interpreter starts.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

_PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "infinity.api",
    "infinity.tools.cli.train",
    "tests.support.models",
    "infinity.tools.training.program",
    "peft.utils.transformers_weight_conversion",
    "pytest",
    "tests.multirank.work",
    "tests.support.probed",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
]

# Behind a script: what an interpreter does at its end, which a forked process leaves out.
EXIT = "\nimport atexit, threading\nthreading._shutdown()\natexit._run_exitfuncs()\n"
COMMAND = "from infinity.tools.cli import main; main()"
TIME_LIMIT_S = 600.0  # Of a hang, on the slowest machine; what is tested takes seconds.


def context() -> ForkServerContext:
    """Where processes come from. One server for every test of this process."""
    tests = Path(__file__).parents[1]
    for place in (str(tests), str(tests.parent)):
        if place not in sys.path:
            sys.path.append(place)  # Where a child finds the module of what it runs.
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found


def _run(code: str, arguments: tuple[str, ...], stdout: str, stderr: str) -> None:
    gc.freeze()  # No collection looks at what the server has imported.
    for path, fd in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})


class Script:
    """`python -c code arguments...`, forked. Has what tests use of `subprocess.Popen`; both its
    outputs are files, which may be read while it runs."""

    def __init__(self, code: str, *arguments: object) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="infinity-forked-")
        self.stdout = Path(self._directory.name) / "stdout"
        self.stderr = Path(self._directory.name) / "stderr"
        for path in (self.stdout, self.stderr):
            path.touch()
        words = tuple(map(str, arguments))
        self._process = context().Process(
            target=_run, args=(code, words, str(self.stdout), str(self.stderr)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = TIME_LIMIT_S) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("<forked>", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = TIME_LIMIT_S) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout.read_text(), self.stderr.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def wait_until(condition: Callable[[], bool], process: Script | subprocess.Popen[str]) -> None:
    """Until `condition` holds; fails when the process ends before."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def run_script(
    code: str, *arguments: object, timeout: float = TIME_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of it. Killed when it takes longer."""
    script = Script(code, *arguments)
    try:
        out, err = script.communicate(timeout)
    finally:
        script.kill()
    return subprocess.CompletedProcess(["<forked>", *arguments], script.wait(), out, err)
