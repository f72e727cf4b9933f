"""Parses the small state of a checkpoint, `program.pt`, which may be damaged or forged.

It is what `torch.save` writes: a zip archive, without compression, of a pickle and of the bytes of
tensors. Before torch reads it, the archive is read and written again by this module, so that
nothing in it can expand, and the names in the pickle are compared with those of plain values.
"""

from __future__ import annotations

import io
import pickletools
import random
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from infinity.bounded import MAX_DEPTH, MalformedError
from infinity.errors import ConfigError, InfinityError, corrupt
from infinity.sizes import MIB

_TABLES = ("optimizer", "random")  # A table, or None.
_MOST_OPERATIONS = 4_000_000  # Of a pickle; each makes one value at most.
# What a pickle of plain values names, beside dtypes and storages.
_NAMES = frozenset((
    "collections OrderedDict", "collections Counter", "_codecs encode", "torch Size",
    "torch device", "torch.storage UntypedStorage", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter", "__builtin__ set",
    "builtins set",
))  # fmt: skip


def parse_program(content: bytes, path: Path) -> dict[str, Any]:
    """Parses the small state, and checks that it has every key. Runs no code that the bytes hold,
    and takes no more memory than a few times their number.

    Raises CorruptionError with `path`.
    """
    try:
        state = load_plain(content)
    except Exception as error:  # A forged file makes zipfile and torch raise any error.
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


def load_plain(content: bytes) -> Any:
    """Returns the value that `torch.save` wrote. Raises MalformedError for an archive that expands,
    for a pickle that names more than plain values, and for values that are larger than the
    archive; and what torch raises."""
    archive = _rewritten(content)
    value = torch.load(archive, weights_only=True, map_location="cpu")
    _check_size(value, 64 * len(content) + MIB)
    return value


def _rewritten(content: bytes) -> io.BytesIO:
    """Returns the same archive, whose parts are those that this function has checked."""
    target, names = io.BytesIO(), set[str]()
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        if sum(info.file_size for info in source.infolist()) > len(content):
            raise MalformedError("its parts are larger than the file")
        with zipfile.ZipFile(target, "w") as rewritten:
            for info in source.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise MalformedError(f"its part {info.filename!r} is compressed")
                if info.filename.lower() in names:
                    raise MalformedError(f"it has {info.filename!r} twice")
                names.add(info.filename.lower())
                part = source.read(info)
                if info.filename.lower().endswith(".pkl"):
                    _check_pickle(part)
                rewritten.writestr(info.filename, part)
    target.seek(0)
    return target


def _check_pickle(content: bytes) -> None:
    texts = ["", ""]  # The last two, which STACK_GLOBAL takes.
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if count > _MOST_OPERATIONS:
            raise MalformedError(f"its pickle has more than {_MOST_OPERATIONS} operations")
        name = None
        if operation.name in ("GLOBAL", "INST"):
            name = str(argument)
        elif operation.name == "STACK_GLOBAL":
            name = " ".join(texts)
        elif isinstance(argument, str):
            texts = [texts[1], argument]
        if name is not None and not _is_plain(name):
            raise MalformedError(f"its pickle names {name.replace(' ', '.')!r}, which is no value")


def _is_plain(name: str) -> bool:
    if name in _NAMES:
        return True
    module, _, leaf = name.partition(" ")
    is_storage = module == "torch" and leaf.endswith("Storage")
    return is_storage or (module == "torch" and isinstance(getattr(torch, leaf, None), torch.dtype))


def _check_size(value: Any, most_nbytes: int) -> None:
    """Raises MalformedError for a value that takes more bytes when it is copied or printed than a
    file of its size can hold: what it has in several places counts in each."""
    left, level, depth = most_nbytes, [value], 0
    while level:
        depth += 1
        children: list[Any] = []
        for item in level:
            left -= _own_nbytes(item)
            if isinstance(item, dict):
                children += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                children += item
            if left < 0 or len(children) > most_nbytes:
                raise MalformedError("its values are larger than the file")
        if depth > MAX_DEPTH:
            raise MalformedError(f"it is nested too deeply: more than {MAX_DEPTH} levels")
        level = children


def _own_nbytes(item: Any) -> int:
    if isinstance(item, torch.Tensor):
        if item.is_meta:
            raise MalformedError("it has a tensor without values")
        return item.numel() * item.element_size()
    return len(item) if isinstance(item, (str, bytes)) else 1


def check_kinds(saved: Any, own: Any, what: str) -> None:
    """Raises MalformedError unless saved settings are of the kinds of an object's own: numbers for
    numbers, texts for texts, and so on. Settings that the object lacks are not compared."""
    if isinstance(own, dict):
        is_same = isinstance(saved, dict)
        for key in own.keys() & (saved.keys() if is_same else set()):
            check_kinds(saved[key], own[key], f"{what}[{key!r}]")
    elif isinstance(own, (list, tuple)):
        is_same = isinstance(saved, (list, tuple))
        for index, (inner, like) in enumerate(zip(saved, own, strict=False) if is_same else ()):
            check_kinds(inner, like, f"{what}[{index}]")
    elif isinstance(own, torch.Tensor):
        is_same = isinstance(saved, torch.Tensor)
    elif isinstance(own, (bool, str)):
        is_same = isinstance(saved, type(own))
    elif isinstance(own, (int, float)):
        is_same = isinstance(saved, (int, float, torch.Tensor)) and not isinstance(saved, bool)
    else:
        is_same = True
    if not is_same:
        raise MalformedError(f"{what} is a {type(saved).__name__}, expected a {type(own).__name__}")


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
        why = str(error) if isinstance(error, MalformedError) else repr(error)
        raise corrupt(str(path), f"{what} in it cannot be used: {why}") from error


def pack_program(state: dict[str, Any]) -> bytes:
    """Packs the small state with torch.save, and tries that it loads without running code.

    Raises ConfigError for values that need code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        load_plain(buffer.getvalue())
    except Exception as error:  # An object may make pickle raise any error.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            "expected numbers, text, tensors, lists and dicts in `extra`, in param_groups and in "
            f"the scheduler's state_dict(), and nothing that needs code to be read: {reason}"
        ) from None
    return buffer.getvalue()


def random_state() -> dict[str, Any]:
    """Returns the state of all default generators as numbers and tensors."""
    version, internal, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores the default generators, except those of devices that this machine does not have."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
