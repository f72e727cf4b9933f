"""Parses the small state of a checkpoint, `program.pt`, which may be damaged or forged."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity.errors import InfinityError, corrupt

_TABLES = ("optimizer", "random")  # A table, or None.


def parse_program(content: bytes, path: Path) -> dict[str, Any]:
    """Parses the small state, and checks that it has every key. Runs no code that the bytes hold.

    Raises CorruptionError with `path`.
    """
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # A forged file makes torch raise any error.
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
    """Turns an error of the block, which uses values of the small state, into a CorruptionError.

    Every InfinityError passes unchanged. `what` names the values.
    """
    try:
        yield
    except InfinityError:
        raise
    except Exception as error:
        raise corrupt(str(path), f"{what} in it cannot be used: {error!r}") from error
