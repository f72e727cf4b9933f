"""Loads a checkpoint into an offloaded model: verified first, then streamed to its tiers.

State that is linked to the swap files of this run, or to swap files that the run has adopted, is
read, compared and restored where it is (`links.py`). All other state is streamed. If several ranks
wrote the checkpoint, a rank reads those ranges of their shards that it keeps itself.

Placement, budgets, chunk sizes, units, ZeRO stage, number of ranks and the cut of large layers may
differ from those of the run that saved. `opened.py` verifies names, shapes, dtypes and lengths
before anything changes. The SHA-256 of a tensor is known when its last byte is read, the CRC32C of
linked state page by page. If one of these is wrong, or a read fails, the model may be a mixture of
two states, and the error says so.

The small state, `program.pt`, may be damaged or forged. It is what `torch.save` writes: a zip
archive, without compression, of a pickle and of the bytes of tensors. Before torch reads it, the
archive is read and written again here, so that nothing in it can expand, and the names in the
pickle are compared with those of plain values.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from infinity.bounded import MAX_DEPTH, MalformedError
from infinity.checkpoint.huggingface.safetensors_file import tensor_bytes
from infinity.checkpoint.run.contents import (
    STREAMED,
    StateTensor,
    buffers_of,
    kept_tensors,
    put_buffer,
)
from infinity.checkpoint.run.directory import find_checkpoint
from infinity.checkpoint.run.links import restore_linked
from infinity.checkpoint.run.opened import OpenCheckpoint, SavedTensor, StoredReader
from infinity.engine.engine import Engine
from infinity.engine.registry import engine_of
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, InfinityError, corrupt, listed
from infinity.modules.accumulate.fiber import state_of_numpy
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.sizes import MIB
from infinity.state.units import StateKind, Unit
from infinity.streaming.gradients.sums import in_memory_order

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_MIXTURE = "the model is a mixture of two states now: do not train on, load another checkpoint"
_TABLES = ("optimizer", "random", "modules")  # A table, or None.
_MOST_OPERATIONS = 4_000_000  # Of a pickle; each makes one value at most.
# What a pickle of plain values names, beside dtypes and storages.
_NAMES = frozenset((
    "collections OrderedDict", "collections Counter", "_codecs encode", "torch Size",
    "torch device", "torch.storage UntypedStorage", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter", "__builtin__ set",
    "builtins set",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that was read: its path, its number of steps, the `extra` of its caller, and
    the number of ranks that wrote it."""

    path: Path
    step: int
    extra: dict[str, Any]
    num_ranks: int = 1


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    all_state: bool = True,
) -> Loaded:
    """Restores what `save` wrote; the run then continues with the same bits.

    path: a checkpoint, or a directory of checkpoints, from which the newest is loaded
    model: offloaded, with the architecture and dtypes of the saved one; its placement may differ
    optimizer, scheduler: built with the arguments of the saved run; with None their state is not
        restored, and the run is no exact continuation
    all_state: as it was saved

    All ranks call `load` with one path. If another number of ranks wrote the checkpoint, a rank
    that did not save gets `extra` and buffers of the first rank, and keeps its own generators.

    Call between steps, from the training thread. Raises ConfigError for a checkpoint of another
    model or optimizer, UnsupportedError for a newer format, CorruptionError for a damaged
    checkpoint, StorageError for a file that cannot be read. These errors come before anything
    changes, except for bytes that are damaged or cannot be read while they are streamed; the error
    then says that the model is a mixture.
    """
    # INV-15: what follows is bit-identical to the uninterrupted run.
    engine = engine_of(model)
    with engine.ranks.collective_section("infinity.checkpoint.load: what is there") as asked:
        found, chosen = (
            OpenCheckpoint(find_checkpoint(Path(path))),
            chosen_units(optimizer, all_state=all_state),
        )
        program = program_of(found, engine.rank)
        _check_program(program, model, optimizer, scheduler, found.path)
        with engine.at_rest("infinity.checkpoint.load", chosen) as state:
            found.check_model(state, model, engine.rank)
        buffers = found.buffers(engine.rank)
        found.check_part(engine.rank, engine.num_ranks)
        asked.local = found.path.name.encode()
    if len(set(asked.of_all)) > 1:
        names = sorted({name.decode() for name in asked.of_all})
        raise ConfigError(f"{path}: expected one checkpoint for all ranks, they found {names}")
    engine.ranks.begin_change("infinity.checkpoint.load: state is about to change")
    with (
        engine.ranks.collective_section("infinity.checkpoint.load"),
        engine.at_rest("infinity.checkpoint.load", chosen) as state,
    ):
        is_checked = engine.num_ranks > 1  # `check_part` has compared all files.
        with StoredReader(is_checked=is_checked, consequence=_MIXTURE) as reader:
            _load_tensors(found, state, engine, reader)
        _load_buffers(buffers, model)
        state.weight_cache.finish_writes()
    engine.ranks.forget_gathered()
    if optimizer is not None:
        with believing(found.path, "the optimizer's state"):
            optimizer.restore_named_state(program["optimizer"])
    if scheduler is not None:
        with believing(found.path, "the scheduler's state"):
            scheduler.load_state_dict(program["scheduler"])
    with believing(found.path, "the extra state of modules"):
        for name, value in (program["modules"] or {}).items():
            model.get_submodule(name).set_extra_state(value)
    if program["random"] is not None:
        with believing(found.path, "the state of the generators"):
            restore_random_state(program["random"])
    return Loaded(found.path, found.manifest.step, program["extra"], len(found.manifest.places))


def chosen_units(optimizer: OffloadedOptimizer | None, *, all_state: bool) -> frozenset[int] | None:
    """Returns the units of which a checkpoint holds the state; None for all."""
    if all_state:
        return None
    if optimizer is None:
        raise ConfigError(
            "all_state=False keeps the state of an optimizer's parameters; give it one"
        )
    return optimizer.own_units()


def read_program(path: str | os.PathLike[str], rank: int = 0) -> Loaded:
    """Reads step and `extra` of one rank, which a program checks before it builds a model.

    Raises ConfigError where there is no checkpoint, otherwise as `OpenCheckpoint`.
    """
    found = OpenCheckpoint(find_checkpoint(Path(path)))
    extra = program_of(found, rank)["extra"]
    return Loaded(found.path, found.manifest.step, extra, len(found.manifest.places))


def _check_program(
    program: Mapping[str, Any],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    scheduler: Stateful | None,
    path: Path,
) -> None:
    for what, target in (("an optimizer", optimizer), ("a scheduler", scheduler)):
        if target is not None and program[what.split()[1]] is None:
            raise ConfigError(f"{path} was saved without {what}, so there is none to bring back")
    modules = program["modules"]
    if modules is not None and (others := modules.keys() ^ extra_states(model).keys()):
        raise ConfigError(
            f"{path} has the extra state of other modules than the model: {listed(sorted(others))}"
        )
    if program["random"] is not None:
        with believing(path, "the state of the generators"):
            _check_numpy(program["random"]["numpy"], path)
    if optimizer is not None:
        with believing(path, "the optimizer's state"):
            saved, own = program["optimizer"], optimizer.named_state()
            optimizer.check_named_state(saved)
            check_kinds(saved["groups"], own["groups"], "groups")
            check_kinds(saved["steps"], dict.fromkeys(saved["steps"], 0), "steps")
    if scheduler is not None:
        with believing(path, "the scheduler's state"):
            check_kinds(program["scheduler"], scheduler.state_dict(), "scheduler")


class _ModelReader:
    """Reads tensors by their names in the model, and joins those that are stored in other tiles."""

    def __init__(self, checkpoint: OpenCheckpoint, reader: StoredReader) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        # The last one whose stored order of elements is not that in memory.
        self._full: tuple[StateTensor, torch.Tensor] | None = None

    def fill(self, tensor: StateTensor, start: int, target: torch.Tensor) -> None:
        """Fills `target` with elements in memory order; see `fill_state_kind`."""
        if not target.numel():
            return  # A checkpoint of ranks lacks state without an element.
        start += tensor.start
        _, stride = self._checkpoint.form_of(tensor.name)
        if tensor.is_scales or stride == tensor.facts.stride:
            self._read_into(tensor.name, start, target)
            return
        if self._full is None or self._full[0] is not tensor:
            self._full = tensor, in_memory_order(self.read(tensor.name), tensor.full)
        target.copy_(self._full[1][start : start + target.numel()])

    def read(self, name: str) -> torch.Tensor:
        """Returns a fresh tensor on the CPU, in its shape. Raises as `StoredReader.read_into`."""
        info, stride = self._checkpoint.form_of(name)
        values = torch.empty(math.prod(info.shape), dtype=info.dtype, device="cpu")
        self._read_into(name, 0, values)
        return values.as_strided(info.shape, stride)

    def _read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        for tensor, first, count in self._checkpoint.sources(name, start, target.numel()):
            self._reader.read_into(tensor, first, target[:count])
            target = target[count:]


def _load_tensors(
    checkpoint: OpenCheckpoint, state: StateAccess, engine: Engine, stored: StoredReader
) -> None:
    kept = kept_tensors(state)
    restored = restore_linked(checkpoint, state, kept, engine.rank)
    state.forget_gradients()
    reader = _ModelReader(checkpoint, stored)
    for unit, tensors in kept:
        for state_kind in STREAMED if tensors else ():
            if (unit, state_kind) not in restored:
                fill_state_kind(state, unit, state_kind, tensors, reader.fill)
        for spec in unit.trainable():
            if checkpoint.has(f"{spec.name}.gradient"):
                gradient = reader.read(f"{spec.name}.gradient")
                state.put_gradient(unit, spec, gradient, engine.device.torch_device)


def fill_state_kind(
    state: StateAccess,
    unit: Unit,
    state_kind: StateKind,
    tensors: Sequence[StateTensor],
    fill: Callable[[StateTensor, int, torch.Tensor], None],
) -> None:
    """Gives a state kind of a unit new values, part by part.

    `fill(tensor, start, target)` fills `target` with elements of one of the `tensors`, which count
    from the first one that this process keeps. Elements of no tensor become zeros.
    """
    for tensor, start, values in _values(state, unit, state_kind, tensors, keep=True):
        if tensor is None:
            values.zero_()
        else:
            fill(tensor, start, values)


def _values(
    state: StateAccess,
    unit: Unit,
    state_kind: StateKind,
    tensors: Sequence[StateTensor],
    *,
    keep: bool = False,
) -> Iterator[tuple[StateTensor | None, int, torch.Tensor]]:
    """Yields all values of a state kind, part by part: whose they are of `tensors`, and the place
    of the first among those that this process keeps. With `keep` the caller fills them."""
    if state.store.location(unit, state_kind) is None:
        return
    kept = [tensor for tensor in tensors if tensor.state_kind is state_kind]
    by_spec = {tensor.spec: tensor for tensor in kept if not tensor.is_scales}
    scales = {tensor.spec: tensor for tensor in kept if tensor.is_scales}
    for part in state.parts(unit, state_kind, keep=keep):
        if part.scales is not None:
            yield scales[part.spec], part.start // BLOCK_NUMEL, part.scales
        yield by_spec.get(part.spec), part.start, part.values


def first_difference(path: Path, model: nn.Module) -> str | None:
    """Returns the name of the first weight, master or moment of a checkpoint that this rank has not
    to the bit, and None where all are alike. Raises as `load`, and changes nothing."""
    engine = engine_of(model)
    found = OpenCheckpoint(find_checkpoint(path))
    with engine.at_rest("infinity.checkpoint.first_difference") as state, StoredReader() as stored:
        found.check_model(state, model, engine.rank)
        reader = _ModelReader(found, stored)
        for unit, tensors in kept_tensors(state):
            for state_kind in STREAMED if tensors else ():
                for tensor, start, values in _values(state, unit, state_kind, tensors):
                    if tensor is None:
                        continue
                    saved = torch.empty_like(values)
                    reader.fill(tensor, start, saved)
                    if tensor_bytes(saved) != tensor_bytes(values):
                        return tensor.name
    return None


def _load_buffers(saved: Mapping[str, SavedTensor], model: nn.Module) -> None:
    if not saved:
        return
    with StoredReader(consequence=_MIXTURE) as reader, torch.no_grad():
        for name, buffer in buffers_of(model).items():
            put_buffer(buffer, reader.read_full(saved[name]))


# -- The small state -------------------------------------------------------------------------------


def program_of(checkpoint: OpenCheckpoint, rank: int = 0) -> dict[str, Any]:
    """Returns the small state of a rank; `random` is None for a rank that did not save.

    Runs no code that the file holds. Raises CorruptionError, StorageError.
    """
    state = parse_program(*checkpoint.packed_program(rank))
    if rank >= len(checkpoint.manifest.places):
        state["random"] = None
    return state


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
    state.setdefault("modules", None)  # Earlier versions left it out.
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
    value = torch.load(_rewritten(content), weights_only=True, map_location="cpu")
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
    elif isinstance(own, (bool, str)):
        is_same = isinstance(saved, type(own))
    elif isinstance(own, (int, float, torch.Tensor)):  # A learning rate is either.
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
            "expected numbers, text, tensors, lists and dicts in `extra`, in param_groups, in the "
            "scheduler's state_dict() and in get_extra_state() of modules, and nothing that needs "
            f"code to be read: {reason}"
        ) from None
    return buffer.getvalue()


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Returns what modules keep beside tensors, as `state_dict()` has it, by their names."""
    plain = nn.Module.get_extra_state
    own = {n: m for n, m in model.named_modules() if type(m).get_extra_state is not plain}
    return {name: module.get_extra_state() for name, module in own.items()}


def random_state() -> dict[str, Any]:
    """Returns the state of all default generators as numbers and tensors."""
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
    }


def _numpy_state() -> Any:
    """Returns a list, for another generator than NumPy's own a dict whose arrays are of uint64."""
    found = state_of_numpy()
    if isinstance(found, dict):
        return _mapped(found, numpy.ndarray, lambda array: torch.from_numpy(array.view("int64")))
    kind, keys, *rest = found
    return [kind, torch.from_numpy(keys.astype("int64")), *rest]


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(inner, kind, change) for key, inner in value.items()}
    return change(value) if isinstance(value, kind) else value


def _check_numpy(saved: Any, path: Path) -> None:
    """Raises ConfigError where NumPy has another default generator than it had."""
    was, own = (
        s["bit_generator"] if isinstance(s, dict) else s[0] for s in (saved, _numpy_state())
    )
    if was != own:
        raise ConfigError(
            f"{path} was saved with {was} as the generator of NumPy, and it has {own} now; call "
            f"numpy.random.set_bit_generator(numpy.random.{was}()) before"
        )


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores the default generators, except those of devices that this machine does not have."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if isinstance(state["numpy"], dict):
        numpy.random.set_state(
            _mapped(state["numpy"], torch.Tensor, lambda values: values.numpy().view("uint64"))
        )
    else:
        kind, keys, position, has_gauss, cached = state["numpy"]
        keys = keys.numpy().astype("uint32")
        numpy.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
