"""The moments in a module's life at which weights are needed, and the order they come in.

  pre-forward    the site's units are held; inputs that need gradients enter through an alias
  post-forward   the hold ends; every output that needs a gradient remembers this use
  pre-backward   the first gradient to reach one of those outputs holds the units again
  post-backward  the gradients of all inputs are done: the hold ends
  end            of a backward: whatever is still held is let go (a first unit's inputs need no
                 gradient, an input may be unused)

Note [Nodes, not tensors]
  The hooks sit on autograd nodes. A hook on an output tensor is lost when the output is a view and is
  later changed in place; a full backward hook makes outputs views, which an in-place operation then
  refuses, and fires before the children when no input needs a gradient. An alias (`view_as`) per
  input costs nothing, keeps in-place operations legal, and its node runs exactly when this use has
  handed back its input's gradient, no matter who else uses the same tensor.

Note [No cycles]
  A node's hook must not reach the node again, or the graph is never freed. An output's hook holds the
  input nodes (graphs point that way anyway); an input's hook holds only the `Stay`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node

from infinity.errors import UnsupportedError

OUTSIDE_BACKWARD = -1


def current_backward() -> int:
    """An id of the backward that is running in this thread, or OUTSIDE_BACKWARD."""
    return torch._C._current_graph_task_id()


@dataclasses.dataclass(eq=False, slots=True)
class Site:
    """A module that needs units while it runs."""

    name: str
    module: nn.Module
    units: list[int]


@dataclasses.dataclass(eq=False, slots=True)
class Stay:
    """One use of a site (or of single units), from its forward to the end of its backward."""

    name: str
    units: list[int]
    forward_in: int  # The backward this forward is a recomputation in, or OUTSIDE_BACKWARD.
    held_in: int = OUTSIDE_BACKWARD
    entrances_left: int = 0


class Residency(Protocol):
    """The engine, as hooks see it."""

    def enter(self, units: list[int]) -> None: ...
    def leave(self, units: list[int]) -> None: ...
    def is_parameter_memory(self, tensor: torch.Tensor) -> bool: ...
    def backward_started(self) -> None: ...
    def backward_ended(self) -> None: ...


class Backwards:
    """Who is held by which running backward."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._stays: dict[Stay, None] = {}
        self._armed: set[int] = set()

    def watch(self, stay: Stay, output: torch.Tensor, entrances: list[Node]) -> None:
        """Arranges that the first gradient to reach `output` holds the stay's units."""
        node = output.grad_fn
        assert node is not None
        node.register_prehook(lambda gradients: self._reached(stay, entrances))

    def leave_through(self, stay: Stay, entrance: Node) -> None:
        """Arranges that the hold ends when this entrance, and all others, have been passed."""
        entrance.register_hook(lambda inputs, outputs: self._passed(stay))

    def _reached(self, stay: Stay, entrances: list[Node]) -> None:
        running = current_backward()
        if stay.held_in == running:
            return
        if stay.forward_in not in (OUTSIDE_BACKWARD, running):
            raise UnsupportedError(
                f"{stay.name!r} is recomputed by reentrant activation checkpointing, which hides "
                "the backward from the engine; use use_reentrant=False "
                "(gradient_checkpointing_kwargs={'use_reentrant': False} in transformers)"
            )
        self._arm(running)
        self._residency.enter(stay.units)
        stay.held_in = running
        self._stays[stay] = None
        stay.entrances_left = sum(map(torch._C._will_engine_execute_node, entrances))

    def _passed(self, stay: Stay) -> None:
        if stay.held_in != current_backward():
            return
        stay.entrances_left -= 1
        if stay.entrances_left == 0:
            self._release(stay)

    def _release(self, stay: Stay) -> None:
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
        # One entry per forward of this module that is running: recursion is legal.
        self._running: list[_Running] = []

    def install(self) -> list[Any]:
        """Registers the hooks; returns their handles for removal."""
        module = self._site.module
        return [
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def reset(self) -> None:
        """Forgets forwards that were left by an exception that hooks do not see."""
        while self._running:
            self._running.pop()
            self._residency.leave(self._site.units)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._residency.enter(self._site.units)
        running = _Running()
        self._running.append(running)
        if not torch.is_grad_enabled():
            return args, kwargs

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or tensor.layout is not torch.strided:
                return tensor
            aliased = tensor.view_as(tensor)
            assert aliased.grad_fn is not None
            running.entrances.append(aliased.grad_fn)
            running.passed_through.update((id(tensor), id(aliased)))
            running.kept.extend((tensor, aliased))  # So that no id is used again meanwhile.
            return aliased

        return map_tensors(args, alias), map_tensors(kwargs, alias)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not self._running:
            return output  # The pre-forward itself raised.
        running = self._running.pop()
        try:
            return self._watch(running, output) if output is not None else output
        finally:
            self._residency.leave(self._site.units)

    def _watch(self, running: _Running, output: Any) -> Any:
        output = detach_from_parameters(output, self._residency.is_parameter_memory)
        if not torch.is_grad_enabled():
            return output
        stay = Stay(self._site.name, self._site.units, current_backward())
        for entrance in running.entrances:
            self._backwards.leave_through(stay, entrance)
        for tensor in tensors_in(output):
            if tensor.grad_fn is None or id(tensor) in running.passed_through:
                continue
            self._backwards.watch(stay, tensor, running.entrances)
            base = tensor._base
            if base is not None and base.grad_fn is not None and not running.saw(base):
                # An in-place change of this view would cut its own node out of the graph.
                self._backwards.watch(stay, base, running.entrances)
        return output


class _Running:
    """One forward in progress: what came in."""

    __slots__ = ("entrances", "kept", "passed_through")

    def __init__(self) -> None:
        self.entrances: list[Node] = []
        self.passed_through: set[int] = set()
        self.kept: list[torch.Tensor] = []

    def saw(self, base: torch.Tensor) -> bool:
        return any(base is tensor or base is tensor._base for tensor in self.kept)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of tuples, lists and dicts with every tensor changed. Others are kept as is."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) is tuple:
        return tuple(map_tensors(each, change) for each in tree)
    if type(tree) is list:
        return [map_tensors(each, change) for each in tree]
    if type(tree) is dict:
        return {key: map_tensors(value, change) for key, value in tree.items()}
    return tree


def tensors_in(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in an output: containers, mappings, dataclasses, and plain objects' attributes."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth > 6:
        return
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value, depth + 1)
    elif isinstance(tree, (tuple, list, set)):
        for each in tree:
            yield from tensors_in(each, depth + 1)
    elif hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)) and not callable(tree):
        for value in vars(tree).values():
            yield from tensors_in(value, depth + 1)


def detach_from_parameters(
    output: Any, is_parameter_memory: Callable[[torch.Tensor], bool]
) -> Any:
    """The output with every view of a parameter replaced by a copy, in place where it is mutable.

    A parameter's memory goes away when its module is left; class tokens and latents are returned as
    views of it.
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if is_parameter_memory(output) else output
    if isinstance(output, tuple):
        parts = [detach_from_parameters(each, is_parameter_memory) for each in output]
        if all(new is old for new, old in zip(parts, output, strict=True)):
            return output
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
    if isinstance(output, list):
        for index, each in enumerate(output):
            output[index] = detach_from_parameters(each, is_parameter_memory)
    elif isinstance(output, Mapping):
        for key, value in list(output.items()):
            changed = detach_from_parameters(value, is_parameter_memory)
            if changed is not value:
                output[key] = changed  # type: ignore[index]
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for each in dataclasses.fields(output):
            value = getattr(output, each.name, None)
            changed = detach_from_parameters(value, is_parameter_memory)
            if changed is not value:
                setattr(output, each.name, changed)
    return output
