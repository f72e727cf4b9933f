"""The graph of one micro-batch between its blocks, whose backward runs in the order of autograd.

Autograd runs the nodes of a graph in descending order of their numbers, each one once, when all
gradients of its outputs have come. Here the blocks of a graph run at other times than the nodes
between them. A node between blocks therefore waits until the backward of every block that may send
it a gradient is over, and every sum has the terms and the order of plain autograd.

Note [Waiting nodes]
  Before the backward of a block, a node waits that the inputs of this block or of an earlier one
  reach, or that was made before the block ran. Gradients for waiting nodes are captured at their
  edges and become the first terms of the sums that autograd makes later. The leaves of the graph
  (parameters outside of blocks) do not wait: the gradient of a tied embedding would be kept for
  each micro-batch. A parameter with several uses therefore has a sum in another order.

Note [Ends that meet]
  Autograd runs every node that leads to an end, so a waiting node that leads to another end (a
  residual and an earlier skip, both between blocks) cannot wait. Gradients then pass such nodes as
  they come, more than once. The sums behind these nodes are divided and differ by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.boundary import BlockCall, EdgeGradients
from infinity.modules.accumulate.purity import hooked_nodes
from infinity.modules.autograd.forward_nodes import ACCUMULATES, behind, walk
from infinity.private.torch import FunctionBase

Key: TypeAlias = tuple[Node, int]


class GraphBetween:
    """The gradients that wait between the blocks of a micro-batch. Used by one thread at a time."""

    def __init__(self) -> None:
        self._gradients: dict[Key, tuple[GradientEdge, torch.Tensor]] = {}
        # The number of the first call whose inputs reach the node.
        self._reached: dict[Node, int] = {}
        # Autograd counts the nodes of each thread, and a call beside the loss has its own thread.
        self.is_in_one_thread = True
        self.runs_again = False  # Nodes may run more than once. See Ends that meet.
        # Python's object for a node of a custom function does not own the node.
        self._owners: list[GradientEdge] = []

    def note_inputs(self, number: int, nodes: Iterable[Node]) -> None:
        """Notes the nodes that the inputs of a call reach. `number` counts calls."""

        def new(found: Iterable[Node]) -> list[Node]:
            return [node for node in found if node not in self._reached]

        for node in walk(new(nodes), lambda node: new(behind(node))):
            self._reached[node] = number

    def leads_to_blocks(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Whether a backward from `outputs` to `inputs`, tensors or edges, needs that of a block.
        No inputs: a backward to all leaves."""
        walked, ends = set(walk(_nodes_of(outputs))), _nodes_of(inputs)
        if not any(_boundary(node) is not None for node in walked):
            return False
        return not ends or any(node in self._reached or node not in walked for node in ends)

    def put(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Keeps a gradient for the edge. The sum so far was taken before."""
        self._gradients[edge.node, edge.output_nr] = edge, gradient

    def take(self, edge: GradientEdge) -> torch.Tensor | None:
        """Returns the sum of the gradients for the edge and forgets it."""
        found = self._gradients.pop((edge.node, edge.output_nr), None)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forgets the graph."""
        self._gradients.clear()
        self._reached.clear()
        self._owners.clear()

    def run(self, following: BlockCall | None) -> None:
        """Runs the backward of all nodes that do not wait for `following`, the call whose backward
        comes next, or for an earlier call. None: no call is left, and no node waits."""
        due = [key for key in self._gradients if not self._waits(key[0], following, is_root=True)]
        if not due:
            return
        ends = {} if self.runs_again else self._ends(due, following)
        if ends and _lead_to_each_other(ends):
            self.runs_again, ends = True, {}
        if self.runs_again and hooked_nodes:
            raise _calls_twice()
        # Autograd adds the gradients of roots first.
        keys = dict.fromkeys(due) | dict.fromkeys(key for key in ends if key in self._gradients)
        edges, sums = zip(*(self._gradients.pop(key) for key in keys), strict=True)
        if not ends:
            torch.autograd.backward(edges, sums, retain_graph=self.runs_again)
            return
        found = torch.autograd.grad(edges, list(ends.values()), sums, allow_unused=True)
        leaves = []
        for edge, gradient in zip(ends.values(), found, strict=True):
            if gradient is None:
                continue
            if self._waits(edge.node, following):
                if edge.node in hooked_nodes:
                    raise _calls_twice()
                if isinstance(edge.node, FunctionBase):
                    self._owners += edges
                self.put(edge, gradient)
            elif (boundary := _boundary(edge.node)) is not None:
                boundary.add(edge.output_nr, gradient)
            else:
                leaves.append((edge, gradient))
        if leaves:
            _accumulate(leaves)

    def _waits(self, node: Node, following: BlockCall | None, *, is_root: bool = False) -> bool:
        if following is None:
            return False
        number = node._sequence_nr()
        if number == ACCUMULATES:
            return is_root  # A leaf that is an input of blocks gets one sum of all blocks.
        if self._reached.get(node, following.number + 1) <= following.number:
            return True
        return self.is_in_one_thread and number < following.first_node

    def _ends(self, due: list[Key], following: BlockCall | None) -> dict[Key, GradientEdge]:
        """Returns the edges where a backward from `due` ends: those of waiting nodes, boundaries
        and leaves. Empty if no node waits, so that the backward runs them all."""
        ends = {key: self._gradients[key][0] for key in due if _boundary(key[0]) is not None}
        has_waiting = False

        def passed(node: Node) -> Iterator[Node]:
            nonlocal has_waiting
            for found, output_nr in node.next_functions:
                if found is None:
                    continue
                is_waiting = self._waits(found, following)
                has_waiting |= is_waiting
                is_leaf = found._sequence_nr() == ACCUMULATES
                if is_waiting or is_leaf or _boundary(found) is not None:
                    ends[found, output_nr] = GradientEdge(found, output_nr)
                else:
                    yield found

        for _ in walk((node for node, _ in due if _boundary(node) is None), passed):
            pass
        return ends if has_waiting else {}


def _nodes_of(found: Sequence[Any]) -> list[Node]:
    edges = (t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in found)
    return [edge.node for edge in edges]


def _calls_twice() -> UnsupportedError:
    return UnsupportedError(
        "a tensor between blocks has a hook or keeps its gradient (register_hook, retain_grad), "
        "and its gradient comes in parts, each of which would be passed to the hook; accumulate "
        "micro-batches by several backward() calls instead"
    )


def _accumulate(leaves: list[tuple[GradientEdge, torch.Tensor]]) -> None:
    """Passes captured gradients to leaves, whose own hooks the capture has called."""
    hooks = [found for edge, _ in leaves if (found := edge.node.variable._backward_hooks)]  # type: ignore[attr-defined]
    called = [dict(table) for table in hooks]
    for table in hooks:
        table.clear()
    try:
        torch.autograd.backward([edge for edge, _ in leaves], [sums for _, sums in leaves])
    finally:
        for table, own in zip(hooks, called, strict=True):
            table.update(own)


def _lead_to_each_other(ends: dict[Key, GradientEdge]) -> bool:
    """Whether the nodes behind an end lead to another end."""
    nodes = {node for node, _ in ends}
    starts = [node for node in nodes if _boundary(node) is None]
    return any(found in nodes for node in walk(starts) for found in behind(node))


def _boundary(node: Node) -> EdgeGradients | None:
    """Returns the gradients that a boundary has received, or None for another node."""
    found = getattr(node, "edge_gradients", None)
    return found if isinstance(found, EdgeGradients) else None
