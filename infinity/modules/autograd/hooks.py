"""Hooks that acquire the units of a module before its forward and backward, and release them after.

  pre-forward      acquires the units of the hooked module
  post-forward     releases the units; finds the autograd nodes that this forward has made
  pre-backward     the first gradient that reaches one of these nodes acquires the units again;
                   `forward_nodes.py` says which nodes need a hook
  post-backward    the last of these nodes has run: releases the units
  end of backward  releases every unit that is still in use (after an exception or a fault)

Note [Nodes, not tensors]
  A hook on an output tensor is lost if the output is a view and is changed in place later. A full
  backward hook turns outputs into views, which in-place operations then refuse; if no input needs a
  gradient, the full backward hook fires before the backward of the children.

Note [No cycles]
  If a node's hook refers to the node, the graph and all saved tensors live until the garbage
  collector runs. The hook of an inner node therefore refers to the exits only (as the graph does),
  and the hook of an exit refers to the `ModuleCall` only. An exit that is reached first acquires
  the units for itself only.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from typing_extensions import override

from infinity.errors import InfinityError, UnsupportedError
from infinity.modules.autograd.forward_nodes import (
    ForwardNodes,
    call_before_each,
    nodes_behind,
    nodes_since,
)
from infinity.modules.autograd.outputs import detach_from_parameters
from infinity.modules.autograd.threads import (
    LOOKS_S,
    PATIENCE_S,
    is_backward_elsewhere,
    is_in_module,
    is_nested_backward,
    thread_of_backward,
)
from infinity.modules.autograd.uses import Lent, UnitUses
from infinity.modules.handles.torch_functions import outside_graphs
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.modules.reading.discover import HookedModule
from infinity.private.torch import (
    current_autograd_node,
    get_sequence_nr,
    get_tracing_state,
    peek_interpreter_stack,
    will_engine_execute_node,
)
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward


@dataclasses.dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a hooked module, or one use of single units, from forward to end of backward."""

    units: list[int]
    lent: Lent = ()
    backward_id: int = OUTSIDE_BACKWARD
    exits_left: int = 0
    streams: set[Hashable] = dataclasses.field(default_factory=set)  # Of its backward so far.


_running_transform: Callable[[], Any] = peek_interpreter_stack
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
# Of layer-major order, whose micro-batches run in threads of their own that have its context.
is_in_sweep: ContextVar[bool] = ContextVar("is_in_sweep", default=False)
_FAILED = 1  # No thread has this identity.


class BackwardCalls:
    """The module calls whose units each running backward has acquired."""

    def __init__(self, uses: UnitUses) -> None:
        self._uses = uses
        self._calls: dict[ModuleCall, None] = {}
        # The backwards whose end calls `_ended`, each with its thread; see `thread_of_backward`.
        self.armed: dict[int, int] = {}
        self._showing: list[int] = []  # The threads that show gradients.

    def watch(self, call: ModuleCall, nodes: ForwardNodes) -> None:
        """Registers hooks that keep the units in use while these nodes run in a backward."""
        exits = nodes.exits
        call_before_each(nodes.guarded, self._before(call, exits))
        call_before_each(exits, self._before(call, ()))
        for node in exits:
            node.register_hook(functools.partial(self._passed, call))
        on_tile, units = self._uses.on_tile, call.units
        if on_tile is not None:
            for node in nodes_behind({*nodes.inner, *exits}):
                node.register_prehook(lambda gradients: self._yield_behind(units))

    def _yield_behind(self, units: list[int]) -> None:
        if self._uses.on_tile is not None:
            self._uses.on_tile(units, True)

    def _before(self, call: ModuleCall, exits: Iterable[Node]) -> Callable[[Any], None]:
        """Returns the hook before a node of the forward. `exits` is empty if the node is an exit
        itself. Most nodes find the units in use, so that case makes no further call."""
        current_stream = self._uses.current_stream

        def reached(gradients: Any) -> None:
            running = current_backward()
            if call.backward_id != running or _is_grad_enabled():
                self._reached(call, exits)
            elif current_stream is not None and current_stream() not in call.streams:
                self._join(call)

        return reached

    def _join(self, call: ModuleCall) -> None:
        """A node of the call is on a stream that the first one was not on."""
        assert self._uses.current_stream is not None
        self._uses.join(call.units)
        call.streams.add(self._uses.current_stream())

    def _reached(self, call: ModuleCall, exits: Iterable[Node]) -> None:
        """A gradient has come to a node. If the gradient alone is asked for, the node does not run;
        a hook of the node itself runs with it, after this one."""

        def runs(gradients: Any) -> None:
            handle.remove()
            self._enter(call, exits)

        node = current_autograd_node()
        if node is None:
            raise UnsupportedError(
                "torch._dynamo.config.compiled_autograd makes one graph of a backward, between "
                "whose nodes infinity fetches weights; leave it out, and compile the blocks"
            )
        handle = node.register_prehook(runs)

    def _enter(self, call: ModuleCall, exits: Iterable[Node]) -> None:
        running = current_backward()
        if torch.is_grad_enabled():
            self._follow(call)
        if call.backward_id == running:
            return
        if self._uses.on_tile is not None:
            self._uses.on_tile(call.units, False)
        if running not in self.armed:
            self._begin_alone(lambda: self._arm(running), is_backward=True)
        with UNINTERRUPTED:
            self._uses.enter(call.units, call.lent)
            if self._uses.current_stream is not None:
                call.streams = {self._uses.current_stream()}
            call.backward_id = running
            self._calls[call] = None
            call.exits_left = sum(map(will_engine_execute_node, exits)) or 1

    def _follow(self, call: ModuleCall) -> None:
        """Watches the nodes that the current node makes in a differentiable backward
        (`create_graph`), because these nodes save the same weights."""
        first = get_sequence_nr()

        def made(inputs: tuple[torch.Tensor | None, ...], outputs: Any) -> None:
            self.watch(ModuleCall(call.units, call.lent), nodes_since(first, inputs))

        current_autograd_node().register_hook(made)

    def _passed(self, call: ModuleCall, inputs: Any, outputs: Any) -> None:
        if call.backward_id != current_backward():
            return
        call.exits_left -= 1
        if call.exits_left == 0:
            self._release(call)

    def _release(self, call: ModuleCall) -> None:
        with UNINTERRUPTED:
            del self._calls[call]
            call.backward_id = OUTSIDE_BACKWARD
            self._uses.leave(call.units)

    def _begin_alone(self, begin: Callable[[], None], *, is_backward: bool) -> None:
        """Calls `begin` once no other thread runs a backward or a sweep or, for a backward, shows
        gradients: of those that two threads add to one parameter some would be lost."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            with UNINTERRUPTED, self._uses.lock:
                if is_backward and not is_nested_backward():  # Earlier ones of this thread failed.
                    failed = [n for n, thread in [*self.armed.items()] if thread == get_ident()]
                    self.armed.update(dict.fromkeys(failed, _FAILED))
                others = [thread for thread in [*self.armed.values()] if thread]
                awaited = ""
                if self._uses.passes.is_layer_major:
                    awaited = "runs infinity.forward_backward or infinity.forward"
                elif is_backward and any(thread != get_ident() for thread in self._showing):
                    awaited = "is inside infinity.gather(), which shows gradients"
                # A thread of a device runs all backwards, and fibers run one by one.
                is_one = is_backward and not thread_of_backward()
                if is_one or is_in_sweep.get() or not (awaited or is_backward_elsewhere(others)):
                    return begin()
            if awaited and time.monotonic() > until_s:
                what = "a backward" if is_backward else "infinity.gather()"
                raise InfinityError(f"{what} while another thread {awaited}; call it afterwards")
            time.sleep(LOOKS_S)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Gradients are shown on parameters: backwards of other threads wait."""
        thread = get_ident()
        self._begin_alone(lambda: self._showing.append(thread), is_backward=False)
        try:
            yield
        finally:
            self._showing.remove(thread)

    def _arm(self, running: int) -> None:
        """Queues a callback for the end of this backward, once per backward. One that is nested in
        another, of which more is to come, is a part of that."""
        if running not in self.armed:
            is_part = bool(self.armed) and is_nested_backward()
            self.armed[running] = thread_of_backward()
            if not is_part:
                self._uses.backward_started()
            Variable._execution_engine.queue_callback(lambda: self._ended(running, is_part))

    def ensure_armed(self) -> None:
        """Queues the callback for gradients that arrive before any hooked module is entered."""
        running = current_backward()
        if running not in self.armed and running != OUTSIDE_BACKWARD:
            self._arm(running)

    def _ended(self, running: int, is_part: bool) -> None:
        with UNINTERRUPTED:
            with self._uses.lock:
                self.armed.pop(running, None)
                # INV-6: nothing stays in use after a backward, nor after an exception.
                for call in [call for call in self._calls if call.backward_id == running]:
                    self._release(call)
            if not is_part:
                self._uses.backward_ended()

    def abandon(self) -> bool:
        """Releases the units that a failed backward has left in use. Returns whether there were
        any."""
        if current_backward() != OUTSIDE_BACKWARD or not (self._calls or self.armed):
            return False
        if is_backward_elsewhere(self.armed.values()):
            return False
        self.armed.clear()
        for call in list(self._calls):
            self._release(call)
        return True


between_graphs = outside_graphs(
    "infinity fetches the weights of a module between graphs; leave out fullgraph=True, or "
    "compile functions that own no parameters and are called inside modules"
)


def refuse_jit() -> NoReturn:
    """Refuses torch.jit.script and torch.jit.trace, which read the parameters of modules."""
    raise UnsupportedError(
        "torch.jit cannot compile a module whose parameters are fetched while it runs; script or "
        "trace the model before infinity.offload, or export its weights with "
        "infinity.checkpoint.export_safetensors and trace a plain model that loads them"
    )


class OwnHook(functools.partial[Any]):
    """A hook in a module of the user. A copy or a pickle of the module has a hook that does
    nothing, of the standard library, in its place."""

    @override
    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # Takes any arguments, returns None.


class Unscriptable:
    """Makes torch.jit.script refuse a module, until `remove`, and no copy of it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.__dict__["__prepare_scriptable__"] = self

    def __call__(self) -> NoReturn:
        """Refuses the module."""
        refuse_jit()

    def __reduce__(self) -> Any:
        return getattr, (self._module, "to")  # Without arguments it returns the module.

    def remove(self) -> None:
        """Allows torch.jit.script again."""
        self._module.__dict__.pop("__prepare_scriptable__", None)


class HeldByCaller(nn.Module):
    """A module whose caller keeps its units for a forward and a backward, one after the other."""

    # Of `ModuleHooks`, while the module is offloaded.
    held: Callable[[], AbstractContextManager[list[int]]] = staticmethod(lambda: nullcontext([]))


class ModuleHooks:
    """The forward hooks of one hooked module."""

    def __init__(
        self,
        hooked: HookedModule,
        uses: UnitUses,
        backwards: BackwardCalls,
        begin: Callable[[HookedModule], None],
    ) -> None:
        self.hooked = hooked
        self._uses = uses
        self._backwards = backwards
        self._begin = begin  # Called before the units are acquired for a forward.
        # The number of the first node of every running forward of this module. Autograd numbers
        # nodes per thread, and several threads may run the module at the same time.
        self._running: dict[int, list[int]] = {}
        self._is_suspended = False

    def install(self) -> list[Any]:
        """Registers the hooks; returns their handles for removal."""
        module = self.hooked.module
        if isinstance(module, HeldByCaller):
            module.__dict__["held"] = self.held
        return [
            module.register_forward_pre_hook(OwnHook(self._before), prepend=True),
            module.register_forward_hook(OwnHook(self._after), always_call=True),
        ]

    @contextmanager
    def held(self) -> Iterator[list[int]]:
        """Keeps the units in use for the time of a `with` block, and suspends the hooks."""
        self._begin(self.hooked)
        with UNINTERRUPTED:
            self._backwards.ensure_armed()
        with self.suspended(), self._uses.using(self.hooked.units, is_of_pass=True):
            yield self.hooked.units

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Makes the hooks do nothing: the caller acquires the units and watches the backward."""
        was_suspended, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = was_suspended

    @property
    def threads(self) -> Collection[int]:
        """The threads that run a forward of the module."""
        return self._running.keys()

    def reset(self) -> None:
        """Forgets forwards that ended by an exception, which hooks do not see. Those of other
        threads may still run."""
        for thread in list(self._running):
            if thread != get_ident() and is_in_module(thread):
                continue
            with UNINTERRUPTED:
                for _ in self._running.pop(thread, ()):  # It may have ended since.
                    self._uses.leave(self.hooked.units)

    @between_graphs
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if get_tracing_state() is not None:
            refuse_jit()
        if self._is_suspended:
            return
        if _running_transform() is not None:
            self._uses.refuse_transforms(self.hooked.units)
        if self._uses.on_tile is not None:
            self._uses.on_tile(self.hooked.units, False)
        self._begin(self.hooked)
        with UNINTERRUPTED:
            self._uses.enter(self.hooked.units)
            numbers = self._running.setdefault(get_ident(), [])
            numbers.append(get_sequence_nr())

    @between_graphs
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        numbers = self._running.get(get_ident())
        if not numbers:
            return output  # The pre-forward hook has raised.
        with UNINTERRUPTED:
            first = numbers.pop()
            if not numbers:
                del self._running[get_ident()]
            try:
                output = detach_from_parameters(output, self._uses.param_table.is_parameter_memory)
                if output is not None and torch.is_grad_enabled():
                    self._watch(first, output)
                return output
            finally:
                self._uses.leave(self.hooked.units)

    def _watch(self, first: int, output: Any) -> None:
        nodes = nodes_since(first, output)
        self._uses.check_saved(self.hooked.units, nodes)
        self._backwards.watch(ModuleCall(self.hooked.units), nodes)
