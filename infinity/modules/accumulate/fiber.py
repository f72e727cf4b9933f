"""Fibers: forwards that are suspended and resumed, with the state of their threads.

A thread is the only way in Python to suspend a function of another package. One thread runs at a
time: the schedule or one of its fibers. `run_on` and `pause_at` hand control over.

Note [Calls beside]
  A loss may call the model twice, for a policy and for its reference. In the fiber of the
  micro-batch the second call begins when the first one has ended, and each block is acquired once
  more. `infinity.beside` runs a call in a fiber of its own, which reaches a block together with the
  fiber of the micro-batch. Both share the records of the backward.
"""

from __future__ import annotations

import contextvars
import ctypes
import hashlib
import os
import random
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy
import torch
from torch.autograd.graph import Node

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.between import GraphBetween
from infinity.modules.accumulate.boundary import BlockCall, RunningBlock
from infinity.modules.accumulate.module_state import Attributes, Touched
from infinity.modules.accumulate.reachable import is_alike
from infinity.modules.autograd.threads import in_same_modes, process_flags

# Libraries keep settings of a thread in variables of their own when they are first asked (decimal).
_PLAIN_VALUES = (bool, int, float, str, list, tuple, dict, set, torch.Tensor)
_NUM_WORDS = 625  # Of a Mersenne Twister of NumPy (key, place) and of Python (place, key).


class _Thread:
    """A thread that runs one task after another. Daemon: it never delays the exit."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[str, Callable[[], None], Callable[[], None]]] = SimpleQueue()
        threading.Thread(target=self._work, name=_IDLE_NAME, daemon=True).start()

    def run(self, name: str, task: Callable[[], None], then: Callable[[], None]) -> None:
        """Starts the task. When it has ended and the thread is free for another, calls `then`."""
        self._tasks.put((name, task, then))

    def _work(self) -> None:
        here = threading.current_thread()
        while True:
            here.name, task, then = self._tasks.get()
            task()
            here.name = _IDLE_NAME
            _idle.append(self)
            then()
            del task, then  # What they refer to must not live until the next task.


# Threads that wait for a micro-batch. A new thread for each would make a new handle of every
# library of the device, which keep memory of the device: cuBLAS 32 MiB for each handle and stream.
_IDLE_NAME = "infinity-forward"
_idle: list[_Thread] = []
_here = threading.local()  # Of a thread: `fiber`, which it runs.
os.register_at_fork(after_in_child=_idle.clear)  # A fork copies no threads.


def run_in_thread(name: str, task: Callable[[], None], then: Callable[[], None]) -> None:
    """Runs a task in a thread of its own, which has its name until `then` is called. Both raise
    nothing."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.run(name, task, then)


def _refuse_other_values(before: contextvars.Context) -> None:
    """Refuses context variables with other values than before; those of torch are its own."""
    for variable, value in contextvars.copy_context().items():
        is_new = variable not in before and type(value) in _PLAIN_VALUES
        if not variable.name.startswith("torch.") and (
            is_new or before.get(variable, value) is not value
        ):
            raise UnsupportedError(
                f"a micro-batch leaves another value in the context variable {variable.name!r}, "
                "which the next one would not see; reset it behind the loss, or accumulate "
                "micro-batches by several backward() calls instead"
            )


class _Abandoned(BaseException):
    """Ends the thread of an abandoned fiber. It never reaches the caller."""


@dataclass(eq=False, slots=True)
class Records:
    """The calls and graph that the backward of a micro-batch needs."""

    calls: list[BlockCall] = field(default_factory=list)  # Whose backward has not run yet.
    called: list[RunningBlock] = field(default_factory=list)  # With gradients or without.
    graph: GraphBetween = field(default_factory=GraphBetween)

    def clear(self) -> None:
        """Forgets the micro-batch."""
        self.calls.clear()
        self.called.clear()
        self.graph.clear()


class Fiber:
    """A forward in a thread of its own, with its own random numbers and attributes of modules: that
    of a micro-batch, of a call beside its loss, or of a block that is repeated. A fiber starts
    suspended.

    `forward` returns a loss whose backward follows, or None; the attribute `loss` has it when the
    fiber has ended. The fiber runs with gradients enabled, and with the autocast state, number of
    compute threads, context variables and device stream of the thread that made it.

    records: those of the micro-batch, which a call beside its loss shares
    """

    def __init__(
        self,
        number: int,
        forward: Callable[[], torch.Tensor | None],
        device: torch.device,
        random: list[Any],
        attributes: Attributes,
        *,
        records: Records | None = None,
        is_repeat: bool = False,
    ) -> None:
        self.number, self.is_repeat = number, is_repeat
        self.random, self.attributes = random, attributes
        self.touched = Touched(set(), set())
        self.records = Records() if records is None else records
        self.is_inside = is_repeat  # Whether it is inside a block.
        self.behind_tiles: Node | None = None  # The last node behind tiles that it stopped at.
        self.at: Any = None  # The place where it is suspended; None after its end.
        self.loss: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._turn = threading.Semaphore(0)
        self._paused, self._ended = threading.Event(), threading.Event()
        self.flags = process_flags()
        variables, run = contextvars.copy_context(), in_same_modes(forward, device)
        task = partial(variables.copy().run, self._run, run, variables)
        run_in_thread(f"micro-batch {number}", task, self._note_end)

    def _run(
        self, forward: Callable[[], torch.Tensor | None], variables: contextvars.Context
    ) -> None:
        _here.fiber = self
        try:
            self._wait_to_run()
            self.loss = forward()
            _refuse_other_values(variables)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        self.at = _here.fiber = None

    def _note_end(self) -> None:
        self._ended.set()
        self._paused.set()

    def _wait_to_run(self) -> None:
        if not self._is_abandoned:  # Else code that ends no thread by an exception goes on.
            self._turn.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def pause_at(self, place: Any) -> None:
        """Suspends the fiber until the next `run_on`. Raises UnsupportedError in the thread of
        another program, or in one that the forward has started: it cannot be suspended."""
        if getattr(_here, "fiber", None) is not self:
            raise UnsupportedError(
                "a block is called in a thread of its own while infinity.forward_backward or "
                "infinity.forward runs; call it in the thread of the micro-batch, or before or "
                "after that call, or accumulate micro-batches by several backward() calls instead"
            )
        self.at = place
        self._paused.set()
        self._wait_to_run()

    def run_on(self) -> None:
        """Runs the fiber to its next pause or to its end, and raises its error. Called by the
        schedule, which delays signals: a running fiber cannot be stopped."""
        self._paused.clear()
        self._turn.release()
        self._paused.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def abandon(self) -> None:
        """Ends the fiber, wherever it is suspended. Its forward has ended on return."""
        if not self._ended.is_set():
            self._is_abandoned = True
            self._turn.release()
        self._ended.wait()
        self.records.clear()


class _OfPython:
    """Python's generator. `random.getstate` and `setstate` make and read 625 numbers, so its words
    are copied as memory, if they are where CPython has them. The other part of the state is a kept
    normal number."""

    def __init__(self) -> None:
        self._generator: Any = getattr(random.getstate, "__self__", None)
        self._address = id(self._generator) + object.__basicsize__
        *key, place = random.getstate()[1]
        words = array("I", [place, *key]).tobytes()
        is_inside = random.Random.__basicsize__ >= object.__basicsize__ + len(words)
        is_plain = type(self._generator) is random.Random
        self._is_copied = is_plain and is_inside and _words_at(self._address) == words

    def state(self) -> Any:
        if not self._is_copied:
            return random.getstate()
        return _words_at(self._address), self._generator.gauss_next

    def set(self, state: Any) -> None:
        if self._is_copied:
            words, self._generator.gauss_next = state
            ctypes.memmove(self._address, words, _NUM_WORDS * 4)
        else:
            random.setstate(state)


class _OfNumpy:
    """NumPy's generator. `numpy.random.get_state` and `set_state` take 30 us each, and each block
    of each micro-batch calls them, so the words of the generator are compared and copied as memory.
    A draw that keeps a second normal number (`has_gauss`) changes them, too; until this number is
    used, the state is read and set as a whole. `ctypes` is the bit generator's own interface.
    """

    def __init__(self) -> None:
        self._generator = _generator_of_numpy()
        self._address = self._generator.ctypes.state_address
        self._known: tuple[bytes, Any] = b"", None  # The words and the state, as last read or set.
        words = _words_of(state_of_numpy())
        self._is_copied = words != b"" and _words_at(self._address) == words

    def _is_known(self) -> bool:
        """Whether nothing was drawn since the state was read or set."""
        words, state = self._known
        is_same = self._is_copied and _generator_of_numpy() is self._generator
        return is_same and state is not None and not state[3] and _words_at(self._address) == words

    def state(self) -> Any:
        if not self._is_known():
            state = state_of_numpy()
            self._known = _words_of(state), state
        return self._known[1]

    def set(self, state: Any) -> None:
        words = _words_of(state)
        if self._is_known() and not state[3]:
            ctypes.memmove(self._address, words, len(words))
        else:
            numpy.random.set_state(state)
        self._known = words, state


def state_of_numpy() -> Any:
    """Returns what `numpy.random.get_state()` does, without its warning about another generator
    (`numpy.random.set_bit_generator`), whose state is a dict."""
    found: Any = numpy.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        return found
    inner = found["state"]
    return "MT19937", inner["key"], inner["pos"], found["has_gauss"], found["gauss"]


# NumPy's stubs lack it.
_generator_of_numpy: Callable[[], Any] = vars(numpy.random)["get_bit_generator"]


def _words_at(address: int) -> bytes:
    return ctypes.string_at(address, _NUM_WORDS * 4)


def _words_of(state: Any) -> bytes:
    """Returns what `struct mt19937_state` of NumPy holds: the key and the place in it. Empty for
    another generator."""
    if isinstance(state, dict):
        return b""
    key: bytes = state[1].tobytes()
    return key + int(state[2]).to_bytes(4, sys.byteorder)


class Random:
    """The generators that a model draws from: those of the host and of the device in torch, that of
    Python and that of NumPy."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._index = torch.device(device.type) if device.index is None else device
        self._of_python, self._of_numpy = _OfPython(), _OfNumpy()

    def state(self) -> list[Any]:
        """Returns the states of all generators."""
        states = [self._of_python.state(), self._of_numpy.state(), torch.get_rng_state()]
        if self._device is not None:
            states.append(self._device.get_rng_state(self._index))
        return states

    def set(self, states: list[Any]) -> None:
        """Sets states from `state`."""
        self._of_python.set(states[0])
        self._of_numpy.set(states[1])
        torch.set_rng_state(states[2])
        if self._device is not None:
            self._device.set_rng_state(states[3], self._index)

    @contextmanager
    def drawn_from(self, states: list[Any]) -> Iterator[None]:
        """Draws from these states in a `with` block."""
        kept = self.state()
        self.set(states)
        try:
            yield
        finally:
            self.set(kept)

    def fresh(self, count: int) -> list[list[Any]]:
        """Returns `count` states that follow from the present one: itself, then new ones. Draws
        nothing from the present one.

        The new ones follow from every generator of torch: a model may draw from that of the device
        alone, and the host's then stays the same from step to step.
        """
        self._of_numpy = _OfNumpy()  # A program may have put back a kept number alone.
        kept = self.state()
        seeds = [int(torch.randint(2**62, (), device="cpu")) for _ in range(count - 1)]
        states = [kept][:count]
        of_device = 0 if self._device is None else _number_of(kept[3])
        # `torch.manual_seed` keeps a traceback for each kind of device that is not there.
        seed_all = (
            torch.default_generator.manual_seed if self._device is None else torch.manual_seed
        )
        for seed in seeds:
            seed_all(seed ^ of_device)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            states.append(self.state())
        self.set(kept)
        return states

    def end(self, fibers: list[tuple[list[Any], list[Any]]]) -> None:
        """Goes on after the first of `fibers`, which are pairs of a last and a first state.

        A model that draws nothing leaves the generators as they were, so that the order of the data
        is that of the plain loop. If a later fiber alone has drawn, one number is drawn, too, so
        that the next fibers get other states.
        """
        if not fibers:
            return
        self.set(fibers[0][0])
        has_drawn = [not is_alike(last, first) for last, first in fibers]
        if any(has_drawn) and not has_drawn[0]:
            torch.randint(2**62, (), device="cpu")


def _number_of(state: torch.Tensor) -> int:
    """Returns 62 bits that follow from the state of a generator."""
    data = state.cpu().contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2
