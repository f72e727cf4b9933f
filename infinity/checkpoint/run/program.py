"""The small state of a checkpoint, `program.pt`: what of it can be believed, and what is damage."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity.errors import InfinityError, corrupt

_TABLES = ("optimizer", "random")  # Or None, where there is none.


def parse_program(content: bytes, path: Path) -> dict[str, Any]:
    """The small state in these bytes, with every key that there has to be. Runs no code of the
    file's. Raises CorruptionError naming `path`."""
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # Whatever a forged file makes torch raise.
        why = str(error).partition("\n")[0]
        raise corrupt(str(path), f"it is no state that torch can load: {why}") from None
    if not isinstance(state, dict) or not isinstance(state.get("extra"), dict):
        raise corrupt(str(path), "it is no small state of a checkpoint: expected a table 'extra'")
    for key in _TABLES:
        if key not in state or not (state[key] is None or isinstance(state[key], dict)):
            raise corrupt(str(path), f"expected a table or nothing at {key!r} in it")
    if "scheduler" not in state:
        raise corrupt(str(path), "it has no 'scheduler'")
    return state


@contextmanager
def believing(path: Path, what: str) -> Iterator[None]:
    """Whatever the values of a small state make their users raise is the file's fault."""
    try:
        yield
    except InfinityError:
        raise
    except Exception as error:
        raise corrupt(str(path), f"{what} in it cannot be used: {error!r}") from error
