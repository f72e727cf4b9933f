"""The moments in a module's life at which weights are needed, and the order they come in.

  pre-forward    the site's units are held
  post-forward   the hold ends; the nodes of the autograd graph that this forward made are found
  pre-backward   the first gradient to reach one of its outputs holds the units again
  post-backward  the last of its nodes has run: the hold ends
  end            of a backward: whatever is still held is let go (an exception, a fault)

Note [Nodes of a forward]
  Autograd numbers nodes as it makes them, so the nodes of this forward are those at or above the
  number at its start that its outputs reach. Each of them gets a hook that holds the units before
  it runs: also a backward that enters in the middle, through a tensor the module put aside (a
  router's auxiliary loss), finds them. Its *exits* are the nodes with no next node among them:
  every node of the forward lies before an exit, so when all exits have run the site's backward is
  over, whatever else uses the same tensors. Nothing is put between the module and its inputs: an
  alias or an identity function there would add gradients up in another order, which changes bits,
  and would make some in-place operations illegal.

Note [Nodes, not tensors]
  A hook on an output tensor is lost when the output is a view and is later changed in place; a full
  backward hook makes outputs views, which an in-place operation then refuses, and fires before the
  children when no input needs a gradient.

Note [No cycles]
  A node's hook must not reach the node again, or the graph, with all it saved, waits for the
  garbage collector. An inner node's hook holds the exits (graphs point that way anyway), an exit's
  hook holds the `ModuleCall` alone. So an exit that is reached first holds the units for itself
  only.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node

from infinity.errors import UnsupportedError
from infinity.modules.interrupts import uninterrupted
from infinity.modules.outputs import detach_from_parameters, tensors_in
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward


@dataclasses.dataclass(eq=False, slots=True)
class HookedModule:
    """A module that needs units while it runs. `is_block`: one of a list of repeated ones."""

    name: str
    module: nn.Module
    units: list[int]
    is_block: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class ModuleCall:
    """One use of a site (or of single units), from its forward to the end of its backward."""

    units: list[int]
    backward_id: int = OUTSIDE_BACKWARD
    exits_left: int = 0


class Uses(Protocol):
    """Holds of units, as hooks see them."""

    @property
    def yields_at_tiles(self) -> bool: ...

    def yield_at_tile(self, units: list[int], *, is_over: bool = False) -> None:
        """Where `yields_at_tiles`: before `enter`, and when a backward is about to go on behind the
        units, their gradients given (`is_over`), other micro-batches come there first."""

    def begin_use(self, hooked: HookedModule) -> None:
        """A forward of the site begins; nothing is held for it yet."""

    def enter(self, units: list[int]) -> None: ...
    def leave(self, units: list[int]) -> None: ...
    def is_parameter_memory(self, tensor: torch.Tensor) -> bool: ...
    def check_saved(self, units: list[int], nodes: Iterable[Node]) -> None:
        """Raises UnsupportedError if these nodes have saved a weight that is about to be lost."""

    def backward_started(self) -> None: ...
    def backward_ended(self) -> None: ...


class BackwardCalls:
    """Who is held by which running backward."""

    def __init__(self, residency: Uses) -> None:
        self._residency = residency
        self._calls: dict[ModuleCall, None] = {}
        self._armed: set[int] = set()

    def watch(self, call: ModuleCall, inner: Iterable[Node], exits: list[Node]) -> None:
        """Arranges that the units are held while the nodes of a forward run in a backward."""
        for node in inner:
            node.register_prehook(lambda gradients: self._reached(call, exits))
        for node in exits:
            node.register_prehook(lambda gradients: self._reached(call, ()))
            node.register_hook(lambda inputs, outputs: self._passed(call))
        if self._residency.yields_at_tiles:
            units = call.units
            for node in _behind({*inner, *exits}):
                node.register_prehook(
                    lambda gradients: self._residency.yield_at_tile(units, is_over=True)
                )

    def _reached(self, call: ModuleCall, exits: Iterable[Node]) -> None:
        """A node of the forward is about to run; `exits` is empty when it is one itself."""
        running = current_backward()
        if torch.is_grad_enabled():
            self._follow(call)
        if call.backward_id == running:
            return
        if self._residency.yields_at_tiles:
            self._residency.yield_at_tile(call.units)
        with uninterrupted():
            self._arm(running)
            self._residency.enter(call.units)
            call.backward_id = running
            self._calls[call] = None
            call.exits_left = sum(map(torch._C._will_engine_execute_node, exits)) or 1

    def _follow(self, call: ModuleCall) -> None:
        """This backward is differentiable (`create_graph`): the nodes that the node about to run
        will make have saved the same weights."""
        first = torch.autograd._get_sequence_nr()

        def made(inputs: tuple[torch.Tensor | None, ...], outputs: Any) -> None:
            self.watch(ModuleCall(call.units), *nodes_since(first, inputs))

        torch._C._current_autograd_node().register_hook(made)

    def _passed(self, call: ModuleCall) -> None:
        if call.backward_id != current_backward():
            return
        call.exits_left -= 1
        if call.exits_left == 0:
            self._release(call)

    def _release(self, call: ModuleCall) -> None:
        with uninterrupted():
            del self._calls[call]
            call.backward_id = OUTSIDE_BACKWARD
            self._residency.leave(call.units)

    def _arm(self, running: int) -> None:
        """Asks autograd to call back when this backward is over. Once per backward."""
        if running not in self._armed:
            self._armed.add(running)
            self._residency.backward_started()
            Variable._execution_engine.queue_callback(lambda: self._ended(running))

    def ensure_armed(self) -> None:
        """For gradients that arrive without any site having been entered."""
        running = current_backward()
        if running != OUTSIDE_BACKWARD:
            self._arm(running)

    def _ended(self, running: int) -> None:
        with uninterrupted():
            self._armed.discard(running)
            for call in [call for call in self._calls if call.backward_id == running]:
                self._release(call)
            self._residency.backward_ended()

    def abandon(self) -> bool:
        """Lets go of everything a backward that raised has left. Returns whether there was any."""
        if current_backward() != OUTSIDE_BACKWARD or not (self._calls or self._armed):
            return False
        self._armed.clear()
        for call in list(self._calls):
            self._release(call)
        return True


def outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile breaks its graph here; `reason` is what it says where it must not."""
    reason = (
        "infinity fetches a module's weights between graphs: leave out fullgraph=True, or compile "
        "functions that are called inside of modules and own no parameters"
    )
    disabled: Callable[..., Any] = torch._dynamo.disable(hook, reason=reason)
    return disabled


def refuse_jit() -> NoReturn:
    """For torch.jit.script and torch.jit.trace, which look into modules."""
    raise UnsupportedError(
        "torch.jit cannot compile a module whose parameters are fetched while it runs; script or "
        "trace the model before infinity.offload, or export its weights with "
        "infinity.checkpoint.export_safetensors and trace a plain model that loads them"
    )


class Unscriptable:
    """Says to torch.jit.script that a module cannot be compiled; until it is removed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.__dict__["__prepare_scriptable__"] = refuse_jit

    def remove(self) -> None:
        self._module.__dict__.pop("__prepare_scriptable__", None)


class ModuleHooks:
    """The forward hooks of one site."""

    def __init__(self, hooked: HookedModule, residency: Uses, backwards: BackwardCalls) -> None:
        self._hooked = hooked
        self._residency = residency
        self._backwards = backwards
        # For every forward of this module that is running, the number of its first node. Nodes are
        # numbered per thread, and several threads may be inside one module at once.
        self._running: dict[int, list[int]] = {}
        self.is_suspended = False  # Somebody else holds the units and watches the backward.

    def install(self) -> list[Any]:
        """Registers the hooks; returns their handles for removal."""
        module = self._hooked.module
        return [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def reset(self) -> None:
        """Forgets forwards that were left by an exception that hooks do not see."""
        with uninterrupted():
            while self._running:
                _, numbers = self._running.popitem()
                for _ in numbers:
                    self._residency.leave(self._hooked.units)

    @outside_graphs
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._get_tracing_state() is not None:
            refuse_jit()
        if self.is_suspended:
            return
        if self._residency.yields_at_tiles:
            self._residency.yield_at_tile(self._hooked.units)
        self._residency.begin_use(self._hooked)
        with uninterrupted():
            self._residency.enter(self._hooked.units)
            numbers = self._running.setdefault(threading.get_ident(), [])
            numbers.append(torch.autograd._get_sequence_nr())

    @outside_graphs
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        numbers = self._running.get(threading.get_ident())
        if not numbers:
            return output  # The pre-forward itself raised.
        with uninterrupted():
            first = numbers.pop()
            if not numbers:
                del self._running[threading.get_ident()]
            try:
                output = detach_from_parameters(output, self._residency.is_parameter_memory)
                if output is not None and torch.is_grad_enabled():
                    self._watch(first, output)
                return output
            finally:
                self._residency.leave(self._hooked.units)

    def _watch(self, first: int, output: Any) -> None:
        inner, exits = nodes_since(first, output)
        self._residency.check_saved(self._hooked.units, [*inner, *exits])
        self._backwards.watch(ModuleCall(self._hooked.units), inner, exits)


# AccumulateGrad nodes carry the highest number there is.
_ACCUMULATES = 2**64 - 1


def nodes_since(first: int, output: Any) -> tuple[list[Node], list[Node]]:
    """The nodes numbered `first` or higher that the output's tensors reach: (inner nodes,
    exits)."""

    def is_new(node: Node | None) -> TypeGuard[Node]:
        return node is not None and first <= node._sequence_nr() < _ACCUMULATES

    inner: list[Node] = []
    exits: list[Node] = []
    seen = {t.grad_fn for t in tensors_in(output) if is_new(t.grad_fn)}
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        behind = [following for following, _ in node.next_functions if is_new(following)]
        (inner if behind else exits).append(node)
        fresh = set(behind) - seen
        seen |= fresh
        waiting.extend(fresh)
    return inner, exits


def _behind(nodes: set[Node]) -> set[Node]:
    """The nodes that these hand gradients to, but for those of parameters."""
    following = {each for node in nodes for each, _ in node.next_functions if each is not None}
    return {each for each in following - nodes if each._sequence_nr() < _ACCUMULATES}
