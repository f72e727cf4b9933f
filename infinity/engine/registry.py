"""Finds the engine of a model and of a parameter; replaces the engine of an earlier run.

Note [A line that is run again]
  A notebook cell that is run again replaces the engine of its earlier run. That engine has locked
  the swap directory, and often no variable is left to close it: `model` is the new model already,
  and the old model lives on in IPython's Out or in a trainer.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from infinity.config.schema.tiers import NvmeTier
from infinity.engine.engine import ENGINES, Engine
from infinity.errors import InfinityError, SwapLockedError
from infinity.modules.tiling.split import tiles_of

# Offloads a model again as `infinity.from_pretrained` did, with what was attached to it since.
AGAIN: weakref.WeakKeyDictionary[Engine, Callable[[nn.Module], Any]] = weakref.WeakKeyDictionary()
_NAME = re.compile(r"[A-Za-z]\w*")  # Names that begin with _ belong to IPython.


def is_offloaded(model: nn.Module) -> bool:
    """Whether this very module was offloaded."""
    return model in ENGINES


def find_engine(model: nn.Module) -> Engine | None:
    """Returns the engine of a model that was offloaded, or of an offloaded model around or inside
    it; None if there is none."""
    for engine in engines():
        module = engine.model
        is_same = module is model or any(child is module for child in model.modules())
        if is_same or any(child is model for child in module.modules()):
            return engine
    return None


def engine_of(model: nn.Module) -> Engine:
    """Returns what `find_engine` does. Raises InfinityError if there is none."""
    if (engine := find_engine(model)) is None:
        raise InfinityError(
            f"{type(model).__name__} is not offloaded; call infinity.offload(model, config) first"
        )
    return engine


def engines() -> list[Engine]:
    """Returns every engine of this process that is alive and not closed."""
    # One step for the GIL: other threads offload models, and close engines.
    models = [model for at in ENGINES.keyrefs() if (model := at()) is not None]
    found = (reference() for model in models if (reference := ENGINES.get(model)) is not None)
    return [engine for engine in found if engine is not None]


def owner_of(tensor: Any) -> Engine | None:
    """Returns the engine of a handle or compute parameter, or None for any other tensor."""
    return owner_of_tile(tiles_of(tensor)[0])


def owner_of_tile(tile: Any) -> Engine | None:
    """Returns what `owner_of` does, of a tensor from `tiles_of`."""
    found = getattr(tile, "_offloaded_by", None)
    return None if found is None else found()


# -- A line that is run again ----------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The position of a call in a program: one line per frame, from the call outwards.

    A line of a file is identified by its number. A notebook cell gets a new name whenever it is run
    or edited, so a line of a cell is identified by its text.
    """

    lines: tuple[tuple[str, int | str], ...]
    texts: tuple[str, ...]

    def assigns(self, names: set[str]) -> bool:
        """Whether these lines assign all these variables once the call has returned. Lines without
        a known source count as assigning."""
        if "" in self.texts:
            return True
        targets = (re.split(r"(?<![=!<>])=(?!=)", text)[0] for text in self.texts if "=" in text)
        assigned = {name for target in targets for name in _NAME.findall(target.split("(")[0])}
        return names <= assigned

    def __str__(self) -> str:
        return self.texts[0] or "a place whose source is not known"


_places: weakref.WeakKeyDictionary[Engine, Place] = weakref.WeakKeyDictionary()


def calling_place() -> Place:
    """Returns the position of the call of the function that calls this one."""
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
    """Records the call that has made an engine."""
    _places[engine] = place


def free_swap_directories(tiers: Sequence[NvmeTier], place: Place) -> None:
    """Closes engines of this process on the swap directories of `tiers` that this call replaces.

    An unreachable engine is removed by garbage collection. An engine that the same call has made is
    closed with a warning, unless a variable would keep its model. For any other engine the function
    raises SwapLockedError, which names it.
    """
    if not _are_taken(tiers):
        return
    gc.collect()
    for engine in engines():
        path = _shared_path(engine, tiers)
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


def _are_taken(tiers: Sequence[NvmeTier]) -> bool:
    """A function of its own, so that no local variable keeps an engine alive."""
    return any(_shared_path(engine, tiers) is not None for engine in engines())


def _shared_path(engine: Engine, tiers: Sequence[NvmeTier]) -> str | None:
    """Returns a swap directory that both use."""
    if engine.store.volume is None or engine.num_ranks > 1:
        return None
    theirs = {os.path.realpath(tier.path) for tier in engine.config.tiers.nvme}
    own = (os.path.realpath(tier.path) for tier in tiers)
    return next((path for path in own if path in theirs), None)


def _frames_of_caller() -> Iterator[FrameType]:
    """Yields the frames from the caller of the package to the module, script or cell that began
    it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None:
        yield frame
        if frame.f_code.co_name.startswith(("<module>", "<cell")):
            return
        frame = frame.f_back


def _names_of(model: object) -> Iterator[str]:
    """Yields the variables of the callers that refer to this model."""
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
        f"model its own directory, or end that one with `infinity.engine_of({name}).close()`"
        f" ({whose})",
    )
