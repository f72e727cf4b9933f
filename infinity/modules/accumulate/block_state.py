"""What the modules of a block change beside their attributes: buffers, containers, generators.

A forward that is repeated begins with the state that the first one found and leaves none changed:
running statistics, averages, counts and generators end as after plain accumulation, in which the
micro-batches pass a block in the same order.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from infinity.modules.accumulate.proof import Proof

_CONTAINERS = (list, dict, set, OrderedDict, deque, numpy.ndarray)
_GENERATORS = (
    torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator,
)  # fmt: skip
# What torch itself keeps in a module.
_OF_TORCH = frozenset(nn.Module().__dict__)


class _StatePlace(NamedTuple):
    """An entry of a module's `__dict__` or of its buffers."""

    table: dict[str, Any]
    name: str
    label: str


class _GeneratorState(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Before(NamedTuple):
    """The state that a forward found and changed: values by place, and states of generators."""

    values: list[tuple[_StatePlace, Any]]
    generators: list[tuple[_GeneratorState, Any]]

    @property
    def label(self) -> str | None:
        """The name of a place that has changed, or None."""
        if self.values:
            return self.values[0][0].label
        return "a generator" if self.generators else None


class BlockState:
    """The state of one block. Used by one running thread at a time."""

    def __init__(self, name: str, block: nn.Module, proof: Proof) -> None:
        self._proof = proof
        self._buffers: list[_StatePlace] = []
        self._containers: list[_StatePlace] = []
        self._generators: list[_GeneratorState] = []
        for child, module in block.named_modules():
            place = "".join(f"{part}." for part in (name, child) if part)
            self._buffers += [
                _StatePlace(module._buffers, key, place + key)
                for key, buffer in module._buffers.items()
                if buffer is not None
            ]
            for key, value in module.__dict__.items():
                kind = _kind_of(type(value))  # type: ignore[arg-type]
                if kind == "container" and key not in _OF_TORCH:
                    self._containers.append(_StatePlace(module.__dict__, key, place + key))
                elif kind == "generator":
                    self._generators.append(_generator(value))

    def watch(self) -> Callable[[], Before]:
        """Returns a function that returns what has changed since."""
        buffers = [
            (place, buffer, buffer._version, buffer.detach().clone())
            for place in self._buffers
            if (buffer := place.table.get(place.name)) is not None
        ]
        containers = [
            (place, found, copy.copy(found))
            for place in self._containers
            if (found := place.table.get(place.name)) is not None
        ]
        states = [(generator, generator.get()) for generator in self._generators]

        def changed() -> Before:
            values: list[tuple[_StatePlace, Any]] = []
            for place, buffer, version, clone in buffers:
                if buffer._version != version or self._was_written(place, buffer, clone):
                    self._proof.written.add(place.label)
                    values.append((place, clone))
            values += [(at, before) for at, now, before in containers if not is_alike(now, before)]
            return Before(values, [pair for pair in states if not is_alike(pair[0].get(), pair[1])])

        return changed

    def _was_written(self, place: _StatePlace, buffer: torch.Tensor, clone: torch.Tensor) -> bool:
        """Whether a buffer was written through `.data`, which leaves its version as it was."""
        if place.label in self._proof.written:
            return True
        if not self._proof.is_young and buffer.device.type != "cpu":
            return False  # A comparison waits for the device.
        return buffer.shape == clone.shape and not torch.equal(_bytes_of(buffer), _bytes_of(clone))


@contextmanager
def again(before: Before) -> Iterator[None]:
    """Begins a repeated forward with the state before the first one, and puts the present state
    back behind it. The repeated forward gets objects of its own, which its graph may save."""
    kept = [(place, place.table.get(place.name)) for place, _ in before.values]
    states = [(generator, generator.get()) for generator, _ in before.generators]
    for place, value in before.values:
        is_tensor = isinstance(value, torch.Tensor)
        place.table[place.name] = value.clone() if is_tensor else copy.copy(value)
    for generator, state in before.generators:
        generator.set(state)
    try:
        yield
    finally:
        for place, value in kept:
            place.table[place.name] = value
        for generator, state in states:
            generator.set(state)


@functools.cache
def _kind_of(cls: type) -> str | None:
    """Asked for every attribute of every module."""
    if cls in _CONTAINERS:
        return "container"
    is_generator = issubclass(cls, _GENERATORS) and not issubclass(cls, random.SystemRandom)
    return "generator" if is_generator else None


def _generator(value: Any) -> _GeneratorState:
    """Returns how the state of a generator is read and written."""
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _GeneratorState(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, random.Random):
        return _GeneratorState(value.getstate, value.setstate)
    return _GeneratorState(value.get_state, value.set_state)


def is_alike(now: Any, before: Any) -> bool:
    """Whether a container and its copy hold the same objects, or two states are equal. Tensors in
    containers are compared by identity."""
    try:
        return now is before or bool(now == before)
    except (RuntimeError, ValueError):  # Arrays have no truth.
        pass
    if isinstance(now, (torch.Tensor, numpy.ndarray)):
        return now.shape == before.shape and bool((now == before).all())
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(is_alike(now[key], before[key]) for key in now)
    return len(now) == len(before) and all(map(is_alike, now, before))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # No number equals a NaN.
