"""A model offloaded anew from the same place in a program, such as a cell of a notebook run again.

The engine of the run before has the swap directory, and often no name is left by which it could be
closed: `model` is the new model already, and the old one lives on in IPython's Out or in a trainer.
"""

from __future__ import annotations

import errno
import gc
import linecache
import os
import re
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from infinity.config import SwapConfig
from infinity.engine import registry
from infinity.errors import SwapLockedError

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

_NAME = re.compile(r"[A-Za-z]\w*")  # Those that begin with _ are IPython's own.


@dataclass(frozen=True)
class Place:
    """Where in a program something was called: a line for each frame, from the call outwards.

    A line of a file is known by its number. A cell has another name whenever it is run or edited,
    so a line of one is known by its text.
    """

    lines: tuple[tuple[str, int | str], ...]
    texts: tuple[str, ...]

    def assigns(self, names: set[str]) -> bool:
        """Whether these lines give all these variables a new value once the call has returned.
        Where no source is known, they are taken to."""
        if "" in self.texts:
            return True
        targets = (re.split(r"(?<![=!<>])=(?!=)", text)[0] for text in self.texts if "=" in text)
        assigned = {name for target in targets for name in _NAME.findall(target.split("(")[0])}
        return names <= assigned

    def __str__(self) -> str:
        return self.texts[0] or "a place whose source is not known"


_places: weakref.WeakKeyDictionary[Engine, Place] = weakref.WeakKeyDictionary()


def calling_place() -> Place:
    """Where the caller of this function was called."""
    lines: list[tuple[str, int | str]] = []
    texts = []
    for frame in _frames_of_caller():
        file, number = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, number).strip()
        is_cell = file.startswith("<") or f"ipykernel_{os.getpid()}" in file
        lines.append((frame.f_code.co_name, text or number) if is_cell else (file, number))
        texts.append(text)
    return Place(tuple(lines), tuple(texts))


def remember(engine: Engine, place: Place) -> None:
    _places[engine] = place


def make_room(config: SwapConfig, place: Place) -> None:
    """Closes engines of this process on the swap directories of `config` that this call replaces.

    Those that nobody uses any more go with the garbage. One that was made by the same call, and
    whose model no variable names that would keep it, is closed with a warning. Raises
    SwapLockedError naming any other.
    """
    if not _are_taken(config):
        return
    gc.collect()
    for engine in registry.engines():
        path = _shared_path(engine, config)
        if path is None:
            continue
        names = set(_names_of(engine.model))
        if _places.get(engine) != place or not place.assigns(names):
            raise _refusal(engine, path, sorted(names))
        warnings.warn(
            f"{path!r}: the {type(engine.model).__name__} that was offloaded here before is "
            "replaced; its engine is closed, and what it held is gone",
            stacklevel=3,
        )
        engine.close()


def _are_taken(config: SwapConfig) -> bool:
    """Apart, so that no local variable keeps an engine from the garbage collector."""
    return any(_shared_path(engine, config) is not None for engine in registry.engines())


def _shared_path(engine: Engine, config: SwapConfig) -> str | None:
    """A swap directory that both use."""
    if engine.store.volume is None or engine.num_ranks > 1:
        return None
    theirs = {os.path.realpath(tier.path) for tier in engine.config.tiers.nvme}
    mine = (os.path.realpath(tier.path) for tier in config.tiers.nvme)
    return next((path for path in mine if path in theirs), None)


def _frames_of_caller() -> Iterator[FrameType]:
    """From whoever called the package to the module, script or cell that began it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None:
        yield frame
        if frame.f_code.co_name.startswith(("<module>", "<cell")):
            return
        frame = frame.f_back


def _names_of(model: object) -> Iterator[str]:
    """Variables of those who are calling that are this model."""
    for frame in _frames_of_caller():
        for scope in (frame.f_locals, frame.f_globals):
            for name, value in list(scope.items()):
                if value is model and _NAME.fullmatch(name):
                    yield name


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "infinity"


def _refusal(engine: Engine, path: str, names: list[str]) -> SwapLockedError:
    name = names[0] if names else "old"
    whose = f"the variable {name}" if names else "old being that model"
    place = _places.get(engine)
    return SwapLockedError(
        errno.EWOULDBLOCK,
        path=path,
        pid=os.getpid(),
        detail=f"the swap directory is in use by this process, for the "
        f"{type(engine.model).__name__} that `{place or 'another call'}` offloaded; give every "
        f"model a directory of its own, or end that one with `infinity.engine_of({name}).close()`"
        f" ({whose})",
    )
