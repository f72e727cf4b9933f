"""Whether micro-batches that pass blocks together would have the bits of the plain order.

Some micro-batches run in the plain order, and this file looks at what they do. The layer-major
order draws other random numbers, and keeps the order of sums and of changes only where it can. So a
default may choose it only where nothing is found here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from infinity.modules.accumulate.boundary import versions_of
from infinity.modules.accumulate.fiber import Random
from infinity.modules.accumulate.module_state import ModuleState
from infinity.modules.accumulate.of_transformers import CapturedTensors
from infinity.modules.accumulate.proof import Proof
from infinity.modules.accumulate.purity import describe, foreign_hook, replaced_forward
from infinity.modules.accumulate.reachable import Reachable, is_alike
from infinity.modules.autograd.forward_nodes import ACCUMULATES, behind, walk
from infinity.modules.autograd.outputs import tensors_in
from infinity.private.torch import get_sequence_nr, tree_leaves
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward

_OTHERWISE = ", and gradients would be added in another order"


def why_differs(model: nn.Module) -> str | None:
    """Returns what in the model itself may differ in layer-major order, or None."""
    if (cause := why_forwards_differ(model)) is not None:
        return cause
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and parameter.requires_grad:
            return f"{first} and {name} are one weight{_OTHERWISE}"
    return None


def why_forwards_differ(model: nn.Module) -> str | None:
    """Returns what may differ in forwards alone, or None."""
    if (found := foreign_hook(dict(model.named_modules()))) is not None:
        return f"{found[0]} has the forward hook {describe(found[1])}"
    if (name := replaced_forward(model)) is not None:
        return f"the forward of {name} is replaced"
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", None) and getattr(config, "use_cache", None):
            return "its cache of keys and values changes roundings: set config.use_cache = False"
    return None


class Trial:
    """Looks at `num_left` micro-batches that run in the plain order. `cause`: what was found, or
    None.

    is_alone: the micro-batches will pass the blocks one by one, so that nothing but sums can differ
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], num_left: int, *, is_alone: bool
    ) -> None:
        self.cause: str | None = None
        self.num_left = num_left
        self._model = model
        self._blocks = {block: number for number, block in enumerate(blocks)}
        self._is_alone = is_alone
        devices = {parameter.device for parameter in model.parameters()}
        self._random = Random(next((d for d in devices if d.type != "cpu"), torch.device("cpu")))
        self._calls: list[tuple[int, int, int]] = []  # Block, first node, node behind the last.
        self._began: list[tuple[int, list[Any], list[int | None], CapturedTensors]] = []
        self._exits: set[Node] = set()  # The nodes of what blocks have returned.
        self._order: list[int] | None = None
        self._num_losses = 0
        self._is_first = True

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Looks at one micro-batch, from its forward to the end of its backward."""
        attributes = ModuleState(self._model, on_hook=self._note_hook)
        changed = Reachable([("", self._model)], Proof()).watch()
        states = self._random.state()
        self._calls.clear()
        self._num_losses = 0
        handles = [self._model.register_forward_pre_hook(self._note_call)]
        for block in self._blocks:
            handles.append(
                block.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
            )
            handles.append(block.register_forward_hook(self._end))
        try:
            with attributes.watched():
                yield
        finally:
            self._exits.clear()
            for handle in handles:
                handle.remove()
        self.num_left -= 1
        if self._num_losses != 1:
            self._note(f"a micro-batch runs {self._num_losses} backwards")
        order = [number for number, _, _ in self._calls]
        if self._order is not None and order != self._order:
            self._note("micro-batches take different ways through the blocks")
        self._order = order
        if self._is_alone:
            return
        if not is_alike(self._random.state(), states):
            self._note("it draws random numbers (dropout), which would be others")
        # A first forward may prepare what later ones find.
        label = next((c.what() for c in changed()), None) or next(iter(attributes.changed()), None)
        if label is not None and not self._is_first:
            self._note(f"{label} changes from micro-batch to micro-batch")
        self._is_first = False

    def _note(self, cause: str) -> None:
        self.cause = self.cause or cause

    def _note_hook(self, name: str, hook: Any) -> None:
        self._note(f"a micro-batch registers the forward hook {describe(hook)}")

    def _note_call(self, module: nn.Module, args: Any) -> None:
        if current_backward() != OUTSIDE_BACKWARD:
            self._note("the model is called in a backward")

    def _begin(self, block: nn.Module, *arguments: Any) -> None:
        leaves = tree_leaves(arguments)
        self._began.append((get_sequence_nr(), leaves, versions_of(leaves), CapturedTensors()))

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        (first, leaves, versions, captured), last = self._began.pop(), get_sequence_nr()
        if versions != versions_of(leaves):
            self._note("a block changes an argument in place")
        if current_backward() != OUTSIDE_BACKWARD:
            return  # The repeat of a checkpoint.
        self._calls.append((self._blocks[block], first, last))
        tensors = [*tensors_in(output), *captured.tensors()]
        self._exits.update(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
        known = {id(leaf) for leaf in tree_leaves((output, captured.tensors()))}
        if any(tensor.requires_grad and id(tensor) not in known for tensor in tensors):
            self._note(
                "a block returns a tensor inside an object that torch's pytree does not know"
            )

    def look_at(self, loss: torch.Tensor) -> None:
        """Looks at the graph of a loss, before its backward."""
        self._num_losses += 1
        if loss.grad_fn is not None and self.cause is None:
            self.cause = _why_sums_differ(loss.grad_fn, self._calls, self._exits)


def _why_sums_differ(root: Node, calls: list[tuple[int, int, int]], exits: set[Node]) -> str | None:
    """Returns why sums of gradients would have another order, or None.

    exits: the nodes of what blocks have returned
    """
    starts = [first for _, first, _ in calls]

    def place_of(node: Node) -> tuple[int, bool]:
        """Returns how many calls have begun before the node was made, and whether it is inside the
        last of them."""
        number = node._sequence_nr()
        call = bisect_right(starts, number)
        return call, call > 0 and number < calls[call - 1][2]

    uses: dict[Node, set[tuple[int, bool]]] = {}
    waiting: set[Node] = set()  # See Waiting nodes in `between.py`.
    for node in _nodes_behind(root, lambda _: True):
        call, is_inside = place_of(node)
        for found in behind(node):
            if found._sequence_nr() == ACCUMULATES:
                uses.setdefault(found, set()).add((call, is_inside))
                continue
            call_behind, is_behind_inside = place_of(found)
            is_left = is_behind_inside and (call_behind, True) != (call, is_inside)
            if is_left and found not in exits:
                return "a tensor inside a block reaches the loss by another way than its outputs"
            if not is_inside and not is_behind_inside and call_behind < call:
                waiting.add(found)
    for leaf, places_of_leaf in uses.items():
        if len(places_of_leaf) > 1:
            shape = list(leaf.variable.shape)  # type: ignore[attr-defined]
            return f"a weight of the shape {shape} is used in several places{_OTHERWISE}"
    for start in waiting:
        nodes = _nodes_behind(start, lambda node: not place_of(node)[1])
        if any(node in waiting for node in nodes if node is not start):
            return f"tensors between blocks lead to each other{_OTHERWISE}"
    return None


def _nodes_behind(root: Node, is_entered: Callable[[Node], bool]) -> Iterator[Node]:
    """Yields the node and all nodes behind it that are entered, except leaves."""

    def entered(node: Node) -> Iterator[Node]:
        return (n for n in behind(node) if n._sequence_nr() != ACCUMULATES and is_entered(n))

    return walk([root], entered)
