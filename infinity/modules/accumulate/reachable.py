"""State that code can reach beside its arguments, and may change: attributes, containers, tensors,
generators, closures and globals.

A forward that is repeated begins with the state that the first one found and leaves none changed:
running statistics, averages, counts and generators of a block end as after plain accumulation, in
which the micro-batches pass a block in the same order. What several blocks can reach, or code
outside of them, has no such order.

Only a program's own classes and functions are entered, and plain containers. What libraries keep in
objects of theirs is not seen, nor are containers above `_MOST_ELEMENTS`.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, partial
from operator import is_
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from infinity.modules.accumulate.proof import Proof
from infinity.modules.accumulate.purity import is_own
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.torch_functions import version_of

_GENERATORS = (
    torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator,
)  # fmt: skip
_ARRAYS = (torch.Tensor, numpy.ndarray)
_CONTAINERS = frozenset({dict, list, set, deque})
_MOST_ELEMENTS = 4096
_MOST_OBJECTS = 20_000
# What torch itself keeps in a module.
_OF_TORCH = frozenset(nn.Module().__dict__)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
_CODE = (
    types.FunctionType, types.MethodType, functools.partial, types.CellType, type,
)  # fmt: skip
_INTEGERS = frozenset({torch.int64, torch.int32, torch.bool})
_ABSENT = object()
_NOTHING: Mapping[int, Any] = {}
_Place = tuple[int, Any]


class Changeable(NamedTuple):
    """An object that may change, and what it held. `places`: containers and keys that have it, for
    tensors and arrays, in whose place a repeated forward gets others."""

    label: str
    owner: Any
    before: Any
    places: Sequence[tuple[Any, Any]]

    def is_changed(self, proof: Proof, *, is_assumed: bool = True) -> bool:
        """Whether the object holds something else now. is_assumed: a tensor that was once written
        through `.data` is written again, where a comparison would wait for the device."""
        if not isinstance(self.owner, torch.Tensor):
            is_plain = type(self.owner) in _CONTAINERS
            return not is_alike(self.owner if is_plain else _read(self.owner), self.before)
        version, clone = self.before
        if version != version_of(self.owner):
            return True
        if clone is None:
            return False
        if self.owner.device.type != "cpu" and not proof.is_young:
            return is_assumed and self.label in proof.written
        if torch.equal(_bytes_of(self.owner), _bytes_of(clone)):
            return False
        proof.written.add(self.label)
        return True

    def changed_keys(self) -> list[Any]:
        """Returns the keys of a table that hold something else now."""
        if not isinstance(self.before, dict):
            return []
        now = _read(self.owner)
        return [
            key
            for key in {**self.before, **now}
            if not is_alike(now.get(key, _ABSENT), self.before.get(key, _ABSENT))
        ]

    def show(self, value: Any) -> None:
        """Makes the object hold a value, or puts another tensor or array into its places."""
        if not isinstance(self.owner, _ARRAYS):
            _put(self.owner, value)
        for container, key in self.places:
            container[key] = value

    def what(self) -> str:
        """Returns the name of what has changed."""
        for key in self.changed_keys():
            return f"{self.label}.{key}".strip(".")
        return self.label or "a generator"


class _Names(NamedTuple):
    """The globals that functions of one module name."""

    table: dict[str, Any]
    names: set[str]


class _Look:
    """The cells of one look. Containers, versions and numbers of tokens are compared together:
    as a rule none has changed. `==` of two lists asks the same as that of their elements."""

    def __init__(self, cells: list[Changeable]) -> None:
        self.cells = cells
        tables = [c for c in cells if type(c.owner) in _CONTAINERS and not _holds_far(c.before)]
        tensors = [cell for cell in cells if isinstance(cell.owner, torch.Tensor)]
        counted = [cell for cell in tensors if cell.before[0] is not None]
        tokens = [cell for cell in counted if _has_tokens(cell.before[1])]
        self._tables = [cell.owner for cell in tables], [cell.before for cell in tables]
        self._counted = [cell.owner for cell in counted], [cell.before[0] for cell in counted]
        self._tokens = [cell.owner for cell in tokens], [cell.before[1] for cell in tokens]
        together = [*tables, *tokens, *(cell for cell in counted if cell.before[1] is None)]
        known = set(map(id, together))
        self._others = [cell for cell in cells if id(cell) not in known]

    def _is_same(self) -> bool:
        (tables, before), (counted, versions) = self._tables, self._counted
        try:
            is_same = tables == before and [tensor._version for tensor in counted] == versions
            return is_same and all(map(torch.equal, *self._tokens))
        except (RuntimeError, ValueError):  # Arrays have no truth.
            return False

    def changed(self, proof: Proof, *, is_assumed: bool = True) -> list[Changeable]:
        """Returns the objects that hold something else now. See `Changeable.is_changed`."""
        cells = self._others if self._is_same() else self.cells
        return [cell for cell in cells if cell.is_changed(proof, is_assumed=is_assumed)]


class Reachable:
    """The objects that may change and that can be reached from some roots, with their contents at
    the last look. Used by one running thread at a time."""

    def __init__(
        self, roots: Iterable[tuple[str, Any]], proof: Proof, *, is_block: bool = True
    ) -> None:
        """is_block: attributes of modules count, and code does not; otherwise the other way
        round."""
        self._roots, self._proof, self._is_block = list(roots), proof, is_block
        self._known: Mapping[int, Any] = _NOTHING
        self._own: Set[int] = frozenset()
        self._has_looked = False

    def pass_by(self, known: Mapping[int, Any], own: Set[int] = frozenset()) -> None:
        """Does not enter known objects at further looks, except its own."""
        self._known, self._own, self._has_looked = known, own, False

    def passes_by(self, key: int) -> bool:
        """Whether the object with this identity is not entered."""
        return key in self._known and key not in self._own

    def look(self, *, is_noted: bool = True) -> dict[int, tuple[str, Any]]:
        """Notes what the objects hold now. Returns them by identity, which lasts as long as they.
        is_noted: False for the objects alone."""
        cells: list[Changeable] = []
        self._cells = cells if is_noted else None
        self._seen: dict[int, tuple[str, Any]] = {}
        self._places: dict[int, list[tuple[Any, Any]]] = {}
        self._names: dict[int, _Names] = {}
        waiting = deque((label, value, None) for label, value in self._roots)
        while waiting and len(self._seen) < _MOST_OBJECTS:
            waiting.extend(self._enter(*waiting.popleft()))
        for names in self._names.values():
            self._note("the global", names)
        self._has_looked, self.last = is_noted, _Look(cells)
        seen, self._seen = self._seen, {}
        return seen

    def _enter(self, label: str, value: Any, place: Any) -> Iterator[tuple[str, Any, Any]]:
        """Notes an object and yields what it leads to."""
        kind = type(value)
        if kind in _PLAIN or self.passes_by(id(value)):
            return
        if isinstance(value, _ARRAYS) and place is not None:
            self._places.setdefault(id(value), []).append(place)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = label, value
        if isinstance(value, nn.Module):
            yield from self._enter_module(label, value)
        elif isinstance(value, (dict, list, tuple, deque, set)):
            if len(value) > _MOST_ELEMENTS:
                return
            if not isinstance(value, tuple):
                self._note(label, value)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from (
                (f"{label}[{key!r:.40}]", element, (value, key))
                for key, element in pairs
                if type(element) not in _PLAIN
            )
        elif isinstance(value, _CODE):
            yield from () if self._is_block else self._enter_code(label, value)
        elif isinstance(value, (*_ARRAYS, *_GENERATORS)) or (
            isinstance(value, threading.local) and (kind is threading.local or is_own(kind))
        ):
            if not isinstance(value, (random.SystemRandom, Handle, nn.Parameter)):
                self._note(label, value)
        elif kind is types.SimpleNamespace or is_own(kind):
            table = getattr(value, "__dict__", {})
            self._seen[id(table)] = label, table
            self._note(label, table)
            yield from ((f"{label}.{key}", found, (table, key)) for key, found in table.items())
            yield label, kind, None

    def _enter_module(self, label: str, module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
        is_program = is_own(type(module))
        for table in (module._buffers, module.__dict__):
            self._seen[id(table)] = label, table
            if self._is_block and (is_program or table is module._buffers):
                self._note(label, table)
            if table is module._buffers and not self._is_block and not is_program:
                continue  # Statistics of torch's own modules change and are read in one place.
            for key, found in list(table.items()):
                if key not in _OF_TORCH and type(found) not in _PLAIN:
                    yield f"{label}.{key}".lstrip("."), found, (table, key)
        yield label, type(module), None
        for key, parameter in module._parameters.items() if self._is_block else ():
            shown = parameter.owner.shown(parameter) if isinstance(parameter, Handle) else parameter
            if shown is not None and id(shown) not in self._seen:
                self._seen[id(shown)] = key, shown
                self._note(f"{label}.{key}".lstrip("."), shown, is_kept=False)
        for key, child in module._modules.items():
            yield f"{label}.{key}".lstrip("."), child, None

    def _enter_code(self, label: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(value, functools.partial):
            yield from (
                (label, found, None) for found in (value.func, *value.args) if callable(found)
            )
        elif isinstance(value, types.MethodType):
            yield label, value.__func__, None
            yield type(value.__self__).__name__, value.__self__, None
        elif isinstance(value, types.CellType):
            self._note(label, value)
            yield from ((label, found, None) for found in _read(value).values())
        elif isinstance(value, type):
            if is_own(value):
                self._note(value.__qualname__, value)
                for key, found in (*_data_of(value).items(), *vars(value).items()):
                    yield f"{value.__qualname__}.{key}", getattr(found, "__func__", found), None
                yield from ((label, base, None) for base in value.__bases__)
        else:
            names = value.__code__.co_freevars
            yield from ((*pair, None) for pair in zip(names, value.__closure__ or (), strict=True))
            if is_own(value):
                table = value.__globals__
                named = self._names.setdefault(id(table), _Names(table, set())).names
                new = set(_names_in(value.__code__)) - named
                named |= new
                yield from ((name, table[name], None) for name in new if name in table)

    def _note(self, label: str, owner: Any, *, is_kept: bool = True) -> None:
        if self._cells is None:
            return
        before = _read(owner)
        if isinstance(owner, torch.Tensor):
            is_kept = is_kept and (self._is_block or owner.numel() <= _MOST_ELEMENTS)
            is_plain = owner.layout == torch.strided and owner.device.type != "meta"
            before = version_of(owner), owner.detach().clone() if is_kept and is_plain else None
        places = self._places.setdefault(id(owner), []) if isinstance(owner, _ARRAYS) else ()
        self._cells.append(Changeable(label, owner, before, places))

    def watch(self, *, is_assumed: bool = True) -> Callable[[], list[Changeable]]:
        """Returns a function that returns the objects that have changed since. See
        `Changeable.is_changed`."""
        if not self._has_looked or self.last.changed(self._proof):
            self.look()
        return partial(self.last.changed, self._proof, is_assumed=is_assumed)

    def take_changed(self) -> list[Changeable]:
        """Returns the objects that hold something else than at the last look, and looks again."""
        if cells := self.last.changed(self._proof):
            self.look()
        return cells


class ProgramState:
    """State that a program's own code reaches while micro-batches take turns, and blocks do not.

    A number or a tensor that a loss puts into an attribute or a variable before its first block
    (`self.tokens += n`) belongs to its micro-batch: the loss finds it again behind its last block,
    whatever others have put there, and the next micro-batch goes on with it. That is the plain
    order, unless code of blocks may read it, or a loss writes it again later.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[Reachable, nn.Module]],
        code: Iterable[Any],
        proof: Proof,
    ) -> None:
        self._proof = proof
        self.early: set[str] = set()  # What the first micro-batch has changed before all others.
        modules = {id(module): module for module in model.modules()}
        of_blocks = {id(module): module for _, block in blocks for module in block.modules()}
        outside = [(name, m) for name, m in model.named_modules() if id(m) not in of_blocks]
        own = [{id(module) for module in block.modules()} for _, block in blocks]
        within: list[dict[int, tuple[str, Any]]] = []
        for (state, _), modules_of_block in zip(blocks, own, strict=True):
            state.pass_by(modules, modules_of_block)
            within.append(state.look(is_noted=False))
        counts = Counter(key for seen in within for key in seen)
        shared = [found for seen in within for key, found in seen.items() if counts[key] > 1]
        kinds = [(type(m).__name__, type(m)) for m in of_blocks.values()]
        named = [(_label(found), found) for found in code]
        self._found = Reachable([*outside, *shared, *kinds, *named], proof, is_block=False)
        self._passed_by = {key: m for key, m in of_blocks.items() if counts[key] < 2}
        self._found.pass_by(self._passed_by)
        seen = self._found.look()
        known = {**modules, **seen}
        for (state, _), modules_of_block in zip(blocks, own, strict=True):
            state.pass_by(known, modules_of_block - seen.keys())
        self._block_roots = [*shared, *kinds]
        # By micro-batch: what it finds in these places. Places are tables and their keys.
        self._views: dict[int, dict[_Place, tuple[Any, Any]]] = {}
        self._writers: dict[_Place, set[int]] = {}

    def enter(self, number: int) -> None:
        """Shows a micro-batch its own values."""
        cells = {id(cell.owner): cell for cell in self._found.last.cells} if self._writers else {}
        for (owner_id, key), (owner, value) in self._views.setdefault(number, {}).items():
            _put_key(owner, key, value)
            if owner_id in cells:
                _put_key(cells[owner_id].before, key, value)

    def own(self, number: int) -> list[str]:
        """Gives a micro-batch what it has written before its first block. Returns the names of what
        cannot be its own."""
        names = []
        for cell in self._found.take_changed():
            values = self._plain_changes(cell)
            if values is None:
                names.append(cell.what())
                continue
            for key, value in values.items():
                place = id(cell.owner), key
                writers = self._writers.setdefault(place, set())
                if number in writers and len(writers) > 1:
                    names.append(cell.what())
                writers.add(number)
                for view in self._views.values():
                    view.setdefault(place, (cell.owner, cell.before.get(key, _ABSENT)))
                self._views[number][place] = cell.owner, value
        return names

    def written_again(self) -> list[str]:
        """Returns the names of what has changed since the last call and is of a micro-batch, or was
        changed by the first one before all others."""
        return [
            cell.what()
            for cell in self._found.take_changed()
            if cell.what() in self.early
            or any((id(cell.owner), key) in self._writers for key in cell.changed_keys())
        ]

    def changed(self) -> list[str]:
        """Returns the names of what has changed since the last call."""
        return [cell.what() for cell in self._found.take_changed()]

    @cached_property
    def _of_blocks(self) -> Mapping[int, Any]:
        """Cells that code of blocks can reach. Most windows need none."""
        found = Reachable(self._block_roots, self._proof, is_block=False)
        found.pass_by(self._passed_by)
        return found.look(is_noted=False)

    def _plain_changes(self, cell: Changeable) -> dict[Any, Any] | None:
        """Returns the new values of a table's changed keys; None if it is no table, has changed
        other than by plain values, or can be reached by code of blocks."""
        if not isinstance(cell.owner, (dict, types.CellType)) or id(cell.owner) in self._of_blocks:
            return None
        now = _read(cell.owner)
        found = {key: now.get(key, _ABSENT) for key in cell.changed_keys()}
        is_plain = all(
            value is _ABSENT or type(value) in _PLAIN or isinstance(value, torch.Tensor)
            for key, new in found.items()
            for value in (new, cell.before.get(key, _ABSENT))
        )
        return found if is_plain else None

    def of_threads(self) -> list[str]:
        """Returns the names of what has another value in this thread."""
        cells = (cell for cell in self._found.last.cells if isinstance(cell.owner, threading.local))
        return [cell.what() for cell in cells if cell.is_changed(self._proof)]


def _label(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))


@contextmanager
def again(changed: list[Changeable]) -> Iterator[None]:
    """Begins a repeated forward with the state before the first one, and puts the present state
    back behind it. The repeated forward gets tensors of its own, which its graph may save."""
    kept = [c.owner if isinstance(c.owner, _ARRAYS) else _read(c.owner) for c in changed]
    for cell in changed:
        is_tensor = isinstance(cell.owner, torch.Tensor)
        cell.show(cell.before[1].clone() if is_tensor else copy.copy(cell.before))
    try:
        yield
    finally:
        for cell, now in zip(changed, kept, strict=True):
            cell.show(now)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _data_of(cls: type) -> dict[str, Any]:
    """Returns what a class keeps, without its methods."""
    return {
        key: value
        for key, value in vars(cls).items()
        if not (key.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is unequal to itself. A tensor of no dimension is not viewed as other elements."""
    if tensor.dtype in _INTEGERS:  # Token ids, of which there may be many.
        return tensor.detach()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _has_tokens(clone: torch.Tensor | None) -> bool:
    return clone is not None and clone.dtype in _INTEGERS and clone.device.type == "cpu"


def _read(owner: Any) -> Any:
    """Returns a copy of what an object holds, or the state of a generator."""
    if isinstance(owner, _Names):
        return {name: owner.table[name] for name in owner.names if name in owner.table}
    if isinstance(owner, type):
        return _data_of(owner)
    if isinstance(owner, types.CellType):
        try:
            return {"": owner.cell_contents}
        except ValueError:  # Nothing yet.
            return {}
    if isinstance(owner, threading.local):
        return dict(vars(owner))
    if isinstance(owner, _GENERATORS):
        return _generator(owner)[0]()
    if isinstance(owner, dict):
        return dict(owner)
    return owner if isinstance(owner, torch.Tensor) else copy.copy(owner)


def _generator(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Returns what reads and sets the state of a generator."""
    if isinstance(owner, numpy.random.Generator):
        bits = owner.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    if isinstance(owner, random.Random):
        return owner.getstate, owner.setstate
    return owner.get_state, owner.set_state


def _put(owner: Any, value: Any) -> None:
    """Makes an object hold what `_read` has returned."""
    if isinstance(owner, dict):
        for key in [key for key in owner if key not in value]:
            del owner[key]
        for key, found in value.items():
            if owner.get(key, _ABSENT) is not found:
                owner[key] = found
    elif isinstance(owner, list):
        owner[:] = value
    elif isinstance(owner, _GENERATORS):
        _generator(owner)[1](value)
    else:
        owner.clear()
        (owner.update if isinstance(owner, set) else owner.extend)(value)


def _put_key(owner: Any, key: Any, value: Any) -> None:
    """Puts a value that was read from a table back into it."""
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif value is _ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def is_alike(now: Any, before: Any) -> bool:
    """Whether a container and its copy hold the same objects, or two states are equal. A tensor of
    a device is like itself alone: a comparison would wait for the device."""
    if now is before or _is_far(now) or _is_far(before):
        return now is before
    if isinstance(now, dict) and isinstance(before, dict):
        if now.keys() != before.keys():
            return False
        now, before = [*now.values()], [before[key] for key in now]
    if isinstance(now, (list, tuple, deque)) and type(now) is type(before):
        if len(now) != len(before):
            return False
        return all(map(is_, now, before)) or all(map(is_alike, now, before))
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # Arrays have no truth.
        are_arrays = isinstance(now, _ARRAYS) and isinstance(before, _ARRAYS)
        return are_arrays and now.shape == before.shape and bool((now == before).all())


def _is_far(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and found.device.type != "cpu"


def _holds_far(container: Any) -> bool:
    """Whether a container, or a sequence in it, holds tensors of a device."""
    for found in container.values() if isinstance(container, dict) else container:
        if _is_far(found[0] if isinstance(found, (list, tuple)) and found else found):
            return True
    return False
