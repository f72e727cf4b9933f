"""A process in DeepSpeed's environment, or in ours, that answers lines with lines of JSON.

Nothing but the standard library: both environments import it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

VENV = Path(__file__).resolve().parent / ".venv-deepspeed"


def stop(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    raise SystemExit(2)


def answer(content: Any) -> None:
    """In the process: one line, known among others by its key. DeepSpeed logs to stdout, too."""
    print(json.dumps({"peer": content}), flush=True)


class Peer:
    """A script in a process of its own, started with `arguments`. `hello` is its first answer.

    With `venv` it runs in DeepSpeed's environment, as `deepspeed_aio.py --install` makes it, else
    in this one. `variables` are added to the environment.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        venv: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        python = sys.executable if venv is None else str(venv / "bin/python")
        if not Path(python).exists():
            stop(f"{venv} is not there; run deepspeed_aio.py with --install first")
        self._process = subprocess.Popen(
            [python, str(Path(script).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(deepspeed_variables(venv) if venv else {}), **(variables or {})},
            text=True,
        )
        self.hello = self.hear()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def ask(self, question: Any) -> Any:
        self.tell(question)
        return self.hear()

    def tell(self, question: Any) -> None:
        """Asks without a wait for the answer, which `hear` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def kill(self) -> None:
        """Ends the process at once, also one that waits for another."""
        self._process.kill()

    def hear(self) -> Any:
        """Returns the next answer. Exits if the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"peer"'):
                return json.loads(line)["peer"]
        code = self._process.wait()
        return stop(f"{' '.join(map(str, self._process.args))} ended with code {code}; see above")


def deepspeed_variables(venv: Path) -> dict[str, str]:
    """Where it finds the headers it compiles its extension with, and keeps it."""
    headers = venv / "libaio/usr"
    return {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "CPATH": str(headers / "include"),
        "LIBRARY_PATH": str(headers / "lib" / sysconfig.get_config_var("MULTIARCH")),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(venv / "extensions"),
    }
