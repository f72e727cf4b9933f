"""The threads and the process that use one model.

One thread runs a pass or a step at a time, and the others wait. A pass ends by a hook of the model,
or by an exception that no hook sees (Ctrl-C). A thread that waits therefore looks at the stack of
the thread that it waits for.

A forked child has the objects of a model and none of its state: the arena is not copied, threads
are gone, and the swap files belong to the parent.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from infinity._core import stacks
from infinity.errors import InfinityError
from infinity.private.torch import (
    dispatch_modes,
    engine_run_backward,
    function_modes,
    module_call_impl,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

_CALL: CodeType = module_call_impl.__code__
_BACKWARD: CodeType = engine_run_backward.__code__
_NODE: CodeType = BackwardCFunction.apply.__code__
_JOIN: CodeType = threading.Thread.join.__code__
PATIENCE_S = 10.0  # With reads of another thread, which may keep weights as long as it likes.
LOOKS_S = 0.005  # The interval at which a thread looks whether the other one has ended.


def _stack_of(thread: int) -> Iterator[FrameType]:
    if thread != get_ident():
        yield from stacks([thread]).get(thread, ())
        return
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _runs(thread: int, code: CodeType) -> bool:
    return any(frame.f_code is code for frame in _stack_of(thread))


def is_in_module(thread: int) -> bool:
    """Whether a thread runs a module."""
    return _runs(thread, _CALL)


def thread_of_backward() -> int:
    """Returns the identity of this thread, which runs a node of a backward. 0: a thread of a
    device, for a backward that another thread has called."""
    return get_ident() if _runs(get_ident(), _BACKWARD) else 0


def is_nested_backward() -> bool:
    """Whether this thread runs a backward that a node of another one has called, as a reentrant
    checkpoint does. A thread of a device has the node on its stack, and not the other call."""
    codes = [frame.f_code for frame in _stack_of(get_ident())]
    outer = codes[codes.index(_BACKWARD) + 1 :] if _BACKWARD in codes else []
    return _BACKWARD in outer or _NODE in outer


def is_backward_elsewhere(threads: Collection[int]) -> bool:
    """Whether one of these threads, and not this one, runs a backward. 0: any thread."""
    # A copy is one step for the GIL: other threads begin and end theirs.
    others = [thread for thread in [*threads] if thread != get_ident()]
    found = stacks([] if 0 in others else others) if others else {}
    found.pop(get_ident(), None)
    return any(frame.f_code is _BACKWARD for frames in found.values() for frame in frames)


def _is_joined_in(threads: Collection[int]) -> bool:
    """Whether one of these threads waits for the end of this one. 0: any thread of a device."""
    this, main = threading.current_thread(), threading.main_thread().ident
    for thread, frames in stacks([]).items():
        is_of_device = thread != main and frames[-1].f_code.co_name != "_bootstrap"
        joined = (f.f_locals.get("self") for f in frames if f.f_code is _JOIN)
        if this in joined and (thread in threads or (0 in threads and is_of_device)):
            return True
    return False


class Turns:
    """The thread whose pass runs. `lock` is the engine's."""

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self._thread = 0  # 0: none.
        # The frame that has the turn. Its address may be that of a later frame once it has failed.
        self._call: FrameType | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a thread has the turn."""
        call = self._call
        return call is not None and any(frame is call for frame in _stack_of(self._thread))

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread has the turn."""
        return self._thread != get_ident() and self.is_taken

    @contextmanager
    def alone(
        self, backwards: Callable[[], Collection[int]], is_read: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Holds the lock for the time of a `with` block, once no other thread has the turn or runs
        one of the backwards, of which `backwards` returns the threads; and once `is_read` says that
        none reads, unless that takes long. The caller does not hold the lock. Raises InfinityError
        where the other thread, in a hook of its pass, waits for this one to end."""
        with self._ended:
            until_s = time.monotonic() + PATIENCE_S
            while (
                self.is_elsewhere
                or is_backward_elsewhere(backwards())
                or (is_read is not None and is_read() and time.monotonic() < until_s)
            ):
                if _is_joined_in([self._thread, *backwards()]):
                    raise InfinityError(
                        "a pass of another thread waits, in a hook, for the end of this thread, "
                        "which would wait for the end of the pass: join it after the pass"
                    )
                self._ended.wait(LOOKS_S)
            yield

    def take(self, code: CodeType = _CALL) -> None:
        """Takes the turn until the innermost frame of this code ends, unless a frame around it has
        the turn. Under the lock."""
        if not self.is_taken:
            self._thread, self._call = get_ident(), _frame_of(code)

    def end(self, code: CodeType = _CALL) -> None:
        """Ends the turn, if the innermost frame of this code has it."""
        with self._ended:
            if self._thread == get_ident() and self._call == _frame_of(code):
                self._thread, self._call = 0, None
                self._ended.notify_all()


def _frame_of(code: CodeType) -> FrameType | None:
    return next((frame for frame in _stack_of(get_ident()) if frame.f_code is code), None)


# -- Modes of a thread ----------------------------------------------------------------------------


def _set_filters(filters: Any) -> None:
    warnings.filters = filters
    with warnings.catch_warnings():  # At its end Python forgets what it has looked up.
        pass


_CUDA = torch.backends.cuda
# What context managers set for the process, as pairs that read and write it.
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (lambda: warnings.filters, _set_filters),
)


def process_flags() -> tuple[Any, ...]:
    """Returns what context managers set for the whole process: the default dtype, the kernels of
    attention, the filters of warnings."""
    return tuple([read() for read, _ in _FLAGS])


def set_process_flags(flags: tuple[Any, ...]) -> None:
    """Sets flags from `process_flags`."""
    for (read, write), value in zip(_FLAGS, flags, strict=True):
        if read() is not value:
            write(value)


@contextmanager
def _stack(
    modes: tuple[Any, ...], now: Callable[[], list[Any]], push: Callable[[Any], Any], pop: Any
) -> Iterator[None]:
    """Puts these modes in the place of those of this thread. Entering one again could reset it."""
    found = now()
    is_same = len(found) == len(modes) and all(map(operator.is_, found, modes))
    for _ in () if is_same else found:
        pop()
    for mode in () if is_same else modes:
        push(mode)
    try:
        yield
    finally:
        for _ in () if is_same else modes:
            pop()
        for mode in () if is_same else found:
            push(mode)


@dataclass(frozen=True, slots=True)
class Modes:
    """Settings of the context managers around this code: the autocast state and the modes of torch
    functions and dispatch, of which every thread has its own, and the flags of the process."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_cached: bool
    flags: tuple[Any, ...] = field(hash=False)
    functions: tuple[Any, ...] = field(hash=False)
    dispatches: tuple[Any, ...] = field(hash=False)

    @classmethod
    def now(cls, device: torch.device) -> Modes:
        """Returns the modes of this thread."""
        kinds = dict.fromkeys(["cpu", device.type])
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        is_cached = torch.is_autocast_cache_enabled()
        modes = tuple(function_modes()), tuple(dispatch_modes())
        return cls(autocast, is_cached, process_flags(), *modes)

    @contextmanager
    def set(self) -> Iterator[None]:
        """Sets these modes in this thread for a block."""
        flags = process_flags()
        with ExitStack() as stack:
            stack.callback(set_process_flags, flags)
            set_process_flags(self.flags)
            stack.enter_context(
                _stack(self.functions, function_modes, push_function_mode, pop_function_mode)
            )
            stack.enter_context(
                _stack(self.dispatches, dispatch_modes, push_dispatch_mode, pop_dispatch_mode)
            )
            stack.enter_context(torch.enable_grad())
            for kind, is_on, dtype in self.autocast:
                if is_on or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled=is_on, cache_enabled=self.is_cached)
                    )
            yield


def in_same_modes(
    function: Callable[[], torch.Tensor | None], device: torch.device
) -> Callable[[], torch.Tensor | None]:
    """Returns a function that runs in another thread with the modes of this thread."""
    modes, num_threads, stream = Modes.now(device), torch.get_num_threads(), None
    if device.type != "cpu":
        stream = torch.get_device_module(device.type).current_stream(device)

    def run() -> torch.Tensor | None:
        # OpenMP counts threads per thread; another count would divide sums differently.
        torch.set_num_threads(num_threads)
        if stream is not None:
            torch.accelerator.set_device_index(stream.device_index)
            torch.accelerator.set_stream(stream)
        with modes.set():
            return function()

    return run


# -- Process --------------------------------------------------------------------------------------

_pid = os.getpid()


def _find_pid() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_find_pid)  # So that no use of a unit asks the kernel.


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = _pid

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the object, and not a fork of it."""
        return _pid == self._pid

    def refuse_others(self) -> None:
        """Raises InfinityError in any other process."""
        if _pid != self._pid:
            raise InfinityError(
                f"expected process {self._pid}, which offloaded the model, got its forked child "
                f"{_pid}; use the model in the parent, give the child what it needs (a "
                "clone, a state_dict), or start it before infinity.offload"
            )
