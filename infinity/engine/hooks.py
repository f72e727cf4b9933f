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
  hook holds the `Stay` alone. So an exit that is reached first holds the units for itself only.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node

from infinity.engine.interrupts import uninterrupted
from infinity.engine.outputs import detach_from_parameters, tensors_in

OUTSIDE_BACKWARD = -1


def current_backward() -> int:
    """An id of the backward that is running in this thread, or OUTSIDE_BACKWARD."""
    return torch._C._current_graph_task_id()


@dataclasses.dataclass(eq=False, slots=True)
class Site:
    """A module that needs units while it runs. `is_block`: one of a list of repeated ones."""

    name: str
    module: nn.Module
    units: list[int]
    is_block: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class Stay:
    """One use of a site (or of single units), from its forward to the end of its backward."""

    units: list[int]
    held_in: int = OUTSIDE_BACKWARD
    exits_left: int = 0


class Residency(Protocol):
    """Holds of units, as hooks see them."""

    takes_turns: bool

    def await_turn(self, units: list[int], *, is_over: bool = False) -> None:
        """Where `takes_turns`: before `enter`, and when a backward is about to go on behind the
        units, their gradients given (`is_over`), other micro-batches come there first."""

    def begin_use(self, site: Site) -> None:
        """A forward of the site begins; nothing is held for it yet."""

    def enter(self, units: list[int]) -> None: ...
    def leave(self, units: list[int]) -> None: ...
    def is_parameter_memory(self, tensor: torch.Tensor) -> bool: ...
    def check_saved(self, units: list[int], nodes: Iterable[Node]) -> None:
        """Raises UnsupportedError if these nodes have saved a weight that is about to be lost."""

    def backward_started(self) -> None: ...
    def backward_ended(self) -> None: ...


class Backwards:
    """Who is held by which running backward."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._stays: dict[Stay, None] = {}
        self._armed: set[int] = set()

    def watch(self, stay: Stay, inner: Iterable[Node], exits: list[Node]) -> None:
        """Arranges that the units are held while the nodes of a forward run in a backward."""
        for node in inner:
            node.register_prehook(lambda gradients: self._reached(stay, exits))
        for node in exits:
            node.register_prehook(lambda gradients: self._reached(stay, ()))
            node.register_hook(lambda inputs, outputs: self._passed(stay))
        if self._residency.takes_turns:
            units = stay.units
            for node in _behind({*inner, *exits}):
                node.register_prehook(
                    lambda gradients: self._residency.await_turn(units, is_over=True)
                )

    def _reached(self, stay: Stay, exits: Iterable[Node]) -> None:
        """A node of the forward is about to run; `exits` is empty when it is one itself."""
        running = current_backward()
        if torch.is_grad_enabled():
            self._follow(stay)
        if stay.held_in == running:
            return
        if self._residency.takes_turns:
            self._residency.await_turn(stay.units)
        with uninterrupted():
            self._arm(running)
            self._residency.enter(stay.units)
            stay.held_in = running
            self._stays[stay] = None
            stay.exits_left = sum(map(torch._C._will_engine_execute_node, exits)) or 1

    def _follow(self, stay: Stay) -> None:
        """This backward is differentiable (`create_graph`): the nodes that the node about to run
        will make have saved the same weights."""
        first = torch.autograd._get_sequence_nr()

        def made(inputs: tuple[torch.Tensor | None, ...], outputs: Any) -> None:
            self.watch(Stay(stay.units), *nodes_since(first, inputs))

        torch._C._current_autograd_node().register_hook(made)

    def _passed(self, stay: Stay) -> None:
        if stay.held_in != current_backward():
            return
        stay.exits_left -= 1
        if stay.exits_left == 0:
            self._release(stay)

    def _release(self, stay: Stay) -> None:
        with uninterrupted():
            del self._stays[stay]
            stay.held_in = OUTSIDE_BACKWARD
            self._residency.leave(stay.units)

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
            for stay in [stay for stay in self._stays if stay.held_in == running]:
                self._release(stay)
            self._residency.backward_ended()

    def abandon(self) -> bool:
        """Lets go of everything a backward that raised has left. Returns whether there was any."""
        if current_backward() != OUTSIDE_BACKWARD or not (self._stays or self._armed):
            return False
        self._armed.clear()
        for stay in list(self._stays):
            self._release(stay)
        return True


class SiteHooks:
    """The forward hooks of one site."""

    def __init__(self, site: Site, residency: Residency, backwards: Backwards) -> None:
        self._site = site
        self._residency = residency
        self._backwards = backwards
        # For every forward of this module that is running, the number of its first node. Nodes are
        # numbered per thread, and several threads may be inside one module at once.
        self._running: dict[int, list[int]] = {}
        self.is_suspended = False  # Somebody else holds the units and watches the backward.

    def install(self) -> list[Any]:
        """Registers the hooks; returns their handles for removal."""
        module = self._site.module
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
                    self._residency.leave(self._site.units)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.is_suspended:
            return
        if self._residency.takes_turns:
            self._residency.await_turn(self._site.units)
        self._residency.begin_use(self._site)
        with uninterrupted():
            self._residency.enter(self._site.units)
            numbers = self._running.setdefault(threading.get_ident(), [])
            numbers.append(torch.autograd._get_sequence_nr())

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
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
                self._residency.leave(self._site.units)

    def _watch(self, first: int, output: Any) -> None:
        inner, exits = nodes_since(first, output)
        self._residency.check_saved(self._site.units, [*inner, *exits])
        self._backwards.watch(Stay(self._site.units), inner, exits)


# AccumulateGrad nodes carry the highest number there is.
_ACCUMULATES = 2**64 - 1


def nodes_since(first: int, output: Any) -> tuple[list[Node], list[Node]]:
    """The nodes numbered `first` or higher that the output's tensors reach: (inner nodes,
    exits)."""

    def is_new(node: Node | None) -> bool:
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
